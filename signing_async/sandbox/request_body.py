"""Reads request bodies: bounded and validated; an invalid body is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from .files import Incoming
from .refused import Refused, invalid

MAX_BODY = 1024 * 1024
"""The largest JSON or form body, in bytes."""

FORM = "application/x-www-form-urlencoded"
FILE_FIELD = "selected_file"

BODY: web.RequestKey[bytes] = web.RequestKey("body", bytes)
"""The key of a request's body once it was read; for an upload, a description of the file."""


async def chunks_of(request: web.Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; refuse with 400 if it breaks off or cannot be decompressed."""
    try:
        async for chunk in request.content.iter_any():
            yield chunk
    except (web.RequestPayloadError, ConnectionError):
        raise _incomplete() from None


async def _read(request: web.Request) -> bytes:
    """Return the whole body; refuse a body longer than `MAX_BODY` with 413."""
    body = bytearray()
    async for chunk in chunks_of(request):
        body += chunk
        if len(body) > MAX_BODY:
            raise Refused(413, "body_too_large", f"The body has more than {MAX_BODY} bytes.")
    request[BODY] = bytes(body)
    return request[BODY]


async def read_json(request: web.Request) -> dict[str, Any]:
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refused(415, "unsupported_media_type", "The body must be application/json.")
    body = await _read(request)
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be stored
    except (ValueError, RecursionError):
        raise Refused(400, "malformed_json", "The body is not JSON in UTF-8.") from None
    if not isinstance(value, dict):
        raise Refused(400, "malformed_json", "The body must be a JSON object.")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def read_form(request: web.Request) -> dict[str, str]:
    if request.content_type != FORM:
        raise Refused(415, "unsupported_media_type", f"The body must be {FORM}.")
    body = await _read(request)
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100, errors="strict"))
    except ValueError:
        raise Refused(400, "malformed_form", "The body is not a form in UTF-8.") from None


async def receive_file(request: web.Request, incoming: Incoming) -> str:
    """Stream the part named `selected_file` to disk and return its file name. Stop reading if the file is too large."""
    try:
        if request.content_type != "multipart/form-data":
            raise ValueError("another content type")
        reader = await request.multipart()
    except ValueError:
        message = "The body must be multipart/form-data with a boundary."
        raise Refused(415, "unsupported_media_type", message) from None
    try:
        filename = await _receive(reader, incoming)
    except (web.RequestPayloadError, ConnectionError):
        raise _incomplete() from None
    except (ValueError, RuntimeError, RuntimeWarning, HttpProcessingError) as error:  # RuntimeWarning under `-W error`
        problem = str(error).splitlines()[-1].strip()[:200]
        message = f"The body is not valid multipart/form-data: {problem}."
        raise Refused(400, "malformed_multipart", message) from None
    if filename is None:
        raise invalid({FILE_FIELD: [f"The {FILE_FIELD} is required and must be a file."]})
    request[BODY] = f"[multipart/form-data: {FILE_FIELD} {filename!r}, {incoming.size} bytes]".encode()
    return filename


async def _receive(reader: MultipartReader, incoming: Incoming) -> str | None:
    filename: str | None = None
    while (part := await reader.next()) is not None:
        if not isinstance(part, BodyPartReader):
            raise HttpProcessingError(message="a part is multipart itself")
        if part.name != FILE_FIELD or part.filename is None:
            await part.release()
            continue
        if filename is not None:
            raise invalid({FILE_FIELD: [f"There must be only one {FILE_FIELD}."]})
        filename = part.filename
        for escaped, character in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):  # as browsers escape file names
            filename = filename.replace(escaped, character)
        while chunk := await part.read_chunk(64 * 1024):
            await incoming.write(chunk)
            if incoming.too_large:
                return filename
    return filename


def _incomplete() -> Refused:
    return Refused(400, "incomplete_body", "The body broke off, or is not encoded as its headers say.")
