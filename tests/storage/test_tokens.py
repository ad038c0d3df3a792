"""The promises of a `TokenStore`, in memory, in a file, in Redis and in PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from signing_async import AuthError, FileTokenStore, MemoryTokenStore, Token, TokenStore, TokenSuperseded
from signing_async.postgres import PostgresTokenStore
from signing_async.redis import RedisTokenStore
from tests.auth.oauth_servers import Scripted, grants, oauth_for

OpenStore = Callable[..., TokenStore]

FULL = Token("access-1", "refresh-1", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC), "DPoP")
BARE = Token("access-2")
LONG = Token("a" * 20_000, "r" * 20_000, datetime(1999, 1, 1, tzinfo=UTC))
QUICK = Token("access-quick", "refresh-quick")
LATE = Token("access-late", "refresh-late")
KEYS = [bytes([number]) * 32 for number in range(2)]
DATABASES = ["redis", "postgres"]
TIMEOUT = 60.0


@pytest.fixture(params=["memory", "file", *DATABASES])
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """The storage of tokens: ``open`` opens it as another worker would, ``lapse`` takes the lock from its holder."""
    memory = MemoryTokenStore()
    async with contextlib.AsyncExitStack() as opened:
        server: Any = request.getfixturevalue(request.param) if request.param in DATABASES else None
        dsn = await server.new_schema() if request.param == "postgres" else ""

        def open_store(name: str = "anna", *, lease: float = 5.0, **settings: Any) -> Any:
            if request.param == "memory":
                return memory
            if request.param == "file":
                return FileTokenStore(tmp_path / "token.json")
            known: dict[str, Any] = {"key": KEYS[0], "grace": 0.2, "timeout": 10, **settings}
            store: Any = PostgresTokenStore(dsn, name, **known) if dsn else None
            store = store or RedisTokenStore(server.url, name, prefix=f"{request.node.name}:", lease=lease, **known)
            opened.push_async_callback(store.aclose)
            return store

        async def lapse() -> None:
            if not dsn:
                async with Redis.from_url(server.url) as client:
                    await client.delete(f"{request.node.name}:token-lock:anna")
                return
            clients = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            ended = {row["pid"] for row in await server.execute(f"SELECT pid, pg_terminate_backend(pid) {clients}")}
            while ended & {row["pid"] for row in await server.execute(f"SELECT pid {clients}")}:
                await asyncio.sleep(0.01)

        yield SimpleNamespace(open=open_store, lapse=lapse)


@pytest.fixture
def open_store(storage: Any) -> OpenStore:
    """Open the storage."""
    found: OpenStore = storage.open
    return found


async def locked_load(store: TokenStore) -> Token | None:
    """Load as a refresh does."""
    async with store.lock():
        return await store.load()


in_a_database = pytest.mark.parametrize("storage", DATABASES, indirect=True)


async def test_saved_token_is_loaded(open_store: OpenStore) -> None:
    """Every store object on the storage loads the complete token, which replaces the previous one, and shows none.

    Inside the lock, a task that the holder starts belongs to the holder.
    """
    store = open_store()
    assert await store.load() is None
    async with store.lock():
        assert await store.load() is None
    await store.save(Token("access-0", "refresh-0", datetime.now(UTC) + timedelta(hours=1)))
    for token in (LONG, FULL):
        await store.save(token)
        assert await store.load() == token
        assert await open_store().load() == token
    for secret in ("access-1", "refresh-1"):
        assert secret not in f"{store!r} {store}"
    async with store.lock():
        assert await store.load() == FULL
        await store.save(LONG)
        await asyncio.wait_for(asyncio.create_task(store.save(BARE)), TIMEOUT)
        assert await store.load() == BARE
    assert await open_store().load() == BARE


async def test_lock_excludes_concurrent_updates(open_store: OpenStore) -> None:
    """Many workers add 1 to a counter, and no addition is lost."""
    await open_store().save(Token("0"))

    async def add(store: TokenStore) -> None:
        async with store.lock():
            token = await store.load()
            assert token is not None
            await asyncio.sleep(0)
            await store.save(Token(str(int(token.access_token) + 1)))

    stores = [open_store() for _ in range(4)]
    await asyncio.gather(*(add(store) for store in stores for _ in range(5)))
    assert await open_store().load() == Token("20")


async def test_lock_is_free_after_an_error_and_a_cancelled_waiter_holder_or_release(open_store: OpenStore) -> None:
    """At once, not after the grace. The token is unchanged, and the error propagates."""
    store, other = open_store(grace=120), open_store(grace=120)
    await store.save(FULL)
    entered = asyncio.Event()

    async def hold(forever: bool) -> None:
        async with other.lock():
            await other.load()
            entered.set()
            if not forever:
                raise ZeroDivisionError
            await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        await hold(False)
    entered.clear()
    async with asyncio.timeout(TIMEOUT):
        async with store.lock():
            waiting = asyncio.create_task(hold(True))
            await asyncio.sleep(0.1)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert not entered.is_set()
        for steps in range(8):
            # Cancelled inside the lock, or during its release.
            entered.clear()
            holding = asyncio.create_task(hold(forever=steps == 0))
            await entered.wait()
            for _ in range(steps):
                await asyncio.sleep(0)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            for each in (store, other):
                async with each.lock():
                    assert await each.load() == FULL


# Stores whose lock can be lost while its holder lives


@in_a_database
async def test_former_holder_saves_unless_there_is_a_newer_token(storage: Any) -> None:
    """A used refresh token has one successor, which must not be lost.

    If there is a newer token, it stays, the save raises `TokenSuperseded`, and the error shows neither token.
    """
    late, quick = storage.open(), storage.open()
    await late.save(FULL)
    async with late.lock():
        await late.load()
        await storage.lapse()
        await late.save(BARE)
    assert await storage.open().load() == BARE
    async with late.lock():
        await late.load()
        await storage.lapse()
        async with asyncio.timeout(TIMEOUT), quick.lock():
            await quick.load()
            await quick.save(QUICK)
        with pytest.raises(TokenSuperseded) as caught:
            await late.save(LATE)
    assert await storage.open().load() == QUICK
    text = "".join(traceback.format_exception(caught.value))
    assert "-quick" not in text
    assert "-late" not in text


@in_a_database
async def test_former_holder_neither_loads_for_a_refresh_nor_releases_the_lock_of_the_next_holder(
    storage: Any,
) -> None:
    late, quick = storage.open(), storage.open()
    await quick.save(FULL)
    async with contextlib.AsyncExitStack() as held:
        async with late.lock():
            await storage.lapse()
            async with asyncio.timeout(TIMEOUT):
                await held.enter_async_context(quick.lock())
            with pytest.raises(AuthError, match="before the token was loaded") as caught:
                await late.load()
            assert caught.value.transient
        waiting = asyncio.create_task(locked_load(late))
        await asyncio.sleep(0.1)
        await quick.save(BARE)
        assert not waiting.done()
    assert await asyncio.wait_for(waiting, TIMEOUT) == BARE


@in_a_database
async def test_token_of_another_key_is_an_error_and_the_key_can_be_rotated(storage: Any) -> None:
    first, both, second = storage.open(), storage.open(key=KEYS[::-1]), storage.open(key=KEYS[1])
    await first.save(FULL)
    assert await both.load() == FULL
    for store, problem in (
        (second, "none of the given keys decrypts it"),
        (storage.open(key=None), "it is encrypted, and no key was given"),
    ):
        with pytest.raises(AuthError, match=f"was not changed: {problem}") as caught:
            await store.load()
        assert caught.value.__context__ is None
        async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
            with pytest.raises(AuthError):
                await oauth.refresh()
            assert not server.requests
    async with both.lock():
        await both.load()
        await both.save(FULL)
    assert await second.load() == FULL


@in_a_database
async def test_holder_keeps_the_lock_for_longer_than_the_grace(storage: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The token request of a living worker may take long. In Redis, a worker that waits for the lock says so once."""
    one, two = storage.open(lease=0.3, grace=0.9), storage.open(lease=0.3, grace=0.9)
    async with one.lock():
        waiting = asyncio.create_task(locked_load(two))
        await asyncio.wait([waiting], timeout=1.5)
        assert not waiting.done()
        await one.save(FULL)
    assert await asyncio.wait_for(waiting, TIMEOUT) == FULL
    said = [record.message for record in caplog.records if "waiting for the lock, which another" in record.message]
    assert len(said) == isinstance(one, RedisTokenStore)


@in_a_database
async def test_similar_names_share_neither_tokens_nor_locks(storage: Any) -> None:
    one = storage.open()
    await one.save(FULL)
    for name in ("anna:lock", "-lock:anna", "Anna"):
        other = storage.open(name)
        await other.save(BARE)
        async with one.lock(), asyncio.timeout(TIMEOUT), other.lock():
            assert (await one.load(), await other.load()) == (FULL, BARE)


@in_a_database
@pytest.mark.parametrize("ahead", [-3600.0, 1.0])
async def test_expiry_is_converted_to_the_clock_of_the_reader(
    storage: Any, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the clocks agree, the expiry is unchanged."""
    clock, expiry = time.time, datetime.now(UTC) + timedelta(minutes=5)
    one, two = storage.open(), storage.open()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: clock() + ahead)
        await one.save(Token("a", "r", expiry + timedelta(seconds=ahead)))
        mine = await one.load()
    theirs = await two.load()
    assert mine.expires_at == expiry + timedelta(seconds=ahead)
    assert abs((theirs.expires_at - expiry).total_seconds()) < (3 if abs(ahead) > 5 else 1.001)
