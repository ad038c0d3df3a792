"""Downloads of sealed PDFs: to a file, to memory, as a stream; complete and checked, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import hashlib
import io
import os
import stat
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from signing_async import (
    APIError,
    Assumptions,
    DecodeError,
    InvalidRequest,
    NotFound,
    NotSound,
    NotYetSigned,
    RequestTimeout,
    RetryPolicy,
    SealedFile,
    SigningClient,
    Timeouts,
    TransportError,
)
from signing_async.sandbox import Sandbox
from tests.documents.uploads import LARGE, open_files
from tests.pdfs import make_pdf
from tests.sealed.pdfs import sandbox_authority, sealed_by_sandbox
from tests.servers import serving

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)
OLD = b"what was here before"

Read = Callable[[SigningClient, Path], Coroutine[Any, Any, Any]]


async def to_file(client: SigningClient, path: Path) -> Any:
    return await client.documents.download_signed("s1", "d1", path)


async def to_memory(client: SigningClient, path: Path) -> Any:
    return await client.documents.read_signed("s1", "d1")


async def streamed(client: SigningClient, path: Path) -> Any:
    data = b""
    async with client.documents.stream_signed("s1", "d1") as chunks:
        async for chunk in chunks:
            data += chunk
            assert b"%PDF-".startswith(data[:5])  # nothing of an error page is yielded
    return data


WAYS = [to_file, to_memory, streamed]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The path of an existing file."""
    path = tmp_path / "sealed.pdf"
    path.write_bytes(OLD)
    return path


def untouched(target: Path) -> bool:
    """Return whether the target is unchanged and no other file is beside it."""
    return target.read_bytes() == OLD and list(target.parent.iterdir()) == [target]


def sending(data: bytes, **headers: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(body=data, content_type="application/pdf", headers=headers)

    return respond


def sending_part(data: bytes, missing: int = 100) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Announce more bytes than are sent, then close the connection."""

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data) + missing)})
        await response.prepare(request)
        await response.write(data)
        assert request.transport is not None
        request.transport.close()
        return response

    return respond


def in_pieces(
    data: bytes, size: int, pause: float = 0, seen: Callable[[int], object] = int
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Send a file in pieces, with pauses, and report to ``seen`` how much was sent."""

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(data), size):
                await response.write(data[at : at + size])
                seen(at)
                await asyncio.sleep(pause)
        return response

    return respond


# Complete


async def test_download_raises_not_yet_signed_and_then_returns_the_sealed_file(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """All ways return the same bytes."""
    signing = await client.signings.create(name="Lease", language="EN")
    document = await client.documents.upload(signing, make_pdf())
    await client.recipients.add(signing, email="ada@example.com")
    await client.signings.send(signing)
    for read in (
        client.documents.download_signed(signing, document, tmp_path / "early.pdf"),
        client.documents.read_signed(signing, document),
        client.documents.stream_signed(signing, document).__aenter__(),
    ):
        with pytest.raises(NotYetSigned) as caught:
            await read
        assert isinstance(caught.value, NotFound)
        assert caught.value.status == 404
    assert list(tmp_path.iterdir()) == []
    await sandbox.complete(signing.id)

    sealed = await client.documents.download_signed(signing, document, tmp_path / "sealed.pdf")
    data = (tmp_path / "sealed.pdf").read_bytes()
    assert data.startswith(make_pdf())
    assert sealed == SealedFile(tmp_path / "sealed.pdf", len(data), hashlib.sha256(data).hexdigest())
    assert await client.documents.read_signed(signing.id, document.id) == data
    async with client.documents.stream_signed(signing, document) as chunks:
        assert b"".join([chunk async for chunk in chunks]) == data
    assert list(tmp_path.iterdir()) == [tmp_path / "sealed.pdf"]


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("read", WAYS)
async def test_large_file_replaces_the_target(target: Path, read: Read, is_compressed: bool) -> None:
    """Size and hash are those of the PDF, also if the response is compressed."""
    data = make_pdf(LARGE)
    packed = sending(gzip.compress(data, 1), **{"Content-Encoding": "gzip"}) if is_compressed else sending(data)
    async with serving(packed) as server, SigningClient(server.origin, "token") as client:
        result = await read(client, target)
    if read is to_file:
        assert result == SealedFile(target, LARGE, hashlib.sha256(data).hexdigest())
        assert target.read_bytes() == data
        assert list(target.parent.iterdir()) == [target]
    else:
        assert result == data


async def test_existing_file_is_not_replaced_without_overwrite(target: Path) -> None:
    """Nothing is requested. A dangling link counts as a file."""
    (link := target.with_name("link.pdf")).symlink_to("nowhere")
    async with serving(sending(make_pdf())) as server, SigningClient(server.origin, "token") as client:
        for path in (target, link):
            with pytest.raises(InvalidRequest, match=rf"^path: '.*{path.name}' already exists"):
                await client.documents.download_signed("s1", "d1", path, overwrite=False)
        assert server.requests == []
    link.unlink()
    assert untouched(target)


async def test_file_that_appears_during_the_download_is_not_replaced_without_overwrite(tmp_path: Path) -> None:
    appearing = [tmp_path / "sealed.pdf"]

    async def respond(request: web.Request) -> web.StreamResponse:
        for path in appearing:
            path.write_bytes(OLD)
        return await sending(make_pdf())(request)

    async with serving(respond) as server, SigningClient(server.origin, "token") as client:
        download = partial(client.documents.download_signed, "s1", "d1", overwrite=False)
        with pytest.raises(InvalidRequest, match=r"^path: '.*sealed\.pdf' already exists"):
            await download(tmp_path / "sealed.pdf")
        assert untouched(tmp_path / "sealed.pdf")
        appearing.clear()
        await download(tmp_path / "new.pdf")
    assert (tmp_path / "new.pdf").read_bytes() == make_pdf()
    assert len(list(tmp_path.iterdir())) == 2


async def test_accept_header_allows_a_pdf_and_errors_in_json(target: Path) -> None:
    """Its value is an assumption."""

    async def respond(request: web.Request) -> web.StreamResponse:
        if "application/pdf" not in request.headers["Accept"]:
            return web.json_response({}, status=406)
        return await sending(make_pdf())(request)

    own = Assumptions(download_accept="*/*;q=0.5, application/pdf")
    async with serving(respond) as server:
        for settings in ({}, {"assumptions": own}):
            async with SigningClient(server.origin, "token", **settings) as client:
                await to_file(client, target)
        async with SigningClient(server.origin, "token") as client:
            with pytest.raises(APIError):
                await client.me()
    accepted = [request.headers["Accept"] for request in server.requests]
    assert accepted == ["application/pdf, application/json", own.download_accept, "application/json"]


async def test_new_file_honours_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        async with serving(sending(make_pdf())) as server, SigningClient(server.origin, "token") as client:
            await client.documents.download_signed("s1", "d1", tmp_path / "a.pdf")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.pdf").stat().st_mode) == 0o640


async def test_replaced_file_keeps_its_mode_and_a_link_leads_to_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary file is private."""
    (folder := tmp_path / "private").mkdir()
    (file := folder / "a.pdf").write_bytes(OLD)
    file.chmod(0o640)
    (link := tmp_path / "link.pdf").symlink_to(file)
    modes, sync = set(), os.fsync

    def look(_: int) -> None:
        modes.update(stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path != file)

    def watched_sync(descriptor: int) -> None:
        look(descriptor)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched_sync)
    respond = in_pieces(make_pdf(LARGE), 100_000, 0.001, look)
    async with serving(respond) as server, SigningClient(server.origin, "token") as client:
        sealed = await client.documents.download_signed("s1", "d1", link)
    assert sealed.path == link
    assert link.is_symlink()
    assert file.read_bytes() == link.read_bytes() == make_pdf(LARGE)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert modes == {0o600}
    assert set(tmp_path.rglob("*")) == {folder, file, link}


# Incomplete, or not a PDF


@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"<html><body>Please sign in</body></html>" * 50_000, "the response is not a PDF"),
        (b"%PD", "the response is not a PDF"),
        (make_pdf(LARGE)[:-100], "the sealed file is truncated: no %%EOF at its end"),
        (make_pdf() + b" " * 1024, "the sealed file is truncated: no %%EOF at its end"),
        (make_pdf(LARGE + 1), f"the sealed file is larger than {LARGE} bytes"),
    ],
    ids=["html", "short", "cut", "junk behind", "large"],
)
async def test_response_that_is_no_complete_pdf_raises_decode_error_and_keeps_the_target(
    target: Path, read: Read, data: bytes, expected: str
) -> None:
    """With status and request id, and without a retry."""
    assumptions = Assumptions(max_sealed_bytes=LARGE)
    async with (
        serving(sending(data, **{"X-Request-Id": "r-77"})) as server,
        SigningClient(server.origin, "token", assumptions=assumptions, retry=QUICK) as client,
    ):
        with pytest.raises(DecodeError) as caught:
            await read(client, target)
        assert len(server.requests) == 1
    assert expected in str(caught.value)
    assert str(caught.value).startswith("documents.download_signed: ")
    assert (caught.value.status, caught.value.request_id) == (200, "r-77")
    assert caught.value.operation == "documents.download_signed"
    assert untouched(target)


async def test_max_sealed_bytes_limits_decompressed_bytes(target: Path) -> None:
    """Little more than the limit is ever decompressed."""
    bomb = gzip.compress(b"%PDF-1.7\n" + bytes(50 * 2**20), 1)
    assumptions = Assumptions(max_sealed_bytes=2**20)
    async with (
        serving(sending(bomb, **{"Content-Encoding": "gzip"})) as server,
        SigningClient(server.origin, "token", assumptions=assumptions) as client,
    ):
        tracemalloc.start()
        try:
            with pytest.raises(DecodeError, match="larger than 1048576 bytes"):
                await to_file(client, target)
            assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
        finally:
            tracemalloc.stop()
    assert untouched(target)


@pytest.mark.parametrize("read", WAYS)
async def test_dropped_download_is_retried_from_the_start_and_keeps_the_target_until_it_is_complete(
    target: Path, read: Read
) -> None:
    """A stream is not retried: its reader has taken bytes of it already."""
    data = make_pdf(LARGE)
    drops = 99

    async def respond(request: web.Request) -> web.StreamResponse:
        is_dropped = len(server.requests) <= drops
        return await (sending_part(data[:-1], 1) if is_dropped else sending(data))(request)

    retry = RetryPolicy(max_attempts=3, base_delay=0.01)
    async with serving(respond) as server, SigningClient(server.origin, "token", retry=retry) as client:
        with pytest.raises(TransportError) as caught:
            await read(client, target)
        assert len(server.requests) == (1 if read is streamed else 3)
        assert caught.value.status == 200
        assert caught.value.__cause__ is caught.value.__context__ is None
        assert untouched(target)
        drops = len(server.requests) + (0 if read is streamed else 1)
        result = await read(client, target)
        assert len(server.requests) == drops + 1
    assert (target.read_bytes() if read is to_file else result) == data


# Paths


async def test_error_of_an_unwritable_path_names_it_before_any_request(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with serving(sending(make_pdf())) as server, SigningClient(server.origin, "token") as client:
        paths: list[tuple[Any, str]] = [
            (tmp_path, f"path: {str(tmp_path)!r} is a folder"),
            (tmp_path / "pipe", f"path: {str(tmp_path / 'pipe')!r} is not a regular file"),
            (tmp_path / "a" / "b", f"folder {str(tmp_path / 'a')!r} does not exist"),
            (tmp_path / ("a" * 256), f"path: cannot write {str(tmp_path / ('a' * 256))!r}: File name too long"),
            ("a\0b", r"path: cannot write 'a\x00b': "),
            (b"a.pdf", "path: must be a path, got bytes"),
        ]
        for path, expected in paths:
            with pytest.raises(InvalidRequest) as caught:
                await client.documents.download_signed("s1", "d1", path)
            assert expected in str(caught.value)
        assert server.requests == []
        assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def failing(number: int) -> Callable[..., Any]:
    """Return a function that raises this `OSError`, with the name of the temporary file."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number), ".temporary.part")

    return fail


@pytest.mark.parametrize(
    ("function", "replacement", "size"),
    [
        ("pathlib.Path.touch", failing(errno.ENOSPC), LARGE),
        ("os.fsync", failing(errno.ENOSPC), 1000),
        ("pathlib.Path.open", lambda *_: io.FileIO("/dev/full", "w"), 1000),
        ("pathlib.Path.open", lambda *_: io.FileIO("/dev/full", "w"), LARGE),
        ("pathlib.Path.touch", failing(errno.EACCES), 1000),
    ],
    ids=["create", "sync", "write", "write a large file", "unwritable folder"],
)
async def test_full_disk_or_unwritable_folder_raises_an_error_that_names_the_target_and_keeps_it(
    target: Path, monkeypatch: pytest.MonkeyPatch, function: str, replacement: Any, size: int
) -> None:
    async with serving(sending(make_pdf(size))) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        monkeypatch.setattr(function, replacement)
        with pytest.raises((OSError, InvalidRequest)) as caught:
            await client.documents.download_signed("s1", "d1", target)
        monkeypatch.undo()
        assert len(server.requests) == 1
    if isinstance(caught.value, InvalidRequest):
        assert str(caught.value) == f"path: cannot write {str(target)!r}: Permission denied"
    else:
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(target))
    assert untouched(target)


async def test_file_is_synced_before_it_replaces_the_target_and_the_folder_afterwards(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(handle: int) -> None:
        status = os.fstat(handle)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size}")
        real_fsync(handle)

    def replace(path: Path, to: Path) -> Path:
        events.append("name")
        return real_replace(path, to)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    async with serving(sending(make_pdf(LARGE))) as server, SigningClient(server.origin, "token") as client:
        await client.documents.download_signed("s1", "d1", target)
    assert events == [f"file of {LARGE}", "name", "folder"]


async def test_stalled_disk_does_not_hold_a_download_past_its_deadline(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, waits = threading.Event(), list[bool]()
    monkeypatch.setattr(os, "fsync", lambda _: waits.append(released.wait(20)))
    timeouts = Timeouts(transfer=0.5)
    async with (
        serving(sending(make_pdf())) as server,
        SigningClient(server.origin, "token", timeout=timeouts) as client,
    ):
        with pytest.raises(RequestTimeout):
            await client.documents.download_signed("s1", "d1", target)
        assert waits == []
        released.set()
        async with asyncio.timeout(60):
            while not untouched(target):  # the thread is not awaited any more
                await asyncio.sleep(0.01)


# Leaving early


async def test_cancellation_at_any_moment_leaves_the_old_or_the_new_file_and_nothing_else(target: Path) -> None:
    data = make_pdf(2 * LARGE)
    before = open_files()
    async with serving(in_pieces(data, 50_000)) as server, SigningClient(server.origin, "token") as client:
        outcomes = set()
        for moment in range(0, 240, 16):
            target.write_bytes(OLD)
            task = asyncio.create_task(to_file(client, target))
            for _ in range(moment):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            outcomes.add(task.cancelled())
            for _ in range(200):  # a thread of the cancelled download
                if list(target.parent.iterdir()) == [target]:
                    break
                await asyncio.sleep(0.005)
            assert list(target.parent.iterdir()) == [target]
            assert target.read_bytes() in (OLD, data)
        assert True in outcomes
    await asyncio.get_running_loop().shutdown_default_executor()
    assert open_files() == before


@pytest.mark.parametrize("read", [to_file, streamed])
async def test_stalled_download_ends_at_its_deadline(target: Path, read: Read) -> None:
    respond = in_pieces(make_pdf(LARGE), 1000, 5)
    # The idle timeout is longer than the deadline, so the deadline ends the download.
    timeouts = Timeouts(call=5, transfer=0.3)
    async with serving(respond) as server, SigningClient(server.origin, "token", timeout=timeouts) as client:
        with pytest.raises(RequestTimeout):
            await read(client, target)
    assert untouched(target)


async def test_leaving_a_stream_early_closes_its_connection(target: Path) -> None:
    async with serving(in_pieces(make_pdf(5_000_000), 50_000)) as server, aiohttp.ClientSession() as session:
        client = SigningClient(server.origin, "token", session=session)
        assert isinstance(session.connector, aiohttp.TCPConnector)
        for leave in ("before", "early", "error"):
            with contextlib.suppress(LookupError):
                async with client.documents.stream_signed("s1", "d1") as chunks:
                    if leave != "before":
                        async for chunk in chunks:
                            assert chunk.startswith(b"%PDF-")
                            if leave == "error":
                                raise LookupError
                            break
            assert not session.connector._acquired
            assert not session.connector._conns


async def test_stream_without_a_reader_is_not_buffered() -> None:
    data = make_pdf(20 * 2**20)
    sent: list[int] = []
    respond = in_pieces(data, 100_000, 0, sent.append)
    async with serving(respond) as server, SigningClient(server.origin, "token") as client:
        async with client.documents.stream_signed("s1", "d1") as chunks:
            size = len(await anext(chunks))
            await asyncio.sleep(0.2)
            assert sent[-1] < len(data) - 2**20
            async for chunk in chunks:
                size += len(chunk)
        assert size == len(data)


# Verification


@pytest.fixture
def sealed_pdf() -> bytes:
    """A file sealed by the sandbox, in an event loop of its own."""
    return sealed_by_sandbox()


async def test_verified_download_keeps_a_sound_and_trusted_file(target: Path, sealed_pdf: bytes) -> None:
    async with serving(sending(sealed_pdf)) as server, SigningClient(server.origin, "token") as client:
        for settings in ({"verify": True}, {"trust": sandbox_authority().certificate_pem}):
            await client.documents.download_signed("s1", "d1", target, **settings)
            assert target.read_bytes() == sealed_pdf
            target.write_bytes(OLD)
        with pytest.raises(NotSound) as caught:
            await client.documents.download_signed("s1", "d1", target, trust="system")
    problem = "its signature: the certificate does not lead to a trusted root"
    assert caught.value.problems == (problem,)
    assert str(caught.value) == f"documents.download_signed: the sealed file is not trusted: {problem}"
    assert untouched(target)


async def test_unsound_file_raises_not_sound_and_keeps_the_target(target: Path, sealed_pdf: bytes) -> None:
    """It is not requested again."""
    async with (
        serving(sending(sealed_pdf + b"\n")) as server,
        SigningClient(server.origin, "token", retry=QUICK) as client,
    ):
        with pytest.raises(NotSound, match=r"the sealed file is not sound: 1 bytes after") as caught:
            await client.documents.download_signed("s1", "d1", target, verify=True)
        assert (len(caught.value.problems), len(server.requests)) == (1, 1)
    assert untouched(target)


async def test_unreadable_roots_are_refused_before_the_download(target: Path) -> None:
    async with SigningClient("http://127.0.0.1:9", "token") as client:
        with pytest.raises(InvalidRequest, match=r"trust: cannot read 'none\.pem'"):
            await client.documents.download_signed("s1", "d1", target, trust="none.pem")
    assert untouched(target)
