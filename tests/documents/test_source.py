"""Sources of uploads: their names and kinds, the preflight, disks, and changing files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import hashlib
import io
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from werkzeug.datastructures import FileStorage

from signing_async import InvalidRequest, PdfRejected, PdfSource, Progress, SigningClient
from tests.documents.uploads import BLOCK, LARGE, in_chunks, open_files, recording, upload, uploads_of
from tests.pdfs import encrypted, make_pdf, with_signature_field

MOST = 3 * 2**20

# Names and kinds


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        ("folder/contract.pdf", None, "contract.pdf"),
        (Path("folder/contract.pdf"), "Lease.pdf", "Lease.pdf"),
        (io.BytesIO(), None, "document.pdf"),
        (PdfSource(b"", filename="a.pdf"), "b.pdf", "b.pdf"),
        (os.fsdecode(b"folder/caf\xe9.pdf"), None, "caf?.pdf"),
        (FileStorage(io.BytesIO(), "lease.pdf", "selected_file"), None, "lease.pdf"),
        (SimpleNamespace(read=bytes, name="<stdin>"), None, "document.pdf"),
    ],
)
def test_filename_is_the_given_one_or_that_of_the_path(source: Any, given: str | None, expected: str) -> None:
    """It can always be encoded in UTF-8."""
    assert PdfSource(source, given).filename == expected
    assert repr(PdfSource(source, given)) == f"PdfSource({expected!r})"


async def read_asynchronously(size: int = -1) -> bytes:
    """Read as an uploaded file of Starlette does."""
    return b""


@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        (None, {}, "source: must be a path, bytes, a binary file or an async iterable, got NoneType"),
        (io.StringIO(), {}, "source: the file is open as text; open it with mode 'rb'"),
        (
            SimpleNamespace(read=read_asynchronously),
            {},
            "source: its read() is asynchronous; pass a binary file or an async iterable of bytes",
        ),
        (b"", {"filename": " "}, "filename: must be a non-empty string, got ' '"),
        (b"", {"sha256": "g" * 64}, f"sha256: must be 64 hexadecimal digits, got {'g' * 64!r}"),
    ],
)
def test_wrong_argument_is_refused_with_its_name(source: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PdfSource(source, **options)
    assert str(caught.value) == problem


@pytest.mark.parametrize("chunk", ["text", None])
async def test_streams_and_files_must_give_bytes(chunk: Any) -> None:
    """A non-blocking pipe without data gives None."""

    async def give() -> AsyncIterator[Any]:
        yield b"%PDF-"
        yield chunk

    for source in (give(), SimpleNamespace(read=lambda size: chunk)):
        with pytest.raises(InvalidRequest, match=rf"^source: must yield bytes, got {type(chunk).__name__}$"):
            await upload(source)


# Sources that cannot be read


def refusing(number: int) -> Callable[..., Any]:
    """Return a function that raises this `OSError`."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


async def test_error_of_a_path_names_it_and_the_reason(tmp_path: Path) -> None:
    """A named pipe does not block, and nothing stays open."""
    os.mkfifo(tmp_path / "pipe")
    paths: list[tuple[str | Path, str]] = [
        (tmp_path / "none.pdf", "cannot open {}: No such file or directory"),
        ("a\0b", "cannot open {}: embedded null "),
        (tmp_path, "{} is not a regular file"),
        (tmp_path / "pipe", "{} is not a regular file"),
    ]
    before = open_files()
    for path, expected in paths:
        with pytest.raises(InvalidRequest) as caught:
            await upload(path)
        assert str(caught.value).startswith(f"source: {expected.format(repr(os.fspath(path)))}")
        assert (caught.value.transient, caught.value.exit_code) == (False, 2)
    assert open_files() == before


async def test_file_object_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(gzip.compress(make_pdf())[:-8] + bytes(8))
    with path.open("rb") as closed:
        pass
    with path.open("ab") as write_only, gzip.GzipFile(path) as corrupt:
        lost = SimpleNamespace(read=refusing(errno.ECONNRESET))
        for source in (closed, write_only, corrupt, lost):
            with pytest.raises(InvalidRequest, match=r"^source: cannot read (a|document)\.pdf: ") as caught:
                await upload(source)
            assert caught.value.transient == (source is lost)


@pytest.mark.parametrize("make", [lambda path: path.open("rb"), gzip.open])
async def test_file_at_its_end_is_empty_and_the_error_says_so(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(gzip.compress(make_pdf()))
    with make(path) as source:
        source.read()
        with pytest.raises(PdfRejected, match=r": the file is at its end: seek\(0\)\?$") as caught:
            await upload(source)
        assert caught.value.reason == "not_pdf"
        assert (await upload(source, preflight=False)).file == b""


async def test_stream_that_was_read_before_is_empty_and_the_error_says_so() -> None:
    async def stream() -> AsyncIterator[bytes]:
        yield make_pdf()

    source = stream()
    await upload(source, "a.pdf")
    with pytest.raises(PdfRejected, match=r"^a\.pdf: the stream is empty: was it read before\? Pass a new one$"):
        await upload(source, "a.pdf")


# The preflight


@pytest.mark.parametrize(
    ("make", "reason", "expected"),
    [
        (lambda: b"Dear Sir or Madam", "not_pdf", "a.pdf: not a PDF"),
        (lambda: b"", "not_pdf", "a.pdf: the file is empty"),
        (lambda: encrypted(make_pdf(LARGE)), "protected", "a.pdf: password protected"),
        (lambda: with_signature_field(b"/V 7 0 R"), "already_signed", "a.pdf: already signed"),
        (lambda: make_pdf(MOST + 1), "too_large", "a.pdf: too large: at most 3145728 bytes may be uploaded"),
    ],
)
async def test_preflight_refuses_with_a_reason_for_every_kind_of_source(
    tmp_path: Path, make: Callable[[], bytes], reason: str, expected: str
) -> None:
    """Without it all are accepted."""
    data = make()
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    with path.open("rb") as file:
        for source in (data, path, file):
            with pytest.raises(PdfRejected) as caught:
                await upload(source, "a.pdf", max_bytes=MOST)
            assert str(caught.value).startswith(expected)
            assert (caught.value.reason, caught.value.filename) == (reason, "a.pdf")
        assert (await upload(data, "a.pdf", max_bytes=MOST, preflight=False)).file == data


async def test_size_limit_is_exact_for_every_kind_of_source(tmp_path: Path) -> None:
    """A stream is read no further."""
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield bytes(100_000)

    with pytest.raises(PdfRejected, match=r"at most 1000000 bytes may be uploaded, this file has more$"):
        await upload(endless(), max_bytes=1_000_000)
    assert taken == 11
    size, data = LARGE, make_pdf(LARGE)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)

    class Unseekable(io.BytesIO):
        def seekable(self) -> bool:
            return False

    makers: list[tuple[Callable[[], Any], str]] = [
        (lambda: path, f"{size} bytes"),
        (lambda: data, f"{size} bytes"),
        (lambda: io.BytesIO(data), "more"),
        (lambda: Unseekable(data), "more"),
        (lambda: in_chunks(data), "more"),
    ]
    for make, found in makers:
        assert (await upload(make(), max_bytes=size)).file == data
        with pytest.raises(PdfRejected, match=f"at most {size - 1} bytes .* has {found}$"):
            await upload(make(), max_bytes=size - 1)


# Disks


@pytest.mark.parametrize(("kind", "is_pdf"), [("path", False), ("file", True), ("stream", True)])
async def test_no_file_stays_open_after_upload_refusal_or_cancellation(tmp_path: Path, kind: str, is_pdf: bool) -> None:
    path, data = tmp_path / "a.pdf", make_pdf(LARGE) if is_pdf else b"x" * LARGE
    path.write_bytes(data)

    async def once() -> None:
        with path.open("rb") as file:
            assert (await upload({"path": path, "file": file, "stream": in_chunks(data)}[kind])).file == data

    before = open_files()
    try:
        await once()
    except PdfRejected as error:
        kept = error  # as a caller may, with its traceback
        assert kept.reason == "not_pdf"
    assert open_files() == before
    for moment in range(0, 60, 12):
        task = asyncio.create_task(once())
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, PdfRejected):
            await task
    await asyncio.get_running_loop().shutdown_default_executor()  # wait for threads of cancelled uploads
    assert open_files() == before


async def test_file_of_a_cancelled_upload_is_closed_after_the_read_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the thread could read another file, which has the same descriptor by then."""
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(LARGE))
    before, begun, go_on = open_files(), threading.Event(), threading.Event()

    def slow(file: io.FileIO, size: int) -> bytes:
        begun.set()
        assert go_on.wait(60)
        return io.FileIO.read(file, size)

    monkeypatch.setattr("signing_async.documents.source._File.read", slow, raising=False)
    uploading = asyncio.create_task(upload(path))
    assert await asyncio.to_thread(begun.wait, 60)
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await uploading
    assert str(path) in open_files()
    go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert open_files() == before


async def test_full_disk_is_a_transient_error_that_names_the_file_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = open_files()
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: io.FileIO("/dev/full", "wb"))
    with pytest.raises(InvalidRequest) as caught:
        await upload(gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(bytes(LARGE)))), "lease.pdf")
    assert str(caught.value) == (
        "source: cannot buffer lease.pdf in a temporary file (TMPDIR sets its folder): No space left on device"
    )
    assert caught.value.transient
    assert open_files() == before


# Changing files


def digest(data: bytes) -> str:
    """Return the sha256 as `PdfSource` expects it."""
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("is_cached", [True, False])
async def test_small_file_is_sent_as_it_was_when_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """In each attempt, even if it changes in between; whether or not the system has it in memory."""
    if not is_cached:
        monkeypatch.setattr(os, "preadv", refusing(errno.EAGAIN))
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(BLOCK))
    source = PdfSource(path, sha256=digest(make_pdf(BLOCK)).upper())
    received = await uploads_of(source, statuses=(503,), on_progress=lambda _: path.write_bytes(b"changed"))
    assert [one.file for one in received] == [make_pdf(BLOCK)] * 2


@pytest.mark.parametrize(("shrinks", "is_cached"), [(True, True), (True, False), (False, True)])
async def test_small_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shrinks: bool, is_cached: bool
) -> None:
    """If all of its bytes arrived, they may be from two versions."""
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf())
    preadv = os.preadv

    def change(*arguments: Any) -> int:
        os.truncate(path, 1000) if shrinks else os.utime(path, ns=(0, 1))
        if not is_cached:
            raise BlockingIOError
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", change)
    with pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$"):
        await upload(path)


def appends(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def is_written_again(path: Path) -> None:
    """Write another version of the same size."""
    with path.open("r+b") as file:
        file.seek(9)
        file.write(bytes(path.stat().st_size - 9))
    os.utime(path, ns=(0, 1))


@pytest.mark.parametrize("change", [appends, lambda path: os.truncate(path, 1000), is_written_again])
async def test_large_file_that_changes_is_not_sent_as_a_whole(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """A mix of two versions is no document."""
    path = tmp_path / "lease.pdf"
    for sha256 in (None, digest(make_pdf(LARGE))):
        path.write_bytes(make_pdf(LARGE))

        def report(progress: Progress) -> None:
            if progress.bytes_done:
                change(path)

        async with recording() as recorder, SigningClient(recorder.origin, "token") as client:
            with pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$") as caught:
                await client.documents.upload("s1", PdfSource(path, sha256=sha256), on_progress=report)
            assert recorder.uploads == []
        assert (caught.value.effect, caught.value.__cause__) == ("none", None)


@pytest.mark.parametrize("size", [BLOCK, LARGE])
async def test_content_with_another_hash_is_not_sent(tmp_path: Path, size: int) -> None:
    """A source made from another keeps its hash."""
    data, right, other = make_pdf(size), digest(make_pdf(size)), digest(b"another")
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    for make in (lambda: data, lambda: path, lambda: in_chunks(data)):
        assert (await upload(PdfSource(PdfSource(make(), sha256=right.upper()), "a.pdf"))).file == data
        wrong = PdfSource(PdfSource(make(), sha256=other), "a.pdf")
        with pytest.raises(InvalidRequest, match=f"^source: a.pdf: sha256 mismatch: expected {other}, found {right}$"):
            await upload(wrong)
