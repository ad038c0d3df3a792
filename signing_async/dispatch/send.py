"""Send one claimed package: create, upload, add recipients, compare, send; its entry is saved before each request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs

from .._api import Api
from .._foreign import safe_text
from ..bulk import FileProgress, Results
from ..errors import (
    DraftChanged,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    RequestTimeout,
    SigningError,
    TransportError,
    amended,
)
from ..models import Document, Recipient, Signing, SigningState
from ..signings import Signings, sending
from ..transport.call import Transport
from ..transport.operation import Operation, log
from ..transport.retry import RetryPolicy
from .entry import DRAFT, SENDING, SENT, Entry, known_ids

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


async def send_package(api: Api, entry: Entry, uploads: Uploads) -> tuple[Signing, bool]:
    """Send the package, unless an earlier run has sent it; return its signing, and whether an earlier run did."""
    entry.load()
    state, package = entry.state, entry.package
    # The key of a package without one is the hash of its content. A report of failures names that key, so the package
    # may be corrected under it after it was sent.
    is_same = not entry.is_other or package.key == package.content
    signing = None
    if state.status == SENDING and is_same:
        found = await api.transport.find_effect(_sending(api, entry.id))
        signing = found and await _note_sent(entry, uploads, found.value)
    if entry.is_other and state.status != DRAFT and not (is_same and state.status == SENT):
        was = "was sent" if state.status == SENT else "may have been sent"
        raise InvalidRequest(
            f"key: {package.key!r} names another package, which {was} as signing {state.signing}",
            effect="none" if state.status == SENT else "unknown",
        )
    if state.status == SENT:
        if entry.is_other:
            text = "package %s counts as sent: its key was sent with other content, as signing %s"
            log.warning(text, package.label, state.signing)
        _report_uploaded(entry, uploads)
        return signing or entry.describe(), True
    if state.status == SENDING:
        await _check_exact(api, entry)
    else:
        await _make_exact(api, entry, uploads)
        state.status = SENDING
        await entry.save()
    try:
        sent = await send_own(api, entry.id)
    except SigningError as error:
        # After any other exception, such as one of the caller's rate limiter, the send counts as begun.
        if error.effect == "none":
            state.status = DRAFT  # saved with the failure
        raise
    return await _note_sent(entry, uploads, sent or await _read_sent(api, entry.id)), False


# The draft


async def _make_exact(api: Api, entry: Entry, uploads: Uploads) -> None:
    """Complete the draft. If it might differ from the package, replace it by a second draft."""
    state = entry.state
    state.error = None
    if state.signing is not None:
        if entry.is_other:
            _abandon(entry, uploads, "the package was changed")
        elif None in (*state.documents.values(), *state.recipients.values()):
            _abandon(entry, uploads, "the outcome of one of its steps is unknown")
        elif uploads.ordered and state.documents.keys() != {str(n) for n in range(len(state.documents))}:
            _abandon(entry, uploads, "its documents are out of order")
    state.content = entry.package.content
    for is_last in (False, True):
        if await _complete(api, entry, uploads, is_last):
            return
        _abandon(entry, uploads, "it may hold more or less than the package")
    raise DraftChanged(
        "two drafts held more or less than this package: another client may be changing them; nothing was sent"
    )


def _abandon(entry: Entry, uploads: Uploads, reason: str) -> None:
    entry.abandon(reason)
    for file in uploads.files:
        file.restart()


async def _complete(api: Api, entry: Entry, uploads: Uploads, is_last: bool) -> bool:
    """Create the draft unless it exists, add missing documents and recipients; return whether it is exact.

    If the outcome of a step is unknown, return False. Raise instead if this is the last draft to be tried, the deadline
    passed, or the failure is not transient. The error's ``effect`` is ``"none"``: an unsent draft sends no
    notifications.
    """
    state, package = entry.state, entry.package
    resumed = state.signing is not None
    if resumed:
        if not await _is_unchanged(api, entry):
            return False
    else:
        await entry.save()
        try:
            state.signing = (await api.signings.create(**package.fields)).id
        except SigningError as error:
            raise amended(error, effect="none") from error.__cause__
    # Recipients of an earlier run are not the effect of this run's requests.
    entry.ledger.recipients.ids.update(known_ids(state.recipients))
    try:
        await _upload_missing(api, entry, uploads)
        for number, fields in enumerate(package.recipients):
            if str(number) not in state.recipients:
                await _step(entry, state.recipients, number, partial(api.recipients.add, entry.id, **fields))
        if entry.ledger.is_tainted:
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
    return not (resumed or entry.ledger.additions.total()) or await _is_unchanged(api, entry)


async def _upload_missing(api: Api, entry: Entry, uploads: Uploads) -> None:
    """Upload the documents that the draft lacks. After a failure no more are begun, and those in progress finish."""
    documents, ids = entry.package.documents, entry.state.documents

    async def upload(number: int) -> None:
        source, file = documents[number].source, uploads.files[number]
        async with uploads.free:
            call = partial(api.documents.upload, entry.id, source, on_progress=file, preflight=False)
            await _step(entry, ids, number, call)

    missing = [number for number in range(len(documents)) if str(number) not in ids]
    async with Results[None](missing, upload, uploads.concurrency) as results:
        async for _ in results:
            pass


async def _step(
    entry: Entry, ids: dict[str, str | None], number: int, call: Callable[[], Awaitable[Document | Recipient]]
) -> None:
    """Make a call that adds to the draft. Save that it begins, and note the id of the created record."""
    ids[str(number)] = None
    await entry.save()
    try:
        ids[str(number)] = (await call()).id
    except SigningError as error:
        if error.effect == "none" and not entry.ledger.is_tainted:
            del ids[str(number)]
        raise


# Comparing


async def _is_unchanged(api: Api, entry: Entry) -> bool:
    """Return whether the draft exists and holds exactly the known ids.

    Raise `OutcomeUnknown` if another client may have sent it.
    """
    try:
        signing = await api.signings.get(entry.id)
        if signing.state is not SigningState.DRAFT:
            raise OutcomeUnknown(f"the draft is {signing.state}: another client may have sent it", known=[signing])
        return await _holds_known_ids(api, entry, signing)
    except NotFound:
        return False


async def _check_exact(api: Api, entry: Entry) -> None:
    """Raise `DraftChanged` if the draft does not hold exactly the package. An earlier request may still send it."""
    try:
        current = await api.signings.get(entry.id)
        if current.is_draft and not await _holds_known_ids(api, entry, current):
            text = f"draft {entry.id} holds more or less than this package; it was not sent by this run"
            raise DraftChanged(text, signing=current)
    except SigningError as error:
        raise amended(error, effect="unknown") from error.__cause__


async def _holds_known_ids(api: Api, entry: Entry, signing: Signing) -> bool:
    recipients = [recipient.id async for recipient in api.recipients.list(entry.id)]
    documents = [document.id for document in signing.documents]
    found = sorted(documents), sorted(recipients)
    return found == (known_ids(entry.state.documents), known_ids(entry.state.recipients))


# Sending


async def send_own(api: Api, signing_id: str) -> Signing | None:
    """Send a draft that only the caller sends; see `Sent`. Return the signing if it was read."""
    return await api.transport.call(_sending(api, signing_id))


def _sending(api: Api, signing_id: str) -> Operation[Signing | None]:
    return sending(signing_id, api.ledger, api.transport.options.assumptions, is_own=True)


async def _read_sent(api: Api, signing_id: str) -> Signing | None:
    """Return the signing that the service accepted to send; None if it can't be read."""
    transport = api.transport
    options = attrs.evolve(transport.options, retry=RetryPolicy.none())
    try:
        signing = await Signings(Transport(transport.shared, options), api.ledger).get(signing_id)
    except Exception as error:
        # The caller's own rate limiter may raise anything.
        text = transport.redacted(safe_text(error))
        log.info("signing %s was sent; its new state could not be read: %s", signing_id, text)
        return None
    if signing.state is SigningState.DRAFT:  # this contradicts the response
        return await transport.confirm_effect(_sending(api, signing_id), None)
    return signing


async def _note_sent(entry: Entry, uploads: Uploads, signing: Signing | None) -> Signing:
    """Save that the draft was sent; return the signing, or what is known of it if it could not be read."""
    state = entry.state
    state.status, state.error = SENT, None
    await entry.save()
    log.info("package %s was sent as signing %s", entry.package.label, state.signing)
    _report_uploaded(entry, uploads)
    if signing is not None and {document.id for document in signing.documents} - {*known_ids(state.documents)}:
        log.error("signing %s was sent with documents that are not of its package", state.signing)
    return signing or entry.describe()


def _report_uploaded(entry: Entry, uploads: Uploads) -> None:
    """Report all documents as uploaded, also those of earlier runs."""
    for file, document in zip(uploads.files, entry.package.documents, strict=True):
        file.finish(document.size)
