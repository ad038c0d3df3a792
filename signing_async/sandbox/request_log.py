"""The log of requests and responses, without secrets."""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime

from aiohttp import web

from .clock import Clock
from .redaction import redact_body, redact_form, redact_headers
from .request_body import BODY

CONTROL_API = "/sandbox/api"
BODIES = 200
"""How many of the newest requests are kept with their bodies."""

LONGEST_BODY = 64 * 1024
"""How many bytes of a body are kept."""

logger: logging.Logger = logging.getLogger("signing_async.sandbox")


@dataclass(slots=True)
class RequestRecord:
    """One request and its response. Headers, query and bodies are without secrets."""

    id: str
    operation: str | None
    method: str
    path: str
    received_at: datetime
    headers: dict[str, str]
    query: str = ""
    status: int | None = None
    fault: str | None = None
    seconds: float | None = None
    response_headers: dict[str, str] = field(default_factory=dict)
    _request_body: bytes | None = field(default=None, repr=False)
    _response_body: bytes | None = field(default=None, repr=False)

    @property
    def request_body(self) -> str | None:
        """The body as text; None if it was not read, or is no longer kept."""
        return None if self._request_body is None else redact_body(self._request_body, of_request=True)

    @property
    def response_body(self) -> str | None:
        """The body as text; None if there was no response, or the body is no longer kept."""
        return None if self._response_body is None else redact_body(self._response_body)


RECORD: web.RequestKey[RequestRecord] = web.RequestKey("record", RequestRecord)
"""The key of a request's record."""


class RequestLog:
    """The newest requests, oldest first."""

    def __init__(self, clock: Clock, seed: int | str | None, keep: int) -> None:
        self._clock = clock
        self._random = random.Random(seed)  # request ids are not secret
        self.records: deque[RequestRecord] = deque(maxlen=keep)

    def find(self, request_id: str) -> RequestRecord | None:
        """Return the record of that id, or None if it is no longer kept."""
        return next((record for record in self.records if record.id == request_id), None)

    def begin(self, request: web.Request) -> None:
        """Record a request, unless it refreshes an open page: such requests would crowd out all others."""
        request[RECORD] = RequestRecord(
            f"req_{self._random.getrandbits(96):024x}",
            None,
            request.method,
            request.path,
            self._clock.now(),
            redact_headers(request.headers),
            redact_form(request.rel_url.raw_query_string) if request.query_string else "",
        )
        if "X-Refresh" not in request.headers or is_api_path(request.path):
            self.records.append(request[RECORD])
            if len(self.records) > BODIES:
                old = self.records[-BODIES - 1]
                old._request_body = old._response_body = None

    def end(self, request: web.Request, response: web.StreamResponse | None, seconds: float) -> None:
        """Record the response, or that there was none, and log the request."""
        record = request[RECORD]
        record.seconds = seconds
        if response is not None and response.status:
            record.status = response.status
            record.response_headers = redact_headers(response.headers)
        if is_api_path(request.path):
            record._request_body = _shorten(request.get(BODY))
            record._response_body = _shorten(_body_of(response))
        if "X-Refresh" not in request.headers or is_api_path(request.path):
            path = request.rel_url.raw_path.encode("ascii", "backslashreplace").decode()
            fault = f" (fault: {record.fault})" if record.fault else ""
            status = record.status or "no response"
            logger.info("%s %s %s %.0f ms%s", record.method, path, status, seconds * 1000, fault)


def is_api_path(path: str) -> bool:
    """Return whether the path belongs to the service's API or the control API, and not to a page."""
    return path == "/api" or path.startswith(("/api/", f"{CONTROL_API}/")) or path == "/openapi.json"


def _body_of(response: web.StreamResponse | None) -> bytes | None:
    if not isinstance(response, web.Response):
        return None if response is None else b"[a part of the body]"
    if response.content_type == "application/pdf":
        return b"[a file of application/pdf]"
    return response.body if isinstance(response.body, bytes) else None


def _shorten(body: bytes | None) -> bytes | None:
    if body is None or len(body) <= LONGEST_BODY:
        return body
    return body[:LONGEST_BODY] + b" [and %d bytes more]" % (len(body) - LONGEST_BODY)
