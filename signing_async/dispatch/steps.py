"""The steps of sending one package: create, upload, add recipients, send; each written to the journal around it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import attrs
from attrs import validators

from ..documents.resource import Documents
from ..errors import (
    ConfigurationError,
    DraftChanged,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    SigningError,
)
from ..models import Document, Language, Recipient, Signing, SigningOrder
from ..recipients import Recipients
from ..reconcile import TrackedSigning, Tracker
from ..signings import Signings, signing_path
from ..transport.call import Transport, log
from ..transport.retry import RetryPolicy
from ..worker_pool import Progress, Results
from .journal import Claim, ClaimLost, Journal, JournalError
from .package import Prepared

__all__ = ["Room", "Sending", "Steps", "journaled"]

T = TypeVar("T")
Made = TypeVar("Made", Document, Recipient)
Told = Callable[[int, Progress], None]

_DRAFT, _SENDING, _SENT = "draft", "sending", "sent"
_LONGEST_ERROR = 1000
_NOTHING = Progress(0, 1, 0, None)


async def journaled(step: Awaitable[T]) -> T:
    """A step of any journal: whatever else goes wrong in it is a `JournalError`."""
    try:
        return await step
    except (ClaimLost, JournalError):
        raise
    except Exception as error:
        raise JournalError(f"the journal failed: {type(error).__name__}: {error}") from error


# What the journal holds


_ids = validators.deep_mapping(
    validators.matches_re(r"\d+"),
    validators.optional(validators.instance_of(str)),
    validators.instance_of(dict),
)


@attrs.define
class _State:
    """What is known of a package. An id that is None belongs to a step that was begun."""

    content: str = attrs.field(validator=validators.instance_of(str))
    service: str = attrs.field(validator=validators.instance_of(str))
    status: str = attrs.field(default=_DRAFT, validator=validators.in_((_DRAFT, _SENDING, _SENT)))
    signing: str | None = attrs.field(default=None, validator=validators.optional(validators.instance_of(str)))
    documents: dict[str, str | None] = attrs.field(factory=dict, validator=_ids)
    recipients: dict[str, str | None] = attrs.field(factory=dict, validator=_ids)
    error: str | None = attrs.field(default=None, validator=validators.optional(validators.instance_of(str)))
    abandoned: list[str] = attrs.field(
        factory=list, validator=validators.deep_iterable(validators.instance_of(str), validators.instance_of(list))
    )

    @property
    def in_doubt(self) -> bool:
        """Whether a step was begun whose outcome is not known."""
        return None in self.documents.values() or None in self.recipients.values()

    def start_over(self) -> None:
        """Forget the draft: nobody will send it any more."""
        if self.signing is not None:
            self.abandoned.append(self.signing)
        self.signing, self.documents, self.recipients = None, {}, {}

    def text(self) -> str:
        return json.dumps(attrs.asdict(self))


def _read(claim: Claim, content: str, service: str) -> _State:
    if claim.state is None:
        return _State(content, service)
    with suppress(TypeError, ValueError, RecursionError):
        state = _State(**json.loads(claim.state))
        if state.status == _DRAFT or state.signing:
            return state
    raise OutcomeUnknown("what the journal holds for this package cannot be read: it is not known whether it was sent")


class Steps:
    """What a client does to send a package."""

    def __init__(self, transport: Transport, tracker: Tracker) -> None:
        once = Transport(transport.shared, attrs.evolve(transport.options, retry=RetryPolicy.none()))
        self.service: str = transport.shared.origin
        self.tracker = tracker
        self.signings: Signings = Signings(transport, tracker)
        self.documents: Documents = Documents(transport, tracker)
        self.recipients: Recipients = Recipients(transport, tracker)
        self.read_once: Callable[[str], Awaitable[Signing]] = Signings(once, tracker).get
        self.redacted: Callable[[str], str] = transport.redacted
        self.most: int = transport.options.assumptions.max_pdf_bytes


class Room:
    """How many uploads there may be at once, of however many packages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn: asyncio.Semaphore = asyncio.Semaphore(size)


class Sending:
    """One package, claimed. After `ClaimLost` nothing of it may be done any more, and nothing was done wrong."""

    def __init__(
        self, steps: Steps, prepared: Prepared, journal: Journal, claim: Claim, room: Room, tell: Told
    ) -> None:
        self._steps = steps
        self._package = prepared
        self._journal = journal
        self._claim = claim
        self._room = room
        self._tell = tell
        self._state = _State(prepared.content, steps.service)
        self._unconfirmed: list[tuple[dict[str, str | None], str, str]] = []
        self._changes = self._saved = 0
        self._turn = asyncio.Lock()

    @property
    def shown(self) -> str:
        """The package's name for people."""
        key = self._package.key
        return repr(key if key != self._package.content else key[:12])

    def known(self) -> Signing | None:
        """The signing as far as the journal knows it."""
        state, fields = self._state, self._package.fields
        if state.signing is None or state.service != self._steps.service:
            return None
        if state.content != self._package.content:
            return Signing(state.signing)
        order = fields["signing_order"]
        held = enumerate(self._package.documents)
        names = {state.documents.get(str(number)): kept.source.filename for number, kept in held}
        return Signing(
            state.signing,
            name=fields["name"],
            language=Language(fields["language"]),
            signing_order=None if order is None else SigningOrder(order),
            message=fields["message"],
            is_draft={_DRAFT: True, _SENDING: None, _SENT: False}[state.status],
            documents=tuple(Document(one, name) for one, name in names.items() if one is not None),
        )

    async def carry_out(self) -> Signing:
        """Send the package, or find that it was sent."""
        try:
            return await self._go_on()
        except BaseException as error:
            state = self._state
            where = f"its signing is {state.signing}" if state.signing else "it has no draft"
            error.add_note(f"package {self.shown}: {where}; status {state.status!r}")
            raise

    async def failed(self, error: Exception) -> None:
        """Write down what is known after a failure."""
        if self._changes:
            self._state.error = self._steps.redacted(str(error))[:_LONGEST_ERROR]
            await self._save()
        log.warning("package %s was not sent: %s", self.shown, self._steps.redacted(str(error)))

    async def _go_on(self) -> Signing:
        state = self._state = _read(self._claim, self._package.content, self._steps.service)
        if state.service != self._steps.service:
            raise ConfigurationError(
                f"the journal knows this package at {state.service}: it needs another journal for {self._steps.service}"
            )
        if state.status == _DRAFT:
            return await self._send_a_draft()
        if state.content != self._package.content:
            was = "was sent" if state.status == _SENT else "may have been sent"
            raise InvalidRequest(
                f"key: {self._package.key!r} names another package, which {was} as signing {state.signing}"
            )
        if state.status == _SENDING:
            return await self._resume_sending()
        log.debug("package %s was sent before, as signing %s", self.shown, state.signing)
        self._tell_done()
        known = self.known()
        assert known is not None
        return known

    # A draft, and what it holds

    async def _send_a_draft(self) -> Signing:
        state = self._state
        state.error = None
        if state.content != self._package.content:
            self._abandon("the package was changed")
            state.content = self._package.content
        elif state.in_doubt:
            self._abandon("it is not known what it holds")
        is_exact = await self._fill(last=False)
        if not is_exact:
            self._abandon("it is not sure that it holds just what it should")
            is_exact = await self._fill(last=True)
        if not is_exact:
            self._abandon("it does not hold just what it should")
            raise DraftChanged(
                "two drafts held more or less than this package: somebody else changes them; nothing was sent"
            )
        state.status = _SENDING
        await self._save()
        return await self._send()

    def _abandon(self, why: str) -> None:
        """Nobody sends this draft any more: for that it would have to be the one in the journal."""
        if self._state.signing is not None:
            log.warning("package %s: the draft %s is abandoned: %s", self.shown, self._state.signing, why)
        self._state.start_over()
        self._unconfirmed.clear()
        for number in range(len(self._package.documents)):
            self._tell(number, _NOTHING)

    async def _fill(self, *, last: bool) -> bool:
        """Have a draft with all that belongs into it; whether it is sure that it holds just that.

        Where it is not, another draft may do: unless this is the ``last``, an unknown outcome is no error.
        """
        state, resumed = self._state, self._state.signing is not None
        missing = [number for number in range(len(self._package.documents)) if state.documents.get(str(number)) is None]
        if resumed and (missing or len(state.recipients) < len(self._package.recipients)):
            self._remember()
            if not await self._is_right():
                return False
        if not resumed:
            await self._create()
        try:
            await self._upload_all(missing)
            await self._add_all()
        except SigningError as error:
            if last or error.effect == "none" or isinstance(error, TimeoutError):
                raise
            return False
        if state.in_doubt:
            return False
        return not (resumed or self._tracked.ambiguities.total()) or await self._is_right()

    def _remember(self) -> None:
        """What an earlier run has added must not be taken for what this one adds."""
        ids = self._state.recipients.values()
        self._tracked.recipients.ids.update(one for one in ids if one is not None)

    async def _create(self) -> None:
        await self._save()
        signing = await self._steps.signings.create(**self._package.fields)
        self._state.signing = signing.id
        log.debug("package %s: the draft %s was created", self.shown, signing.id)

    async def _upload_all(self, missing: list[int]) -> None:
        documents = self._state.documents
        self._tell_done(missing)
        if not missing:
            return
        documents.update((str(number), None) for number in missing)
        await self._save()
        waiting = set(missing)

        async def upload(number: int) -> None:
            async with self._room.turn:
                waiting.discard(number)
                await self._step(documents, number, partial(self._upload, number))
            # The last one is written down with what follows.
            if None in documents.values():
                await self._save()

        try:
            async with Results(missing, upload, min(len(missing), self._room.size)) as uploads:
                async for _ in uploads:
                    pass
        except Exception:
            for number in waiting:
                del documents[str(number)]
            raise

    def _tell_done(self, but: Iterable[int] = ()) -> None:
        for number, kept in enumerate(self._package.documents):
            if number not in but:
                self._tell(number, Progress(1, 1, kept.size, kept.size))

    async def _upload(self, number: int) -> Document:
        kept = self._package.documents[number]
        await kept.check_again()
        return await self._steps.documents.upload(
            self._id, kept.source, on_progress=partial(self._tell, number), preflight=False
        )

    async def _add_all(self) -> None:
        recipients = self._state.recipients
        for number, fields in enumerate(self._package.recipients):
            if recipients.get(str(number)) is None:
                recipients[str(number)] = None
                await self._save()
                add = partial(self._steps.recipients.add, self._id, **fields)
                await self._step(recipients, number, add)

    async def _step(self, ids: dict[str, str | None], number: int, call: Callable[[], Awaitable[Made]]) -> None:
        try:
            made = await call()
        except SigningError as error:
            if error.effect == "none" and not self._tracked.may_change_late:
                del ids[str(number)]
            raise
        self._unconfirmed.append((ids, str(number), made.id))
        # While an earlier request may still take effect, ids stay unknown: a draft that is left so is abandoned.
        if not self._tracked.may_change_late:
            for each, name, identity in self._unconfirmed:
                each[name] = identity
            self._unconfirmed.clear()

    async def _is_right(self) -> bool:
        """Whether the draft is still one, and holds just what it should."""
        try:
            signing = await self._steps.signings.get(self._id)
            if signing.is_draft is False:
                raise OutcomeUnknown("somebody else has sent or cancelled the draft", known=[signing])
            return await self._is_exact(signing)
        except NotFound:
            return False

    async def _is_exact(self, signing: Signing) -> bool:
        """Whether it holds the documents and recipients that it should, and no others."""
        recipients = [recipient.id async for recipient in self._steps.recipients.list(self._id)]
        documents = [document.id for document in signing.documents]
        state = self._state
        return sorted(documents) == _known(state.documents) and sorted(recipients) == _known(state.recipients)

    @property
    def _tracked(self) -> TrackedSigning:
        return self._steps.tracker.signing(signing_path(self._id))

    @property
    def _id(self) -> str:
        assert self._state.signing is not None
        return self._state.signing

    # The sending

    async def _resume_sending(self) -> Signing:
        """Send the draft that an earlier run began to send, unless it was sent."""
        signing = await self._steps.signings.find_sent(self._id)
        if signing is not None:
            return await self._record_sent(signing)
        draft = await self._steps.signings.get(self._id)
        if draft.is_draft and not await self._is_exact(draft):
            words = f"the draft {self._id} holds more or less than this package; it was not sent"
            raise DraftChanged(words, signing=draft)
        return await self._send()

    async def _send(self) -> Signing:
        try:
            signing = await self._steps.signings.send_own(self._id)
        except SigningError as error:
            if error.effect == "none" and not self._tracked.may_have_been_sent:
                self._state.status = _DRAFT
            raise
        return await self._record_sent(signing or await self._read_back())

    async def _record_sent(self, signing: Signing | None) -> Signing:
        self._state.status, self._state.error = _SENT, None
        await self._save()
        log.info("package %s was sent as signing %s", self.shown, self._id)
        self._tell_done()
        if signing is None:
            signing = self.known()
            assert signing is not None
        elif {document.id for document in signing.documents} - set(_known(self._state.documents)):
            log.error("signing %s was sent with documents that are not of its package", self._id)
        return signing

    async def _read_back(self) -> Signing | None:
        """Return the signing that was sent; None if it cannot be read."""
        try:
            signing = await self._steps.read_once(self._id)
        except SigningError as error:
            log.warning("signing %s was sent, and could not be read: %s", self._id, self._steps.redacted(str(error)))
            return None
        return await self._steps.signings.verify_sent(self._id) if signing.is_draft else signing

    async def _save(self) -> None:
        """Write down what is known now. What others of this package save at the same time is written with it."""
        self._changes += 1
        mine = self._changes
        async with self._turn:
            if self._saved >= mine:
                return
            covered = self._changes
            await journaled(self._journal.write(self._claim, self._state.text()))
            self._saved = covered


def _known(ids: dict[str, str | None]) -> list[str]:
    return sorted(one for one in ids.values() if one is not None)
