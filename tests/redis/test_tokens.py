"""The token store in Redis: fencing tokens, killed and cut off holders, clocks, encryption, and outages of Redis."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
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
from tests.auth.oauth_servers import Scripted, WatchedStore, grants, oauth_for
from tests.redis.server import RedisServer, running_redis, slow_way
from tests.storage.token_stores import FencedTokenStoreConformance

ROOT = Path(__file__).parents[2]
OLD = Token("access-old", "refresh-old", datetime(2020, 1, 1, tzinfo=UTC))
NEW = Token("access-new", "refresh-new", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC))
PASSWORD = "pass-word-4711"
TOKEN_KEY, LOCK_KEY = "signing:token:a", "signing:token-lock:a"
KEYS = [base64.urlsafe_b64encode(bytes([number]) * 32).decode() for number in range(3)]


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


# Redis


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    """A Redis shared by all tests that leave it running."""
    with running_redis() as server:
        yield server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis for one test, which may stop it."""
    # By default the last second of acknowledged writes may be lost.
    with running_redis("--appendfsync", "always") as server:
        yield server


async def ask(server: RedisServer, *command: Any) -> Any:
    """Return the response to one command."""
    from redis.asyncio import Redis

    async with Redis.from_url(server.url) as client:
        response: Any = client.execute_command(*command)  # redis-py leaves it so
        return await response


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


# Locks and fences


class TestFences(FencedTokenStoreConformance):
    """A worker that lost its lock, as after an outage of its network."""

    @pytest.fixture
    async def open_store(self, redis: RedisServer) -> AsyncIterator[Any]:
        """Open the same name again."""
        async with contextlib.AsyncExitStack() as opened:

            def open_store() -> RedisTokenStore:
                store = RedisTokenStore(redis.url, "a", lease=0.2, timeout=5)
                opened.push_async_callback(store.aclose)
                return store

            yield open_store

    @pytest.fixture
    def lapse(self, redis: RedisServer) -> Any:
        async def lapse(store: Any) -> None:
            await ask(redis, "DEL", LOCK_KEY)

        return lapse


async def test_lock_is_renewed_while_it_is_held_and_waiting_for_it_is_logged(
    shared: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_stores(shared, lease=1.5) as (one, two), one.lock():
        waiting = asyncio.create_task(loaded_in_the_lock(two))
        await not_yet(waiting, 2.5)
        waiting.cancel()
    (record,) = caplog.records
    assert "'a'): waiting for the lock, which process " in record.message


async def test_lock_lost_before_the_load_is_acquired_again(redis: RedisServer) -> None:
    """The refresh begins with the newer token."""
    async with two_stores(redis, lease=3) as (one, two):
        async with one.lock():
            await ask(redis, "DEL", LOCK_KEY)
            async with two.lock():
                reading = asyncio.create_task(one.load())
                await not_yet(reading, 0.2)
                await two.save(NEW)
            assert await reading == NEW
            await one.save(Token("access-newer"))
        assert await two.load() == Token("access-newer")


@pytest.mark.parametrize("other", ["tenant:lock", "-lock:tenant", "Tenant"])
async def test_similar_names_do_not_share_tokens_or_locks(shared: RedisServer, other: str) -> None:
    async with RedisTokenStore(shared.url, "tenant") as one, RedisTokenStore(shared.url, other) as two:
        await one.save(OLD)
        await two.save(NEW)
        async with one.lock(), two.lock():
            assert (await one.load(), await two.load()) == (OLD, NEW)
    for name, kept in (("tenant", OLD), (other, NEW)):
        async with RedisTokenStore(shared.url, name) as store:
            assert await store.load() == kept


async def test_lock_works_with_a_client_that_has_the_methods_of_redis_client_alone(shared: RedisServer) -> None:
    from redis.asyncio import Redis

    async with Redis.from_url(shared.url) as client:

        class Wrapped:
            async def execute_command(self, *args: Any, **options: Any) -> Any:
                return await client.execute_command(*args, **options)  # type: ignore[no-untyped-call]  # redis-py leaves it so

        async with RedisTokenStore(Wrapped(), "wrapped") as store:
            for token in (OLD, NEW):
                async with store.lock():
                    await store.save(token)
            assert await store.load() == NEW


# Crashes and restarts in a refresh


async def refresh(url: str, base_url: str, lease: str, grace: str, rejected: str) -> None:
    """Replace the token, in a process of its own."""
    async with (
        RedisTokenStore(url, "a", lease=float(lease), grace=float(grace)) as store,
        oauth_for(base_url, store=store) as oauth,
    ):
        await oauth.refresh(rejected)


@pytest.mark.parametrize("rejected", ["access-old", "access-valid"])
async def test_no_worker_refreshes_within_the_grace_after_one_was_killed_in_a_refresh(
    rejected: str, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds for a new `OAuth` and after a restart of Redis, too. A warning names the process."""
    requested, grant = asyncio.Event(), grants("new")
    valid = Token("access-valid", "refresh-valid", datetime.now(UTC) + timedelta(hours=1))

    async def hang_once(request: Any, received: Any) -> Any:
        if requested.is_set():
            return await grant(request, received)
        requested.set()
        return await asyncio.sleep(60)

    async with Scripted(hang_once) as server, two_stores(redis, lease=0.3, grace=6) as (store, _):
        await store.save(OLD if rejected == "access-old" else valid)
        command = [sys.executable, "-m", "tests.redis.test_tokens", redis.url, server.base_url, "0.3", "6", rejected]
        with subprocess.Popen(command, cwd=ROOT) as process:
            try:
                await asyncio.wait_for(requested.wait(), 60)
            finally:
                process.kill()
        killed = time.monotonic()
        redis.restart()
        async with oauth_for(server.base_url, store=store) as oauth:
            assert (await oauth.refresh(rejected)).access_token == "access-new"
        assert time.monotonic() - killed > 4
        assert len(server.token_requests) == 2
    assert f"waiting for the lock, which process {process.pid} on " in caplog.text


async def test_no_worker_refreshes_within_the_grace_after_a_restart_of_redis(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The mark of a refresh may be lost. A token that was saved since the restart is refreshed at once."""
    async with two_stores(redis, grace=3) as (one, two):
        redis.restart()
        began = time.monotonic()
        assert await loaded_in_the_lock(two) == OLD
        assert time.monotonic() - began > 1.9
        assert "s: Redis was restarted, and the refresh token may have been used" in caplog.text
        redis.restart()
        await one.save(NEW)
        assert await loaded_in_the_lock(two) == NEW
        assert caplog.text.count("Redis was restarted") == 1


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_lock_of_a_failed_refresh_is_removed_as_soon_as_redis_is_back(redis: RedisServer, fault: str) -> None:
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
            while await ask(redis, "EXISTS", LOCK_KEY):
                await asyncio.sleep(0.02)
            assert await loaded_in_the_lock(one) == OLD


# The stored record


async def test_token_is_encrypted_for_its_name_and_the_key_can_be_rotated(shared: RedisServer) -> None:

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
    async with RedisTokenStore(shared.url, "copy", key=KEYS[1]) as copy:
        await ask(shared, "COPY", "signing:token:kept", "signing:token:copy")
        with pytest.raises(AuthError, match="none of the given keys decrypts it"):
            await copy.load()


@pytest.mark.parametrize("record", ["{", "{}", "[]", '{"access_token": 5}', '{"token_type": "DPoP"}', "***"])
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
async def test_token_refreshed_during_an_outage_is_saved_when_redis_is_back(redis: RedisServer, fault: str) -> None:
    """The call fails in time and the lock stays, so no worker uses the old refresh token again."""

    async def failing(request: Any, received: Any) -> Any:
        still(redis, fault)
        return await grants("second")(request, received)

    async with (
        Scripted(failing, grants("third")) as server,
        RedisTokenStore(redis.url, "a", lease=0.5, timeout=2) as store,
        RedisTokenStore(redis.url, "a", lease=0.5, timeout=2) as other,
        oauth_for(server.base_url, store=store) as oauth,
        oauth_for(server.base_url, store=other) as others,
    ):
        await store.save(OLD)
        assert await bounded(oauth.access_token()) < 10
        assert await bounded(oauth.access_token()) < 10
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


async def test_closing_with_an_unsaved_token_logs_an_error(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisTokenStore(redis.url, "a", timeout=0.5)
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
        (["CONFIG", "SET", "maxmemory", "1"], True),
        (["ACL", "SETUSER", "default", "-evalsha", "-eval"], False),
    ],
    ids=["out of memory", "not permitted"],
)
async def test_refused_script_is_permanent_unless_redis_cannot_be_written_for_now(
    redis: RedisServer, command: list[str], transient: bool
) -> None:
    async with RedisTokenStore(redis.url, "a") as store:
        await ask(redis, *command)
        with pytest.raises(AuthError) as caught:
            await store.save(NEW)
    assert caught.value.transient is transient


async def eventually_loaded(store: RedisTokenStore) -> Token | None:
    """Load inside the lock as soon as the store has finished its pending save."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(AuthError):
                return await loaded_in_the_lock(store)


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


def test_missing_redis_py_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
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


if __name__ == "__main__":
    asyncio.run(refresh(*sys.argv[1:]))
