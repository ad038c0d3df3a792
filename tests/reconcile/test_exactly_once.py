"""Writes are repeated without ever taking effect twice: each operation, under each way to lose a response."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from signing_async import (
    CannotBeSent,
    NewRecipient,
    NotFound,
    OutcomeUnknown,
    OutcomeUnknownTimeout,
    RequestTimeout,
    RetryPolicy,
    ServerError,
    Signing,
    SigningClient,
    SigningPackage,
    Timeouts,
    TransportError,
)
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.reconcile.limiter import FailingLimiter
from tests.servers import serving

COMMITTED = ["500-after-commit", "502-html-after-commit", "drop-after-commit"]
NOT_COMMITTED = ["500", "503", "502-html", "drop-before-commit", "429"]
BODY_LOST = ["truncate"]
QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


async def _draft(client: SigningClient) -> Signing:
    return await client.signings.create(name="Lease", language="EN", signing_order="parallel")


async def _sendable(client: SigningClient) -> Signing:
    signing = await _draft(client)
    await client.documents.upload(signing, make_pdf(), "lease.pdf")
    await client.recipients.add(signing, email="anna@example.com", first_name="Anna", last_name="Berg", order=1)
    return signing


def _sends(sandbox: Sandbox, signing: Signing) -> int:
    """How often the recipients of a signing were invited."""
    ids = {recipient.id for recipient in sandbox.recipients(signing.id)}
    return max(Counter(n.recipient_id for n in sandbox.notifications if n.recipient_id in ids).values(), default=0)


@pytest.mark.parametrize("kind", COMMITTED + NOT_COMMITTED + BODY_LOST)
async def test_send_takes_effect_once(sandbox: Sandbox, client: SigningClient, kind: str) -> None:
    """However its response is lost, a signing is sent, and its recipients are invited once."""
    signing = await _sendable(client)
    fault = sandbox.faults.add("signings.send", kind, **({"retry_after": 0} if kind == "429" else {}))
    await client.signings.send(signing)
    assert fault.hits == 1
    assert sandbox.signing(signing.id).state == "sent"
    assert _sends(sandbox, signing) == 1
    expected = 1 if kind in COMMITTED + BODY_LOST else 2
    assert len(sandbox.requests_of("signings.send")) == expected


@pytest.mark.parametrize("kind", COMMITTED + NOT_COMMITTED + BODY_LOST)
async def test_add_takes_effect_once(sandbox: Sandbox, client: SigningClient, kind: str) -> None:
    """However its response is lost, a recipient is added once, and the record that is returned is the server's."""
    signing = await _draft(client)
    bo = await client.recipients.add(signing, email="bo@example.com", first_name="Bo", last_name="Ek", order=1)
    sandbox.faults.add("recipients.add", kind, **({"retry_after": 0} if kind == "429" else {}))
    added = await client.recipients.add(signing, email="Anna@Example.com", first_name="Anna", last_name="Berg", order=2)
    held = sandbox.recipients(signing.id)
    assert [recipient.email.lower() for recipient in held] == ["bo@example.com", "anna@example.com"]
    assert added.id == held[1].id
    assert bo.id == held[0].id


@pytest.mark.parametrize("kind", COMMITTED + NOT_COMMITTED + BODY_LOST)
async def test_upload_takes_effect_once(sandbox: Sandbox, client: SigningClient, kind: str) -> None:
    """However its response is lost, a document is uploaded once, and the record that is returned is its own."""
    signing = await _draft(client)
    sandbox.faults.add("documents.upload", kind, **({"retry_after": 0} if kind == "429" else {}))
    data = make_pdf(text="the lease")
    document = await client.documents.upload(signing, data, "lease.pdf")
    held = sandbox.documents(signing.id)
    assert [one.id for one in held] == [document.id]
    assert sandbox.document_bytes(document.id) == data


@pytest.mark.parametrize("kind", COMMITTED + NOT_COMMITTED + BODY_LOST)
async def test_create_succeeds(sandbox: Sandbox, client: SigningClient, kind: str) -> None:
    """A signing is created; a lost response leaves a spare draft at most, and nothing is sent to anybody."""
    sandbox.faults.add("signings.create", kind, **({"retry_after": 0} if kind == "429" else {}))
    signing = await _draft(client)
    spare = 1 if kind in COMMITTED + BODY_LOST else 0
    assert len(sandbox.signings) == 1 + spare
    assert sandbox.signings[-1].id == signing.id
    assert sandbox.notifications == []


@pytest.mark.parametrize("kind", ["500-after-commit", "502-html-after-commit", "500", "503"])
async def test_remind_is_repeated_after_5xx(sandbox: Sandbox, client: SigningClient, kind: str) -> None:
    """The specification calls 5xx transient, and a reminder is repeated after it."""
    signing = await _sendable(client)
    await client.signings.send(signing)
    recipient = sandbox.recipients(signing.id)[0]
    sandbox.faults.add("recipients.remind", kind)
    await client.recipients.remind(signing, recipient.id)
    assert len(sandbox.requests_of("recipients.remind")) == 2


async def test_reminder_whose_repeat_the_callers_rate_limiter_prevents_is_an_unknown_outcome(
    sandbox: Sandbox, client: SigningClient
) -> None:
    signing = await _sendable(client)
    await client.signings.send(signing)
    recipient = sandbox.recipients(signing.id)[0]
    sandbox.faults.add("recipients.remind", "502-html-after-commit")
    limiter = FailingLimiter(lambda: sandbox.requests_of("recipients.remind"), "acquire", LookupError("it is gone"))
    async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=QUICK, rate_limiter=limiter) as failing:
        with pytest.raises(OutcomeUnknown, match=r"the call failed \(LookupError\)$") as caught:
            await failing.recipients.remind(signing, recipient.id)
        with pytest.raises(LookupError):
            await failing.me()
    assert isinstance(caught.value.__cause__, LookupError)
    assert not caught.value.transient


async def test_reminder_after_whose_request_the_callers_rate_limiter_fails_is_an_unknown_outcome(
    sandbox: Sandbox, client: SigningClient
) -> None:
    signing = await _sendable(client)
    await client.signings.send(signing)
    recipient = sandbox.recipients(signing.id)[0]
    limiter = FailingLimiter(lambda: True, "release", ConnectionError("it is gone"))
    async with SigningClient(sandbox.base_url, sandbox.access_token(), rate_limiter=limiter) as failing:
        with pytest.raises(OutcomeUnknown, match=r"the call failed \(ConnectionError\)$") as caught:
            await failing.recipients.remind(signing, recipient.id)
        # Reads and the creation of drafts are safe to repeat, so the caller gets its own error.
        with pytest.raises(ConnectionError):
            await failing.me()
        with pytest.raises(ConnectionError):
            await _draft(failing)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert not caught.value.transient


async def test_package_whose_sending_succeeded_is_sent_whatever_fails_afterwards(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """The signing cannot be read, because of the caller's own rate limiter."""
    package = SigningPackage("Lease", "EN", [make_pdf()], [NewRecipient("anna@example.com")])
    limiter = FailingLimiter(lambda: sandbox.requests_of("signings.send"), "acquire", ConnectionError())
    async with SigningClient(sandbox.base_url, sandbox.access_token(), rate_limiter=limiter) as client:
        signing = await client.dispatch(package, tmp_path / "journal")
    assert [(each.id, each.state) for each in sandbox.signings] == [(signing.id, "sent")]


@pytest.mark.parametrize("kind", ["drop-after-commit", "drop-before-commit"])
async def test_remind_is_not_repeated_after_a_lost_response(sandbox: Sandbox, client: SigningClient, kind: str) -> None:
    signing = await _sendable(client)
    await client.signings.send(signing)
    recipient = sandbox.recipients(signing.id)[0]
    sandbox.faults.add("recipients.remind", kind)
    with pytest.raises(OutcomeUnknown, match=r"recipients\.remind"):
        await client.recipients.remind(signing, recipient.id)
    assert len(sandbox.requests_of("recipients.remind")) == 1


@pytest.mark.parametrize("kind", COMMITTED)
async def test_older_document_of_the_same_name_is_not_taken_for_the_new_one(sandbox: Sandbox, kind: str) -> None:
    token, retry = sandbox.access_token(), RetryPolicy(base_delay=0.01, settle=0.1)
    async with (
        SigningClient(sandbox.base_url, token, retry=retry) as first,
        SigningClient(sandbox.base_url, token, retry=retry) as second,
    ):
        signing = await _draft(first)
        old = await first.documents.upload(signing, make_pdf(text="old"), "lease.pdf")
        sandbox.faults.add("documents.upload", "drop-before-commit")
        sandbox.faults.add("documents.upload", kind)
        new = await second.documents.upload(signing, make_pdf(text="new"), "lease.pdf")
    assert new.id != old.id
    assert sandbox.document_bytes(new.id) == make_pdf(text="new")
    assert len(sandbox.documents(signing.id)) == 2


@pytest.mark.parametrize("kind", COMMITTED + NOT_COMMITTED)
async def test_twenty_concurrent_uploads_create_one_document_each(
    sandbox: Sandbox, client: SigningClient, kind: str
) -> None:
    signing = await _draft(client)
    # Each further 429 lowers the rate.
    given: dict[str, Any] = {"times": 8, "retry_after": 0} if kind == "429" else {"times": 20}
    sandbox.faults.add("documents.upload", kind, **given)
    files = {f"part {number}.pdf": make_pdf(text=f"part {number}") for number in range(20)}
    documents = await asyncio.gather(*(client.documents.upload(signing, data, name) for name, data in files.items()))
    assert len(sandbox.documents(signing.id)) == 20
    for document, data in zip(documents, files.values(), strict=True):
        assert sandbox.document_bytes(document.id) == data


@pytest.mark.parametrize("kind", COMMITTED + NOT_COMMITTED)
async def test_concurrent_uploads_of_one_name_create_one_document_each(
    sandbox: Sandbox, client: SigningClient, kind: str
) -> None:
    signing = await _draft(client)
    sandbox.faults.add("documents.upload", kind, times=8, **({"retry_after": 0} if kind == "429" else {}))
    files = [("same.pdf", make_pdf(text=f"same {n}")) for n in range(5)]
    files += [(f"other {n}.pdf", make_pdf(text=f"other {n}")) for n in range(5)]
    documents = await asyncio.gather(*(client.documents.upload(signing, data, name) for name, data in files))
    assert len(sandbox.documents(signing.id)) == 10
    for document, (_, data) in zip(documents, files, strict=True):
        assert sandbox.document_bytes(document.id) == data


async def test_uploads_under_random_faults_create_one_document_each_or_raise(
    sandbox: Sandbox, client: SigningClient
) -> None:
    signing = await _draft(client)
    for seed, kind in enumerate([*COMMITTED, "503", "drop-before-commit", "truncate"]):
        sandbox.faults.add("documents.upload", kind, times=None, probability=0.08, seed=seed)
    files = [(f"part {n % 15}.pdf", make_pdf(text=f"part {n}")) for n in range(40)]
    results = await asyncio.gather(
        *(client.documents.upload(signing, data, name) for name, data in files), return_exceptions=True
    )
    held = {document.id for document in sandbox.documents(signing.id)}
    good = [
        (result, data)
        for result, (_, data) in zip(results, files, strict=True)
        if not isinstance(result, BaseException)
    ]
    assert all(sandbox.document_bytes(result.id) == data for result, data in good)
    bad = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(error, OutcomeUnknown | ServerError | TransportError) for error in bad)
    assert len(good) <= len(held) <= len(good) + len(bad)
    contents = Counter(sandbox.document_bytes(one) for one in held)
    assert max(contents.values()) == 1


async def test_document_of_another_client_is_not_taken_for_the_effect(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _draft(client)
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as other:
        await other.documents.upload(signing, make_pdf(text="first"), "first.pdf")
        sandbox.faults.add("documents.upload", "500-after-commit")
        sandbox.faults.add("signings.get", "503", retry_after=0.5)
        upload = asyncio.create_task(client.documents.upload(signing, make_pdf(text="mine"), "lease.pdf"))
        while len(sandbox.documents(signing.id)) < 2:
            await asyncio.sleep(0.005)
        await other.documents.upload(signing, make_pdf(text="other"), "LEASE.PDF")
    with pytest.raises(OutcomeUnknown, match="more than one") as caught:
        await upload
    assert len(caught.value.known) == 3
    assert len(sandbox.documents(signing.id)) == 3


async def test_renamed_document_is_an_unknown_outcome(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _draft(client)
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as other:
        await other.documents.upload(signing, make_pdf(text="other"), "something else.pdf")
    sandbox.faults.add("documents.upload", "drop-before-commit")
    with pytest.raises(OutcomeUnknown, match="another name"):
        await client.documents.upload(signing, make_pdf(), "lease.pdf")
    assert len(sandbox.requests_of("documents.upload")) == 2


async def test_unresolved_upload_makes_the_next_of_its_name_undecidable(
    sandbox: Sandbox, client: SigningClient
) -> None:
    signing = await _draft(client)
    sandbox.faults.add("documents.upload", "hang")
    quick = client.with_options(timeout=0.4)
    with pytest.raises(OutcomeUnknown):
        await quick.documents.upload(signing, make_pdf(text="one"), "lease.pdf")
    sandbox.faults.add("documents.upload", "500-after-commit")
    with pytest.raises(OutcomeUnknown):
        await client.documents.upload(signing, make_pdf(text="two"), "lease.pdf")


async def test_reading_that_fails_is_an_unknown_outcome(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _sendable(client)
    sandbox.faults.add("signings.send", "500")
    sandbox.faults.add("signings.get", "503", times=None)
    with pytest.raises(OutcomeUnknown, match=r"the outcome is unknown.*503"):
        await client.signings.send(signing)
    assert len(sandbox.requests_of("signings.send")) == 1


async def test_server_that_keeps_failing_is_a_server_error_after_reconciliation(
    sandbox: Sandbox, client: SigningClient
) -> None:
    signing = await _sendable(client)
    sandbox.faults.add("signings.send", "503", times=None)
    with pytest.raises(ServerError, match="5 attempts") as caught:
        await client.signings.send(signing)
    assert caught.value.status == 503
    assert len(sandbox.requests_of("signings.send")) == 5
    assert sandbox.signing(signing.id).state == "draft"


async def test_last_attempt_is_reconciled_too(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _sendable(client)
    sandbox.faults.add("signings.send", "503", times=4)
    sandbox.faults.add("signings.send", "500-after-commit")
    await client.signings.send(signing)
    assert _sends(sandbox, signing) == 1


async def test_send_that_is_refused_as_already_sent_after_an_ambiguous_attempt_succeeds() -> None:
    """The first request took effect after the settle time, so the retry is refused: the signing was sent."""
    posts: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"id": "s1", "is_draft": len(posts) < 2})
        posts.append(1)
        if len(posts) == 1:
            return web.Response(status=504)
        return web.json_response({"code": "cannot_be_sent"}, status=400)

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        await client.signings.send("s1")
    assert len(posts) == 2


async def test_refusal_without_an_ambiguous_attempt_is_raised(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _draft(client)
    sandbox.faults.add("signings.send", "503")
    with pytest.raises(CannotBeSent):
        await client.signings.send(signing)


async def test_ambiguous_request_is_not_repeated_before_its_retry_after(
    sandbox: Sandbox, client: SigningClient
) -> None:
    """The readings end earlier than the Retry-After."""
    signing = await _sendable(client)
    sandbox.faults.add("signings.send", "503", retry_after=0.4)
    began = asyncio.get_running_loop().time()
    await client.signings.send(signing)
    assert asyncio.get_running_loop().time() - began >= 0.4


@pytest.mark.parametrize("kind", ["500-after-commit", "502-html-after-commit", "drop-after-commit"])
async def test_ambiguous_failure_without_retries_is_an_unknown_outcome(
    sandbox: Sandbox, client: SigningClient, kind: str
) -> None:
    signing = await _sendable(client)
    reads = len(sandbox.requests_of("signings.get"))
    sandbox.faults.add("signings.send", kind)
    with pytest.raises(OutcomeUnknown) as caught:
        await client.with_options(retry=RetryPolicy.none()).signings.send(signing)
    assert caught.value.effect == "unknown"
    assert len(sandbox.requests_of("signings.get")) == reads


async def test_deadline_during_a_send_is_an_unknown_outcome(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _sendable(client)
    sandbox.faults.add("signings.send", "hang")
    with pytest.raises(OutcomeUnknownTimeout, match="the deadline passed before it could be reconciled") as caught:
        await client.with_options(timeout=0.5).signings.send(signing)
    assert isinstance(caught.value, RequestTimeout | TimeoutError)
    assert len(sandbox.requests_of("signings.send")) == 1


async def test_deadline_during_a_reminder_is_an_unknown_outcome(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _sendable(client)
    await client.signings.send(signing)
    sandbox.faults.add("recipients.remind", "hang")
    with pytest.raises(OutcomeUnknownTimeout):
        await client.with_options(timeout=0.3).recipients.remind(signing, sandbox.recipients(signing.id)[0].id)


async def test_similar_recipients_are_distinguished(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await client.signings.create(name="Lease", language="EN", signing_order="sequential")
    first = await client.recipients.add(signing, email="anna@example.com", first_name="Anna", order=1)
    sandbox.faults.add("recipients.add", "drop-before-commit")
    second = await client.recipients.add(signing, email="anna@example.com", first_name="Anna", order=2)
    assert first.id != second.id
    assert [recipient.order for recipient in sandbox.recipients(signing.id)] == [1, 2]


async def test_slow_upload_is_waited_for_and_not_repeated() -> None:
    held: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"id": "s1", "documents": [{"id": one, "name": "a.pdf"} for one in held]})
        await request.read()
        await asyncio.sleep(0.4)
        held.append(f"d{len(held)}")
        return web.json_response({"id": held[-1], "name": "a.pdf"})

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        patient = client.with_options(timeout=Timeouts(call=0.1, transfer=30))
        assert (await patient.documents.upload("s1", make_pdf(), "a.pdf")).id == "d0"
    assert held == ["d0"]


@pytest.mark.parametrize("lost", ["drop", "504"])
async def test_effect_that_shows_shortly_after_the_failure_is_found(lost: str) -> None:
    held: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"id": "s1", "documents": [{"id": one, "name": "a.pdf"} for one in held]})
        await request.read()
        asyncio.get_running_loop().call_later(0.05, held.append, f"d{len(held)}")
        if lost == "drop":
            assert request.transport is not None
            request.transport.close()
        return web.Response(status=504)

    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        assert (await client.documents.upload("s1", make_pdf(), "a.pdf")).id == "d0"
    assert held == ["d0"]


async def test_refusal_after_an_ambiguous_attempt_is_compared_with_the_current_state() -> None:
    held: list[str] = []
    posts: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"id": "s1", "documents": [{"id": one, "name": "a.pdf"} for one in held]})
        await request.read()
        posts.append(1)
        if len(posts) == 1:
            return web.Response(status=504)
        held.append("d0")
        return web.json_response({"message": "there is such a document already"}, status=422)

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        assert (await client.documents.upload("s1", make_pdf(), "a.pdf")).id == "d0"


async def test_document_read_before_the_upload_is_known(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _draft(client)
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as other:
        old = await other.documents.upload(signing, make_pdf(text="old"), "lease.pdf")
    assert (await client.signings.get(signing)).documents
    sandbox.faults.add("documents.upload", "503")
    new = await client.documents.upload(signing, make_pdf(text="new"), "lease.pdf")
    assert new.id != old.id
    assert len(sandbox.documents(signing.id)) == 2


async def test_reading_during_an_upload_does_not_mark_its_document_as_known(
    sandbox: Sandbox, client: SigningClient
) -> None:
    signing = await _draft(client)
    sandbox.faults.add("documents.upload", "500-after-commit")
    sandbox.faults.add("signings.get", "503", retry_after=0.4)
    upload = asyncio.create_task(client.documents.upload(signing, make_pdf(), "lease.pdf"))
    while not sandbox.requests_of("signings.get"):
        await asyncio.sleep(0.005)
    assert (await client.signings.get(signing)).documents
    await upload
    assert len(sandbox.documents(signing.id)) == 1


async def test_settled_failure_does_not_affect_the_next_upload(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _draft(client)
    sandbox.faults.add("documents.upload", "503", times=5)
    with pytest.raises(ServerError, match="5 attempts"):
        await client.documents.upload(signing, make_pdf(), "lease.pdf")
    sandbox.faults.add("documents.upload", "500-after-commit")
    document = await client.documents.upload(signing, make_pdf(), "lease.pdf")
    assert [one.id for one in sandbox.documents(signing.id)] == [document.id]


async def test_unresolved_upload_is_resolved_once_its_document_is_read(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _draft(client)
    sandbox.faults.add("documents.upload", "500-after-commit", times=3)
    with pytest.raises(OutcomeUnknown):
        await client.with_options(retry=RetryPolicy.none()).documents.upload(signing, make_pdf(text="1"), "a.pdf")
    with pytest.raises(OutcomeUnknown):
        await client.documents.upload(signing, make_pdf(text="2"), "a.pdf")
    await client.signings.get(signing)
    third = await client.documents.upload(signing, make_pdf(text="3"), "a.pdf")
    assert sandbox.document_bytes(third.id) == make_pdf(text="3")


async def test_two_hundred_calls_survive_a_short_outage(sandbox: Sandbox, client: SigningClient) -> None:
    sandbox.faults.add("me", "503", times=100)
    calm = client.with_options(retry=RetryPolicy(base_delay=0.2))
    assert len(await asyncio.gather(*(calm.me() for _ in range(200)))) == 200


async def test_same_recipient_can_be_added_twice(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _draft(client)
    first = await client.recipients.add(signing, email="z@example.com", last_name="Zorn", order=5)
    sandbox.faults.add("recipients.add", "503")
    second = await client.recipients.add(signing, email="z@example.com")
    assert first.id != second.id
    assert len(sandbox.recipients(signing.id)) == 2


async def test_document_of_a_concurrent_upload_is_expected() -> None:
    held: list[str] = []
    failed: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"id": "s1", "documents": [{"id": one, "name": one} for one in held]})
        body = await request.read()
        name = "a.pdf" if b'"a.pdf"' in body else "b.pdf"
        if name == "b.pdf" and not failed:
            while not held:
                await asyncio.sleep(0.005)
            failed.append(name)
            return web.Response(status=500)
        held.append(name)
        while name == "a.pdf" and "b.pdf" not in held:
            await asyncio.sleep(0.005)
        return web.json_response({"id": name, "name": name})

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        names = ("a.pdf", "b.pdf")
        documents = await asyncio.gather(*(client.documents.upload("s1", make_pdf(), name) for name in names))
    assert [document.id for document in documents] == ["a.pdf", "b.pdf"]
    assert held == ["a.pdf", "b.pdf"]


async def test_upload_that_begins_during_a_reading_is_not_marked_as_known() -> None:
    held: list[str] = []
    read = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        if request.method == "GET":
            while not held:
                await asyncio.sleep(0.005)
            return web.json_response({"id": "s1", "documents": [{"id": one, "name": "a.pdf"} for one in held]})
        await request.read()
        if request.path.endswith("/signings"):
            return web.json_response({"id": "s1"})
        held.append(f"d{len(held)}")
        await read.wait()
        return web.Response(status=500)

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        await client.signings.create(name="x", language="EN")
        reading = asyncio.create_task(client.signings.get("s1"))
        while len(server.requests) < 2:
            await asyncio.sleep(0.005)
        upload = asyncio.create_task(client.documents.upload("s1", make_pdf(), "a.pdf"))
        assert (await reading).documents
        read.set()
        assert (await upload).id == "d0"
    assert held == ["d0"]


async def test_many_uploads_to_an_unknown_signing_read_it_once(sandbox: Sandbox, client: SigningClient) -> None:
    """A signing that another client created is read before the first upload, and only then."""
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as other:
        signing = await _draft(other)
    uploads = (client.documents.upload(signing, make_pdf(text=f"{n}"), f"{n}.pdf") for n in range(10))
    await asyncio.gather(*uploads)
    assert len(sandbox.requests_of("signings.get")) == 1
    assert len(sandbox.documents(signing.id)) == 10
    with pytest.raises(NotFound):
        await client.documents.upload("missing", make_pdf(), "a.pdf")
