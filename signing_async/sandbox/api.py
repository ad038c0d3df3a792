"""The documented endpoints over HTTP: requests in, answers out, faults and the request log in between."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from .accounts import Accounts
from .responses import API, Answer, Answers
from .clock import Clock
from .faults import Fault, Faults
from .profile import Profile
from .request_body import chunks_of, read_form_or_json, read_json, receive_file
from .records import Signing, User
from .refused import Refused, not_found
from .service import Service

HTML_502 = (
    b"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body><h1>502 Bad Gateway</h1></body>\r\n</html>\r\n"
)
SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-signature"})
NO_ANSWER = 0

logger: logging.Logger = logging.getLogger("signing_async.sandbox")


@dataclass(slots=True)
class RequestRecord:
    """One request as the log keeps it. Headers are without secrets, the query without codes and states."""

    id: str
    operation: str | None
    method: str
    path: str
    received_at: datetime
    headers: dict[str, str]
    status: int | None = None
    fault: str | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Call:
    """A request to one operation, with who makes it."""

    request: web.Request
    operation: str
    record: RequestRecord
    user: User | None = None

    def path(self, name: str) -> str:
        """A variable part of the path."""
        return self.request.match_info[name]


@dataclass
class RateLimit:
    """So many requests a second, and so many at once."""

    rate: float
    burst: int
    retry_after: float | None
    clock: Clock
    _tokens: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._at = float(self.burst), self.clock.seconds()

    def admit(self) -> float | None:
        """None when the request may pass, else the seconds until one may."""
        now = self.clock.seconds()
        passed = max(0.0, now - self._at)  # a restored snapshot puts the clock back
        self._tokens = min(float(self.burst), self._tokens + passed * self.rate)
        self._at = now
        if self._tokens >= 1:
            self._tokens -= 1
            return None
        return (1 - self._tokens) / self.rate


Handler = Callable[[Call], Awaitable[Answer]]
PageHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RECORD: ContextVar[RequestRecord] = ContextVar("record of the request that is being answered")


class Api:
    """The endpoint table, served."""

    def __init__(
        self,
        service: Service,
        accounts: Accounts,
        profile: Profile,
        faults: Faults,
        clock: Clock,
        closing: asyncio.Event,
        *,
        seed: int | str | None,
        keep_requests: int,
    ) -> None:
        self._service = service
        self._accounts = accounts
        self._profile = profile
        self._faults = faults
        self._clock = clock
        self._closing = closing
        self._answers = Answers(profile)
        self._random = random.Random(seed)  # request ids are no secrets
        self.log: deque[RequestRecord] = deque(maxlen=keep_requests)
        self.rate_limit: RateLimit | None = None

    def routes(self) -> list[web.RouteDef]:
        """The endpoint table."""
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

    # one request

    async def serve(self, operation: str, handler: Handler, request: web.Request) -> web.StreamResponse:
        """Answer one request to an operation, with the faults that strike it."""
        record, fault, before = await self._strike(operation, request)
        answer = before or await self._answer(Call(request, operation, record), handler, fault)
        if fault and not before:
            return await self._after(fault, request, record, answer)
        return self._respond(record, answer)

    async def serve_page(self, operation: str, handler: PageHandler, request: web.Request) -> web.StreamResponse:
        """Answer one request for a page that is an operation: the faults that come before the work strike it."""
        record, _, before = await self._strike(operation, request)
        return self._respond(record, before) if before else await handler(request)

    async def _strike(self, operation: str, request: web.Request) -> tuple[RequestRecord, Fault | None, Answer | None]:
        """The request's record, the fault that strikes it, and the answer if that fault leaves no work to do."""
        record = _RECORD.get()
        record.operation = operation
        fault = self._faults.take(operation)
        if fault is None:
            return record, None, None
        record.fault = fault.kind
        return record, fault, await self._before(fault, request, record)

    def _record(self, request: web.Request) -> RequestRecord:
        headers = {name: _without_secrets(name.lower(), value) for name, value in request.headers.items()}
        request_id = f"req_{self._random.getrandbits(96):024x}"
        record = RequestRecord(request_id, None, request.method, request.path, self._clock.now(), headers)
        self.log.append(record)
        return record

    async def _answer(self, call: Call, handler: Handler, fault: Fault | None) -> Answer:
        token_endpoint = call.operation == "oauth.token"
        try:
            self._check_rate()
            if not token_endpoint:
                if fault and fault.kind == "expired-token":
                    raise self._accounts.token_rejected()
                call.user = self._accounts.authenticate(call.request.headers.get("Authorization"))
            return await handler(call)
        except Refused as refused:
            return self._answers.error(refused, call.record.id, token_endpoint=token_endpoint)

    def error(self, refused: Refused, record: RequestRecord) -> Answer:
        """An error in the profile's shape."""
        return self._answers.error(refused, record.id)

    def _check_rate(self) -> None:
        wait = self.rate_limit.admit() if self.rate_limit else None
        if self.rate_limit and wait is not None:
            fixed = self.rate_limit.retry_after
            seconds = max(1, math.ceil(wait)) if fixed is None else fixed
            raise Refused(429, "too_many_requests", "Too many requests.", headers={"Retry-After": f"{seconds:g}"})

    def _respond(self, record: RequestRecord, answer: Answer) -> web.StreamResponse:
        headers = answer.headers
        if self._profile.request_id in {"both", "header"}:
            headers = headers | {self._profile.request_id_header: record.id}
        if isinstance(answer.body, Path):
            return web.FileResponse(answer.body, status=answer.status, headers=headers)
        return web.Response(body=answer.body, status=answer.status, headers=headers)

    # faults

    async def _before(self, fault: Fault, request: web.Request, record: RequestRecord) -> Answer | None:
        kind = fault.kind
        if kind in {"429", "503"}:
            code, message = (
                ("too_many_requests", "Too many requests.") if kind == "429" else ("unavailable", "Unavailable.")
            )
            return self.error(Refused(int(kind), code, message, headers=_retry_after(fault)), record)
        if kind == "500":
            return self._server_error(record)
        if kind == "502-html":
            return _bad_gateway()
        if kind in {"drop-before-commit", "hang"}:
            await _drain(request)
            if kind == "hang":
                await self._until_gone(request)
            return _hang_up(request)
        if kind == "slow":
            await self._pause(float(fault.details.get("seconds", 1.0)))
        return None

    async def _after(
        self, fault: Fault, request: web.Request, record: RequestRecord, answer: Answer
    ) -> web.StreamResponse:
        kind = fault.kind
        if kind == "500-after-commit":
            answer = self._server_error(record)
        elif kind == "502-html-after-commit":
            answer = _bad_gateway()
        elif kind == "drop-after-commit":
            answer = _hang_up(request)
        elif kind in {"truncate", "truncate-after-commit"}:
            return await self._truncated(request, record, answer)
        elif kind == "empty":
            answer = Answer(answer.status, b"", {"Content-Type": "application/json"})
        elif kind == "not-json":
            answer = Answer(answer.status, b"Done; everything went well {", {"Content-Type": "application/json"})
        return self._respond(record, answer)

    def _server_error(self, record: RequestRecord) -> Answer:
        return self.error(Refused(500, "server_error", "Something went wrong."), record)

    async def _truncated(self, request: web.Request, record: RequestRecord, answer: Answer) -> web.StreamResponse:
        body = answer.body if isinstance(answer.body, bytes) else await asyncio.to_thread(answer.body.read_bytes)
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = len(body)
        with contextlib.suppress(ConnectionError):  # the client may have gone already
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
        _cut_off(request, flush=True)
        return response

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return

    async def _until_gone(self, request: web.Request) -> None:
        while request.transport is not None and not request.transport.is_closing() and not self._closing.is_set():
            await self._pause(0.02)

    # the operations

    async def _me(self, call: Call) -> Answer:
        return self._answers.record(200, self._answers.user(_user(call)), call.record.id)

    async def _create(self, call: Call) -> Answer:
        signing = self._service.create_signing(_user(call), await read_json(call.request))
        return self._signing(self._profile.created_status, signing, call)

    async def _get(self, call: Call) -> Answer:
        return self._signing(200, self._service.signing(call.path("signing_id"), call.user), call)

    async def _send(self, call: Call) -> Answer:
        return self._signing(self._profile.send_status, self._service.send(call.path("signing_id"), call.user), call)

    def _signing(self, status: int, signing: Signing, call: Call) -> Answer:
        shown = self._answers.signing(signing, self._service.documents(signing.id))
        return self._answers.record(status, shown, call.record.id)

    async def _list(self, call: Call) -> Answer:
        profile, query = self._profile, call.request.query
        if profile.pagination == "bare":
            page, limit = self._service.list_signings(_user(call), None, 1_000_000), profile.page_size
        else:
            limit = self._answers.parse_limit(query.get(profile.limit_param))
            after = self._cursor(query.get(profile.cursor_param), _user(call))
            page = self._service.list_signings(_user(call), after, limit)
        shown = [
            self._answers.signing(s, self._service.documents(s.id) if profile.documents_in_list else None)
            for s in page.items
        ]
        return self._page(call, *self._answers.page(page.next_seq, shown, _url(call.request), limit))

    def _cursor(self, text: str | None, user: User) -> int | None:
        if text is None:
            return None
        if self._profile.pagination != "has_more":
            return self._answers.parse_cursor(text)
        try:
            return self._service.signing(text, user).seq
        except Refused:
            raise self._answers.bad_cursor() from None

    async def _upload(self, call: Call) -> Answer:
        signing_id, user = call.path("signing_id"), _user(call)
        self._service.editable(signing_id, user)
        self._service.room_for_document(signing_id)
        with self._service.incoming() as incoming:
            filename = await receive_file(call.request, incoming)
            document = await self._service.add_document(signing_id, user, filename, incoming)
        return self._answers.record(self._profile.created_status, self._answers.document(document), call.record.id)

    async def _download(self, call: Call) -> Answer:
        signing_id, document_id = call.path("signing_id"), call.path("document_id")
        self._service.signing(signing_id, call.user)
        path = self._service.signed_path(signing_id, document_id)
        disposition = f'attachment; filename="{document_id}.pdf"'
        return Answer(200, path, {"Content-Type": "application/pdf", "Content-Disposition": disposition})

    async def _add_recipient(self, call: Call) -> Answer:
        signing_id, user = call.path("signing_id"), _user(call)
        self._service.signing(signing_id, user)
        recipient = self._service.add_recipient(signing_id, user, await read_json(call.request))
        return self._answers.record(self._profile.created_status, self._answers.recipient(recipient), call.record.id)

    async def _list_recipients(self, call: Call) -> Answer:
        signing = self._service.signing(call.path("signing_id"), call.user)
        everybody = self._service.recipients(signing.id)
        style, profile, query = self._profile.recipients_list, self._profile, call.request.query
        shown = [self._answers.recipient(recipient) for recipient in everybody]
        if style == "bare":
            return self._page(call, shown, "")
        if style == "envelope" or profile.pagination == "bare":
            return self._page(call, {profile.items_field: shown}, "")
        limit = self._answers.parse_limit(query.get(profile.limit_param))
        after = self._recipient_cursor(query.get(profile.cursor_param), signing.id)
        rest = [(r.seq, row) for r, row in zip(everybody, shown, strict=True) if r.seq > after]
        next_seq = rest[limit - 1][0] if len(rest) > limit else None
        page = [row for _, row in rest[:limit]]
        return self._page(call, *self._answers.page(next_seq, page, _url(call.request), limit))

    def _recipient_cursor(self, text: str | None, signing_id: str) -> int:
        if text is None:
            return 0
        if self._profile.pagination != "has_more":
            return self._answers.parse_cursor(text)
        try:
            return self._service.recipient(text, signing_id).seq
        except Refused:
            raise self._answers.bad_cursor() from None

    def _page(self, call: Call, body: Any, link: str) -> Answer:
        answer = self._answers.json(200, body, call.record.id)
        if link:
            answer.headers["Link"] = link
        return answer

    async def _remind(self, call: Call) -> Answer:
        recipient = self._service.remind(call.path("signing_id"), call.path("recipient_id"), call.user)
        shown = self._answers.recipient(recipient)
        return self._answers.record(self._profile.remind_status, shown, call.record.id)

    async def _token(self, call: Call) -> Answer:
        answer = self._accounts.token(await read_form_or_json(call.request))
        reply = self._answers.json(200, answer, call.record.id)
        reply.headers |= {"Cache-Control": "no-store", "Pragma": "no-cache"}
        return reply

    # what no route takes

    @web.middleware
    async def logged(self, request: web.Request, handler: PageHandler) -> web.StreamResponse:
        """Log every request; unknown paths, wrong methods and undecodable addresses are errors like all others."""
        record = self._record(request)
        _RECORD.set(record)
        started = time.perf_counter()
        try:
            response = await self._checked(request, handler, record)
        except web.HTTPException as redirect:
            record.status = redirect.status
            raise
        finally:
            record.seconds = time.perf_counter() - started
        record.status = response.status or None
        return response

    async def _checked(self, request: web.Request, handler: PageHandler, record: RequestRecord) -> web.StreamResponse:
        try:
            _check_text(request.path, request.query_string)
            return await handler(request)
        except Refused as refused:
            problem = refused
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.method} is not allowed here; {allowed} is."
            problem = Refused(405, "method_not_allowed", message, headers={"Allow": allowed})
        except web.HTTPNotFound:
            problem = not_found("path")
        except web.HTTPException:
            raise
        except Exception:
            logger.exception("the sandbox itself failed at %s %s", request.method, request.path)
            problem = Refused(500, "server_error", "The sandbox itself failed; its log says why.")
        return self._respond(record, self.error(problem, record))


def _user(call: Call) -> User:
    assert call.user is not None
    return call.user


def _without_secrets(header: str, value: str) -> str:
    if header in SECRET_HEADERS:
        return "[redacted]"
    return value.partition("?")[0] if header == "referer" else value  # a consent page's address holds the state


def _url(request: web.Request) -> str:
    return f"{request.scheme}://{request.host}{request.path}"


def _check_text(*texts: str) -> None:
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise Refused(400, "malformed_address", "The address is not in UTF-8.") from None


async def _drain(request: web.Request) -> None:
    async for _ in chunks_of(request):
        pass


def _hang_up(request: web.Request) -> Answer:
    _cut_off(request, flush=False)
    return Answer(NO_ANSWER)


def _cut_off(request: web.Request, *, flush: bool) -> None:
    """Close the connection, if the client has not done so already."""
    if (transport := request.transport) is not None:
        (transport.close if flush else transport.abort)()


def _bad_gateway() -> Answer:
    return Answer(502, HTML_502, {"Content-Type": "text/html"})


def _retry_after(fault: Fault) -> dict[str, str]:
    value = fault.details.get("retry_after", 1 if fault.kind == "429" else None)
    if value is None:
        return {}
    if fault.details.get("http_date"):
        return {"Retry-After": email.utils.formatdate(time.time() + float(value), usegmt=True)}
    return {"Retry-After": value if isinstance(value, str) else f"{value:g}"}
