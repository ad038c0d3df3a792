"""One request out, one bounded response in: the only module that touches aiohttp's requests.

No aiohttp exception leaves it: they hold the request's headers, and with them the token. Instead `send` returns a
`Failure`, and reading a body raises `BrokenResponse`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, cast
from urllib.parse import urlencode

import aiohttp
import attrs
from aiohttp import hdrs
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict
from yarl import URL

from .._connections import connection_flags, is_refused_by_proxy, is_untrusted
from .._foreign import is_transient
from .._version import __version__
from ..errors import ClientClosed, ConfigurationError
from ..models import Token
from .redaction import redact
from .retry import Outcome

__all__ = [
    "JSON",
    "Body",
    "BrokenResponse",
    "Chunk",
    "Failure",
    "Produce",
    "Request",
    "Response",
    "Sessions",
    "Write",
    "bytes_body",
    "send",
]

log: logging.Logger = logging.getLogger("signing_async")

JSON = "application/json"
_START_BYTES, _START_SECONDS = 64 * 1024, 2.0
_MAX_CONNECTIONS = 100
# Seconds. The slack is for an event loop that is busy when a connection is closed.
_MAX_ROUND_TRIP, _ROUND_TRIP_SLACK = 0.1, 0.02

Chunk = bytes | bytearray | memoryview
Write = Callable[[Chunk], Awaitable[None]]
Produce = Callable[[Write, Callable[[], int]], Awaitable[None]]
"""Writes a body in chunks. The second argument returns the number of buffered bytes, whose memory is still in use.

An `OSError` that it raises counts as a connection error: convert the source's own to another exception.
"""


class Body(aiohttp.Payload):
    """A request body of known size for one attempt, which records whether any of it was sent."""

    def __init__(self, produce: Produce, size: int, content_type: str | None) -> None:
        super().__init__(None, content_type=content_type)
        self._produce = produce
        self._size = size
        self.started: bool = False
        self.started_at: float = 0.0
        self.idle_connections: Collection[object] = ()
        """The idle connections of the pool when the request was made."""
        self.on_reused_connection: bool = False
        self.failure: Exception | None = None

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the body; aiohttp calls this with a connection, and sends the headers with the first chunk."""
        if self.started:
            # aiohttp repeats a PUT or DELETE by itself if an idle connection was closed.
            raise ConnectionResetError("a body is sent once")
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
            # The source failed, not the connection; aiohttp would raise a connection error.
            self.failure = error
            raise

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return a placeholder: aiohttp's base class requires the method."""
        return f"<{self._size} bytes>"


def bytes_body(data: bytes = b"", content_type: str | None = None) -> Body:
    """Return a body from memory; an empty body has no content type."""

    async def produce(write: Write, waiting: Callable[[], int]) -> None:
        await write(data)

    return Body(produce, len(data), content_type)


@attrs.frozen(slots=False)
class Request:
    """An HTTP request. ``path`` is percent-encoded, begins with a slash, and may have a query."""

    method: str
    origin: str
    # A server wrote a redirect's query, so it may hold secrets, and some tracebacks show variables.
    path: str = attrs.field(repr=lambda path: repr(path.partition("?")[0]))
    params: Mapping[str, str] = {}
    body: Body | None = None
    accept: str = JSON
    headers: Mapping[str, str] = attrs.field(default={}, repr=False)

    @property
    def url(self) -> URL:
        address = self.origin + self.path
        if self.params:
            address += ("&" if "?" in self.path else "?") + urlencode(self.params)
        return URL(address, encoded=True)


@attrs.frozen
class Failure:
    """A request without a complete response."""

    outcome: Outcome
    message: str
    transient: bool = True
    client_wide: bool = False


class BrokenResponse(Exception):  # stays inside the package
    """The response was cut off, or is larger than allowed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Response:
    """A response with status and headers, whose body is still to be read. Close it."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self.detached: bool = False

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def reason(self) -> str:
        return self._response.reason or ""

    @property
    def received(self) -> int:
        return self._response.content.total_bytes

    async def read(self, limit: int) -> bytes:
        """Return the whole body; raise `BrokenResponse` if it is cut off or larger than ``limit``."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self._next():
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                text = f"the response is larger than {limit} bytes"
                raise BrokenResponse(Failure(Outcome.LOST, text, transient=False))
            if self._response.content.at_eof():
                break
        return b"".join(parts)

    async def read_start(self, deadline: float) -> bytes:
        """Return as much of the body's start as arrives soon; never raise. For responses whose status matters more.

        If the body hangs, half of the time until the deadline stays: the status counts, not the deadline.
        """
        body = b""
        seconds = min(_START_SECONDS, 0.5 * (deadline - asyncio.get_running_loop().time()))
        with contextlib.suppress(BrokenResponse, TimeoutError):
            async with asyncio.timeout(seconds):
                while len(body) < _START_BYTES and (chunk := await self._next()):
                    body += chunk[: _START_BYTES - len(body)]
        return body

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives."""
        while chunk := await self._next():
            yield chunk

    async def _next(self) -> bytes:
        """Wait for the next chunk of the body and return it; b"" at the end."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            failure = Failure(Outcome.LOST, _describe(error, "the response was cut off"))
        raise BrokenResponse(failure)

    def detach(self) -> Response:
        """Keep the response open after the call: its reader closes it."""
        self.detached = True
        return self

    def finish(self) -> None:
        """Close the response at the end of the call, unless it was detached."""
        if not self.detached:
            self.close()

    def close(self) -> None:
        """Release the connection if the body was read to its end, else close it."""
        # aiohttp has released it at the body's end, unless the request is still being sent.
        if not self._response.closed or self._response.connection is not None:
            self._response.close()


class Sessions:
    """The aiohttp session for one origin: the caller's, or a new one made on first use."""

    def __init__(self, session: aiohttp.ClientSession | None = None) -> None:
        self._given = session
        self._made: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool_key: Any = None
        """The origin's key in aiohttp's pool, once it is known."""
        self._pool_is_hidden = False
        self.closed: bool = False
        self.fastest_response: float = 0.0
        """Seconds: an upper bound for the round trip to the service. 0.0 before the first response."""

    def get(self) -> aiohttp.ClientSession:
        if self.closed:
            raise ClientClosed("the client is closed")
        if self._given is not None:
            if self._given.closed:
                raise ClientClosed("the client's session, which its caller made, is closed")
            return self._given
        if self._made is None:
            self._loop = asyncio.get_running_loop()
            self._made = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        elif self.belong_elsewhere():
            raise ConfigurationError("the client was first used in another event loop; make one client for each loop")
        return self._made

    def belong_elsewhere(self) -> bool:
        """Return whether the session that was made here belongs to another event loop."""
        return self._made is not None and self._loop is not asyncio.get_running_loop()

    def prepare(
        self, session: aiohttp.ClientSession, url: URL, accept: str
    ) -> tuple[Mapping[str, str], Collection[object]]:
        """Return the headers of a request, and the idle connections that may carry it.

        If aiohttp's pool cannot be checked, as may happen with a later release, the service is asked to close each
        connection after its response. Then no idle connection can be desynchronized.
        """
        idle: Collection[object] = ()
        try:
            idle = self.drop_desynchronized(session, url)
        except Exception as error:
            if not self._pool_is_hidden:
                self._pool_is_hidden = True
                text = "cannot check the connection pool of aiohttp %s (%s): connections are not reused"
                log.warning(text, aiohttp.__version__, type(error).__name__)
        return _headers(accept, close=self._pool_is_hidden), idle

    def drop_desynchronized(self, session: aiohttp.ClientSession, url: URL) -> Collection[object]:
        """Close idle connections on which foreign bytes arrived; return the others.

        aiohttp would take these bytes, which may belong to another user, for the next response.
        """
        pool: Any = session.connector._conns  # type: ignore[union-attr]  # aiohttp has no public access to its pool
        if self._pool_key is not None:
            return _drop_desynchronized(pool.get(self._pool_key, ()))
        idle: list[object] = []
        # In a session that thousands of clients share, this scans all hosts until the client's own key is known.
        host, port = url.raw_host, url.port
        for key in [key for key in pool if key.host == host and key.port == port]:
            idle += _drop_desynchronized(pool[key])
            # The caller's own requests to this host may have other keys, with a proxy or a server name.
            if key[2:4] == (url.scheme == "https", True) and not any(key[4:]):
                self._pool_key = key
        return idle

    def note_response(self, seconds: float) -> None:
        """Record the time until the head of a response."""
        if not self.fastest_response or seconds < self.fastest_response:
            self.fastest_response = seconds

    async def close(self) -> None:
        """Close the session, unless it is the caller's."""
        self.closed = True
        if self._made is not None:
            await self._made.close()

    def warn_if_open(self, owner: object) -> None:
        """Warn that the owner was not closed; for its ``__del__``, so without I/O."""
        if self._made is not None and not self._made.closed:
            text = f"{owner!r} was not closed: use `async with`, or await aclose()"
            warnings.warn(text, ResourceWarning, stacklevel=3)


def _drop_desynchronized(connections: Iterable[tuple[Any, float]]) -> list[object]:
    usable: list[object] = []
    # Iterate over a copy: closing a connection may change the pool.
    for protocol, _ in tuple(connections):
        if protocol.should_close:
            protocol.close()
        else:
            usable.append(protocol)
    return usable


async def send(
    sessions: Sessions, request: Request, token: Token | None, *, connect: float, silence: float | None = None
) -> Response | Failure:
    """Send one request, and return the response as soon as its head has arrived. Redirects are not followed.

    ``connect`` limits the time to connect, ``silence`` the time in which nothing arrives after sending.
    """
    is_closed = False
    session = sessions.get()
    url = request.url
    body = request.body
    headers, idle = sessions.prepare(session, url, request.accept)
    if request.headers:
        headers = CIMultiDict(headers)
        headers.update(request.headers)
    if body is not None:
        body.idle_connections = idle
    began = asyncio.get_running_loop().time()
    try:
        response = await session.request(
            request.method,
            url,
            data=body,
            # Not bound to a name: some tracebacks show variables, and none may show the token.
            headers=headers
            if token is None
            else {**headers, hdrs.AUTHORIZATION: f"{token.token_type} {token.access_token}"},
            # aiohttp sets no content type if there is no body, but does so for an empty body.
            skip_auto_headers=None if body is None or body.size else ("Content-Type",),
            allow_redirects=False,
            raise_for_status=False,
            timeout=_timeout(connect, silence),
        )
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ServerFingerprintMismatch) as error:
        untrusted = is_untrusted(error) or isinstance(error, aiohttp.ServerFingerprintMismatch)
        message = _describe(error, "the server's certificate is not trusted" if untrusted else "could not connect")
        return Failure(_without_connection(body), message, *connection_flags(untrusted))
    except aiohttp.ClientHttpProxyError as error:
        message = f"the proxy refused to connect (HTTP {error.status})"
        return Failure(_without_connection(body), message, *connection_flags(is_refused_by_proxy(error.status)))
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        # aiohttp sends the headers of a request with a body together with the body's first bytes.
        outcome = Outcome.LOST if body is None or body.started else Outcome.UNSENT
        if body is not None and body.started and _was_cut(error, body, sessions.fastest_response):
            outcome = Outcome.CUT
        failure = Failure(outcome, _describe(error, "the connection was closed before a response came"))
    except Exception as error:
        # The session itself failed, for example in the caller's trace hook: the service may already have the request.
        is_closed = session.closed and (body is None or not body.started)
        outcome = Outcome.LOST if body is None or body.started else Outcome.UNSENT
        # The body of a request without a token may hold secrets.
        text = type(error).__name__ if token is None else redact(repr(error), (token.access_token,))
        failure = Failure(outcome, f"the session failed: {text}", transient=is_transient(error))
    else:
        sessions.note_response(asyncio.get_running_loop().time() - began)
        return Response(response)
    # Outside the except block, so the aiohttp exception is not the context of what is raised.
    if is_closed:
        raise ClientClosed("the session was closed")
    if body is not None and body.failure is not None:
        raise body.failure
    return failure


def _without_connection(body: Body | None) -> Outcome:
    """Return the outcome of a request that ended because no connection could be made.

    aiohttp, or a middleware of the session, may have sent it on another connection before.
    """
    return Outcome.LOST if body is not None and body.started else Outcome.UNSENT


def _was_cut(error: BaseException, body: Body, fastest_response: float) -> bool:
    """Return whether the server closed an idle connection while the request was on its way.

    The signs: a reused connection, no byte of a response, closed within a round trip.
    """
    elapsed = asyncio.get_running_loop().time() - body.started_at
    return (
        body.on_reused_connection
        and isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
        # If a response had begun, its start would be in aiohttp's message.
        and isinstance(getattr(error, "message", ""), str)
        and elapsed <= min(fastest_response, _MAX_ROUND_TRIP) + _ROUND_TRIP_SLACK
    )


@lru_cache(maxsize=8)
def _headers(accept: str, *, close: bool) -> Mapping[str, str]:
    headers: dict[str, str] = {hdrs.ACCEPT: accept, hdrs.USER_AGENT: f"signing-async/{__version__}"}
    if close:
        headers[hdrs.CONNECTION] = "close"
    return headers


@lru_cache(maxsize=64)
def _timeout(connect: float, silence: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=silence)


def _describe(error: BaseException, message: str) -> str:
    """Add the cause to the message, without aiohttp's own texts, which may quote the request's URL and headers."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        detail = getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or cause.strerror
        return f"{message}: {detail or type(cause).__name__} ({error.host}:{error.port})"
    return f"{message} ({type(error).__name__})"
