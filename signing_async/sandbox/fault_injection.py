"""Faults applied to requests: error responses, closed connections, delays, truncated or invalid bodies."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import time

from aiohttp import web

from .faults import Fault, Faults
from .refused import Refused
from .request_body import chunks_of
from .request_log import RECORD, RequestRecord
from .responses import Encoder, Response

HTML_502 = (
    b"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body><h1>502 Bad Gateway</h1></body>\r\n</html>\r\n"
)
NO_RESPONSE = 0


class FaultInjector:
    """Applies the arranged faults before and after a request takes effect."""

    def __init__(self, faults: Faults, encoder: Encoder, closing: asyncio.Event) -> None:
        self._faults = faults
        self._encoder = encoder
        self._closing = closing

    async def before(self, operation: str, request: web.Request) -> tuple[Fault | None, Response | None]:
        """Return the fault for this request, and the response if the request must not take effect."""
        record = request[RECORD]
        record.operation = operation
        fault = self._faults.take(operation)
        if fault is None:
            return None, None
        record.fault = fault.kind
        return fault, await self._respond_early(fault, request, record)

    async def after(self, fault: Fault, request: web.Request, response: Response) -> Response | web.StreamResponse:
        """Return the response with the fault applied; the request has taken effect."""
        kind, record = fault.kind, request[RECORD]
        if kind == "500-after-commit":
            return self._server_error(record)
        if kind == "502-html-after-commit":
            return _bad_gateway()
        if kind == "drop-after-commit":
            return _hang_up(request)
        if kind in {"truncate", "truncate-after-commit"}:
            return await _truncate(request, response)
        if kind == "empty":
            return Response(response.status, b"", {"Content-Type": "application/json"})
        if kind == "not-json":
            return Response(response.status, b"Done; everything went well {", {"Content-Type": "application/json"})
        return response

    async def _respond_early(self, fault: Fault, request: web.Request, record: RequestRecord) -> Response | None:
        kind = fault.kind
        if kind == "429":
            return self._error(Refused(429, "too_many_requests", "Too many requests.", headers=_headers(fault)), record)
        if kind == "503":
            return self._error(Refused(503, "unavailable", "Unavailable.", headers=_headers(fault)), record)
        if kind == "500":
            return self._server_error(record)
        if kind == "502-html":
            return _bad_gateway()
        if kind in {"drop-before-commit", "hang"}:
            async for _ in chunks_of(request):
                pass
            if kind == "hang":
                await self._until_disconnected(request)
            return _hang_up(request)
        if kind == "slow":
            await self._pause(float(fault.details.get("seconds", 1.0)))
        return None

    def _server_error(self, record: RequestRecord) -> Response:
        return self._error(Refused(500, "server_error", "Something went wrong."), record)

    def _error(self, refused: Refused, record: RequestRecord) -> Response:
        return self._encoder.error(refused, record.id)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _until_disconnected(self, request: web.Request) -> None:
        while request.transport is not None and not request.transport.is_closing() and not self._closing.is_set():
            await self._pause(0.02)


async def _truncate(request: web.Request, response: Response) -> web.StreamResponse:
    body = response.body if isinstance(response.body, bytes) else await asyncio.to_thread(response.body.read_bytes)
    truncated = web.StreamResponse(status=response.status, headers=response.headers)
    truncated.content_length = len(body)
    with contextlib.suppress(ConnectionError):  # the client may have disconnected
        await truncated.prepare(request)
        await truncated.write(body[: len(body) // 2])
    _close(request, flush=True)
    return truncated


def _hang_up(request: web.Request) -> Response:
    _close(request, flush=False)
    return Response(NO_RESPONSE)


def _close(request: web.Request, *, flush: bool) -> None:
    """Close the connection unless the client did."""
    if (transport := request.transport) is not None:
        (transport.close if flush else transport.abort)()


def _bad_gateway() -> Response:
    return Response(502, HTML_502, {"Content-Type": "text/html"})


def _headers(fault: Fault) -> dict[str, str]:
    value = fault.details.get("retry_after", 1 if fault.kind == "429" else None)
    if value is None:
        return {}
    if fault.details.get("http_date"):
        return {"Retry-After": email.utils.formatdate(time.time() + float(value), usegmt=True)}
    return {"Retry-After": value if isinstance(value, str) else f"{value:g}"}
