"""Uploads: the bytes on the wire, failures, progress and memory, of one file and of many."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from signing_async import (
    ClientClosed,
    InvalidRequest,
    NotFound,
    PdfRejected,
    PdfSource,
    Progress,
    RequestTimeout,
    Signing,
    SigningClient,
    Unauthorized,
)
from signing_async.sandbox import Sandbox
from tests.documents.uploads import LARGE, in_chunks, recording, upload
from tests.pdfs import make_pdf, stream_object, with_signature_field
from tests.servers import serving

SIZE = 20_000


@pytest.fixture
async def signing(client: SigningClient) -> Signing:
    """A draft."""
    return await client.signings.create(name="Leases", language="EN")


# On the wire


@pytest.mark.parametrize(
    ("size", "filename", "written"),
    [
        (1500, 'a"b.pdf', "a%22b.pdf"),
        (64 * 1024 + 1, "a\r\nX-Evil: 1\r\n\r\n.pdf", "a%0D%0AX-Evil: 1%0D%0A%0D%0A.pdf"),
        (LARGE, "avtal åäö;b=c\\d.pdf", "avtal åäö;b=c\\d.pdf"),
    ],
)
async def test_upload_is_one_form_part_with_a_length_and_not_chunked(size: int, filename: str, written: str) -> None:
    """File names are escaped as browsers do."""
    data = make_pdf(size)
    received = await upload(in_chunks(data), filename)
    assert received.line == "POST /api/1.0/signings/s1/documents HTTP/1.1"
    assert received.header("content-length") == str(len(received.body))
    assert received.header("transfer-encoding") is None
    assert received.header("expect") is None
    assert received.header("accept") == "application/json"
    assert received.header("authorization") == "Bearer token"
    assert received.header("content-encoding") is None
    content_type = received.header("content-type") or ""
    boundary = content_type.removeprefix("multipart/form-data; boundary=").encode()
    assert len(boundary) == 32
    disposition = f'Content-Disposition: form-data; name="selected_file"; filename="{written}"'.encode()
    head = b"--" + boundary + b"\r\n" + disposition + b"\r\nContent-Type: application/pdf\r\n\r\n"
    assert received.body == head + data + b"\r\n--" + boundary + b"--\r\n"


# Every kind of source, against the sandbox


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_every_kind_of_source_arrives_byte_for_byte_also_after_a_retry(
    sandbox: Sandbox, client: SigningClient, signing: Signing, tmp_path: Path, size: int
) -> None:
    """File objects are read from their position, and keep it."""
    data = make_pdf(size)
    path = tmp_path / "lease.pdf"
    path.write_bytes(data)
    framed, packed = tmp_path / "framed.pdf", tmp_path / "packed.gz"
    framed.write_bytes(b"before" + data)
    packed.write_bytes(gzip.compress(data, 1))
    with (
        framed.open("rb") as file,
        framed.open("rb", buffering=0) as raw,
        gzip.open(packed) as unpacked,
        tempfile.SpooledTemporaryFile(max_size=2**20) as spooled,
    ):
        memory = io.BytesIO(b"before" + data)
        spooled.write(b"before" + data)
        at_offset = [file, raw, spooled, memory]
        for each in at_offset:
            each.seek(6)
        sources: list[tuple[Callable[[], Any], str]] = [
            (lambda: path, "lease.pdf"),
            (lambda: str(path), "lease.pdf"),
            (lambda: data, "document.pdf"),
            (lambda: memoryview(data), "document.pdf"),
            (lambda: memory, "document.pdf"),
            (lambda: file, "framed.pdf"),
            (lambda: raw, "framed.pdf"),
            (lambda: unpacked, "packed.gz"),
            (lambda: spooled, "document.pdf"),
            (lambda: in_chunks(data), "document.pdf"),
            (lambda: PdfSource(path, "Avtal.pdf"), "Avtal.pdf"),
        ]
        for make, name in sources:
            for fault in (None, "503", "500-after-commit") if size == LARGE else (None,):
                if fault:
                    sandbox.faults.add("documents.upload", fault)
                document = await client.documents.upload(signing, make())
                assert sandbox.document_bytes(document.id) == data, (name, fault)
                assert document.name == name
        assert [each.tell() for each in at_offset] == [6] * len(at_offset)
    uploads = len(sources) * (3 if size == LARGE else 1)
    assert len(sandbox.documents(signing.id)) == uploads
    assert len(sandbox.requests_of("documents.upload")) == uploads + (len(sources) if size == LARGE else 0)


async def test_one_buffer_can_be_uploaded_to_several_signings_at_once(sandbox: Sandbox, client: SigningClient) -> None:
    memory, data = io.BytesIO(make_pdf(LARGE)), bytearray(make_pdf(LARGE))
    signings = [await client.signings.create(name="Lease", language="EN") for _ in range(4)]
    documents = await asyncio.gather(
        *(client.documents.upload(signing, source) for signing in signings for source in (memory, data))
    )
    assert {sandbox.document_bytes(document.id) for document in documents} == {make_pdf(LARGE)}
    memory.write(b"again")
    memory.close()
    data.clear()


# Refusals and failures


async def test_deadline_includes_reading_the_source(sandbox: Sandbox, client: SigningClient) -> None:
    """A TimeoutError of the source's own is raised unchanged."""

    async def stalling() -> AsyncIterator[bytes]:
        yield make_pdf(LARGE)[:400_000]
        await asyncio.Event().wait()

    async def giving_up() -> AsyncIterator[bytes]:
        yield b"%PDF-1.7"
        raise TimeoutError("the bucket did not respond")

    async with asyncio.timeout(20):
        with pytest.raises(RequestTimeout, match="deadline passed before anything was sent"):
            await client.with_options(timeout=0.1).documents.upload("s1", stalling())
    with pytest.raises(TimeoutError, match="the bucket did not respond"):
        await client.documents.upload("s1", giving_up())
    assert sandbox.requests == []


@pytest.mark.parametrize("ends", ["deadline", "cancellation"])
async def test_upload_that_waits_for_one_of_the_same_name_can_end_before_it(
    sandbox: Sandbox, client: SigningClient, signing: Signing, ends: str
) -> None:
    """It leaves no trace: afterwards the name can be uploaded as ever."""
    sandbox.faults.add("documents.upload", "hang")
    first = asyncio.create_task(client.documents.upload(signing, make_pdf(), "lease.pdf"))
    async with asyncio.timeout(20):
        while not sandbox.requests_of("documents.upload"):
            await asyncio.sleep(0.01)
        second = client.with_options(timeout=0.1 if ends == "deadline" else 60).documents
        waiting = asyncio.create_task(second.upload(signing, make_pdf(), "lease.pdf"))
        collection = client._ledger.signing(f"/api/1.0/signings/{signing.id}").documents
        while collection.pending.total() < 2:
            await asyncio.sleep(0)
        if ends == "cancellation":
            waiting.cancel()
        with pytest.raises((RequestTimeout, asyncio.CancelledError)) as caught:
            await waiting
        assert isinstance(caught.value, RequestTimeout) == (ends == "deadline")
        assert len(sandbox.requests_of("documents.upload")) == 1
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (dict(collection.pending), dict(collection.locks)) == ({}, {})
        await client.documents.upload(signing, make_pdf(), "other.pdf")


# Progress


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_progress_grows_with_the_bytes_sent_and_ends_with_one_file_done(size: int) -> None:
    reports: list[Progress] = []
    await upload(make_pdf(size), on_progress=reports.append)
    assert reports[-2:] == [Progress(0, 1, size, size), Progress(1, 1, size, size)]
    assert [progress.bytes_done for progress in reports] == sorted(progress.bytes_done for progress in reports)
    assert all(progress.bytes_total == size for progress in reports)
    assert len(reports) == 1 + -(-size // 2**20)


async def test_progress_takes_back_the_bytes_of_a_failed_attempt(
    sandbox: Sandbox, client: SigningClient, signing: Signing
) -> None:
    sandbox.faults.add("documents.upload", "503")
    reports: list[int] = []
    await client.documents.upload(
        signing, make_pdf(LARGE), on_progress=lambda progress: reports.append(progress.bytes_done)
    )
    again = reports.index(0)
    assert reports[:again] == sorted(reports[:again])
    assert reports[again:] == [*range(0, LARGE, 2**20), LARGE, LARGE]


async def test_on_progress_that_raises_is_logged_and_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[Progress] = []

    def fail(progress: Progress) -> None:
        reports.append(progress)
        raise LookupError("no such bar")

    await upload(make_pdf(LARGE), on_progress=fail)
    assert len(reports) == 1
    [logged] = [record.getMessage() for record in caplog.records if record.name == "signing_async"]
    assert logged == "on_progress failed and is not called again"


# Resources


async def test_upload_of_10_mib_takes_a_few_blocks_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    # A file that mentions `/ByteRange` is searched for more than others.
    content = stream_object(b"\n" * 10_200_000)
    path.write_bytes(with_signature_field(catalog=b"/Perms<</UR3 7 0 R>>", more={5: content}))
    async with recording() as recorder:
        command = [sys.executable, "-c", _MEASURE, recorder.origin, str(path)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await process.communicate()
        assert [len(received.body) > 10_000_000 for received in recorder.uploads] == [False, True, True, True]
    # At most four blocks of 1 MiB: asyncio keeps a copy of what the socket has not accepted yet.
    assert max(map(int, out.split())) < 4 * 2**20


_MEASURE = """
import asyncio, sys, tracemalloc
from signing_async import SigningClient
from tests.pdfs import make_pdf, stream_object, with_signature_field

async def chunks(path):
    with open(path, "rb") as file:
        while chunk := file.read(100_000):
            yield chunk

async def main(origin, path):
    async with SigningClient(origin, "token") as client:
        # Imports of the first upload do not count.
        await client.documents.upload("s1", make_pdf(), "first.pdf")
        with open(path, "rb") as file:
            for source in (path, file, chunks(path)):
                tracemalloc.start()
                await client.documents.upload("s1", source)
                print(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()

asyncio.run(main(*sys.argv[1:]))
"""


# Many uploads: results


def named(count: int, size: int = SIZE) -> list[PdfSource]:
    """Return this many different PDFs."""
    return [PdfSource(make_pdf(size, seed=number), f"lease-{number}.pdf") for number in range(count)]


async def drain(results: Any) -> list[Any]:
    return [result async for result in results]


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


async def test_wrong_argument_is_refused_by_name(client: SigningClient) -> None:
    single = ["lease.pdf", b"%PDF-", memoryview(b""), PdfSource(b""), io.BytesIO(), {}, None]
    words = "sources: must be an iterable of sources, got"
    cases: list[tuple[str, Any, dict[str, Any], str]] = [
        *(("s1", source, {}, f"{words} {type(source).__name__}") for source in single),
        ("", [], {}, "signing_id: must be an id or a record"),
        ("s1", [], {"concurrency": 0}, "concurrency: must be an integer of at least 1, got 0"),
        ("s1", [], {"on_progress": 5}, "on_progress: must be callable, got 5"),
    ]
    for signing_id, sources, options, problem in cases:
        with pytest.raises(InvalidRequest, match=problem):
            client.documents.upload_many(signing_id, sources, **options)


# Many uploads: leaving early


async def test_leaving_early_leaves_no_task_file_or_connection(
    sandbox: Sandbox, client: SigningClient, signing: Signing, tmp_path: Path
) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    sandbox.faults.add("documents.upload", "hang", times=None, skip=2)
    paths = [tmp_path / f"{number}.pdf" for number in range(10)]
    for path in paths:
        path.write_bytes(make_pdf(2_000_000))
    await client.me()
    before = descriptors()
    async for _ in client.documents.upload_many(signing, paths):
        break
    for _ in range(20):  # cancelled tasks end
        await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("signing_async")]
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


async def test_rejected_token_is_not_tried_for_every_remaining_item(sandbox: Sandbox) -> None:
    async with SigningClient(sandbox.base_url, "wrong") as client:
        results = await drain(client.documents.upload_many("a-signing", named(1) * 50, concurrency=4))
    assert {type(result.error) for result in results} == {Unauthorized}
    assert len(results) == 50
    assert len(sandbox.requests) <= 12


# Many uploads: progress


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


# Many uploads: resuming


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


@pytest.mark.parametrize(
    ("reported", "uploads"),
    [
        ({"size": 1500, "sha256": hashlib.sha256(make_pdf(1500)).hexdigest()}, 0),
        ({"size": 1500, "sha256": "0" * 64}, 1),
        ({}, 0),
    ],
    ids=["equal hash", "other hash", "name only"],
)
async def test_file_is_skipped_by_its_hash_or_by_its_name_if_the_service_reports_neither_size_nor_hash(
    reported: dict[str, Any], uploads: int
) -> None:
    async with recording() as recorder, SigningClient(recorder.origin, "token") as client:
        recorder.documents = [{"id": "d0", "name": "lease.pdf", **reported}]
        source = PdfSource(make_pdf(1500), "lease.pdf")
        (result,) = await drain(client.documents.upload_many("s1", [source], skip_existing=True))
    assert (result.error, len(recorder.uploads)) == (None, uploads)


async def test_nothing_is_skipped_or_sent_if_the_service_does_not_list_documents() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.json_response({"id": "s1"})

    async with serving(respond) as server, SigningClient(server.origin, "token") as client:
        many = client.documents.upload_many("s1", [make_pdf()], skip_existing=True)
        errors = [str(result.error) async for result in many]
        assert [request.method for request in server.requests] == ["GET"]
    assert errors == ["skip_existing: the service does not list the documents of the signing"]
