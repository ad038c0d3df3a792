"""The conformance check: sends valid and invalid deliveries to your own endpoint and judges its responses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any, NamedTuple
from uuid import uuid4

import aiohttp
from yarl import URL

from .. import _checks
from .._connections import connection_error
from ..errors import ConfigurationError
from .scheme import Scheme, Secret, sign

RESPONSE_TIMEOUT = 10.0
OVER_LONG = 16 * 1024 * 1024
SLOW_LIMIT = 30.0
CHUNK = 64 * 1024

CLOSED = "the connection was closed"
NO_RESPONSE = "no response in time"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: one or two deliveries, and whether the endpoint handled them correctly."""

    name: str
    ok: bool
    expected: str
    got: str
    seconds: float
    advice: str
    """If ``ok`` is false, what is wrong with the endpoint, or what it should do."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-compatible dict."""
        return asdict(self)


class Delivery(NamedTuple):
    """One request. ``body`` is sent in chunks, or byte by byte if it is ``slow``."""

    body: bytes
    headers: dict[str, str]
    slow: bool = False


class Response(NamedTuple):
    """The response to a delivery. Without one, ``status`` is 0 and ``outcome`` says how the connection ended."""

    status: int
    outcome: str
    location: str = ""


async def check_receiver(
    url: str,
    secret: Secret,
    *,
    scheme: Scheme | None = None,
    event_type: str = "webhook.check",
    response_timeout: float = RESPONSE_TIMEOUT,
    slow_limit: float = SLOW_LIMIT,
    over_long: int = OVER_LONG,
    plain_http: bool = False,
) -> AsyncIterator[CheckResult]:
    """Send the deliveries to ``url``, one after the other, and yield a result for each check.

    The endpoint receives a few valid events of type ``event_type``: choose a type that it ignores. It should reject a
    body of more than ``over_long`` bytes, and cut off a slow body within ``slow_limit`` seconds. Redirects are not
    followed. If the first delivery is redirected or not found, its result is the only one. Proxies are not used. Plain
    http is for loopback only, unless ``plain_http`` is true.
    """
    target = _target(url, plain_http)
    _checks.number("response_timeout", response_timeout, above=0)
    _checks.number("slow_limit", slow_limit, above=0)
    _checks.integer("over_long", over_long)
    deliveries = _deliveries(secret, scheme or Scheme(), event_type, over_long)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        for check in CHECKS:
            started = time.monotonic()
            responses = [
                await _post(session, target, delivery, slow_limit if delivery.slow else response_timeout)
                for delivery in deliveries[check.name]
            ]
            seconds = time.monotonic() - started
            advice, first = check.advice, responses[0]
            no_endpoint = check is CHECKS[0] and (first.status == 404 or (300 <= first.status < 400 and first.location))
            if no_endpoint:
                where = f"redirects to {first.location}: register that address"
                advice = "no endpoint at this path" if first.status == 404 else where
            ok, got = all(map(check.is_correct, responses)), ", ".join(response.outcome for response in responses)
            yield CheckResult(check.name, ok, check.expected, got, seconds, advice)
            if no_endpoint:
                return


def _target(url: str, plain_http: bool) -> URL:
    try:
        target = URL(url)
    except ValueError as error:
        raise ConfigurationError(f"url: {url!r} is not a URL: {error}") from None
    if target.scheme not in ("http", "https") or not target.host:
        raise ConfigurationError(f"url: must be an http or https URL, got {url!r}")
    try:
        is_loopback = ip_address(target.host).is_loopback
    except ValueError:
        is_loopback = target.host == "localhost"
    if target.scheme == "http" and not plain_http and not is_loopback:
        raise ConfigurationError(f"url: {url!r} is plain http to another machine; use https, or allow plain http")
    return target


def _deliveries(secret: Secret, scheme: Scheme, event_type: str, over_long: int) -> dict[str, list[Delivery]]:
    """Return the deliveries of each check."""

    def event(**members: object) -> dict[str, Any]:
        return {"event": {"id": f"check_{uuid4().hex}", "type": event_type}, **members}

    def compact(**members: object) -> bytes:
        return json.dumps(event(**members), separators=(",", ":")).encode()

    def signed(body: bytes, key: Secret = secret) -> Delivery:
        return Delivery(body, sign(key, body, scheme, id=f"msg_{uuid4().hex}"))

    duplicate, unsigned, sent = signed(compact()), signed(compact()), event()
    del unsigned.headers[scheme.header]
    reencoded = signed(json.dumps(sent, separators=(",", ":")).encode())._replace(
        body=json.dumps(sent, indent=2).encode()
    )
    odd = json.dumps(event(text="\u00e5\u00e4\u00f6 \u20ac"), indent=3).encode() + b"\r\n"
    return {
        "valid delivery": [signed(compact())],
        "duplicate": [duplicate, duplicate],
        "reordered pair": [signed(compact(sequence=number)) for number in (2, 1)],
        "unusual JSON layout": [signed(odd)],
        "wrong signature": [signed(compact(), uuid4().bytes)],
        "no signature": [unsigned],
        "re-encoded body": [reencoded],
        "over-long body": [signed(compact(padding="x" * over_long))],
        "slow body": [signed(b" " * 1000)._replace(slow=True)],
    }


async def _post(session: aiohttp.ClientSession, url: URL, delivery: Delivery, timeout: float) -> Response:
    headers = {"Content-Type": "application/json", "Content-Length": str(len(delivery.body)), **delivery.headers}
    try:
        async with session.post(
            url,
            data=_chunks(delivery, timeout),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout),
            allow_redirects=False,
        ) as response:
            return Response(response.status, str(response.status), response.headers.get("Location", ""))
    except TimeoutError:
        return Response(0, NO_RESPONSE)
    except aiohttp.ClientConnectorError as error:
        raise connection_error(f"could not connect to {url}: {error}", error) from None
    except aiohttp.ClientError:
        return Response(0, CLOSED)


async def _chunks(delivery: Delivery, timeout: float) -> AsyncIterator[bytes]:
    size = 1 if delivery.slow else CHUNK  # single bytes defeat a timeout on each read
    for start in range(0, len(delivery.body), size):
        yield delivery.body[start : start + size]
        if delivery.slow:
            await asyncio.sleep(timeout / 60)  # the body is never completed


def _accepted(response: Response) -> bool:
    return 200 <= response.status < 300


def _rejected(response: Response) -> bool:
    return 400 <= response.status < 500


class Check(NamedTuple):
    """One check, and which responses are correct."""

    name: str
    expected: str
    is_correct: Callable[[Response], bool]
    advice: str


REENCODED = "the signature is verified over re-encoded JSON: verify it over the bytes as received"
CHECKS = (
    Check("valid delivery", "2xx", _accepted, "valid deliveries are rejected: check the secret and the scheme"),
    Check(
        "duplicate",
        "2xx both times",
        _accepted,
        "acknowledge a duplicate, and do not handle it again (which this check cannot see)",
    ),
    Check(
        "reordered pair",
        "2xx both times",
        _accepted,
        "events may arrive out of order: accept each of them, and read the state from the service",
    ),
    Check("unusual JSON layout", "2xx", _accepted, REENCODED),
    Check("wrong signature", "4xx, preferably 401", _rejected, "anyone can forge an event"),
    Check("no signature", "4xx, preferably 401", _rejected, "anyone can forge an event"),
    Check("re-encoded body", "4xx, preferably 401", _rejected, REENCODED),
    Check(
        "over-long body",
        "413, or the connection closed",
        lambda response: _rejected(response) or response.outcome == CLOSED,
        "a body of any size is read: set a limit, or anyone can exhaust the memory",
    ),
    Check(
        "slow body",
        "408, or the connection closed",
        lambda response: not _accepted(response) and response.outcome != NO_RESPONSE,  # a gateway may send 504
        "a body that trickles in is read to its end: set a timeout, or a few senders can block every worker",
    ),
)
