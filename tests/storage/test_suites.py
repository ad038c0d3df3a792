"""The suites of token stores and of seen events: the implementations pass them, and broken ones fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from signing_async import FileTokenStore, MemoryTokenStore
from signing_async.redis import RedisSeenEvents, RedisTokenStore
from signing_async.webhooks import MemorySeenEvents, SeenEvents, SQLiteSeenEvents
from tests.redis.server import RedisServer, running_redis
from tests.storage.seen_events import OpenSeenEvents, SeenEventsConformance
from tests.storage.token_stores import OpenStore, TokenStoreConformance


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis for all tests."""
    with running_redis() as server:
        yield server


class TestMemoryTokenStore(TokenStoreConformance):
    """A store in one object."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Return the same object each time."""
        store = MemoryTokenStore()
        return lambda: store


class TestFileTokenStore(TokenStoreConformance):
    """A store in a file."""

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        """Open one path again."""
        return lambda: FileTokenStore(tmp_path / "token.json")


class TestRedisTokenStore(TokenStoreConformance):
    """A store in Redis, encrypted or not."""

    @pytest.fixture(params=[None, "k" * 42 + "A="], ids=["plain", "encrypted"])
    async def open_store(self, request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[OpenStore]:
        """Open one name again."""
        async with AsyncExitStack() as opened:
            made: list[RedisTokenStore] = []

            def open_store() -> RedisTokenStore:
                made.append(RedisTokenStore(redis.url, request.node.name, key=request.param, timeout=5))
                opened.push_async_callback(made[-1].aclose)
                return made[-1]

            yield open_store


class TestMemorySeenEvents(SeenEventsConformance):
    """Seen events in one object."""

    @pytest.fixture
    def open_seen(self) -> OpenSeenEvents:
        """Return the same object for the same settings."""
        made: dict[tuple[tuple[str, Any], ...], SeenEvents] = {}

        def open_seen(**settings: Any) -> SeenEvents:
            return made.setdefault(tuple(sorted(settings.items())), MemorySeenEvents(**settings))

        return open_seen


class TestSQLiteSeenEvents(SeenEventsConformance):
    """Seen events in a file."""

    @pytest.fixture
    def open_seen(self, tmp_path: Path) -> Iterator[OpenSeenEvents]:
        """Open one path again."""
        made: list[SQLiteSeenEvents] = []

        def open_seen(**settings: Any) -> SeenEvents:
            made.append(SQLiteSeenEvents(tmp_path / "seen.db", **settings))
            return made[-1]

        yield open_seen
        for seen in made:
            seen.close()


class TestRedisSeenEvents(SeenEventsConformance):
    """Seen events in Redis."""

    @pytest.fixture
    async def open_seen(self, request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[OpenSeenEvents]:
        """Open one prefix again."""
        async with AsyncExitStack() as opened:

            def open_seen(**settings: Any) -> SeenEvents:
                seen = RedisSeenEvents(redis.url, prefix=request.node.name, timeout=30, **settings)
                opened.push_async_callback(seen.aclose)
                return seen

            yield open_seen


# The suites themselves

_BROKEN_STORES = """
import asyncio, contextlib
import pytest
from signing_async import MemoryTokenStore, Token
from tests.storage.token_stores import TokenStoreConformance

class Unlocked(MemoryTokenStore):
    def lock(self):
        return contextlib.nullcontext()

class Forgetful(MemoryTokenStore):
    async def save(self, token):
        await super().save(Token(token.access_token, token.refresh_token))

class Talkative(MemoryTokenStore):
    def __repr__(self):
        return f"Talkative({self._token.refresh_token})" if self._token else "Talkative()"

class Jammed(MemoryTokenStore):
    def __init__(self):
        super().__init__()
        self._free = asyncio.Semaphore()

    @contextlib.asynccontextmanager
    async def lock(self):
        async with asyncio.timeout(1):
            await self._free.acquire()
        yield
        self._free.release()

class Sound(MemoryTokenStore):
    pass

class Suite(TokenStoreConformance):
    kind = Sound

    @pytest.fixture
    def open_store(self):
        store = self.kind()
        return lambda: store

class TestUnlocked(Suite):
    kind = Unlocked

class TestForgetful(Suite):
    kind = Forgetful

class TestTalkative(Suite):
    kind = Talkative

class TestJammed(Suite):
    kind = Jammed

class TestSound(Suite):
    pass
"""

_BROKEN_SEEN_EVENTS = """
import pytest
from tests.storage.seen_events import SeenEventsConformance
from signing_async.webhooks import Claim, MemorySeenEvents

class Endless(MemorySeenEvents):
    def __init__(self, *, ttl, lease):
        super().__init__(ttl=1e6, lease=lease)

    def claim(self, event_id):
        found = super().claim(event_id)
        if event_id in self._pending:
            self._pending[event_id] = 1e12
        return found

class Undone(MemorySeenEvents):
    def release(self, event_id):
        self._confirmed.pop(event_id, None)
        super().release(event_id)

class Stuck(MemorySeenEvents):
    def release(self, event_id):
        pass

class Generous(MemorySeenEvents):
    def claim(self, event_id):
        found = super().claim(event_id)
        return Claim.NEW if found is Claim.PENDING else found

class Suite(SeenEventsConformance):
    kind = MemorySeenEvents

    @pytest.fixture
    def open_seen(self):
        made = {}
        return lambda **settings: made.setdefault(tuple(settings.items()), self.kind(**settings))

class TestEndless(Suite):
    kind = Endless

class TestUndone(Suite):
    kind = Undone

class TestStuck(Suite):
    kind = Stuck

class TestGenerous(Suite):
    kind = Generous

class TestSound(Suite):
    pass
"""


def _failed(pytester: pytest.Pytester, source: str) -> set[str]:
    """Return the failing tests of a module as ``Class::test``, without parameters."""
    pytester.makepyfile(source)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    result = pytester.runpytest_inprocess("-q", "-rf", "-p", "no:randomly", "-p", "no:cacheprovider", "--tb=no")
    lines = [line for line in result.outlines if line.startswith("FAILED")]
    passed = result.parseoutcomes()
    assert passed["passed"] > 20, result.outlines
    return {line.split("::", 1)[1].split(" ")[0].split("[")[0] for line in lines}


def test_token_store_suite_fails_broken_stores_and_passes_a_sound_one(pytester: pytest.Pytester) -> None:
    """Without asyncio_mode=auto."""
    failed = _failed(pytester, _BROKEN_STORES)
    assert "TestUnlocked::test_lock_excludes_concurrent_updates" in failed
    assert "TestUnlocked::test_waiter_acquires_the_lock_when_it_is_released" in failed
    assert "TestForgetful::test_saved_token_is_loaded" in failed
    assert "TestTalkative::test_repr_and_str_show_no_token" in failed
    assert "TestJammed::test_error_inside_the_lock_releases_it" in failed
    assert "TestJammed::test_cancelled_waiter_or_holder_leaves_the_lock_free" in failed
    assert not [name for name in failed if name.startswith(("TestSound", "Suite", "TokenStore"))]


def test_seen_events_suite_fails_broken_implementations_and_passes_a_sound_one(pytester: pytest.Pytester) -> None:
    failed = _failed(pytester, _BROKEN_SEEN_EVENTS)
    assert "TestEndless::test_claim_expires_with_its_lease" in failed
    assert "TestEndless::test_event_is_forgotten_after_its_ttl" in failed
    assert "TestUndone::test_confirmed_event_cannot_be_released" in failed
    assert "TestStuck::test_released_event_is_new_again" in failed
    assert "TestGenerous::test_one_of_many_concurrent_claims_succeeds" in failed
    assert not [name for name in failed if name.startswith(("TestSound", "Suite", "SeenEvents"))]
