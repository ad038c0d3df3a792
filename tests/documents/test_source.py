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
import socket
import stat
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from signing_async import InvalidRequest, PdfRejected, PdfSource
from signing_async.documents import files, preflight
from signing_async.documents import source as module
from signing_async.transport import wire
from tests.pdfs import encrypted, make_pdf, with_signature_field, with_usage_rights

MOST = 10 * 2**20
LARGE = 1_200_000


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

    return SimpleNamespace(write=write, transport=SimpleNamespace(get_write_buffer_size=lambda: 0))


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
@pytest.mark.parametrize("where", ["open", "fstat", "preadv"])
async def test_failing_system_is_a_transient_error_of_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, where: str
) -> None:
    number = getattr(errno, code)
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf())

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, where, fail)
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


async def test_unreadable_file_objects_are_invalid_requests(tmp_path: Path) -> None:
    """Closed ones, write-only ones, and those on a broken disk."""
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf())
    with path.open("rb") as closed:
        pass
    memory = io.BytesIO(make_pdf())
    memory.close()
    view = memoryview(make_pdf())
    view.release()

    class Broken(io.RawIOBase):
        name = "broken.pdf"

        def readable(self) -> bool:
            return True

        def readinto(self, buffers: object) -> int:
            raise OSError(5, "Input/output error")

    with io.FileIO(os.open(path, os.O_WRONLY), "w") as raw, path.open("ab") as buffered:
        sources: list[tuple[Any, str]] = [
            (closed, "source: cannot read a.pdf: .*closed file"),
            (memory, "source: cannot read document.pdf: .*closed file"),
            (view, "source: cannot read document.pdf: .*released"),
            (raw, "source: cannot read document.pdf: Bad file descriptor"),
            (buffered, "source: cannot read a.pdf: read"),
            (Broken(), "source: cannot read broken.pdf: Input/output error"),
        ]
        for source, expected in sources:
            with pytest.raises(InvalidRequest, match=f"^{expected}"):
                await PdfSource(source).open()


async def test_read_error_names_the_file_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(LARGE))
    before = open_files()

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(InvalidRequest, match=r"^source: cannot read a.pdf: Input/output error$"):
        await content(PdfSource(path), MOST)
    assert open_files() == before


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


@pytest.mark.parametrize("past", [0, 10])
async def test_file_at_its_end_is_empty(tmp_path: Path, past: int) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf())
    with path.open("rb") as file:
        memory = io.BytesIO(make_pdf())
        for source in (file, memory):
            source.seek(past, os.SEEK_END)
            with pytest.raises(PdfRejected, match="the file is empty") as caught:
                await PdfSource(source).open(MOST)
            assert caught.value.reason == "not_pdf"
            assert await content(PdfSource(source)) == b""


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
            lambda: make_pdf(2**20 + 1),
            "too_large",
            "a.pdf: too large: at most 1048576 bytes may be uploaded, this file has 1048577 bytes",
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
            await source.open(2**20)
        assert (str(caught.value), caught.value.reason, caught.value.filename) == (expected, reason, "a.pdf")
        assert isinstance(caught.value, InvalidRequest)
        assert await content(source) == data


async def test_usage_rights_are_no_signature() -> None:
    assert await content(PdfSource(with_usage_rights()), MOST) == with_usage_rights()


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
async def test_disk_is_not_accessed_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    data = make_pdf(LARGE)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    mine, seen = threading.get_ident(), []

    def watched(name: str, module: Any) -> None:
        real = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == mine:
                seen.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    with path.open("rb") as file:
        for name in ("sendfile", "pread", "write", "dup"):
            watched(name, os)
        if kind != "path":
            watched("open", os)
        watched("preflight", preflight)
        watched("read_fully", module)
        source: Any = {
            "path": path,
            "file": file,
            "pipe": io.BufferedReader(io.BytesIO(data)),
            "bytes": data,
            "stream": in_chunks(data),
        }[kind]
        assert await content(PdfSource(source), MOST) == data
    assert seen == []


@pytest.mark.parametrize("how", ["no such flag", "not in memory", "in part", "from the disk", "cannot tell"])
async def test_uncached_data_is_read_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    data = make_pdf(LARGE)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    mine, real, threads = threading.get_ident(), os.preadv, set()

    def preadv(handle: int, buffers: list[Any], at: int, flags: int = 0) -> int:
        threads.add(threading.get_ident())
        if flags and how == "not in memory":
            raise BlockingIOError
        if flags and how == "cannot tell":
            raise OSError(95, "Operation not supported")
        if how == "in part":
            return real(handle, [memoryview(buffers[0])[: 1 + len(buffers[0]) // 3]], at)
        return real(handle, buffers, at, flags) if flags else real(handle, buffers, at)

    if how == "no such flag":
        monkeypatch.setattr(files, "_NO_WAIT", None)
    monkeypatch.setattr(os, "preadv", preadv)
    opened = await PdfSource(path).open()
    if how == "from the disk":
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with opened:
        assert await sent(opened) == data
    if how != "from the disk":  # the system may still have the file in memory
        assert threads - {mine}


async def test_file_is_read_where_the_system_reads_only_from_the_current_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""
    lseek = os.lseek

    def slow(*arguments: int) -> int:
        position = lseek(*arguments)
        time.sleep(0.01)  # for another thread to move the position, if it may
        return position

    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr(os, "lseek", slow)
    monkeypatch.setattr(files, "_NO_WAIT", None)
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


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_file_object_is_opened_several_times_at_once_where_its_position_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """As on Windows, where reading its content moves the caller's file."""
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr(files, "_NO_WAIT", None)
    data = make_pdf(size)
    path = tmp_path / "a.pdf"
    path.write_bytes(b"%" + data)

    class Slow(io.FileIO):
        def read(self, size: int | None = -1, /) -> Any:
            time.sleep(0.01)  # for another thread to move the position, if it may
            return super().read(size)

    with Slow(path) as file:
        file.seek(1)
        opened = await asyncio.gather(*(PdfSource(file).open(MOST) for _ in range(4)))
        assert [await sent(pdf) for pdf in opened] == [data] * 4
        assert file.tell() == 1
        for pdf in opened:
            pdf.close()


async def test_pipe_without_data_delays_no_file_object_where_positions_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr(files, "_NO_WAIT", None)
    data = make_pdf()
    (tmp_path / "a.pdf").write_bytes(data)
    reader, writing = os.pipe()
    begun = threading.Event()

    class Pipe(io.FileIO):
        def read(self, size: int | None = -1, /) -> Any:
            begun.set()
            return super().read(size)

    with Pipe(reader) as pipe, (tmp_path / "a.pdf").open("rb") as file:
        waiting = asyncio.create_task(content(PdfSource(pipe)))
        try:
            assert await asyncio.to_thread(begun.wait, 30)
            async with asyncio.timeout(30):
                assert await content(PdfSource(file)) == data
        finally:
            os.write(writing, data)
            os.close(writing)
        assert await waiting == data


async def test_cached_data_is_read_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if files._NO_WAIT is None:
        pytest.skip("this system cannot read only what is in memory")
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(LARGE))
    with await PdfSource(path).open(MOST) as opened:
        monkeypatch.setattr(asyncio, "to_thread", None)
        assert await sent(opened) == make_pdf(LARGE)


async def test_uncached_file_takes_one_thread_for_each_mebibyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_pdf(5 * 2**19)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    monkeypatch.setattr(files, "_NO_WAIT", None)
    real, threads, reports = asyncio.to_thread, 0, []

    async def to_thread(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal threads
        threads += 1
        return await real(function, *arguments)

    with await PdfSource(path).open(MOST) as opened:
        monkeypatch.setattr(asyncio, "to_thread", to_thread)
        out = bytearray()
        await opened.body(reports.append).write(writer(out))
    assert data in out
    assert threads == 3
    assert sum(reports) == len(data)
    assert max(reports) == module._WRITE_SIZE, "progress is reported as often as for a cached file"


class Slow:
    """A transport that keeps buffers without copying them until all but `lags` bytes are sent."""

    def __init__(self, lags: int) -> None:
        self.lags = lags
        self.kept: list[memoryview] = []
        self.out = bytearray()
        self.buffers: dict[int, object] = {}  # kept, so that ids stay unique

    async def write(self, chunk: wire.Chunk) -> None:
        self.kept.append(memoryview(chunk))
        self.buffers[id(memoryview(chunk).obj)] = memoryview(chunk).obj
        while self.get_write_buffer_size() > self.lags:
            too_many = self.get_write_buffer_size() - self.lags
            self.out += self.kept[0][:too_many]
            self.kept[0] = self.kept[0][too_many:]
            if not self.kept[0]:
                del self.kept[0]

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.kept))


@pytest.mark.parametrize(
    "lags", [0, 1, 16 * 1024, module._WRITE_SIZE - 1, module._WRITE_SIZE, module._WRITE_SIZE + 1, 300_000, LARGE]
)
async def test_buffers_are_reused_only_after_they_are_sent(tmp_path: Path, lags: int) -> None:
    data = make_pdf(LARGE)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    slow = Slow(lags)
    with await PdfSource(path).open() as opened:
        writer = SimpleNamespace(write=slow.write, transport=slow)
        await opened.body(lambda size: None).write(writer)  # type: ignore[arg-type]  # all of a writer that is used
    slow.lags = 0
    await slow.write(b"")
    assert slow.out.split(b"\r\n\r\n", 1)[1].startswith(data + b"\r\n--")
    assert len(slow.buffers) <= 5 or lags > module._WRITE_SIZE


async def test_consecutive_uploads_share_one_buffer(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(LARGE))
    quick = Slow(lags=0)
    writer = SimpleNamespace(write=quick.write, transport=quick)
    for _ in range(3):
        with await PdfSource(path).open() as opened:
            await opened.body(lambda size: None).write(writer)  # type: ignore[arg-type]  # as above
    assert (
        sum(len(buffer) == module._WRITE_SIZE for buffer in quick.buffers.values() if isinstance(buffer, bytearray))
        == 1
    )


async def test_error_of_the_connection_is_no_failure_of_the_source(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(LARGE))

    async def fail(chunk: wire.Chunk) -> None:
        raise ConnectionResetError

    with await PdfSource(path).open() as opened:
        body = opened.body(lambda size: None)
        with pytest.raises(ConnectionResetError):
            await body.write(SimpleNamespace(write=fail, transport=None))  # type: ignore[arg-type]  # all of a writer that is used
        assert body.started
        assert body.failure is None


async def test_file_shorter_than_its_size_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(LARGE))
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda handle, buffers, at, *flags: 0 if at else real(handle, buffers, at, *flags)
    )
    with pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$"):
        await PdfSource(path).open(MOST)
    opened = await PdfSource(path).open()
    with opened, pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$"):
        await sent(opened)


async def test_small_file_that_is_truncated_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf())
    real = module.read_fully

    def truncated(*arguments: Any) -> bool:
        os.truncate(path, 100)
        return real(*arguments)

    monkeypatch.setattr(module, "read_fully", truncated)
    monkeypatch.setattr(files, "_NO_WAIT", None)
    with pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$"):
        await PdfSource(path).open(MOST)


async def test_small_cached_file_is_checked_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*arguments: object) -> None:
        raise AssertionError("a thread was used")

    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf())
    monkeypatch.setattr(asyncio, "to_thread", refused)
    # While the system writes the file to the disk, it may refuse to read it without waiting.
    for is_last in [False] * 20 + [True]:
        try:
            with await PdfSource(path).open(MOST) as opened:
                assert opened.size == len(make_pdf())
            break
        except AssertionError:
            if is_last:
                raise
            await asyncio.sleep(0.1)
    with await PdfSource(make_pdf()).open(MOST) as opened:
        assert opened.size == len(make_pdf())


@pytest.mark.parametrize("kind", ["path", "bytes"])
async def test_large_cached_file_is_checked_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Little of it is read."""

    async def refused(*arguments: object) -> None:
        raise AssertionError("a thread was used")

    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(LARGE))
    with await PdfSource(path).open(MOST):
        pass  # the first check of a process imports its code in a thread
    real, counted = os.preadv, 0

    def preadv(handle: int, buffers: list[Any], at: int, flags: int) -> int:
        nonlocal counted
        counted += len(buffers[0])
        return real(handle, buffers, at, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(asyncio, "to_thread", refused)
    for most in (MOST, None):
        with await PdfSource(path if kind == "path" else path.read_bytes()).open(most) as opened:
            assert opened.size == LARGE
    assert counted < 20_000


@pytest.mark.parametrize("in_memory", [True, False])
async def test_refused_large_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> None:
    """A file that `glance` does not pass is read as a whole."""
    if not in_memory:
        monkeypatch.setattr(files, "_NO_WAIT", None)
    path = tmp_path / "lease.pdf"
    before = open_files()
    path.write_bytes(bytes(LARGE))
    with pytest.raises(PdfRejected, match="not a PDF"):
        await PdfSource(path).open(MOST)
    path.write_bytes(with_signature_field(b"/V 7 0 R") + b" " * LARGE)
    with await PdfSource(path).open(MOST):
        pass  # no end where readers look for it: left to the service
    path.write_bytes(make_pdf(LARGE))
    with pytest.raises(PdfRejected, match="too large"):
        await PdfSource(path).open(LARGE - 1)
    assert open_files() == before


@pytest.mark.parametrize("moment", ["glance", "whole"])
async def test_large_file_that_shrinks_during_the_preflight_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(LARGE) if moment == "glance" else bytes(LARGE))
    real, before = module.read_fully, open_files()

    def truncated(file: Any, block: memoryview, at: int) -> bool:
        if moment == "glance" or len(block) == LARGE:
            os.truncate(path, 100_000)
        return real(file, block, at)

    monkeypatch.setattr(module, "read_fully", truncated)
    monkeypatch.setattr(files, "_NO_WAIT", None)
    with pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$"):
        await PdfSource(path).open(MOST)
    assert open_files() == before


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
    source = in_chunks(make_pdf(LARGE)) if kind == "stream" else gzip.GzipFile(fileobj=packed)
    before = open_files()
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(Path("/dev/full").open, "wb"))
    with pytest.raises(InvalidRequest) as caught:
        await PdfSource(source, "lease.pdf").open(MOST)
    assert str(caught.value) == (
        "source: cannot buffer lease.pdf in a temporary file (TMPDIR sets its folder): No space left on device"
    )
    assert caught.value.transient
    assert open_files() == before


async def test_lack_of_descriptors_for_a_buffered_stream_is_a_transient_error(monkeypatch: pytest.MonkeyPatch) -> None:
    dup, calls = os.dup, 0

    def fail_second(descriptor: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return dup(descriptor)

    before = open_files()
    monkeypatch.setattr(os, "dup", fail_second)
    with pytest.raises(InvalidRequest, match=r"cannot buffer lease\.pdf in .*: Too many open files$") as caught:
        await PdfSource(in_chunks(make_pdf(LARGE)), "lease.pdf").open(MOST)
    assert caught.value.transient
    assert open_files() == before


@pytest.mark.parametrize("kind", ["path", "file", "stream", "pipe"])
@pytest.mark.parametrize("data", [make_pdf(LARGE), b"x" * LARGE], ids=["pdf", "no pdf"])
@pytest.mark.parametrize("in_memory", [True, False])
async def test_no_file_stays_open_after_opening_refusal_or_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, data: bytes, in_memory: bool
) -> None:
    monkeypatch.delattr(files.OpenFile, "__del__")
    if not in_memory:
        monkeypatch.setattr(files, "_NO_WAIT", None)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)

    async def once() -> None:
        with path.open("rb") as file:
            source: dict[str, Callable[[], Any]] = {
                "path": lambda: path,
                "file": lambda: file,
                "stream": lambda: in_chunks(data),
                "pipe": lambda: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(data, 1))),
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


def test_descriptor_stays_open_until_its_last_thread_is_done(tmp_path: Path) -> None:
    """It is closed once, and cannot be used after `close`."""
    before = open_files()
    file = files.OpenFile(os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT))
    with file as number:
        file.close()
        file.close()
        os.write(number, b"still open")
    assert open_files() == before
    with pytest.raises(ValueError, match="the file is closed"), file:
        pass
    with (tmp_path / "b").open("wb") as other:
        assert other.fileno() == number  # the descriptor is reused for another file, which must stay open
        file.close()
        del file
        os.fstat(number)


async def test_spool_is_readable_by_the_user_only(tmp_path: Path) -> None:
    with await PdfSource(in_chunks(make_pdf(LARGE))).open() as opened:
        assert isinstance(opened._content, files.OpenFile)
        assert stat.S_IMODE(os.fstat(opened._content.descriptor).st_mode) & 0o077 == 0


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
@pytest.mark.parametrize("size", [1500, module._SINGLE_WRITE + 1, module._WRITE_SIZE + 1, module._BLOCK])
@pytest.mark.parametrize("in_memory", [True, False])
async def test_small_file_is_sent_as_it_was_when_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, size: int, in_memory: bool
) -> None:
    """In each attempt, even if it changes afterwards."""
    if not in_memory:
        monkeypatch.setattr(files, "_NO_WAIT", None)
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(size))
    os.utime(path, ns=(0, 0))
    for sha256 in (None, digest(make_pdf(size)).upper()):
        path.write_bytes(make_pdf(size))
        with await PdfSource(path, sha256=sha256).open(MOST) as opened:
            rewrite(path, how)
            assert await sent(opened) == await sent(opened) == make_pdf(size)


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("size", [module._BLOCK + 1, 3 * module._WRITE_SIZE, LARGE])
@pytest.mark.parametrize("moment", ["opened", "first block", "last block but one"])
async def test_large_file_that_changes_lacks_its_last_block_in_each_attempt(
    tmp_path: Path, how: str, size: int, moment: str
) -> None:
    """A mix of two versions is no document."""
    path = tmp_path / "lease.pdf"
    blocks = -(-size // module._WRITE_SIZE)
    for sha256 in (None, digest(make_pdf(size))):
        path.write_bytes(make_pdf(size))
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
        assert len(out) < (blocks - 1) * module._WRITE_SIZE + 500
        assert calls < blocks


@pytest.mark.parametrize("how", CHANGES)
async def test_uncached_file_that_changes_lacks_its_last_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(files, "_NO_WAIT", None)
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(5 * 2**19))
    os.utime(path, ns=(0, 0))
    out, calls = bytearray(), 0

    def change(size: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            rewrite(path, how)

    changed = pytest.raises(InvalidRequest, match=r"^source: lease.pdf changed while it was read$")
    with await PdfSource(path).open(MOST) as opened, changed:
        await opened.body(change).write(writer(out))
    assert calls
    assert len(out) < 2 * 2**20 + 500


async def test_replaced_file_is_sent_as_it_was_when_opened(tmp_path: Path) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(LARGE))
    (tmp_path / "new.pdf").write_bytes(make_pdf(LARGE, seed=1))
    with await PdfSource(path).open(MOST) as opened:
        (tmp_path / "new.pdf").replace(path)
        assert await sent(opened) == make_pdf(LARGE)


@pytest.mark.parametrize("size", [1500, module._SINGLE_WRITE + 1, module._WRITE_SIZE, module._WRITE_SIZE + 1, LARGE])
@pytest.mark.parametrize("kind", ["bytes", "path", "stream"])
async def test_content_with_another_hash_lacks_its_last_block(tmp_path: Path, size: int, kind: str) -> None:
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
        with await wrong.open(MOST) as opened:
            body = opened.body(lambda size: None)
            expected = r"^source: a.pdf: sha256 mismatch: expected [0-9a-f]{64}, found [0-9a-f]{64}$"
            with pytest.raises(InvalidRequest, match=expected) as caught:
                await body.write(writer(out))
            assert body.failure is caught.value
        assert len(out) < (-(-size // module._WRITE_SIZE) - 1) * module._WRITE_SIZE + 500


@pytest.mark.parametrize("sha256", ["", "abc", "g" * 64, "a" * 65, b"a" * 64, 5])
def test_sha256_must_be_hexadecimal(sha256: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^sha256: must be 64 hexadecimal digits, got {sha256!r}$"):
        PdfSource(b"", sha256=sha256)


@pytest.mark.parametrize("kind", ["bytes", "path", "file"])
async def test_blocks_yield_the_whole_content_or_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    data = make_pdf(LARGE)
    path = tmp_path / "a.pdf"
    path.write_bytes(b"before" + data if kind == "file" else data)
    with path.open("rb") as file:
        file.seek(6)
        sources: dict[str, Any] = {"bytes": data, "path": path, "file": file}
        with await PdfSource(sources[kind]).open() as opened:
            assert b"".join(map(bytes, opened.blocks())) == data
            assert max(map(len, opened.blocks())) == module._BLOCK
            if kind == "bytes":
                return
            os.truncate(path, LARGE - 1)
            with pytest.raises(InvalidRequest, match=r"^source: a.pdf changed while it was read$"):
                list(opened.blocks())
            monkeypatch.setattr(os, "preadv", _broken)
            with pytest.raises(InvalidRequest, match=r"^source: cannot read a.pdf: Input/output error$"):
                list(opened.blocks())


def _broken(*_: object) -> Any:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("size", [1500, module._BLOCK])
@pytest.mark.parametrize("in_memory", [True, False])
async def test_small_file_written_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, in_memory: bool
) -> None:
    """All of its bytes arrived, but maybe from two versions."""
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(size))
    os.utime(path, ns=(0, 0))
    if not in_memory:
        monkeypatch.setattr(files, "_NO_WAIT", None)
    real, before = os.preadv, open_files()

    def preadv(*arguments: Any) -> int:
        got = real(*arguments)
        rewrite(path, "is written again")
        return got

    monkeypatch.setattr(os, "preadv", preadv)
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
    real, before = os.preadv, open_files()
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> int:
        begun.set()
        assert go_on.wait(20)
        return real(*arguments)

    async def once() -> None:
        with await PdfSource(path).open() as opened:
            await sent(opened)

    monkeypatch.setattr(files, "_NO_WAIT", None)
    monkeypatch.setattr(os, "preadv", slow)
    task = asyncio.create_task(once())
    assert await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert str(path) in open_files()
    go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert open_files() == before


@pytest.mark.parametrize(
    ("kind", "function", "call"),
    [
        ("path", "load", 1),
        ("file", "dup", 1),
        ("file", "load", 1),
        ("pipe", "dup", 1),
        ("pipe", "dup", 2),
        ("pipe", "load", 1),
        ("stream", "dup", 1),
        ("stream", "dup", 2),
        ("stream", "load", 1),
    ],
)
async def test_cancelled_open_does_not_wait_for_its_thread_and_the_file_is_closed_when_the_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, function: str, call: int
) -> None:
    """The garbage collector closes nothing. A caller's file object stays open."""
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(LARGE))
    owner: Any = os if function == "dup" else module.OpenPdf
    real, calls = getattr(owner, function), 0
    begun, go_on = threading.Event(), threading.Event()

    def slow(argument: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            begun.set()
            assert go_on.wait(20)
        return real(argument)

    monkeypatch.delattr(files.OpenFile, "__del__")
    monkeypatch.setattr(files, "_NO_WAIT", None)
    with path.open("rb") as file:
        sources: dict[str, Any] = {
            "path": path,
            "file": file,
            "pipe": gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(make_pdf(LARGE), 1))),
            "stream": in_chunks(make_pdf(LARGE)),
        }
        before = open_files()
        monkeypatch.setattr(owner, function, slow)
        task = asyncio.create_task(PdfSource(sources[kind]).open(MOST))
        assert await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert open_files() == before
        assert file.read() == make_pdf(LARGE)
    assert not sources["pipe"].closed


async def test_file_is_closed_if_its_thread_never_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(LARGE))
    monkeypatch.delattr(files.OpenFile, "__del__")
    monkeypatch.setattr(files, "_NO_WAIT", None)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    before, go_on = open_files(), threading.Event()
    busy = asyncio.create_task(asyncio.to_thread(go_on.wait, 20))
    task = asyncio.create_task(PdfSource(path).open(MOST))
    async with asyncio.timeout(20):
        while str(path) not in open_files():
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert open_files() == before
    go_on.set()
    assert await busy
