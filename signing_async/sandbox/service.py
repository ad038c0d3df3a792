"""Signings, documents and recipients: the service's rules, without HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .clock import Clock
from .database import Database, Record
from .fields import EMAIL, LANGUAGES, MAX_MESSAGE, ORDERS, Fields
from .files import Files, Incoming
from .ids import Ids
from .profile import Profile
from .records import Document, Recipient, Signing, User
from .refused import Refused, invalid

Emit = Callable[[str, Signing, Mapping[str, Any]], None]

STATES = {
    "draft": "sent_at IS NULL AND cancelled_at IS NULL",
    "sent": "sent_at IS NOT NULL AND completed_at IS NULL AND cancelled_at IS NULL",
    "completed": "completed_at IS NOT NULL AND cancelled_at IS NULL",
    "cancelled": "cancelled_at IS NOT NULL",
}
"""The values of `Signing.state`, each with its condition in SQL."""

_MATCHES = """(id = :text OR folded(name) LIKE :like ESCAPE '!' OR id IN (
    SELECT signing_id FROM documents WHERE folded(name) LIKE :like ESCAPE '!' UNION
    SELECT signing_id FROM recipients WHERE id = :text OR folded(
        coalesce(first_name, '') || ' ' || coalesce(last_name, '') || ' ' || email) LIKE :like ESCAPE '!'))"""


class Service:
    """The signings of all tenants with their documents and recipients."""

    def __init__(self, database: Database, files: Files, clock: Clock, ids: Ids, profile: Profile, emit: Emit) -> None:
        self._database = database
        self._files = files
        self._clock = clock
        self._ids = ids
        self._profile = profile
        self._emit = emit

    # signings

    def create_signing(self, user: User, body: Mapping[str, Any]) -> Signing:
        """Create a draft from the fields of a request."""
        fields = Fields(body, self._profile.required_signing_fields)
        row: dict[str, Any] = {
            "name": fields.text("name", required=True),
            "language": fields.choice("language", LANGUAGES, required=True),
            "signing_order": fields.choice("signing_order", ORDERS) or self._profile.default_signing_order,
            "message": fields.text("message", longest=MAX_MESSAGE),
        }
        fields.check()
        now = self._clock.micros()
        row |= {"tenant": user.tenant, "user_id": user.id, "created_at": now, "updated_at": now}
        with self._database.transaction():
            signing_id = self._ids.new("signing")
            self._database.insert("signings", id=signing_id, **row)
            signing = self.signing(signing_id)
            self._emit("signing.created", signing, {})
        return signing

    def signing(self, signing_id: str, user: User | None = None) -> Signing:
        """Return a signing. To a user of another tenant it does not exist."""
        tenant = None if user is None else user.tenant
        return self._database.find(Signing, "signings", "id = ? AND tenant = coalesce(?, tenant)", signing_id, tenant)

    def list_signings(self, user: User, after: int | None, limit: int) -> tuple[list[Signing], int | None]:
        """Return up to `limit` of the tenant's signings after sequence number `after`, in the profile's order.

        If more follow, also return the sequence number of the last one, else None.
        """
        newest = self._profile.list_order == "newest_first"
        start = after if after is not None else (2**62 if newest else 0)
        where = "tenant = ? AND seq < ? ORDER BY seq DESC" if newest else "tenant = ? AND seq > ? ORDER BY seq"
        found = self._database.select(Signing, "signings", f"{where} LIMIT ?", user.tenant, start, limit + 1)
        return found[:limit], found[limit - 1].seq if len(found) > limit else None

    def signings(self) -> list[Signing]:
        """Return all signings of all tenants, oldest first."""
        return self._database.select(Signing, "signings", "1 ORDER BY seq")

    def search(self, text: str, state: str, offset: int, limit: int) -> tuple[list[Signing], int]:
        """Return up to `limit` matching signings, newest first, and how many match in all.

        `text` is an id, or part of the name of a signing, document or recipient, or of an e-mail address; `state` is
        a key of `STATES`. Empty strings match everything.
        """
        escaped = re.sub(r"([!%_])", r"!\1", text.casefold())
        where = f"{STATES.get(state, '1')} AND {_MATCHES if text else '1'}"
        values = {"text": text, "like": f"%{escaped}%"}
        return self._database.page(Signing, "signings", where, values, offset, limit)

    def counts(self) -> dict[str, int]:
        """Return how many signings are in each state that any is in."""
        counts = {state: self._database.count("signings", where) for state, where in STATES.items()}
        return {state: count for state, count in counts.items() if count}

    def cancel(self, signing_id: str) -> Signing:
        """Cancel a draft or a sent signing. The specification does not show how; this is the sandbox's own way."""
        signing = self.signing(signing_id)
        if signing.state not in {"draft", "sent"}:
            raise Refused(400, "cannot_be_cancelled", f"The signing cannot be cancelled: it is {signing.state}.")
        now = self._clock.micros()
        with self._database.transaction():
            self._database.update("signings", signing_id, cancelled_at=now, updated_at=now)
            signing = self.signing(signing_id)
            self._emit("signing.cancelled", signing, {})
        return signing

    def delete(self, signing_id: str, user: User) -> None:
        """Delete a draft with its documents and recipients. Like `cancel`, this is the sandbox's own way."""
        self.editable(signing_id, user)
        with self._database.transaction():
            self._database.run("DELETE FROM documents WHERE signing_id = ?", signing_id)
            self._database.run("DELETE FROM recipients WHERE signing_id = ?", signing_id)
            self._database.run("DELETE FROM signings WHERE id = ?", signing_id)

    def touch(self, signing_id: str, now: int) -> None:
        """Set the time of the signing's last update."""
        self._database.update("signings", signing_id, updated_at=now)

    def editable(self, signing_id: str, user: User) -> Signing:
        """Return the signing if it is a draft; refuse otherwise."""
        signing = self.signing(signing_id, user)
        if not signing.is_draft:
            message = f"The signing is {signing.state} and can no longer be edited."
            raise Refused(self._profile.not_editable_status, "not_editable", message)
        return signing

    # documents

    def check_document_limit(self, signing: Signing) -> None:
        """Refuse if the signing already has as many documents as the profile allows."""
        most = self._profile.max_documents
        if most is not None and self.count("documents", signing.id) >= most:
            raise invalid({"selected_file": [f"A signing can have at most {most} documents."]})

    def incoming(self) -> Incoming:
        """Return a file for an upload to be written to."""
        return self._files.incoming(self._profile.max_pdf_bytes)

    async def add_document(self, signing_id: str, user: User, filename: str, incoming: Incoming) -> Document:
        """Inspect the received file and add it if the signing is still a draft."""
        file = self._files.new_name()
        await asyncio.to_thread(self._accept, incoming, file)
        now = self._clock.micros()
        row = {"size": incoming.size, "sha256": incoming.sha256, "file": file, "created_at": now}
        try:
            with self._database.transaction():
                self.check_document_limit(self.editable(signing_id, user))
                document_id = self._ids.new("document")
                name = _document_name(filename, self._profile.document_name)
                self._database.insert("documents", id=document_id, signing_id=signing_id, name=name, **row)
                self.touch(signing_id, now)
        except Exception:  # not BaseException: an interrupt may arrive after the commit
            self._files.path(file).unlink()
            raise
        return self.document(signing_id, document_id)

    def _accept(self, incoming: Incoming, name: str) -> None:
        from .inspection import inspect

        limit = self._profile.max_pdf_bytes
        if incoming.too_large:
            raise Refused(422, "too_large", f"The file has more than {limit} bytes.")
        incoming.flush()
        if rejection := inspect(incoming.path):
            raise Refused(422, rejection.code, rejection.message)
        self._files.publish(incoming.path, name)

    def document(self, signing_id: str, document_id: str) -> Document:
        """Return a document of the signing."""
        return self._database.find(Document, "documents", "id = ? AND signing_id = ?", document_id, signing_id)

    def documents(self, signing_id: str | None = None) -> list[Document]:
        """Return the documents of one signing, or of all signings, oldest first."""
        return self._select(Document, "documents", signing_id)

    def document_path(self, document_id: str) -> Path:
        """Return the path of an uploaded document."""
        return self._files.path(self._database.find(Document, "documents", "id = ?", document_id).file)

    def signed_path(self, signing_id: str, document_id: str) -> Path:
        """Return the path of a sealed document; refuse with 404 until it is sealed."""
        document = self.document(signing_id, document_id)
        if document.sealed_file is None:
            raise Refused(404, "not_signed", "The document is not fully signed yet.")
        return self._files.path(document.sealed_file)

    # recipients

    def add_recipient(self, signing_id: str, user: User, body: Mapping[str, Any]) -> Recipient:
        """Add a recipient to a draft, from the fields of a request."""
        profile = self._profile
        signing = self.editable(signing_id, user)
        fields = Fields(body, profile.required_recipient_fields)
        method = fields.choice("signing_method", profile.signing_methods) or profile.signing_methods[0]
        needs_identification = method in profile.identification_methods
        row: dict[str, Any] = {
            "first_name": fields.text("first_name"),
            "last_name": fields.text("last_name"),
            "email": fields.text("email", required=True, pattern=EMAIL),
            "signing_method": method,
            "phone": fields.text(profile.phone_field, required=method in profile.phone_methods),
            "identification": fields.text(profile.identification_field, required=needs_identification),
        }
        order = fields.order("order")
        is_ordered = signing.signing_order == "sequential"
        taken = self._database.count("recipients", 'signing_id = ? AND "order" = ?', signing_id, order)
        if taken and (is_ordered or profile.unique_order == "always"):
            fields.refuse("order", f"{order} is taken by another recipient of this signing")
        fields.check()
        most = profile.max_recipients
        if most is not None and self.count("recipients", signing_id) >= most:
            raise invalid({"email": [f"A signing can have at most {most} recipients."]})
        now = self._clock.micros()
        with self._database.transaction():
            if order is None and is_ordered:
                sql = 'SELECT coalesce(max("order"), 0) + 1 FROM recipients WHERE signing_id = ?'
                order = self._database.value(sql, signing_id)
            recipient_id, row["order"] = self._ids.new("recipient"), order
            self._database.insert("recipients", id=recipient_id, signing_id=signing_id, created_at=now, **row)
            self.touch(signing_id, now)
        return self.recipient(recipient_id)

    def recipient(self, recipient_id: str, signing_id: str | None = None) -> Recipient:
        """Return a recipient; with `signing_id`, only one of that signing."""
        where = "id = ? AND signing_id = coalesce(?, signing_id)"
        return self._database.find(Recipient, "recipients", where, recipient_id, signing_id)

    def recipients(self, signing_id: str | None = None) -> list[Recipient]:
        """Return the recipients of one signing, or of all signings, oldest first."""
        return self._select(Recipient, "recipients", signing_id)

    def _select(self, record: type[Record], table: str, signing_id: str | None) -> list[Record]:
        if signing_id is None:
            return self._database.select(record, table, "1 ORDER BY seq")
        return self._database.select(record, table, "signing_id = ? ORDER BY seq", signing_id)

    def count(self, table: str, signing_id: str) -> int:
        """Return how many documents or recipients the signing has."""
        return self._database.count(table, "signing_id = ?", signing_id)


def _document_name(filename: str, style: str) -> str:
    """Return a document's name: the file name without folders and control characters."""
    name = re.split(r"[/\\]", filename)[-1]
    name = re.sub(r"[\x00-\x1f\x7f]", "", name).strip()[:255] or "document.pdf"
    return name[:-4] or name if style == "stem" and name.lower().endswith(".pdf") else name
