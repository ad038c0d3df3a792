"""The conformance check: sends deliveries, good and bad, to somebody's own endpoint, and judges the answers."""

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

from ..errors import ConfigurationError, TransportError
from .scheme import Scheme, Secret, sign

ANSWER_LIMIT = 10.0
OVER_LONG = 16 * 1024 * 1024
SLOW_LIMIT = 30.0
PIECE = 64 * 1024


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One delivery (or two), and whether the endpoint handled it rightly."""

    name: str
    ok: bool
    expected: str
    got: str
    seconds: float
    advice: str
    """What it means when it is not ok."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, or how the connection ended without one."""

    status: int | None
    words: str
    seconds: float

    def accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def refused(self) -> bool:
        return self.status is not None and 400 <= self.status < 500

    def turned_away(self) -> bool:
        return self.refused() or self.words == CLOSED

    def cut_off(self) -> bool:
        return not self.accepted() and self.words != NO_ANSWER  # with any status: a gateway may say 504


CLOSED = "the connection was closed"
NO_ANSWER = "no answer in time"


async def check_receiver(
    url: str,
    secret: Secret,
    *,
    scheme: Scheme | None = None,
    event_type: str = "webhook.check",
    answer_limit: float = ANSWER_LIMIT,
    slow_limit: float = SLOW_LIMIT,
    over_long: int = OVER_LONG,
    plain_http: bool = False,
) -> AsyncIterator[CheckResult]:
    """Send the deliveries one after the other to ``url`` and nowhere else; no redirect is followed, no proxy used.

    The endpoint gets a handful of genuine events of the type ``event_type``: give it one that it ignores.
    ``over_long`` is the size in bytes of the body that should be refused, ``slow_limit`` how many seconds it may take
    to cut off a body that trickles in. Plain http goes to this machine only, unless ``plain_http`` is true.
    """
    target = _target(url, plain_http)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        sender = _Sender(session, target, secret, scheme or Scheme(), event_type, answer_limit, slow_limit, over_long)
        for check in CHECKS:
            answers = await check.send(sender)
            right = all(map(check.right, answers))
            got = ", ".join(answer.words for answer in answers)
            seconds = sum(answer.seconds for answer in answers)
            yield CheckResult(check.name, right, check.expected, got, seconds, check.advice)


def _target(url: str, plain_http: bool) -> URL:
    try:
        target = URL(url)
    except ValueError as error:
        raise ConfigurationError(f"{url!r} is not a URL: {error}") from None
    if target.scheme not in ("http", "https") or not target.host:
        raise ConfigurationError(f"{url!r} is not an http or https URL")
    if target.scheme == "http" and not plain_http and not _is_loopback(target.host):
        raise ConfigurationError(f"{url!r} is plain http to another machine: use https, or allow it explicitly")
    return target


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class _Sender:
    """Makes events, signs and posts them."""

    session: aiohttp.ClientSession
    url: URL
    secret: Secret
    scheme: Scheme
    event_type: str
    answer_limit: float
    slow_limit: float
    over_long: int

    def event(self, **more: object) -> dict[str, Any]:
        return {"event": {"id": f"check_{uuid4().hex}", "type": self.event_type}, **more}

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
        limit: float = 0,
    ) -> Answer:
        started = time.monotonic()
        headers = {"Content-Type": "application/json", **headers}
        if length is not None:
            headers["Content-Length"] = str(length)
        timeout = aiohttp.ClientTimeout(total=limit or self.answer_limit)
        status, words = None, CLOSED
        try:
            async with self.session.post(
                self.url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                status, words = answer.status, str(answer.status)
        except TimeoutError:
            words = NO_ANSWER
        except aiohttp.ClientConnectorError as error:
            raise TransportError(f"{self.url} cannot be reached: {error}") from None
        except aiohttp.ClientError:
            pass
        return Answer(status, words, time.monotonic() - started)


async def _valid(sender: _Sender) -> list[Answer]:
    body = _plain(sender.event())
    return [await sender.post(body, sender.sign(body))]


async def _duplicate(sender: _Sender) -> list[Answer]:
    body = _plain(sender.event())
    headers = sender.sign(body)
    return [await sender.post(body, headers), await sender.post(body, headers)]


async def _reordered(sender: _Sender) -> list[Answer]:
    bodies = [_plain(sender.event(sequence=number)) for number in (2, 1)]
    return [await sender.post(body, sender.sign(body)) for body in bodies]


async def _odd_layout(sender: _Sender) -> list[Answer]:
    body = json.dumps(sender.event(text="\u00e5\u00e4\u00f6 \u20ac"), indent=3).encode() + b"\r\n"
    return [await sender.post(body, sender.sign(body))]


async def _forged(sender: _Sender) -> list[Answer]:
    body = _plain(sender.event())
    return [await sender.post(body, sender.sign(body, uuid4().bytes))]


async def _unsigned(sender: _Sender) -> list[Answer]:
    body = _plain(sender.event())
    return [await sender.post(body, sender.unsigned(body))]


async def _encoded_again(sender: _Sender) -> list[Answer]:
    event = sender.event()
    return [await sender.post(json.dumps(event, indent=2).encode(), sender.sign(_plain(event)))]


async def _over_long(sender: _Sender) -> list[Answer]:
    body = _plain(sender.event(padding="x" * sender.over_long))
    return [await sender.post(_pieces(body), sender.sign(body), length=len(body))]


async def _slow(sender: _Sender) -> list[Answer]:
    body = b" " * 1000
    return [
        await sender.post(_trickle(sender.slow_limit), sender.sign(body), length=len(body), limit=sender.slow_limit)
    ]


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]


async def _trickle(limit: float) -> AsyncIterator[bytes]:
    # a byte now and then, so that a limit on each read alone does not help; never the whole body
    while True:
        yield b" "
        await asyncio.sleep(limit / 60)


def _plain(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


class Check(NamedTuple):
    """What is sent, and which answers to it are right."""

    name: str
    send: Callable[[_Sender], Awaitable[list[Answer]]]
    expected: str
    right: Callable[[Answer], bool]
    advice: str


REWRITTEN = "the signature is checked over JSON that was written again: check it over the bytes as received"
CHECKS = (
    Check("valid delivery", _valid, "2xx", Answer.accepted, "genuine events are refused"),
    Check(
        "duplicate",
        _duplicate,
        "2xx both times",
        Answer.accepted,
        "a duplicate must be acknowledged, and not handled again (which cannot be seen from here)",
    ),
    Check(
        "reordered pair",
        _reordered,
        "2xx both times",
        Answer.accepted,
        "events may come in another order than they happened: take each, and read the state from the service",
    ),
    Check("unusual layout, signed as sent", _odd_layout, "2xx", Answer.accepted, REWRITTEN),
    Check("wrong signature", _forged, "4xx, best 401", Answer.refused, "anybody can forge an event"),
    Check("no signature", _unsigned, "4xx, best 401", Answer.refused, "anybody can forge an event"),
    Check("re-encoded body", _encoded_again, "4xx, best 401", Answer.refused, REWRITTEN),
    Check(
        "over-long body",
        _over_long,
        "413, or closed",
        Answer.turned_away,
        "any length is read: set a limit, or anybody can fill the memory",
    ),
    Check(
        "slow body",
        _slow,
        "408, or closed",
        Answer.cut_off,
        "a body that trickles in is waited for: set a time limit, or a few senders can hold every worker",
    ),
)
