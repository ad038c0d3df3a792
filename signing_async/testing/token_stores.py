"""What every token store has to hold, as tests that an implementation can run on itself."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from ..auth.token_stores import TokenStore
from ..errors import TokenSuperseded
from ..models import Token

__all__ = ["FencedTokenStoreConformance", "OpenStore", "TokenStoreConformance"]

OpenStore = Callable[[], TokenStore]
"""Opens the store: each time another object, as another worker would have it, on the same storage."""

_FULL = Token("access-1", "refresh-1", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC), "DPoP")
_BARE = Token("access-2")
_LONG = Token("a" * 20_000, "r" * 20_000, datetime(1999, 1, 1, tzinfo=UTC))
_QUICK = Token("access-quick", "refresh-quick")
_LATE = Token("access-late", "refresh-late")
_SOON = 0.1
_LONG_ENOUGH = 20.0


class TokenStoreConformance:
    """The promises of the `TokenStore` protocol, by which an `OAuth` loses no refresh token.

    Subclass it with a fixture ``open_store`` that gives a function: each call opens the store once more, another object
    on the same storage, which is empty when a test begins. (A store that lives in one object gives that each time.)
    The tests are ``async`` and need pytest-asyncio. ::

        class TestMyStore(TokenStoreConformance):
            @pytest.fixture
            def open_store(self, tmp_path):
                return lambda: MyStore(tmp_path / "token")
    """

    pytestmark = pytest.mark.asyncio

    async def test_an_empty_store_holds_none(self, open_store: OpenStore) -> None:
        """There is no token before one was saved, in the lock or out of it."""
        store = open_store()
        assert await store.load() is None
        async with store.lock():
            assert await store.load() is None

    @pytest.mark.parametrize("token", [_FULL, _BARE, _LONG], ids=["full", "bare", "long"])
    async def test_what_is_saved_is_loaded(self, open_store: OpenStore, token: Token) -> None:
        """A token comes back whole, to whoever opens the store, and replaces the one before."""
        store = open_store()
        await store.save(Token("access-0", "refresh-0", datetime.now(UTC) + timedelta(hours=1)))
        await store.save(token)
        assert await store.load() == token
        assert await open_store().load() == token

    async def test_what_is_saved_in_the_lock_is_there_after_it(self, open_store: OpenStore) -> None:
        """As a refresh does it: lock, load, save."""
        store = open_store()
        await store.save(_FULL)
        async with store.lock():
            assert await store.load() == _FULL
            await store.save(_BARE)
            assert await store.load() == _BARE
        assert await open_store().load() == _BARE

    async def test_one_at_a_time_and_nobody_is_left_out(self, open_store: OpenStore) -> None:
        """Of many who add one to what is there, none writes over what another has written."""
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
    async def test_who_waits_for_the_lock_gets_it_afterwards(self, open_store: OpenStore, same: bool) -> None:
        """While it is held it is not given; it is when it is free again."""
        store = open_store()
        other = store if same else open_store()
        got: list[str] = []

        async def take() -> None:
            async with other.lock():
                got.append("it")

        async with store.lock():
            task = asyncio.create_task(take())
            await asyncio.sleep(_SOON)
            assert not got
        await asyncio.wait_for(task, 60)
        assert got == ["it"]

    async def test_an_error_inside_frees_the_lock(self, open_store: OpenStore) -> None:
        """A refresh that fails leaves the lock free, the token as it was, and its error as it is."""
        store = open_store()
        await store.save(_FULL)

        async def fail() -> None:
            async with store.lock():
                await store.load()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        async with asyncio.timeout(60), open_store().lock():
            assert await store.load() == _FULL

    async def test_cancelled_while_it_waits_or_holds(self, open_store: OpenStore) -> None:
        """Who is cancelled leaves the lock to the others."""
        store, other = open_store(), open_store()
        entered = asyncio.Event()

        async def hold() -> None:
            async with other.lock():
                await other.load()
                entered.set()
                await asyncio.Event().wait()

        async with store.lock():
            waiting = asyncio.create_task(hold())
            await asyncio.sleep(_SOON)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert waiting.cancelled()
        holding = asyncio.create_task(hold())
        await asyncio.wait_for(entered.wait(), 60)
        holding.cancel()
        await asyncio.wait([holding])
        async with asyncio.timeout(60), store.lock():
            pass

    async def test_cancelled_on_its_way_out(self, open_store: OpenStore) -> None:
        """Who is cancelled while it gives the lock back gives it back all the same."""
        store, other = open_store(), open_store()
        await store.save(_FULL)
        done = asyncio.Event()

        async def hold() -> None:
            async with store.lock():
                await store.load()
                done.set()

        async with asyncio.timeout(_LONG_ENOUGH):
            for turns in range(8):
                done.clear()
                leaving = asyncio.create_task(hold())
                await done.wait()
                for _ in range(turns):
                    await asyncio.sleep(0)
                leaving.cancel()
                await asyncio.wait([leaving])
                for each in (other, store):
                    async with each.lock():
                        assert await each.load() == _FULL

    async def test_a_task_begun_in_the_lock_does_not_hold_it_afterwards(self, open_store: OpenStore) -> None:
        """A task made inside the lock that loads later neither takes the lock again nor keeps it from the others."""
        store, other = open_store(), open_store()
        await store.save(_FULL)
        over = asyncio.Event()

        async def load_later() -> Token | None:
            await over.wait()
            return await store.load()

        async with store.lock():
            await store.load()
            task = asyncio.create_task(load_later())
        async with asyncio.timeout(_LONG_ENOUGH):
            async with other.lock():
                await other.load()
                over.set()
                assert await task == _FULL
                await other.save(_BARE)
            async with other.lock(), asyncio.timeout(_LONG_ENOUGH):
                assert await other.load() == _BARE

    async def test_its_text_shows_no_token(self, open_store: OpenStore) -> None:
        """Neither ``repr`` nor ``str`` gives away what is kept."""
        store = open_store()
        await store.save(_FULL)
        await store.load()
        for secret in ("access-1", "refresh-1"):
            assert secret not in f"{store!r} {store}"


class FencedTokenStoreConformance:
    """For a store whose lock can be lost while its holder goes on: by a lease that ends, or a connection that breaks.

    Beside ``open_store`` (see `TokenStoreConformance`) it wants a fixture ``lapse``: an ``async`` function that is
    given the store whose lock is held, and returns when others can take it, as if its holder were cut off. ::

        class TestMyFences(FencedTokenStoreConformance):
            @pytest.fixture
            def lapse(self, server):
                async def lapse(store): await server.execute("DELETE FROM locks")
                return lapse
    """

    pytestmark = pytest.mark.asyncio

    async def test_who_lost_the_lock_saves_nothing_over_a_newer_token(
        self, open_store: OpenStore, lapse: Callable[[TokenStore], Awaitable[None]]
    ) -> None:
        """The save is refused with `TokenSuperseded`, the newer token stays, and no text shows either."""
        late, quick = open_store(), open_store()
        await late.save(_FULL)

        async def refresh() -> None:
            async with late.lock():
                await late.load()
                await lapse(late)
                async with asyncio.timeout(60), quick.lock():
                    await quick.load()
                    await quick.save(_QUICK)
                await late.save(_LATE)

        with pytest.raises(TokenSuperseded) as caught:
            await refresh()
        assert await open_store().load() == _QUICK
        text = "".join(traceback.format_exception(caught.value))
        assert "-quick" not in text
        assert "-late" not in text

    async def test_who_lost_the_lock_saves_what_nobody_has_replaced(
        self, open_store: OpenStore, lapse: Callable[[TokenStore], Awaitable[None]]
    ) -> None:
        """A refresh token that was used up has one successor: while nobody has another, that must not be lost."""
        store = open_store()
        await store.save(_FULL)
        async with store.lock():
            await store.load()
            await lapse(store)
            await store.save(_BARE)
        assert await open_store().load() == _BARE

    async def test_the_lock_works_on_after_it_was_lost(
        self, open_store: OpenStore, lapse: Callable[[TokenStore], Awaitable[None]]
    ) -> None:
        """Whoever lost it takes it again, and does not give back what is another's by then."""
        late, quick = open_store(), open_store()
        async with contextlib.AsyncExitStack() as held:
            async with late.lock():
                await late.load()
                await lapse(late)
                async with asyncio.timeout(60):
                    await held.enter_async_context(quick.lock())
            waiting = asyncio.create_task(_saved(late))
            await asyncio.sleep(_SOON)
            assert await quick.load() is None
        await asyncio.wait_for(waiting, 60)
        assert await quick.load() == _FULL


async def _saved(store: TokenStore) -> None:
    async with store.lock():
        await store.save(_FULL)
