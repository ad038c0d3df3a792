"""Classify failures to connect. Standard library only."""

from __future__ import annotations

import ssl

from .errors import TransportError

__all__ = ["connection_error", "connection_flags", "is_untrusted", "roots_problem"]


def is_untrusted(error: object) -> bool:
    """Return whether the error is an untrusted server certificate, which a retry meets again.

    Every other failure to connect is transient, such as a refused connection or a name that cannot be resolved.
    """
    return isinstance(error, ssl.SSLCertVerificationError)  # so are aiohttp's and asyncpg's errors


def connection_flags(untrusted: bool) -> tuple[bool, bool]:
    """Return ``transient`` and ``client_wide`` for a failure to connect. Every call meets an untrusted certificate."""
    return not untrusted, untrusted


def connection_error(message: str, cause: BaseException) -> TransportError:
    """Return the error for a connection that could not be made; `is_untrusted` decides whether it is permanent."""
    error = TransportError(message)
    error.transient, error.client_wide = connection_flags(is_untrusted(cause))
    return error


def roots_problem(path: str | None) -> str:
    """Return why the trusted certificates in ``path`` cannot be loaded; "" if they can, or without a path."""
    if not path:
        return ""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (OSError, ValueError) as error:
        return f"cannot load the trusted certificates of {path!r}: {error}"
    return ""
