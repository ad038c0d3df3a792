"""What a connection that could not be made means. Standard library only."""

from __future__ import annotations

import ssl

from .errors import TransportError

__all__ = ["connection_error", "is_untrusted"]


def is_untrusted(error: object) -> bool:
    """Return whether the certificate of the server is not trusted: a retry meets the same certificate.

    Every other failure to connect is transient, such as a refused connection or a name that cannot be resolved.
    """
    return isinstance(error, ssl.SSLCertVerificationError)  # aiohttp's and asyncpg's errors are too


def connection_error(message: str, cause: BaseException) -> TransportError:
    """Return the error for a connection that could not be made; `is_untrusted` decides whether it is permanent."""
    error = TransportError(message)
    error.client_wide = is_untrusted(cause)
    error.transient = not error.client_wide
    return error
