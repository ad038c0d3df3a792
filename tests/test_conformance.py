"""The stores of this package run the suites that others can run on theirs; and the suites catch what is broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from signing_async import FileTokenStore, MemoryTokenStore
from signing_async.redis import RedisSeenEvents, RedisTokenStore
from signing_async.testing import SeenEventsConformance, TokenStoreConformance
from signing_async.testing.seen_events import OpenSeenEvents
from signing_async.testing.token_stores import OpenStore
from signing_async.webhooks import MemorySeenEvents, SeenEvents, SQLiteSeenEvents
from tests.redis.server import RedisServer, running_redis


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis for this module."""
    with running_redis() as server:
        yield server


class TestMemoryTokenStore(TokenStoreConformance):
    """It lives in one object."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """The same each time."""
        store = MemoryTokenStore()
        return lambda: store


class TestFileTokenStore(TokenStoreConformance):
    """Shared by the file."""

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        """Another object on one path."""
        return lambda: FileTokenStore(tmp_path / "token.json")


class TestRedisTokenStore(TokenStoreConformance):
    """Shared by the server and the name, encrypted or not."""

    @pytest.fixture(params=[None, "k" * 42 + "A="], ids=["plain", "encrypted"])
    async def open_store(self, request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[OpenStore]:
        """Another object on one name."""
        async with AsyncExitStack() as opened:
            made: list[RedisTokenStore] = []

            def open_store() -> RedisTokenStore:
                made.append(RedisTokenStore(redis.url, request.node.name, key=request.param, timeout=5))
                opened.push_async_callback(made[-1].aclose)
                return made[-1]

            yield open_store


class TestMemorySeenEvents(SeenEventsConformance):
    """It lives in one object."""

    @pytest.fixture
    def open_seen(self) -> OpenSeenEvents:
        """The same for the same settings."""
        made: dict[tuple[tuple[str, Any], ...], SeenEvents] = {}

        def open_seen(**settings: Any) -> SeenEvents:
            return made.setdefault(tuple(sorted(settings.items())), MemorySeenEvents(**settings))

        return open_seen


class TestSQLiteSeenEvents(SeenEventsConformance):
    """Shared by the file."""

    @pytest.fixture
    def open_seen(self, tmp_path: Path) -> Iterator[OpenSeenEvents]:
        """Another object on one path."""
        made: list[SQLiteSeenEvents] = []

        def open_seen(**settings: Any) -> SeenEvents:
            made.append(SQLiteSeenEvents(tmp_path / "seen.db", **settings))
            return made[-1]

        yield open_seen
        for seen in made:
            seen.close()


class TestRedisSeenEvents(SeenEventsConformance):
    """Shared by the server and the prefix."""

    @pytest.fixture
    async def open_seen(self, request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[OpenSeenEvents]:
        """Another object on one prefix."""
        async with AsyncExitStack() as opened:

            def open_seen(**settings: Any) -> SeenEvents:
                seen = RedisSeenEvents(redis.url, prefix=request.node.name, timeout=5, **settings)
                opened.push_async_callback(seen.aclose)
                return seen

            yield open_seen


# The suites themselves

_FLAWED_STORES = """
import asyncio, contextlib
import pytest
from signing_async import MemoryTokenStore, Token
from signing_async.testing import TokenStoreConformance

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
    @contextlib.asynccontextmanager
    async def lock(self):
        async with asyncio.timeout(1):
            await self._lock.acquire()
        yield
        self._lock.release()

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

_FLAWED_MEMORIES = """
import pytest
from signing_async.testing import SeenEventsConformance
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
    """Which tests of a module fail: the names of class and test, without parameters."""
    pytester.makepyfile(source)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    result = pytester.runpytest_inprocess("-q", "-rf", "-p", "no:randomly", "-p", "no:cacheprovider", "--tb=no")
    lines = [line for line in result.outlines if line.startswith("FAILED")]
    passed = result.parseoutcomes()
    assert passed["passed"] > 20, result.outlines
    return {line.split("::", 1)[1].split(" ")[0].split("[")[0] for line in lines}


def test_the_suite_of_token_stores_catches_flaws(pytester: pytest.Pytester) -> None:
    """Each broken store fails the tests that are about its flaw; a sound one passes, without asyncio_mode=auto."""
    failed = _failed(pytester, _FLAWED_STORES)
    assert "TestUnlocked::test_one_at_a_time_and_nobody_is_left_out" in failed
    assert "TestUnlocked::test_who_waits_for_the_lock_gets_it_afterwards" in failed
    assert "TestForgetful::test_what_is_saved_is_loaded" in failed
    assert "TestTalkative::test_its_text_shows_no_token" in failed
    assert "TestJammed::test_an_error_inside_frees_the_lock" in failed
    assert "TestJammed::test_cancelled_while_it_waits_or_holds" in failed
    assert not [name for name in failed if name.startswith(("TestSound", "Suite", "TokenStore"))]


def test_the_suite_of_seen_events_catches_flaws(pytester: pytest.Pytester) -> None:
    """Each broken memory fails the tests that are about its flaw; a sound one passes."""
    failed = _failed(pytester, _FLAWED_MEMORIES)
    assert "TestEndless::test_a_lease_ends" in failed
    assert "TestEndless::test_what_is_too_old_is_forgotten" in failed
    assert "TestUndone::test_a_confirmed_event_cannot_be_released" in failed
    assert "TestStuck::test_a_released_event_is_new_again" in failed
    assert "TestGenerous::test_of_many_claims_one_wins" in failed
    assert not [name for name in failed if name.startswith(("TestSound", "Suite", "SeenEvents"))]


def test_the_suites_are_loaded_when_they_are_used() -> None:
    """Every run of pytest loads the plugin: it takes neither the suites nor the client along."""
    script = "import sys, signing_async.testing as t; print(*sys.modules); t.TokenStoreConformance; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    suites = {"signing_async.testing.token_stores", "signing_async.auth.token_stores", "signing_async.models", "attrs"}
    assert not suites & before
    assert suites < after


def test_a_name_that_is_not_there() -> None:
    """It is an error like any other module's."""
    module: Any = sys.modules["signing_async.testing"]
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing
