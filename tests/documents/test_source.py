"""Sources of uploads: their names and kinds, the preflight, disks, and changing files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
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

from signing_async import InvalidRequest, PdfRejected, PdfSource
from signing_async.documents import source as module
from signing_async.transport import wire
from tests.pdfs import encrypted, make_pdf, with_signature_field

MOST = 10 * 2**20
LARGE = 2_500_000
BLOCK = 2**20


async def content(source: PdfSource, most: float | None = None) -> bytes:
    """Return what an upload of the source sends as its file."""
    with await source.open(most) as opened:
        return await sent(opened)


async def sent(opened: module.OpenPdf) -> bytes:
    """Return what one attempt sends as the file."""
    out = bytearray()
    await module.form_body({"selected_file": opened}, lambda size: None).write(writer(out))
    return bytes(out).partition(b"\r\n\r\n")[2].rpartition(b"\r\n--")[0]


def writer(out: bytearray) -> Any:
    """A stand-in for aiohttp's writer whose transport accepts everything at once."""

    async def write(chunk: wire.Chunk) -> None:
        out.extend(chunk)

    return SimpleNamespace(write=write, protocol=None, transport=None)


async def in_chunks(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def open_files() -> list[str]:
    """Return the names of the open files of this process."""
    gc.collect()  # left over by other tests
    found = []
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208  # a descriptor may be closed meanwhile
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115  # a link to a pipe leads to no path
        except FileNotFoundError:
            continue
    return sorted(name for name in found if name.startswith("/") and not name.startswith("/dev/"))


# Names


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        ("folder/contract.pdf", None, "contract.pdf"),
        (Path("folder/contract.pdf"), None, "contract.pdf"),
        (Path("folder/contract.pdf"), "Lease.pdf", "Lease.pdf"),
        (b"%PDF-", None, "document.pdf"),
        (io.BytesIO(), None, "document.pdf"),
        (PdfSource(b"", filename="a.pdf"), None, "a.pdf"),
        (PdfSource(b"", filename="a.pdf"), "b.pdf", "b.pdf"),
        (PdfSource("folder/a.pdf"), None, "a.pdf"),
        (os.fsdecode(b"folder/caf\xe9.pdf"), None, "caf?.pdf"),
        (FileStorage(io.BytesIO(), "lease.pdf", "selected_file"), None, "lease.pdf"),
        (FileStorage(io.BytesIO(), "", "selected_file"), None, "selected_file"),
        (SimpleNamespace(read=bytes, name="<stdin>"), None, "document.pdf"),
    ],
)
def test_filename_is_the_given_one_or_that_of_the_path(source: Any, given: str | None, expected: str) -> None:
    """It can always be encoded in UTF-8."""
    assert PdfSource(source, given).filename == expected
    assert repr(PdfSource(source, given)) == f"PdfSource({expected!r})"


@pytest.mark.parametrize("filename", [" ", 5])
def test_filename_must_be_a_non_empty_string(filename: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^filename: must be a non-empty string, got "):
        PdfSource(b"", filename)


# Kinds


class Asynchronous:
    """An uploaded file of Starlette."""

    async def read(self, size: int = -1) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (None, "must be a path, bytes, a binary file or an async iterable, got NoneType"),
        ([b"%PDF-"], "must be a path, bytes, a binary file or an async iterable, got list"),
        (in_chunks, "must be a path, bytes, a binary file or an async iterable, got function"),
        (io.StringIO(), "the file is open as text; open it with mode 'rb'"),
        (Asynchronous(), "its read() is asynchronous; pass a binary file or an async iterable of bytes"),
    ],
)
def test_other_objects_are_no_source(source: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PdfSource(source)
    assert str(caught.value) == f"source: {problem}"


@pytest.mark.parametrize("chunk", ["text", None, [1, 2]])
async def test_streams_and_files_must_give_bytes(chunk: Any) -> None:
    """A non-blocking pipe without data gives None."""

    async def give() -> AsyncIterator[Any]:
        yield b"%PDF-"
        yield chunk

    sources: list[Any] = [give(), SimpleNamespace(read=lambda size: chunk)]
    for source in sources:
        with pytest.raises(InvalidRequest, match=rf"^source: must yield bytes, got {type(chunk).__name__}$"):
            await PdfSource(source).open()


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_every_kind_of_source_gives_its_bytes_repeatedly_from_its_position(tmp_path: Path, size: int) -> None:
    """File objects keep their position."""
    data = make_pdf(size)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    framed = tmp_path / "framed"
    framed.write_bytes(b"before" + data)
    with gzip.open(tmp_path / "a.gz", "wb") as packed:
        packed.write(data)
    with (
        framed.open("rb") as buffered,
        framed.open("rb", buffering=0) as raw,
        framed.open("r+b") as both,
        gzip.open(tmp_path / "a.gz") as unpacked,
        tempfile.SpooledTemporaryFile(max_size=10_000) as spooled,
        tempfile.NamedTemporaryFile() as named,
        io.BufferedReader(io.BytesIO(b"before" + data)) as wrapped,
    ):
        memory = io.BytesIO(b"before" + data)
        for file in (spooled, named):
            file.write(b"before" + data)
        at_offset: list[Any] = [buffered, raw, both, spooled, named, wrapped, memory]
        for file in at_offset:
            file.seek(6)
        others: list[Any] = [unpacked, path, str(path), data, bytearray(data), memoryview(data)]
        for source in [*at_offset, *others]:
            for _ in range(2):
                assert await content(PdfSource(source), MOST) == data, source
        assert [file.tell() for file in at_offset] == [6] * len(at_offset)
    assert await content(PdfSource(in_chunks(data)), MOST) == data
    assert await content(PdfSource(memoryview(bytes(b for byte in data for b in (byte, 0)))[::2]), MOST) == data


# Sources that cannot be opened


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
        ("", "cannot open {}: No such file or directory"),
        (tmp_path, "{} is not a regular file"),
        (tmp_path / "pipe", "{} is not a regular file"),
    ]
    before = open_files()
    for path, expected in paths:
        with pytest.raises(InvalidRequest) as caught:
            await PdfSource(path).open()
        assert str(caught.value).startswith(f"source: {expected.format(repr(os.fspath(path)))}")
        assert (caught.value.transient, caught.value.exit_code) == (False, 2)
        assert open_files() == before


@pytest.mark.parametrize(("number", "is_transient"), [(errno.EMFILE, True), (errno.EACCES, False)])
async def test_failing_system_is_a_transient_error_unless_a_repeat_would_fail_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_transient: bool
) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf())
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing(number))
        with pytest.raises(InvalidRequest, match=f"^source: cannot open .*: {os.strerror(number)}$") as caught:
            await PdfSource(path).open()
    assert (caught.value.transient, caught.value.exit_code) == ((True, 1) if is_transient else (False, 2))
    assert await content(PdfSource(path)) == make_pdf()


@pytest.mark.parametrize("kind", ["write-only", "closed", "corrupt", "lost connection"])
async def test_file_object_that_cannot_be_read_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(gzip.compress(make_pdf())[:-8] + bytes(8))
    opens: dict[str, Callable[[], Any]] = {
        "write-only": lambda: path.open("ab"),
        "closed": lambda: path.open("rb"),
        "corrupt": lambda: gzip.GzipFile(path),
        "lost connection": lambda: path.open("rb"),
    }
    with opens[kind]() as file:
        source: Any = file
        if kind == "closed":
            file.close()
        elif kind == "lost connection":
            source = SimpleNamespace(read=refusing(errno.ECONNRESET))
        with pytest.raises(InvalidRequest, match=r"^source: cannot read (a|document)\.pdf: ") as caught:
            await PdfSource(source).open()
    assert caught.value.transient == (kind == "lost connection")


@pytest.mark.parametrize("make", [lambda path: path.open("rb"), lambda path: io.BytesIO(path.read_bytes()), gzip.open])
@pytest.mark.parametrize("past", [0, 10])
async def test_file_at_its_end_is_empty_and_the_error_says_so(
    tmp_path: Path, make: Callable[[Path], Any], past: int
) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(gzip.compress(make_pdf()))
    with make(path) as source:
        end = len(source.read())
        source.seek(end + past)
        with pytest.raises(PdfRejected, match=r": the file is at its end: seek\(0\)\?$") as caught:
            await PdfSource(source).open(MOST)
        assert caught.value.reason == "not_pdf"
        assert await content(PdfSource(source)) == b""
        source.seek(0)
        with pytest.raises(PdfRejected, match=r": not a PDF$") if make is not gzip.open else contextlib.nullcontext():
            await PdfSource(source).open(MOST)


# The preflight


@pytest.mark.parametrize(
    ("make", "reason", "expected"),
    [
        (lambda: b"Dear Sir or Madam", "not_pdf", "a.pdf: not a PDF"),
        (lambda: b"", "not_pdf", "a.pdf: the file is empty"),
        (lambda: encrypted(make_pdf(), user="secret"), "protected", "a.pdf: password protected"),
        (lambda: encrypted(make_pdf(LARGE)), "protected", "a.pdf: password protected"),
        (lambda: with_signature_field(b"/V 7 0 R"), "already_signed", "a.pdf: already signed"),
        (lambda: make_pdf(3 * 2**20 + 1), "too_large", "a.pdf: too large: at most 3145728 bytes may be uploaded"),
    ],
)
@pytest.mark.parametrize("kind", ["bytes", "path", "file"])
async def test_preflight_refuses_with_a_reason_for_every_kind_of_source(
    tmp_path: Path, make: Callable[[], bytes], reason: str, expected: str, kind: str
) -> None:
    """Without it all are accepted."""
    data = make()
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    with path.open("rb") as file:
        sources: dict[str, Any] = {"bytes": data, "path": path, "file": file}
        source = PdfSource(sources[kind], "a.pdf")
        with pytest.raises(PdfRejected) as caught:
            await source.open(3 * 2**20)
        assert str(caught.value).startswith(expected)
        assert (caught.value.reason, caught.value.filename) == (reason, "a.pdf")
        assert await content(source) == data


@pytest.mark.parametrize("size", [2000, LARGE])
async def test_size_limit_is_exact_for_every_kind_of_source(tmp_path: Path, size: int) -> None:
    data = make_pdf(size)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)

    class Unseekable(io.BytesIO):
        def seekable(self) -> bool:
            return False

    makers: list[Callable[[], Any]] = [
        lambda: path,
        lambda: data,
        lambda: io.BytesIO(data),
        lambda: Unseekable(data),
        lambda: in_chunks(data),
    ]
    for make in makers:
        assert await content(PdfSource(make()), size) == data
        found = f"{size} bytes" if make in makers[:2] else "more"
        with pytest.raises(PdfRejected, match=f"at most {size - 1} bytes .* has {found}$") as caught:
            await PdfSource(make()).open(size - 1)
        assert caught.value.reason == "too_large"


async def test_endless_stream_is_read_up_to_the_limit() -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield bytes(100_000)

    with pytest.raises(PdfRejected, match=r"at most 1000000 bytes may be uploaded, this file has more$"):
        await PdfSource(endless()).open(1_000_000)
    assert taken == 11


# Disks


def sources_of(path: Path, file: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that make a source of each kind with the content of a file, which is also open."""
    data = path.read_bytes()
    return {
        "path": lambda: path,
        "file": lambda: file,
        "pipe": lambda: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(data, 1))),
        "bytes": lambda: data,
        "stream": lambda: in_chunks(data),
    }


@pytest.mark.parametrize("kind", ["path", "file", "stream", "pipe"])
@pytest.mark.parametrize("data", [make_pdf(LARGE), b"x" * LARGE], ids=["pdf", "no pdf"])
async def test_no_file_stays_open_after_opening_refusal_or_cancellation(tmp_path: Path, kind: str, data: bytes) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(data)

    async def once() -> None:
        with path.open("rb") as file, await PdfSource(sources_of(path, file)[kind]()).open(MOST) as opened:
            assert await sent(opened) == data

    before = open_files()
    try:
        await once()
    except PdfRejected as error:
        kept = error  # as a caller may, with its traceback
        assert kept.reason == "not_pdf"
    assert open_files() == before
    for moment in range(0, 30, 2):
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

    read = os.read

    def slow(descriptor: int, size: int) -> bytes:
        begun.set()
        assert go_on.wait(60)
        return read(descriptor, size)

    opened = await PdfSource(path).open()
    monkeypatch.setattr(os, "read", slow)
    reading = asyncio.create_task(sent(opened))
    assert await asyncio.to_thread(begun.wait, 60)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    opened.close()
    assert str(path) in open_files()
    go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert open_files() == before


async def test_large_streams_are_spooled_to_an_unnamed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_files()
    with await PdfSource(in_chunks(make_pdf(LARGE))).open(MOST):
        assert list(tmp_path.iterdir()) == []
        (kept,) = set(open_files()) - set(before)
        assert "(deleted)" in kept
    assert open_files() == before


@pytest.mark.parametrize("kind", ["stream", "file"])
async def test_full_disk_is_a_transient_error_that_names_the_file_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    packed = io.BytesIO(gzip.compress(bytes(LARGE)))
    source: Any = in_chunks(make_pdf(LARGE)) if kind == "stream" else gzip.GzipFile(fileobj=packed)
    before = open_files()

    def open_full(**_: object) -> Any:
        return Path("/dev/full").open("wb")

    monkeypatch.setattr(tempfile, "TemporaryFile", open_full)
    with pytest.raises(InvalidRequest) as caught:
        await PdfSource(source, "lease.pdf").open(MOST)
    assert str(caught.value) == (
        "source: cannot buffer lease.pdf in a temporary file (TMPDIR sets its folder): No space left on device"
    )
    assert caught.value.transient
    assert open_files() == before


# Changing files


def appends(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def shrinks(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def is_written_again(path: Path) -> None:
    """Write another version of the same size."""
    with path.open("r+b") as file:
        file.seek(9)
        file.write(bytes(path.stat().st_size - 9))
    os.utime(path, ns=(0, 1))


CHANGES = [appends, shrinks, is_written_again]


def digest(data: bytes) -> str:
    """Return the sha256 as `PdfSource` expects it."""
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(params=[True, False], ids=["in memory", "on disk"])
def system_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system have files in memory, or not."""
    if not request.param:
        monkeypatch.setattr(os, "preadv", refusing(errno.EAGAIN))


@pytest.mark.usefixtures("system_memory")
@pytest.mark.parametrize("change", CHANGES)
async def test_small_file_is_sent_as_it_was_when_opened(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """In each attempt, even if it changes afterwards."""
    path = tmp_path / "lease.pdf"
    for size in (1500, BLOCK):
        for sha256 in (None, digest(make_pdf(size)).upper()):
            path.write_bytes(make_pdf(size))
            with await PdfSource(path, sha256=sha256).open(MOST) as opened:
                change(path)
                assert await sent(opened) == await sent(opened) == make_pdf(size)


@pytest.mark.usefixtures("system_memory")
async def test_small_file_written_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its bytes arrived, but maybe from two versions."""
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf())
    changes = iter([1, 2])

    def changing(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: Any) -> Any:
            os.utime(path, ns=(0, next(changes)))
            return real(*arguments)

        return read

    monkeypatch.setattr(os, "preadv", changing(os.preadv))
    monkeypatch.setattr(os, "read", changing(os.read))
    with pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$"):
        await PdfSource(path).open(MOST)


async def test_large_file_is_not_read_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the part that is in memory."""
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(LARGE))
    read: list[int] = []
    preadv = os.preadv

    def counting(*arguments: Any) -> int:
        read.append(preadv(*arguments))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    with await PdfSource(path).open(MOST) as opened:
        assert opened.size == LARGE
    assert sum(read) == 0


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", [0, 1, 2])
async def test_large_file_that_changes_lacks_its_last_block_in_each_attempt(
    tmp_path: Path, change: Callable[[Path], None], moment: int
) -> None:
    """A mix of two versions is no document."""
    path = tmp_path / "lease.pdf"
    blocks = -(-LARGE // BLOCK)
    for sha256 in (None, digest(make_pdf(LARGE))):
        path.write_bytes(make_pdf(LARGE))
        out, calls = bytearray(), 0

        def count(size: int) -> None:
            nonlocal calls
            calls += 1
            if calls == moment:
                change(path)

        with await PdfSource(path, sha256=sha256).open(MOST) as opened:
            if moment == 0:
                change(path)
            body = module.form_body({"selected_file": opened}, count)
            with pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$") as caught:
                await body.write(writer(out))
            assert body.failure is caught.value
            with pytest.raises(InvalidRequest, match=r"changed while it was read$"):
                await sent(opened)
        assert len(out) < (blocks - 1) * BLOCK + 500
        assert calls < blocks


@pytest.mark.parametrize("size", [1500, BLOCK, BLOCK + 1, LARGE])
@pytest.mark.parametrize("kind", ["bytes", "path", "stream"])
async def test_content_with_another_hash_is_not_sent_or_lacks_its_last_block(
    tmp_path: Path, size: int, kind: str
) -> None:
    """A source made from another keeps its hash."""
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(size))
    make, right, other = sources_of(path, None)[kind], digest(make_pdf(size)), digest(b"another")
    with await PdfSource(PdfSource(make(), sha256=right.upper()), "a.pdf").open(MOST) as opened:
        assert await sent(opened) == await sent(opened) == make_pdf(size)
    inherited = PdfSource(PdfSource(make(), sha256=other), "a.pdf")
    given = PdfSource(PdfSource(make(), sha256=right), "a.pdf", sha256=other)
    for wrong in (inherited, given):
        out = bytearray()
        expected = f"^source: a.pdf: sha256 mismatch: expected {other}, found {right}$"
        with pytest.raises(InvalidRequest, match=expected), await wrong.open(MOST) as opened:
            await module.form_body({"selected_file": opened}, lambda size: None).write(writer(out))
        assert len(out) < (-(-size // BLOCK) - 1) * BLOCK + 500


@pytest.mark.parametrize("sha256", ["", "abc", "g" * 64, "a" * 65, b"a" * 64, 5])
def test_sha256_must_be_hexadecimal(sha256: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^sha256: must be 64 hexadecimal digits, got {sha256!r}$"):
        PdfSource(b"", sha256=sha256)


async def test_stalled_pipe_does_not_keep_other_sources_waiting() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as silent:
        stalled = asyncio.create_task(PdfSource(silent, "pipe.pdf").open())
        try:
            await asyncio.sleep(0.05)
            async with asyncio.timeout(30):
                with await PdfSource(io.BytesIO(make_pdf()), "a.pdf").open() as opened:
                    assert opened.size > 0
        finally:
            os.write(writing, make_pdf())
            os.close(writing)
        (await stalled).close()
