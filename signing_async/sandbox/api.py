"""The documented endpoints over HTTP."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from .fault_injection import FaultInjector
from .faults import Fault
from .records import Recipient, Signing, User
from .refused import Refused
from .request_body import read_form_or_json, read_json, receive_file
from .request_log import RECORD, RequestRecord
from .responses import API, Encoder, Response
from .state import State


@dataclass(slots=True)
class Call:
    """A request to one operation and the user who makes it."""

    request: web.Request
    operation: str
    record: RequestRecord
    user: User | None = None

    def path(self, name: str) -> str:
        """Return a variable part of the path."""
        return self.request.match_info[name]


Handler = Callable[[Call], Awaitable[Response]]
PageHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """The table of endpoints and their handlers."""

    def __init__(self, state: State, encoder: Encoder) -> None:
        self._state = state
        self._service = state.service
        self._profile = state.profile
        self._encoder = encoder
        self._injector = FaultInjector(state.faults, encoder, state.closing)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        signing, documents = f"{API}/signings/{{signing_id}}", f"{API}/signings/{{signing_id}}/documents"
        table: list[tuple[str, str, str, Handler]] = [
            ("GET", f"{API}/me", "me", self._me),
            ("POST", f"{API}/signings", "signings.create", self._create),
            ("GET", f"{API}/signings", "signings.list", self._list),
            ("GET", signing, "signings.get", self._get),
            ("POST", f"{signing}/send", "signings.send", self._send),
            ("POST", documents, "documents.upload", self._upload),
            ("GET", f"{documents}/{{document_id}}/download-signed", "documents.download_signed", self._download),
            ("POST", f"{signing}/recipients", "recipients.add", self._add_recipient),
            ("GET", f"{signing}/recipients", "recipients.list", self._list_recipients),
            ("POST", f"{signing}/recipients/{{recipient_id}}/remind", "recipients.remind", self._remind),
            ("POST", "/api/oauth/token", "oauth.token", self._token),
            # The sandbox's own: the specification shows neither.
            ("POST", f"{signing}/cancel", "signings.cancel", self._cancel),
            ("DELETE", signing, "signings.delete", self._delete),
        ]
        return [
            web.route(
                method,
                path,
                partial(self.serve, operation, handler),
                **({"allow_head": False} if method == "GET" else {}),
            )
            for method, path, operation, handler in table
        ]

    async def serve(self, operation: str, handler: Handler, request: web.Request) -> web.StreamResponse:
        """Respond to one request, applying the arranged faults."""
        record = request[RECORD]
        fault, early = await self._injector.before(operation, request)
        response: Response | web.StreamResponse
        response = early or await self._respond(Call(request, operation, record), handler, fault)
        if fault and not early:
            response = await self._injector.after(fault, request, response)
        return self._encoder.to_web(response, record.id) if isinstance(response, Response) else response

    async def serve_page(self, operation: str, handler: PageHandler, request: web.Request) -> web.StreamResponse:
        """Respond to one request for a page that is an operation. Only faults before its effect apply."""
        _, early = await self._injector.before(operation, request)
        return self._encoder.to_web(early, request[RECORD].id) if early else await handler(request)

    async def _respond(self, call: Call, handler: Handler, fault: Fault | None) -> Response:
        token_endpoint = call.operation == "oauth.token"
        accounts = self._state.accounts
        try:
            self._check_rate()
            if not token_endpoint:
                if fault and fault.kind == "expired-token":
                    raise accounts.token_rejected()
                call.user = accounts.authenticate(call.request.headers.get("Authorization"))
            return await handler(call)
        except Refused as refused:
            return self._encoder.error(refused, call.record.id, token_endpoint=token_endpoint)

    def _check_rate(self) -> None:
        limit = self._state.rate_limit
        wait = limit.admit() if limit else None
        if limit and wait is not None:
            seconds = max(1, math.ceil(wait)) if limit.retry_after is None else limit.retry_after
            raise Refused(429, "too_many_requests", "Too many requests.", headers={"Retry-After": f"{seconds:g}"})

    # the operations

    async def _me(self, call: Call) -> Response:
        return self._encoder.record(200, self._encoder.user(_user(call)), call.record.id)

    async def _create(self, call: Call) -> Response:
        signing = self._service.create_signing(_user(call), await read_json(call.request))
        return self._signing(self._profile.created_status, signing, call)

    async def _get(self, call: Call) -> Response:
        return self._signing(200, self._service.signing(call.path("signing_id"), call.user), call)

    async def _send(self, call: Call) -> Response:
        return self._signing(
            self._profile.send_status, self._state.invitations.send(call.path("signing_id"), call.user), call
        )

    async def _cancel(self, call: Call) -> Response:
        signing = self._service.signing(call.path("signing_id"), call.user)
        return self._signing(200, self._service.cancel(signing.id), call)

    async def _delete(self, call: Call) -> Response:
        self._service.delete(call.path("signing_id"), _user(call))
        return Response(204, b"", {})

    def _signing(self, status: int, signing: Signing, call: Call) -> Response:
        shown = self._encoder.signing(signing, self._service.documents(signing.id))
        return self._encoder.record(status, shown, call.record.id)

    async def _list(self, call: Call) -> Response:
        profile, query = self._profile, call.request.query
        if profile.pagination == "bare":
            page, limit = self._service.list_signings(_user(call), None, 1_000_000), profile.page_size
        else:
            limit = self._encoder.parse_limit(query.get(profile.limit_param))
            after = self._cursor(call, lambda signing_id: self._service.signing(signing_id, call.user))
            page = self._service.list_signings(_user(call), after, limit)
        shown = [
            self._encoder.signing(s, self._service.documents(s.id) if profile.documents_in_list else None)
            for s in page.items
        ]
        return self._page(call, *self._encoder.page(page.next_seq, shown, _url(call.request), limit))

    def _cursor(self, call: Call, find: Callable[[str], Signing | Recipient]) -> int | None:
        """Return the sequence number after which the page starts, or None for the first page."""
        text = call.request.query.get(self._profile.cursor_param)
        if text is None:
            return None
        if self._profile.pagination != "has_more":
            return self._encoder.parse_cursor(text)
        try:
            return find(text).seq
        except Refused:
            raise self._encoder.bad_cursor() from None

    async def _upload(self, call: Call) -> Response:
        signing_id, user = call.path("signing_id"), _user(call)
        self._service.editable(signing_id, user)
        self._service.check_document_limit(signing_id)
        with self._service.incoming() as incoming:
            filename = await receive_file(call.request, incoming)
            document = await self._service.add_document(signing_id, user, filename, incoming)
        return self._encoder.record(self._profile.created_status, self._encoder.document(document), call.record.id)

    async def _download(self, call: Call) -> Response:
        signing_id, document_id = call.path("signing_id"), call.path("document_id")
        self._service.signing(signing_id, call.user)
        path = self._service.signed_path(signing_id, document_id)
        disposition = f'attachment; filename="{document_id}.pdf"'
        return Response(200, path, {"Content-Type": "application/pdf", "Content-Disposition": disposition})

    async def _add_recipient(self, call: Call) -> Response:
        signing_id, user = call.path("signing_id"), _user(call)
        self._service.signing(signing_id, user)
        recipient = self._service.add_recipient(signing_id, user, await read_json(call.request))
        return self._encoder.record(self._profile.created_status, self._encoder.recipient(recipient), call.record.id)

    async def _list_recipients(self, call: Call) -> Response:
        signing = self._service.signing(call.path("signing_id"), call.user)
        recipients = self._service.recipients(signing.id)
        style, profile, query = self._profile.recipients_list, self._profile, call.request.query
        shown = [self._encoder.recipient(recipient) for recipient in recipients]
        if style == "bare":
            return self._page(call, shown, "")
        if style == "envelope" or profile.pagination == "bare":
            return self._page(call, {profile.items_field: shown}, "")
        limit = self._encoder.parse_limit(query.get(profile.limit_param))
        after = self._cursor(call, lambda recipient_id: self._service.recipient(recipient_id, signing.id)) or 0
        rest = [(r.seq, row) for r, row in zip(recipients, shown, strict=True) if r.seq > after]
        next_seq = rest[limit - 1][0] if len(rest) > limit else None
        page = [row for _, row in rest[:limit]]
        return self._page(call, *self._encoder.page(next_seq, page, _url(call.request), limit))

    def _page(self, call: Call, body: Any, link: str) -> Response:
        response = self._encoder.json(200, body, call.record.id)
        if link:
            response.headers["Link"] = link
        return response

    async def _remind(self, call: Call) -> Response:
        recipient = self._state.invitations.remind(call.path("signing_id"), call.path("recipient_id"), call.user)
        shown = self._encoder.recipient(recipient)
        return self._encoder.record(self._profile.remind_status, shown, call.record.id)

    async def _token(self, call: Call) -> Response:
        token = self._state.accounts.token(await read_form_or_json(call.request))
        response = self._encoder.json(200, token, call.record.id)
        response.headers |= {"Cache-Control": "no-store", "Pragma": "no-cache"}
        return response


def _user(call: Call) -> User:
    assert call.user is not None
    return call.user


def _url(request: web.Request) -> str:
    return f"{request.scheme}://{request.host}{request.path}"
