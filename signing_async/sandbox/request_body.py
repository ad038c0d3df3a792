"""Reading request bodies: bounded, checked, and refused with a reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from .files import Incoming
from .multipart import MalformedMultipart, Multipart, PartHeaders, boundary_of
from .refused import Refused, invalid

MAX_BODY = 1024 * 1024
"""The largest JSON or form body."""

FILE_FIELD = "selected_file"


async def chunks_of(request: web.Request) -> AsyncIterator[bytes]:
    """The body as it arrives; a 400 when it breaks off or cannot be decompressed."""
    try:
        async for chunk in request.content.iter_any():
            yield chunk
    except (web.RequestPayloadError, ConnectionError):
        raise Refused(400, "incomplete_body", "The body broke off, or is not encoded as it says.") from None


async def read_body(request: web.Request, limit: int = MAX_BODY) -> bytes:
    """The whole body, if it is no longer than the limit."""
    body = bytearray()
    async for chunk in chunks_of(request):
        body += chunk
        if len(body) > limit:
            raise Refused(413, "body_too_large", f"The body has more than {limit} bytes.")
    return bytes(body)


async def read_json(request: web.Request) -> dict[str, Any]:
    """A JSON object."""
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refused(415, "unsupported_media_type", "The body must be application/json.")
    return parse_json(await read_body(request))


def parse_json(body: bytes) -> dict[str, Any]:
    """The object in a JSON text; anything else is a 400."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is text that nothing can store
    except (ValueError, RecursionError):
        raise Refused(400, "malformed_json", "The body is not JSON in UTF-8.") from None
    if not isinstance(value, dict):
        raise Refused(400, "malformed_json", "The body must be a JSON object.")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def read_form(request: web.Request) -> dict[str, str]:
    """The fields of a form."""
    if request.content_type != "application/x-www-form-urlencoded":
        raise Refused(415, "unsupported_media_type", "The body must be application/x-www-form-urlencoded.")
    body = await read_body(request)
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100, errors="strict"))
    except ValueError:
        raise Refused(400, "malformed_form", "The body is not a form in UTF-8.") from None


async def read_form_or_json(request: web.Request) -> dict[str, Any]:
    """The parameters of a token request, which may be written in either way."""
    if request.content_type == "application/json":
        return await read_json(request)
    return dict(await read_form(request))


async def receive_file(request: web.Request, incoming: Incoming) -> str:
    """Stream the one part named `selected_file` to disk; its file name. Stops reading when it is too large."""
    boundary = boundary_of(request.headers.get("Content-Type", ""))
    if boundary is None:
        raise Refused(415, "unsupported_media_type", "The body must be multipart/form-data with a boundary.")
    try:
        filename = await _receive(chunks_of(request), Multipart(boundary), incoming.write, incoming)
    except MalformedMultipart as error:
        raise Refused(400, "malformed_multipart", f"The body is not multipart/form-data: {error}.") from None
    if filename is None:
        raise invalid({FILE_FIELD: [f"The {FILE_FIELD} is required, as a file."]})
    return filename


async def _receive(
    chunks: AsyncIterator[bytes],
    multipart: Multipart,
    write: Callable[[bytes], Awaitable[None]],
    incoming: Incoming,
) -> str | None:
    filename: str | None = None
    wanted = False
    ignored = 0
    async for chunk in chunks:
        for found in multipart.feed(chunk):
            if isinstance(found, PartHeaders):
                wanted = found.name == FILE_FIELD
                if wanted and filename is not None:
                    raise invalid({FILE_FIELD: [f"There must be one {FILE_FIELD}."]})
                if wanted:
                    filename = found.filename
            elif wanted and filename is not None:
                await write(found)
            else:
                ignored += len(found)
        if incoming.too_large:
            return filename
        if ignored > MAX_BODY:
            raise Refused(413, "body_too_large", f"The parts beside the file have more than {MAX_BODY} bytes.")
    if not multipart.finished:
        raise MalformedMultipart("it ends before its last boundary")
    return filename
