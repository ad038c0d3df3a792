"""Check the origin, the paths and the references from the service that make up the URLs of requests."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from urllib.parse import quote, urlsplit

from yarl import URL

from ..errors import ConfigurationError, InvalidRequest

__all__ = ["check_origin", "resolve", "segment", "signing_path"]

_STRAY_CHARACTER = re.compile(r"[\s\x00-\x1f\x7f\\]")
_HOST = re.compile(r"[\w-]{1,63}(?:\.[\w-]{1,63})*\.?|[0-9a-f:.]*:[0-9a-f:.]*", re.ASCII)


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
        url = URL(base_url)
        host, port = url.raw_host or "", url.port
    except ValueError:
        raise ConfigurationError(
            f"base_url: must be a URL, and must have a valid host and port, got {base_url!r}"
        ) from None
    problems = {
        "must be an origin such as https://tenant.example.com": url.scheme not in ("http", "https") or not host,
        "must have a valid host and port": port == 0 or not _HOST.fullmatch(host),
        "must be an origin without path or query": url.raw_path.strip("/") or url.query_string or url.fragment,
        "must be https (http is for loopback hosts only)": url.scheme == "http" and not _is_loopback(host),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ConfigurationError(f"base_url: {problem}, got {base_url!r}")
    return str(url.origin())


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def resolve(origin: str, path: str, reference: str) -> str | None:
    """Return the path and query of a reference in a response to ``path``; None if it leads to another origin."""
    try:
        url = URL(origin + path, encoded=True).join(URL(reference.strip()))
        is_own = bool(reference.strip()) and "@" not in urlsplit(reference).netloc and str(url.origin()) == origin
    except ValueError:  # UnicodeEncodeError too: header bytes that are not UTF-8
        return None
    return url.raw_path_qs if is_own else None


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
