"""The conformance check: sends valid and invalid deliveries to your own endpoint and judges its responses."""

from __future__ import annotations

import asyncio
import io
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
from .._connections import connection_error, describe_failure
from ..errors import ConfigurationError
from .scheme import Scheme, WebhookSecret, sign

CLOSED = "the connection was closed"
NO_RESPONSE = "no response in time"
REENCODED = "the signature is verified over re-encoded JSON: verify it over the bytes as received"


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


Delivery = tuple[bytes, dict[str, str]]  # the body, and the headers that sign it


class Check(NamedTuple):
    """Deliveries, and which outcomes are correct: a status, `CLOSED` or `NO_RESPONSE`."""

    name: str
    expected: str
    is_correct: Callable[[int | str], bool]
    advice: str
    deliveries: tuple[Delivery, ...]
    is_slow: bool = False


async def check_receiver(
    url: str,
    secret: WebhookSecret,
    *,
    scheme: Scheme | None = None,
    event_type: str = "webhook.check",
    response_timeout: float = 10.0,
    slow_limit: float = 30.0,
    over_long: int = 16 * 1024 * 1024,
    plain_http: bool = False,
) -> AsyncIterator[CheckResult]:
    """Send the deliveries to ``url``, one after the other, and yield a result for each check.

    The endpoint receives a few valid events of type ``event_type``: choose a type that it ignores. It should reject a
    body of more than ``over_long`` bytes, and cut off a slow body within ``slow_limit`` seconds. Redirects are not
    followed. If the first delivery is redirected or not found, its result is the only one. Plain http is for loopback
    only, unless ``plain_http`` is true.
    """
    target = _target(url, plain_http)
    _checks.number("response_timeout", response_timeout, above=0)
    _checks.number("slow_limit", slow_limit, above=0)
    _checks.integer("over_long", over_long)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        for check in _all_checks(secret, scheme or Scheme(), event_type, over_long):
            started, timeout = time.monotonic(), slow_limit if check.is_slow else response_timeout
            outcomes, place = [], ""
            for delivery in check.deliveries:
                outcome, place = await _post(session, target, delivery, timeout, check.is_slow)
                outcomes.append(outcome)
            is_first = check.name == "valid delivery"
            advice = check.advice
            if is_first and _is_redirect(outcomes[0]):
                advice = f"redirects to {place}: register that address" if place else "redirects, but names no address"
            elif is_first and outcomes == [404]:
                advice = "no endpoint at this path"
            ok, got = all(map(check.is_correct, outcomes)), ", ".join(map(str, outcomes))
            yield CheckResult(check.name, ok, check.expected, got, time.monotonic() - started, advice)
            if advice != check.advice:
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


async def _post(
    session: aiohttp.ClientSession, url: URL, delivery: Delivery, timeout: float, is_slow: bool
) -> tuple[int | str, str]:
    """Return the outcome, and the address in the response's ``Location``."""
    content, signature = delivery
    headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), **signature}
    body = _trickle(timeout) if is_slow else io.BytesIO(content)
    limit = aiohttp.ClientTimeout(total=timeout)
    try:
        async with session.post(url, data=body, headers=headers, timeout=limit, allow_redirects=False) as response:
            return response.status, response.headers.get("Location", "")
    except TimeoutError:
        return NO_RESPONSE, ""
    except aiohttp.ClientConnectorError as error:
        reason = describe_failure(error.os_error)
        raise connection_error(f"could not connect to {url}: {reason}", error) from None
    except aiohttp.ClientError:
        return CLOSED, ""


async def _trickle(timeout: float) -> AsyncIterator[bytes]:
    while True:  # single bytes defeat a timeout on each read; the body is never completed
        yield b" "
        await asyncio.sleep(timeout / 60)


def _is_accepted(outcome: int | str) -> bool:
    return isinstance(outcome, int) and 200 <= outcome < 300


def _is_redirect(outcome: int | str) -> bool:
    return isinstance(outcome, int) and 300 <= outcome < 400


def _is_rejected(outcome: int | str) -> bool:
    return isinstance(outcome, int) and 400 <= outcome < 500


def _all_checks(secret: WebhookSecret, scheme: Scheme, event_type: str, over_long: int) -> tuple[Check, ...]:
    def event(**members: object) -> dict[str, Any]:
        return {"event": {"id": f"check_{uuid4().hex}", "type": event_type}, **members}

    def signed(content: object, key: WebhookSecret = secret) -> Delivery:
        body = content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()
        return body, sign(key, body, scheme, id=f"msg_{uuid4().hex}")

    duplicate, (compact, of_compact), (body, headers) = (signed(event()) for _ in range(3))
    unsigned = body, {name: value for name, value in headers.items() if name != scheme.header}
    reencoded = json.dumps(json.loads(compact), indent=2).encode(), of_compact
    odd = json.dumps(event(text="\u00e5\u00e4\u00f6 \u20ac"), indent=3).encode() + b"\r\n"
    once, twice, forged = "2xx", "2xx both times", "4xx, preferably 401"
    secret_advice = "valid deliveries are rejected: check the secret and the scheme"
    duplicate_advice = "acknowledge a duplicate, and do not handle it again (which this check cannot see)"
    order_advice = "events may arrive out of order: accept each of them, and read the state from the service"
    forged_advice = "anyone can forge an event"
    return (
        Check("valid delivery", once, _is_accepted, secret_advice, (signed(event()),)),
        Check("duplicate", twice, _is_accepted, duplicate_advice, (duplicate, duplicate)),
        Check("reordered pair", twice, _is_accepted, order_advice, tuple(signed(event(sequence=n)) for n in (2, 1))),
        Check("unusual JSON layout", once, _is_accepted, REENCODED, (signed(odd),)),
        Check("wrong signature", forged, _is_rejected, forged_advice, (signed(event(), uuid4().bytes),)),
        Check("no signature", forged, _is_rejected, forged_advice, (unsigned,)),
        Check("re-encoded body", forged, _is_rejected, REENCODED, (reencoded,)),
        Check(
            "over-long body",
            "413, or the connection closed",
            lambda outcome: _is_rejected(outcome) or outcome == CLOSED,
            "a body of any size is read: set a limit, or anyone can exhaust the memory",
            (signed(event(padding="x" * over_long)),),
        ),
        Check(
            "slow body",
            "408, or the connection closed",
            lambda outcome: not _is_accepted(outcome) and outcome != NO_RESPONSE,  # a gateway may send 504
            "a body that trickles in is read to its end: set a timeout, or a few senders can block every worker",
            (signed(b" " * 1000),),
            is_slow=True,
        ),
    )
