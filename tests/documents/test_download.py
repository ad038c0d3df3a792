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
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from signing_async import (
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
from tests.documents.uploads import LARGE, QUICK, open_files
from tests.pdfs import make_pdf
from tests.sealed.pdfs import judge_here, sandbox_authority, sealed_by_sandbox
from tests.servers import serving

OLD = b"what was here before"

Read = Callable[[SigningClient, Path], Coroutine[Any, Any, Any]]


async def to_file(client: SigningClient, path: Path) -> Any:
    return await client.documents.download_signed("s1", "d1", path)


async def streamed(client: SigningClient, path: Path) -> Any:
    data = b""
    async with client.documents.stream_signed("s1", "d1") as chunks:
        async for chunk in chunks:
            data += chunk
            assert b"%PDF-".startswith(data[:5])  # nothing of an error page is yielded
    return data


WAYS = [to_file, streamed]


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
    """Nothing is requested. A dangling link counts as a file; a file may also appear during the download."""
    (link := target.with_name("link.pdf")).symlink_to("nowhere")
    appearing = target.with_name("new.pdf")

    async def respond(request: web.Request) -> web.StreamResponse:
        if len(server.requests) == 1:
            appearing.write_bytes(OLD)
        return await sending(make_pdf())(request)

    async with serving(respond) as server, SigningClient(server.origin, "token") as client:
        for path in (target, link, appearing):
            assert server.requests == []
            with pytest.raises(InvalidRequest, match=rf"^path: '.*{path.name}' already exists"):
                await client.documents.download_signed("s1", "d1", path, overwrite=False)
        link.unlink()
        assert target.read_bytes() == appearing.read_bytes() == OLD
        appearing.unlink()
        await client.documents.download_signed("s1", "d1", appearing, overwrite=False)
    assert appearing.read_bytes() == make_pdf()
    appearing.unlink()
    assert untouched(target)


async def test_accept_header_allows_a_pdf_and_errors_in_json(target: Path) -> None:
    """Its value is an assumption."""
    own = Assumptions(download_accept="*/*;q=0.5, application/pdf")
    async with serving(sending(make_pdf())) as server:
        for settings in ({}, {"assumptions": own}):
            async with SigningClient(server.origin, "token", **settings) as client:
                await to_file(client, target)
    accepted = [request.headers["Accept"] for request in server.requests]
    assert accepted == ["application/pdf, application/json", own.download_accept]


async def test_new_file_honours_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        async with serving(sending(make_pdf())) as server, SigningClient(server.origin, "token") as client:
            await client.documents.download_signed("s1", "d1", tmp_path / "a.pdf")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.pdf").stat().st_mode) == 0o640


async def test_replaced_file_is_synced_keeps_its_mode_and_a_link_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary file is private. It is synced before it gets the name, and the folder afterwards."""
    (folder := tmp_path / "private").mkdir()
    (file := folder / "a.pdf").write_bytes(OLD)
    file.chmod(0o640)
    (link := tmp_path / "link.pdf").symlink_to(file)
    events: list[object] = []
    sync, replace = os.fsync, Path.replace

    def watched_sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else (status.st_size, mode))
        sync(descriptor)

    def watched_replace(path: Path, to: Path) -> Path:
        events.append("name")
        return replace(path, to)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    async with serving(sending(make_pdf(LARGE))) as server, SigningClient(server.origin, "token") as client:
        sealed = await client.documents.download_signed("s1", "d1", link)
    assert events == [(LARGE, 0o600), "name", "folder"]
    assert sealed.path == link
    assert link.is_symlink()
    assert file.read_bytes() == link.read_bytes() == make_pdf(LARGE)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
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
        (gzip.compress(make_pdf(LARGE + 1), 1), f"the sealed file is larger than {LARGE} bytes"),
    ],
    ids=["html", "short", "cut", "junk behind", "large when decompressed"],
)
async def test_response_that_is_no_complete_pdf_raises_decode_error_and_keeps_the_target(
    target: Path, read: Read, data: bytes, expected: str
) -> None:
    """With status and request id, and without a retry."""
    assumptions = Assumptions(max_sealed_bytes=LARGE)
    headers = {"X-Request-Id": "r-77"} | ({"Content-Encoding": "gzip"} if data.startswith(b"\x1f\x8b") else {})
    async with (
        serving(sending(data, **headers)) as server,
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


@pytest.mark.parametrize("read", WAYS)
async def test_dropped_download_is_retried_from_the_start_and_keeps_the_target_until_it_is_complete(
    target: Path, read: Read
) -> None:
    """A stream is not retried: its reader has taken bytes of it already."""
    data = make_pdf(LARGE)
    drops = 99

    async def respond(request: web.Request) -> web.StreamResponse:
        if len(server.requests) > drops:
            return await sending(data)(request)
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[:-1])
        assert request.transport is not None
        request.transport.close()
        return response

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
        ("pathlib.Path.open", lambda *_: io.FileIO("/dev/full", "w"), LARGE),
        ("pathlib.Path.touch", failing(errno.EACCES), 1000),
    ],
    ids=["create", "sync", "write", "unwritable folder"],
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


async def test_verified_download_keeps_only_a_sound_and_trusted_file(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not sound is not requested again. Unreadable roots are refused before the download."""
    monkeypatch.setattr("signing_async.sealed.run_worker", judge_here)
    sealed = await asyncio.to_thread(sealed_by_sandbox)
    responses = [sealed + b"\n", sealed]

    async def respond(request: web.Request) -> web.StreamResponse:
        return await sending(responses[0])(request)

    async with serving(respond) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        download = partial(client.documents.download_signed, "s1", "d1", target)
        with pytest.raises(InvalidRequest, match=r"trust: cannot read 'none\.pem'"):
            await download(trust="none.pem")
        assert server.requests == []
        with pytest.raises(NotSound, match=r"the sealed file is not sound: 1 bytes after") as caught:
            await download(verify=True)
        assert (len(caught.value.problems), len(server.requests)) == (1, 1)
        del responses[0]
        with pytest.raises(NotSound) as caught:
            await download(trust="system")
        problem = "its signature: the certificate does not lead to a trusted root"
        assert caught.value.problems == (problem,)
        assert str(caught.value) == f"documents.download_signed: the sealed file is not trusted: {problem}"
        assert untouched(target)
        for settings in ({"verify": True}, {"trust": sandbox_authority().certificate_pem}):
            await download(**settings)
            assert target.read_bytes() == sealed
            target.write_bytes(OLD)
