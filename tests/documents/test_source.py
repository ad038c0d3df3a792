"""Sources of uploads: their names and kinds, the preflight, disks, and changing files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import gzip
import hashlib
import io
import mmap
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
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
    await opened.body(lambda size: None).write(writer(out))
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


def test_filename_of_an_open_file_is_that_of_its_path(tmp_path: Path) -> None:
    """Files opened by descriptor, and wrappers, have none."""
    path = tmp_path / "lease.pdf"
    path.touch()
    with path.open("rb") as file:
        assert PdfSource(file).filename == "lease.pdf"
    with os.fdopen(os.open(path, os.O_RDONLY), "rb") as file:
        assert PdfSource(file).filename == "document.pdf"


async def test_path_object_with_bytes_is_accepted(tmp_path: Path) -> None:
    """`os.scandir` returns such objects for a folder given as bytes."""
    (tmp_path / "lease.pdf").write_bytes(make_pdf())
    (entry,) = os.scandir(os.fsencode(tmp_path))
    source = PdfSource(entry)  # type: ignore[arg-type]  # paths are text in the annotation
    assert source.filename == "lease.pdf"
    assert await content(source) == make_pdf()


@pytest.mark.parametrize("filename", ["", " ", "\t", 5, b"a.pdf"])
def test_filename_must_be_a_non_empty_string(filename: Any) -> None:
    if filename == "":
        assert PdfSource(b"", PdfSource(b"", "a.pdf").filename).filename == "a.pdf"
    with pytest.raises(InvalidRequest, match=r"^filename: must be a non-empty string, got "):
        PdfSource(b"", filename)


# Kinds


@pytest.mark.parametrize("source", [None, 5, 1.5, [b"%PDF-"], object(), in_chunks])
def test_other_types_are_no_source(source: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^source: must be a path, .*, got {type(source).__name__}$"):
        PdfSource(source)


def test_text_files_are_refused_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.touch()
    with (
        path.open() as file,
        tempfile.NamedTemporaryFile("w+") as named,
        tempfile.SpooledTemporaryFile(mode="w+") as spooled,
    ):
        for text in (file, named, spooled, io.StringIO()):
            with pytest.raises(InvalidRequest, match=r"^source: the file is open as text; open it with mode 'rb'$"):
                PdfSource(text)  # type: ignore[arg-type]  # that is the point


def test_files_with_an_asynchronous_read_are_refused() -> None:
    class Uploaded:
        async def read(self, size: int = -1) -> bytes:
            return b""

    with pytest.raises(InvalidRequest, match=r"^source: its read\(\) is asynchronous"):
        PdfSource(Uploaded())  # type: ignore[arg-type]  # that is the point


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


async def test_map_of_a_file_and_objects_without_seekable_are_read_from_their_position(tmp_path: Path) -> None:
    class Plain:
        """Only what `PdfSource` needs."""

        def __init__(self, data: bytes) -> None:
            self.read = io.BytesIO(data).read

    (tmp_path / "a.pdf").write_bytes(b"before" + make_pdf())
    plain: Any = Plain(make_pdf())
    assert await content(PdfSource(plain), MOST) == make_pdf()
    with (tmp_path / "a.pdf").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped.seek(6)
        for _ in range(2):
            assert await content(PdfSource(mapped), MOST) == make_pdf()  # type: ignore[arg-type]  # has no `seekable`
        assert mapped.tell() == 6


async def test_unflushed_writes_of_a_file_object_are_sent(tmp_path: Path) -> None:
    with (tmp_path / "a.pdf").open("w+b") as file:
        file.write(make_pdf())
        file.seek(0)
        file.write(b"%PDF-1.6")
        file.seek(0)
        assert await content(PdfSource(file)) == b"%PDF-1.6" + make_pdf()[8:]


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_pipes_are_spooled(size: int) -> None:
    data = make_pdf(size)
    reading, writing = os.pipe()

    def feed() -> None:
        with os.fdopen(writing, "wb") as file:
            file.write(data)

    feeding = threading.Thread(target=feed)
    feeding.start()
    with os.fdopen(reading, "rb") as file:
        opened = await PdfSource(file).open(MOST)
    feeding.join()
    with opened:
        assert await sent(opened) == await sent(opened) == data


async def test_non_blocking_file_without_data_is_an_error() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(reading, "rb", buffering=0) as file, os.fdopen(writing, "wb", buffering=0) as feed:
        feed.write(make_pdf()[:700])
        with pytest.raises(InvalidRequest, match=r"^source: must yield bytes, got NoneType$"):
            await PdfSource(file).open()


@pytest.mark.parametrize("chunks", [["text"], [b"%PDF-", None], [[1, 2]]])
async def test_iterators_must_yield_bytes(chunks: list[Any]) -> None:
    async def give() -> AsyncIterator[Any]:
        for chunk in chunks:
            yield chunk

    with pytest.raises(InvalidRequest, match=r"^source: must yield bytes, got (str|NoneType|list)$"):
        await PdfSource(give()).open()


async def test_memoryviews_with_wider_items_are_sent_as_bytes() -> None:
    data = make_pdf(1504)
    wide = memoryview(data).cast("Q")

    async def give() -> AsyncIterator[Any]:
        yield wide

    assert await content(PdfSource(wide)) == data
    assert await content(PdfSource(give())) == data
    with pytest.raises(PdfRejected, match="too large"):
        await PdfSource(give()).open(1503)


# Sources that cannot be opened


async def test_error_of_a_path_names_it_and_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named pipe does not block."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="null") as null_in_path:  # the text depends on the Python version
        os.open("a\0b", os.O_RDONLY)
    paths: list[tuple[str | Path, str]] = [
        (tmp_path / "none.pdf", "cannot open {}: No such file or directory"),
        (tmp_path / "none.pdf" / "x", "cannot open {}: No such file or directory"),
        ("a\0b", f"cannot open {{}}: {null_in_path.value}"),
        ("", "cannot open {}: No such file or directory"),
        (tmp_path, "{} is not a regular file"),
        (tmp_path / "pipe", "{} is not a regular file"),
        (Path("/dev/null"), "{} is not a regular file"),
    ]
    before = open_files()
    for path, expected in paths:
        with pytest.raises(InvalidRequest) as caught:
            await PdfSource(path).open()
        assert str(caught.value) == f"source: {expected.format(repr(os.fspath(path)))}"
        assert open_files() == before

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InvalidRequest, match=r"^source: cannot open 'a.pdf': Permission denied$"):
        await PdfSource("a.pdf").open()


@pytest.mark.parametrize("code", ["EMFILE", "ENFILE", "EIO", "ESTALE", "ENOMEM"])
@pytest.mark.parametrize("where", ["open", "fstat", "pread"])
async def test_failing_system_is_a_transient_error_of_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, where: str
) -> None:
    number = getattr(errno, code)
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf())

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, where, fail)
    if where == "pread":
        monkeypatch.setattr(module, "_NO_WAIT", None)
    with pytest.raises(InvalidRequest, match=f": {os.strerror(number)}$") as caught:
        await PdfSource(path).open()
    monkeypatch.undo()
    assert (caught.value.transient, caught.value.exit_code) == (True, 1)
    assert await content(PdfSource(path)) == make_pdf()


@pytest.mark.parametrize("error", [TimeoutError("timed out"), ConnectionResetError("closed")])
async def test_lost_connection_of_a_file_object_is_transient(error: OSError) -> None:
    """A socket's file raises them without a number."""

    class Remote(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise error

    with pytest.raises(InvalidRequest, match=f"^source: cannot read document.pdf: {error}$") as caught:
        await PdfSource(Remote()).open()
    assert caught.value.transient


@pytest.mark.parametrize("kind", ["no file", "denied", "write-only", "not readable", "closed", "corrupt", "socket"])
async def test_source_that_no_repeat_can_read_is_a_permanent_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "a.pdf"
    path.write_bytes(gzip.compress(make_pdf())[:-8] + bytes(8))
    with contextlib.ExitStack() as stack:
        source: Any = path
        if kind == "no file":
            path.unlink()
        elif kind == "denied":
            monkeypatch.setattr(os, "open", refuse)
        elif kind == "write-only":
            source = stack.enter_context(io.FileIO(os.open(path, os.O_WRONLY), "w"))
        elif kind == "not readable":
            source = stack.enter_context(path.open("ab"))
        elif kind == "closed":
            with path.open("rb") as source:
                pass
        elif kind == "corrupt":
            source = stack.enter_context(gzip.open(path))
        else:
            path.unlink()
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        with pytest.raises(InvalidRequest, match=r"^source: cannot (open|read) ") as caught:
            await PdfSource(source).open()
    assert (caught.value.transient, caught.value.exit_code) == (False, 2)


async def test_error_raised_by_an_iterator_or_foreign_file_is_unchanged() -> None:
    class BucketError(Exception):
        pass

    async def give() -> AsyncIterator[bytes]:
        yield make_pdf(LARGE)
        raise BucketError

    class Remote(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise BucketError

    for source in (give(), Remote()):
        with pytest.raises(BucketError):
            await PdfSource(source).open()


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
        (
            lambda: make_pdf(3 * 2**20 + 1),
            "too_large",
            "a.pdf: too large: at most 3145728 bytes may be uploaded, this file has 3145729 bytes",
        ),
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
        assert (str(caught.value), caught.value.reason, caught.value.filename) == (expected, reason, "a.pdf")
        assert isinstance(caught.value, InvalidRequest)
        assert await content(source) == data


async def test_bytes_before_the_position_of_a_file_are_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(with_signature_field(b"/V 7 0 R") + make_pdf(LARGE))
    with path.open("rb") as file:
        file.seek(len(with_signature_field(b"/V 7 0 R")))
        assert await content(PdfSource(file), MOST) == make_pdf(LARGE)
    path.write_bytes(make_pdf(LARGE) + encrypted(make_pdf(LARGE)))
    with path.open("rb") as file:
        file.seek(LARGE)
        with pytest.raises(PdfRejected, match="password protected"):
            await PdfSource(file).open(MOST)
    path.write_bytes(b"x" * 2000 + make_pdf(LARGE))
    with path.open("rb") as file:
        with pytest.raises(PdfRejected, match="not a PDF"):
            await PdfSource(file).open(MOST)
        file.seek(2000)
        assert await content(PdfSource(file), MOST) == make_pdf(LARGE)


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
        with pytest.raises(PdfRejected, match=f"at most {size - 1} bytes") as caught:
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


@pytest.mark.parametrize("kind", ["path", "file", "pipe", "bytes", "stream"])
@pytest.mark.parametrize("how", ["in memory", "not in memory", "in part", "no such flag"])
async def test_event_loop_never_waits_for_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    """It opens paths and reads what the system has in memory. Large files are checked in threads."""
    data = make_pdf(LARGE)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    mine, seen = threading.get_ident(), []

    def watched(name: str, owner: Any) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == mine:
                seen.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    real = os.preadv

    def preadv(handle: int, buffers: list[Any], at: int, flags: int) -> int:
        assert flags == module._NO_WAIT
        if how == "not in memory":
            raise BlockingIOError
        if how == "in part":
            return real(handle, [memoryview(buffers[0])[: 1 + len(buffers[0]) // 3]], at, flags)
        return real(handle, buffers, at, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    if how == "no such flag":
        monkeypatch.setattr(module, "_NO_WAIT", None)
    with path.open("rb") as file:
        for name in ("sendfile", "pread", "write", "dup", *([] if kind == "path" else ["open"])):
            watched(name, os)
        watched("preflight", module)
        source: Any = {
            "path": path,
            "file": file,
            "pipe": io.BufferedReader(io.BytesIO(data)),
            "bytes": data,
            "stream": in_chunks(data),
        }[kind]
        assert await content(PdfSource(source), MOST) == data
    assert seen == []


async def test_file_is_read_where_the_system_reads_only_from_the_current_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""
    lseek = os.lseek

    def slow(*arguments: int) -> int:
        position = lseek(*arguments)
        time.sleep(0.01)  # for another thread to move the position, if it may
        return position

    monkeypatch.setattr(module, "_HAS_PREAD", False)
    monkeypatch.setattr(os, "lseek", slow)
    monkeypatch.setattr(module, "_NO_WAIT", None)
    data = make_pdf(LARGE)
    path = tmp_path / "a.pdf"
    path.write_bytes(b"%" + data)
    with path.open("rb") as file:
        file.seek(1)
        sources = [PdfSource(file), PdfSource(file), PdfSource(path, sha256=hashlib.sha256(b"%" + data).hexdigest())]
        opened = [await source.open() for source in sources]
        assert file.tell() == 1
        # The last one is sent twice at the same time.
        contents = await asyncio.gather(*map(sent, [*opened, opened[-1]]))
        assert contents == [data, data, b"%" + data, b"%" + data]
        assert file.tell() == 1
        for pdf in opened:
            pdf.close()


async def test_error_of_the_connection_is_no_failure_of_the_source(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(LARGE))

    async def fail(chunk: wire.Chunk) -> None:
        raise ConnectionResetError

    with await PdfSource(path).open() as opened:
        body = opened.body(lambda size: None)
        with pytest.raises(ConnectionResetError):
            await body.write(SimpleNamespace(write=fail, protocol=None, transport=None))  # type: ignore[arg-type]  # all of a writer that is used
        assert body.started
        assert body.failure is None


async def test_large_streams_are_spooled_to_an_unnamed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_files()
    with await PdfSource(in_chunks(make_pdf(LARGE))).open(MOST):
        assert list(tmp_path.iterdir()) == []
        (kept,) = set(open_files()) - set(before)
        assert "(deleted)" in kept
    assert open_files() == before


async def test_stream_is_spooled_completely_by_short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:10_000]))
    assert await content(PdfSource(in_chunks(make_pdf(LARGE)))) == make_pdf(LARGE)


@pytest.mark.parametrize("kind", ["stream", "file"])
async def test_full_disk_is_a_transient_error_that_names_the_file_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    packed = io.BytesIO(gzip.compress(bytes(LARGE)))
    source: Any = in_chunks(make_pdf(LARGE)) if kind == "stream" else gzip.GzipFile(fileobj=packed)
    before = open_files()
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(Path("/dev/full").open, "wb"))
    with pytest.raises(InvalidRequest) as caught:
        await PdfSource(source, "lease.pdf").open(MOST)
    assert str(caught.value) == (
        "source: cannot buffer lease.pdf in a temporary file (TMPDIR sets its folder): No space left on device"
    )
    assert caught.value.transient
    assert open_files() == before


@pytest.mark.parametrize("kind", ["path", "file", "stream", "pipe"])
@pytest.mark.parametrize("data", [make_pdf(LARGE), b"x" * LARGE], ids=["pdf", "no pdf"])
@pytest.mark.parametrize("in_memory", [True, False])
async def test_no_file_stays_open_after_opening_refusal_or_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, data: bytes, in_memory: bool
) -> None:
    if not in_memory:
        monkeypatch.setattr(module, "_NO_WAIT", None)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    packed = gzip.compress(data, 1)

    async def once() -> None:
        with path.open("rb") as file:
            source: dict[str, Callable[[], Any]] = {
                "path": lambda: path,
                "file": lambda: file,
                "stream": lambda: in_chunks(data),
                "pipe": lambda: gzip.GzipFile(fileobj=io.BytesIO(packed)),
            }
            with await PdfSource(source[kind]()).open(MOST) as opened:
                assert await sent(opened) == data

    before = open_files()
    try:
        await once()
    except PdfRejected as error:
        kept = error  # as a caller may, with its traceback
        assert kept.reason == "not_pdf"
    assert open_files() == before
    for moment in range(30):
        task = asyncio.create_task(once())
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, PdfRejected):
            await task
    await asyncio.get_running_loop().shutdown_default_executor()  # wait for threads of cancelled uploads
    assert open_files() == before


def test_closed_file_is_not_read_by_a_thread_that_comes_late(tmp_path: Path) -> None:
    """Its descriptor may be that of another file by then."""
    file = module._File(os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT))
    file.close()
    with pytest.raises(ValueError, match="the file is closed"):
        file.read(0, 1)


# Changing files


def rewrite(path: Path, how: str) -> None:
    """Write another version of the file with a later modification time."""
    data = path.read_bytes()
    if how.startswith("grows"):
        with path.open("ab") as file:
            file.write(b"more")
        if how == "grows before the clock goes on":
            os.utime(path, ns=(0, 0))
    elif how == "shrinks":
        os.truncate(path, len(data) - 1)
    elif how == "vanishes":
        os.truncate(path, 0)
    elif how == "is written again":
        with path.open("r+b") as file:
            file.write(data[:9] + bytes(len(data) - 9))
    elif how == "ends otherwise":
        with path.open("r+b") as file:
            file.seek(len(data) - 2)
            file.write(b"F")
    elif how == "is newer":
        os.utime(path, ns=(0, 1))


CHANGES = [
    "grows",
    "grows before the clock goes on",
    "shrinks",
    "vanishes",
    "is written again",
    "ends otherwise",
    "is newer",
]


def digest(data: bytes) -> str:
    """Return the sha256 as `PdfSource` expects it."""
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("size", [1500, 64 * 1024 + 1, BLOCK])
@pytest.mark.parametrize("in_memory", [True, False])
async def test_small_file_is_sent_as_it_was_when_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, size: int, in_memory: bool
) -> None:
    """In each attempt, even if it changes afterwards."""
    if not in_memory:
        monkeypatch.setattr(module, "_NO_WAIT", None)
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(size))
    os.utime(path, ns=(0, 0))
    for sha256 in (None, digest(make_pdf(size)).upper()):
        path.write_bytes(make_pdf(size))
        with await PdfSource(path, sha256=sha256).open(MOST) as opened:
            rewrite(path, how)
            assert await sent(opened) == await sent(opened) == make_pdf(size)


async def test_replaced_file_is_sent_as_it_was_when_opened(tmp_path: Path) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(LARGE))
    (tmp_path / "new.pdf").write_bytes(make_pdf(LARGE, seed=1))
    with await PdfSource(path).open(MOST) as opened:
        (tmp_path / "new.pdf").replace(path)
        assert await sent(opened) == make_pdf(LARGE)


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("moment", ["opened", "first block", "last block but one"])
@pytest.mark.parametrize("in_memory", [True, False])
async def test_large_file_that_changes_lacks_its_last_block_in_each_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, moment: str, in_memory: bool
) -> None:
    """A mix of two versions is no document."""
    if not in_memory:
        monkeypatch.setattr(module, "_NO_WAIT", None)
    path = tmp_path / "lease.pdf"
    blocks = -(-LARGE // BLOCK)
    for sha256 in (None, digest(make_pdf(LARGE))):
        path.write_bytes(make_pdf(LARGE))
        os.utime(path, ns=(0, 0))
        out, calls = bytearray(), 0

        def change(size: int) -> None:
            nonlocal calls
            calls += 1
            if calls == {"opened": 0, "first block": 1, "last block but one": blocks - 1}[moment]:
                rewrite(path, how)

        with await PdfSource(path, sha256=sha256).open(MOST) as opened:
            if moment == "opened":
                rewrite(path, how)
            body = opened.body(change)
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
    data = make_pdf(size)
    (tmp_path / "a.pdf").write_bytes(data)
    kinds: dict[str, Callable[[], Any]] = {
        "bytes": lambda: data,
        "path": lambda: tmp_path / "a.pdf",
        "stream": lambda: in_chunks(data),
    }
    with await PdfSource(PdfSource(kinds[kind](), sha256=digest(data).upper()), "a.pdf").open(MOST) as opened:
        assert await sent(opened) == await sent(opened) == data
    other = digest(b"another")
    inherited = PdfSource(PdfSource(kinds[kind](), sha256=other), "a.pdf")
    given = PdfSource(PdfSource(kinds[kind](), sha256=digest(data)), "a.pdf", sha256=other)
    for wrong in (inherited, given):
        out = bytearray()
        expected = f"^source: a.pdf: sha256 mismatch: expected {other}, found {digest(data)}$"
        with pytest.raises(InvalidRequest, match=expected), await wrong.open(MOST) as opened:
            await opened.body(lambda size: None).write(writer(out))
        assert len(out) < (-(-size // BLOCK) - 1) * BLOCK + 500


@pytest.mark.parametrize("sha256", ["", "abc", "g" * 64, "a" * 65, b"a" * 64, 5])
def test_sha256_must_be_hexadecimal(sha256: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^sha256: must be 64 hexadecimal digits, got {sha256!r}$"):
        PdfSource(b"", sha256=sha256)


@pytest.mark.parametrize("size", [1500, BLOCK])
@pytest.mark.parametrize("in_memory", [True, False])
async def test_small_file_written_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, in_memory: bool
) -> None:
    """All of its bytes arrived, but maybe from two versions."""
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(size))
    os.utime(path, ns=(0, 0))
    if not in_memory:
        monkeypatch.setattr(module, "_NO_WAIT", None)
    reals, before = {name: getattr(os, name) for name in ("pread", "preadv")}, open_files()

    def read(name: str, *arguments: Any) -> Any:
        got = reals[name](*arguments)
        rewrite(path, "is written again")
        return got

    for name in reals:
        monkeypatch.setattr(os, name, partial(read, name))
    for most in (MOST, None):
        with pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$"):
            await PdfSource(path).open(most)
    assert open_files() == before


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_error_of_fstat_is_an_invalid_request_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(size))
    before = open_files()
    with path.open("rb", buffering=0) as file:
        stale(monkeypatch, size)
        with pytest.raises(InvalidRequest, match=r"^source: cannot open '.*lease.pdf': Stale file handle$"):
            await PdfSource(path).open(MOST)
        with pytest.raises(InvalidRequest, match=r"^source: cannot read lease.pdf: Stale file handle$"):
            await PdfSource(file).open(MOST)
    assert open_files() == before


async def test_file_whose_state_becomes_unknown_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(LARGE))
    with await PdfSource(path).open(MOST) as opened:
        stale(monkeypatch, LARGE)
        body = opened.body(lambda size: None)
        with pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$") as caught:
            await body.write(writer(bytearray()))
        assert body.failure is caught.value


def stale(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Make `fstat` fail for open files of this size."""
    real = os.fstat

    def fstat(number: int) -> os.stat_result:
        if real(number).st_size == size:
            raise OSError(116, "Stale file handle")
        return real(number)

    monkeypatch.setattr(os, "fstat", fstat)


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_file_is_closed_after_the_thread_of_a_cancelled_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(size))
    real, before = os.pread, open_files()
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> bytes:
        begun.set()
        assert go_on.wait(20)
        return real(*arguments)

    async def once() -> None:
        with await PdfSource(path).open() as opened:
            await sent(opened)

    monkeypatch.setattr(module, "_NO_WAIT", None)
    monkeypatch.setattr(os, "pread", slow)
    task = asyncio.create_task(once())
    assert await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert str(path) in open_files()
    go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert open_files() == before
