"""The documented endpoints over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from .faults import FaultInjector
from .records import Recipient, Signing, User
from .refused import Refused
from .request_body import read_form, read_json, receive_file
from .request_log import RECORD
from .responses import API, Encoder, Handler

if TYPE_CHECKING:
    from .state import State

USER: web.RequestKey[User] = web.RequestKey("user", User)
"""The key of the user who makes a request."""


class Api:
    """The table of endpoints and their handlers."""

    def __init__(self, state: State, encoder: Encoder) -> None:
        self._state = state
        self._service = state.service
        self._profile = state.profile
        self._encoder = encoder
        self._injector = FaultInjector(encoder, state.closing)

    def routes(self) -> list[web.RouteDef]:
        signing, documents = f"{API}/signings/{{signing_id}}", f"{API}/signings/{{signing_id}}/documents"
        table: list[tuple[str, str, str, Callable[[web.Request], Awaitable[web.Response]]]] = [
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
            web.RouteDef(
                method, path, partial(self.serve, operation, handler), {"allow_head": False} if method == "GET" else {}
            )
            for method, path, operation, handler in table
        ]

    async def serve(self, operation: str, handler: Handler, request: web.Request) -> web.StreamResponse:
        """Respond to one request, applying the arranged faults. A page gets only those before its effect."""
        record = request[RECORD]
        record.operation = operation
        fault = self._state.faults.take(operation)
        record.fault = fault.kind if fault else None
        if fault and (early := await self._injector.before(fault, request)):
            return early
        if operation == "oauth.authorize":
            return await handler(request)
        try:
            if limit := self._state.rate_limit:
                limit.check()
            if fault and fault.kind == "expired-token":
                raise self._state.accounts.token_rejected()
            if operation != "oauth.token":
                request[USER] = self._state.accounts.authenticate(request.headers.get("Authorization"))
            response = await handler(request)
        except Refused as refused:
            response = self._encoder.error(request, refused)
        return await self._injector.after(fault, request, response) if fault else response

    # the operations

    async def _me(self, request: web.Request) -> web.Response:
        user = request[USER]
        shown = {"id": user.id, "name": user.name, "email": user.email, "tenant": user.tenant}
        return self._encoder.record(request, 200, shown)

    async def _create(self, request: web.Request) -> web.Response:
        signing = self._service.create_signing(request[USER], await read_json(request))
        return self._show(request, self._profile.created_status, signing)

    async def _get(self, request: web.Request) -> web.Response:
        return self._show(request, 200, self._signing(request))

    async def _send(self, request: web.Request) -> web.Response:
        signing = self._state.invitations.send(request.match_info["signing_id"], request[USER])
        return self._show(request, self._profile.send_status, signing)

    async def _cancel(self, request: web.Request) -> web.Response:
        return self._show(request, 200, self._service.cancel(self._signing(request).id))

    async def _delete(self, request: web.Request) -> web.Response:
        self._service.delete(request.match_info["signing_id"], request[USER])
        return self._encoder.record(request, 204, {})

    def _signing(self, request: web.Request) -> Signing:
        return self._service.signing(request.match_info["signing_id"], request[USER])

    def _show(self, request: web.Request, status: int, signing: Signing) -> web.Response:
        shown = self._encoder.signing(signing, self._service.documents(signing.id))
        return self._encoder.record(request, status, shown)

    async def _list(self, request: web.Request) -> web.Response:
        profile, user = self._profile, request[USER]
        limit, after = profile.page_size, None
        if profile.pagination != "bare":
            limit = self._encoder.parse_limit(request.query.get(profile.limit_param))
            after = self._cursor(request, lambda signing_id: self._service.signing(signing_id, user))
        most = 1_000_000 if profile.pagination == "bare" else limit
        signings, next_seq = self._service.list_signings(user, after, most)
        shown = [
            self._encoder.signing(signing, self._service.documents(signing.id) if profile.documents_in_list else None)
            for signing in signings
        ]
        return self._encoder.page(request, next_seq, shown, limit)

    def _cursor(self, request: web.Request, find: Callable[[str], Signing | Recipient]) -> int | None:
        """Return the sequence number after which the page starts, or None for the first page."""
        text = request.query.get(self._profile.cursor_param)
        if text is None:
            return None
        if self._profile.pagination != "has_more":
            return self._encoder.parse_cursor(text)
        try:
            return find(text).seq
        except Refused:
            raise self._encoder.bad_cursor() from None

    async def _upload(self, request: web.Request) -> web.Response:
        signing_id, user = request.match_info["signing_id"], request[USER]
        self._service.check_document_limit(self._service.editable(signing_id, user))
        with self._service.incoming() as incoming:
            filename = await receive_file(request, incoming)
            document = await self._service.add_document(signing_id, user, filename, incoming)
        return self._encoder.record(request, self._profile.created_status, self._encoder.document(document))

    async def _download(self, request: web.Request) -> web.Response:
        document_id = request.match_info["document_id"]
        path = self._service.signed_path(self._signing(request).id, document_id)
        disposition = f'attachment; filename="{document_id}.pdf"'
        headers = {"Content-Type": "application/pdf", "Content-Disposition": disposition}
        return self._encoder.respond(request, 200, await asyncio.to_thread(path.read_bytes), headers)

    async def _add_recipient(self, request: web.Request) -> web.Response:
        signing = self._signing(request)
        recipient = self._service.add_recipient(signing.id, request[USER], await read_json(request))
        return self._encoder.record(request, self._profile.created_status, self._encoder.recipient(recipient))

    async def _list_recipients(self, request: web.Request) -> web.Response:
        signing = self._signing(request)
        recipients = self._service.recipients(signing.id)
        profile = self._profile
        if profile.recipients_list != "paged" or profile.pagination == "bare":
            shown = [self._encoder.recipient(recipient) for recipient in recipients]
            is_bare = profile.recipients_list == "bare"
            return self._encoder.json(request, 200, shown if is_bare else {profile.items_field: shown})
        limit = self._encoder.parse_limit(request.query.get(profile.limit_param))
        after = self._cursor(request, lambda recipient_id: self._service.recipient(recipient_id, signing.id)) or 0
        rest = [recipient for recipient in recipients if recipient.seq > after]
        next_seq = rest[limit - 1].seq if len(rest) > limit else None
        shown = [self._encoder.recipient(recipient) for recipient in rest[:limit]]
        return self._encoder.page(request, next_seq, shown, limit)

    async def _remind(self, request: web.Request) -> web.Response:
        ids = request.match_info
        recipient = self._state.invitations.remind(ids["signing_id"], ids["recipient_id"], request[USER])
        return self._encoder.record(request, self._profile.remind_status, self._encoder.recipient(recipient))

    async def _token(self, request: web.Request) -> web.Response:
        is_json = request.content_type == "application/json"
        token = self._state.accounts.token(await read_json(request) if is_json else await read_form(request))
        return self._encoder.json(request, 200, token, {"Cache-Control": "no-store", "Pragma": "no-cache"})
