"""The servers of the stores."""

from tests.redis.server import redis_of_a_module  # noqa: F401  # the fixture `redis`
