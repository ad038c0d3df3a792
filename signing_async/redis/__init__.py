"""What workers on many machines share through Redis: a token, a rate limit, and the ids of handled webhook events.

Every part takes a URL (``redis://``, ``rediss://``, ``unix://``) or the caller's own client of ``redis.asyncio``,
which may serve many parts and is never closed here. One server, or one primary with replicas; Redis Cluster is not
supported. All keys begin with ``prefix``, by default ``signing:``.

No command waits longer than ``timeout`` seconds for Redis, whatever the client's own settings are.
"""

from .connection import RedisClient
from .rate_limiter import RedisRateLimiter
from .seen import RedisSeenEvents
from .tokens import RedisTokenStore

__all__ = ["RedisClient", "RedisRateLimiter", "RedisSeenEvents", "RedisTokenStore"]
