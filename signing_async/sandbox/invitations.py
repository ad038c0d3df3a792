"""Sending a signing: invitations, reminders, and the notifications that the recipients get."""

from __future__ import annotations

from .clock import Clock
from .database import Database
from .fields import MAX_ORDER
from .profile import Profile
from .records import Notification, Recipient, Signing, User
from .refused import Refused
from .service import Emit, Service

DAY = 86_400_000_000


class Invitations:
    """Sends signings, and invites and reminds their recipients."""

    def __init__(self, database: Database, clock: Clock, profile: Profile, service: Service, emit: Emit) -> None:
        self._database = database
        self._clock = clock
        self._profile = profile
        self._service = service
        self._emit = emit

    def send(self, signing_id: str, user: User | None = None) -> Signing:
        """Send a draft: invite all recipients, or only the first one if the signing is sequential."""
        signing = self._service.signing(signing_id, user)
        if not signing.is_draft:
            raise Refused(400, "cannot_be_sent", f"The signing cannot be sent: it is {signing.state}, not a draft.")
        for kind in ("document", "recipient"):
            if not self._service.count(f"{kind}s", signing_id):
                raise Refused(400, "cannot_be_sent", f"The signing cannot be sent: it has no {kind}.")
        now = self._clock.micros()
        with self._database.transaction():
            times = signing.times_sent + 1
            self._database.update("signings", signing_id, sent_at=now, times_sent=times, updated_at=now)
            signing = self._service.signing(signing_id)
            self._emit("signing.sent", signing, {})
            self.invite_next(signing)
        return signing

    def invite_next(self, signing: Signing) -> None:
        """Invite the recipients who may sign now and were not invited before."""
        waiting = [recipient for recipient in self._service.recipients(signing.id) if not recipient.is_done]
        if signing.signing_order == "sequential":
            waiting = sorted(waiting, key=lambda recipient: recipient.order or MAX_ORDER)[:1]
        for recipient in waiting:
            if recipient.invited_at is None:
                now = self._clock.micros()
                expires_at = now + self._profile.invitation_days * DAY
                self._database.update("recipients", recipient.id, invited_at=now, expires_at=expires_at)
                self._notify(recipient, "invitation", now)

    def remind(self, signing_id: str, recipient_id: str, user: User | None = None) -> Recipient:
        """Remind a recipient. The profile decides about uninvited and finished recipients and expired invitations."""
        signing = self._service.signing(signing_id, user)
        recipient = self._service.recipient(recipient_id, signing_id)
        if signing.state in {"draft", "cancelled"}:
            raise Refused(400, "cannot_be_reminded", f"No reminder can be sent: the signing is {signing.state}.")
        if recipient.is_done or recipient.expires_at is None:
            if self._profile.remind_finished == "skip":
                return recipient
            reason = "has finished" if recipient.is_done else "is not invited yet"
            raise Refused(400, "cannot_be_reminded", f"The recipient {reason}.")
        now, days, expires_at = self._clock.micros(), self._profile.invitation_days, recipient.expires_at
        if now >= expires_at:
            if self._profile.remind_expired == "refuse":
                raise Refused(400, "invitation_expired", f"The invitation has expired: it was valid for {days} days.")
            expires_at = now + days * DAY
        with self._database.transaction():
            self._database.update("recipients", recipient_id, expires_at=expires_at, reminders=recipient.reminders + 1)
            self._notify(recipient, "reminder", now)
        return self._service.recipient(recipient_id)

    def notifications(self) -> list[Notification]:
        """Return all notifications, oldest first."""
        return self._database.select(Notification, "notifications", "1 ORDER BY seq")

    def _notify(self, recipient: Recipient, kind: str, now: int) -> None:
        self._database.insert(
            "notifications",
            kind=kind,
            signing_id=recipient.signing_id,
            recipient_id=recipient.id,
            email=recipient.email,
            sent_at=now,
        )
