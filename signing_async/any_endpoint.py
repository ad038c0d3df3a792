"""Requests to any endpoint of the service, also one without a method here, with the guarantees of every call.

The functions `request`, `paginate` and `stream` are methods of `SigningClient`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from multidict import CIMultiDict

from .documents.download import stream as checked_stream
from .documents.form import form_body
from .documents.source import PdfSource
from .errors import DecodeError, InvalidRequest
from .pagination import Pager
from .reconcile import Read, Recognized, Undecidable
from .request_arguments import (
    Form,
    build_address,
    check_form,
    check_headers,
    check_method,
    choose_repeat,
    make_body,
    open_files,
)
from .transport import custom_records, wire
from .transport.call import Operation, Timeouts, Transport
from .transport.decode import Unreadable
from .transport.response import Response
from .transport.retry import Repeat

if TYPE_CHECKING:
    from .client import SigningClient

__all__ = ["Reader", "Reconcile", "ResponseStream", "paginate", "request", "stream"]

T = TypeVar("T")


class ResponseStream:
    """A response whose body is read chunk by chunk: iterate over it once."""

    def __init__(
        self, status: int, headers: Mapping[str, str], request_id: str | None, chunks: AsyncGenerator[bytes, None]
    ) -> None:
        self.status: int = status
        self.headers: Mapping[str, str] = CIMultiDict(headers)
        """The headers. Their names are case-insensitive."""
        self.request_id: str | None = request_id
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks

    def __repr__(self) -> str:
        return f"<ResponseStream {self.status}>"


class Reader:
    """Reads the service on behalf of the call that is reconciled: ``await read(path)``, ``read.paginate(path)``."""

    def __init__(self, transport: Transport, read: Read) -> None:
        self._transport = transport
        self._read = read

    async def __call__(
        self, template: str, /, *, path: Mapping[str, object] = {}, params: Mapping[str, object] = {}
    ) -> Response:
        """Return the response to a GET. Don't catch its errors, except `NotFound`: they leave the outcome unknown."""
        operation = Operation(
            f"GET {template}", "GET", build_address(template, path, params), Repeat.READ, respond=_whole_response
        )
        response: Response = await self._read(operation)
        return response

    def paginate(
        self,
        template: str,
        /,
        *,
        into: type[T],
        path: Mapping[str, object] = {},
        params: Mapping[str, object] = {},
    ) -> Pager[T]:
        """Return a list to iterate over, as `SigningClient.paginate` does."""
        return _pager(self._transport, template, into, path, params).through(self._read)

    def only(self, matches: Iterable[T]) -> T | None:
        """Return the only match, or None. Several matches end the call with `OutcomeUnknown`, which lists them."""
        found = list(matches)
        if len(found) > 1:
            raise Undecidable(f"the service holds {len(found)} such records", found)
        return found[0] if found else None


Reconcile = Callable[[Reader], Awaitable[T | None]]
"""Reads the service, and returns the effect of a request; None if there is none."""


@overload
async def request(
    client: SigningClient,
    method: str,
    template: str,
    /,
    *,
    path: Mapping[str, object] = {},
    params: Mapping[str, object] = {},
    headers: Mapping[str, str] = {},
    json: Any = None,
    body: bytes | PdfSource | Form | None = None,
    timeout: float | Timeouts | None = None,
    repeat: bool = False,
    into: type[T],
    reconcile: Reconcile[T] | None = None,
) -> T: ...


@overload
async def request(
    client: SigningClient,
    method: str,
    template: str,
    /,
    *,
    path: Mapping[str, object] = {},
    params: Mapping[str, object] = {},
    headers: Mapping[str, str] = {},
    json: Any = None,
    body: bytes | PdfSource | Form | None = None,
    timeout: float | Timeouts | None = None,
    repeat: bool = False,
    into: None = None,
    reconcile: Reconcile[Response] | None = None,
) -> Response: ...


async def request(
    client: SigningClient,
    method: str,
    template: str,
    /,
    *,
    path: Mapping[str, object] = {},
    params: Mapping[str, object] = {},
    headers: Mapping[str, str] = {},
    json: Any = None,
    body: bytes | PdfSource | Form | None = None,
    timeout: float | Timeouts | None = None,
    repeat: bool = False,
    into: type[Any] | None = None,
    reconcile: Reconcile[Any] | None = None,
) -> Any:
    """Send a request to any endpoint; return its `Response`, or the record that ``into`` decodes it to. ::

        response = await client.request(
            "POST", "/api/1.0/signings/{id}/cancel", path={"id": signing}, json={"reason": "sold"}
        )

    ``path`` fills the placeholders, with ids or records that have an ``id``. The body is ``json``, or ``body``: bytes,
    or a multipart form of strings and `PdfSource`. A `PdfSource` alone is sent as the field ``selected_file``.
    ``params`` and ``headers`` are added to the request; ``timeout`` replaces the client's.

    Errors, deadline, token and rate limiter are as for every call. A GET or HEAD is retried like any read. Any other
    request is repeated only if nothing was sent, or after a 429: if it may have taken effect, `OutcomeUnknown` is
    raised. ``repeat=True`` says that a repeat is harmless.

    ``reconcile`` makes the request as safe as `signings.send`: an async function that reads the service with the
    `Reader` it gets, and returns the effect of this request, or None if the service shows none. After an ambiguous
    attempt the function is called until the effect appears, and the call returns the function's result: a record of the
    class ``into`` or, without ``into``, the `Response` of ``read``.
    """
    method = check_method(method)
    name = f"{method} {template}"
    transport = _transport(client, timeout)
    operation: Operation[Any] = Operation(
        name,
        method,
        build_address(template, path, params),
        choose_repeat(method, repeat, reconcile),
        respond=_whole_response,
        headers=check_headers(headers),
    )
    make = make_body(method, json, body)
    form = check_form(body, operation.headers)
    if into is not None:
        await custom_records.prepare()
        custom_records.hook_of(into)
    if reconcile is not None:
        operation.effect = _effect(transport, name, reconcile)
        if into is not None:
            # A success that cannot be decoded is reconciled too.
            operation.respond = lambda response: response.decoded(into)
    with ExitStack() as stack:
        operation.transfer = form is not None
        deadline = transport.deadline(transfer=operation.transfer)
        operation.body = make
        if form is not None:
            opened = await open_files(form, stack, deadline, name)
            operation.body = lambda: form_body(opened, lambda size: None)
        result = await transport.call(operation, deadline)
    return result if into is None or reconcile is not None else result.decode(into)


def paginate(
    client: SigningClient,
    template: str,
    /,
    into: type[T],
    *,
    path: Mapping[str, object] = {},
    params: Mapping[str, object] = {},
    cursor: str | None = None,
    limit: int | None = None,
    prefetch: bool = True,
) -> Pager[T]:
    """List the items at any endpoint, decoded to an attrs class, a dataclass, or dict; see `Pager`. ::

    async for template in client.paginate("/api/1.0/templates", into=Template):
        print(template.name)
    """
    return _pager(client._transport, template, into, path, params, cursor, limit, prefetch=prefetch)


@asynccontextmanager
async def stream(
    client: SigningClient,
    method: str,
    template: str,
    /,
    *,
    path: Mapping[str, object] = {},
    params: Mapping[str, object] = {},
    headers: Mapping[str, str] = {},
    timeout: float | Timeouts | None = None,
) -> AsyncIterator[ResponseStream]:
    """Stream the large response of any endpoint. ::

        async with client.stream("GET", "/api/1.0/exports/{id}", path={"id": export_id}) as response:
            async for chunk in response:
                await bucket.write(chunk)

    The request is retried until the response begins, and not afterwards. ``Timeouts.transfer`` limits the time spent
    waiting for chunks, not the time that the caller spends on them.
    """
    if check_method(method) != "GET":
        raise InvalidRequest(f"method: only a GET can be streamed, got {method!r}")
    transport, name, checked = _transport(client, timeout), f"GET {template}", check_headers(headers)

    async def receive(response: wire.Response) -> wire.Response:
        if "html" in response.headers.get("Content-Type", "").lower() and "html" not in checked.get("Accept", ""):
            raise Unreadable("it is an HTML page")
        return response.detach()

    operation = Operation(
        name,
        "GET",
        build_address(template, path, params),
        Repeat.READ,
        receive=receive,
        transfer=True,
        accept="*/*",
        headers=checked,
    )
    response = await transport.call(operation)
    try:
        request_id = transport.shared.request_id(response.headers, None, transport.options.assumptions)
        async with aclosing(checked_stream(operation, response, transport, response.chunks())) as chunks:
            yield ResponseStream(response.status, response.headers, request_id, chunks)
    finally:
        response.close()


def _transport(client: SigningClient, timeout: float | Timeouts | None) -> Transport:
    return (client if timeout is None else client.with_options(timeout=timeout))._transport


def _pager(
    transport: Transport,
    template: str,
    into: type[T],
    path: Mapping[str, object],
    params: Mapping[str, object],
    cursor: str | None = None,
    limit: int | None = None,
    *,
    prefetch: bool = True,
) -> Pager[T]:
    assumptions = transport.options.assumptions
    address = build_address(template, path, params)
    for argument, reserved in (("cursor", assumptions.cursor_param), ("limit", assumptions.limit_param)):
        if reserved in params:
            raise InvalidRequest(f"params: pass {reserved} as the argument {argument}")
    return Pager(transport, f"GET {template}", address, into, cursor=cursor, limit=limit, prefetch=prefetch)


def _effect(transport: Transport, name: str, reconcile: Reconcile[T]) -> Recognized[T]:
    """Return an `Effect` that calls the caller's function ``reconcile``."""
    reading = f"{name}, reconciled"

    async def recognize(read: Read) -> T | None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await reconcile(Reader(transport, read))
        transport.shared.response_times.note(reading, loop.time() - began)
        return found

    return Recognized(reading, recognize, _identify)


def _identify(value: Any) -> str | None:
    """Return the id of an effect: a record, parsed JSON, or the record in a response."""
    if isinstance(value, Response):
        try:
            value = value.decode(dict)
        except DecodeError:
            return None
    found = value.get("id") if isinstance(value, Mapping) else getattr(value, "id", None)
    return None if found is None else str(found)


def _whole_response(response: Response) -> Response:
    return response
