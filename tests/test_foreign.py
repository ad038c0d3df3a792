"""Errors of other libraries, by what is known of their classes."""

from __future__ import annotations

import io
import sqlite3
import urllib.error

import pytest
from redis import exceptions

from signing_async._foreign import is_transient
from signing_async.errors import ConfigurationError, TransportError

# How Redis up to 6.2 begins the error of a command in a script.
OF_SCRIPT = "Error running script (call to f_6b1bf486): @user_script:2: @user_script: 2:"


class ValkeyError(Exception):
    """The base class of a fork of redis-py."""


class ReadOnlyError(ValkeyError):
    """A fork's error with the name of redis-py's."""


class BusyFile(sqlite3.OperationalError):
    """An error of a library that is built on `sqlite3`."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (TransportError("no connection"), True),
        (ConfigurationError("invalid URL"), False),
        (TimeoutError(), True),
        (PermissionError(13, "Permission denied"), False),
        (BusyFile("database is locked"), True),
        (sqlite3.DatabaseError("file is not a database"), False),
        (exceptions.ConnectionError("refused"), True),
        (exceptions.AuthenticationError("wrong password"), False),
        (exceptions.ResponseError("MISCONF cannot save to disk"), True),
        (exceptions.ResponseError(f"{OF_SCRIPT} -READONLY You can't write against a read only replica."), True),
        (exceptions.ResponseError(f"{OF_SCRIPT} -OOM command not allowed when used memory > 'maxmemory'."), True),
        (exceptions.ResponseError(f"{OF_SCRIPT} -NOPERM this user has no permissions"), False),
        (exceptions.ResponseError("unknown command"), False),
        (exceptions.SlotNotCoveredError("slot 1"), True),
        (exceptions.RedisClusterException("all keys must map to the same key slot"), False),
        (ReadOnlyError("a replica"), True),
        (ValkeyError("unknown command"), False),
        (LookupError("nothing is known of it"), True),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] Connect call failed"), True),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), True),
        (io.UnsupportedOperation("not readable"), False),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else "",
)
def test_error_of_another_library_is_transient_unless_a_repeat_is_known_to_fail(
    error: Exception, transient: bool
) -> None:
    assert is_transient(error) is transient
