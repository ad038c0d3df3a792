"""Middleware for every request: the request log and error responses."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from .refused import Refused, not_found
from .request_log import RequestLog, RequestRecord, logger
from .responses import CONTROL_API, Encoder, control_error

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Middleware:
    """Logs requests and turns exceptions into responses."""

    def __init__(self, log: RequestLog, encoder: Encoder) -> None:
        self._log = log
        self._encoder = encoder

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Log the request. An exception becomes an error response of the profile or of the control API."""
        record = self._log.begin(request)
        started = time.perf_counter()
        response: web.StreamResponse | None = None
        try:
            response = await self._respond(request, handler, record)
        except web.HTTPException as redirect:
            response = redirect
            raise
        finally:
            self._log.end(request, response, time.perf_counter() - started)
        return response

    async def _respond(self, request: web.Request, handler: Handler, record: RequestRecord) -> web.StreamResponse:
        try:
            _check_url(request)
            return await handler(request)
        except Refused as refused:
            problem = refused
        except web.HTTPMethodNotAllowed as error:
            problem = method_not_allowed(request.method, error)
        except web.HTTPNotFound:
            problem = not_found("path")
        except web.HTTPException:
            raise
        except Exception:
            logger.exception("internal error of the sandbox at %s %s", request.method, request.rel_url.raw_path)
            problem = Refused(500, "server_error", "Internal error of the sandbox; its log has the traceback.")
        in_control = request.path.startswith(f"{CONTROL_API}/")
        response = control_error(problem) if in_control else self._encoder.error(problem, record.id)
        return self._encoder.to_web(response, record.id)


def method_not_allowed(method: str, error: web.HTTPMethodNotAllowed) -> Refused:
    """Return a 405 that names the allowed methods."""
    allowed = ", ".join(sorted(error.allowed_methods))
    message = f"{method} is not allowed here; use {allowed}."
    return Refused(405, "method_not_allowed", message, headers={"Allow": allowed})


def _check_url(request: web.Request) -> None:
    try:
        for text in (request.path, request.query_string):
            text.encode()
    except UnicodeEncodeError:
        raise Refused(400, "malformed_address", "The URL is not in UTF-8.") from None
