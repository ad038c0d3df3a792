"""Checks of hosts and URLs."""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, urlsplit


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine: localhost or a loopback address."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def split_url(url: str) -> SplitResult | None:
    """Return the parts of an absolute URL, or None if it has no host, a bad port, or characters that need escaping."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    printable = all(32 < ord(character) < 127 for character in url)
    return parts if parts.hostname and printable else None


def url_host(host: str) -> str:
    """Return a listening address as the host of a URL. An unspecified address becomes a loopback address."""
    if host in {"", "0.0.0.0", "::"}:  # noqa: S104  # compared, not listened on
        return "[::1]" if host == "::" else "127.0.0.1"
    return f"[{host}]" if ":" in host else host
