"""The conformance check: sends valid and invalid deliveries to your own endpoint and judges its responses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
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


@dataclass(frozen=True, slots=True)
class Response:
    """The response to a delivery. Without one, ``status`` is None and ``outcome`` says how the connection ended."""

    status: int | None
    outcome: str
    seconds: float
    location: str = ""

    def no_endpoint(self) -> str:
        """Return why no endpoint received the delivery, or an empty string."""
        if self.status is not None and 300 <= self.status < 400 and self.location:
            return f"redirects to {self.location}: register that address"
        return "no endpoint at this path" if self.status == 404 else ""

    def accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def rejected(self) -> bool:
        return self.status is not None and 400 <= self.status < 500

    def rejected_or_closed(self) -> bool:
        return self.rejected() or self.outcome == CLOSED

    def cut_off(self) -> bool:
        return not self.accepted() and self.outcome != NO_RESPONSE  # any status counts: a gateway may send 504


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
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        sender = _Sender(
            session, target, secret, scheme or Scheme(), event_type, response_timeout, slow_limit, over_long
        )
        for check in CHECKS:
            responses = await check.send(sender)
            ok = all(map(check.is_correct, responses))
            got = ", ".join(response.outcome for response in responses)
            seconds = sum(response.seconds for response in responses)
            no_endpoint = responses[0].no_endpoint() if check is CHECKS[0] else ""
            yield CheckResult(check.name, ok, check.expected, got, seconds, no_endpoint or check.advice)
            if no_endpoint:
                return


def _target(url: str, plain_http: bool) -> URL:
    try:
        target = URL(url)
    except ValueError as error:
        raise ConfigurationError(f"url: {url!r} is not a URL: {error}") from None
    if target.scheme not in ("http", "https") or not target.host:
        raise ConfigurationError(f"url: must be an http or https URL, got {url!r}")
    if target.scheme == "http" and not plain_http and not _is_loopback(target.host):
        raise ConfigurationError(f"url: {url!r} is plain http to another machine; use https, or allow plain http")
    return target


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class _Sender:
    """Creates, signs and posts deliveries."""

    session: aiohttp.ClientSession
    url: URL
    secret: Secret
    scheme: Scheme
    event_type: str
    response_timeout: float
    slow_limit: float
    over_long: int

    def event(self, **members: object) -> dict[str, Any]:
        return {"event": {"id": f"check_{uuid4().hex}", "type": self.event_type}, **members}

    def sign(self, body: bytes, secret: Secret | None = None) -> dict[str, str]:
        return sign(self.secret if secret is None else secret, body, self.scheme, id=f"msg_{uuid4().hex}")

    def unsigned(self, body: bytes) -> dict[str, str]:
        return {name: value for name, value in self.sign(body).items() if name != self.scheme.header}

    async def post(
        self,
        data: bytes | AsyncIterator[bytes],
        headers: dict[str, str],
        *,
        length: int | None = None,
        timeout: float = 0,
    ) -> Response:
        started = time.monotonic()
        headers = {"Content-Type": "application/json", **headers}
        if length is not None:
            headers["Content-Length"] = str(length)
        client_timeout = aiohttp.ClientTimeout(total=timeout or self.response_timeout)
        status, outcome, location = None, CLOSED, ""
        try:
            async with self.session.post(
                self.url, data=data, headers=headers, timeout=client_timeout, allow_redirects=False
            ) as response:
                status, outcome = response.status, str(response.status)
                location = response.headers.get("Location", "")
        except TimeoutError:
            outcome = NO_RESPONSE
        except aiohttp.ClientConnectorError as error:
            raise connection_error(f"could not connect to {self.url}: {error}", error) from None
        except aiohttp.ClientError:
            pass
        return Response(status, outcome, time.monotonic() - started, location)


async def _valid(sender: _Sender) -> list[Response]:
    body = _compact(sender.event())
    return [await sender.post(body, sender.sign(body))]


async def _duplicate(sender: _Sender) -> list[Response]:
    body = _compact(sender.event())
    headers = sender.sign(body)
    return [await sender.post(body, headers), await sender.post(body, headers)]


async def _reordered(sender: _Sender) -> list[Response]:
    bodies = [_compact(sender.event(sequence=number)) for number in (2, 1)]
    return [await sender.post(body, sender.sign(body)) for body in bodies]


async def _odd_layout(sender: _Sender) -> list[Response]:
    body = json.dumps(sender.event(text="\u00e5\u00e4\u00f6 \u20ac"), indent=3).encode() + b"\r\n"
    return [await sender.post(body, sender.sign(body))]


async def _forged(sender: _Sender) -> list[Response]:
    body = _compact(sender.event())
    return [await sender.post(body, sender.sign(body, uuid4().bytes))]


async def _unsigned(sender: _Sender) -> list[Response]:
    body = _compact(sender.event())
    return [await sender.post(body, sender.unsigned(body))]


async def _reencoded(sender: _Sender) -> list[Response]:
    event = sender.event()
    return [await sender.post(json.dumps(event, indent=2).encode(), sender.sign(_compact(event)))]


async def _over_long(sender: _Sender) -> list[Response]:
    body = _compact(sender.event(padding="x" * sender.over_long))
    return [await sender.post(_chunks(body), sender.sign(body), length=len(body))]


async def _slow(sender: _Sender) -> list[Response]:
    body = b" " * 1000
    trickle = _trickle(sender.slow_limit)
    return [await sender.post(trickle, sender.sign(body), length=len(body), timeout=sender.slow_limit)]


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), CHUNK):
        yield body[start : start + CHUNK]


async def _trickle(limit: float) -> AsyncIterator[bytes]:
    # Single bytes defeat a timeout on each read. The body is never completed.
    while True:
        yield b" "
        await asyncio.sleep(limit / 60)


def _compact(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


class Check(NamedTuple):
    """One check: what is sent, and which responses are correct."""

    name: str
    send: Callable[[_Sender], Awaitable[list[Response]]]
    expected: str
    is_correct: Callable[[Response], bool]
    advice: str


REENCODED = "the signature is verified over re-encoded JSON: verify it over the bytes as received"
CHECKS = (
    Check(
        "valid delivery",
        _valid,
        "2xx",
        Response.accepted,
        "valid deliveries are rejected: check the secret and the scheme",
    ),
    Check(
        "duplicate",
        _duplicate,
        "2xx both times",
        Response.accepted,
        "acknowledge a duplicate, and do not handle it again (which this check cannot see)",
    ),
    Check(
        "reordered pair",
        _reordered,
        "2xx both times",
        Response.accepted,
        "events may arrive out of order: accept each of them, and read the state from the service",
    ),
    Check("unusual JSON layout", _odd_layout, "2xx", Response.accepted, REENCODED),
    Check("wrong signature", _forged, "4xx, preferably 401", Response.rejected, "anyone can forge an event"),
    Check("no signature", _unsigned, "4xx, preferably 401", Response.rejected, "anyone can forge an event"),
    Check("re-encoded body", _reencoded, "4xx, preferably 401", Response.rejected, REENCODED),
    Check(
        "over-long body",
        _over_long,
        "413, or the connection closed",
        Response.rejected_or_closed,
        "a body of any size is read: set a limit, or anyone can exhaust the memory",
    ),
    Check(
        "slow body",
        _slow,
        "408, or the connection closed",
        Response.cut_off,
        "a body that trickles in is read to its end: set a timeout, or a few senders can block every worker",
    ),
)
