"""What many workers on many machines share through Redis: a user's token, a closed gate, the events that were seen.

Every part takes a URL (``redis://``, ``rediss://``, ``unix://``), or a client of ``redis.asyncio`` that is the caller's
own: it may be shared by any number of parts, and is never closed here. One server, or one primary with replicas;
Redis Cluster is not supported. The keys begin with ``prefix``, by default ``signing:``.

No command waits longer than ``timeout`` seconds for Redis, whatever the client's own settings are.
"""

from .connection import RedisClient
from .gate import RedisGate
from .seen import RedisSeenEvents
from .tokens import RedisTokenStore

__all__ = ["RedisClient", "RedisGate", "RedisSeenEvents", "RedisTokenStore"]
