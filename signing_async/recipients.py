"""Add, list and remind the recipients of a signing."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, overload

import attrs

from . import _checks
from .errors import InvalidRequest, SigningError
from .models import NewRecipient, Recipient, Signing, SigningMethod
from .pagination import Pager
from .reconcile import Creation, Ledger, Read, RecipientMatch
from .signings import signing_path
from .transport import urls, wire
from .transport.call import Transport
from .transport.decode import Unreadable, record_decoder, timestamp
from .transport.operation import Operation
from .transport.retry import Safety

__all__ = ["Recipients", "RemindResult", "check_recipient"]

_ADD, _LIST = "recipients.add", "recipients.list"
_FIELDS = ("email", "first_name", "last_name", "signing_method", "order")


@attrs.frozen
class RemindResult:
    """The result of reminding one recipient: ``error`` is None if the service accepted the request."""

    recipient: Recipient
    error: SigningError | None = None


class Recipients:
    """``client.recipients``."""

    def __init__(self, transport: Transport, ledger: Ledger) -> None:
        self._transport = transport
        self._ledger = ledger

    @overload
    async def add(self, signing_id: str | Signing, recipient: NewRecipient) -> Recipient: ...

    @overload
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
    ) -> Recipient: ...

    async def add(
        self,
        signing_id: str | Signing,
        recipient: NewRecipient | None = None,
        *,
        email: str | None = None,
        first_name: str | None = None,
        last_name: str | None = None,
        signing_method: SigningMethod | str = SigningMethod.EMAIL,
        order: int | None = None,
        extra: Mapping[str, Any] = {},
    ) -> Recipient:
        """Add a recipient to a draft, once: before the request is repeated, the recipients are read.

        The recipient is recognized by its e-mail address and its other fields, ignoring case and punctuation. If a new
        recipient has the address but differs in another field, or the name but another address, `OutcomeUnknown` is
        raised. Recipients that this client added before do not count. Calls for the same address run one after another.
        ``extra`` holds fields that the specification lacks, such as a personal number for BankID. ::

            await client.recipients.add(signing, email="anna@example.com", first_name="Anna", last_name="Berg",
                                        signing_method="bankid", order=1, extra={"personal_number": "199001011234"})
            await client.recipients.add(signing, NewRecipient("bo@example.com", "Bo", "Ek"))
        """
        fields: Any = (email, first_name, last_name, signing_method, order, extra)
        if recipient is None:
            recipient = NewRecipient(*fields)
        elif not isinstance(recipient, NewRecipient):
            raise InvalidRequest(
                f"recipient: must be a NewRecipient, got {type(recipient).__name__}; pass an address as email="
            )
        elif email is not None or NewRecipient("", *fields[1:]) != NewRecipient(""):
            raise InvalidRequest("recipient: pass a NewRecipient or its fields, not both")
        named = {name: getattr(recipient, name) for name in _FIELDS}
        extra = recipient.extra
        check_recipient(named, extra)
        content = _encode({name: value for name, value in named.items() if value is not None} | dict(extra))
        signing = self._ledger.signing(signing_path(signing_id))

        async def list_all(read: Read) -> tuple[Recipient, ...]:
            return tuple([recipient async for recipient in self.list(signing_id).through(read)])

        match = RecipientMatch(named, extra)
        deadline = self._transport.deadline()
        creation = Creation(_ADD, deadline, signing.additions, signing.recipients, match, list_all)
        operation = Operation(
            _ADD,
            "POST",
            _folder(signing_id),
            Safety.RECONCILED,
            decode=record_decoder(Recipient, self._transport.options.assumptions),
            effect=creation,
            body=lambda: wire.bytes_body(content, "application/json"),
        )
        async with creation:
            added = await self._transport.call(operation, deadline)
            creation.note_created(added)
            return self._finish(added)

    async def remind(self, signing_id: str | Signing, recipient_id: str | Recipient) -> None:
        """Send a reminder.

        The request is repeated after a 5xx, as the specification says. After a lost response `OutcomeUnknown` is
        raised instead: a repeated request could remind a person twice.
        """
        path = f"{_folder(signing_id)}/{urls.segment('recipient_id', recipient_id)}/remind"
        await self._transport.call(Operation("recipients.remind", "POST", path, Safety.REMIND, body=wire.bytes_body))

    async def remind_pending(
        self, signing_id: str | Signing, pending: Iterable[Recipient] | None = None
    ) -> builtins.list[RemindResult]:
        """Remind all recipients who have not finished, one after another. A failure does not stop the others.

        If no reminder can succeed any more (the client is closed, the token is rejected for good), every remaining
        recipient gets that error and nothing is sent. If the recipients cannot be listed, no reminder is sent. With
        ``pending``, the result of `pending`, the recipients are not listed again.
        """
        from .bulk import copy_unsent

        results = []
        fatal: SigningError | None = None
        for recipient in await self.pending(signing_id) if pending is None else pending:
            error = None if fatal is None else copy_unsent(fatal)
            if error is None:
                try:
                    await self.remind(signing_id, recipient)
                except SigningError as raised:
                    error = raised
                    if error.fatal:
                        fatal = error
            results.append(RemindResult(recipient, error))
        return results

    async def pending(self, signing_id: str | Signing) -> builtins.list[Recipient]:
        """Return the recipients who have not finished."""
        return [recipient async for recipient in self.list(signing_id) if not self._done(recipient)]

    def list(self, signing_id: str | Signing, *, prefetch: bool = True) -> Pager[Recipient]:
        """List the recipients of a signing; see `Pager`."""
        return Pager(self._transport, _LIST, _folder(signing_id), Recipient, prefetch=prefetch, finish=self._finish)

    def _done(self, recipient: Recipient) -> Any:
        """Return the first field that marks the recipient as finished, or None."""
        fields = self._transport.options.assumptions.recipient_done_fields
        return next((value for value in map(recipient.extra.get, fields) if value), None)

    def _finish(self, recipient: Recipient) -> Recipient:
        """Return the recipient with ``completed_at``."""
        with suppress(Unreadable):
            if (completed_at := timestamp(self._done(recipient))) is not None:
                return attrs.evolve(recipient, completed_at=completed_at)
        return recipient


def _folder(signing_id: str | Signing) -> str:
    return f"{signing_path(signing_id)}/recipients"


def _encode(fields: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"extra: cannot encode as JSON: {error}") from None


def check_recipient(named: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Raise one `InvalidRequest` with all problems of a new recipient."""
    problems = []
    email, order = named["email"], named["order"]
    if not isinstance(email, str) or "@" not in email.strip("@ \t\r\n") or "@@" in email:
        problems.append(f"email: must be an e-mail address, got {email!r}")
    for field in ("first_name", "last_name", "signing_method"):
        if named[field] is not None and not (_checks.is_text(named[field]) and named[field].strip()):
            problems.append(f"{field}: {_checks.text_rule(named[field])}, got {named[field]!r}")
    if order is not None and not (_checks.is_integer(order) and order >= 1):
        problems.append(f"order: must be an integer of at least 1, got {order!r}")
    if not isinstance(extra, Mapping) or not all(isinstance(field, str) for field in extra):
        problems.append(f"extra: must be a mapping with string keys, got {extra!r}")
    else:
        problems += [f"extra: pass {field} as a separate argument" for field in extra if field in _FIELDS]
    if problems:
        raise InvalidRequest("; ".join(problems), problems=problems)
