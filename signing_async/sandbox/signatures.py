"""What recipients do: sign or decline. The last signature seals the documents."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any
from weakref import WeakValueDictionary

from .clock import Clock
from .database import Database
from .files import Files
from .invitations import Invitations
from .profile import Profile
from .records import Recipient, Signing
from .refused import Refused
from .sealer import Sealer
from .service import Emit, Service


class Signatures:
    """Signs and declines for recipients, one at a time per signing."""

    def __init__(
        self,
        database: Database,
        files: Files,
        clock: Clock,
        profile: Profile,
        service: Service,
        invitations: Invitations,
        sealer: Sealer,
        emit: Emit,
    ) -> None:
        self._database = database
        self._files = files
        self._clock = clock
        self._profile = profile
        self._service = service
        self._invitations = invitations
        self._sealer = sealer
        self._emit = emit
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def refusal(self, recipient: Recipient) -> str | None:
        """Return why the recipient can neither sign nor decline now, or None."""
        signing = self._service.signing(recipient.signing_id)
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
        """Sign for the recipient. The last signature seals the documents and completes the signing."""
        signing_id = self._service.recipient(recipient_id).signing_id
        async with self._lock(signing_id):
            return await self._sign(recipient_id)

    async def complete(self, signing_id: str) -> Signing:
        """Sign for all recipients who have neither signed nor declined, in order."""
        signing = self._service.signing(signing_id)
        if signing.state != "sent":
            raise Refused(400, "cannot_be_completed", f"The signing cannot be completed: it is {signing.state}.")
        async with self._lock(signing_id):
            while invited := self._invited(signing_id):
                await self._sign(invited[0].id)
        return self._service.signing(signing_id)

    async def decline(self, recipient_id: str) -> Signing:
        """Decline for the recipient; the profile says whether that cancels the signing."""
        signing_id = self._service.recipient(recipient_id).signing_id
        async with self._lock(signing_id):
            self._check_allowed(self._service.recipient(recipient_id))
            now = self._clock.micros()
            with self._database.transaction():
                self._database.run("UPDATE recipients SET declined_at = ? WHERE id = ?", now, recipient_id)
                self._service.touch(signing_id, now)
                signing = self._service.signing(signing_id)
                self._emit("recipient.declined", signing, {"recipient_id": recipient_id})
                if self._profile.decline_effect == "cancels":
                    self._service.cancel(signing_id)
                else:
                    self._invitations.invite_next(signing)
        return self._service.signing(signing_id)

    def _invited(self, signing_id: str) -> list[Recipient]:
        everybody = self._service.recipients(signing_id)
        return [recipient for recipient in everybody if not recipient.is_done and recipient.invited_at is not None]

    async def _sign(self, recipient_id: str) -> Signing:
        recipient = self._service.recipient(recipient_id)
        self._check_allowed(recipient)
        now = self._clock.micros()
        others = [other for other in self._service.recipients(recipient.signing_id) if other.id != recipient_id]
        sealed: dict[str, str] = {}
        try:
            if all(other.completed_at is not None for other in others):
                await self._seal(self._service.signing(recipient.signing_id), recipient_id, now, sealed)
            return self._save_signature(recipient, sealed, now)
        except (Exception, asyncio.CancelledError):  # not BaseException: an interrupt may arrive after the commit
            for file in sealed.values():
                self._files.path(file).unlink(missing_ok=True)
            raise

    def _save_signature(self, recipient: Recipient, sealed: Mapping[str, str], now: int) -> Signing:
        with self._database.transaction():
            self._check_allowed(recipient)  # the signing may have been cancelled while the documents were sealed
            self._database.run("UPDATE recipients SET completed_at = ? WHERE id = ?", now, recipient.id)
            self._service.touch(recipient.signing_id, now)
            signing = self._service.signing(recipient.signing_id)
            self._emit("recipient.signed", signing, {"recipient_id": recipient.id})
            if sealed:
                signing = self._finish(signing, sealed, now)
            else:
                self._invitations.invite_next(signing)
        return signing

    def _check_allowed(self, recipient: Recipient) -> None:
        if problem := self.refusal(recipient):
            raise Refused(400, "cannot_sign", problem)

    def _finish(self, signing: Signing, sealed: Mapping[str, str], now: int) -> Signing:
        for document_id, file in sealed.items():
            sql = "UPDATE documents SET completed_at = ?, sealed_file = ? WHERE id = ?"
            self._database.run(sql, now, file, document_id)
        self._database.run("UPDATE signings SET completed_at = ? WHERE id = ?", now, signing.id)
        signing = self._service.signing(signing.id)
        self._emit("signing.completed", signing, {})
        return signing

    async def _seal(self, signing: Signing, last_id: str, now: int, sealed: dict[str, str]) -> None:
        """Seal every document. Each file's name is in `sealed` before the file exists, for the caller to clean up."""
        recipients = self._service.recipients(signing.id)
        signed = [(r, now if r.id == last_id else r.completed_at or now) for r in recipients]
        signed.sort(key=lambda pair: pair[1])
        for document in self._service.documents(signing.id):
            name = sealed[document.id] = self._files.new_name()
            await self._sealer.seal(self._files, document, name, signing, signed, now)

    def _lock(self, signing_id: str) -> AbstractAsyncContextManager[Any]:
        lock = self._locks.get(signing_id)
        if lock is None:
            lock = self._locks[signing_id] = asyncio.Lock()
        return lock
