"""The token store in Redis: fences, locks of the dead and the paused, clocks, encryption, and Redis itself at fault."""

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


# What OAuth makes of a refused save


class Overtaken(WatchedStore):
    """A store in which another worker saves between a refresh and its save, a number of times."""

    def __init__(self, token: Token, *others: Token) -> None:
        super().__init__(token)
        self.others = list(others)

    async def save(self, token: Token) -> None:
        if self.others:
            await super().save(self.others.pop(0))
            raise TokenSuperseded("another worker was here")
        await super().save(token)


async def test_a_refused_save_goes_on_with_the_newer_token() -> None:
    """The token of this refresh is dropped, that of the other worker is used, and nothing is asked of the server."""
    async with Scripted(grants("mine")) as server:
        store = Overtaken(OLD, NEW)
        async with oauth_for(server.base_url, store=store) as oauth:
            assert await oauth.refresh(rejected=OLD) == NEW
            assert await oauth.access_token() == "access-new"
        assert len(server.token_requests) == 1
        assert await store.load() == NEW


async def test_a_newer_token_that_has_expired_is_refreshed_with_its_own_refresh_token() -> None:
    """A worker that slept for long finds that even the newer token is old by now: it refreshes that one."""
    async with Scripted(grants("mine"), grants("second")) as server:
        later = Token("access-later", "refresh-later", datetime(2021, 1, 1, tzinfo=UTC))
        async with oauth_for(server.base_url, store=Overtaken(OLD, later)) as oauth:
            assert await oauth.access_token() == "access-second"
        assert [b"refresh-old" in request.body for request in server.token_requests] == [True, False]
        assert b"refresh-later" in server.token_requests[1].body


async def test_a_store_that_refuses_every_time_is_an_error() -> None:
    """It is told, instead of asking the server for tokens for ever."""
    async with Scripted(grants("mine")) as server:
        store = Overtaken(OLD, *[OLD] * 9)
        async with oauth_for(server.base_url, store=store) as oauth:
            with pytest.raises(TokenSuperseded):
                await oauth.access_token()
        assert len(server.token_requests) == 2


# Redis


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    """A Redis for all tests that do it no harm."""
    with running_redis() as server:
        yield server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis of the test's own, to be harmed."""
    with running_redis() as server:
        yield server


async def ask(server: RedisServer, *command: Any) -> Any:
    """The answer to one command."""
    from redis.asyncio import Redis

    async with Redis.from_url(server.url) as client:
        answer: Any = client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py leaves it so
        return await answer


async def held_by_none(server: RedisServer, name: str, lease: float) -> None:
    """Wait until a lock's lease is over, by Redis's clock."""
    until = float(await ask(server, "HGET", f"signing:token-lock:{name}", "until"))
    while True:
        seconds, micros = await ask(server, "TIME")
        if seconds + micros / 1e6 > until:
            return
        await asyncio.sleep(0.02)


async def cut_off(server: RedisServer, store: RedisTokenStore) -> None:
    """The holder's connections break and it cannot renew its lock, as in a network that is down."""
    from signing_async.redis.tokens import _holding

    (hold,) = _holding.get()
    assert hold.keeper is not None
    hold.keeper.cancel()
    await asyncio.wait([hold.keeper])
    await ask(server, "CLIENT", "KILL", "TYPE", "pubsub")
    await held_by_none(server, store.name, 0)


class TestFences(FencedTokenStoreConformance):
    """What a worker that was cut off may do."""

    @pytest.fixture
    async def open_store(self, request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[Any]:
        """Another object on one name."""
        async with contextlib.AsyncExitStack() as opened:

            def open_store() -> RedisTokenStore:
                store = RedisTokenStore(redis.url, "fenced", lease=0.2, timeout=5)
                opened.push_async_callback(store.aclose)
                return store

            yield open_store

    @pytest.fixture
    def lapse(self, redis: RedisServer) -> Any:
        """As above."""

        async def lapse(store: Any) -> None:
            await cut_off(redis, store)

        return lapse


async def test_a_lock_is_renewed_while_it_is_held(shared: RedisServer) -> None:
    """A refresh may take longer than the lease: nobody gets in between."""
    store = RedisTokenStore(shared.url, "renewed", lease=0.3)
    other = RedisTokenStore(shared.url, "renewed", lease=0.3)
    async with store, other, store.lock():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.8), other.lock():
                pass


async def test_a_listener_that_is_lost_is_replaced(redis: RedisServer) -> None:
    """A holder whose connection broke shows itself again, and then even when paused keeps its lock."""
    async with RedisTokenStore(redis.url, "a", lease=0.2) as store, store.lock():
        await ask(redis, "CLIENT", "KILL", "TYPE", "pubsub")
        async with asyncio.timeout(20):
            while not await ask(redis, "PUBSUB", "CHANNELS"):
                await asyncio.sleep(0.02)


async def test_a_save_out_of_the_lock_counts_in_it(shared: RedisServer) -> None:
    """A user who authorized anew while a refresh was about to begin: the refresh begins with the new token."""
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
async def test_a_lock_that_was_lost_before_the_token_was_read_is_taken_again(redis: RedisServer, noticed: bool) -> None:
    """The token is read once the lock is held again, and a refresh begins with the newer one."""
    async with RedisTokenStore(redis.url, "a", lease=0.3) as store, RedisTokenStore(redis.url, "a", lease=0.3) as other:
        await store.save(OLD)
        async with store.lock():
            # As if Redis had been emptied, and another worker had been quicker.
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


async def test_a_lock_that_was_asked_for_in_vain_is_soon_free(redis: RedisServer) -> None:
    """What was sent to a Redis that is stopped is done when it wakes: nobody holds that lock for a whole lease."""
    async with (
        RedisTokenStore(redis.url, "a", lease=120, timeout=0.3) as store,
        RedisTokenStore(redis.url, "a", lease=120, timeout=5) as other,
    ):
        await store.save(OLD)
        async with store.lock():
            pass
        # Over a connection that is there.
        await store.load()
        redis.stop()
        with pytest.raises(AuthError, match=r"did not answer within 0.3 s"):
            await store.lock().__aenter__()
        redis.wake()
        async with asyncio.timeout(30), other.lock():
            assert await other.load() == OLD


async def test_a_lock_is_given_back_by_who_could_save(redis: RedisServer) -> None:
    """Redis that did not answer for a moment has answered since: the others do not wait until the lease is over."""
    async with (
        RedisTokenStore(redis.url, "a", lease=120, timeout=0.3) as store,
        RedisTokenStore(redis.url, "a", lease=120, timeout=5) as other,
    ):
        async with store.lock():
            # By then it is held for the lease.
            while float(await ask(redis, "HGET", "signing:token-lock:a", "until")) < time.time() + 60:
                await asyncio.sleep(0.01)
            redis.stop()
            with pytest.raises(AuthError, match=r"did not answer within 0\.3 s"):
                await store.load()
            redis.wake()
            await store.save(NEW)
        async with asyncio.timeout(20), other.lock():
            assert await other.load() == NEW


@pytest.mark.parametrize("again", [False, True])
async def test_a_lock_that_was_got_is_held_for_the_lease(redis: RedisServer, again: bool) -> None:
    """Others find it held for all of that time, should this worker say no more; also when it was lost and got again."""
    lock = "signing:token-lock:whole"
    async with RedisTokenStore(redis.url, "whole", lease=120) as store, store.lock():
        if again:
            # It has been renewed: the next time would be in 40 s.
            while float(await ask(redis, "HGET", lock, "until")) < time.time() + 60:
                await asyncio.sleep(0.02)
            await ask(redis, "DEL", lock)
            await store.load()
        async with asyncio.timeout(20):
            while float(await ask(redis, "HGET", lock, "until")) < time.time() + 60:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("other", ["tenant:lock", "-lock:tenant", "tenant-lock", "Tenant", "tenant "])
async def test_no_name_reaches_what_is_anothers(shared: RedisServer, other: str) -> None:
    """Neither its token nor its lock, however alike the names are."""
    async with RedisTokenStore(shared.url, "tenant") as one, RedisTokenStore(shared.url, other) as two:
        await one.save(OLD)
        await two.save(NEW)
        async with one.lock(), two.lock():
            assert (await one.load(), await two.load()) == (OLD, NEW)
    for name, kept in (("tenant", OLD), (other, NEW)):
        async with RedisTokenStore(shared.url, name) as store:
            assert await store.load() == kept


async def test_a_user_of_redis_without_channels_is_told(redis: RedisServer) -> None:
    """A lock that could not be kept while paused is none: Redis's word for what is missing is in the error."""
    await ask(redis, "ACL", "SETUSER", "app", "on", f">{PASSWORD}", "+@all", "~signing:*", "resetchannels")
    async with RedisTokenStore(redis.url.replace("://", f"://app:{PASSWORD}@"), "a") as store:
        await store.save(NEW)
        with pytest.raises(AuthError, match=r"lock cannot be held: .*NoPermissionError") as caught:
            async with store.lock():
                pass
        assert PASSWORD not in str(caught.value)


def worker(*arguments: str) -> subprocess.Popen[bytes]:
    """A process of its own, see the end of this module."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.redis.test_tokens", *arguments], cwd=ROOT, stdout=subprocess.PIPE
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process is killed afterwards, whatever state it is in."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line that it writes."""
    assert process.stdout is not None
    return await asyncio.to_thread(process.stdout.readline)


async def hold(url: str, read: str) -> None:
    """Hold the lock, perhaps after reading the token; then read and save."""
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


async def test_the_lock_of_the_dead_is_taken(shared: RedisServer) -> None:
    """A worker is killed while it holds the lock: when its lease is over, another takes it."""
    async with RedisTokenStore(shared.url, "held", lease=0.3) as store:
        await store.save(OLD)
        with ended(worker("hold", shared.url, "read")) as process:
            assert await line(process) == b"held\n"
            process.kill()
            async with asyncio.timeout(20), store.lock():
                assert await store.load() == OLD


async def test_the_lock_of_the_paused_who_have_not_read_is_taken(shared: RedisServer) -> None:
    """It cannot have used the token. Woken, it queues for the lock again, and goes on from the newer token."""
    async with RedisTokenStore(shared.url, "held", lease=0.3) as store:
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


async def test_a_worker_paused_in_a_refresh_loses_nothing(shared: RedisServer) -> None:
    """Stopped past its lease while the server answers, it keeps the lock: the refresh token is used once, and the
    others are told who is in the way; woken, it saves, and they go on with its token.
    """
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slowly(request: Any, received: Any) -> Any:
        asked.set()
        await answer.wait()
        return await grants("second")(request, received)

    async with Scripted(slowly) as server, RedisTokenStore(shared.url, "held", lease=0.3) as store:
        await store.save(OLD)
        with ended(worker("refresh", shared.url, server.base_url)) as process:
            async with oauth_for(server.base_url, store=store) as oauth:
                await asked.wait()
                process.send_signal(signal.SIGSTOP)
                answer.set()
                with pytest.raises(
                    AuthError, match=rf"by process {process.pid} on .*, which has been paused"
                ) as caught:
                    await oauth.access_token()
                assert caught.value.__context__ is None
                process.send_signal(signal.SIGCONT)
                assert await line(process) == b"access-second\n"
                assert await oauth.access_token() == "access-second"
        assert len(server.token_requests) == 1


# Whoever may have used the refresh token

TOKEN_KEY, LOCK_KEY = "signing:token:a", "signing:token-lock:a"


@contextlib.asynccontextmanager
async def two_stores(server: RedisServer, **settings: Any) -> AsyncIterator[tuple[RedisTokenStore, RedisTokenStore]]:
    """Two workers of one token that has expired."""
    one, two = RedisTokenStore(server.url, "a", **settings), RedisTokenStore(server.url, "a", **settings)
    async with one, two:
        await ask(server, "DEL", TOKEN_KEY, LOCK_KEY)
        await one.save(OLD)
        yield one, two


async def loaded_in_the_lock(store: RedisTokenStore) -> Token | None:
    """What a refresh would begin with."""
    async with store.lock():
        return await store.load()


async def not_yet(task: asyncio.Task[Any], seconds: float) -> None:
    """The task does not end within this time."""
    await asyncio.wait([task], timeout=seconds)
    assert not task.done()


async def test_a_refresher_that_lost_the_lock_is_waited_for(shared: RedisServer) -> None:
    """For as long as it is heard of, be it for longer than the grace; then the others go on from its token."""
    async with two_stores(shared, lease=0.3, grace=0.6) as (one, two), one.lock():
        await one.load()
        await ask(shared, "DEL", LOCK_KEY)
        waiting = asyncio.create_task(loaded_in_the_lock(two))
        await not_yet(waiting, 0.8)
        await one.save(NEW)
        assert await asyncio.wait_for(waiting, 20) == NEW


async def test_a_refresher_is_heard_of_for_as_long_as_it_refreshes(shared: RedisServer) -> None:
    """Should its connection break late in a slow token request, the grace begins then."""
    async with two_stores(shared, lease=0.1) as (one, _), one.lock():
        await one.load()
        for key in (LOCK_KEY, "signing:none"):
            before = await ask(shared, "HGET", TOKEN_KEY, "seen")
            async with asyncio.timeout(20):
                while await ask(shared, "HGET", TOKEN_KEY, "seen") == before:
                    await asyncio.sleep(0.02)
            await ask(shared, "DEL", key)


async def test_a_task_that_waits_for_the_lock_when_its_holder_ends_takes_nothing(shared: RedisServer) -> None:
    """The lock was lost, and the block that held it is over: the task reads the token, and the lock is free."""
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


async def test_a_refresher_that_goes_on_for_ever_is_named(shared: RedisServer) -> None:
    """A worker does not wait for it without end."""
    async with two_stores(shared, lease=0.2, grace=0.3) as (one, two), one.lock():
        await one.load()
        await ask(shared, "DEL", LOCK_KEY)
        with pytest.raises(AuthError, match=r"locked by process \d+ on .*, which is still connected and may have used"):
            await loaded_in_the_lock(two)


async def test_a_restart_that_lost_the_mark_is_waited_out(redis: RedisServer) -> None:
    """What Redis was told last it may have lost, so after a restart nobody refreshes before the grace is over."""
    # By default what was just written may be lost, though Redis has said that it is kept.
    await ask(redis, "CONFIG", "SET", "appendfsync", "always")
    async with two_stores(redis, lease=0.3, grace=2.0) as (one, two):
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
        redis.restart()
        began = time.monotonic()
        assert await loaded_in_the_lock(two) == OLD
        # Redis counts whole seconds.
        assert time.monotonic() - began > 0.9


async def test_an_authorization_does_not_wait_for_the_grace(redis: RedisServer) -> None:
    """Somebody who logs in after a restart, or beside a refresher that is gone, is not kept waiting."""
    async with two_stores(redis, grace=60) as (_, two):
        await ask(redis, "HSET", TOKEN_KEY, "refresher", "host:1:gone", "seen", "9999999999")
        redis.restart()
        async with asyncio.timeout(20), two.lock():
            await two.save(NEW)
        assert await loaded_in_the_lock(two) == NEW


async def test_a_valid_token_that_is_new_to_a_worker_is_not_waited_for(redis: RedisServer) -> None:
    """It is adopted, and not refreshed: nothing stands against that, also after a restart."""
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


async def test_a_token_that_was_saved_late_is_not_waited_for(redis: RedisServer) -> None:
    """Redis was restarted while the token server responded: the refresher itself goes on as soon as Redis is back."""

    async def failing(request: Any, received: Any) -> Any:
        redis.kill()
        return await grants("second")(request, received)

    async with (
        Scripted(failing) as server,
        RedisTokenStore(redis.url, "a") as store,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        await store.save(OLD)
        with pytest.raises(AuthError, match="cannot be saved"):
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


async def test_a_clock_of_redis_that_is_set_back_holds_nobody_up_for_long(shared: RedisServer) -> None:
    """What was written at a later time by the former clock is over after a lease and a grace all the same."""
    async with two_stores(shared, lease=0.2, grace=0.4) as (_, two):
        ahead = str(time.time() + 3600)
        await ask(shared, "HSET", LOCK_KEY, "owner", "host:1:gone", "until", ahead)
        await ask(shared, "HSET", TOKEN_KEY, "refresher", "host:1:gone", "seen", ahead)
        async with asyncio.timeout(20):
            assert await loaded_in_the_lock(two) == OLD


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_a_mark_is_removed_as_soon_as_redis_is_back(redis: RedisServer, fault: str) -> None:
    """A refresh that failed because Redis did not respond costs the others no grace."""
    async with two_stores(redis, lease=0.3, timeout=0.3) as (one, _):
        with contextlib.suppress(ZeroDivisionError):
            async with one.lock():
                await one.load()
                still(redis, fault)
                raise ZeroDivisionError
        with pytest.raises(AuthError, match="the lock waits to be released there"):
            await loaded_in_the_lock(one)
        redis.wake() if fault == "stopped" else redis.start()
        async with asyncio.timeout(20):
            while await ask(redis, "HGET", TOKEN_KEY, "refresher") is not None:
                await asyncio.sleep(0.02)
            assert await loaded_in_the_lock(one) == OLD


async def test_a_store_is_closed_though_its_mark_cannot_be_removed(redis: RedisServer) -> None:
    """The mark ends with its grace."""
    store = RedisTokenStore(redis.url, "a", timeout=0.2)
    await store.save(OLD)
    with contextlib.suppress(AuthError):
        async with store.lock():
            await store.load()
            redis.kill()
            await store.load()
    await asyncio.wait_for(store.aclose(), 20)


async def test_who_waits_in_the_same_store_waits_for_its_save(redis: RedisServer) -> None:
    """A second refresh of one store begins when the token of the first one is saved."""
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


async def test_a_user_of_redis_without_info_is_told(redis: RedisServer) -> None:
    """Without it a restart could not be told: Redis's word for what is missing is in the error."""
    await ask(redis, "ACL", "SETUSER", "app", "on", f">{PASSWORD}", "+@all", "-info", "~signing:*", "&signing:*")
    async with RedisTokenStore(redis.url.replace("://", f"://app:{PASSWORD}@"), "a") as store:
        with pytest.raises(AuthError, match=r"cannot be saved: .*the user needs \+info"):
            await store.save(NEW)


# Which of two tokens is newer


async def test_an_authorization_while_redis_is_empty_is_newer_than_what_workers_know(redis: RedisServer) -> None:
    """However many tokens they have seen, and whatever Redis's clock says: they learn the new one."""
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


async def test_a_backup_does_not_bring_back_a_token_from_before_an_authorization(redis: RedisServer) -> None:
    """The worker that knows the newer token puts it back over the older one, though that was refreshed more often."""
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


async def test_a_fence_does_not_grow_with_every_authorization(shared: RedisServer) -> None:
    """The last ones are enough to tell what is newer."""
    async with two_stores(shared) as (one, two):
        for _ in range(20):
            await one.save(OLD)
        fence = (await ask(shared, "HGET", TOKEN_KEY, "fence")).decode()
        assert [len(part) for part in fence.removesuffix(":1").split(".")] == [8] * 16
        backup = await ask(shared, "DUMP", TOKEN_KEY)
        await two.save(NEW)
        await ask(shared, "RESTORE", TOKEN_KEY, "0", backup, "REPLACE")
        assert await two.load() == NEW


async def test_a_token_near_its_end_is_not_refreshed_when_redis_was_emptied(redis: RedisServer) -> None:
    """Another worker may have refreshed it already, and need Redis no sooner than its own token ends."""
    async with two_stores(redis, lease=0.1, grace=0.2) as (one, two):
        await one.save(Token("access", "refresh", datetime.now(UTC) + timedelta(seconds=3)))
        await two.load()
        await asyncio.sleep(2.75)
        await ask(redis, "FLUSHALL")
        with pytest.raises(AuthError, match="lost its data"):
            await loaded_in_the_lock(two)


# What is kept

KEYS = [base64.urlsafe_b64encode(bytes([number]) * 32).decode() for number in range(3)]


async def test_encrypted_at_rest_and_the_key_changed(shared: RedisServer) -> None:
    """Redis holds nothing readable; a new key is put in front, and the old one is not needed after a save."""

    def opened(*keys: str) -> RedisTokenStore:
        return RedisTokenStore(shared.url, "kept", key=keys)

    async with opened(KEYS[0]) as first, opened(KEYS[1], KEYS[0]) as both, opened(KEYS[1]) as second:
        await first.save(NEW)
        assert b"access" not in str(await ask(shared, "HGETALL", "signing:token:kept")).encode()
        assert await both.load() == NEW
        with pytest.raises(AuthError, match=r"cannot be used, and was left as it is: no key .* opens it") as caught:
            await second.load()
        assert caught.value.__context__ is None
        async with both.lock():
            await both.load()
            await both.save(NEW)
        assert await second.load() == NEW


@pytest.mark.parametrize("key", [None, KEYS[1]])
async def test_what_cannot_be_read_is_never_written_over(shared: RedisServer, key: str | None) -> None:
    """A worker with no key, or the wrong one, gets a clear error, refreshes nothing, and leaves what is there."""
    async with (
        Scripted(grants()) as server,
        RedisTokenStore(shared.url, "kept-2", key=KEYS[0]) as right,
        RedisTokenStore(shared.url, "kept-2", key=key) as wrong,
        oauth_for(server.base_url, store=wrong) as oauth,
    ):
        await right.save(OLD)
        with pytest.raises(AuthError, match=r"was left as it is: (it is encrypted, and no key|no key)"):
            await oauth.refresh(rejected=OLD)
        assert not server.requests
        assert await right.load() == OLD


async def test_a_token_is_not_read_under_another_name(shared: RedisServer) -> None:
    """Who can write to Redis cannot give one tenant the token of another: what is encrypted belongs to its name."""
    async with (
        RedisTokenStore(shared.url, "tenant-1", key=KEYS[0]) as one,
        RedisTokenStore(shared.url, "tenant-2", key=KEYS[0]) as two,
    ):
        await one.save(NEW)
        await ask(shared, "COPY", "signing:token:tenant-1", "signing:token:tenant-2")
        with pytest.raises(AuthError, match="no key"):
            await two.load()


@pytest.mark.parametrize(
    "record", ["{", "{}", "[]", '{"token": "{}"}', '{"token": "{", "clock": 1, "lives": 1}', '{"token": 5}', "***"]
)
async def test_a_broken_record_is_an_error_and_stays(shared: RedisServer, record: str) -> None:
    """What is no token is told as that, without its content, and left alone."""
    key = "signing:token:broken"
    await ask(shared, "DEL", key)
    await ask(shared, "HSET", key, "fence", "1", "record", record)
    for settings in ({}, {"key": KEYS[0]}):
        async with RedisTokenStore(shared.url, "broken", **settings) as store:  # type: ignore[arg-type]  # these fit
            with pytest.raises(AuthError, match="was left as it is: ") as caught:
                await store.load()
            assert caught.value.__context__ is None
    assert await ask(shared, "HGET", key, "record") == record.encode()


async def test_a_key_of_something_else_is_an_error(shared: RedisServer) -> None:
    """A name that is in use for something that is no token is told in Redis's words."""
    await ask(shared, "SET", "signing:token:foreign", "x")
    async with RedisTokenStore(shared.url, "foreign") as store:
        with pytest.raises(AuthError, match=r"cannot be used: redis://127.0.0.1:\d+: ResponseError: .*WRONGTYPE"):
            await store.load()


async def test_an_expiry_is_told_in_the_readers_own_time(shared: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that lives a minute lives a minute for a worker whose clock is an hour fast."""
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


# Redis at fault


async def bounded(work: Any) -> float:
    """How long it takes; it must end in less than two seconds with an `AuthError` that names the place alone."""
    began = time.monotonic()
    with pytest.raises(AuthError) as caught:
        await work
    took = time.monotonic() - began
    assert "redis://127.0.0.1:" in str(caught.value)
    assert caught.value.__context__ is None
    return took


def still(server: RedisServer, fault: str) -> None:
    """Stop it or kill it."""
    server.stop() if fault == "stopped" else server.kill()


@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize("given", ["url", "client"])
async def test_no_step_hangs(redis: RedisServer, fault: str, given: str) -> None:
    """Load, save and lock are an error within two seconds, though a client that was given repeats and waits longer."""
    from redis.asyncio import Redis

    async with Redis.from_url(redis.url, decode_responses=True) as client:
        async with RedisTokenStore(redis.url if given == "url" else client, "a", timeout=0.4) as store:
            await store.save(NEW)
            still(redis, fault)
            try:
                patient = RedisTokenStore(redis.url if given == "url" else client, "a")
                for work in (store.load(), store.save(OLD), patient.lock().__aenter__()):
                    if given == "url":
                        assert await bounded(work) < 2
                    else:
                        began = time.monotonic()
                        with pytest.raises(AuthError, match="the client that was given"):
                            await work
                        assert time.monotonic() - began < 2
            finally:
                redis.wake() if fault == "stopped" else redis.start()
                await patient.aclose()
            assert await store.load() in (NEW, OLD)
        assert await client.ping()


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_the_token_in_hand_serves_on(redis: RedisServer, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """While it is valid every call goes on with it, at most one of them is held up, and the log says it once."""
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
        assert time.monotonic() - began < 2
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
        assert "the current token stays in use" in caplog.text
        assert not server.requests
        redis.wake() if fault == "stopped" else redis.start()


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_a_code_is_not_used_up_for_a_token_that_cannot_be_kept(redis: RedisServer, fault: str) -> None:
    """It works only once: who comes back with it when Redis is back needs not send the user to authorize again."""
    async with (
        Scripted(grants("first")) as server,
        RedisTokenStore(redis.url, "a", timeout=0.5) as store,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        still(redis, fault)
        with pytest.raises(AuthError, match="the token store cannot be used"):
            await oauth.exchange("code")
        assert not server.token_requests
        redis.wake() if fault == "stopped" else redis.start()
        assert (await oauth.exchange("code")).access_token == "access-first"
        token = await store.load()
        assert token is not None
        assert token.access_token == "access-first"


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_a_token_that_could_not_be_saved_is_saved_later(redis: RedisServer, fault: str) -> None:
    """Redis fails during the request: the call fails in time, the lock stays, and when Redis is back the token is saved
    by itself, so that no worker uses the old refresh token again."""

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
        assert await bounded(oauth.access_token()) < 2
        assert await bounded(oauth.access_token()) < 2
        await asyncio.sleep(0.6)
        redis.wake() if fault == "stopped" else redis.start()
        # Whoever came before that, now that the lock has run out, would refresh once more.
        await _saved(other, "access-second")
        assert await others.access_token() == "access-second"
        assert await oauth.access_token() == "access-second"
        assert len(server.token_requests) == 1


async def _saved(store: RedisTokenStore, access_token: str) -> None:
    """Wait until this token is in the store."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(AuthError):
                token = await store.load()
                if token is not None and token.access_token == access_token:
                    return
            await asyncio.sleep(0.02)


async def test_a_token_that_can_never_be_saved_is_told(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """A store that is closed while a token waits to be saved says what is lost; nothing of it is left behind."""
    store = RedisTokenStore(redis.url, "a", timeout=0.2)
    await store.save(OLD)
    with contextlib.suppress(AuthError):
        async with store.lock():
            await store.load()
            redis.kill()
            await store.save(NEW)
    with pytest.raises(AuthError, match="a refreshed token waits to be saved there"):
        async with store.lock():
            pass
    await store.aclose()
    assert "a refreshed token was never saved" in caplog.text
    assert "access-new" not in caplog.text


async def test_a_save_that_waits_gives_way_to_a_newer_token(redis: RedisServer) -> None:
    """Another worker saved while this one could not: what waits is dropped, and the store works on."""
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
            async with asyncio.timeout(20):
                while cut._finishing is not None and not cut._finishing.done():
                    await asyncio.sleep(0.02)
            await cut.aclose()
            async with asyncio.timeout(20), cut.lock():
                assert await cut.load() == Token("access-newest")


async def test_an_answer_that_was_lost_does_not_make_a_save_fail(redis: RedisServer) -> None:
    """Redis saved, and its answer came too late: the save that is tried again finds that it was done."""
    async with slow_way(redis.port) as way, RedisTokenStore(way.url, "a", timeout=0.4) as store:
        await store.save(OLD)
        async with store.lock():
            await store.load()
            way.delay = 0.3
            with pytest.raises(AuthError, match="cannot be saved"):
                await store.save(NEW)
        way.delay = 0.0
        async with asyncio.timeout(20):
            while store._finishing is None or not store._finishing.done():
                await asyncio.sleep(0.05)
        async with store.lock():
            assert await store.load() == NEW


async def test_a_slow_redis_is_only_slow(shared: RedisServer) -> None:
    """Twenty milliseconds each way change nothing but the time it takes."""
    async with (
        slow_way(shared.port, 0.02) as way,
        Scripted(grants("slow")) as server,
        RedisTokenStore(way.url, "slow") as store,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        await store.save(OLD)
        assert await oauth.access_token() == "access-slow"


async def test_emptied_the_newest_token_that_is_known_comes_back(redis: RedisServer) -> None:
    """Who comes first with an older, expired token is held back until the one with the newer has come."""
    late = Token("access-late", "refresh-late", datetime.now(UTC) + timedelta(seconds=0.5))
    later = Token("access-later", "refresh-later", datetime.now(UTC) + timedelta(seconds=1.0))
    async with (
        Scripted(grants("new")) as server,
        RedisTokenStore(redis.url, "a", grace=1.5) as idle,
        RedisTokenStore(redis.url, "a", grace=1.5) as busy,
        oauth_for(server.base_url, store=idle) as oauth,
    ):
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


async def test_emptied_an_old_token_is_kept_back_for_as_long_as_a_token_lives(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that knows only an expired token says what is lost, instead of using a refresh token that may be old."""
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
        with pytest.raises(AuthError, match=r"lost its data: .* kept back for 3[56]\d\d s more") as caught:
            await oauth.access_token()
        assert "-old" not in str(caught.value)
        assert not server.requests
        monkeypatch.undo()
        # A new authorization does not wait.
        await store.save(NEW)
        async with store.lock():
            assert await store.load() == NEW


async def test_emptied_a_valid_token_is_put_back(redis: RedisServer) -> None:
    """The next step of a worker that knows it restores it for all the others."""
    async with RedisTokenStore(redis.url, "a") as store, RedisTokenStore(redis.url, "a") as other:
        await store.save(NEW)
        await ask(redis, "FLUSHALL")
        assert await other.load() is None
        assert await store.load() == NEW
        assert await other.load() == NEW


async def test_an_answer_that_comes_late_is_not_the_newest(redis: RedisServer) -> None:
    """A reading that was overtaken by a save does not make a worker restore the older token later."""
    async with RedisTokenStore(redis.url, "a") as store:
        await store.save(OLD)
        known = store._known
        kept = await ask(redis, "HMGET", "signing:token:a", "record", "fence", "saved")
        await store.save(NEW)
        assert store._learn(known, *[field.decode() for field in kept], time.time()) == OLD
        await ask(redis, "FLUSHALL")
        assert await store.load() == NEW


# Settings, text, and the end


def test_settings_are_checked() -> None:
    """Each error names the setting and the value, and no password."""
    url = f"redis://:{PASSWORD}@127.0.0.1"
    for settings, words in (
        ({"name": ""}, "name must be a text that is not empty, in whole characters, not ''"),
        ({"name": "half-\ud800"}, r"name must be a text that is not empty, in whole characters, not 'half-\ud800'"),
        ({"prefix": "\udfff:"}, r"prefix must be a text, in whole characters, not '\udfff:'"),
        ({"prefix": None}, "prefix must be a text, in whole characters, not None"),
        ({"lease": 0}, "lease must be seconds above 0, not 0"),
        ({"grace": 0}, "grace must be seconds above 0, not 0"),
        ({"timeout": float("nan")}, "timeout must be seconds above 0, not nan"),
        ({"key": "short"}, "an encryption key must be 32 bytes"),
        ({"redis": 5}, "redis must be a URL or a client of redis.asyncio, not int"),
        ({"redis": "http://x"}, "the URL must begin with redis://, rediss:// or unix://"),
        ({"redis": f"redis://:{PASSWORD}@h:port"}, "the URL is not usable: its host or port cannot be read"),
        ({"redis": f"redis://:{PASSWORD}@h/?socket_timeout=x"}, "the URL is not usable: Invalid value for"),
    ):
        known: dict[str, Any] = {"redis": url, "name": "a"}
        with pytest.raises(ConfigurationError) as caught:
            RedisTokenStore(**known | settings)
        assert words in str(caught.value)
        assert PASSWORD not in str(caught.value)
        assert caught.value.__context__ is None


async def test_without_redis_py(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
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
def test_its_text_shows_the_place_alone(url: str, shown: str) -> None:
    """No password, whatever kind of URL it is."""
    assert repr(RedisTokenStore(url, "a")) == f"RedisTokenStore({shown!r}, 'a')"


async def test_a_password_is_used_and_appears_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    """The right one opens, a wrong one is an error in Redis's words; neither is in a text, a traceback or the log."""
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
async def test_a_password_that_a_server_echoes_is_taken_out(way: str) -> None:
    """Wherever in the URL it stands, also percent-encoded, and whatever answers there."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1000):
                writer.write(f"-ERR no {PASSWORD}! for you\r\n".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        shown = way.format(f"{PASSWORD}%21")
        url = f"redis{shown}{place}" if "@" in way else f"redis://{place}{shown}"
        async with RedisTokenStore(url, "a") as store:
            with pytest.raises(AuthError, match="for you") as caught:
                await store.load()
            assert PASSWORD not in str(caught.value)
            assert place in repr(store)


async def test_a_client_that_swallows_cancellations() -> None:
    """A caller's time-out counts all the same."""

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


async def test_over_tls(tmp_path: Path) -> None:
    """A rediss:// URL checks the server's certificate."""
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
def test_forgotten_it_warns(shared: RedisServer, ending: str, warned: bool) -> None:
    """A store that was used and never closed says so when the program ends."""
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


async def test_a_store_in_use_warns_when_it_is_dropped(shared: RedisServer) -> None:
    """Collected while it is open it warns, and does nothing else."""
    async with RedisTokenStore(shared.url, "dropped") as store:
        store.__del__()
        await store.load()
        with pytest.warns(ResourceWarning, match="'dropped'"):
            store.__del__()


def test_in_one_event_loop_after_the_other(shared: RedisServer) -> None:
    """A command that logs in, and one that works on: closed in between, the store goes on in the next loop."""
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
