"""The token store in Redis: fencing tokens, killed and paused holders, clocks, encryption, and outages of Redis."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from signing_async import AuthError, ConfigurationError, Token, TokenSuperseded
from signing_async.redis import RedisTokenStore
from signing_async.testing import FencedTokenStoreConformance
from tests.auth.oauth_servers import Scripted, WatchedStore, grants, oauth_for
from tests.needs import needs_module
from tests.redis.server import RedisServer, free_port, running_redis, slow_way

ROOT = Path(__file__).parents[2]
OLD = Token("access-old", "refresh-old", datetime(2020, 1, 1, tzinfo=UTC))
NEW = Token("access-new", "refresh-new", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC))
PASSWORD = "pass-word-4711"


# OAuth and a superseded save


class SupersededStore(WatchedStore):
    """A store in which another worker saves during each of the first refreshes."""

    def __init__(self, token: Token, *others: Token) -> None:
        super().__init__(token)
        self.others = list(others)

    async def save(self, token: Token) -> None:
        if self.others:
            await super().save(self.others.pop(0))
            raise TokenSuperseded("another worker was here")
        await super().save(token)


async def test_oauth_uses_the_newer_token_when_its_save_is_superseded() -> None:
    """Nothing more is requested from the server."""
    async with Scripted(grants("mine")) as server:
        store = SupersededStore(OLD, NEW)
        async with oauth_for(server.base_url, store=store) as oauth:
            assert await oauth.refresh(rejected=OLD) == NEW
            assert await oauth.access_token() == "access-new"
        assert len(server.token_requests) == 1
        assert await store.load() == NEW


async def test_oauth_refreshes_a_newer_token_that_has_expired() -> None:
    async with Scripted(grants("mine"), grants("second")) as server:
        later = Token("access-later", "refresh-later", datetime(2021, 1, 1, tzinfo=UTC))
        async with oauth_for(server.base_url, store=SupersededStore(OLD, later)) as oauth:
            assert await oauth.access_token() == "access-second"
        assert [b"refresh-old" in request.body for request in server.token_requests] == [True, False]
        assert b"refresh-later" in server.token_requests[1].body


async def test_oauth_gives_up_when_every_save_is_superseded() -> None:
    async with Scripted(grants("mine")) as server:
        store = SupersededStore(OLD, *[OLD] * 9)
        async with oauth_for(server.base_url, store=store) as oauth:
            with pytest.raises(TokenSuperseded):
                await oauth.access_token()
        assert len(server.token_requests) == 2


# Redis


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    """A Redis shared by all tests that leave it running."""
    with running_redis() as server:
        yield server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis for one test, which may stop it."""
    with running_redis() as server:
        yield server


async def ask(server: RedisServer, *command: Any) -> Any:
    """Return the response to one command."""
    from redis.asyncio import Redis

    async with Redis.from_url(server.url) as client:
        response: Any = client.execute_command(*command)  # redis-py leaves it so
        return await response


async def lease_expired(server: RedisServer, name: str) -> None:
    """Wait until the lock's lease has expired by Redis's clock."""
    until = float(await ask(server, "HGET", f"signing:token-lock:{name}", "until"))
    while True:
        seconds, micros = await ask(server, "TIME")
        if seconds + micros / 1e6 > until:
            return
        await asyncio.sleep(0.02)


async def cut_off(server: RedisServer, store: RedisTokenStore) -> None:
    """Break the holder's connections and keep it from renewing, as a network outage would."""
    from signing_async.redis.tokens import _holds

    (hold,) = _holds.get()
    await hold.stop_renewing()
    await ask(server, "CLIENT", "KILL", "TYPE", "pubsub")
    await lease_expired(server, store.name)


class TestFences(FencedTokenStoreConformance):
    """A worker that lost its lock."""

    @pytest.fixture
    async def open_store(self, request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[Any]:
        """Open the same name again."""
        async with contextlib.AsyncExitStack() as opened:

            def open_store() -> RedisTokenStore:
                store = RedisTokenStore(redis.url, "fenced", lease=0.2, timeout=5)
                opened.push_async_callback(store.aclose)
                return store

            yield open_store

    @pytest.fixture
    def lapse(self, redis: RedisServer) -> Any:
        async def lapse(store: Any) -> None:
            await cut_off(redis, store)

        return lapse


async def test_lease_is_renewed_while_the_lock_is_held(shared: RedisServer) -> None:
    store = RedisTokenStore(shared.url, "renewed", lease=1.5)
    other = RedisTokenStore(shared.url, "renewed", lease=1.5)
    async with store, other, store.lock():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4), other.lock():
                pass


async def test_holder_subscribes_again_when_its_connection_breaks(redis: RedisServer) -> None:
    async with RedisTokenStore(redis.url, "a", lease=0.2) as store, store.lock():
        await ask(redis, "CLIENT", "KILL", "TYPE", "pubsub")
        async with asyncio.timeout(20):
            while not await ask(redis, "PUBSUB", "CHANNELS"):
                await asyncio.sleep(0.02)


async def test_token_saved_outside_the_lock_is_seen_inside_it(shared: RedisServer) -> None:
    """A user authorizes as a refresh begins: the refresh uses the new token, or is superseded."""
    store, other = RedisTokenStore(shared.url, "authorized"), RedisTokenStore(shared.url, "authorized")
    async with store, other:
        await store.save(OLD)
        async with store.lock():
            await other.save(NEW)
            assert await store.load() == NEW
            await store.save(Token("access-newer"))
        assert await other.load() == Token("access-newer")
        async with store.lock():
            await store.load()
            await other.save(NEW)
            with pytest.raises(TokenSuperseded, match=r"RedisTokenStore\('redis://127.0.0.1:\d+', 'authorized'\)"):
                await store.save(OLD)
        assert await store.load() == NEW


@pytest.mark.parametrize("noticed", [False, True])
async def test_lock_lost_before_the_load_is_acquired_again(redis: RedisServer, noticed: bool) -> None:
    """The refresh begins with the newer token."""
    async with RedisTokenStore(redis.url, "a", lease=0.3) as store, RedisTokenStore(redis.url, "a", lease=0.3) as other:
        await store.save(OLD)
        async with store.lock():
            # As if Redis had lost its data, and another worker had acquired the lock.
            await ask(redis, "DEL", "signing:token-lock:a")
            async with other.lock():
                if noticed:
                    await asyncio.sleep(0.25)
                reading = asyncio.create_task(store.load())
                await asyncio.sleep(0.05)
                assert not reading.done()
                await other.save(NEW)
            assert await reading == NEW
            await store.save(Token("access-newer"))
        assert await other.load() == Token("access-newer")


async def test_lock_acquired_for_an_abandoned_request_soon_expires(redis: RedisServer) -> None:
    """A stopped Redis executes the command when it resumes: nobody holds that lock for a whole lease."""
    async with (
        RedisTokenStore(redis.url, "a", lease=120, timeout=0.3) as store,
        RedisTokenStore(redis.url, "a", lease=120, timeout=5) as other,
    ):
        await store.save(OLD)
        async with store.lock():
            pass
        # Opens the connection.
        await store.load()
        redis.stop()
        with pytest.raises(AuthError, match=r"no response within 0\.3 s"):
            await store.lock().__aenter__()
        redis.wake()
        async with asyncio.timeout(30), other.lock():
            assert await other.load() == OLD


async def test_lock_is_released_at_once_if_redis_responds_again(redis: RedisServer) -> None:
    async with (
        RedisTokenStore(redis.url, "a", lease=120, timeout=0.3) as store,
        RedisTokenStore(redis.url, "a", lease=120, timeout=5) as other,
    ):
        async with store.lock():
            # Wait for the first renewal.
            while float(await ask(redis, "HGET", "signing:token-lock:a", "until")) < time.time() + 60:
                await asyncio.sleep(0.01)
            redis.stop()
            with pytest.raises(AuthError, match=r"no response within 0\.3 s"):
                await store.load()
            redis.wake()
            await store.save(NEW)
        async with asyncio.timeout(20), other.lock():
            assert await other.load() == NEW


@pytest.mark.parametrize("again", [False, True])
async def test_lock_is_leased_in_full_after_it_was_acquired(redis: RedisServer, again: bool) -> None:
    lock = "signing:token-lock:whole"
    async with RedisTokenStore(redis.url, "whole", lease=120) as store, store.lock():
        if again:
            # Wait for a renewal: the next one is 40 s away.
            while float(await ask(redis, "HGET", lock, "until")) < time.time() + 60:
                await asyncio.sleep(0.02)
            await ask(redis, "DEL", lock)
            await store.load()
        async with asyncio.timeout(20):
            while float(await ask(redis, "HGET", lock, "until")) < time.time() + 60:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("other", ["tenant:lock", "-lock:tenant", "tenant-lock", "Tenant", "tenant "])
async def test_similar_names_do_not_share_tokens_or_locks(shared: RedisServer, other: str) -> None:
    async with RedisTokenStore(shared.url, "tenant") as one, RedisTokenStore(shared.url, other) as two:
        await one.save(OLD)
        await two.save(NEW)
        async with one.lock(), two.lock():
            assert (await one.load(), await two.load()) == (OLD, NEW)
    for name, kept in (("tenant", OLD), (other, NEW)):
        async with RedisTokenStore(shared.url, name) as store:
            assert await store.load() == kept


async def test_missing_channel_permission_is_an_auth_error(redis: RedisServer) -> None:
    await ask(redis, "ACL", "SETUSER", "app", "on", f">{PASSWORD}", "+@all", "~signing:*", "resetchannels")
    async with RedisTokenStore(redis.url.replace("://", f"://app:{PASSWORD}@"), "a") as store:
        await store.save(NEW)
        with pytest.raises(AuthError, match=r"store is unavailable: .*NoPermissionError") as caught:
            async with store.lock():
                pass
        assert PASSWORD not in str(caught.value)


def worker(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a process that runs a function of this module."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.redis.test_tokens", *arguments], cwd=ROOT, stdout=subprocess.PIPE
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill the process at the end of the block, whatever its state."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def line(process: subprocess.Popen[bytes]) -> bytes:
    """Return the next line that the process writes."""
    assert process.stdout is not None
    return await asyncio.to_thread(process.stdout.readline)


async def hold(url: str, read: str) -> None:
    """Hold the lock, with or without loading the token; then load and save."""
    async with RedisTokenStore(url, "held", lease=0.3) as store:
        async with store.lock():
            if read == "read":
                await store.load()
            print("held", flush=True)
            await asyncio.sleep(0.7)
            token = await store.load()
            print(token.access_token if token else None, flush=True)
            await store.save(Token("saved-by-the-process"))
        print("done", flush=True)


async def refresh(url: str, base_url: str) -> None:
    """Refresh the token."""
    async with (
        RedisTokenStore(url, "held", lease=0.3) as store,
        oauth_for(base_url, store=store, timeout=60.0) as oauth,
    ):
        print(await oauth.access_token(), flush=True)


async def test_lock_of_a_killed_worker_is_acquired_after_its_lease(shared: RedisServer) -> None:
    async with RedisTokenStore(shared.url, "held", lease=0.3) as store:
        await store.save(OLD)
        with ended(worker("hold", shared.url, "read")) as process:
            assert await line(process) == b"held\n"
            process.kill()
            async with asyncio.timeout(20), store.lock():
                assert await store.load() == OLD


async def test_lock_of_a_worker_paused_before_the_load_is_acquired(shared: RedisServer) -> None:
    """It cannot have used the token. When it resumes, it queues again and continues with the newer token."""
    async with RedisTokenStore(shared.url, "held", lease=3) as store:
        await store.save(OLD)
        with ended(worker("hold", shared.url, "unread")) as process:
            assert await line(process) == b"held\n"
            process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(20), store.lock():
                await store.load()
                process.send_signal(signal.SIGCONT)
                await asyncio.sleep(1.0)
                await store.save(NEW)
            assert await line(process) == b"access-new\n"
            assert await line(process) == b"done\n"
        assert await store.load() == Token("saved-by-the-process")


async def test_worker_paused_during_a_refresh_keeps_the_lock(shared: RedisServer) -> None:
    """The refresh token is used once, and the error names the paused process. When it resumes, it saves the token,
    and the others use that.
    """
    requested, respond = asyncio.Event(), asyncio.Event()

    async def slowly(request: Any, received: Any) -> Any:
        requested.set()
        await respond.wait()
        return await grants("second")(request, received)

    async with Scripted(slowly) as server, RedisTokenStore(shared.url, "held", lease=0.3) as store:
        await store.save(OLD)
        with ended(worker("refresh", shared.url, server.base_url)) as process:
            async with oauth_for(server.base_url, store=store) as oauth:
                await requested.wait()
                process.send_signal(signal.SIGSTOP)
                respond.set()
                with pytest.raises(
                    AuthError, match=rf"by process {process.pid} on .*, which has been paused for"
                ) as caught:
                    await oauth.access_token()
                assert caught.value.__context__ is None
                assert caught.value.transient
                process.send_signal(signal.SIGCONT)
                assert await line(process) == b"access-second\n"
                assert await oauth.access_token() == "access-second"
        assert len(server.token_requests) == 1


# Refreshers that may have used the refresh token

TOKEN_KEY, LOCK_KEY = "signing:token:a", "signing:token-lock:a"


@contextlib.asynccontextmanager
async def two_stores(server: RedisServer, **settings: Any) -> AsyncIterator[tuple[RedisTokenStore, RedisTokenStore]]:
    """Open the store of one expired token twice."""
    settings = {"timeout": 5, **settings}
    one, two = RedisTokenStore(server.url, "a", **settings), RedisTokenStore(server.url, "a", **settings)
    async with one, two:
        await ask(server, "DEL", TOKEN_KEY, LOCK_KEY)
        await one.save(OLD)
        yield one, two


async def loaded_in_the_lock(store: RedisTokenStore) -> Token | None:
    """Load as a refresh does."""
    async with store.lock():
        return await store.load()


async def not_yet(task: asyncio.Task[Any], seconds: float) -> None:
    """Check that the task does not end within ``seconds``."""
    await asyncio.wait([task], timeout=seconds)
    assert not task.done()


async def test_refresher_that_lost_the_lock_is_waited_for_while_it_is_alive(shared: RedisServer) -> None:
    """Even for longer than the grace."""
    async with two_stores(shared, lease=3, grace=0.6) as (one, two), one.lock():
        await one.load()
        await ask(shared, "DEL", LOCK_KEY)
        waiting = asyncio.create_task(loaded_in_the_lock(two))
        await not_yet(waiting, 0.8)
        await one.save(NEW)
        assert await asyncio.wait_for(waiting, 20) == NEW


async def test_refresher_gives_signs_of_life_until_it_saves(shared: RedisServer) -> None:
    """If its connection breaks late in a slow token request, the grace begins then."""
    async with two_stores(shared, lease=0.1) as (one, _), one.lock():
        await one.load()
        for key in (LOCK_KEY, "signing:none"):
            before = await ask(shared, "HGET", TOKEN_KEY, "seen")
            async with asyncio.timeout(20):
                while await ask(shared, "HGET", TOKEN_KEY, "seen") == before:
                    await asyncio.sleep(0.02)
            await ask(shared, "DEL", key)


async def test_load_that_outlives_the_lock_does_not_keep_it(shared: RedisServer) -> None:
    async with two_stores(shared, lease=0.3) as (one, two):
        async with one.lock():
            await ask(shared, "DEL", LOCK_KEY)
            async with two.lock():
                waiting = asyncio.create_task(one.load())
                await not_yet(waiting, 0.2)
                ending = asyncio.create_task(asyncio.sleep(0.3))
        async with two.lock():
            await ending
        assert await asyncio.wait_for(waiting, 20) == OLD
        assert not await ask(shared, "EXISTS", LOCK_KEY)


async def test_error_names_a_refresher_that_never_ends(shared: RedisServer) -> None:
    async with two_stores(shared, lease=0.2, grace=0.3) as (one, two), one.lock():
        await one.load()
        await ask(shared, "DEL", LOCK_KEY)
        with pytest.raises(
            AuthError, match=r"locked by process \d+ on .*, which is still connected and may have used"
        ) as caught:
            await loaded_in_the_lock(two)
        assert caught.value.transient


async def test_nobody_refreshes_within_the_grace_after_a_restart(redis: RedisServer) -> None:
    """Redis may have lost its last writes, such as the mark of a refresh."""
    # By default the last second of acknowledged writes may be lost.
    await ask(redis, "CONFIG", "SET", "appendfsync", "always")
    async with two_stores(redis, lease=0.3, grace=4.0) as (one, two):
        async with one.lock():
            await one.load()
            await ask(redis, "HDEL", TOKEN_KEY, "refresher", "seen")
            await ask(redis, "DEL", LOCK_KEY)
            redis.restart()
            waiting = asyncio.create_task(loaded_in_the_lock(two))
            await not_yet(waiting, 0.5)
            await one.save(NEW)
            assert await asyncio.wait_for(waiting, 20) == NEW
        await ask(redis, "CONFIG", "SET", "appendfsync", "always")
        await one.save(OLD)
        began = time.monotonic()
        redis.restart()
        assert await loaded_in_the_lock(two) == OLD
        # Redis reports its uptime in whole seconds.
        assert time.monotonic() - began > 2.9


async def test_authorization_does_not_wait_for_the_grace(redis: RedisServer) -> None:
    async with two_stores(redis, grace=60) as (_, two):
        await ask(redis, "HSET", TOKEN_KEY, "refresher", "host:1:gone", "seen", "9999999999")
        redis.restart()
        async with asyncio.timeout(20), two.lock():
            await two.save(NEW)
        assert await loaded_in_the_lock(two) == NEW


async def test_valid_new_token_is_adopted_without_waiting_for_the_grace(redis: RedisServer) -> None:
    await ask(redis, "CONFIG", "SET", "appendfsync", "always")
    async with two_stores(redis, grace=60) as (one, two):
        assert await two.load() == OLD
        await one.save(NEW)
        await two.aclose()
        redis.restart()
        async with asyncio.timeout(20):
            assert await loaded_in_the_lock(two) == NEW
        waiting = asyncio.create_task(loaded_in_the_lock(two))
        await not_yet(waiting, 0.3)
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_refresher_does_not_wait_for_its_own_late_save(redis: RedisServer) -> None:
    """Redis was restarted while the token server responded."""

    async def failing(request: Any, received: Any) -> Any:
        redis.kill()
        return await grants("second")(request, received)

    async with (
        Scripted(failing) as server,
        RedisTokenStore(redis.url, "a") as store,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        await store.save(OLD)
        with pytest.raises(AuthError, match="store is unavailable"):
            await oauth.access_token()
        redis.start()
        async with asyncio.timeout(20):
            while b"access-second" not in await ask(redis, "HGET", TOKEN_KEY, "record"):
                await asyncio.sleep(0.02)
            redis.restart()
            while True:
                with contextlib.suppress(AuthError):
                    assert await oauth.access_token() == "access-second"
                    break


async def test_redis_clock_set_back_delays_a_refresh_by_a_lease_and_a_grace_at_most(shared: RedisServer) -> None:
    async with two_stores(shared, lease=0.2, grace=0.4) as (_, two):
        ahead = str(time.time() + 3600)
        await ask(shared, "HSET", LOCK_KEY, "owner", "host:1:gone", "until", ahead)
        await ask(shared, "HSET", TOKEN_KEY, "refresher", "host:1:gone", "seen", ahead)
        token = None
        async with asyncio.timeout(20):
            while token is None:
                with contextlib.suppress(AuthError):  # on a slow machine the store gives up first
                    token = await loaded_in_the_lock(two)
        assert token == OLD


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_mark_of_a_failed_refresh_is_removed_as_soon_as_redis_is_back(redis: RedisServer, fault: str) -> None:
    async with two_stores(redis, lease=0.3, timeout=2) as (one, _):
        with contextlib.suppress(ZeroDivisionError):
            async with one.lock():
                await one.load()
                still(redis, fault)
                raise ZeroDivisionError
        with pytest.raises(AuthError, match="the lock is not released yet"):
            await loaded_in_the_lock(one)
        redis.wake() if fault == "stopped" else redis.start()
        async with asyncio.timeout(20):
            while await ask(redis, "HGET", TOKEN_KEY, "refresher") is not None:
                await asyncio.sleep(0.02)
            assert await loaded_in_the_lock(one) == OLD


async def test_store_closes_although_the_mark_cannot_be_removed(redis: RedisServer) -> None:
    store = RedisTokenStore(redis.url, "a", timeout=0.2)
    await store.save(OLD)
    with contextlib.suppress(AuthError):
        async with store.lock():
            await store.load()
            redis.kill()
            await store.load()
    await asyncio.wait_for(store.aclose(), 20)


async def test_second_refresh_of_one_store_waits_for_the_pending_save(redis: RedisServer) -> None:
    async with RedisTokenStore(redis.url, "a", lease=0.3, timeout=0.5) as store:
        await store.save(OLD)
        with contextlib.suppress(AuthError):
            async with store.lock():
                await store.load()
                second = asyncio.create_task(loaded_in_the_lock(store))
                await asyncio.sleep(0)
                redis.stop()
                await store.save(NEW)
        redis.wake()
        assert await asyncio.wait_for(second, 20) == NEW


async def test_missing_info_permission_is_an_auth_error(redis: RedisServer) -> None:
    await ask(redis, "ACL", "SETUSER", "app", "on", f">{PASSWORD}", "+@all", "-info", "~signing:*", "&signing:*")
    async with RedisTokenStore(redis.url.replace("://", f"://app:{PASSWORD}@"), "a") as store:
        with pytest.raises(AuthError, match=r"store is unavailable: .*the user needs \+info"):
            await store.save(NEW)


# The order of tokens


async def test_authorization_after_data_loss_is_newer_than_every_known_token(redis: RedisServer) -> None:
    async with two_stores(redis) as (one, two):
        for _ in range(3):
            async with one.lock():
                await one.load()
                await one.save(OLD)
        await two.load()
        await ask(redis, "FLUSHALL")
        async with RedisTokenStore(redis.url, "a") as fresh:
            async with fresh.lock():
                await fresh.save(NEW)
            assert [await store.load() for store in (one, two, fresh)] == [NEW] * 3


async def test_token_older_than_an_authorization_is_replaced_after_a_restore(redis: RedisServer) -> None:
    """A worker that knows the newer token restores it, although the older one was refreshed more often."""
    async with two_stores(redis) as (one, two):
        for _ in range(5):
            async with one.lock():
                await one.load()
                await one.save(OLD)
        backup = await ask(redis, "DUMP", TOKEN_KEY)
        async with two.lock():
            await two.save(NEW)
        await ask(redis, "RESTORE", TOKEN_KEY, "0", backup, "REPLACE")
        assert await one.load() == OLD
        assert await two.load() == NEW
        assert await one.load() == NEW


async def test_newest_token_wins_though_the_clock_of_redis_is_behind(redis: RedisServer) -> None:
    """The order of the saves decides, not the time in Redis: the clock of a restored server may be behind."""
    async with two_stores(redis) as (one, two):
        async with one.lock():
            await one.save(OLD)
        assert await two.load() == OLD
        async with one.lock():
            await one.save(NEW)
        saved = float(await ask(redis, "HGET", TOKEN_KEY, "saved"))
        await ask(redis, "HSET", TOKEN_KEY, "saved", f"{saved - 3600:.6f}")
        loaded = await two.load()
        assert loaded is not None
        assert loaded.access_token == NEW.access_token


async def test_fencing_token_is_bounded_in_length(shared: RedisServer) -> None:
    async with two_stores(shared) as (one, two):
        for _ in range(20):
            await one.save(OLD)
        fence = (await ask(shared, "HGET", TOKEN_KEY, "fence")).decode()
        assert [len(part) for part in fence.removesuffix(":1").split(".")] == [8] * 16
        backup = await ask(shared, "DUMP", TOKEN_KEY)
        await two.save(NEW)
        await ask(shared, "RESTORE", TOKEN_KEY, "0", backup, "REPLACE")
        assert await two.load() == NEW


async def test_expiring_token_is_not_refreshed_after_data_loss(redis: RedisServer) -> None:
    """Another worker may have refreshed it already, and need Redis no sooner than its own token expires."""
    async with two_stores(redis, lease=0.1, grace=0.2) as (one, two):
        await one.save(Token("access", "refresh", datetime.now(UTC) + timedelta(seconds=3)))
        await two.load()
        await asyncio.sleep(2.75)
        await ask(redis, "FLUSHALL")
        with pytest.raises(AuthError, match="lost its data"):
            await loaded_in_the_lock(two)


# The stored record

KEYS = [base64.urlsafe_b64encode(bytes([number]) * 32).decode() for number in range(3)]


async def test_token_is_encrypted_and_the_key_can_be_rotated(shared: RedisServer) -> None:

    def opened(*keys: str) -> RedisTokenStore:
        return RedisTokenStore(shared.url, "kept", key=keys)

    async with opened(KEYS[0]) as first, opened(KEYS[1], KEYS[0]) as both, opened(KEYS[1]) as second:
        await first.save(NEW)
        assert b"access" not in str(await ask(shared, "HGETALL", "signing:token:kept")).encode()
        assert await both.load() == NEW
        with pytest.raises(AuthError, match=r"was not changed: none of the given keys decrypts it") as caught:
            await second.load()
        assert caught.value.__context__ is None
        async with both.lock():
            await both.load()
            await both.save(NEW)
        assert await second.load() == NEW


@pytest.mark.parametrize("key", [None, KEYS[1]])
async def test_token_encrypted_with_another_key_is_not_overwritten(shared: RedisServer, key: str | None) -> None:
    async with (
        Scripted(grants()) as server,
        RedisTokenStore(shared.url, "kept-2", key=KEYS[0]) as right,
        RedisTokenStore(shared.url, "kept-2", key=key) as wrong,
        oauth_for(server.base_url, store=wrong) as oauth,
    ):
        await right.save(OLD)
        with pytest.raises(AuthError, match=r"was not changed: (it is encrypted, and no key|none of the given keys)"):
            await oauth.refresh(rejected=OLD)
        assert not server.requests
        assert await right.load() == OLD


async def test_encrypted_token_copied_to_another_name_is_rejected(shared: RedisServer) -> None:
    async with (
        RedisTokenStore(shared.url, "tenant-1", key=KEYS[0]) as one,
        RedisTokenStore(shared.url, "tenant-2", key=KEYS[0]) as two,
    ):
        await one.save(NEW)
        await ask(shared, "COPY", "signing:token:tenant-1", "signing:token:tenant-2")
        with pytest.raises(AuthError, match="none of the given keys decrypts it"):
            await two.load()


@pytest.mark.parametrize(
    "record", ["{", "{}", "[]", '{"token": "{}"}', '{"token": "{", "clock": 1, "lives": 1}', '{"token": 5}', "***"]
)
async def test_broken_record_is_an_error_without_its_content_and_stays(shared: RedisServer, record: str) -> None:
    key = "signing:token:broken"
    await ask(shared, "DEL", key)
    await ask(shared, "HSET", key, "fence", "1", "record", record)
    for settings in ({}, {"key": KEYS[0]}):
        async with RedisTokenStore(shared.url, "broken", **settings) as store:  # type: ignore[arg-type]  # these fit
            with pytest.raises(AuthError, match="was not changed: ") as caught:
                await store.load()
            assert caught.value.__context__ is None
    assert await ask(shared, "HGET", key, "record") == record.encode()


async def test_key_of_another_type_is_an_error(shared: RedisServer) -> None:
    await ask(shared, "SET", "signing:token:foreign", "x")
    async with RedisTokenStore(shared.url, "foreign") as store:
        with pytest.raises(AuthError, match=r"unavailable: redis://127.0.0.1:\d+: ResponseError: .*WRONGTYPE"):
            await store.load()


async def test_expiry_is_converted_to_the_clock_of_the_reader(
    shared: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expiry = datetime.fromtimestamp(time.time() + 60, UTC)
    async with RedisTokenStore(shared.url, "clock") as store, RedisTokenStore(shared.url, "clock") as fast:
        await store.save(Token("access", "refresh", expiry))
        right = time.time
        monkeypatch.setattr(time, "time", lambda: right() + 3600)
        read = await fast.load()
        assert read is not None
        assert read.expires_at is not None
        assert abs(read.expires_at - expiry - timedelta(hours=1)) < timedelta(seconds=5)
        await fast.save(read)
        monkeypatch.undo()
        back = await store.load()
        assert back is not None
        assert back.expires_at is not None
        assert abs(back.expires_at - expiry) < timedelta(seconds=5)


# Outages of Redis


async def bounded(work: Any) -> float:
    """Return the seconds until the work raises an `AuthError`, which shows the address alone."""
    began = time.monotonic()
    with pytest.raises(AuthError) as caught:
        await work
    took = time.monotonic() - began
    assert "redis://127.0.0.1:" in str(caught.value)
    assert caught.value.__context__ is None
    return took


def still(server: RedisServer, fault: str) -> None:
    """Stop or kill Redis."""
    server.stop() if fault == "stopped" else server.kill()


@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize("given", ["url", "client"])
async def test_every_operation_fails_soon_during_an_outage(redis: RedisServer, fault: str, given: str) -> None:
    """Also with a given client that retries and waits longer."""
    from redis.asyncio import Redis

    async with Redis.from_url(redis.url, decode_responses=True) as client:
        async with RedisTokenStore(redis.url if given == "url" else client, "a", timeout=0.4) as store:
            await store.save(NEW)
            still(redis, fault)
            try:
                patient = RedisTokenStore(redis.url if given == "url" else client, "a")
                for work in (store.load(), store.save(OLD), patient.lock().__aenter__()):
                    if given == "url":
                        assert await bounded(work) < 5
                    else:
                        began = time.monotonic()
                        with pytest.raises(AuthError, match="the given client"):
                            await work
                        assert time.monotonic() - began < 5
            finally:
                redis.wake() if fault == "stopped" else redis.start()
                await patient.aclose()
            assert await store.load() in (NEW, OLD)
        assert await client.ping()


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_current_token_is_used_during_an_outage(
    redis: RedisServer, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At most one call is delayed, and the log says it once."""
    soon = Token("access-soon", "refresh-soon", datetime.now(UTC) + timedelta(seconds=40))
    async with (
        Scripted(grants()) as server,
        RedisTokenStore(redis.url, "a") as store,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        await store.save(soon)
        assert await oauth.access_token() == "access-soon"
        still(redis, fault)
        oauth._current._fresh_until = 0.0
        began = time.monotonic()
        assert [await oauth.access_token() for _ in range(50)] == ["access-soon"] * 50
        assert time.monotonic() - began < 5
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
        assert "the current token stays in use" in caplog.text
        assert not server.requests
        redis.wake() if fault == "stopped" else redis.start()


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_authorization_code_is_not_exchanged_while_redis_is_unavailable(redis: RedisServer, fault: str) -> None:
    """A code works only once."""
    async with (
        Scripted(grants("first")) as server,
        RedisTokenStore(redis.url, "a", timeout=0.5) as store,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        still(redis, fault)
        with pytest.raises(AuthError, match="the token store is unavailable") as caught:
            await oauth.exchange("code")
        assert caught.value.transient
        assert not server.token_requests
        redis.wake() if fault == "stopped" else redis.start()
        assert (await oauth.exchange("code")).access_token == "access-first"
        token = await store.load()
        assert token is not None
        assert token.access_token == "access-first"


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_token_refreshed_during_an_outage_is_saved_when_redis_is_back(redis: RedisServer, fault: str) -> None:
    """The call fails in time and the lock stays, so no worker uses the old refresh token again."""

    async def failing(request: Any, received: Any) -> Any:
        still(redis, fault)
        return await grants("second")(request, received)

    async with (
        Scripted(failing, grants("third")) as server,
        RedisTokenStore(redis.url, "a", lease=0.5, timeout=0.6) as store,
        RedisTokenStore(redis.url, "a", lease=0.5, timeout=0.6) as other,
        oauth_for(server.base_url, store=store) as oauth,
        oauth_for(server.base_url, store=other) as others,
    ):
        await store.save(OLD)
        assert await bounded(oauth.access_token()) < 5
        assert await bounded(oauth.access_token()) < 5
        await asyncio.sleep(0.6)
        redis.wake() if fault == "stopped" else redis.start()
        # A refresh before that, although the lease has expired, would be a second one.
        await _saved(other, "access-second")
        assert await others.access_token() == "access-second"
        assert await oauth.access_token() == "access-second"
        assert len(server.token_requests) == 1


async def _saved(store: RedisTokenStore, access_token: str) -> None:
    """Wait until the store holds this token."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(AuthError):
                token = await store.load()
                if token is not None and token.access_token == access_token:
                    return
            await asyncio.sleep(0.02)


async def test_refused_save_stays_a_permanent_failure_until_it_succeeds(redis: RedisServer) -> None:
    async with RedisTokenStore(redis.url, "a", timeout=1) as store:
        await store.save(OLD)

        async def refresh() -> None:
            async with store.lock():
                await store.load()
                await ask(redis, "ACL", "SETUSER", "default", "-hset", "-set")
                await store.save(NEW)

        with pytest.raises(AuthError, match="can't run this command") as refused:
            await refresh()
        with pytest.raises(AuthError, match=r"can't run .*, and a refreshed token is not saved yet$") as waiting:
            await refresh()
        assert not refused.value.transient
        assert not waiting.value.transient
        await ask(redis, "ACL", "SETUSER", "default", "+@all")
        async with asyncio.timeout(60):
            while await store.load() != NEW:
                await asyncio.sleep(0.05)


async def test_closing_with_an_unsaved_token_logs_an_error(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisTokenStore(redis.url, "a", timeout=0.2)
    await store.save(OLD)
    with contextlib.suppress(AuthError):
        async with store.lock():
            await store.load()
            redis.kill()
            await store.save(NEW)
    with pytest.raises(AuthError, match="a refreshed token is not saved yet") as caught:
        async with store.lock():
            pass
    assert caught.value.transient
    await store.aclose()
    assert "before a refreshed token was saved" in caplog.text
    assert "access-new" not in caplog.text


@pytest.mark.parametrize(
    ("command", "transient"),
    [
        (["REPLICAOF", "127.0.0.1", "1"], True),
        (["CONFIG", "SET", "min-replicas-to-write", "1"], True),
        (["CONFIG", "SET", "maxmemory", "1"], True),
        (["ACL", "SETUSER", "default", "-evalsha", "-eval"], False),
    ],
    ids=["replica", "no replicas", "out of memory", "not permitted"],
)
async def test_refused_script_is_permanent_unless_redis_cannot_be_written_for_now(
    redis: RedisServer, command: list[str], transient: bool
) -> None:
    async with RedisTokenStore(redis.url, "a") as store:
        await ask(redis, *command)
        with pytest.raises(AuthError) as caught:
            await store.save(NEW)
    assert caught.value.transient is transient


@pytest.mark.parametrize(
    ("reason", "transient"),
    [
        ("-READONLY You can't write against a read only replica.", True),
        ("-OOM command not allowed when used memory > 'maxmemory'.", True),
        ("Wrong number of args calling Redis command From Lua script", False),
    ],
)
async def test_script_refused_by_redis_6_is_permanent_unless_redis_cannot_be_written_for_now(
    reason: str, transient: bool
) -> None:
    """Redis up to 6.2 puts the code behind the place in the script."""
    place = "ERR Error running script (call to f_6b1bf486): @user_script:2: @user_script: 2:"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while header := await reader.readline():
                words = [await read_word(reader) for _ in range(int(header[1:]))]
                writer.write(f"-{place} {reason}\r\n".encode() if words[0] == b"EVALSHA" else b"+OK\r\n")

    async def read_word(reader: asyncio.StreamReader) -> bytes:
        size = int((await reader.readline())[1:])
        return (await reader.readexactly(size + 2))[:-2]

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with RedisTokenStore(f"redis://127.0.0.1:{port}", "a") as store:
            with pytest.raises(AuthError, match="Error running script") as caught:
                await store.save(NEW)
    assert caught.value.transient is transient


async def test_redis_that_runs_a_long_script_is_a_transient_failure(redis: RedisServer) -> None:
    async def load_forever() -> None:
        while True:
            await store.load()

    async with RedisTokenStore(redis.url, "a") as store:
        await ask(redis, "CONFIG", "SET", "lua-time-limit", "1")
        endless = asyncio.create_task(ask(redis, "EVAL", "while true do end", 0))
        async with asyncio.timeout(30):
            with pytest.raises(AuthError, match="BUSY") as caught:
                await load_forever()
        assert caught.value.transient
        await ask(redis, "SCRIPT", "KILL")
        with pytest.raises(Exception, match="killed"):
            await endless
        assert await store.load() is None


@pytest.mark.parametrize(
    ("name", "message", "transient"),
    [
        ("MasterNotFoundError", "No master found for 'mymaster'", True),
        ("ResponseError", "MISCONF Redis is configured to save RDB snapshots, but is unable to persist to disk", True),
        ("AuthenticationError", "invalid username-password pair", False),
        ("AuthorizationError", "not authorized", False),
        ("ExternalAuthProviderError", "problem with LDAP service", False),
        ("ResponseError", "BUSYKEY Target key name already exists.", False),
    ],
)
async def test_error_of_a_given_client_is_judged_by_its_base_classes_and_its_code(
    name: str, message: str, transient: bool
) -> None:
    """A client of Sentinel raises errors of its own."""
    from redis import exceptions
    from redis.asyncio import sentinel

    known = {**vars(exceptions), **vars(sentinel)}
    error = known.get(name) or type(name, (exceptions.ConnectionError,), {})  # older versions lack one

    class Failing:
        async def execute_command(self, *args: Any, **options: Any) -> Any:
            raise error(message)

        def pubsub(self, **settings: Any) -> Any:
            raise error(message)

    async with RedisTokenStore(Failing(), "a") as store:
        with pytest.raises(AuthError, match="the token store is unavailable") as caught:
            await store.load()
    assert (caught.value.transient, caught.value.fatal) == (transient, not transient)


async def eventually_loaded(store: RedisTokenStore) -> Token | None:
    """Load inside the lock as soon as the store has finished its pending save."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(AuthError):
                return await loaded_in_the_lock(store)


async def test_pending_save_is_dropped_for_a_newer_token(redis: RedisServer) -> None:
    other = RedisTokenStore(redis.url, "a", timeout=5)
    async with slow_way(redis.port) as way:
        cut = RedisTokenStore(way.url, "a", timeout=0.3, lease=0.2)
        async with other, cut:
            await other.save(OLD)
            with contextlib.suppress(AuthError):
                async with cut.lock():
                    await cut.load()
                    way.cut = True
                    await cut.save(NEW)
            await other.save(Token("access-newest"))
            way.cut = False
            assert await eventually_loaded(cut) == Token("access-newest")


async def test_save_whose_response_was_lost_is_repeated_safely(redis: RedisServer) -> None:
    async with slow_way(redis.port) as way, RedisTokenStore(way.url, "a", timeout=0.4) as store:
        await store.save(OLD)
        async with store.lock():
            await store.load()
            way.delay = 0.3
            with pytest.raises(AuthError, match="no response within"):
                await store.save(NEW)
        way.delay = 0.0
        assert await eventually_loaded(store) == NEW


async def test_refresh_works_with_slow_redis(shared: RedisServer) -> None:
    async with (
        slow_way(shared.port, 0.02) as way,
        Scripted(grants("slow")) as server,
        RedisTokenStore(way.url, "slow", timeout=20) as store,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        await store.save(OLD)
        assert await oauth.access_token() == "access-slow"


async def test_newest_known_token_is_restored_after_data_loss(redis: RedisServer) -> None:
    """A worker with an older, expired token waits for the worker with the newer one."""
    async with (
        Scripted(grants("new")) as server,
        RedisTokenStore(redis.url, "a", grace=6, timeout=5) as idle,
        RedisTokenStore(redis.url, "a", grace=6, timeout=5) as busy,
        oauth_for(server.base_url, store=idle) as oauth,
    ):
        late = Token("access-late", "refresh-late", datetime.now(UTC) + timedelta(seconds=4))
        later = Token("access-later", "refresh-later", datetime.now(UTC) + timedelta(seconds=5))
        await busy.save(late)
        assert await oauth.access_token() == "access-late"
        await busy.save(later)
        redis.kill()
        redis.empty()
        redis.start()
        await asyncio.sleep(max(0.0, (later.expires_at - datetime.now(UTC)).total_seconds()) if later.expires_at else 0)
        waiting = asyncio.create_task(oauth.access_token())
        await asyncio.sleep(0.2)
        assert not server.requests
        assert await busy.load() == later
        assert await waiting == "access-new"
        assert [b"refresh-later" in request.body for request in server.token_requests] == [True]


async def test_expired_token_is_not_refreshed_for_a_lifetime_after_data_loss(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refresh token may be outdated."""
    async with (
        Scripted(grants("new")) as server,
        RedisTokenStore(redis.url, "a") as store,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        await store.save(Token("access-old", "refresh-old", datetime.now(UTC) + timedelta(hours=1)))
        assert await oauth.access_token() == "access-old"
        await ask(redis, "FLUSHALL")
        right = time.time
        monkeypatch.setattr(time, "time", lambda: right() + 3700)
        with pytest.raises(AuthError, match=r"lost its data: .* not refreshed for another 3[56]\d\d s,") as caught:
            await oauth.access_token()
        assert "-old" not in str(caught.value)
        assert caught.value.transient
        assert not server.requests
        monkeypatch.undo()
        await store.save(NEW)
        async with store.lock():
            assert await store.load() == NEW


async def test_valid_token_is_restored_for_all_workers_after_data_loss(redis: RedisServer) -> None:
    async with RedisTokenStore(redis.url, "a") as store, RedisTokenStore(redis.url, "a") as other:
        await store.save(NEW)
        await ask(redis, "FLUSHALL")
        assert await other.load() is None
        assert await store.load() == NEW
        assert await other.load() == NEW


async def test_late_response_to_a_load_does_not_replace_a_newer_known_token(redis: RedisServer) -> None:
    async with RedisTokenStore(redis.url, "a") as store:
        await store.save(OLD)
        known = store._known
        kept = await ask(redis, "HMGET", "signing:token:a", "record", "fence", "saved")
        await store.save(NEW)
        assert store._learn(known, *[field.decode() for field in kept], time.time()) == OLD
        await ask(redis, "FLUSHALL")
        assert await store.load() == NEW


# Settings, texts, closing


def test_invalid_settings_are_rejected_without_showing_the_password() -> None:
    url = f"redis://:{PASSWORD}@127.0.0.1"
    for settings, words in (
        ({"name": ""}, "name: must be a non-empty string, got ''"),
        ({"name": "half-\ud800"}, r"name: must be a non-empty string, got 'half-\ud800'"),
        ({"prefix": "\udfff:"}, r"prefix: must be a string, got '\udfff:'"),
        ({"prefix": None}, "prefix: must be a string, got None"),
        ({"lease": 0}, "lease: must be a number above 0, got 0"),
        ({"grace": 0}, "grace: must be a number above 0, got 0"),
        ({"timeout": float("nan")}, "timeout: must be a number above 0, got nan"),
        ({"key": "short"}, "an encryption key must be 32 bytes"),
        ({"redis": 5}, "redis: must be a URL or a client of redis.asyncio, got int"),
        ({"redis": "http://x"}, "invalid Redis URL: must begin with redis://, rediss:// or unix://"),
        ({"redis": f"redis://:{PASSWORD}@h:port"}, "invalid Redis URL: invalid host or port"),
        ({"redis": f"redis://:{PASSWORD}@h/?socket_timeout=x"}, "invalid Redis URL: Invalid value for"),
    ):
        known: dict[str, Any] = {"redis": url, "name": "a"}
        with pytest.raises(ConfigurationError) as caught:
            RedisTokenStore(**known | settings)
        assert words in str(caught.value)
        assert PASSWORD not in str(caught.value)
        assert caught.value.__context__ is None


async def test_missing_redis_py_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio.connection", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'signing-async\[redis\]'"):
        RedisTokenStore("redis://127.0.0.1", "a")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://user:{PASSWORD}@cache.example.com/3", "redis://cache.example.com:6379/3"),
        (f"rediss://:{PASSWORD}@[::1]:7000?ssl_cert_reqs=none", "rediss://::1:7000"),
        (f"unix://user:{PASSWORD}@/run/redis.sock?db=1", "unix:///run/redis.sock"),
    ],
)
def test_repr_shows_the_address_without_the_password(url: str, shown: str) -> None:
    assert repr(RedisTokenStore(url, "a")) == f"RedisTokenStore({shown!r}, 'a')"


async def test_password_appears_in_no_text_traceback_or_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running_redis("--requirepass", PASSWORD) as server:
        for password in (PASSWORD, "wrong" + PASSWORD):
            url = server.url.replace("://", f"://:{password}@")
            async with RedisTokenStore(url, "a") as store:
                if password == PASSWORD:
                    await store.save(NEW)
                    continue
                with pytest.raises(AuthError, match="AuthenticationError") as caught:
                    await store.save(NEW)
                frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)][1:]
                assert frames
                assert PASSWORD not in "".join(repr(frame.f_locals) for frame in frames)
                assert PASSWORD not in f"{store!r} {store} {caught.value!r}"
    assert PASSWORD not in caplog.text


@pytest.mark.parametrize("way", ["://:{}@", "://app:{}@", "?password={}"])
async def test_password_echoed_by_the_server_is_redacted(way: str) -> None:

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1000):
                writer.write(f"-ERR no {PASSWORD}! for you\r\n".encode())
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        shown = way.format(f"{PASSWORD}%21")
        url = f"redis{shown}{place}" if "@" in way else f"redis://{place}{shown}"
        async with RedisTokenStore(url, "a") as store:
            with pytest.raises(AuthError, match="for you") as caught:
                await store.load()
            assert PASSWORD not in str(caught.value)
            assert place in repr(store)


async def test_client_that_swallows_cancellations_does_not_delay_a_timeout() -> None:

    class Swallowing:
        async def execute_command(self, *args: Any, **options: Any) -> Any:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
            return [1, b"", b"0", b"0", b"0"]

        def pubsub(self, **settings: Any) -> Any: ...

    store = RedisTokenStore(Swallowing(), "a")

    async def read() -> None:
        while True:
            await store.load()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(), 0.02)


async def test_tls_certificate_is_verified(tmp_path: Path) -> None:
    needs_module("trustme")
    import trustme

    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    pair.private_key_pem.write_to_path(tmp_path / "key.pem")
    with running_redis() as plain:
        tls_port = free_port()
        plain.restart(
            *("--tls-port", str(tls_port), "--tls-cert-file", str(tmp_path / "cert.pem")),
            *("--tls-key-file", str(tmp_path / "key.pem"), "--tls-ca-cert-file", str(tmp_path / "ca.pem")),
            *("--tls-auth-clients", "no"),
        )
        async with RedisTokenStore(f"rediss://127.0.0.1:{tls_port}?ssl_ca_certs={tmp_path}/ca.pem", "a") as store:
            await store.save(NEW)
            assert await store.load() == NEW
        async with RedisTokenStore(f"rediss://127.0.0.1:{tls_port}", "a") as store:
            with pytest.raises(AuthError, match="CERTIFICATE_VERIFY_FAILED"):
                await store.load()


@pytest.mark.parametrize(("ending", "warned"), [("", True), ("await store.aclose()", False)])
def test_unclosed_store_warns_at_exit(shared: RedisServer, ending: str, warned: bool) -> None:
    lines = [
        "import asyncio",
        "from signing_async.redis import RedisTokenStore",
        "async def main():",
        f"    store = RedisTokenStore({shared.url!r}, 'forgotten')",
        "    await store.load()",
        f"    {ending or 'pass'}",
        "asyncio.run(main())",
    ]
    command = [sys.executable, "-W", "always", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (f"RedisTokenStore({shared.url!r}, 'forgotten') was not closed" in done.stderr) is warned
    assert ("ResourceWarning" in done.stderr) is warned


async def test_store_collected_while_open_warns(shared: RedisServer) -> None:
    async with RedisTokenStore(shared.url, "dropped") as store:
        store.__del__()
        await store.load()
        with pytest.warns(ResourceWarning, match="'dropped'"):
            store.__del__()


def test_closed_store_works_in_the_next_event_loop(shared: RedisServer) -> None:
    store = RedisTokenStore(shared.url, "loops")

    async def save() -> None:
        async with store, store.lock():
            await store.save(NEW)

    async def load() -> Token | None:
        async with store:
            return await store.load()

    asyncio.run(save())
    assert asyncio.run(load()) == NEW


if __name__ == "__main__":
    tasks: dict[str, Any] = {"hold": hold, "refresh": refresh}
    asyncio.run(tasks[sys.argv[1]](*sys.argv[2:]))
