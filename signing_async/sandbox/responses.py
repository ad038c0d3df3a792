"""Responses in the profile's shapes: records, pages, errors, timestamps, cursors."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from .clock import to_datetime
from .profile import Profile
from .records import Document, Recipient, Signing, User
from .refused import Refused, invalid

API = "/api/1.0"
CONTROL_API = "/sandbox/api"
JSON = "application/json; charset=utf-8"
PROBLEM = "application/problem+json"


@dataclass(slots=True)
class Response:
    """A status, headers, and a body in memory or in a file."""

    status: int
    body: bytes | Path = b""
    headers: dict[str, str] = field(default_factory=dict)


def is_api_path(path: str) -> bool:
    """Return whether the path belongs to the service's API or the control API, and not to a page."""
    return path == "/api" or path.startswith(("/api/", f"{CONTROL_API}/")) or path == "/openapi.json"


def control_error(refused: Refused) -> Response:
    """Return an error of the control API, which has the same shape in every profile."""
    value = {"code": refused.code, "message": refused.message, "errors": refused.errors}
    return Response(refused.status, json.dumps(value).encode(), {"Content-Type": JSON, **refused.headers})


class Encoder:
    """Encodes records and responses as the profile says."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def time(self, micros: int | None) -> str | int | None:
        """Return a time in the profile's format."""
        if micros is None:
            return None
        style = self._profile.timestamps
        if style == "epoch_seconds":
            return micros // 1_000_000
        if style == "epoch_millis":
            return micros // 1000
        zone = timezone(timedelta(hours=1)) if style == "iso_offset" else UTC
        precision = "microseconds" if style == "iso_micros" else "seconds"
        return to_datetime(micros).astimezone(zone).isoformat(timespec=precision).replace("+00:00", "Z")

    def signing(self, signing: Signing, documents: Sequence[Document] | None) -> dict[str, Any]:
        """Return a signing, with its documents if they are given."""
        shown: dict[str, Any] = {
            "id": signing.id,
            "name": signing.name,
            "language": signing.language,
            "signing_order": signing.signing_order,
            "message": signing.message,
            "is_draft": signing.is_draft,
            "is_completed": signing.is_completed,
            "cancelled_at": self.time(signing.cancelled_at),
            "created_at": self.time(signing.created_at),
            "updated_at": self.time(signing.updated_at),
        }
        if documents is not None:
            shown["documents"] = [self.document(document) for document in documents]
        return shown

    def document(self, document: Document) -> dict[str, Any]:
        """Return a document; `signed_file_path` is absent until the document is sealed."""
        shown: dict[str, Any] = {
            "id": document.id,
            "name": document.name,
            "size": document.size,
            "completed_at": self.time(document.completed_at),
        }
        if document.sealed_file is not None:
            path = f"{API}/signings/{document.signing_id}/documents/{document.id}/download-signed"
            shown["signed_file_path"] = path
        return shown

    def recipient(self, recipient: Recipient) -> dict[str, Any]:
        """Return a recipient, with the profile's field names."""
        shown: dict[str, Any] = {
            "id": recipient.id,
            "first_name": recipient.first_name,
            "last_name": recipient.last_name,
            "email": recipient.email,
            "signing_method": recipient.signing_method,
            "order": recipient.order,
            self._profile.recipient_completed_field: self.time(recipient.completed_at),
            "declined_at": self.time(recipient.declined_at),
        }
        if recipient.phone is not None:
            shown[self._profile.phone_field] = recipient.phone
        if recipient.identification is not None:
            shown[self._profile.identification_field] = recipient.identification
        return shown

    def user(self, user: User) -> dict[str, Any]:
        """Return a user."""
        return {"id": user.id, "name": user.name, "email": user.email, "tenant": user.tenant}

    # responses

    def record(self, status: int, record: Mapping[str, Any], request_id: str) -> Response:
        """Return a response with one record, or without a body if the status is 204."""
        if status == 204:
            return Response(204)
        wrapper = self._profile.record_field
        return self.json(status, {wrapper: record} if wrapper else dict(record), request_id)

    def json(self, status: int, value: Any, request_id: str) -> Response:
        """Return a response with any value; the profile says whether an object carries the request id."""
        if self._profile.request_id in {"both", "body"} and isinstance(value, dict):
            value = {**value, "request_id": request_id}
        return Response(status, json.dumps(value, ensure_ascii=False).encode(), {"Content-Type": JSON})

    def error(self, refused: Refused, request_id: str, *, token_endpoint: bool = False) -> Response:
        """Return an error response."""
        kind = JSON
        value: dict[str, Any]
        details = [(name, text) for name, texts in refused.errors.items() for text in texts]
        if token_endpoint and self._profile.token_error_shape == "oauth":
            value = {"error": refused.code, "error_description": refused.message}
        elif self._profile.error_shape == "nested":
            value = {"error": {"code": refused.code, "message": refused.message}}
            if details:
                value["error"]["details"] = [{"field": name, "message": text} for name, text in details]
        elif self._profile.error_shape == "rfc9457":
            kind = PROBLEM
            value = {"type": "about:blank", "title": refused.code.replace("_", " ").capitalize()}
            value |= {"status": refused.status, "detail": refused.message, "code": refused.code}
            if details:
                value["errors"] = [{"pointer": f"#/{name}", "detail": text} for name, text in details]
        elif self._profile.error_shape == "list":
            rows = [{"code": refused.code, "message": text, "field": name} for name, text in details]
            value = {"errors": rows or [{"code": refused.code, "message": refused.message}]}
        else:
            value = {"code": refused.code, "message": refused.message}
            if refused.errors:
                value["errors"] = refused.errors
        response = self.json(refused.status, value, request_id)
        response.headers |= {"Content-Type": kind, **refused.headers}
        return response

    def to_web(self, response: Response, request_id: str) -> web.StreamResponse:
        """Return the response for aiohttp; the profile says whether a header carries the request id."""
        headers = response.headers
        if self._profile.request_id in {"both", "header"}:
            headers = headers | {self._profile.request_id_header: request_id}
        if isinstance(response.body, Path):
            return web.FileResponse(response.body, status=response.status, headers=headers)
        return web.Response(body=response.body, status=response.status, headers=headers)

    # lists

    def page(self, next_seq: int | None, shown: Sequence[Mapping[str, Any]], url: str, limit: int) -> tuple[Any, str]:
        """Return a page's body and its Link header (or "")."""
        profile = self._profile
        cursor = None if next_seq is None else self.cursor(next_seq)
        next_url = None
        if cursor is not None:
            next_url = f"{url}?{urlencode({profile.cursor_param: cursor, profile.limit_param: limit})}"
        envelope: dict[str, Any] = {profile.items_field: shown}
        if profile.pagination == "meta_cursor":
            return envelope | {"meta": {"next_cursor": cursor, "per_page": limit}}, ""
        if profile.pagination == "top_cursor":
            return envelope | {"next_cursor": cursor}, ""
        if profile.pagination == "next_url":
            return envelope | {"links": {"next": next_url}}, ""
        if profile.pagination == "has_more":
            return envelope | {"has_more": cursor is not None}, ""
        return shown, f'<{next_url}>; rel="next"' if next_url else ""

    @staticmethod
    def cursor(seq: int) -> str:
        """Return the cursor for the records after sequence number `seq`."""
        return base64.urlsafe_b64encode(b"s%d" % seq).decode().rstrip("=")

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
        profile = self._profile
        name = profile.limit_param
        if text is None:
            return profile.page_size
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            raise invalid({name: [f"The {name} must be an integer of at least 1."]})
        if int(text) > profile.max_page_size and profile.over_page_size == "refuse":
            raise invalid({name: [f"The {name} must be at most {profile.max_page_size}."]})
        return min(int(text), profile.max_page_size)
