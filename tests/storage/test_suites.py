"""The implementations of token stores and of seen events pass their suites."""

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
