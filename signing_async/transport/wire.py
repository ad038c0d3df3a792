"""One request out, one bounded response in: the only module that touches aiohttp's requests.

No aiohttp exception leaves it: they hold the request's headers, and with them the token. It raises `BrokenResponse`
instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, cast
from urllib.parse import urlencode

import aiohttp
import attrs
from aiohttp import hdrs
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict
from yarl import URL

from .._connections import is_refused_by_proxy, is_untrusted
from .._secret import Secret, hide_fields
from .._version import __version__
from ..errors import ClientClosed, ConfigurationError
from ..models import Token
from . import urls
from .proxy import find_proxy
from .retry import Kind

__all__ = ["JSON", "READING", "Body", "BrokenResponse", "Request", "Response", "Sessions", "bytes_body", "exchange"]

log: logging.Logger = logging.getLogger("signing_async")

JSON = "application/json"
READING = frozenset({"GET", "HEAD"})
# Measured: TLS is slower with more at once.
_WRITE_SIZE, _TLS_WRITE_SIZE = 1024 * 1024, 120 * 1024
_START_BYTES, _START_SECONDS = 64 * 1024, 1.0
_MAX_CONNECTIONS = 100
_ENCODINGS = "gzip, deflate"  # what every Python decodes
# As much as browsers take, and together no more than the largest response.
_MAX_HEADER, _MAX_HEADERS = 64 * 1024, 500
_USER_AGENT = f"signing-async/{__version__}"
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_UNREADABLE = {  # by the start of aiohttp's message
    "Got more than": f"a header is longer than {_MAX_HEADER // 1024} KiB",
    "Too many headers": f"it has more than {_MAX_HEADERS} headers",
    "Can not decode content-encoding": f"its Content-Encoding is none of {_ENCODINGS}",
}
_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ServerFingerprintMismatch)

Chunk = bytes | bytearray | memoryview
Write = Callable[[Chunk], Awaitable[None]]
Produce = Callable[[Write, int], Awaitable[None]]
"""Writes a body in chunks of at most this many bytes.

An `OSError` that it raises counts as a connection error: convert the source's own to another exception.
"""


class Body(aiohttp.Payload):
    """A request body of known size for one attempt, which records whether any of it was sent."""

    def __init__(self, produce: Produce, size: int, content_type: str | None) -> None:
        super().__init__(None, content_type=content_type)
        self._produce = produce
        self._size = size
        self.started: bool = False
        self.failure: Exception | None = None
        """What the body's source raised: the request is incomplete, and no service carries it out."""
        self.was_refused: bool = False

    @property
    def may_have_taken_effect(self) -> bool:
        """Whether the whole request may have been sent, and the service did not refuse it."""
        return self.started and self.failure is None and not self.was_refused

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the body; aiohttp calls this with a connection, and sends the headers with the first chunk."""
        if self.started:
            # aiohttp repeats a PUT or DELETE by itself if an idle connection was closed.
            raise ConnectionResetError("a body is sent once")
        self.started = True
        transport = cast("StreamWriter", writer).transport
        try:
            is_tls = transport is not None and transport.get_extra_info("ssl_object") is not None
            await self._produce(writer.write, _TLS_WRITE_SIZE if is_tls else _WRITE_SIZE)
        except (aiohttp.ClientError, OSError):
            raise
        except Exception as error:  # the source failed; aiohttp would raise a connection error
            self.failure = error
            raise

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return a placeholder: aiohttp's base class requires the method."""
        return f"<{self._size} bytes>"


def bytes_body(data: bytes = b"", content_type: str | None = None) -> Body:
    """Return a body from memory; an empty body has no content type."""

    async def produce(write: Write, most: int) -> None:
        await write(data)

    return Body(produce, len(data), content_type)


@attrs.define(eq=False, repr=False, slots=False, field_transformer=hide_fields)
class Request:
    """An HTTP request. ``path`` is percent-encoded, begins with a slash, and may have a query."""

    method: str
    origin: str
    path: str
    params: Mapping[str, str] = {}
    body: Body | None = None
    accept: str = JSON
    headers: Mapping[str, str] = {}
    token: Token | None = None
    connect: float | None = None
    """The seconds in which to connect."""
    silence: float | None = None
    """The seconds in which something must arrive after the request was sent."""
    limit: int | None = 0
    """The largest body of a success; with 0 only its start is read, with None nothing: the body is streamed."""
    deadline: float = math.inf
    """The loop time until which the caller waits."""
    response: Response | None = attrs.field(default=None, init=False)
    """The response, or the part of it that has arrived; also after an error."""

    @property
    def url(self) -> URL:
        address = self.origin + self.path
        if self.params:
            address += ("&" if "?" in self.path else "?") + urlencode(self.params)
        return URL(address, encoded=True)


class BrokenResponse(Exception):  # stays inside the package
    """There is no response, or it was cut off, or is larger than allowed."""

    def __init__(self, kind: Kind, message: str, transient: bool = True, client_wide: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.transient = transient
        self.client_wide = client_wide


class Response:
    """A response with its status and headers, and its body unless that is streamed. Close it."""

    body: bytes = b""
    refusal: str = ""
    """Why this redirect was not followed."""
    detached: bool = False
    """Whether the response stays open after the call: its reader closes it."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._content = response.content
        self.status: int = response.status
        self.reason: str = response.reason or ""
        self.headers: Mapping[str, str] = response.headers

    @property
    def received(self) -> int:
        """The bytes of the body that have arrived."""
        return self._content.total_bytes

    async def read(self, limit: int) -> None:
        """Read the whole body; raise `BrokenResponse` if it is cut off or larger than ``limit``."""
        parts: list[bytes] = []
        size = 0
        while not self._content.at_eof():
            parts.append(chunk := await self._next())
            size += len(chunk)
            if size > limit:
                raise BrokenResponse(Kind.LOST, f"the response is larger than {limit} bytes", transient=False)
        self.body = b"".join(parts)

    async def read_start(self, deadline: float) -> None:
        """Read as much of the body's start as arrives soon; never raise. For responses whose status matters more.

        If the body hangs, half of the time until the deadline stays: the status counts, not the deadline.
        """
        seconds = min(_START_SECONDS, 0.5 * (deadline - asyncio.get_running_loop().time()))
        with contextlib.suppress(BrokenResponse, TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self.body) < _START_BYTES and not self._content.at_eof():
                    self.body += (await self._next())[: _START_BYTES - len(self.body)]

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives."""
        while not self._content.at_eof():
            if chunk := await self._next():
                yield chunk

    async def _next(self) -> bytes:
        """Wait for the next chunk of the body and return it; b"" if the body ended."""
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            text = _describe(error, "the response was cut off")
        raise BrokenResponse(Kind.LOST, text)

    def detach(self) -> Response:
        """Keep the response open after the call."""
        self.detached = True
        return self

    def close(self) -> None:
        """Release the connection if the body was read to its end, else close it."""
        # aiohttp has released it at the body's end, unless the request is still being sent.
        if not self._response.closed or self._response.connection is not None:
            self._response.close()


class Sessions:
    """The aiohttp session for one origin: the caller's, or a new one made on first use.

    A session made here uses the environment's proxy, unless ``proxy`` is given.
    """

    def __init__(
        self, session: aiohttp.ClientSession | None = None, origin: str = "", proxy: Secret[URL] | None = None
    ) -> None:
        self._given = session
        self._origin = origin
        self.proxy: Secret[URL] | None = proxy
        self._made: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.pool_is_hidden: bool = False
        """Whether the pool cannot be checked."""
        self.closed: bool = False

    def get(self) -> aiohttp.ClientSession:
        if self.closed:
            raise ClientClosed("the client is closed")
        if self._given is not None:
            if self._given.closed:
                raise ClientClosed("the client's session, which its caller made, is closed")
            running = asyncio.get_running_loop()
            if getattr(self._given, "_loop", running) is not running:
                raise ConfigurationError("the session belongs to another event loop; make one for each loop")
            return self._given
        if self._made is None:
            self._loop = asyncio.get_running_loop()
            self.proxy = self.proxy or find_proxy(self._origin)
            self._made = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        elif self.belong_elsewhere():
            raise ConfigurationError("the client was first used in another event loop; make one client for each loop")
        return self._made

    @property
    def are_given(self) -> bool:
        return self._given is not None

    def renew(self) -> Sessions:
        """Return an object for another event loop."""
        return Sessions(None, self._origin, self.proxy)

    def belong_elsewhere(self) -> bool:
        """Return whether the session that was made here belongs to another event loop."""
        return self._made is not None and self._loop is not asyncio.get_running_loop()

    def drop_desynchronized(self, session: aiohttp.ClientSession) -> None:
        """Close idle connections on which foreign bytes arrived."""
        # aiohttp reuses such a connection although its protocol says `should_close`, and would take these bytes, which
        # may belong to another user, for the next response. Its pool is private: if a later release keeps it in another
        # way, the service is asked to close each connection after its response.
        try:
            pool: Any = session.connector._conns  # type: ignore[union-attr]  # a failure is caught below
            for protocol in [protocol for idle in pool.values() for protocol, _ in idle if protocol.should_close]:
                protocol.close()
        except Exception as error:
            if not self.pool_is_hidden:
                self.pool_is_hidden = True
                text = "cannot check the connection pool of aiohttp %s (%s): connections are not reused"
                log.warning(text, aiohttp.__version__, type(error).__name__)

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


async def exchange(sessions: Sessions, request: Request) -> Response:
    """Send a request, and return its response. A read follows redirects to its own origin.

    Of a response that is no success, the start of the body is read. Raises `BrokenResponse` if there is no response, or
    no whole one.
    """
    for _ in range(_MAX_REDIRECTS + 1):
        response = request.response = await _send(sessions, request)
        if response.status not in _REDIRECTS or request.method not in READING:
            break
        path = urls.resolve(request.origin, request.path, response.headers.get("Location", ""))
        if path is None:
            response.refusal = "a redirect to another origin is not followed"
            return response
        response.close()
        request.response = None
        request.path, request.params = path, {}
    else:
        response.refusal = f"more than {_MAX_REDIRECTS} redirects"
        return response
    if request.body is not None:
        request.body.was_refused = 400 <= response.status < 500 and response.status != 408
    if not 200 <= response.status < 300 or request.limit == 0:
        await response.read_start(request.deadline)
    elif request.limit is not None:
        await response.read(request.limit)
    return response


async def _send(sessions: Sessions, request: Request) -> Response:
    """Send one request, and return the response as soon as its head has arrived."""
    session, body = sessions.get(), request.body
    sessions.drop_desynchronized(session)
    headers, middlewares = _headers(request), None
    if sessions.pool_is_hidden:
        headers[hdrs.CONNECTION] = "close"
    if session.trust_env:
        # aiohttp would add the host's credentials of a .netrc file, or fail because there are two.
        given: tuple[aiohttp.ClientMiddlewareType, ...] = getattr(session, "_middlewares", ())
        middlewares = (_authorize(headers.pop(hdrs.AUTHORIZATION, None)), *given)
    try:
        response = await session.request(
            request.method,
            request.url,
            data=body,
            headers=headers,
            proxy=None if sessions.proxy is None else sessions.proxy.reveal(),
            middlewares=middlewares,
            # aiohttp sets no content type if there is no body, but does so for an empty body.
            skip_auto_headers=None if body is None or body.size else ("Content-Type",),
            allow_redirects=False,
            raise_for_status=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=request.connect, sock_read=request.silence),
            max_line_size=_MAX_HEADER,
            max_field_size=_MAX_HEADER,
            max_headers=_MAX_HEADERS,
        )
    except Exception as error:
        broken = _broken(Kind.LOST if body is not None and body.started else Kind.UNSENT, error)
    else:
        # Through a tunnel (https), a 407 comes from the service.
        if response.status != 407 or sessions.proxy is None or request.url.scheme == "https":
            return Response(response)
        response.close()
        broken = _refused_by_proxy(response.status)
    # Outside the except block, so the aiohttp exception is not the context of what is raised.
    if session.closed and broken.kind is Kind.UNSENT:
        raise ClientClosed("the client is closed" if sessions.closed else "the session was closed")
    raise (body.failure if body is not None else None) or broken


def _headers(request: Request) -> CIMultiDict[str]:
    headers = CIMultiDict({hdrs.ACCEPT: request.accept, hdrs.ACCEPT_ENCODING: _ENCODINGS, hdrs.USER_AGENT: _USER_AGENT})
    if request.body is not None and request.body.size:
        # aiohttp prefers a default header of the session to the body's own type.
        headers[hdrs.CONTENT_TYPE] = request.body.content_type
    headers.update(request.headers)
    if request.token is not None:
        headers[hdrs.AUTHORIZATION] = f"{request.token.token_type} {request.token.access_token}"
    return headers


def _authorize(value: str | None) -> aiohttp.ClientMiddlewareType:
    """Return a middleware that replaces the header Authorization."""

    async def authorize(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        request.headers.popall(hdrs.AUTHORIZATION, None)
        if value is not None:
            request.headers[hdrs.AUTHORIZATION] = value
        return await handler(request)

    return authorize


def _broken(kind: Kind, error: Exception) -> BrokenResponse:
    """Return what an exception of aiohttp, or of the caller's session, stands for. Its text may quote the request."""
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return _refused_by_proxy(error.status)
    if isinstance(error, _NOT_CONNECTED):
        untrusted = is_untrusted(error) or isinstance(error, aiohttp.ServerFingerprintMismatch)
        place = " to the proxy" if isinstance(error, aiohttp.ClientProxyConnectionError) else ""
        text = "the server's certificate is not trusted" if untrusted else f"could not connect{place}"
        return BrokenResponse(kind, _describe(error, text), transient=not untrusted, client_wide=untrusted)
    if isinstance(error, aiohttp.ClientResponseError):
        # Its text quotes the response, which may echo the token.
        known = (text for start, text in _UNREADABLE.items() if error.message.startswith(start))
        text = f"the response cannot be read: {next(known, 'it is not valid HTTP')}"
        return BrokenResponse(kind, text, transient=False)
    if isinstance(error, aiohttp.ClientError | ConnectionError | TimeoutError):
        return BrokenResponse(kind, _describe(error, "the connection was closed before a response came"))
    # The session itself failed, for example in the caller's trace hook: the service may already have the request.
    return BrokenResponse(kind, _describe(error, "the session failed"), transient=False)


def _refused_by_proxy(status: int) -> BrokenResponse:
    is_final = is_refused_by_proxy(status)
    hint = ": check the user and the password in the proxy's URL" if status == 407 else ""
    text = f"the proxy refused to connect (HTTP {status}){hint}"
    return BrokenResponse(Kind.UNSENT, text, transient=not is_final, client_wide=is_final)


def _describe(error: Exception, message: str) -> str:
    """Add the cause to the message, without aiohttp's own texts, which may quote the request's URL and headers."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        detail = getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or cause.strerror
        return f"{message}: {detail or type(cause).__name__} ({error.host}:{error.port})"
    return f"{message} ({type(error).__name__})"
