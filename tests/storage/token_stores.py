"""Conformance suites for token stores."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from signing_async.auth.token_stores import TokenStore
from signing_async.errors import TokenSuperseded
from signing_async.models import Token

__all__ = ["FencedTokenStoreConformance", "OpenStore", "TokenStoreConformance"]

OpenStore = Callable[[], TokenStore]
"""Opens the same storage again, as another worker would: a new object each time."""

_FULL = Token("access-1", "refresh-1", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC), "DPoP")
_BARE = Token("access-2")
_LONG = Token("a" * 20_000, "r" * 20_000, datetime(1999, 1, 1, tzinfo=UTC))
_QUICK = Token("access-quick", "refresh-quick")
_LATE = Token("access-late", "refresh-late")
_MOMENT = 0.1
_TIMEOUT = 60.0


class TokenStoreConformance:
    """Tests the promises of the `TokenStore` protocol, without which an `OAuth` could lose a refresh token.

    Subclass it with a fixture ``open_store`` that returns a function. Each call of the function opens the same storage
    as a new object; the storage is empty when a test begins. (If the storage is one object in memory, return that
    object each time.) The tests need pytest-asyncio. ::

        class TestMyStore(TokenStoreConformance):
            @pytest.fixture
            def open_store(self, tmp_path):
                return lambda: MyStore(tmp_path / "token")
    """

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    async def test_empty_store_returns_none(self, open_store: OpenStore) -> None:
        """Inside the lock and outside it."""
        store = open_store()
        assert await store.load() is None
        async with store.lock():
            assert await store.load() is None

    @pytest.mark.parametrize("token", [_FULL, _BARE, _LONG], ids=["full", "bare", "long"])
    async def test_saved_token_is_loaded(self, open_store: OpenStore, token: Token) -> None:
        """Every store object on the storage loads the complete token, which replaces the previous one."""
        store = open_store()
        await store.save(Token("access-0", "refresh-0", datetime.now(UTC) + timedelta(hours=1)))
        await store.save(token)
        assert await store.load() == token
        assert await open_store().load() == token

    async def test_token_saved_inside_the_lock_is_kept_after_it(self, open_store: OpenStore) -> None:
        store = open_store()
        await store.save(_FULL)
        async with store.lock():
            assert await store.load() == _FULL
            await store.save(_BARE)
            assert await store.load() == _BARE
        assert await open_store().load() == _BARE

    async def test_lock_excludes_concurrent_updates(self, open_store: OpenStore) -> None:
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

    @pytest.mark.parametrize("same", [True, False], ids=["one object", "two objects"])
    async def test_waiter_acquires_the_lock_when_it_is_released(self, open_store: OpenStore, same: bool) -> None:
        store = open_store()
        other = store if same else open_store()
        acquired = asyncio.Event()

        async def take() -> None:
            async with other.lock():
                acquired.set()

        async with store.lock():
            task = asyncio.create_task(take())
            await asyncio.sleep(_MOMENT)
            assert not acquired.is_set()
        await asyncio.wait_for(task, _TIMEOUT)
        assert acquired.is_set()

    async def test_error_inside_the_lock_releases_it(self, open_store: OpenStore) -> None:
        """The token is unchanged, and the error propagates."""
        store = open_store()
        await store.save(_FULL)

        async def fail() -> None:
            async with store.lock():
                await store.load()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        async with asyncio.timeout(_TIMEOUT), open_store().lock():
            assert await store.load() == _FULL

    async def test_cancelled_waiter_or_holder_leaves_the_lock_free(self, open_store: OpenStore) -> None:
        store, other = open_store(), open_store()
        entered = asyncio.Event()

        async def hold() -> None:
            async with other.lock():
                await other.load()
                entered.set()
                await asyncio.Event().wait()

        async with store.lock():
            waiting = asyncio.create_task(hold())
            await asyncio.sleep(_MOMENT)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert waiting.cancelled()
        holding = asyncio.create_task(hold())
        await asyncio.wait_for(entered.wait(), _TIMEOUT)
        holding.cancel()
        await asyncio.wait([holding])
        async with asyncio.timeout(_TIMEOUT), store.lock():
            pass

    async def test_holder_cancelled_during_the_release_leaves_the_lock_free(self, open_store: OpenStore) -> None:
        store, other = open_store(), open_store()
        await store.save(_FULL)
        done = asyncio.Event()

        async def hold() -> None:
            async with store.lock():
                await store.load()
                done.set()

        async with asyncio.timeout(_TIMEOUT):
            for steps in range(8):
                done.clear()
                leaving = asyncio.create_task(hold())
                await done.wait()
                for _ in range(steps):
                    await asyncio.sleep(0)
                leaving.cancel()
                await asyncio.wait([leaving])
                for each in (other, store):
                    async with each.lock():
                        assert await each.load() == _FULL

    async def test_task_started_inside_the_lock_does_not_hold_it_afterwards(self, open_store: OpenStore) -> None:
        """When it loads later, it neither acquires the lock nor blocks others."""
        store, other = open_store(), open_store()
        await store.save(_FULL)
        over = asyncio.Event()

        async def load_later() -> Token | None:
            await over.wait()
            return await store.load()

        async with store.lock():
            await store.load()
            task = asyncio.create_task(load_later())
        async with asyncio.timeout(_TIMEOUT):
            async with other.lock():
                await other.load()
                over.set()
                assert await task == _FULL
                await other.save(_BARE)
            async with other.lock(), asyncio.timeout(_TIMEOUT):
                assert await other.load() == _BARE

    async def test_repr_and_str_show_no_token(self, open_store: OpenStore) -> None:
        store = open_store()
        await store.save(_FULL)
        await store.load()
        for secret in ("access-1", "refresh-1"):
            assert secret not in f"{store!r} {store}"


class FencedTokenStoreConformance:
    """Tests a store whose lock can be lost while its holder lives: a lease expires, or a connection breaks.

    Besides ``open_store`` (see `TokenStoreConformance`) it needs a fixture ``lapse``: an ``async`` function that takes
    the store that holds the lock, and returns as soon as others can acquire it, as if the holder were cut off. ::

        class TestMyFences(FencedTokenStoreConformance):
            @pytest.fixture
            def lapse(self, server):
                async def lapse(store): await server.execute("DELETE FROM locks")
                return lapse
    """

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    async def test_former_holder_cannot_overwrite_a_newer_token(
        self, open_store: OpenStore, lapse: Callable[[TokenStore], Awaitable[None]]
    ) -> None:
        """The save raises `TokenSuperseded`, the newer token stays, and the error shows neither token."""
        late, quick = open_store(), open_store()
        await late.save(_FULL)

        async def refresh() -> None:
            async with late.lock():
                await late.load()
                await lapse(late)
                async with asyncio.timeout(_TIMEOUT), quick.lock():
                    await quick.load()
                    await quick.save(_QUICK)
                await late.save(_LATE)

        with pytest.raises(TokenSuperseded) as caught:
            await refresh()
        assert await open_store().load() == _QUICK
        text = "".join(traceback.format_exception(caught.value))
        assert "-quick" not in text
        assert "-late" not in text

    async def test_former_holder_saves_if_there_is_no_newer_token(
        self, open_store: OpenStore, lapse: Callable[[TokenStore], Awaitable[None]]
    ) -> None:
        """A used refresh token has one successor, which must not be lost."""
        store = open_store()
        await store.save(_FULL)
        async with store.lock():
            await store.load()
            await lapse(store)
            await store.save(_BARE)
        assert await open_store().load() == _BARE

    async def test_lock_can_be_acquired_again_after_it_was_lost(
        self, open_store: OpenStore, lapse: Callable[[TokenStore], Awaitable[None]]
    ) -> None:
        """The former holder does not release the lock of the new holder."""
        late, quick = open_store(), open_store()
        async with contextlib.AsyncExitStack() as held:
            async with late.lock():
                await late.load()
                await lapse(late)
                async with asyncio.timeout(_TIMEOUT):
                    await held.enter_async_context(quick.lock())
            waiting = asyncio.create_task(_save_locked(late))
            await asyncio.sleep(_MOMENT)
            assert await quick.load() is None
        await asyncio.wait_for(waiting, _TIMEOUT)
        assert await quick.load() == _FULL


async def _save_locked(store: TokenStore) -> None:
    async with store.lock():
        await store.save(_FULL)
