"""The steps of a package and its sending: requests, unknown outcomes, late effects, other clients on the draft."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from signing_async import (
    AuthError,
    DraftChanged,
    InvalidRequest,
    NewRecipient,
    OutcomeUnknown,
    PdfSource,
    Progress,
    RequestTimeout,
    RetryPolicy,
    ServerError,
    Signing,
    SigningClient,
    SigningPackage,
    SigningState,
    TransportError,
    Unauthorized,
)
from signing_async.sandbox import Sandbox
from signing_async.transport.attempt import Context, Outcome
from signing_async.transport.retry import Kind
from tests.dispatch.deaths import Fate, fated_client
from tests.dispatch.observing import Office, abandoned, parcel_of
from tests.dispatch.parcels import Parcel
from tests.pdfs import make_pdf
from tests.servers import serving

_RESPONDS_WITH_SIGNING = re.compile(r"GET /api/1\.0/signings/[^/]+|POST /api/1\.0/signings")


class Proxy:
    """An office behind the proxy; ``alter`` returns what is shown of a signing, and may be replaced at any time."""

    office: Office

    def __init__(self, alter: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.alter = alter


@pytest.fixture
async def proxy(sandbox: Sandbox, path: Path) -> AsyncIterator[Proxy]:
    """A proxy of the sandbox that alters nothing yet, and an office behind it."""

    async def forward(request: web.Request) -> web.Response:
        url, body = sandbox.base_url + request.raw_path, await request.read()
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with session.request(request.method, url, headers=headers, data=body) as response:
            body = await response.read()
        if response.ok and _RESPONDS_WITH_SIGNING.fullmatch(f"{request.method} {request.path}"):
            body = json.dumps(proxy.alter(json.loads(body))).encode()
        return web.Response(body=body, status=response.status, content_type=response.content_type)

    proxy = Proxy(dict)
    async with aiohttp.ClientSession() as session, serving(forward) as server:
        retry = RetryPolicy(base_delay=0.01, settle=0.1)
        async with SigningClient(server.origin, sandbox.access_token(), retry=retry) as client:
            proxy.office = Office(sandbox, client, path)
            yield proxy


# The sending


async def _leave_ambiguous(office: Office, parcel: Parcel) -> None:
    """It is not known whether the package was sent (it was not)."""
    fault = office.fail("signings.send", "500")
    reading = office.fail("signings.get", "503", times=None)
    with pytest.raises(OutcomeUnknown) as caught:
        await office.dispatch(parcel)
    assert caught.value.transient  # a run with this journal reads the service before it sends
    fault.remove()
    reading.remove()
    assert office.state()["status"] == "sending"


async def test_repeated_call_reads_for_the_settle_time_even_with_a_shorter_timeout(office: Office) -> None:
    """Otherwise no repetition would ever send the package."""
    parcel = parcel_of()
    office.fail("signings.send", "drop-before-commit")
    client = office.client.with_options(timeout=1, retry=RetryPolicy(settle=1))
    with pytest.raises(OutcomeUnknown):
        await client.dispatch(parcel.package, office.path)
    assert (await client.dispatch(parcel.package, office.path)).is_draft is False
    office.sent_well(parcel)


async def test_unknown_sending_that_had_no_effect_is_sent_again_with_the_same_draft(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    parcel = parcel_of()
    await _leave_ambiguous(office, parcel)
    assert "it is not known whether package 'Lease' was sent: " in caplog.text
    assert "was not sent" not in caplog.text
    reading = office.fail("signings.get", "503", times=None)
    words = r"the outcome is unknown: the service could not be read: HTTP 503"
    with pytest.raises(OutcomeUnknown, match=words) as caught:
        await office.dispatch(parcel)
    draft = office.sandbox.signings[0].id
    assert caught.value.transient
    assert caught.value.__notes__ == [f"package {parcel.package.name!r}: its signing is {draft}; status 'sending'"]
    (result,) = await office.dispatch_many(parcel)
    assert isinstance(result.error, OutcomeUnknown)
    assert result.signing is not None
    assert (result.signing.id, result.signing.is_draft, result.sent_earlier) == (draft, None, False)
    reading.remove()
    office.fail("signings.send", "expired-token")
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel)
    assert office.state()["status"] == "sending"  # also after a repeat that was refused
    (result,) = await office.dispatch_many(parcel)
    assert (result.error, result.sent_earlier) == (None, False)
    office.sent_well(parcel)


@pytest.mark.parametrize("how", ["no journal", "a reading that says nothing"])
async def test_unknown_sending_is_not_transient_where_another_run_would_not_know_more(office: Office, how: str) -> None:
    """Without a journal the next call would send a second signing."""
    office.fail("signings.send", "500-after-commit")
    office.fail("signings.get", "503" if how == "no journal" else "not-json", times=None)
    journal = None if how == "no journal" else office.path
    with pytest.raises(OutcomeUnknown) as caught:
        await office.client.dispatch(parcel_of().package, journal)
    assert not caught.value.transient


@pytest.mark.parametrize("has_journal", [False, True])
async def test_failed_sending_is_transient_only_if_a_journal_knows_the_draft(
    office: Office, caplog: pytest.LogCaptureFixture, has_journal: bool
) -> None:
    """Readings showed no effect. If there is one after all, a second signing must not be sent beside it."""
    office.fail("signings.send", "500", times=None)
    with pytest.raises(ServerError) as caught:
        await office.client.dispatch(parcel_of().package, office.path if has_journal else None)
    assert (caught.value.effect, caught.value.transient) == ("unknown", has_journal)
    assert "it is not known whether package 'Lease' was sent: " in caplog.text


async def test_passing_failure_of_the_whole_client_is_not_fatal_without_a_journal(office: Office) -> None:
    """The outcome of the package is unknown, and other calls may succeed later."""
    transport = office.client._transport
    make_attempt = transport.attempt

    async def fail_the_second_sending(context: Context[Any]) -> Outcome[Any]:
        if context.operation.name != "signings.send" or context.number == 1:
            return await make_attempt(context)
        outcome = Outcome[Any]()
        outcome.fail(Kind.RAISED, AuthError("the store is down", transient=True, client_wide=True), may_retry=False)
        return outcome

    transport.attempt = fail_the_second_sending
    office.fail("signings.send", "500")
    with pytest.raises(AuthError) as caught:
        await office.client.dispatch(parcel_of().package)
    assert (caught.value.effect, caught.value.transient, caught.value.fatal) == ("unknown", False, False)


async def test_sending_counts_as_begun_whatever_the_application_raises(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log filter may fail after the service has sent the signing."""

    def fail(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("signings.send attempt"):
            raise LookupError("the filter is broken")
        return True

    caplog.set_level("DEBUG", "signing_async")
    logger, parcel = logging.getLogger("signing_async"), parcel_of()
    logger.addFilter(fail)
    try:
        with pytest.raises(LookupError):
            await office.dispatch(parcel)
    finally:
        logger.removeFilter(fail)
    assert office.state()["status"] == "sending"
    await office.dispatch(parcel)
    office.sent_well(parcel)


async def test_unknown_sending_that_took_effect_is_not_repeated(office: Office) -> None:
    parcel = parcel_of()
    await _leave_ambiguous(office, parcel)
    await office.client.signings.send(office.sandbox.signings[0].id)
    sends, told = office.count()["signings.send"], list[Progress]()
    (result,) = await office.dispatch_many(parcel, on_progress=told.append)
    assert (result.error, result.sent_earlier) == (None, True)
    assert office.count()["signings.send"] == sends
    assert told[-1].files_done == told[-1].files_total == 2
    office.sent_well(parcel)


async def test_unknown_sending_whose_draft_was_changed_is_not_repeated(office: Office) -> None:
    parcel = parcel_of()
    await _leave_ambiguous(office, parcel)
    await office.client.documents.upload(office.sandbox.signings[0].id, make_pdf(), "other.pdf")
    words = "holds more or less than this package; it was not sent by this run"
    with pytest.raises(DraftChanged, match=words) as caught:
        await office.dispatch(parcel)
    assert caught.value.signing.id == office.sandbox.signings[0].id
    assert [signing.state for signing in office.sandbox.signings] == ["draft"]
    # The request of the run before may still send it.
    assert (caught.value.effect, office.state()["status"]) == ("unknown", "sending")


async def test_changed_package_gets_no_second_draft_after_an_ambiguous_attempt_that_was_refused(office: Office) -> None:
    """If the first draft were given up, it could be sent beside the second one."""
    office.fail("signings.send", "500")
    office.fail("signings.send", "expired-token")
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel_of(key="lease"))
    with pytest.raises(InvalidRequest, match="which may have been sent"):
        await office.dispatch(parcel_of(name="Other", key="lease"))
    assert [signing.name for signing in office.sandbox.signings] == ["Lease"]


async def test_sent_signing_that_cannot_be_read_is_returned_from_the_journal(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed reading is not repeated."""
    caplog.set_level("INFO", "signing_async")
    parcel = parcel_of()
    office.fail("signings.get", "not-json", times=5)
    signing = await office.dispatch(parcel)
    assert signing.is_draft is False
    assert signing.name == "Lease"
    assert sorted(document.name for document in signing.documents) == ["part 0.pdf", "part 1.pdf"]
    assert office.count()["signings.get"] == 1
    assert f"signing {signing.id} was sent; its new state could not be read: " in caplog.text


# Others who touch the draft


async def _leave_a_draft(office: Office, parcel: Parcel, step: str) -> str:
    """A draft that is known to hold what it holds."""
    office.fail(step, "expired-token", skip=1 if step == "recipients.add" else 0)
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel)
    return office.sandbox.signings[0].id


@pytest.mark.parametrize(
    ("step", "change"),
    [("recipients.add", "document added"), ("signings.send", "recipient added"), ("documents.upload", "deleted")],
)
async def test_draft_that_another_client_changed_is_replaced(
    office: Office, caplog: pytest.LogCaptureFixture, step: str, change: str
) -> None:
    parcel = parcel_of()
    draft = await _leave_a_draft(office, parcel, step)
    if change == "document added":
        await office.client.documents.upload(draft, make_pdf(), "other.pdf")
    elif change == "recipient added":
        await office.client.recipients.add(draft, email="eve@example.com", order=9)
    else:
        await office.client.request("DELETE", "/api/1.0/signings/{id}", path={"id": draft}, repeat=True)
    signing = await office.dispatch(parcel)
    assert signing.id != draft
    (message,) = abandoned(caplog)
    assert message.endswith(f"{draft} was abandoned: it may hold more or less than the package")
    office.sent_well(parcel, spare=1)


async def test_draft_that_another_client_sent_is_an_unknown_outcome(office: Office) -> None:
    parcel = parcel_of()
    draft = await _leave_a_draft(office, parcel, "signings.send")
    await office.client.signings.send(draft)
    with pytest.raises(OutcomeUnknown, match=r"^the draft is sent: another client may have sent it") as caught:
        await office.dispatch(parcel)
    assert [signing.id for signing in caught.value.known if isinstance(signing, Signing)] == [draft]
    assert [signing.state for signing in office.sandbox.signings] == ["sent"]


async def test_lost_uploads_of_two_drafts_are_a_transient_failure_and_nothing_is_sent(office: Office) -> None:
    """No other client has changed them: the same package may be dispatched again."""
    parcel = parcel_of(1, 1)
    office.fail("documents.upload", "drop-before-commit")
    office.fail("documents.upload", "drop-before-commit", skip=1)
    with pytest.raises(TransportError, match="may still add to the draft; nothing was sent; dispatch again") as caught:
        await office.dispatch(parcel)
    assert (caught.value.effect, caught.value.transient) == ("none", True)
    assert len(office.state()["abandoned"]) == 1
    drafts = {signing.id for signing in office.sandbox.signings}
    # Another process knows of the lost requests from the journal alone.
    async with fated_client(office.sandbox, Fate()) as fresh:
        assert (await fresh.dispatch(parcel.package, office.path)).id not in drafts
    office.sent_well(parcel, spare=2)


async def test_upload_whose_response_cannot_be_decoded_is_a_permanent_failure_if_reading_cannot_tell(
    office: Office,
) -> None:
    """Another draft would meet the same response: a worker must not create drafts without end."""
    parcel = parcel_of(1, 1)
    office.fail("documents.upload", "not-json", times=None)
    office.fail("signings.get", "not-json", times=None)
    with pytest.raises(TransportError, match=r"(?m)^documents\.upload: .*; nothing was sent$") as caught:
        await office.dispatch(parcel)
    assert (caught.value.effect, caught.value.transient, caught.value.client_wide) == ("none", False, False)
    assert len(office.sandbox.signings) == 1
    office.sandbox.faults.clear()
    await office.dispatch(parcel)
    office.sent_well(parcel, spare=1)


async def test_two_drafts_that_another_client_adds_to_raise_draft_changed_and_nothing_is_sent(proxy: Proxy) -> None:
    parcel = parcel_of(1, 1)
    proxy.alter = lambda one: one | {"documents": [*one.get("documents", ()), {"id": "other", "name": "other.pdf"}]}
    # After an ambiguous attempt a draft is read before it is sent.
    proxy.office.fail("recipients.add", "503")
    proxy.office.fail("recipients.add", "503", skip=1)
    with pytest.raises(DraftChanged, match="two drafts held more or less than this package") as caught:
        await proxy.office.dispatch(parcel)
    assert (caught.value.effect, caught.value.transient) == ("none", False)
    assert [signing.state for signing in proxy.office.sandbox.signings] == ["draft", "draft"]
    assert len(proxy.office.state()["abandoned"]) == 2
    proxy.alter = dict
    await proxy.office.dispatch(parcel)
    proxy.office.sent_well(parcel, spare=2)


async def test_timeout_in_a_step_is_raised_and_the_next_run_creates_a_new_draft(office: Office) -> None:
    parcel = parcel_of(1, 1)
    office.fail("recipients.add", "hang", times=None)
    with pytest.raises(RequestTimeout, match=r"^recipients\.add: ") as caught:
        await office.client.with_options(timeout=1).dispatch(parcel.package, office.path)
    assert (caught.value.effect, caught.value.transient) == ("none", True)
    (draft,) = office.sandbox.signings
    office.sandbox.faults.clear()
    assert (await office.dispatch(parcel)).id != draft.id
    office.sent_well(parcel, spare=1)


async def test_recipient_of_an_earlier_run_is_not_taken_for_an_equal_one_of_this_run(office: Office) -> None:
    anna = NewRecipient("anna@example.com", "Anna", "Berg")
    package = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [anna, anna])
    parcel = Parcel(package, (("a.pdf", make_pdf()),), (("anna@example.com", None),) * 2)
    await _leave_a_draft(office, parcel, "recipients.add")
    async with fated_client(office.sandbox, Fate()) as fresh:
        office.fail("recipients.add", "500")
        await fresh.dispatch(parcel.package, office.path)
    office.sent_well(parcel)


async def test_document_added_just_before_the_sending_is_logged_as_an_error(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    late = {"id": "late", "name": "late.pdf"}
    proxy.alter = lambda one: one if one["is_draft"] else one | {"documents": [*one["documents"], late]}
    signing = await proxy.office.dispatch(parcel_of())
    assert len(signing.documents) == 3
    logged = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.message for record in logged if record.name == "signing_async"] == [
        f"signing {signing.id} was sent with documents that are not of its package"
    ]


async def test_success_that_does_not_show_is_an_unknown_outcome_until_the_next_run(proxy: Proxy) -> None:
    """No reading bears out that the package was sent."""
    parcel = parcel_of()
    proxy.alter = lambda one: one | {"is_draft": True}
    with pytest.raises(OutcomeUnknown, match="could not be verified: the service still shows a draft") as caught:
        await proxy.office.dispatch(parcel)
    assert [one.id for one in caught.value.known if isinstance(one, Signing)] == [proxy.office.sandbox.signings[0].id]
    assert (caught.value.may_clear, caught.value.transient) == (True, True)
    assert proxy.office.state()["status"] == "sending"
    proxy.alter = dict
    await proxy.office.dispatch(parcel)
    proxy.office.sent_well(parcel)


@pytest.mark.parametrize("fields", [{"is_draft": None}, {"is_draft": True, "cancelled_at": "2031-01-01T00:00:00Z"}])
async def test_draft_that_may_be_sent_is_not_sent_again_and_an_accepted_sending_is_a_success(
    proxy: Proxy, fields: dict[str, Any]
) -> None:
    """Resuming a draft reads it as reconciling a sending does. A success is doubted only if a draft is shown."""
    parcel = parcel_of()
    await _leave_a_draft(proxy.office, parcel, "signings.send")
    before = proxy.office.count()["signings.send"]
    proxy.alter = lambda one: one | fields
    with pytest.raises(OutcomeUnknown, match="another client may have sent it"):
        await proxy.office.dispatch(parcel)
    assert proxy.office.count()["signings.send"] == before
    accepted = parcel_of(name="Other")
    await proxy.office.dispatch(accepted)
    proxy.office.sent_well(accepted)


# Steps


async def test_sent_package_is_returned_from_the_journal_without_a_request(office: Office) -> None:
    parcel = parcel_of(message="Please sign")
    first = await office.dispatch(parcel)
    before = len(office.sandbox.requests)
    second = await office.dispatch(parcel)
    assert len(office.sandbox.requests) == before
    assert (second.id, second.name, second.language, second.is_draft) == (first.id, "Lease", "EN", False)
    assert (second.signing_order, second.message, second.state) == ("sequential", "Please sign", SigningState.SENT)
    assert sorted(document.id for document in second.documents) == sorted(document.id for document in first.documents)
    assert office.state()["status"] == "sent"


async def test_draft_whose_documents_are_out_of_order_is_abandoned_by_an_ordered_run(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    parcel = parcel_of(3)
    office.fail("documents.upload", "expired-token")
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel, ordered=False)
    draft = office.state()["signing"]
    assert office.state()["documents"].keys() & {"1", "2"}
    signing = await office.dispatch(parcel)
    assert [document.name for document in signing.documents] == [name for name, _ in parcel.documents]
    (message,) = abandoned(caplog)
    assert message.endswith(f"draft {draft} was abandoned: its documents are out of order")
    office.sent_well(parcel, spare=1)


async def test_abandoned_drafts_are_in_the_result_and_in_the_notes_of_the_error(office: Office) -> None:
    parcel = parcel_of(1, 1)
    office.fail("documents.upload", "drop-before-commit")
    office.fail("recipients.add", "expired-token")
    with pytest.raises(Unauthorized) as caught:
        await office.client.with_options(retry=RetryPolicy.none()).dispatch(parcel.package, office.path)
    old, current = [signing.id for signing in office.sandbox.signings]
    note = f"package 'Lease': its signing is {current}; status 'draft'; abandoned drafts: {old}"
    assert caught.value.__notes__ == [note]
    for _ in range(2):
        (result,) = await office.dispatch_many(parcel)
        assert (result.error, result.abandoned) == (None, (old,))


@pytest.mark.parametrize("step", ["documents.upload", "recipients.add", "signings.send"])
async def test_draft_with_a_refused_step_is_kept_and_resumed(office: Office, step: str) -> None:
    parcel = parcel_of()
    for skipped in (0 if step == "signings.send" else 1, 0):
        office.fail(step, "expired-token", skip=skipped)
        (result,) = await office.dispatch_many(parcel)
        assert isinstance(result.error, Unauthorized)
        (draft,) = office.sandbox.signings
        assert any(draft.id in note and "'draft'" in note for note in result.error.__notes__)
    assert result.signing is not None
    assert (result.signing.id, result.signing.is_draft) == (draft.id, True)
    held = {document.id for document in office.sandbox.documents(draft.id)}
    assert {document.id for document in result.signing.documents} == held
    state = office.state()
    assert (state["status"], state["signing"], "401" in state["error"]) == ("draft", draft.id, True)
    assert None not in [*state["documents"].values(), *state["recipients"].values()]
    before = office.count()
    assert (await office.dispatch(parcel)).id == draft.id
    assert office.state()["error"] is None
    office.sent_well(parcel)
    # The draft is read before it is completed and before it is sent, and the signing after it was sent.
    missing = {"documents.upload": {step: 1, "recipients.add": 2}, "recipients.add": {step: 1}, "signings.send": {}}
    added = {**missing[step], "signings.send": 1, "signings.get": 3, "recipients.list": 2}
    assert office.count() - before == added


async def test_refusal_after_an_ambiguous_attempt_leaves_the_draft_ambiguous(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    parcel = parcel_of(1, 1)
    office.fail("documents.upload", "drop-before-commit")
    office.fail("documents.upload", "expired-token")
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel)
    assert office.state()["documents"] == {"0": None}
    (draft,) = office.sandbox.signings
    signing = await office.dispatch(parcel)
    assert signing.id != draft.id
    (message,) = abandoned(caplog)
    assert message.endswith(f": draft {draft.id} was abandoned: the outcome of one of its steps is unknown")
    office.sent_well(parcel, spare=1)


@pytest.mark.parametrize("outcome", ["sent", "drop-after-commit", "drop-before-commit"])
async def test_package_without_a_key_counts_as_sent_if_its_correction_was_sent(
    office: Office, caplog: pytest.LogCaptureFixture, outcome: str
) -> None:
    """A report of failures keeps the key of a row that is corrected there. An unknown outcome is read first."""
    office.fail("recipients.add", "expired-token")
    original = parcel_of(name="Leese")
    with pytest.raises(Unauthorized):
        await office.dispatch(original)
    correction = parcel_of(name="Lease", key=office.state()["content"])
    if outcome == "sent":
        await office.dispatch(correction)
    else:
        office.fail("signings.send", outcome)
        without_retry = office.client.with_options(retry=RetryPolicy.none())
        with pytest.raises(OutcomeUnknown):
            await without_retry.dispatch(correction.package, office.path)
    (result,) = await office.dispatch_many(original)
    if outcome == "drop-before-commit":
        assert "names another package, which may have been sent as signing" in str(result.error)
        await office.dispatch(correction)
        (result,) = await office.dispatch_many(original)
    assert (result.error, result.sent_earlier) == (None, True)
    assert "package 'Leese' counts as sent: its key was sent with other content, as signing" in caplog.text
    office.sent_well(correction, spare=1)


async def test_changed_package_replaces_an_unsent_version_and_is_refused_after_the_sending(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    office.fail("recipients.add", "expired-token")
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel_of(name="First", key="lease"))
    (draft,) = office.sandbox.signings
    second = parcel_of(name="Second", key="lease")
    signing = await office.dispatch(second)
    assert office.state()["abandoned"] == [draft.id]
    assert abandoned(caplog) == [f"package 'lease': draft {draft.id} was abandoned: the package was changed"]
    assert (await office.dispatch(second)).id == signing.id
    office.sent_well(second)
    third = office.client.dispatch_many([parcel_of(name="Third", key="lease").package], office.path)
    (result,) = [result async for result in third]
    assert result.signing == Signing(signing.id, is_draft=False)
    assert "key: 'lease' names another package, which was sent as signing" in str(result.error)
    assert isinstance(result.error, InvalidRequest)
    assert office.state()["error"] is None
