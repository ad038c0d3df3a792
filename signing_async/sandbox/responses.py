"""Responses in the profile's shapes: records, lists and errors. The middleware of all requests."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, timedelta, timezone
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from .clock import to_datetime
from .profile import Profile
from .records import Document, Recipient, Signing
from .refused import Refused, invalid, not_found
from .request_log import CONTROL_API, RECORD, RequestLog, logger

API = "/api/1.0"
JSON = "application/json; charset=utf-8"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Encoder:
    """Encodes records and responses as the profile says."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def time(self, micros: int | None) -> str | int | None:
        """Return a time in the profile's format."""
        style = self._profile.timestamps
        if micros is None:
            return None
        if style.startswith("epoch"):
            return micros // (1_000_000 if style == "epoch_seconds" else 1000)
        zone = timezone(timedelta(hours=1)) if style == "iso_offset" else UTC
        precision = "microseconds" if style == "iso_micros" else "seconds"
        return to_datetime(micros).astimezone(zone).isoformat(timespec=precision).replace("+00:00", "Z")

    def signing(self, signing: Signing, documents: Sequence[Document] | None) -> dict[str, Any]:
        """Return a signing, with its documents if they are given."""
        names = ("id", "name", "language", "signing_order", "message", "is_draft", "is_completed")
        times = ("cancelled_at", "created_at", "updated_at")
        shown = {name: getattr(signing, name) for name in names}
        shown |= {name: self.time(getattr(signing, name)) for name in times}
        if documents is not None:
            shown["documents"] = [self.document(document) for document in documents]
        return shown

    def document(self, document: Document) -> dict[str, Any]:
        """Return a document; `signed_file_path` is absent until the document is sealed."""
        shown: dict[str, Any] = {name: getattr(document, name) for name in ("id", "name", "size")}
        shown["completed_at"] = self.time(document.completed_at)
        if document.sealed_file is not None:
            path = f"{API}/signings/{document.signing_id}/documents/{document.id}/download-signed"
            shown["signed_file_path"] = path
        return shown

    def recipient(self, recipient: Recipient) -> dict[str, Any]:
        """Return a recipient, with the profile's field names."""
        names = ("id", "first_name", "last_name", "email", "signing_method", "order")
        shown = {name: getattr(recipient, name) for name in names}
        shown[self._profile.recipient_completed_field] = self.time(recipient.completed_at)
        shown["declined_at"] = self.time(recipient.declined_at)
        if recipient.phone is not None:
            shown[self._profile.phone_field] = recipient.phone
        if recipient.identification is not None:
            shown[self._profile.identification_field] = recipient.identification
        return shown

    # responses

    def record(self, request: web.Request, status: int, record: Mapping[str, Any]) -> web.Response:
        """Return a response with one record, or without a body if the status is 204."""
        if status == 204:
            return self.respond(request, status, b"")
        wrapper = self._profile.record_field
        return self.json(request, status, {wrapper: record} if wrapper else record)

    def json(self, request: web.Request, status: int, value: Any, headers: Mapping[str, str] = {}) -> web.Response:
        """Return a response with any value; the profile says whether an object carries the request id."""
        if self._profile.request_id in {"both", "body"} and isinstance(value, Mapping):
            value = {**value, "request_id": request[RECORD].id}
        body = json.dumps(value, ensure_ascii=False).encode()
        return self.respond(request, status, body, {"Content-Type": JSON, **headers})

    def respond(self, request: web.Request, status: int, body: bytes, headers: Mapping[str, str] = {}) -> web.Response:
        """Return a response; the profile says whether a header carries the request id."""
        if self._profile.request_id in {"both", "header"}:
            headers = {**headers, self._profile.request_id_header: request[RECORD].id}
        return web.Response(body=body, status=status, headers=headers)

    def error(self, request: web.Request, refused: Refused) -> web.Response:
        value: dict[str, Any] = {"code": refused.code, "message": refused.message}
        details = [(name, text) for name, texts in refused.errors.items() for text in texts]
        headers = {"Content-Type": JSON, **refused.headers}
        if request.path.startswith(f"{CONTROL_API}/"):
            body = json.dumps(value | {"errors": refused.errors}).encode()
            return self.respond(request, refused.status, body, headers)
        shape = self._profile.error_shape
        if request.path == "/api/oauth/token" and self._profile.token_error_shape == "oauth":
            value = {"error": refused.code, "error_description": refused.message}
        elif shape == "nested":
            if details:
                value["details"] = [{"field": name, "message": text} for name, text in details]
            value = {"error": value}
        elif shape == "rfc9457":
            headers["Content-Type"] = "application/problem+json"
            value = {"type": "about:blank", "title": refused.code.replace("_", " ").capitalize()}
            value |= {"status": refused.status, "detail": refused.message, "code": refused.code}
            if details:
                value["errors"] = [{"pointer": f"#/{name}", "detail": text} for name, text in details]
        elif shape == "list":
            rows = [{"code": refused.code, "message": text, "field": name} for name, text in details]
            value = {"errors": rows or [value]}
        elif details:
            value["errors"] = refused.errors
        return self.json(request, refused.status, value, headers)

    # lists

    def page(
        self, request: web.Request, next_seq: int | None, shown: Sequence[Mapping[str, Any]], limit: int
    ) -> web.Response:
        """Return a response with one page of a list, and the cursor of the next page unless `next_seq` is None."""
        profile = self._profile
        body: Any = {profile.items_field: shown}
        headers: dict[str, str] = {}
        cursor = next_url = None
        if next_seq is not None:
            cursor = base64.urlsafe_b64encode(b"s%d" % next_seq).decode().rstrip("=")
            query = urlencode({profile.cursor_param: cursor, profile.limit_param: limit})
            next_url = f"{request.scheme}://{request.host}{request.path}?{query}"
        if profile.pagination == "meta_cursor":
            body["meta"] = {"next_cursor": cursor, "per_page": limit}
        elif profile.pagination == "top_cursor":
            body["next_cursor"] = cursor
        elif profile.pagination == "next_url":
            body["links"] = {"next": next_url}
        elif profile.pagination == "has_more":
            body["has_more"] = cursor is not None
        else:
            body = shown
            headers = {"Link": f'<{next_url}>; rel="next"'} if next_url else {}
        return self.json(request, 200, body, headers)

    def parse_cursor(self, text: str) -> int:
        """Return the sequence number in a cursor; refuse an invalid cursor."""
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except ValueError:
            raw = b""
        if not re.fullmatch(rb"s[1-9]\d{0,17}", raw):
            raise self.bad_cursor()
        return int(raw[1:])

    def bad_cursor(self) -> Refused:
        """Return the refusal of a cursor that this list did not return."""
        name = self._profile.cursor_param
        return invalid({name: [f"The {name} is not a cursor of this list."]})

    def parse_limit(self, text: str | None) -> int:
        """Return the requested page size, within the profile's bounds."""
        profile, name = self._profile, self._profile.limit_param
        if text is None:
            return profile.page_size
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            raise invalid({name: [f"The {name} must be an integer of at least 1."]})
        if int(text) > profile.max_page_size and profile.over_page_size == "refuse":
            raise invalid({name: [f"The {name} must be at most {profile.max_page_size}."]})
        return min(int(text), profile.max_page_size)


class Middleware:
    """Logs every request, and turns exceptions into error responses of the profile or of the control API."""

    def __init__(self, log: RequestLog, encoder: Encoder) -> None:
        self._log = log
        self._encoder = encoder

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Log the request and its response."""
        self._log.begin(request)
        started = time.perf_counter()
        response: web.StreamResponse | None = None
        try:
            response = await self._respond(request, handler)
        except web.HTTPException as redirect:
            response = redirect
            raise
        finally:
            self._log.end(request, response, time.perf_counter() - started)
        return response

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
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
        return self._encoder.error(request, problem)


def method_not_allowed(method: str, error: web.HTTPMethodNotAllowed) -> Refused:
    """Return a 405 that names the allowed methods."""
    allowed = ", ".join(sorted(error.allowed_methods))
    message = f"{method} is not allowed here; use {allowed}."
    return Refused(405, "method_not_allowed", message, headers={"Allow": allowed})
