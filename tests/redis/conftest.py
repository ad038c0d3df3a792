"""The server of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.redis.server import RedisServer, running_redis


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis for all tests of a module, which leave it running."""
    with running_redis() as server:
        yield server
