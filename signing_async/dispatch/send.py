"""Send one claimed package: create, upload, add recipients, compare, send; the entry is saved before each request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

import attrs

from .._api import Api
from .._foreign import safe_text
from ..bulk import Progress, Results
from ..errors import (
    ConfigurationError,
    DraftChanged,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    RequestTimeout,
    SigningError,
    TransportError,
    amended,
)
from ..models import Document, Recipient, Signing
from ..reconcile import Undecidable, was_sent
from ..signings import Signings, sending
from ..transport.call import Transport
from ..transport.operation import Operation, log
from ..transport.retry import RetryPolicy
from .entry import DRAFT, SENDING, SENT, JournalEntry
from .package import Prepared

__all__ = ["OnProgress", "Uploads", "find_sent", "send_own", "send_package", "verify_sent"]

OnProgress = Callable[[int, Progress], None]
"""Receives the number of a document in its package, and the progress of its upload."""

_NOT_UPLOADED = Progress(0, 1, 0, None)


class Uploads:
    """How a run uploads: ``concurrency`` documents at once over all packages, only one per package if ``ordered``."""

    def __init__(self, concurrency: int, *, ordered: bool) -> None:
        self.semaphore: asyncio.Semaphore = asyncio.Semaphore(concurrency)
        self.ordered = ordered
        self.per_package: int = 1 if ordered else concurrency


async def send_package(
    api: Api, package: Prepared, entry: JournalEntry, uploads: Uploads, on_progress: OnProgress
) -> tuple[Signing, bool]:
    """Send a package, unless an earlier run has sent it; return its signing, and whether an earlier run sent it."""
    draft, state = _Draft(api, package, entry, uploads, on_progress), entry.load()
    if state.service != api.origin:
        raise ConfigurationError(
            f"the journal holds this package for {state.service}; use another journal for {api.origin}",
            client_wide=False,  # other packages of the run may be unaffected
        )
    if state.content != package.content and state.status != DRAFT:
        was = "was sent" if state.status == SENT else "may have been sent"
        raise InvalidRequest(
            f"key: {package.key!r} names another package, which {was} as signing {state.signing}",
            effect="none" if state.status == SENT else "unknown",
        )
    if state.status == SENT:
        log.debug("package %s was sent before, as signing %s", package.label, state.signing)
        draft.report_uploaded()
        return entry.known_signing(), True
    if state.status == SENDING:
        found = await find_sent(api, draft.id)
        if found is not None:
            return await draft.note_sent(found), True
        try:
            await draft.check_exact()
        except SigningError as error:
            # The journal entry stays unchanged: the earlier run's request may still send the draft.
            raise amended(error, effect="unknown").with_traceback(error.__traceback__) from error.__cause__
    else:
        await draft.make_exact()
        state.status = SENDING
        await entry.save()
    try:
        signing = await send_own(api, draft.id)
    except SigningError as error:
        if error.effect == "none":
            state.status = DRAFT
        raise
    return await draft.note_sent(signing or await _read_sent(api, draft.id)), False


@attrs.define(eq=False)
class _Draft:
    """The draft of one package."""

    _api: Api
    _package: Prepared
    _entry: JournalEntry
    _uploads: Uploads
    _on_progress: OnProgress

    @property
    def id(self) -> str:
        signing = self._entry.state.signing
        assert signing is not None
        return signing

    async def make_exact(self) -> None:
        """Complete the draft. If it might differ from the package, replace it by a second draft."""
        state = self._entry.state
        state.error = None
        if state.signing is not None:
            self._check_draft()
        state.content = self._package.content
        if await self._complete(last=False):
            return
        self._abandon("it may hold more or less than the package")
        if not await self._complete(last=True):
            self._abandon("it holds more or less than the package")
            raise DraftChanged(
                "two drafts held more or less than this package: another client is changing them; nothing was sent"
            )

    def _check_draft(self) -> None:
        """Abandon the draft of an earlier run if it cannot become what is to be sent."""
        state = self._entry.state
        if state.content != self._package.content:
            self._abandon("the package was changed")
        elif state.is_ambiguous:
            self._abandon("the outcome of one of its steps is unknown")
        elif self._uploads.ordered and state.documents.keys() != set(map(str, range(len(state.documents)))):
            self._abandon("its documents are out of order")

    def _abandon(self, reason: str) -> None:
        """Abandon the draft: it stays at the service, unsent."""
        log.warning("package %s: draft %s was abandoned: %s", self._package.label, self.id, reason)
        self._entry.state.abandon_draft()
        for number in range(len(self._package.documents)):
            self._on_progress(number, _NOT_UPLOADED)

    def report_uploaded(self, but: Iterable[int] = ()) -> None:
        """Report the documents, except those numbered in ``but``, as uploaded."""
        for number, document in enumerate(self._package.documents):
            if number not in but:
                self._on_progress(number, Progress(1, 1, document.size, document.size))

    async def _complete(self, *, last: bool) -> bool:
        """Create the draft unless it exists, add missing documents and recipients; return whether it is exact.

        If the outcome of a step is unknown, return False. Raise instead if this is the ``last`` draft to be tried, the
        deadline passed, or the failure is not transient. The error's ``effect`` is ``"none"``: an unsent draft sends
        no notifications.
        """
        state, resumed = self._entry.state, self._entry.state.signing is not None
        missing = self._missing_documents()
        if not resumed:
            await self._create()
        elif missing or len(state.recipients) < len(self._package.recipients):
            # Recipients of an earlier run are not the effect of this run's requests.
            self._entry.ledger.recipients.ids.update(_known_ids(state.recipients))
            if not await self._is_unchanged():
                return False
        try:
            self.report_uploaded(but=missing)
            # After a failure no more uploads are begun, and those in progress finish.
            async with Results(missing, self._upload, self._uploads.per_package) as uploads:
                async for _ in uploads:
                    pass
            for number, fields in enumerate(self._package.recipients):
                if str(number) not in state.recipients:
                    await self._step(state.recipients, number, partial(self._api.recipients.add, self.id, **fields))
            if state.is_ambiguous or self._entry.ledger.is_tainted:
                raise OutcomeUnknown("a lost request may still add to the draft")
        except SigningError as error:
            if error.effect == "none":
                raise
            unsent = _unsent(error)
            if last or isinstance(error, TimeoutError) or not unsent.transient:
                raise unsent from error
            return False
        return not (resumed or self._entry.ledger.additions.total()) or await self._is_unchanged()

    async def _create(self) -> None:
        await self._entry.save()
        try:
            signing = await self._api.signings.create(**self._package.fields)
        except SigningError as error:
            raise amended(error, effect="none").with_traceback(error.__traceback__) from error.__cause__
        self._entry.state.signing = signing.id
        log.debug("package %s: draft %s was created", self._package.label, signing.id)

    def _missing_documents(self) -> list[int]:
        ids = self._entry.state.documents
        return [number for number in range(len(self._package.documents)) if ids.get(str(number)) is None]

    async def _upload(self, number: int) -> None:
        source, report = self._package.documents[number].source, partial(self._on_progress, number)
        upload = partial(self._api.documents.upload, self.id, source, on_progress=report, preflight=False)
        async with self._uploads.semaphore:
            await self._step(self._entry.state.documents, number, upload)

    async def _step(
        self, ids: dict[str, str | None], number: int, call: Callable[[], Awaitable[Document | Recipient]]
    ) -> None:
        """Make a call that adds to the draft. Save that it begins, and note the id of the created record."""
        ids[str(number)] = None
        await self._entry.save()
        try:
            ids[str(number)] = (await call()).id
        except SigningError as error:
            if error.effect == "none" and not self._entry.ledger.is_tainted:
                del ids[str(number)]
            raise

    async def _is_unchanged(self) -> bool:
        """Return whether the draft exists and holds exactly the known ids.

        Raise `OutcomeUnknown` if another client may have sent it.
        """
        try:
            signing = await self._api.signings.get(self.id)
            if was_sent(signing):
                raise OutcomeUnknown("another client has sent the draft", known=[signing])
            return await self._holds_known_ids(signing)
        except NotFound:
            return False
        except Undecidable as error:
            raise OutcomeUnknown(f"another client may have sent the draft: {error}", known=error.known) from None

    async def check_exact(self) -> None:
        """Raise `DraftChanged` if the draft, which an earlier run may send, does not hold exactly the package."""
        current = await self._api.signings.get(self.id)
        if current.is_draft and not await self._holds_known_ids(current):
            raise DraftChanged(
                f"draft {current.id} holds more or less than this package; it was not sent by this run", signing=current
            )

    async def _holds_known_ids(self, signing: Signing) -> bool:
        recipients = [recipient.id async for recipient in self._api.recipients.list(self.id)]
        documents = [document.id for document in signing.documents]
        state = self._entry.state
        return sorted(documents) == _known_ids(state.documents) and sorted(recipients) == _known_ids(state.recipients)

    async def note_sent(self, signing: Signing | None) -> Signing:
        """Save that the draft was sent; return the signing, or what is known of it if it could not be read."""
        state = self._entry.state
        state.status, state.error = SENT, None
        await self._entry.save()
        log.info("package %s was sent as signing %s", self._package.label, state.signing)
        self.report_uploaded()
        if signing is None:
            return self._entry.known_signing()
        if {document.id for document in signing.documents} - set(_known_ids(state.documents)):
            log.error("signing %s was sent with documents that are not of its package", state.signing)
        return signing


# The send request


async def send_own(api: Api, signing_id: str) -> Signing | None:
    """Send a draft that only the caller sends; see `Sent`. Return the signing if it was read."""
    return await api.transport.call(_sending(api, signing_id, is_own=True))


async def verify_sent(api: Api, signing_id: str) -> Signing | None:
    """After a successful send, read until the signing is not a draft; raise `OutcomeUnknown` if it stays one."""
    return await api.transport.confirm_effect(_sending(api, signing_id), None)


async def find_sent(api: Api, signing_id: str) -> Signing | None:
    """Read until the signing is no longer a draft; None if it still is one after a lost send's settle time.

    Raises `OutcomeUnknown` if the service does not tell, or cannot be read.
    """
    found = await api.transport.find_effect(_sending(api, signing_id))
    return None if found is None else found.value


def _sending(api: Api, signing_id: str, *, is_own: bool = False) -> Operation[Signing | None]:
    return sending(signing_id, api.ledger, api.transport.options.assumptions, is_own=is_own)


async def _read_sent(api: Api, signing_id: str) -> Signing | None:
    """Return a signing that the service accepted to send; None if it can't be read."""
    options = attrs.evolve(api.transport.options, retry=RetryPolicy.none())
    try:
        signing = await Signings(Transport(api.transport.shared, options), api.ledger).get(signing_id)
    except Exception as error:
        # The caller's own rate limiter may raise anything.
        text = api.transport.redacted(safe_text(error))
        log.warning("signing %s was sent but could not be read: %s", signing_id, text)
        return None
    # Only a signing that is still a draft contradicts the response.
    with suppress(Undecidable):
        if not was_sent(signing):
            return await verify_sent(api, signing_id)
    return signing


def _unsent(error: SigningError) -> TransportError:
    """Return the error for a step whose outcome is unknown: the next run sends another draft.

    It is transient if the request itself failed transiently. A failed read does not matter: a new draft needs none.
    """
    kind = RequestTimeout if isinstance(error, TimeoutError) else TransportError
    is_transient = error.after_transient if isinstance(error, OutcomeUnknown) else error.transient
    is_transient = is_transient and not error.fatal
    message = f"{error}; nothing was sent{'; dispatch again' if is_transient else ''}"
    return kind(message, transient=is_transient, client_wide=error.client_wide)


def _known_ids(ids: Mapping[str, str | None]) -> list[str]:
    return sorted(id_ for id_ in ids.values() if id_ is not None)
