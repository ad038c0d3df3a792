"""The proxy on the way to the service: the caller's, or the environment's."""

from __future__ import annotations

import contextlib
from urllib.parse import urlsplit

from yarl import URL

from .._secret import Secret
from ..errors import ConfigurationError

__all__ = ["find_proxy", "parse_proxy"]


def parse_proxy(name: str, value: object) -> Secret[URL]:
    """Return a proxy's URL; ``http://`` may be left out. Raise a `ConfigurationError` that does not show the value."""
    with contextlib.suppress(ValueError):
        if isinstance(value, Secret) and value.reveal():
            prefix = "" if "://" in value.reveal() else "http://"
            url = Secret(URL(prefix + value.reveal()))
            if url.reveal().scheme in ("http", "https") and url.reveal().host:
                return url
    raise ConfigurationError(
        f"{name}: must be the URL of an HTTP proxy, such as http://proxy.example.com:3128, if needed with"
        " user:password@ before the host (its value is not shown)"
    )


def find_proxy(origin: str) -> Secret[URL] | None:
    """Return the proxy that the environment names for the origin, chosen as curl and requests do, or None."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(origin)
    if proxy_bypass(parts.netloc) or proxy_bypass(parts.hostname or ""):
        return None
    for name in (parts.scheme, "all"):
        if getproxies().get(name):
            return parse_proxy(f"{name}_proxy of the environment", Secret(getproxies()[name]))
    return None
