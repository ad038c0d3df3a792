"""What recipients do: sign or decline. The last signature seals the documents."""

from __future__ import annotations

import asyncio
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
            await self._sign(recipient_id)
        return self._service.signing(signing_id)

    async def complete(self, signing_id: str) -> Signing:
        """Sign for all recipients who have neither signed nor declined, in order."""
        signing = self._service.signing(signing_id)
        if signing.state != "sent":
            raise Refused(400, "cannot_be_completed", f"The signing cannot be completed: it is {signing.state}.")
        async with self._lock(signing_id):
            while invited := [r for r in self._service.recipients(signing_id) if r.invited_at and not r.is_done]:
                await self._sign(invited[0].id)
        return self._service.signing(signing_id)

    async def decline(self, recipient_id: str) -> Signing:
        """Decline for the recipient; the profile says whether that cancels the signing."""
        signing_id = self._service.recipient(recipient_id).signing_id
        async with self._lock(signing_id):
            self._finish(recipient_id, "declined", self._clock.micros(), {})
        return self._service.signing(signing_id)

    def _lock(self, signing_id: str) -> asyncio.Lock:
        return self._locks.setdefault(signing_id, asyncio.Lock())

    async def _sign(self, recipient_id: str) -> None:
        recipient, now = self._check(recipient_id), self._clock.micros()
        signing, everybody = self._service.signing(recipient.signing_id), self._service.recipients(recipient.signing_id)
        sealed: dict[str, str] = {}
        try:
            if all(other.completed_at is not None for other in everybody if other.id != recipient_id):
                signed = sorted(((other, other.completed_at or now) for other in everybody), key=lambda pair: pair[1])
                for document in self._service.documents(signing.id):
                    name = sealed[document.id] = self._files.new_name()
                    await self._sealer.seal(self._files, document, name, signing, signed, now)
            self._finish(recipient_id, "signed", now, sealed)
        except (Exception, asyncio.CancelledError):  # not BaseException: an interrupt may arrive after the commit
            for name in sealed.values():
                self._files.path(name).unlink(missing_ok=True)
            raise

    def _finish(self, recipient_id: str, how: str, now: int, sealed: dict[str, str]) -> None:
        """Record that a recipient has signed or declined, and complete, cancel or continue the signing."""
        with self._database.transaction():
            recipient = self._check(recipient_id)  # the signing may have been cancelled while the documents were sealed
            column = "completed_at" if how == "signed" else "declined_at"
            self._database.update("recipients", recipient_id, **{column: now})
            self._service.touch(recipient.signing_id, now)
            signing = self._service.signing(recipient.signing_id)
            self._emit(f"recipient.{how}", signing, {"recipient_id": recipient_id})
            for document_id, name in sealed.items():
                self._database.update("documents", document_id, completed_at=now, sealed_file=name)
            if sealed:
                self._database.update("signings", signing.id, completed_at=now)
                self._emit("signing.completed", self._service.signing(signing.id), {})
            elif how == "declined" and self._profile.decline_effect == "cancels":
                self._service.cancel(signing.id)
            else:
                self._invitations.invite_next(signing)

    def _check(self, recipient_id: str) -> Recipient:
        """Return the recipient; refuse if the recipient can neither sign nor decline now."""
        recipient = self._service.recipient(recipient_id)
        if problem := self.refusal(recipient):
            raise Refused(400, "cannot_sign", problem)
        return recipient
