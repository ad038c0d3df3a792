"""Check the origin, the paths and the references from the service that make up the URLs of requests."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from yarl import URL

from ..errors import ConfigurationError, InvalidRequest

__all__ = ["check_origin", "resolve", "segment", "signing_path"]

# urlsplit drops tabs, line breaks and what follows a bracket, and takes any other character as part of the host.
_STRAY_CHARACTER = re.compile(r"[\s\x00-\x1f\x7f\\]")
_NETLOC = re.compile(r"(?:\[[^\]]+:[^\]]+\]|[\w-]{1,63}(?:\.[\w-]{1,63})*\.?)(?::[0-9]*)?", re.ASCII)
# As in browsers: a host whose last label is a number is an IPv4 address.
_NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?")
_MAX_NETLOC = 300


def check_origin(base_url: str) -> str:
    """Return the origin of the service: HTTPS, or plain HTTP to a loopback host; else raise `ConfigurationError`."""
    if not isinstance(base_url, str):
        raise ConfigurationError(f"base_url: must be a URL, got {base_url!r}")
    if "@" in base_url:
        raise ConfigurationError("base_url: must not contain a user name or a password")
    if _STRAY_CHARACTER.search(base_url):
        raise ConfigurationError(
            f"base_url: must not contain white space, backslashes or control characters, got {base_url!r}"
        )
    try:
        parts = _split(base_url)
        origin, host = _origin(parts), parts.hostname or ""
    except ValueError:
        raise ConfigurationError(f"base_url: must be a URL, got {base_url!r}") from None
    problems = {
        "must be an origin such as https://tenant.example.com": parts.scheme not in ("http", "https") or not host,
        "must have a valid host and port": parts.port == 0 or not _NETLOC.fullmatch(parts.netloc) or not _is_host(host),
        "must be an origin without path or query": parts.path.strip("/") or parts.query or parts.fragment,
        "must be https (http is for loopback hosts only)": parts.scheme == "http" and not _is_loopback(host),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ConfigurationError(f"base_url: {problem}, got {base_url!r}")
    return origin


def _split(url: str) -> SplitResult:
    """Split a URL and encode an internationalized host; a host that cannot be encoded stays as it is."""
    parts = urlsplit(url)
    # IDNA drops some characters that are not printable. The time that it takes can be quadratic.
    if parts.netloc.isascii() or not parts.netloc.isprintable() or len(parts.netloc) > _MAX_NETLOC:
        return parts
    host, colon, port = parts.netloc.partition(":")
    with contextlib.suppress(ValueError):
        host = URL.build(scheme="https", host=host).raw_host or host
    return parts._replace(netloc=host + colon + port)


def _origin(parts: SplitResult) -> str:
    host = parts.hostname or ""
    port = parts.port if parts.port not in (None, {"http": 80, "https": 443}.get(parts.scheme)) else None
    return f"{parts.scheme}://" + (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")


def resolve(origin: str, path: str, reference: str) -> str | None:
    """Return the path and query of a reference in a response to ``path``; None if it leads to another origin."""
    try:
        parts = _split(urljoin(origin + path, reference.strip()))
        if not reference.strip() or parts.username is not None or _origin(parts) != origin:
            return None
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        return path + ("?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?") if parts.query else "")
    except ValueError:  # UnicodeEncodeError too: header bytes that are not UTF-8
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address.is_loopback if address else host == "localhost" or host.endswith(".localhost")


def _is_host(host: str) -> bool:
    """Return whether the host is a name or an IP address, not a malformed address or one with a zone."""
    is_address = ":" in host or _NUMERIC.fullmatch(host)
    return not is_address or ("%" not in host and _address(host) is not None)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def segment(name: str, value: object) -> str:
    """Return one segment of a path, percent-encoded, from an id or a record; raise `InvalidRequest` if it is empty."""
    value = getattr(value, "id", value)
    if not isinstance(value, str) or value.strip(". \t\r\n") == "":
        raise InvalidRequest(f"{name}: must be an id or a record with an id, got {value!r}")
    try:
        return quote(value, safe="")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}: must be a string that can be encoded, got {value!r}") from None


def signing_path(signing_id: object) -> str:
    """Return the path of a signing, from its id or its record."""
    return f"/api/1.0/signings/{segment('signing_id', signing_id)}"
