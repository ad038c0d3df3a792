"""The server of the tests."""

from tests.redis.server import redis_of_a_module  # noqa: F401  # the fixture `redis`
