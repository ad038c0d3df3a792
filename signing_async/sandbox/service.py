"""The rules of the service: signings, documents, recipients, and what people do with them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from .accounts import Accounts
from .authority import Level
from .clock import Clock, to_datetime
from .database import Database
from .files import Files, Incoming
from .ids import Ids
from .profile import Profile
from .records import Document, Notification, Recipient, Signing, User
from .refused import Refused, invalid, not_found

LANGUAGES = ("EN", "SV")
ORDERS = ("sequential", "parallel")
MAX_MESSAGE = 400
MAX_ORDER = 2**31 - 1
DAY = 86_400_000_000
NOT_BLANK = r"[^ \t\r\n]"
_WORD = r"[^\s\x00-\x20\x7f.@()<>\[\]:;,\\\"]+"
_LABEL = r"[^\s\x00-/:-@\[-`{-\x7f](?:[^\s\x00-,./:-@\[-`{-\x7f]*[^\s\x00-/:-@\[-`{-\x7f])?"
EMAIL = rf"^(?![^@]{{65}}|.{{255}}){_WORD}(?:\.{_WORD})*@{_LABEL}(?:\.{_LABEL})*$"
"""Words with dots between them at a host's name, of any script; RFC 5321's lengths, without its quotes."""

Emit = Callable[[str, Signing, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Page:
    """Some signings, and where to go on after them (None: nowhere)."""

    items: list[Signing]
    next_seq: int | None


class Service:
    """What the endpoints and the pages do, without HTTP."""

    def __init__(
        self,
        database: Database,
        files: Files,
        clock: Clock,
        ids: Ids,
        profile: Profile,
        accounts: Accounts,
        emit: Emit,
        seal_level: Level = "B-B",
    ) -> None:
        self._database = database
        self._files = files
        self._clock = clock
        self._ids = ids
        self._profile = profile
        self._accounts = accounts
        self._emit = emit
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sealer = Sealer(files.path("").parent / "authority", clock, seal_level)

    # signings

    def create_signing(self, user: User, body: Mapping[str, Any]) -> Signing:
        """A new draft, from the fields of a request."""
        fields = _Fields(body, self._profile.required_signing_fields)
        name = fields.text("name", required=True)
        language = fields.choice("language", LANGUAGES, required=True)
        order = fields.choice("signing_order", ORDERS) or self._profile.default_signing_order
        message = fields.text("message", longest=MAX_MESSAGE)
        fields.check()
        now = self._clock.micros()
        with self._database.transaction():
            signing_id = self._ids.new("signing")
            self._database.insert(
                "signings",
                id=signing_id,
                tenant=user.tenant,
                user_id=user.id,
                name=name,
                language=language,
                signing_order=order,
                message=message,
                created_at=now,
                updated_at=now,
            )
            signing = self.signing(signing_id)
            self._emit("signing.created", signing, {})
        return signing

    def signing(self, signing_id: str, user: User | None = None) -> Signing:
        """The signing of that id, if the user may see it."""
        found = self._database.get(Signing, "signings", "id = ?", signing_id)
        if found is None or (user is not None and found.tenant != user.tenant):
            raise not_found("signing")
        return found

    def list_signings(self, user: User, after: int | None, limit: int) -> Page:
        """A page of the tenant's signings in the profile's order; at most `limit`, beginning after number `after`."""
        newest = self._profile.list_order == "newest_first"
        start = after if after is not None else (2**62 if newest else 0)
        where = "tenant = ? AND seq < ? ORDER BY seq DESC" if newest else "tenant = ? AND seq > ? ORDER BY seq"
        found = self._database.select(Signing, "signings", f"{where} LIMIT ?", user.tenant, start, limit + 1)
        return Page(found[:limit], found[limit - 1].seq if len(found) > limit else None)

    def signings(self) -> list[Signing]:
        """All signings of all tenants, oldest first."""
        return self._database.select(Signing, "signings", "1 ORDER BY seq")

    def latest_signings(self, before: int | None, limit: int) -> Page:
        """A page of all tenants' signings, newest first; at most `limit`, beginning before number `before`."""
        where = "seq < ? ORDER BY seq DESC LIMIT ?"
        found = self._database.select(Signing, "signings", where, 2**62 if before is None else before, limit + 1)
        return Page(found[:limit], found[limit - 1].seq if len(found) > limit else None)

    def send(self, signing_id: str, user: User | None = None) -> Signing:
        """Leave draft mode and invite: everybody, or in a sequential signing the first."""
        signing = self.signing(signing_id, user)
        if not signing.is_draft:
            raise Refused(400, "cannot_be_sent", f"The signing cannot be sent: it is {signing.state}, not a draft.")
        for what in ("document", "recipient"):
            if not self._count(f"{what}s", signing_id):
                raise Refused(400, "cannot_be_sent", f"The signing cannot be sent: it has no {what}.")
        now = self._clock.micros()
        with self._database.transaction():
            sql = "UPDATE signings SET sent_at = ?, times_sent = times_sent + 1, updated_at = ? WHERE id = ?"
            self._database.run(sql, now, now, signing_id)
            signing = self.signing(signing_id)
            self._emit("signing.sent", signing, {})
            self._invite_next(signing)
        return signing

    def cancel(self, signing_id: str, user: User | None = None) -> Signing:
        """Cancel a signing that is a draft or sent. How is not shown; this is the sandbox's own way."""
        signing = self.signing(signing_id, user)
        if signing.state not in {"draft", "sent"}:
            raise Refused(400, "cannot_be_cancelled", f"The signing cannot be cancelled: it is {signing.state}.")
        with self._database.transaction():
            return self._cancel(signing_id)

    def _cancel(self, signing_id: str) -> Signing:
        now = self._clock.micros()
        self._database.run("UPDATE signings SET cancelled_at = ?, updated_at = ? WHERE id = ?", now, now, signing_id)
        signing = self.signing(signing_id)
        self._emit("signing.cancelled", signing, {})
        return signing

    # documents

    def editable(self, signing_id: str, user: User | None = None) -> Signing:
        """The signing, if documents and recipients can be added to it."""
        signing = self.signing(signing_id, user)
        if not signing.is_draft:
            message = f"The signing is {signing.state} and can no longer be edited."
            raise Refused(self._profile.not_editable_status, "not_editable", message)
        return signing

    def room_for_document(self, signing_id: str) -> None:
        """Refuse one more document than the profile allows."""
        most = self._profile.max_documents
        if most is not None and self._count("documents", signing_id) >= most:
            raise invalid({"selected_file": [f"A signing can have at most {most} documents."]})

    def incoming(self) -> Incoming:
        """Where an upload's bytes go."""
        return self._files.incoming(self._profile.max_pdf_bytes)

    async def add_document(self, signing_id: str, user: User, filename: str, incoming: Incoming) -> Document:
        """Judge the received file and keep it, if the signing is still editable then."""
        name = self._files.new_name()
        await asyncio.to_thread(self._judge, incoming, name)
        now = self._clock.micros()
        try:
            with self._database.transaction():
                self.editable(signing_id, user)
                self.room_for_document(signing_id)
                document_id = self._ids.new("document")
                self._database.insert(
                    "documents",
                    id=document_id,
                    signing_id=signing_id,
                    name=document_name(filename, self._profile.document_name),
                    size=incoming.size,
                    sha256=incoming.sha256,
                    file=name,
                    created_at=now,
                )
                self._touch(signing_id, now)
        except Exception:  # an interrupt may come when it was committed already
            self._files.path(name).unlink()
            raise
        return self.document(signing_id, document_id)

    def _judge(self, incoming: Incoming, name: str) -> None:
        limit = self._profile.max_pdf_bytes
        if incoming.too_large:
            raise Refused(422, "too_large", f"The file has more than {limit} bytes.")
        incoming.flush()
        from .inspection import inspect

        if rejection := inspect(incoming.path, max_bytes=limit):
            raise Refused(422, rejection.code, rejection.message)
        self._files.publish(incoming.path, name)

    def document(self, signing_id: str, document_id: str) -> Document:
        """A document of that signing."""
        found = self._database.get(Document, "documents", "id = ? AND signing_id = ?", document_id, signing_id)
        if found is None:
            raise not_found("document")
        return found

    def documents(self, signing_id: str | None = None) -> list[Document]:
        """The documents of one signing, or of all, oldest first."""
        if signing_id is None:
            return self._database.select(Document, "documents", "1 ORDER BY seq")
        return self._database.select(Document, "documents", "signing_id = ? ORDER BY seq", signing_id)

    def document_path(self, document_id: str) -> Path:
        """Where an uploaded document lies."""
        found = self._database.get(Document, "documents", "id = ?", document_id)
        if found is None:
            raise not_found("document")
        return self._files.path(found.file)

    def signed_path(self, signing_id: str, document_id: str) -> Path:
        """Where the sealed document lies, once there is one."""
        document = self.document(signing_id, document_id)
        if document.sealed_file is None:
            raise Refused(404, "not_signed", "The document is not fully signed yet.")
        return self._files.path(document.sealed_file)

    # recipients

    def add_recipient(self, signing_id: str, user: User, body: Mapping[str, Any]) -> Recipient:
        """A new recipient of a draft, from the fields of a request."""
        profile = self._profile
        signing = self.editable(signing_id, user)
        fields = _Fields(body, profile.required_recipient_fields)
        first_name, last_name = fields.text("first_name"), fields.text("last_name")
        email = fields.email("email")
        method = fields.choice("signing_method", profile.signing_methods) or profile.signing_methods[0]
        phone = fields.text(profile.phone_field, required=method in profile.phone_methods)
        identification = fields.text(profile.identification_field, required=method in profile.identification_methods)
        order = fields.order("order")
        if order is not None and self._order_taken(signing, order):
            fields.refuse("order", f"The order {order} is taken by another recipient of this signing.")
        fields.check()
        most = profile.max_recipients
        if most is not None and self._count("recipients", signing_id) >= most:
            raise invalid({"email": [f"A signing can have at most {most} recipients."]})
        now = self._clock.micros()
        with self._database.transaction():
            if order is None and signing.signing_order == "sequential":
                sql = 'SELECT coalesce(max("order"), 0) + 1 FROM recipients WHERE signing_id = ?'
                order = self._database.value(sql, signing_id)
            recipient_id = self._ids.new("recipient")
            self._database.insert(
                "recipients",
                id=recipient_id,
                signing_id=signing_id,
                first_name=first_name,
                last_name=last_name,
                email=email,
                signing_method=method,
                order=order,
                phone=phone,
                identification=identification,
                created_at=now,
            )
            self._touch(signing_id, now)
        return self.recipient(recipient_id)

    def _order_taken(self, signing: Signing, order: int) -> bool:
        if signing.signing_order != "sequential" and self._profile.unique_order == "sequential":
            return False
        sql = 'SELECT count(*) FROM recipients WHERE signing_id = ? AND "order" = ?'
        return bool(self._database.value(sql, signing.id, order))

    def recipient(self, recipient_id: str, signing_id: str | None = None) -> Recipient:
        """The recipient of that id (of that signing)."""
        found = self._database.get(Recipient, "recipients", "id = ?", recipient_id)
        if found is None or (signing_id is not None and found.signing_id != signing_id):
            raise not_found("recipient")
        return found

    def recipients(self, signing_id: str | None = None) -> list[Recipient]:
        """The recipients of one signing, or of all, oldest first."""
        if signing_id is None:
            return self._database.select(Recipient, "recipients", "1 ORDER BY seq")
        return self._database.select(Recipient, "recipients", "signing_id = ? ORDER BY seq", signing_id)

    def notifications(self, recipient_id: str | None = None) -> list[Notification]:
        """What recipients were sent, oldest first: everybody, or one of them."""
        if recipient_id is None:
            return self._database.select(Notification, "notifications", "1 ORDER BY seq")
        return self._database.select(Notification, "notifications", "recipient_id = ? ORDER BY seq", recipient_id)

    def remind(self, signing_id: str, recipient_id: str, user: User | None = None) -> Recipient:
        """Remind a recipient who is invited and has not finished, within the days an invitation lasts."""
        signing = self.signing(signing_id, user)
        recipient = self.recipient(recipient_id, signing_id)
        if signing.state in {"draft", "cancelled"}:
            raise Refused(400, "cannot_be_reminded", f"Nobody can be reminded: the signing is {signing.state}.")
        if recipient.is_done or recipient.expires_at is None:
            if self._profile.remind_finished == "skip":
                return recipient
            why = "has finished" if recipient.is_done else "is not invited yet"
            raise Refused(400, "cannot_be_reminded", f"The recipient {why}.")
        now = self._clock.micros()
        with self._database.transaction():
            if now >= recipient.expires_at:
                self._renew(recipient, now)
            self._notify(recipient, "reminder", now)
            self._database.run("UPDATE recipients SET reminders = reminders + 1 WHERE id = ?", recipient_id)
        return self.recipient(recipient_id)

    def _renew(self, recipient: Recipient, now: int) -> None:
        if self._profile.remind_expired == "refuse":
            days = self._profile.invitation_days
            raise Refused(400, "invitation_expired", f"The invitation has expired: it was valid for {days} days.")
        self._database.run("UPDATE recipients SET expires_at = ? WHERE id = ?", self._expiry(now), recipient.id)

    def _expiry(self, now: int) -> int:
        return now + self._profile.invitation_days * DAY

    # what people do

    def may_act(self, recipient: Recipient) -> str | None:
        """Why this recipient can neither sign nor decline now, or None."""
        signing = self.signing(recipient.signing_id)
        if signing.state != "sent":
            return f"The signing is {signing.state}."
        if recipient.is_done:
            return "The recipient has finished already."
        if recipient.expires_at is None:
            return "It is not this recipient's turn yet."
        if self._profile.expiry_blocks_signing and self._clock.micros() >= recipient.expires_at:
            return "The invitation has expired."
        return None

    async def sign(self, recipient_id: str) -> Signing:
        """The recipient signs; when it was the last one, the documents are sealed and the signing is completed."""
        signing_id = self.recipient(recipient_id).signing_id
        async with self._lock(signing_id):
            return await self._sign(recipient_id)

    async def complete(self, signing_id: str) -> Signing:
        """Everybody who has not yet signed does so, in order."""
        signing = self.signing(signing_id)
        if signing.state != "sent":
            raise Refused(400, "cannot_be_completed", f"The signing cannot be completed: it is {signing.state}.")
        async with self._lock(signing_id):
            while waiting := [r for r in self.recipients(signing_id) if not r.is_done and r.invited_at is not None]:
                await self._sign(waiting[0].id)
        return self.signing(signing_id)

    async def decline(self, recipient_id: str) -> Signing:
        """The recipient refuses to sign."""
        signing_id = self.recipient(recipient_id).signing_id
        async with self._lock(signing_id):
            self._check_turn(self.recipient(recipient_id))
            now = self._clock.micros()
            with self._database.transaction():
                self._database.run("UPDATE recipients SET declined_at = ? WHERE id = ?", now, recipient_id)
                self._touch(signing_id, now)
                signing = self.signing(signing_id)
                self._emit("recipient.declined", signing, {"recipient_id": recipient_id})
                if self._profile.decline_effect == "cancels":
                    self._cancel(signing_id)
                else:
                    self._invite_next(signing)
        return self.signing(signing_id)

    async def _sign(self, recipient_id: str) -> Signing:
        recipient = self.recipient(recipient_id)
        self._check_turn(recipient)
        now = self._clock.micros()
        others = [other for other in self.recipients(recipient.signing_id) if other.id != recipient_id]
        sealed: dict[str, str] = {}
        try:
            if all(other.completed_at is not None for other in others):
                await self._seal(self.signing(recipient.signing_id), recipient_id, now, sealed)
            return self._signed(recipient, sealed, now)
        except (Exception, asyncio.CancelledError):  # an interrupt may come when it was committed already
            for file in sealed.values():
                self._files.path(file).unlink(missing_ok=True)
            raise

    def _signed(self, recipient: Recipient, sealed: Mapping[str, str], now: int) -> Signing:
        with self._database.transaction():
            self._check_turn(recipient)  # it may have been cancelled while the documents were sealed
            self._database.run("UPDATE recipients SET completed_at = ? WHERE id = ?", now, recipient.id)
            self._touch(recipient.signing_id, now)
            signing = self.signing(recipient.signing_id)
            self._emit("recipient.signed", signing, {"recipient_id": recipient.id})
            if sealed:
                signing = self._finish(signing, sealed, now)
            else:
                self._invite_next(signing)
        return signing

    def _check_turn(self, recipient: Recipient) -> None:
        if problem := self.may_act(recipient):
            raise Refused(400, "cannot_sign", problem)

    def _finish(self, signing: Signing, sealed: Mapping[str, str], now: int) -> Signing:
        for document_id, file in sealed.items():
            sql = "UPDATE documents SET completed_at = ?, sealed_file = ? WHERE id = ?"
            self._database.run(sql, now, file, document_id)
        self._database.run("UPDATE signings SET completed_at = ? WHERE id = ?", now, signing.id)
        signing = self.signing(signing.id)
        self._emit("signing.completed", signing, {})
        return signing

    async def _seal(self, signing: Signing, last_id: str, now: int, sealed: dict[str, str]) -> None:
        """Seal every document, and note each one's file in `sealed` before there is one."""
        recipients = self.recipients(signing.id)
        signed = [(r, now if r.id == last_id else r.completed_at or now) for r in recipients]
        signed.sort(key=lambda pair: pair[1])
        for document in self.documents(signing.id):
            name = sealed[document.id] = self._files.new_name()
            await self._sealer.seal(self._files, document, name, signing, signed, now)

    def _lock(self, signing_id: str) -> AbstractAsyncContextManager[Any]:
        lock = self._locks.get(signing_id)
        if lock is None:
            lock = self._locks[signing_id] = asyncio.Lock()
        return lock

    def _invite_next(self, signing: Signing) -> None:
        waiting = [recipient for recipient in self.recipients(signing.id) if not recipient.is_done]
        if signing.signing_order == "sequential":
            waiting = sorted(waiting, key=lambda recipient: recipient.order or MAX_ORDER)[:1]
        now = self._clock.micros()
        for recipient in waiting:
            if recipient.invited_at is None:
                sql = "UPDATE recipients SET invited_at = ?, expires_at = ? WHERE id = ?"
                self._database.run(sql, now, self._expiry(now), recipient.id)
                self._notify(recipient, "invitation", now)

    def _notify(self, recipient: Recipient, kind: str, now: int) -> None:
        self._database.insert(
            "notifications",
            kind=kind,
            signing_id=recipient.signing_id,
            recipient_id=recipient.id,
            email=recipient.email,
            sent_at=now,
        )

    def _touch(self, signing_id: str, now: int) -> None:
        self._database.run("UPDATE signings SET updated_at = ? WHERE id = ?", now, signing_id)

    def _count(self, table: str, signing_id: str) -> int:
        sql = f"SELECT count(*) FROM {table} WHERE signing_id = ?"  # noqa: S608  # table is one of the program's words
        count: int = self._database.value(sql, signing_id)
        return count

    # the authority

    async def certificate_pem(self) -> bytes:
        """The certificate of the throw-away authority that seals; made when first asked for."""
        return await self._sealer.certificate_pem()


class Sealer:
    """The authority and its thread: pyHanko is imported when the first document is sealed."""

    def __init__(self, folder: Path, clock: Clock, level: Level) -> None:
        self._folder = folder
        self._clock = clock
        self._level: Level = level
        self._opened: Any = None
        self._opening = asyncio.Lock()

    async def certificate_pem(self) -> bytes:
        """The authority's certificate."""
        pem: bytes = (await self._authority()).certificate_pem
        return pem

    async def seal(
        self,
        files: Files,
        document: Document,
        name: str,
        signing: Signing,
        signed: Sequence[tuple[Recipient, int]],
        now: int,
    ) -> None:
        """Seal one document into the file of that name."""
        from . import sealing

        panel = sealing.Panel(
            signing.name,
            document.name,
            document.id,
            [sealing.Signer(r.full_name, r.email, r.signing_method, to_datetime(at)) for r, at in signed],
        )
        authority = await self._authority()
        source, target, when = files.path(document.file), files.path(name), to_datetime(now)
        try:
            await asyncio.to_thread(
                sealing.seal, source, target, panel=panel, authority=authority, when=when, level=self._level
            )
        except sealing.SealingFailed as error:
            raise Refused(409, "cannot_be_sealed", str(error)) from error

    async def _authority(self) -> Any:
        from . import sealing

        async with self._opening:
            self._opened = self._opened or await asyncio.to_thread(
                sealing.Authority.open, self._folder, self._clock.now()
            )
        return self._opened


def document_name(filename: str, style: str) -> str:
    """The name a document gets from its file's: no folders, no control characters."""
    name = re.split(r"[/\\]", filename)[-1]
    name = re.sub(r"[\x00-\x1f\x7f]", "", name).strip()[:255] or "document.pdf"
    if style == "stem" and name.lower().endswith(".pdf"):
        return name[:-4] or name
    return name


class _Fields:
    """A request's fields, taken out one by one; what is wrong is gathered and told at once."""

    def __init__(self, body: Mapping[str, Any], required: Sequence[str]) -> None:
        self._body = body
        self._required = required
        self._errors: dict[str, list[str]] = {}

    def check(self) -> None:
        """Refuse, if anything was wrong."""
        if self._errors:
            raise invalid(self._errors)

    def refuse(self, field: str, message: str) -> None:
        """Note that a field is wrong."""
        self._errors.setdefault(field, []).append(message)

    def text(self, field: str, *, required: bool = False, longest: int | None = None) -> str | None:
        """A string; null, missing and blank are one."""
        value = self._body.get(field)
        if value is not None and not isinstance(value, str):
            self.refuse(field, f"The {field} must be a string.")
            return None
        if (required or field in self._required) and (value is None or not re.search(NOT_BLANK, value)):
            self.refuse(field, f"The {field} is required.")
        if value is not None and longest is not None and len(value) > longest:
            self.refuse(field, f"The {field} has {len(value)} characters; at most {longest} are allowed.")
        return value

    def choice(self, field: str, allowed: Sequence[str], *, required: bool = False) -> str | None:
        """One of the allowed words."""
        value = self._body.get(field)
        if value is None:
            if required or field in self._required:
                self.refuse(field, f"The {field} is required.")
            return None
        if value not in allowed:
            self.refuse(field, f"The {field} must be one of {', '.join(allowed)}.")
            return None
        return str(value)

    def email(self, field: str) -> str:
        """An address."""
        value = self.text(field, required=True)
        if value and field not in self._errors and not re.fullmatch(EMAIL, value):
            self.refuse(field, f"The {field} is not an e-mail address.")
        return value or ""

    def order(self, field: str) -> int | None:
        """A position, from 1."""
        value = self._body.get(field)
        if value is None:
            if field in self._required:
                self.refuse(field, f"The {field} is required.")
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_ORDER:
            self.refuse(field, f"The {field} must be a whole number from 1.")
            return None
        return value
