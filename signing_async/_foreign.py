"""Classify the errors of other libraries: Redis clients, brokers, and callers' own stores."""

from __future__ import annotations

from . import _files
from ._connections import is_untrusted
from .errors import SigningError

__all__ = ["is_transient", "safe_text"]

# Compare names, because redis-py may not be installed, and a fork has its own module. Before version 8, redis-py does
# not keep the error code of a reply.
_REDIS = frozenset({"RedisError", "RedisClusterException", "ValkeyError", "ValkeyClusterException"})
# A server is a replica during a failover.
_TRANSIENT = frozenset(
    {
        *("ConnectionError", "TimeoutError", "MaxConnectionsError", "BusyLoadingError", "SlotNotCoveredError"),
        *("ClusterDownError", "MasterDownError", "OutOfMemoryError", "ReadOnlyError", "TryAgainError"),
    }
)
# Subclasses of redis-py's `ConnectionError`.
_PERMANENT = frozenset({"AuthenticationError", "AuthorizationError", "ExternalAuthProviderError"})
# Error codes that have no class in redis-py, or none if a script fails: up to Redis 6.2, the reply is then
# "ERR Error running script (...): @user_script: 2: -READONLY ...".
_TRANSIENT_CODES = frozenset({"BUSY", "MISCONF", "NOREPLICAS", "OOM", "READONLY"})


def is_transient(error: Exception) -> bool:
    """Return whether the failed operation may succeed later; True if the error's class is unknown."""
    if isinstance(error, SigningError):
        return error.transient
    # An OSError without a number is not from the system but from a network library, such as urllib or requests.
    if isinstance(error, OSError) and (error.errno is not None or isinstance(error, ValueError)):
        return _files.is_transient(error)
    names = {base.__name__ for base in type(error).__mro__}
    if names & _REDIS:
        # The socket's error is the context of redis-py's.
        is_permanent = bool(names & _PERMANENT) or is_untrusted(error.__context__)
        code = str(error).rpartition(": -")[2].partition(" ")[0]
        return not is_permanent and (bool(names & _TRANSIENT) or code in _TRANSIENT_CODES)
    if any(base.__module__ == "sqlite3" for base in type(error).__mro__):
        from .storage import sqlite  # sqlite3 is not imported for every client

        return sqlite.is_transient(error)
    return True


def safe_text(error: BaseException) -> str:
    """Return the error's text; only the name of its class if it is not this package's, as it may contain secrets."""
    return str(error) if isinstance(error, SigningError) else type(error).__name__
