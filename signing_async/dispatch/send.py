"""Send one claimed package: create, upload, add recipients, compare, send; its state is saved before each request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
    amended,
)
from ..models import Document, Language, Recipient, Signing, SigningOrder, SigningState
from ..reconcile import SigningLedger
from ..signings import Signings, sending, signing_path
from ..transport.call import Transport
from ..transport.operation import Operation, log
from ..transport.retry import RetryPolicy
from .entry import DRAFT, SENDING, SENT, GuardedJournal, PackageState
from .journal import Claim
from .package import Prepared

__all__ = ["Draft", "Uploads", "send_own"]

_MAX_ERROR = 1000


@attrs.frozen
class Uploads:
    """How the documents of one package are uploaded."""

    files: Sequence[FileProgress]
    """The progress of each document."""
    ordered: bool
    concurrency: int
    free: asyncio.Semaphore
    """Limits the uploads of all packages together."""


class Draft:
    """The draft of one claimed package, and its journal entry."""

    def __init__(
        self,
        api: Api,
        package: Prepared,
        journal: GuardedJournal,
        claim: Claim,
        uploads: Uploads,
    ) -> None:
        self._api = api
        self._package = package
        self._journal = journal
        self._claim = claim
        self._uploads = uploads
        self.state: PackageState = PackageState(package.content, api.origin)
        self._is_saved = self._may_be_sending = False
        self._writing = asyncio.Lock()

    @property
    def signing(self) -> Signing | None:
        """What is known of the draft, or of the signing."""
        return None if self.state.signing is None else self._describe()

    async def send(self) -> tuple[Signing, bool]:
        """Send the package, unless an earlier run has sent it; return its signing, and whether an earlier run did."""
        self._load()
        state = self.state
        is_other = state.content != self._package.content
        # A package without a key of its own may have been corrected in a report of failures, under its key.
        counts = not is_other or self._package.key == self._package.content
        signing = None
        if state.status == SENDING and counts:
            found = await self._api.transport.find_effect(_sending(self._api, self._id))
            signing = found and await self._note_sent(found.value)
        if is_other and state.status != DRAFT and not (counts and state.status == SENT):
            was = "was sent" if state.status == SENT else "may have been sent"
            raise InvalidRequest(
                f"key: {self._package.key!r} names another package, which {was} as signing {state.signing}",
                effect="none" if state.status == SENT else "unknown",
            )
        if state.status == SENT:
            if is_other:
                text = "package %s counts as sent: its key was sent with other content, as signing %s"
                log.warning(text, self._package.label, state.signing)
            self._report_uploaded()
            return signing or self._describe(), True
        if state.status == SENDING:
            await self._check_exact()
        else:
            await self._make_exact()
            state.status = SENDING
            await self._save()
        try:
            sent = await send_own(self._api, self._id)
        except SigningError as error:
            if error.effect == "none":
                state.status = DRAFT
            raise
        return await self._note_sent(sent or await self._read_sent()), False

    async def note_failure(self, error: Exception) -> None:
        """Tell in the error's notes where the package stands; log the error, and save it if anything was saved."""
        state, label = self.state, self._package.label
        where = f"its signing is {state.signing}" if state.signing else "it has no draft"
        drafts = f"; abandoned drafts: {', '.join(state.abandoned)}" if state.abandoned else ""
        error.add_note(f"package {label}: {where}; status {state.status!r}{drafts}")
        text = self._api.transport.redacted(str(error))
        is_unknown = isinstance(error, OutcomeUnknown)
        message = "it is not known whether package %s was sent: %s" if is_unknown else "package %s was not sent: %s"
        log.warning(message, label, text)
        if self._is_saved:
            state.error = text[:_MAX_ERROR]
            try:
                await self._save()
            except SigningError as unsaved:
                if unsaved.client_wide:
                    raise
                log.warning("%s", unsaved)

    # The journal entry

    def _describe(self) -> Signing:
        """Return what the journal entry says of the draft, or of the signing."""
        state, package, fields = self.state, self._package, self._package.fields
        is_draft = {DRAFT: True, SENDING: None, SENT: False}[state.status]
        if state.content != package.content:
            return Signing(self._id, is_draft=is_draft)
        ids = [(state.documents.get(str(n)), pdf.source.filename) for n, pdf in enumerate(package.documents)]
        return Signing(
            self._id,
            name=fields["name"],
            language=Language(fields["language"]),
            signing_order=fields["signing_order"] and SigningOrder(fields["signing_order"]),
            message=fields["message"],
            is_draft=is_draft,
            documents=tuple(Document(id_, name) for id_, name in ids if id_ is not None),
        )

    @property
    def _id(self) -> str:
        assert self.state.signing is not None
        return self.state.signing

    @property
    def _ledger(self) -> SigningLedger:
        """What the client knows about its own requests to the draft."""
        return self._api.ledger.signing(signing_path(self._id))

    def _load(self) -> None:
        """Load the state that earlier runs saved. Raise if it can't be decoded, or belongs to another service."""
        if self._claim.state is None:
            return
        try:
            state = PackageState(**json.loads(self._claim.state))
        except (TypeError, ValueError):
            message = "the journal entry of this package cannot be decoded: the package may have been sent"
            raise OutcomeUnknown(message) from None
        origin = self._api.origin
        if state.service != origin:
            message = f"the journal holds this package for {state.service}; use another journal for {origin}"
            # Other packages of the run may be unaffected.
            raise ConfigurationError(message, client_wide=False)
        self.state = state
        self._may_be_sending = state.status != DRAFT

    async def _save(self) -> None:
        """Write the current state. Raises `ClaimLost` if the claim is stale.

        If the send request may have been made, and was not refused, a journal error has the effect ``"unknown"``.
        """
        async with self._writing:
            self._is_saved = True
            state, is_draft = attrs.asdict(self.state), self.state.status == DRAFT
            if is_draft and self.state.signing is not None and self._ledger.is_tainted:
                # A lost request may still add to the draft: the next run abandons a draft with a step of unknown
                # outcome.
                state |= {name: dict.fromkeys(state[name]) for name in ("documents", "recipients")}
            try:
                await self._journal.write(self._claim, json.dumps(state))
            except SigningError as error:
                if is_draft or not self._may_be_sending:
                    raise
                raise amended(error, effect="unknown") from error.__cause__
            self._may_be_sending = not is_draft

    # The steps

    async def _make_exact(self) -> None:
        """Complete the draft. If it might differ from the package, replace it by a second draft."""
        state = self.state
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
        state = self.state
        log.warning("package %s: draft %s was abandoned: %s", self._package.label, self._id, reason)
        state.abandoned.append(self._id)
        state.signing, state.documents, state.recipients = None, {}, {}
        for file in self._uploads.files:
            file.restart()

    async def _complete(self, is_last: bool) -> bool:
        """Create the draft unless it exists, add missing documents and recipients; return whether it is exact.

        If the outcome of a step is unknown, return False. Raise instead if this is the last draft to be tried, the
        deadline passed, or the failure is not transient. The error's ``effect`` is ``"none"``: an unsent draft sends
        no notifications.
        """
        api, state, package = self._api, self.state, self._package
        resumed = state.signing is not None
        if resumed:
            if not await self._is_unchanged():
                return False
        else:
            await self._save()
            try:
                state.signing = (await api.signings.create(**package.fields)).id
            except SigningError as error:
                raise amended(error, effect="none") from error.__cause__
        # Recipients of an earlier run are not the effect of this run's requests.
        self._ledger.recipients.ids.update(_known(state.recipients))
        missing = [number for number in range(len(package.documents)) if str(number) not in state.documents]
        try:
            # After a failure no more uploads are begun, and those in progress finish.
            async with Results[None](missing, self._upload, self._uploads.concurrency) as uploads:
                async for _ in uploads:
                    pass
            for number, fields in enumerate(package.recipients):
                if str(number) not in state.recipients:
                    await self._step(state.recipients, number, partial(api.recipients.add, self._id, **fields))
            if self._ledger.is_tainted:
                raise OutcomeUnknown("a lost request may still add to the draft")
        except SigningError as error:
            if error.effect == "none":
                raise
            # A failed reading does not matter: a new draft needs none.
            transient = error.after_transient if isinstance(error, OutcomeUnknown) else error.transient
            transient, is_late = transient and not error.fatal, isinstance(error, TimeoutError)
            if transient and not is_late and not is_last:
                return False
            kind = RequestTimeout if is_late else TransportError
            text = f"{error}; nothing was sent{'; dispatch again' if transient else ''}"
            raise kind(text, transient=transient, client_wide=error.client_wide) from error
        return not (resumed or self._ledger.additions.total()) or await self._is_unchanged()

    async def _upload(self, number: int) -> None:
        source, file = self._package.documents[number].source, self._uploads.files[number]
        upload = partial(self._api.documents.upload, self._id, source, on_progress=file, preflight=False)
        async with self._uploads.free:
            await self._step(self.state.documents, number, upload)

    async def _step(
        self, ids: dict[str, str | None], number: int, call: Callable[[], Awaitable[Document | Recipient]]
    ) -> None:
        """Make a call that adds to the draft. Save that it begins, and note the id of the created record."""
        ids[str(number)] = None
        await self._save()
        try:
            ids[str(number)] = (await call()).id
        except SigningError as error:
            if error.effect == "none" and not self._ledger.is_tainted:
                del ids[str(number)]
            raise

    async def _is_unchanged(self) -> bool:
        """Return whether the draft exists and holds exactly the known ids.

        Raise `OutcomeUnknown` if another client may have sent it.
        """
        try:
            signing = await self._api.signings.get(self._id)
            if signing.state is not SigningState.DRAFT:
                raise OutcomeUnknown(f"the draft is {signing.state}: another client may have sent it", known=[signing])
            return await self._holds_known_ids(signing)
        except NotFound:
            return False

    async def _check_exact(self) -> None:
        """Raise `DraftChanged` if the draft does not hold exactly the package. An earlier request may still send it."""
        try:
            current = await self._api.signings.get(self._id)
            if current.is_draft and not await self._holds_known_ids(current):
                text = f"draft {self._id} holds more or less than this package; it was not sent by this run"
                raise DraftChanged(text, signing=current)
        except SigningError as error:
            raise amended(error, effect="unknown") from error.__cause__

    async def _holds_known_ids(self, signing: Signing) -> bool:
        recipients = [recipient.id async for recipient in self._api.recipients.list(self._id)]
        documents = [document.id for document in signing.documents]
        return sorted(documents) == _known(self.state.documents) and sorted(recipients) == _known(self.state.recipients)

    async def _read_sent(self) -> Signing | None:
        """Return the signing that the service accepted to send; None if it can't be read."""
        transport, ledger = self._api.transport, self._api.ledger
        options = attrs.evolve(transport.options, retry=RetryPolicy.none())
        try:
            signing = await Signings(Transport(transport.shared, options), ledger).get(self._id)
        except Exception as error:
            # The caller's own rate limiter may raise anything.
            text = transport.redacted(safe_text(error))
            log.info("signing %s was sent; its new state could not be read: %s", self._id, text)
            return None
        if signing.state is SigningState.DRAFT:  # this contradicts the response
            return await self._api.transport.confirm_effect(_sending(self._api, self._id), None)
        return signing

    async def _note_sent(self, signing: Signing | None) -> Signing:
        """Save that the draft was sent; return the signing, or what is known of it if it could not be read."""
        state = self.state
        state.status, state.error = SENT, None
        await self._save()
        log.info("package %s was sent as signing %s", self._package.label, state.signing)
        self._report_uploaded()
        if signing is not None and {document.id for document in signing.documents} - {*_known(state.documents)}:
            log.error("signing %s was sent with documents that are not of its package", state.signing)
        return signing or self._describe()

    def _report_uploaded(self) -> None:
        """Report all documents as uploaded, also those of earlier runs."""
        for file, document in zip(self._uploads.files, self._package.documents, strict=True):
            file.finish(document.size)


async def send_own(api: Api, signing_id: str) -> Signing | None:
    """Send a draft that only the caller sends; see `Sent`. Return the signing if it was read."""
    return await api.transport.call(_sending(api, signing_id))


def _sending(api: Api, signing_id: str) -> Operation[Signing | None]:
    return sending(signing_id, api.ledger, api.transport.options.assumptions, is_own=True)


def _known(ids: Mapping[str, str | None]) -> list[str]:
    return sorted(id_ for id_ in ids.values() if id_ is not None)
