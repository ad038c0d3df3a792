"""`SigningClient.request` and its like: any endpoint of the service, with the guarantees of every call.

The endpoints that have methods are in `signings`, `recipients` and `documents.resource`.
"""

from __future__ import annotations

import json as json_module
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from typing import Any, TypedDict, TypeVar, Unpack, overload
from urllib.parse import unquote, urlencode

import attrs
from multidict import CIMultiDict

from . import _checks
from ._api import Api
from ._secret import hide_fields
from .documents.download import stream as checked_stream
from .documents.source import OpenPdf, PdfSource, form_body
from .errors import DecodeError, InvalidRequest
from .pagination import Pager
from .reconcile import Read, Recognized, Undecidable
from .transport import decode, urls, wire
from .transport.attempt import response_of
from .transport.call import Transport
from .transport.decode import Unreadable
from .transport.operation import Operation, Timeouts
from .transport.response import Response
from .transport.retry import Safety

__all__ = ["AnyEndpoint", "Form", "Reader", "Reconcile", "ResponseStream", "as_timeouts"]

T = TypeVar("T")

Form = Mapping[str, str | PdfSource]
"""The fields of a multipart form."""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
# As text, because compiling them would delay the import.
_TEMPLATE = r"/(?!/)(?:[\w.~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2}|\{[^\W\d]\w*\})*"
_HEADER_NAME = r"[\w!#$%&'*+.^`|~-]+"
_OWN_HEADERS = ("Authorization", "Connection", "Content-Length", "Cookie", "Expect", "Host", "Transfer-Encoding")


class _Address(TypedDict, total=False):
    path: Mapping[str, object]
    params: Mapping[str, object]


class _PageOptions(_Address, total=False):
    cursor: str | None
    limit: int | None
    prefetch: bool


class _RequestOptions(_Address, total=False):
    headers: Mapping[str, str]
    json: Any
    body: bytes | PdfSource | Form | None
    timeout: float | Timeouts | None
    repeat: bool


@attrs.define(eq=False, repr=False, field_transformer=hide_fields)
class ResponseStream:
    """A response whose body is read chunk by chunk: iterate over it once. Names of headers are case-insensitive."""

    status: int
    headers: Mapping[str, str]
    request_id: str | None
    _chunks: AsyncGenerator[bytes, None]

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks

    def __repr__(self) -> str:
        return f"<ResponseStream {self.status}>"


class Reader:
    """Reads the service on behalf of the call that is reconciled: ``await read(path)``, ``read.paginate(path)``."""

    def __init__(self, client: AnyEndpoint, read: Read) -> None:
        self._client = client
        self._read = read

    async def __call__(
        self, template: str, /, *, path: Mapping[str, object] = {}, params: Mapping[str, object] = {}
    ) -> Response:
        """Return the response to a GET. Don't catch its errors, except `NotFound`: they leave the outcome unknown."""
        address = _build_address(template, path, params)
        response: Response = await self._read(
            Operation(f"GET {template}", "GET", address, Safety.READ, decode=lambda response: response)
        )
        return response

    @overload
    def paginate(
        self, template: str, /, *, into: type[T], path: Mapping[str, object] = ..., params: Mapping[str, object] = ...
    ) -> Pager[T]: ...

    @overload
    def paginate(
        self, template: str, /, *, path: Mapping[str, object] = ..., params: Mapping[str, object] = ...
    ) -> Pager[dict[str, Any]]: ...

    def paginate(
        self,
        template: str,
        /,
        *,
        into: type[Any] = dict,
        path: Mapping[str, object] = {},
        params: Mapping[str, object] = {},
    ) -> Pager[Any]:
        """Return a list to iterate over, as `SigningClient.paginate` does."""
        return self._client.paginate(template, into, path=path, params=params).through(self._read)

    def only(self, matches: Iterable[T]) -> T | None:
        """Return the only match, or None. Several matches end the call with `OutcomeUnknown`, which lists them."""
        found = list(matches)
        if len(found) > 1:
            raise Undecidable(f"the service holds {len(found)} such records", found)
        return found[0] if found else None


Reconcile = Callable[[Reader], Awaitable[T | None]]
"""Reads the service and returns the effect of a request, or None if there is none."""


class AnyEndpoint:
    """The methods of `SigningClient` for any endpoint."""

    _api: Api

    @overload
    async def request(
        self,
        method: str,
        template: str,
        /,
        *,
        into: type[T],
        reconcile: Reconcile[T] | None = ...,
        **options: Unpack[_RequestOptions],
    ) -> T: ...

    @overload
    async def request(
        self,
        method: str,
        template: str,
        /,
        *,
        into: None = ...,
        reconcile: Reconcile[Response] | None = ...,
        **options: Unpack[_RequestOptions],
    ) -> Response: ...

    async def request(
        self,
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

        ``path`` fills the placeholders, with ids or records that have an ``id``. The body is ``json``, or ``body``:
        bytes, or a multipart form of strings and `PdfSource`. A `PdfSource` alone is sent as the field
        ``selected_file``. ``params`` and ``headers`` are added to the request; ``timeout`` replaces the client's.

        A GET or HEAD is retried like any read. Any other request is repeated only if nothing was sent, or after a 429:
        if it may have taken effect, `OutcomeUnknown` is raised. ``repeat=True`` says that a repeat is harmless.
        ``reconcile`` makes the request as safe as `signings.send`: an async function that reads the service with the
        `Reader` it gets, and returns the effect of this request (a record of the class ``into`` or, without ``into``,
        the `Response` of ``read``), or None if the service shows none.
        """
        method = _check_method(method)
        operation: Operation[Any] = Operation(
            f"{method} {template}",
            method,
            _build_address(template, path, params),
            _check_safety(method, repeat, reconcile),
            decode=lambda response: response,
            headers=_check_headers(headers),
        )
        form: Form | None = None
        if json is None and method not in wire.READING and isinstance(body, PdfSource | Mapping):
            _require("Content-Type" not in operation.headers, "headers: Content-Type: the client sets that of a form")
            form = {"selected_file": body} if isinstance(body, PdfSource) else body
            _require(form, "body: a form must have a field")
            for field, value in form.items():
                _require(_checks.is_text(field), f"body: names of fields must be non-empty strings, got {field!r}")
                is_valid = isinstance(value, PdfSource) or _checks.is_text(value) or value == ""
                _require(is_valid, f"body: {field}: must be a string or a PdfSource, got {type(value).__name__}")
            operation.transfer = True
        else:
            operation.body = _make_body(method, json, body)
        if into is not None:
            decode.hook_of(into)
        if reconcile is not None:
            operation.effect = Recognized(lambda read: reconcile(Reader(self, read)), _identify)
            if into is not None:
                # A success that cannot be decoded is reconciled too.
                operation.decode = lambda response: response.decoded(into)
        transport = _transport_within(self._api.transport, timeout)
        deadline = transport.deadline(transfer=operation.transfer)
        with ExitStack() as stack:
            if form is not None:
                opened = await _open_files(form, stack, deadline, operation.name)
                operation.body = lambda: form_body(opened, lambda size: None)
            result = await transport.call(operation, deadline)
        return result if into is None or reconcile is not None else result.decode(into)

    @overload
    def paginate(self, template: str, /, into: type[T], **options: Unpack[_PageOptions]) -> Pager[T]: ...

    @overload
    def paginate(self, template: str, /, **options: Unpack[_PageOptions]) -> Pager[dict[str, Any]]: ...

    def paginate(
        self,
        template: str,
        /,
        into: type[Any] = dict,
        *,
        path: Mapping[str, object] = {},
        params: Mapping[str, object] = {},
        cursor: str | None = None,
        limit: int | None = None,
        prefetch: bool = True,
    ) -> Pager[Any]:
        """List the items at any endpoint: as dicts, or decoded to an attrs class or a dataclass; see `Pager`. ::

        async for template in client.paginate("/api/1.0/templates", into=Template):
            print(template.name)
        """
        assumptions = self._api.transport.options.assumptions
        address = _build_address(template, path, params)
        for argument, reserved in (("cursor", assumptions.cursor_param), ("limit", assumptions.limit_param)):
            _require(reserved not in params, f"params: pass {reserved} as the argument {argument}")
        name = f"GET {template}"
        return Pager(self._api.transport, name, address, into, cursor=cursor, limit=limit, prefetch=prefetch)

    @asynccontextmanager
    async def stream(
        self,
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

        The request is retried until the response begins, and not afterwards. ``Timeouts.transfer`` limits the time
        spent waiting for chunks, not the time that the caller spends on them.
        """
        _check_method(method, ("GET",))
        transport, checked = _transport_within(self._api.transport, timeout), _check_headers(headers)

        async def receive(response: wire.Response) -> wire.Response:
            if "html" in response.headers.get("Content-Type", "").lower() and "html" not in checked.get("Accept", ""):
                raise Unreadable("it is an HTML page")
            return response.detach()

        operation: Operation[wire.Response] = Operation(
            f"GET {template}",
            "GET",
            _build_address(template, path, params),
            Safety.READ,
            decode=receive,
            stream=True,
            transfer=True,
            accept="*/*",
            headers=checked,
        )
        response = await transport.call(operation)
        try:
            request_id = response_of(operation, transport.shared, transport.options, response).request_id
            async with aclosing(checked_stream(operation, response, transport, response.chunks())) as chunks:
                yield ResponseStream(response.status, CIMultiDict(response.headers), request_id, chunks)
        finally:
            response.close()


def _transport_within(transport: Transport, timeout: float | Timeouts | None) -> Transport:
    if timeout is None:
        return transport
    return Transport(transport.shared, attrs.evolve(transport.options, timeouts=as_timeouts(timeout)))


def as_timeouts(timeout: float | Timeouts) -> Timeouts:
    """Return the argument ``timeout`` as `Timeouts`: a number limits a call, with or without a file."""
    return timeout if isinstance(timeout, Timeouts) else Timeouts(call=timeout, transfer=timeout)


def _identify(value: Any) -> str | None:
    """Return the id of an effect: a record, parsed JSON, or the record in a response."""
    if isinstance(value, Response):
        with suppress(DecodeError):
            value = value.decode(dict)
    found = value.get("id") if isinstance(value, Mapping) else getattr(value, "id", None)
    return None if found is None else str(found)


# Arguments


def _require(is_valid: object, problem: str) -> None:
    if not is_valid:
        raise InvalidRequest(problem)


def _check_mapping(name: str, value: object) -> None:
    _require(isinstance(value, Mapping), f"{name}: must be a mapping, got {type(value).__name__}")


def _check_safety(method: str, repeat: object, reconcile: object) -> Safety:
    _require(isinstance(repeat, bool), f"repeat: must be true or false, got {repeat!r}")
    is_repeated = repeat or method in wire.READING
    if reconcile is None:
        return Safety.READ if is_repeated else Safety.NEVER
    _require(callable(reconcile), f"reconcile: must be an async function of a Reader, got {reconcile!r}")
    _require(not is_repeated, "reconcile: not for GET, HEAD or repeat=True: these requests are retried without it")
    return Safety.RECONCILED


def _check_method(method: object, allowed: Iterable[str] = _METHODS) -> str:
    _require(str(method).upper() in allowed, f"method: must be one of {', '.join(allowed)}, got {method!r}")
    return str(method).upper()


def _build_address(template: Any, path: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    """Return the path with its placeholders filled, and the query."""
    is_template = isinstance(template, str) and re.fullmatch(_TEMPLATE, template, re.ASCII)
    rule = "begin with one slash and be percent-encoded, without query or fragment (use params=)"
    _require(is_template, f"the path must {rule}, and its placeholders must be names: got {template!r}")
    _check_mapping("path", path)
    names = re.findall(r"\{(\w+)\}", template)
    _require({*names} == {*path}, f"path: must have a value for each of {names} of {template!r}, got {[*path]}")
    values = {name: str(value) if _checks.is_integer(value) else value for name, value in path.items()}
    address = template.format_map({name: urls.segment(f"path: {name}", value) for name, value in values.items()})
    has_dots = any(unquote(segment) in (".", "..") for segment in address.split("/"))
    _require(not has_dots, f"the path must have no segments . and .., got {template!r}")
    query = urlencode(list(_query(params)))
    return f"{address}?{query}" if query else address


def _query(params: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    _check_mapping("params", params)
    for name, given in params.items():
        _require(_checks.is_text(name), f"params: names must be non-empty strings, got {name!r}")
        for value in given if isinstance(given, list | tuple) else [] if given is None else [given]:
            is_valid = isinstance(value, bool) or _checks.is_number(value) or _checks.is_text(value) or value == ""
            rule = "must be a string, a number, true, false, None or a list"
            _require(is_valid, f"params: {name}: {rule}, got {value!r}")
            yield name, str(value).lower() if isinstance(value, bool) else str(value)


def _check_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers. No error shows a value: it may be a secret."""
    _check_mapping("headers", headers)
    for name, value in headers.items():
        is_name = isinstance(name, str) and re.fullmatch(_HEADER_NAME, name, re.ASCII)
        _require(is_name, f"headers: invalid name {name!r}")
        _require(name.title() not in _OWN_HEADERS, f"headers: {name} is set by the client")
        is_valid = isinstance(value, str) and value.isascii() and value.isprintable()
        _require(is_valid, f"headers: {name}: must be a string of printable ASCII characters")
    return CIMultiDict(headers)


def _make_body(method: str, json: Any, body: Any) -> Callable[[], wire.Body] | None:
    """Return a function that makes the body for each attempt; None for GET and HEAD."""
    _require(json is None or body is None, "json, body: pass only one of them")
    if method in wire.READING:
        _require(json is None and body is None, f"json, body: a {method} has no body")
        return None
    if json is not None:
        try:
            content = json_module.dumps(json, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"json: cannot encode as JSON: {error}") from None
        return lambda: wire.bytes_body(content, wire.JSON)
    kind = f"{type(body).__name__}: encode a string, or use json=; wrap a file in a PdfSource"
    _require(
        isinstance(body, bytes | bytearray | memoryview | None),
        f"body: must be bytes, a PdfSource or a form, got {kind}",
    )
    content = bytes(body or b"")
    return lambda: wire.bytes_body(content, "application/octet-stream" if content else None)


async def _open_files(form: Form, stack: ExitStack, deadline: float, name: str) -> dict[str, str | OpenPdf]:
    """Open the files of a form until the stack is closed. Their content is not checked: an endpoint may accept any."""
    opened: dict[str, str | OpenPdf] = {}
    for field, value in form.items():
        if isinstance(value, str):
            opened[field] = value
        else:
            opened[field] = stack.enter_context(await value.open(None, deadline, name))
    return opened
