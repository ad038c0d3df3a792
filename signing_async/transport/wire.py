"""One request out, one bounded answer in: the only module that touches aiohttp's requests.

No aiohttp exception leaves it: those hold the request's headers, and with them the token. What went wrong is told by a
`Failure`, or by `Broken` while a body is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, cast
from urllib.parse import SplitResult, quote, urlencode, urljoin, urlsplit

import aiohttp
import attrs
from aiohttp import hdrs
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter
from yarl import URL

from .. import __version__
from ..errors import ClientClosed, ConfigurationError, InvalidRequest
from ..models import Token
from . import decode
from .retry import Outcome

__all__ = [
    "JSON",
    "Body",
    "Broken",
    "Chunk",
    "Failure",
    "Produce",
    "Request",
    "Response",
    "Sessions",
    "Write",
    "bytes_body",
    "check_origin",
    "resolve",
    "segment",
    "send",
]

log: logging.Logger = logging.getLogger("signing_async")

JSON = "application/json"
_START = 64 * 1024
_PATIENCE = 2.0
_CONNECTIONS = 100
# A round trip takes at most this; on top of it the event loop may be busy when a connection is closed.
_MAX_ROUND_TRIP, _ROUND_TRIP_SLACK = 0.1, 0.02
# urlsplit drops tabs, line breaks and what follows a bracket, and takes any other character as part of the host.
_STRAY = re.compile(r"[\s\x00-\x1f\x7f\\]")
_NETLOC = re.compile(r"(?:\[[^\]]+:[^\]]+\]|[\w-]{1,63}(?:\.[\w-]{1,63})*\.?)(?::[0-9]*)?")

Chunk = bytes | bytearray | memoryview
Write = Callable[[Chunk], Awaitable[None]]
Produce = Callable[[Write, Callable[[], int]], Awaitable[None]]
"""Writes a body in chunks. The second says how many bytes still wait to be sent: their memory may not be used again.

An `OSError` out of it is taken for the connection's: those of a source have to be told as something else.
"""


def check_origin(base_url: str) -> str:
    """The origin to talk to, or a `ConfigurationError`: HTTPS, or plain HTTP to a loopback host."""
    if not isinstance(base_url, str):
        raise ConfigurationError(f"base_url is not a URL: {base_url!r}")
    if "@" in base_url:
        raise ConfigurationError("base_url must not hold a user name or a password")
    if _STRAY.search(base_url):
        raise ConfigurationError(f"base_url must not hold white space, backslashes or control characters: {base_url!r}")
    try:
        parts = urlsplit(base_url)
        origin = _origin(parts)
    except ValueError:
        raise ConfigurationError(f"base_url is not a URL: {base_url!r}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"base_url must be an origin such as https://tenant.example.com, not {base_url!r}")
    if parts.port == 0 or not _NETLOC.fullmatch(parts.netloc) or (":" in parts.hostname and not _is_ip(parts.hostname)):
        raise ConfigurationError(f"base_url has no usable host and port: {base_url!r}")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigurationError(f"base_url must be an origin, without path or query: {base_url!r}")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ConfigurationError(f"base_url must be https (plain http is for loopback hosts alone): {base_url!r}")
    return origin


def _origin(parts: SplitResult) -> str:
    host = parts.hostname or ""
    port = parts.port if parts.port not in (None, {"http": 80, "https": 443}.get(parts.scheme)) else None
    return f"{parts.scheme}://" + (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")


def resolve(request: Request, reference: str) -> str | None:
    """The path and query that a reference from the server leads to, if that is on the request's own origin."""
    try:
        parts = urlsplit(urljoin(str(request.url), reference.strip()))
        if not reference.strip() or parts.username is not None or _origin(parts) != request.origin:
            return None
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        return path + ("?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?") if parts.query else "")
    except ValueError:  # UnicodeEncodeError too: bytes of a header that are no UTF-8
        return None


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return _is_ip(host) and ipaddress.ip_address(host).is_loopback


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def segment(name: str, value: object) -> str:
    """One segment of a path: an id, or the record itself, percent-encoded; empty ones and dots are refused."""
    value = getattr(value, "id", value)
    if not isinstance(value, str) or value.strip(". \t\r\n") == "":
        raise InvalidRequest(f"{name}: must be an id or a record that has one, not {value!r}")
    try:
        return quote(value, safe="")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}: not a text that can be sent: {value!r}") from None


class Body(aiohttp.Payload):
    """A request body of known size, made for one attempt, that knows whether any of it was sent."""

    def __init__(self, produce: Produce, size: int, content_type: str | None) -> None:
        super().__init__(None, content_type=content_type)
        self._produce = produce
        self._size = size
        self.started: bool = False
        self.started_at: float = 0.0
        self.idle_connections: Collection[object] = ()
        """The connections in the pool when the request was made."""
        self.on_reused_connection: bool = False
        self.failure: Exception | None = None

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Called by aiohttp with the connection in hand: what goes before the first chunk are the headers."""
        self.started = True
        self.started_at = asyncio.get_running_loop().time()
        if self.idle_connections:
            self.on_reused_connection = cast("StreamWriter", writer).protocol in self.idle_connections
        transport = cast("StreamWriter", writer).transport
        try:
            await self._produce(writer.write, lambda: 0 if transport is None else transport.get_write_buffer_size())
        except (aiohttp.ClientError, OSError):
            raise
        except Exception as error:
            # The source failed, not the connection: aiohttp would call it a connection error.
            self.failure = error
            raise

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Asked for by aiohttp's class; a body that is streamed has no text to give."""
        return f"<{self._size} bytes>"


def bytes_body(data: bytes = b"", content_type: str | None = None) -> Body:
    """A body that is in memory already; an empty one has no type."""

    async def once(write: Write, waiting: Callable[[], int]) -> None:
        await write(data)

    return Body(once, len(data), content_type)


@attrs.frozen(slots=False)
class Request:
    """What goes out. ``path`` is encoded, begins with a slash, and may have a query."""

    method: str
    origin: str
    # A redirect's query, which a server wrote, may hold anything: variables are shown in some tracebacks.
    path: str = attrs.field(repr=lambda path: repr(path.partition("?")[0]))
    params: Mapping[str, str] = {}
    body: Body | None = None
    accept: str = JSON

    @property
    def url(self) -> URL:
        address = self.origin + self.path
        if self.params:
            address += ("&" if "?" in self.path else "?") + urlencode(self.params)
        return URL(address, encoded=True)


@attrs.frozen
class Failure:
    """No answer came; ``passing`` says whether it makes sense to try again."""

    outcome: Outcome
    words: str
    passing: bool = True


class Broken(Exception):  # stays inside the package
    """The answer broke off, or is larger than allowed, while it was read."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.words)
        self.failure = failure


class Response:
    """An answer whose status and headers are there and whose body is still to be read. Close it."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self._kept = False

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def reason(self) -> str:
        return self._response.reason or ""

    async def read(self, limit: int) -> bytes:
        """The whole body, or `Broken`."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self._next():
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise Broken(Failure(Outcome.LOST, f"the answer is larger than {limit} bytes", passing=False))
            if self._response.content.at_eof():
                break
        return b"".join(parts)

    async def start(self) -> bytes:
        """The start of a body that matters less than its status, as far as it comes soon; this never fails."""
        body = b""
        with contextlib.suppress(Broken, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                while len(body) < _START and (chunk := await self._next()):
                    body += chunk[: _START - len(body)]
        return body

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        while chunk := await self._next():
            yield chunk

    async def _next(self) -> bytes:
        """What has arrived of the body by now, or some more of it; nothing at its end."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            failure = Failure(Outcome.LOST, _words(error, "the answer broke off"))
        raise Broken(failure)

    def kept(self) -> Response:
        """The same, for someone who goes on reading it after the call, and closes it then."""
        self._kept = True
        return self

    def finish(self) -> None:
        """The call is over: close the answer, unless someone has kept it."""
        if not self._kept:
            self.close()

    def close(self) -> None:
        """Give the connection back if the body was read to its end, and close it if not."""
        # At its end aiohttp has done that, unless the request is still being sent.
        if not self._response.closed or self._response.connection is not None:
            self._response.close()


class Sessions:
    """The way to one origin's aiohttp session: the caller owns it, or this object, which makes it when it is needed."""

    def __init__(self, session: aiohttp.ClientSession | None = None) -> None:
        self._given = session
        self._made: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pooled_as: Any = None
        """What aiohttp's pool keeps the origin's connections under, once that is known."""
        self._pool_is_hidden = False
        self.closed: bool = False
        self.fastest_response: float = 0.0
        """Seconds; an upper bound of the round trip to the service. 0.0 before the first response."""

    def get(self) -> aiohttp.ClientSession:
        if self.closed:
            raise ClientClosed("the client is closed")
        if self._given is not None:
            if self._given.closed:
                raise ClientClosed("the session that was given to the client is closed")
            return self._given
        if self._made is None:
            self._loop = asyncio.get_running_loop()
            self._made = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_CONNECTIONS),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        elif self.belong_elsewhere():
            raise ConfigurationError(
                "a client belongs to the event loop that it was first used in; make one for each loop"
            )
        return self._made

    def belong_elsewhere(self) -> bool:
        """Return whether the session that was made here belongs to another event loop."""
        return self._made is not None and self._loop is not asyncio.get_running_loop()

    def prepare(
        self, session: aiohttp.ClientSession, url: URL, accept: str
    ) -> tuple[Mapping[str, str], Collection[object]]:
        """Return the headers of a request, and the idle connections that it may be sent on.

        If aiohttp's pool cannot be checked, as it may be with a later release, the service is asked to close each
        connection after its response, so that no connection waits in the pool for foreign bytes.
        """
        idle: Collection[object] = ()
        try:
            idle = self.drop_spoiled(session, url)
        except Exception as error:
            if not self._pool_is_hidden:
                self._pool_is_hidden = True
                log.warning(
                    "the connection pool of aiohttp %s cannot be checked (%s): connections are not reused",
                    aiohttp.__version__,
                    type(error).__name__,
                )
        return _headers(accept, last=self._pool_is_hidden), idle

    def drop_spoiled(self, session: aiohttp.ClientSession, url: URL) -> Collection[object]:
        """Close connections that wait in the pool and on which more came than was asked for; return the others.

        aiohttp would take that for the answer to the next request, and it may be somebody else's.
        """
        waiting: Any = session.connector._conns  # type: ignore[union-attr]  # there is no public way into the pool
        if self._pooled_as is not None:
            return _drop_spoiled(waiting.get(self._pooled_as, ()))
        idle: list[object] = []
        # Of a session that thousands of clients share this looks at all hosts, until the client's own one is known.
        host, port = url.raw_host, url.port
        for key in [key for key in waiting if key.host == host and key.port == port]:
            idle += _drop_spoiled(waiting[key])
            # A caller's own requests to this host may have other keys: another proxy, say, or a server name.
            if key[2:4] == (url.scheme == "https", True) and not any(key[4:]):
                self._pooled_as = key
        return idle

    def note_response(self, seconds: float) -> None:
        """Record how long the head of a response took."""
        if not self.fastest_response or seconds < self.fastest_response:
            self.fastest_response = seconds

    async def close(self) -> None:
        """Close what was made here; the caller's session stays open."""
        self.closed = True
        if self._made is not None:
            await self._made.close()

    def warn_if_open(self, owner: object) -> None:
        """For an owner's ``__del__``: say that it was forgotten. No I/O happens here."""
        if self._made is not None and not self._made.closed:
            warnings.warn(
                f"{owner!r} was not closed: use `async with`, or await aclose()", ResourceWarning, stacklevel=3
            )


def _drop_spoiled(connections: Iterable[tuple[Any, float]]) -> list[object]:
    usable: list[object] = []
    # Of a copy: nobody says that closing one leaves the pool as it is.
    for protocol, _ in tuple(connections):
        if protocol.should_close:
            protocol.close()
        else:
            usable.append(protocol)
    return usable


async def send(
    sessions: Sessions,
    request: Request,
    token: Token | None,
    *,
    connect: float,
    silence: float | None = None,
) -> Response | Failure:
    """Send one request, and return when the answer's head is there. Redirects are not followed.

    ``connect`` bounds the making of a connection; ``silence`` the time in which nothing arrives after sending.
    """
    if not decode.is_ready():
        # In a thread: importing cattrs takes longer than the event loop may be held up.
        await asyncio.to_thread(decode.converter)
    refused: ClientClosed | ConfigurationError | None = None
    session = sessions.get()
    url = request.url
    body = request.body
    headers, idle = sessions.prepare(session, url, request.accept)
    if body is not None:
        body.idle_connections = idle
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        response = await session.request(
            request.method,
            url,
            data=body,
            # Written here and nowhere bound to a name, so that no traceback that shows variables shows the token.
            headers=headers
            if token is None
            else {**headers, hdrs.AUTHORIZATION: f"{token.token_type} {token.access_token}"},
            # A request without a body gets no type from aiohttp; an empty body would.
            skip_auto_headers=None if body is None or body.size else ("Content-Type",),
            allow_redirects=False,
            raise_for_status=False,
            timeout=_timeout(connect, silence),
        )
    except aiohttp.ClientConnectorCertificateError as error:
        return Failure(Outcome.UNSENT, _words(error, "the server's certificate is not trusted"), passing=False)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        return Failure(Outcome.UNSENT, _words(error, "no connection could be made"))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        # A request without body goes out with its headers; one with a body sends nothing before the body's first bytes.
        outcome = Outcome.LOST if body is None or body.started else Outcome.UNSENT
        if body is not None and body.started and _was_cut(error, body, sessions.fastest_response):
            outcome = Outcome.CUT
        failure = Failure(outcome, _words(error, "the connection was closed before an answer came"))
    except (RuntimeError, ValueError) as error:
        refused = ClientClosed("the session was closed") if session.closed else ConfigurationError(f"session: {error}")
    else:
        sessions.note_response(loop.time() - began)
        return Response(response)
    # Out here the aiohttp exception is no longer the context of what is raised.
    if refused is not None:
        raise refused
    if body is not None and body.failure is not None:
        raise body.failure
    return failure


def _was_cut(error: BaseException, body: Body, fastest_response: float) -> bool:
    """Return whether the server closed an idle connection while the request was on its way.

    That is so on a reused connection, without a byte of a response, within a round trip.
    """
    elapsed = asyncio.get_running_loop().time() - body.started_at
    return (
        body.on_reused_connection
        and isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
        # aiohttp's message holds the start of a response if there was one.
        and isinstance(getattr(error, "message", ""), str)
        and elapsed <= min(fastest_response, _MAX_ROUND_TRIP) + _ROUND_TRIP_SLACK
    )


@lru_cache(maxsize=8)
def _headers(accept: str, *, last: bool) -> Mapping[str, str]:
    headers: dict[str, str] = {hdrs.ACCEPT: accept, hdrs.USER_AGENT: f"signing-async/{__version__}"}
    if last:
        headers[hdrs.CONNECTION] = "close"
    return headers


@lru_cache(maxsize=64)
def _timeout(connect: float, silence: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=silence)


def _words(error: BaseException, said: str) -> str:
    """A sentence that holds nothing of the request: aiohttp's own texts may quote its URL and headers."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        detail = getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or cause.strerror
        return f"{said}: {detail or type(cause).__name__} ({error.host}:{error.port})"
    return f"{said} ({type(error).__name__})"
