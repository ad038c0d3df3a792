"""Writes are repeated without ever taking effect twice: each operation, under each way to lose a response."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
from aiohttp import web

from signing_async import (
    NewRecipient,
    NotFound,
    OutcomeUnknown,
    OutcomeUnknownTimeout,
    Recipient,
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

COMMITTED = ["500-after-commit", "502-html-after-commit", "drop-after-commit", "truncate"]
NOT_COMMITTED = ["500", "503", "502-html", "drop-before-commit", "429"]
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


@pytest.mark.parametrize("kind", COMMITTED + NOT_COMMITTED)
async def test_each_write_takes_effect_once(sandbox: Sandbox, client: SigningClient, kind: str) -> None:
    """However its response is lost; and the record that is returned is the server's."""

    def lose(operation: str) -> None:
        sandbox.faults.add(operation, kind, **({"retry_after": 0} if kind == "429" else {}))

    lose("signings.create")
    signing = await _draft(client)
    # A lost response leaves a spare draft at most.
    assert [one.id for one in sandbox.signings[kind in COMMITTED :]] == [signing.id]
    bo = await client.recipients.add(signing, email="bo@example.com", first_name="Bo", last_name="Ek", order=1)
    lose("recipients.add")
    added = await client.recipients.add(signing, email="Anna@Example.com", first_name="Anna", last_name="Berg", order=2)
    assert [recipient.id for recipient in sandbox.recipients(signing.id)] == [bo.id, added.id]
    lose("documents.upload")
    document = await client.documents.upload(signing, make_pdf(text="the lease"), "lease.pdf")
    assert [one.id for one in sandbox.documents(signing.id)] == [document.id]
    assert sandbox.document_bytes(document.id) == make_pdf(text="the lease")
    assert sandbox.notifications == []
    lose("signings.send")
    await client.signings.send(signing)
    assert (sandbox.signing(signing.id).state, _sends(sandbox, signing)) == ("sent", 1)
    assert len(sandbox.requests_of("signings.send")) == (1 if kind in COMMITTED else 2)


async def _sent(client: SigningClient) -> tuple[Signing, Recipient]:
    """Return a signing that was sent, and its recipient."""
    signing = await _sendable(client)
    await client.signings.send(signing)
    return signing, (await client.recipients.list(signing)).items[0]


@pytest.mark.parametrize(
    ("kind", "requests"),
    [("502-html-after-commit", 2), ("503", 2), ("drop-after-commit", 1), ("drop-before-commit", 1)],
)
async def test_reminder_is_repeated_after_5xx_but_not_after_a_lost_response(
    sandbox: Sandbox, client: SigningClient, kind: str, requests: int
) -> None:
    """The specification calls 5xx transient."""
    signing, recipient = await _sent(client)
    sandbox.faults.add("recipients.remind", kind)
    with nullcontext() if requests == 2 else pytest.raises(OutcomeUnknown, match=r"recipients\.remind"):
        await client.recipients.remind(signing, recipient)
    assert len(sandbox.requests_of("recipients.remind")) == requests


@pytest.mark.parametrize("when", ["acquire", "release"])
async def test_reminder_is_an_unknown_outcome_if_the_callers_rate_limiter_fails(
    sandbox: Sandbox, client: SigningClient, when: str
) -> None:
    """The limiter fails before the repeat, or after the request."""
    signing, recipient = await _sent(client)
    if when == "acquire":
        sandbox.faults.add("recipients.remind", "502-html-after-commit")
    limiter = FailingLimiter(lambda: sandbox.requests_of("recipients.remind"), when, ConnectionError())
    async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=QUICK, rate_limiter=limiter) as failing:
        with pytest.raises(OutcomeUnknown, match=r"the call failed \(ConnectionError\)$") as caught:
            await failing.recipients.remind(signing, recipient)
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


async def test_older_document_of_the_same_name_is_not_taken_for_the_new_one(
    sandbox: Sandbox, client: SigningClient
) -> None:
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as other:
        signing = await _draft(other)
        old = await other.documents.upload(signing, make_pdf(text="old"), "lease.pdf")
    sandbox.faults.add("documents.upload", "drop-before-commit")
    sandbox.faults.add("documents.upload", "drop-after-commit")
    new = await client.documents.upload(signing, make_pdf(text="new"), "lease.pdf")
    assert new.id != old.id
    assert sandbox.document_bytes(new.id) == make_pdf(text="new")
    assert len(sandbox.documents(signing.id)) == 2


@pytest.mark.parametrize("kind", ["drop-after-commit", "503", "429"])
async def test_concurrent_uploads_create_one_document_each(sandbox: Sandbox, client: SigningClient, kind: str) -> None:
    """Also uploads of the same name."""
    signing = await _draft(client)
    # Each further 429 lowers the rate.
    sandbox.faults.add("documents.upload", kind, times=8, **({"retry_after": 0} if kind == "429" else {}))
    names = ["same.pdf"] * 5 + [f"other {number}.pdf" for number in range(7)]
    files = [(name, make_pdf(text=f"part {number}")) for number, name in enumerate(names)]
    documents = await asyncio.gather(*(client.documents.upload(signing, data, name) for name, data in files))
    assert len(sandbox.documents(signing.id)) == len(files)
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
    failed = 0
    for result, (_, data) in zip(results, files, strict=True):
        if isinstance(result, BaseException):
            assert isinstance(result, OutcomeUnknown | ServerError | TransportError)
            failed += 1
        else:
            assert sandbox.document_bytes(result.id) == data
    assert len(files) - failed <= len(held) <= len(files)
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


async def test_ambiguous_request_is_not_repeated_before_its_retry_after(
    sandbox: Sandbox, client: SigningClient
) -> None:
    """The readings end earlier than the Retry-After."""
    signing = await _sendable(client)
    sandbox.faults.add("signings.send", "503", retry_after=0.4)
    began = asyncio.get_running_loop().time()
    await client.signings.send(signing)
    assert asyncio.get_running_loop().time() - began >= 0.4


async def test_ambiguous_failure_without_retries_is_an_unknown_outcome(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _sendable(client)
    reads = len(sandbox.requests_of("signings.get"))
    sandbox.faults.add("signings.send", "500-after-commit")
    with pytest.raises(OutcomeUnknown) as caught:
        await client.with_options(retry=RetryPolicy.none()).signings.send(signing)
    assert caught.value.effect == "unknown"
    assert len(sandbox.requests_of("signings.get")) == reads


async def test_deadline_during_a_reminder_is_an_unknown_outcome(sandbox: Sandbox, client: SigningClient) -> None:
    signing, recipient = await _sent(client)
    sandbox.faults.add("recipients.remind", "hang")
    with pytest.raises(OutcomeUnknownTimeout):
        await client.with_options(timeout=0.3).recipients.remind(signing, recipient)


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


async def test_same_recipient_can_be_added_twice(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await _draft(client)
    first = await client.recipients.add(signing, email="z@example.com", last_name="Zorn", order=5)
    sandbox.faults.add("recipients.add", "503")
    second = await client.recipients.add(signing, email="z@example.com")
    assert first.id != second.id
    assert len(sandbox.recipients(signing.id)) == 2


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
