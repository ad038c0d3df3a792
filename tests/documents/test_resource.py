"""Uploads on the wire: the bytes, the form around them, and what happens on failures."""

from __future__ import annotations

import asyncio
import gzip
import io
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from signing_async import PdfSource, Progress, RequestTimeout, RetryPolicy, SigningClient
from signing_async.sandbox import Sandbox
from tests.documents.uploads import LARGE, in_chunks, recording, upload
from tests.pdfs import make_pdf

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


# On the wire


@pytest.mark.parametrize("size", [1500, 64 * 1024 + 1, LARGE])
async def test_upload_is_one_form_part_with_a_length_and_not_chunked(size: int) -> None:
    data = make_pdf(size)
    received = await upload(in_chunks(data), "lease.pdf")
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
    assert received.body == (
        b"--" + boundary + b'\r\nContent-Disposition: form-data; name="selected_file"; filename="lease.pdf"\r\n'
        b"Content-Type: application/pdf\r\n\r\n" + data + b"\r\n--" + boundary + b"--\r\n"
    )


@pytest.mark.parametrize(
    ("filename", "written"),
    [
        ("avtal åäö.pdf", "avtal åäö.pdf"),
        ('a"b.pdf', "a%22b.pdf"),
        ("a\r\nX-Evil: 1\r\n\r\n.pdf", "a%0D%0AX-Evil: 1%0D%0A%0D%0A.pdf"),
        ("a;b=c\\d.pdf", "a;b=c\\d.pdf"),
    ],
)
async def test_file_names_are_escaped_as_browsers_do(filename: str, written: str) -> None:
    body = (await upload(make_pdf(), filename)).body
    head = body.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert head[1] == f'Content-Disposition: form-data; name="selected_file"; filename="{written}"'
    assert len(head) == 3


# Every kind of source, against the sandbox


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_every_kind_of_source_arrives_byte_for_byte_also_after_a_retry(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, size: int
) -> None:
    """File objects are read from their position, and keep it."""
    data = make_pdf(size)
    path = tmp_path / "lease.pdf"
    path.write_bytes(data)
    signing = await client.signings.create(name="Lease", language="EN")
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
        await asyncio.sleep(60)

    async def giving_up() -> AsyncIterator[bytes]:
        yield b"%PDF-1.7"
        raise TimeoutError("the bucket did not respond")

    with pytest.raises(RequestTimeout, match="deadline passed before anything was sent"):
        await client.with_options(timeout=0.1).documents.upload("s1", stalling())
    with pytest.raises(TimeoutError, match="the bucket did not respond"):
        await client.documents.upload("s1", giving_up())
    assert sandbox.requests == []


# Progress


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_progress_grows_with_the_bytes_sent_and_ends_with_one_file_done(size: int) -> None:
    reports: list[Progress] = []
    await upload(make_pdf(size), on_progress=reports.append)
    assert reports[-2:] == [Progress(0, 1, size, size), Progress(1, 1, size, size)]
    assert [progress.bytes_done for progress in reports] == sorted(progress.bytes_done for progress in reports)
    assert all(progress.bytes_total == size for progress in reports)
    assert len(reports) == 1 + -(-size // 2**20)


async def test_progress_takes_back_the_bytes_of_a_failed_attempt(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await client.signings.create(name="Lease", language="EN")
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
    assert [record.getMessage() for record in caplog.records] == ["on_progress failed and is not called again"]


# Resources


async def test_upload_of_10_mib_takes_a_few_blocks_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(10 * 2**20))
    async with recording() as recorder:
        command = [sys.executable, "-c", _MEASURE, recorder.origin, str(path)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await process.communicate()
        assert [len(received.body) > 10 * 2**20 for received in recorder.uploads] == [False, True, True, True]
    assert max(map(int, out.split())) < 3 * 2**20


_MEASURE = """
import asyncio, sys, tracemalloc
from signing_async import SigningClient
from tests.pdfs import make_pdf

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
