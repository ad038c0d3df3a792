"""Bulk uploads: results, laziness, leaving early, progress and memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from signing_async import (
    ClientClosed,
    InvalidRequest,
    MemoryTokenStore,
    NotFound,
    OAuth,
    PdfRejected,
    PdfSource,
    Progress,
    RefreshRejected,
    Signing,
    SigningClient,
    Token,
    Unauthorized,
)
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.servers import serving

SIZE = 20_000


@pytest.fixture
async def signing(client: SigningClient) -> Signing:
    """A draft."""
    return await client.signings.create(name="Leases", language="EN")


def named(count: int, size: int = SIZE) -> list[PdfSource]:
    """Return this many different PDFs."""
    return [PdfSource(make_pdf(size, seed=number), f"lease-{number}.pdf") for number in range(count)]


def descriptors() -> int:
    """Return the number of open files and sockets."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def others() -> set[asyncio.Task[Any]]:
    """Return the tasks of the package, after cancelled ones have ended."""
    for _ in range(20):
        await asyncio.sleep(0)
    return {task for task in asyncio.all_tasks() if task.get_name().startswith("signing_async")}


async def drain(results: Any) -> list[Any]:
    return [result async for result in results]


async def test_endless_sources_are_pulled_as_workers_become_free_also_with_progress(
    client: SigningClient, signing: Signing
) -> None:
    pulled = 0

    async def endless() -> AsyncIterator[PdfSource]:
        nonlocal pulled
        while True:
            pulled += 1
            yield PdfSource(make_pdf(SIZE, seed=pulled), f"lease-{pulled}.pdf")

    progress: list[Progress] = []
    many = client.documents.upload_many(signing, endless(), concurrency=2, on_progress=progress.append)
    async with many as results:
        for taken in range(1, 11):
            assert (await anext(results)).error is None
            assert pulled <= taken + 4
        await asyncio.sleep(0.1)
        assert pulled <= taken + 4
    assert {(one.files_total, one.bytes_total) for one in progress} == {(None, None)}


async def test_error_of_one_file_does_not_affect_the_others(
    sandbox: Sandbox, client: SigningClient, signing: Signing, tmp_path: Path
) -> None:
    """Errors of the file, of the service, and of the caller's own source."""

    async def broken() -> AsyncIterator[bytes]:
        yield make_pdf(SIZE)[:100]
        raise LookupError("the bucket is gone")

    good = named(3)
    bad: list[Any] = [b"no PDF", tmp_path / "missing.pdf", broken(), 5, None]
    many = client.documents.upload_many(signing, [*bad[:2], *good, *bad[2:]], concurrency=3)
    results = {id(result.source): result for result in await drain(many)}
    errors = [type(results[id(source)].error) for source in bad]
    assert errors == [PdfRejected, InvalidRequest, LookupError, InvalidRequest, InvalidRequest]
    assert all(results[id(source)].document is None for source in bad)
    assert all(results[id(source)].document is not None for source in good)
    assert len(sandbox.requests_of("documents.upload")) == 3


async def test_pairs_are_uploaded_to_their_signings(sandbox: Sandbox, client: SigningClient) -> None:
    signings = [await client.signings.create(name=f"Lease {number}", language="EN") for number in range(5)]

    async def pairs() -> AsyncIterator[tuple[Signing | str, PdfSource]]:
        for number, signing in enumerate(signings):
            yield signing if number % 2 else signing.id, PdfSource(make_pdf(SIZE, seed=number), "lease.pdf")

    results = await drain(client.documents.upload_many(None, pairs(), 3))
    assert len(results) == 5
    for result in results:
        target, source = result.source
        assert result.document is not None
        assert sandbox.document_bytes(result.document.id) == source.source
        read = await client.signings.get(target)
        assert [document.id for document in read.documents] == [result.document.id]


async def test_item_that_is_no_pair_has_an_error_of_its_own(client: SigningClient, signing: Signing) -> None:
    items: list[Any] = [
        make_pdf(SIZE),
        (signing, make_pdf(SIZE), "name"),
        ("", make_pdf(SIZE)),
        ("00000000-0000-4000-8000-000000000000", make_pdf(SIZE)),
    ]
    results = await drain(client.documents.upload_many(None, items, 1))
    assert [type(result.error) for result in results] == [InvalidRequest, InvalidRequest, InvalidRequest, NotFound]
    assert "each item must be a pair (signing_id, source), got b'%PDF" in str(results[0].error)
    assert all(len(repr(result)) < 600 for result in results)
    items = [(signing, make_pdf(SIZE))]
    results = await drain(client.documents.upload_many(signing, items))
    assert "source: must be a path, bytes" in str(results[0].error)


@pytest.mark.parametrize("sources", ["lease.pdf", b"%PDF-", memoryview(b""), PdfSource(b""), io.BytesIO(), {}, None])
async def test_single_source_is_refused_as_sources(client: SigningClient, sources: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"sources: must be an iterable of sources, got {type(sources).__name__}"):
        client.documents.upload_many("s1", sources)


@pytest.mark.parametrize(
    ("signing_id", "options", "words"),
    [
        ("", {}, "signing_id: must be an id or a record"),
        ("s1", {"concurrency": 0}, "concurrency: must be an integer of at least 1, got 0"),
        ("s1", {"on_progress": 5}, "on_progress: must be callable, got 5"),
    ],
)
async def test_wrong_argument_is_refused_by_name(
    client: SigningClient, signing_id: str, options: Any, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        client.documents.upload_many(signing_id, [], **options)


# Leaving early


async def test_leaving_early_leaves_no_task_file_or_connection(
    sandbox: Sandbox, client: SigningClient, signing: Signing, tmp_path: Path
) -> None:
    sandbox.faults.add("documents.upload", "hang", times=None, skip=2)
    paths = [tmp_path / f"{number}.pdf" for number in range(10)]
    for path in paths:
        path.write_bytes(make_pdf(2_000_000))
    await client.me()
    before = descriptors()
    async for _ in client.documents.upload_many(signing, paths):
        break
    assert not await others()
    sandbox.faults.clear()
    async with asyncio.timeout(30):  # the sandbox closes its ends of the cancelled requests a moment later
        while descriptors() > before + 2:  # both ends of a second connection, if a second upload was completed
            await asyncio.sleep(0.01)
    await client.me()


async def test_closing_the_client_gives_every_remaining_item_that_error(
    client: SigningClient, signing: Signing
) -> None:
    results = client.documents.upload_many(signing, [*named(3), *[Path("/nowhere.pdf")] * 50], concurrency=1)
    assert (await anext(results)).document is not None
    await client.aclose()
    errors = [result.error async for result in results]
    assert len(errors) == 52
    closed = [error for error in errors if isinstance(error, ClientClosed)]
    assert len(closed) >= 45
    assert len({id(error) for error in closed}) == len(closed)


@pytest.mark.parametrize("auth", ["token", "oauth"])
async def test_rejected_token_is_not_tried_for_every_remaining_item(sandbox: Sandbox, auth: str) -> None:
    kind: type[Exception]
    if auth == "token":
        client, kind = SigningClient(sandbox.base_url, "wrong"), Unauthorized
    else:
        app = sandbox.register_app("http://localhost/callback")
        assert app.client_secret is not None
        oauth = OAuth(
            sandbox.base_url,
            client_id=app.client_id,
            client_secret=app.client_secret,
            redirect_uri="http://localhost/callback",
            store=MemoryTokenStore(Token("wrong", "wrong-as-well")),
        )
        client, kind = SigningClient(sandbox.base_url, oauth), RefreshRejected
    async with client:
        results = await drain(client.documents.upload_many("a-signing", named(1) * 50, concurrency=4))
    assert {type(result.error) for result in results} == {kind}
    assert len(results) == 50
    assert len(sandbox.requests) <= 12


# Progress


async def test_progress_of_all_files_grows_to_its_totals(
    client: SigningClient, signing: Signing, tmp_path: Path
) -> None:
    sources: list[Any] = [*named(6), make_pdf(SIZE, seed=7)]
    (tmp_path / "file.pdf").write_bytes(make_pdf(SIZE, seed=8))
    sources += [tmp_path / "file.pdf", str(tmp_path / "file.pdf"), b"no PDF", tmp_path / "missing.pdf"]
    reports: list[Progress] = []
    await drain(client.documents.upload_many(signing, sources, 3, reports.append))
    assert reports[-1] == Progress(11, 11, 9 * SIZE + 6, 9 * SIZE + 6)
    assert [one.files_done for one in reports] == sorted(one.files_done for one in reports)
    assert [one.bytes_done for one in reports] == sorted(one.bytes_done for one in reports)
    assert {one.files_total for one in reports} == {11}
    assert {one.bytes_total for one in reports} <= {None, 9 * SIZE + 6}


@pytest.mark.parametrize(
    ("make", "files", "size"),
    [
        (lambda pairs: iter(pairs), None, None),
        (lambda pairs: tuple(pairs), 4, 4 * SIZE),
        (lambda pairs: [*pairs[:3], (pairs[0][0], io.BytesIO(make_pdf(SIZE)))], 4, None),
        (lambda pairs: [*pairs, (5, 5, 5)], 5, 4 * SIZE),
    ],
)
async def test_totals_are_reported_if_known_without_reading(
    client: SigningClient, make: Callable[[list[Any]], Iterable[Any]], files: int | None, size: int | None
) -> None:
    signing = await client.signings.create(name="Leases", language="EN")
    pairs = make([(signing.id, source) for source in named(4)])
    reports: list[Progress] = []
    await drain(client.documents.upload_many(None, pairs, on_progress=reports.append))
    assert reports[-1].files_total == files
    assert reports[-1].bytes_total == size
    assert reports[-1].bytes_done == 4 * SIZE


# Resuming


async def test_interrupted_run_is_resumed_without_a_request_for_what_the_draft_holds(
    sandbox: Sandbox, client: SigningClient, signing: Signing, tmp_path: Path
) -> None:
    """Each document of the draft stands for one file: of two equal ones, one is still missing."""
    paths = [tmp_path / f"{number}.pdf" for number in range(6)]
    for path in paths:
        path.write_bytes(make_pdf(seed=int(path.stem)))
    first = {result.source: result.document async for result in client.documents.upload_many(signing, paths[:4])}
    before = len(sandbox.requests)
    progress: list[Progress] = []
    resumed = client.documents.upload_many(
        signing, [*paths, paths[0]], on_progress=progress.append, skip_existing=True, concurrency=3
    )
    results = [result async for result in resumed]
    assert [result.error for result in results] == [None] * 7
    found = [(result.source, result.document) for result in results]
    for path, document in first.items():
        assert document is not None
        assert document.id in {one.id for source, one in found if source == path and one is not None}
    assert len((await client.signings.get(signing)).documents) == 7
    uploads = [request for request in sandbox.requests[before:] if request.method == "POST"]
    assert len(uploads) == 3
    assert progress[-1] == Progress(7, 7, 7 * 1500, 7 * 1500)


async def test_file_of_the_same_name_and_another_content_is_not_skipped(
    client: SigningClient, signing: Signing, tmp_path: Path
) -> None:
    await client.documents.upload(signing, make_pdf(2000), "lease.pdf")
    pairs = [(signing, PdfSource(make_pdf(2500), "lease.pdf")), (signing, PdfSource(make_pdf(2000), "plan.pdf"))]
    results = await drain(client.documents.upload_many(None, pairs, skip_existing=True))
    assert [result.error for result in results] == [None, None]
    assert len((await client.signings.get(signing)).documents) == 3


async def test_nothing_is_skipped_or_sent_if_the_service_does_not_list_documents() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.json_response({"id": "s1"})

    async with serving(respond) as server, SigningClient(server.origin, "token") as client:
        many = client.documents.upload_many("s1", [make_pdf()], skip_existing=True)
        errors = [str(result.error) async for result in many]
        assert [request.method for request in server.requests] == ["GET"]
    assert errors == ["skip_existing: the service does not list the documents of the signing"]
