"""The recipients of a signing: add, list and remind them."""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping
from typing import Any

import attrs

from .errors import InvalidRequest, SigningError
from .models import Recipient, Signing, SigningMethod
from .pagination import Pager
from .reconcile import Creation, Read, Tracker
from .record_matching import RecipientMatch
from .signings import signing_path
from .transport import wire
from .transport.call import Operation, Transport
from .transport.decode import structure
from .transport.error_response import record
from .transport.retry import Repeat

__all__ = ["Recipients", "RemindResult", "check_recipient"]

_ADD, _LIST = "recipients.add", "recipients.list"
_FIELDS = ("email", "first_name", "last_name", "signing_method", "order")


@attrs.frozen
class RemindResult:
    """What came of reminding one recipient: ``error`` is None when the reminder was sent."""

    recipient: Recipient
    error: SigningError | None = None


class Recipients:
    """``client.recipients``."""

    def __init__(self, transport: Transport, tracker: Tracker) -> None:
        self._transport = transport
        self._tracker = tracker

    async def add(
        self,
        signing_id: str | Signing,
        *,
        email: str,
        first_name: str | None = None,
        last_name: str | None = None,
        signing_method: SigningMethod | str = SigningMethod.EMAIL,
        order: int | None = None,
        extra: Mapping[str, Any] = {},
    ) -> Recipient:
        """Add a recipient to a draft, once: before it is ever repeated, the recipients are read.

        The recipient is recognized by the given fields, ignoring case and punctuation. Recipients that this client
        added before do not count; if only ``extra`` differs, `OutcomeUnknown` is raised. Calls for one address take
        turns.
        ``extra`` holds the fields that the specification does not name, such as a phone number for BankID. ::

            await client.recipients.add(signing, email="anna@example.com", first_name="Anna", last_name="Berg",
                                        signing_method="bankid", order=1, extra={"phone": "+46701234567"})
        """
        named = {
            "email": email,
            "first_name": first_name,
            "last_name": last_name,
            "signing_method": signing_method,
            "order": order,
        }
        check_recipient(named, extra)
        fields = {**{name: value for name, value in named.items() if value is not None}, **extra}
        content = _encoded(fields)
        signing = self._tracker.signing(signing_path(signing_id))

        async def list_all(read: Read) -> tuple[Recipient, ...]:
            return tuple([recipient async for recipient in self.list(signing_id).through(read)])

        match = RecipientMatch(named, extra)
        deadline = self._transport.deadline()
        creation = Creation(_ADD, _LIST, deadline, signing, signing.recipients, match, list_all)
        operation = Operation(
            _ADD,
            "POST",
            _folder(signing_id),
            Repeat.RECONCILED,
            decode=self._decode,
            effect=creation,
            body=lambda: wire.bytes_body(content, "application/json"),
        )
        async with creation:
            recipient = await self._transport.call(operation, deadline)
            creation.note_created(recipient)
            return recipient

    async def remind(self, signing_id: str | Signing, recipient_id: str | Recipient) -> None:
        """Send a reminder.

        It is repeated after a 5xx, as the specification says, but not after an answer that was lost: that is
        `OutcomeUnknown`, since a person would get it twice.
        """
        path = f"{_folder(signing_id)}/{wire.segment('recipient_id', recipient_id)}/remind"
        await self._transport.call(Operation("recipients.remind", "POST", path, Repeat.REMIND, body=wire.bytes_body))

    async def remind_pending(self, signing_id: str | Signing) -> builtins.list[RemindResult]:
        """Remind everyone who has not finished, one after the other; one failure does not stop the rest."""
        results = []
        async for recipient in self.list(signing_id):
            if self._is_done(recipient):
                continue
            try:
                await self.remind(signing_id, recipient)
            except SigningError as error:
                results.append(RemindResult(recipient, error))
            else:
                results.append(RemindResult(recipient))
        return results

    def list(self, signing_id: str | Signing) -> Pager[Recipient]:
        """The recipients of a signing; see `Pager`."""
        return Pager(self._transport, _LIST, _folder(signing_id), Recipient)

    def _is_done(self, recipient: Recipient) -> bool:
        return any(recipient.extra.get(field) for field in self._transport.options.assumptions.recipient_done_fields)

    def _decode(self, data: Any, response: wire.Response) -> Recipient:
        return structure(record(data, self._transport.options.assumptions), Recipient)


def _folder(signing_id: str | Signing) -> str:
    return f"{signing_path(signing_id)}/recipients"


def _encoded(fields: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"extra: cannot be sent as JSON: {error}") from None


def check_recipient(named: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Refuse what cannot be a recipient; all of it at once."""
    problems = []
    email, order = named["email"], named["order"]
    if not isinstance(email, str) or "@" not in email.strip("@ \t\r\n"):
        problems.append(f"email: must be an e-mail address, not {email!r}")
    for field in ("first_name", "last_name", "signing_method"):
        if named[field] is not None and (not isinstance(named[field], str) or not named[field].strip()):
            problems.append(f"{field}: must be a text that is not empty, not {named[field]!r}")
    if order is not None and (isinstance(order, bool) or not isinstance(order, int) or order < 1):
        problems.append(f"order: must be a whole number from 1, not {order!r}")
    if not isinstance(extra, Mapping) or not all(isinstance(field, str) for field in extra):
        problems.append(f"extra: must map names to values, not {extra!r}")
    else:
        problems += [f"extra: {field} is an argument of its own" for field in extra if field in _FIELDS]
    if problems:
        raise InvalidRequest("; ".join(problems), problems=problems)
