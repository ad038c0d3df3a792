"""Send one claimed package: create, upload, add recipients, send; the journal entry is saved around each step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar

import attrs

from .._foreign import safe_text
from ..documents.resource import Documents
from ..errors import (
    ConfigurationError,
    DraftChanged,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    RequestTimeout,
    SigningError,
    TransportError,
)
from ..models import Document, Language, Recipient, Signing, SigningOrder
from ..recipients import Recipients
from ..reconcile import TrackedSigning, Tracker, Undecidable, was_sent
from ..signings import Signings, signing_path
from ..transport.call import Transport, log
from ..transport.retry import RetryPolicy
from ..worker_pool import Progress, Results
from .entry import DRAFT, SENDING, SENT, JournalEntry
from .package import Prepared

__all__ = ["Draft", "OnProgress", "Resources", "Sending", "Uploads"]

Created = TypeVar("Created", Document, Recipient)
OnProgress = Callable[[int, Progress], None]
"""Receives the number of a document in its package, and the progress of its upload."""

_MAX_ERROR = 1000
_NOT_UPLOADED = Progress(0, 1, 0, None)


class Resources:
    """The client's resources, as a dispatch uses them."""

    def __init__(self, transport: Transport, tracker: Tracker) -> None:
        once = Transport(transport.shared, attrs.evolve(transport.options, retry=RetryPolicy.none()))
        self.service: str = transport.shared.origin
        self.telemetry: bool = transport.options.telemetry
        self.tracker = tracker
        self.signings: Signings = Signings(transport, tracker)
        self.documents: Documents = Documents(transport, tracker)
        self.recipients: Recipients = Recipients(transport, tracker)
        self.read_once: Callable[[str], Awaitable[Signing]] = Signings(once, tracker).get
        self.redacted: Callable[[str], str] = transport.redacted
        self.max_pdf_bytes: int = transport.options.assumptions.max_pdf_bytes


class Uploads:
    """How a run uploads: ``concurrency`` documents at once over all packages, only one per package if ``ordered``."""

    def __init__(self, concurrency: int, *, ordered: bool) -> None:
        self.concurrency = concurrency
        self.ordered = ordered
        self.semaphore: asyncio.Semaphore = asyncio.Semaphore(concurrency)


@attrs.define(eq=False)
class Sending:
    """The sending of one claimed package."""

    _resources: Resources
    _package: Prepared
    _entry: JournalEntry
    _draft: Draft

    @property
    def abandoned(self) -> tuple[str, ...]:
        """The ids of the package's abandoned drafts at this service."""
        state = self._entry.state
        return tuple(state.abandoned) if state.service == self._resources.service else ()

    def known_signing(self) -> Signing | None:
        """Return the signing that the journal entry describes; None if it has no draft at this service."""
        state, fields = self._entry.state, self._package.fields
        if state.signing is None or state.service != self._resources.service:
            return None
        if state.content != self._package.content:
            return Signing(state.signing)
        order = fields["signing_order"]
        ids = [state.documents.get(str(number)) for number in range(len(self._package.documents))]
        names = [document.source.filename for document in self._package.documents]
        return Signing(
            state.signing,
            name=fields["name"],
            language=Language(fields["language"]),
            signing_order=None if order is None else SigningOrder(order),
            message=fields["message"],
            is_draft={DRAFT: True, SENDING: None, SENT: False}[state.status],
            documents=tuple(Document(id_, name) for id_, name in zip(ids, names, strict=True) if id_ is not None),
        )

    async def run(self) -> Signing:
        """Send the package, unless an earlier run has sent it, and return its signing."""
        try:
            return await self._resume()
        except BaseException as error:
            state = self._entry.state
            where = f"its signing is {state.signing}" if state.signing else "it has no draft"
            error.add_note(f"package {self._package.label}: {where}; status {state.status!r}")
            if state.abandoned:
                error.add_note(f"package {self._package.label}: abandoned drafts: {', '.join(state.abandoned)}")
            raise

    async def note_failure(self, error: Exception) -> None:
        """Save the error, if this run has saved anything, and log it."""
        text = self._resources.redacted(str(error))
        if self._entry.was_saved:
            self._entry.state.error = text[:_MAX_ERROR]
            await self._entry.save()
        log.warning("package %s was not sent: %s", self._package.label, text)

    async def _resume(self) -> Signing:
        """Continue where earlier runs ended."""
        state = self._entry.load()
        if state.service != self._resources.service:
            error = ConfigurationError(
                f"the journal holds this package for {state.service}; use another journal for {self._resources.service}"
            )
            # Other packages of the run may be unaffected.
            error.client_wide = False
            raise error
        if state.status == DRAFT:
            return await self._send_draft()
        if state.content != self._package.content:
            was = "was sent" if state.status == SENT else "may have been sent"
            changed = InvalidRequest(
                f"key: {self._package.key!r} names another package, which {was} as signing {state.signing}"
            )
            if state.status == SENDING:
                changed.effect = "unknown"
            raise changed
        if state.status == SENDING:
            return await self._resume_sending()
        log.debug("package %s was sent before, as signing %s", self._package.label, state.signing)
        self._draft.report_uploaded()
        known = self.known_signing()
        assert known is not None
        return known

    async def _send_draft(self) -> Signing:
        """Complete the draft and send it. If it might differ from the package, create and send a second draft."""
        state, draft = self._entry.state, self._draft
        state.error = None
        if state.content != self._package.content:
            draft.abandon("the package was changed")
            state.content = self._package.content
        elif state.is_ambiguous:
            draft.abandon("the outcome of one of its steps is unknown")
        elif not draft.is_in_order:
            draft.abandon("its documents are out of order")
        is_exact = await draft.complete(last=False)
        if not is_exact:
            draft.abandon("it may hold more or less than the package")
            is_exact = await draft.complete(last=True)
        if not is_exact:
            draft.abandon("it holds more or less than the package")
            raise DraftChanged(
                "two drafts held more or less than this package: another client is changing them; nothing was sent"
            )
        state.status = SENDING
        await self._entry.save()
        return await self._send()

    async def _resume_sending(self) -> Signing:
        """Send the draft that an earlier run began to send, unless it was sent."""
        signing = await self._resources.signings.find_sent(self._draft.id)
        if signing is not None:
            return await self._note_sent(signing)
        try:
            await self._check_resumed()
        except SigningError as error:
            # The journal entry stays unchanged: the earlier run's request may still send the draft.
            error.effect = "unknown"
            raise
        return await self._send()

    async def _check_resumed(self) -> None:
        """Raise `DraftChanged` if the draft, which an earlier run may send, does not hold exactly the package."""
        current = await self._resources.signings.get(self._draft.id)
        if current.is_draft and not await self._draft.is_exact(current):
            raise DraftChanged(
                f"draft {current.id} holds more or less than this package; it was not sent by this run", signing=current
            )

    async def _send(self) -> Signing:
        try:
            signing = await self._resources.signings.send_own(self._draft.id)
        except SigningError as error:
            if error.effect == "none":
                self._entry.state.status = DRAFT
            raise
        return await self._note_sent(signing or await self._read_sent())

    async def _note_sent(self, signing: Signing | None) -> Signing:
        state = self._entry.state
        state.status, state.error = SENT, None
        await self._entry.save()
        log.info("package %s was sent as signing %s", self._package.label, state.signing)
        self._draft.report_uploaded()
        if signing is None:
            signing = self.known_signing()
            assert signing is not None
        elif {document.id for document in signing.documents} - set(_known_ids(state.documents)):
            log.error("signing %s was sent with documents that are not of its package", state.signing)
        return signing

    async def _read_sent(self) -> Signing | None:
        """Return the signing that was sent; None if it can't be read."""
        try:
            signing = await self._resources.read_once(self._draft.id)
        except Exception as error:
            # The caller's own rate limiter may raise anything.
            text = self._resources.redacted(safe_text(error))
            log.warning("signing %s was sent but could not be read: %s", self._draft.id, text)
            return None
        # The service accepted the request: only a signing that is still a draft contradicts that.
        with suppress(Undecidable):
            if not was_sent(signing):
                return await self._resources.signings.verify_sent(self._draft.id)
        return signing


@attrs.define(eq=False)
class Draft:
    """The draft of one package."""

    _resources: Resources
    _package: Prepared
    _entry: JournalEntry
    _uploads: Uploads
    _on_progress: OnProgress
    _unconfirmed: list[tuple[dict[str, str | None], str, str]] = attrs.field(factory=list, init=False)
    """Ids that must not be saved yet: an earlier ambiguous request may still add to the draft."""

    @property
    def id(self) -> str:
        signing = self._entry.state.signing
        assert signing is not None
        return signing

    @property
    def tracked(self) -> TrackedSigning:
        """What the client knows about its own requests to the draft."""
        return self._resources.tracker.signing(signing_path(self.id))

    @property
    def is_in_order(self) -> bool:
        """Whether the missing documents can still be uploaded in order."""
        missing, count = self._missing_documents(), len(self._package.documents)
        return not self._uploads.ordered or missing == list(range(count - len(missing), count))

    def abandon(self, reason: str) -> None:
        """Abandon the draft: it stays at the service, unsent."""
        state = self._entry.state
        if state.signing is not None:
            log.warning("package %s: draft %s was abandoned: %s", self._package.label, state.signing, reason)
        state.abandon_draft()
        self._unconfirmed.clear()
        for number in range(len(self._package.documents)):
            self._on_progress(number, _NOT_UPLOADED)

    def report_uploaded(self, but: Iterable[int] = ()) -> None:
        """Report the documents, except those numbered in ``but``, as uploaded."""
        for number, document in enumerate(self._package.documents):
            if number not in but:
                self._on_progress(number, Progress(1, 1, document.size, document.size))

    async def complete(self, *, last: bool) -> bool:
        """Create the draft if there is none, and add what is missing; return whether it holds exactly the package.

        If the outcome of a step is unknown, return False. Raise instead if this is the ``last`` draft to be tried, the
        deadline passed, or the failure is not transient. The error's ``effect`` is ``"none"``: an unsent draft sends
        no notifications.
        """
        state, resumed = self._entry.state, self._entry.state.signing is not None
        missing = self._missing_documents()
        if resumed and (missing or len(state.recipients) < len(self._package.recipients)):
            self._note_known_recipients()
            if not await self._is_unchanged():
                return False
        if not resumed:
            await self._create()
        try:
            await self._upload_all(missing)
            await self._add_recipients()
            if state.is_ambiguous:
                raise OutcomeUnknown("a lost request may still add to the draft")
        except SigningError as error:
            if error.effect == "none":
                raise
            unsent = _unsent(error)
            if last or isinstance(error, TimeoutError) or not unsent.transient:
                raise unsent from error
            return False
        return not (resumed or self.tracked.ambiguities.total()) or await self._is_unchanged()

    def _note_known_recipients(self) -> None:
        """Keep recipients of an earlier run from being taken for the effect of this run's requests."""
        self.tracked.recipients.ids.update(_known_ids(self._entry.state.recipients))

    async def _create(self) -> None:
        await self._entry.save()
        try:
            signing = await self._resources.signings.create(**self._package.fields)
        except SigningError as error:
            error.effect = "none"
            raise
        self._entry.state.signing = signing.id
        log.debug("package %s: draft %s was created", self._package.label, signing.id)

    def _missing_documents(self) -> list[int]:
        ids = self._entry.state.documents
        return [number for number in range(len(self._package.documents)) if ids.get(str(number)) is None]

    async def _upload_all(self, missing: list[int]) -> None:
        self.report_uploaded(but=missing)
        if missing and not self._uploads.ordered:
            await self._upload_batch(missing)
            return
        for number in missing:
            await self._upload_batch([number])

    async def _upload_batch(self, numbers: list[int]) -> None:
        """Upload documents concurrently."""
        ids = self._entry.state.documents
        ids.update((str(number), None) for number in numbers)
        await self._entry.save()
        not_begun = set(numbers)

        async def upload(number: int) -> None:
            async with self._uploads.semaphore:
                not_begun.discard(number)
                await self._step(ids, number, partial(self._upload, number))
            # The next step saves the last id.
            if None in ids.values():
                await self._entry.save()

        try:
            async with Results(numbers, upload, min(len(numbers), self._uploads.concurrency)) as results:
                async for _ in results:
                    pass
        except Exception:
            for number in not_begun:
                del ids[str(number)]
            raise

    async def _upload(self, number: int) -> Document:
        document = self._package.documents[number]
        await document.check_unchanged()
        return await self._resources.documents.upload(
            self.id, document.source, on_progress=partial(self._on_progress, number), preflight=False
        )

    async def _add_recipients(self) -> None:
        ids = self._entry.state.recipients
        for number, fields in enumerate(self._package.recipients):
            if ids.get(str(number)) is None:
                ids[str(number)] = None
                await self._entry.save()
                await self._step(ids, number, partial(self._resources.recipients.add, self.id, **fields))

    async def _step(self, ids: dict[str, str | None], number: int, call: Callable[[], Awaitable[Created]]) -> None:
        """Make a call that adds to the draft, and note the id of the created record."""
        try:
            created = await call()
        except SigningError as error:
            if error.effect == "none" and not self.tracked.may_change_late:
                del ids[str(number)]
            raise
        self._unconfirmed.append((ids, str(number), created.id))
        # While an earlier request may still take effect, ids stay None, so that another run abandons the draft.
        if not self.tracked.may_change_late:
            for target, key, id_ in self._unconfirmed:
                target[key] = id_
            self._unconfirmed.clear()

    async def _is_unchanged(self) -> bool:
        """Return whether the draft exists and holds exactly the known ids.

        Raise `OutcomeUnknown` if another client may have sent it.
        """
        try:
            signing = await self._resources.signings.get(self.id)
            if was_sent(signing):
                raise OutcomeUnknown("another client has sent the draft", known=[signing])
            return await self.is_exact(signing)
        except NotFound:
            return False
        except Undecidable as error:
            raise OutcomeUnknown(f"another client may have sent the draft: {error}", known=error.known) from None

    async def is_exact(self, signing: Signing) -> bool:
        """Return whether the signing holds exactly the known documents and recipients."""
        recipients = [recipient.id async for recipient in self._resources.recipients.list(self.id)]
        documents = [document.id for document in signing.documents]
        state = self._entry.state
        return sorted(documents) == _known_ids(state.documents) and sorted(recipients) == _known_ids(state.recipients)


def _unsent(error: SigningError) -> TransportError:
    """Return the error for a step whose outcome is unknown: the next run sends another draft.

    It is transient if the request itself failed transiently. A failed read does not matter: a new draft needs none.
    """
    kind = RequestTimeout if isinstance(error, TimeoutError) else TransportError
    is_transient = error.after_transient if isinstance(error, OutcomeUnknown) else error.transient
    is_transient = is_transient and not error.fatal
    unsent = kind(f"{error}; nothing was sent{'; dispatch again' if is_transient else ''}")
    unsent.transient, unsent.client_wide = is_transient, error.client_wide
    return unsent


def _known_ids(ids: Mapping[str, str | None]) -> list[str]:
    return sorted(id_ for id_ in ids.values() if id_ is not None)
