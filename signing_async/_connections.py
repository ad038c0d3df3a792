"""Classify and describe failures to connect. Standard library only."""

from __future__ import annotations

import os
import socket
import ssl

from .errors import TransportError

__all__ = [
    "certificate_problem",
    "connection_error",
    "describe_failure",
    "is_refused_by_proxy",
    "is_untrusted",
    "roots_problem",
]


def is_untrusted(error: object) -> bool:
    """Return whether the error is an untrusted server certificate, which a retry meets again.

    Every other failure to connect is transient, such as a refused connection or a name that cannot be resolved.
    """
    return isinstance(error, ssl.SSLCertVerificationError)  # so are aiohttp's and asyncpg's errors


def is_refused_by_proxy(status: int) -> bool:
    """Return whether a proxy's response to CONNECT is final: every connection through this proxy meets it."""
    return status in (403, 407)


def connection_error(message: str, cause: BaseException) -> TransportError:
    """Return the error for a connection that could not be made; `is_untrusted` decides whether it is permanent."""
    untrusted = is_untrusted(cause)
    return TransportError(message, transient=not untrusted, client_wide=untrusted)


def describe_failure(error: OSError) -> str:
    """Return why a connection could not be made, without the address, which asyncio's own text repeats."""
    if isinstance(error, ssl.SSLError):
        return getattr(error, "verify_message", "") or str(error)
    if error.errno and error.errno > 0 and not isinstance(error, socket.gaierror):  # whose numbers are others
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


def roots_problem(path: str | None, content: str = "trusted certificates") -> str:
    """Return why the trusted certificates in ``path`` cannot be loaded; "" if they can, or without a path."""
    if not path:
        return ""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (OSError, ValueError) as error:
        return f"cannot load the {content} of {path!r}: {error}"
    return ""


def certificate_problem(certificate: str | None, key: str | None, password: str | None) -> str:
    """Return why a client certificate, if one is named, cannot be loaded with its key; "" if it can.

    Without ``key``, the file of the certificate contains the key.
    """
    if not certificate:
        return f"cannot load the client certificate of the key {key!r}: no certificate is named" if key else ""
    try:
        # Without a function, OpenSSL would ask for the password at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, lambda: password or "")
    except (OSError, ValueError) as error:
        with_key = f" with the key of {key!r}" if key else ""
        return f"cannot load the client certificate of {certificate!r}{with_key}: {error}"
    return ""
