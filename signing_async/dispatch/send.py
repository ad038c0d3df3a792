"""Send one claimed package: create, upload, add recipients, compare, send; the entry is saved before each request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import attrs

from .._api import Api
from .._foreign import safe_text
from ..bulk import FileProgress, Results
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
from ..models import Document, Recipient, Signing
from ..reconcile import Undecidable, was_sent
from ..signings import Signings, sending
from ..transport.call import Transport
from ..transport.operation import Operation, log
from ..transport.retry import RetryPolicy
from .entry import DRAFT, SENDING, SENT, Entry, with_effect
from .package import Prepared

__all__ = ["Uploads", "send_own", "send_package"]


@attrs.frozen
class Uploads:
    """How the documents of one package are uploaded."""

    files: Sequence[FileProgress]
    """The progress of each document."""
    ordered: bool
    concurrency: int
    free: asyncio.Semaphore
    """Limits the uploads of all packages together."""


async def send_package(api: Api, package: Prepared, entry: Entry, uploads: Uploads) -> tuple[Signing, bool]:
    """Send a package, unless an earlier run has sent it; return its signing, and whether an earlier run sent it."""
    state = entry.load()
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
    draft = _Draft(api, package, entry, uploads)
    if state.status == SENT:
        log.debug("package %s was sent before, as signing %s", package.label, state.signing)
        draft.report_uploaded()
        return entry.signing or Signing(entry.id), True
    if state.status == SENDING:
        found = await api.transport.find_effect(_sending(api, entry.id))
        if found is not None:
            return await draft.note_sent(found.value), True
        await draft.check_exact()
    else:
        await draft.make_exact()
        state.status = SENDING
        await entry.save()
    try:
        signing = await send_own(api, entry.id)
    except SigningError as error:
        if error.effect == "none":
            state.status = DRAFT
        raise
    return await draft.note_sent(signing or await _read_sent(api, entry.id)), False


@attrs.frozen
class _Draft:
    """The draft of one package."""

    _api: Api
    _package: Prepared
    _entry: Entry
    _uploads: Uploads

    async def make_exact(self) -> None:
        """Complete the draft. If it might differ from the package, replace it by a second draft."""
        state = self._entry.state
        state.error = None
        if state.signing is not None:
            if state.content != self._package.content:
                self._abandon("the package was changed")
            elif None in (*state.documents.values(), *state.recipients.values()):
                self._abandon("the outcome of one of its steps is unknown")
            elif self._uploads.ordered and state.documents.keys() != {str(n) for n in range(len(state.documents))}:
                self._abandon("its documents are out of order")
        state.content = self._package.content
        for is_last in (False, True):
            if await self._complete(is_last):
                return
            self._abandon("it may hold more or less than the package")
        raise DraftChanged(
            "two drafts held more or less than this package: another client is changing them; nothing was sent"
        )

    def _abandon(self, reason: str) -> None:
        """Forget the draft: it stays at the service, unsent. No run sends a draft that no journal entry names."""
        state, draft = self._entry.state, self._entry.id
        log.warning("package %s: draft %s was abandoned: %s", self._package.label, draft, reason)
        state.abandoned.append(draft)
        state.signing, state.documents, state.recipients = None, {}, {}
        for file in self._uploads.files:
            file.restart()

    async def _complete(self, is_last: bool) -> bool:
        """Create the draft unless it exists, add missing documents and recipients; return whether it is exact.

        If the outcome of a step is unknown, return False. Raise instead if this is the last draft to be tried, the
        deadline passed, or the failure is not transient. The error's ``effect`` is ``"none"``: an unsent draft sends
        no notifications.
        """
        api, state, entry = self._api, self._entry.state, self._entry
        resumed = state.signing is not None
        if resumed:
            if not await self._is_unchanged():
                return False
        else:
            await entry.save()
            try:
                state.signing = (await api.signings.create(**self._package.fields)).id
            except SigningError as error:
                raise with_effect(error, "none") from error.__cause__
            log.debug("package %s: draft %s was created", self._package.label, state.signing)
        # Recipients of an earlier run are not the effect of this run's requests.
        entry.ledger.recipients.ids.update(_known(state.recipients))
        missing = [number for number in range(len(self._package.documents)) if str(number) not in state.documents]
        self.report_uploaded(but=missing)
        try:
            # After a failure no more uploads are begun, and those in progress finish.
            uploads: Results[None] = Results(missing, self._upload, self._uploads.concurrency)
            async with uploads:
                async for _ in uploads:
                    pass
            for number, fields in enumerate(self._package.recipients):
                if str(number) not in state.recipients:
                    await self._step(state.recipients, number, partial(api.recipients.add, entry.id, **fields))
            if entry.ledger.is_tainted:
                raise OutcomeUnknown("a lost request may still add to the draft")
        except SigningError as error:
            if error.effect == "none":
                raise
            unsent = _unsent(error)
            if is_last or isinstance(error, TimeoutError) or not unsent.transient:
                raise unsent from error
            return False
        return not (resumed or entry.ledger.additions.total()) or await self._is_unchanged()

    async def _upload(self, number: int) -> None:
        source, file = self._package.documents[number].source, self._uploads.files[number]
        upload = partial(self._api.documents.upload, self._entry.id, source, on_progress=file, preflight=False)
        async with self._uploads.free:
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
            signing = await self._api.signings.get(self._entry.id)
            if was_sent(signing):
                raise OutcomeUnknown("another client has sent the draft", known=[signing])
            return await self._holds_known_ids(signing)
        except NotFound:
            return False
        except Undecidable as error:
            raise OutcomeUnknown(f"another client may have sent the draft: {error}", known=error.known) from None

    async def check_exact(self) -> None:
        """Raise `DraftChanged` if the draft does not hold exactly the package. An earlier request may still send it."""
        try:
            current = await self._api.signings.get(self._entry.id)
            if current.is_draft and not await self._holds_known_ids(current):
                text = f"draft {current.id} holds more or less than this package; it was not sent by this run"
                raise DraftChanged(text, signing=current)
        except SigningError as error:
            raise with_effect(error, "unknown") from error.__cause__

    async def _holds_known_ids(self, signing: Signing) -> bool:
        recipients = [recipient.id async for recipient in self._api.recipients.list(self._entry.id)]
        documents = [document.id for document in signing.documents]
        state = self._entry.state
        return sorted(documents) == _known(state.documents) and sorted(recipients) == _known(state.recipients)

    async def note_sent(self, signing: Signing | None) -> Signing:
        """Save that the draft was sent; return the signing, or what is known of it if it could not be read."""
        state = self._entry.state
        state.status, state.error = SENT, None
        await self._entry.save()
        log.info("package %s was sent as signing %s", self._package.label, state.signing)
        self.report_uploaded()
        if signing is not None and {document.id for document in signing.documents} - {*_known(state.documents)}:
            log.error("signing %s was sent with documents that are not of its package", state.signing)
        return signing or self._entry.signing or Signing(self._entry.id)

    def report_uploaded(self, but: Sequence[int] = ()) -> None:
        """Report the documents, except those numbered in ``but``, as uploaded."""
        for number, file in enumerate(self._uploads.files):
            if number not in but:
                file.finish(self._package.documents[number].size)


async def send_own(api: Api, signing_id: str) -> Signing | None:
    """Send a draft that only the caller sends; see `Sent`. Return the signing if it was read."""
    return await api.transport.call(_sending(api, signing_id))


def _sending(api: Api, signing_id: str) -> Operation[Signing | None]:
    return sending(signing_id, api.ledger, api.transport.options.assumptions, is_own=True)


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
            return await api.transport.confirm_effect(_sending(api, signing_id), None)
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


def _known(ids: Mapping[str, str | None]) -> list[str]:
    return sorted(id_ for id_ in ids.values() if id_ is not None)
