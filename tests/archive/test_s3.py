"""The S3 store: lost responses, retention, errors. The common promises are in the suite's tests."""

from __future__ import annotations

import asyncio
import logging
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from signing_async import ArchiveConflict, ArchiveError, ConfigurationError, SigningClient
from signing_async.archive import Archive, S3Store, verify_archive
from signing_async.sandbox import Sandbox
from tests.archive.s3_server import CREDENTIALS, Proxy, S3Server, failing
from tests.archive.tenants import completed, content_of, put, sweep

pytestmark = pytest.mark.asyncio(loop_scope="module")

PDF = b"%PDF-1.7 sealed\n%%EOF\n"
LARGE = bytes(range(256)) * 4096 * 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(s3: S3Server) -> AsyncIterator[Proxy]:
    async with failing(s3.url) as proxy:
        yield proxy


@pytest.fixture
def proxy(running: Proxy) -> Proxy:
    """A proxy in front of the service, which forwards everything until the test sets `Proxy.fail`."""
    running.fail = lambda request: "forward"
    running.page_size = None
    return running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(running: Proxy, s3: S3Server) -> AsyncIterator[S3Store]:
    """A store for all tests: opening one takes longer than most of them."""
    async with S3Store(f"s3://{s3.new_bucket()}/archive", endpoint_url=running.url) as store:
        yield store


@pytest.fixture
def store(opened: S3Store, proxy: Proxy) -> S3Store:
    """The store, behind the proxy."""
    return opened


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"{secrets.token_hex(4)}.pdf"


class Once:
    """Does something with the first request whose method and path contain a text."""

    def __init__(self, text: str, todo: str | int, times: int = 1) -> None:
        self.text = text
        self.todo = todo
        self.times = times

    def __call__(self, request: web.Request) -> str | int:
        if self.times and self.text in f"{request.method} {request.path_qs}":
            self.times -= 1
            return self.todo
        return "forward"


@pytest.mark.parametrize("todo", ["lose request", "lose response", 503])
async def test_write_is_repeated_after_a_lost_response_and_known_as_own(
    store: S3Store, proxy: Proxy, name: str, tmp_path: Path, todo: str | int
) -> None:
    """The repeated request is refused by the precondition, and the object's metadata tells that the first succeeded."""
    proxy.fail = Once("PUT", todo)
    await put(store, name, LARGE, tmp_path)
    assert proxy.fail.times == 0
    assert await content_of(store, name) == LARGE
    proxy.fail = Once("PUT", todo)
    await store.append(f"{name}.log", 0, LARGE)
    await store.append(f"{name}.log", len(LARGE), b"1\n")
    assert proxy.fail.times == 0
    assert await content_of(store, f"{name}.log") == LARGE + b"1\n"


async def test_append_is_repeated_after_a_conflict_but_not_forever(
    store: S3Store, proxy: Proxy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signing_async.archive.s3._CONFLICT_PAUSES", (0.001, 0.01, 0.1))
    proxy.fail = Once("PUT", "ConditionalRequestConflict", times=2)
    await store.append(name, 0, b"1\n")
    assert await content_of(store, name) == b"1\n"
    proxy.fail = Once("PUT", "ConditionalRequestConflict", times=99)
    with pytest.raises(ArchiveError, match="put_object failed: ConditionalRequestConflict: Try again") as failed:
        await store.append(name, 2, b"2\n")
    assert failed.value.transient
    assert not isinstance(failed.value, ArchiveConflict)


async def test_document_whose_upload_is_refused_does_not_stop_the_sweep(
    store: S3Store, proxy: Proxy, tmp_path: Path
) -> None:
    refusals = {"a.pdf": "BadDigest", "b.pdf": "InvalidObjectState"}

    def refuse(request: web.Request) -> str:
        return refusals.get(request.path.rpartition("/")[2], "forward")

    proxy.fail = refuse
    async with (
        Sandbox(seed=7) as sandbox,
        SigningClient(sandbox.base_url, sandbox.access_token()) as client,
        Archive(client, store, journal=tmp_path / "journal") as archive,
    ):
        await completed(sandbox, client, documents=(*refusals, "c.pdf"))
        first, again = [{one.document.name: one.error for one in await sweep(archive)} for _ in range(2)]
    assert first.pop("c.pdf") is None
    assert first.keys() == again.keys() == refusals.keys()
    for name, code in refusals.items():
        for error in (first[name], again[name]):
            assert f"failed: {code}" in str(error)
            assert isinstance(error, ArchiveError)
            assert error.transient == (code == "BadDigest")


async def test_object_lock_retains_files_and_lines(s3: S3Server, tmp_path: Path) -> None:
    """Nobody can delete them before."""
    bucket = s3.new_bucket(versioned=True)
    async with S3Store(f"s3://{bucket}", endpoint_url=s3.url, object_lock=("COMPLIANCE", 3650)) as locked:
        await put(locked, "short.pdf", PDF, tmp_path)
        await locked.append("manifest.jsonl", 0, b"{}\n")
    for key in ("short.pdf", f"manifest.jsonl/{0:020}.part"):
        headers = s3.request("GET", f"{bucket}/{key}")[1]
        assert headers["x-amz-object-lock-mode"] == "COMPLIANCE"
        retained = datetime.fromisoformat(headers["x-amz-object-lock-retain-until-date"])
        assert timedelta(days=3649) < retained - datetime.now(UTC) < timedelta(days=3651)


async def test_lists_of_many_pages_are_read_to_the_end(proxy: Proxy, s3: S3Server, tmp_path: Path) -> None:
    bucket = s3.new_bucket()
    s3.request("PUT", f"{bucket}/archive/manifest.jsonl/notes.txt", b"not a part")
    proxy.page_size = 3
    async with (
        S3Store(f"s3://{bucket}/archive", endpoint_url=proxy.url) as store,
        S3Store(f"s3://{bucket}/archive", endpoint_url=proxy.url) as other,
    ):
        for number in range(7):
            await store.append("manifest.jsonl", 2 * number, b"x\n")
            await put(store, f"{number}.pdf", PDF, tmp_path)
        assert await content_of(other, "manifest.jsonl") == b"x\n" * 7
        assert len([name async for name in other.names()]) == 9
        await other.append("manifest.jsonl", 14, b"y\n")


@pytest.mark.parametrize("content", [None, b"{}\n"], ids=["removed", "changed length"])
async def test_verification_reports_a_part_of_the_manifest_that_was_removed_or_changed(
    s3: S3Server, content: bytes | None
) -> None:
    bucket = s3.new_bucket()
    for number, part in enumerate((b"x\n", content, b"x\n")):
        if part is not None:
            s3.request("PUT", f"{bucket}/archive/manifest.jsonl/{2 * number:020}.part", part)
    async with S3Store(f"s3://{bucket}/archive", endpoint_url=s3.url) as store:
        report = await verify_archive(store)
    assert report.findings[-1].kind == "removed_line"
    assert "lacks the bytes from" in report.findings[-1].text
    assert not report.ok


@pytest.mark.parametrize(("damage", "problem"), [("cut off", "failed"), ("damage", r"get_object failed: .*checksum")])
async def test_cut_off_or_damaged_response_is_a_transient_error_of_its_object(
    store: S3Store, proxy: Proxy, name: str, tmp_path: Path, damage: str, problem: str
) -> None:
    await put(store, name, PDF, tmp_path)
    await store.append(f"{name}.log", 0, b"x\n")
    for key, damaged, content in ((name, "GET", PDF), (f"{name}.log", "part", b"x\n")):
        proxy.fail = Once(damaged, damage)
        with pytest.raises(ArchiveError, match=problem) as failed:
            await content_of(store, key)
        assert (failed.value.transient, failed.value.client_wide) == (True, damage == "cut off")
        assert await content_of(store, key) == content


async def test_error_is_transient_if_the_service_or_its_limit_is_the_cause(
    store: S3Store, proxy: Proxy, name: str, tmp_path: Path
) -> None:
    for status, transient in ((429, True), (501, False), (403, False)):
        proxy.fail = lambda request, status=status: status
        for failing_call in (put(store, name, PDF, tmp_path), content_of(store, name)):
            with pytest.raises(ArchiveError) as failed:
                await failing_call
            assert failed.value.transient is transient


@pytest.mark.parametrize(("status", "transient"), [(407, False), (503, True)])
async def test_refusal_of_a_proxy_to_connect_is_permanent(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, status: int, transient: bool
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with S3Store("s3://leases/archive", endpoint_url="https://s3.example.com") as store:
            with pytest.raises(ArchiveError, match="proxy") as failed:
                await content_of(store, "manifest.jsonl")
    assert (failed.value.transient, failed.value.client_wide) == (transient, True)


async def test_no_log_or_error_holds_a_secret(
    store: S3Store, proxy: Proxy, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At any level, from botocore either: at DEBUG it logs the headers of each request."""
    with caplog.at_level(logging.NOTSET):
        logging.getLogger("botocore").setLevel(logging.DEBUG)
        try:
            await put(store, name, PDF, tmp_path)
            await content_of(store, name)
            proxy.fail = lambda request: 403
            with pytest.raises(ArchiveError) as failed:
                await store.append(f"{name}.log", 0, b"x\n")
        finally:
            logging.getLogger("botocore").setLevel(logging.NOTSET)
    assert "x-amz-security-token" in caplog.text.lower()
    shown = caplog.text + str(failed.value) + repr(failed.value) + repr(store) + repr(vars(failed.value))
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in shown
    assert CREDENTIALS["AWS_SESSION_TOKEN"] not in shown
    assert failed.value.__cause__ is failed.value.__context__ is None


async def test_closed_store_raises(s3: S3Server) -> None:
    store = S3Store(f"s3://{s3.new_bucket()}", endpoint_url=s3.url)
    await store.append("manifest.jsonl", 0, b"x\n")
    await store.aclose()
    await store.aclose()
    with pytest.raises(ArchiveError, match="is closed"):
        await store.append("manifest.jsonl", 2, b"x\n")


@pytest.mark.parametrize(
    ("url", "arguments", "message"),
    [
        ("bucket", {}, "url: must be s3://bucket or s3://bucket/prefix, got 'bucket'"),
        ("s3://key:verysecret@bucket", {}, "url: must be s3://"),
        ("s3://b/x", {"endpoint_url": "https://[::1"}, "endpoint_url: must be https://host"),
        ("s3://b/x", {"endpoint_url": "https://user:verysecret@host"}, "endpoint_url: must be https://host"),
        ("s3://b/x", {"region": ""}, "region: must be a non-empty string, got ''"),
        ("s3://b/x", {"object_lock": ("FOREVER", 1)}, "object_lock: must be a tuple of COMPLIANCE or GOVERNANCE"),
        ("s3://b/x", {"object_lock": ("COMPLIANCE", 0)}, "object_lock: days: must be an integer of at least 1, got 0"),
    ],
)
async def test_bad_argument_is_refused(url: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        S3Store(url, **arguments)
    assert message in str(refused.value)
    assert "verysecret" not in str(refused.value)


async def test_missing_extra_is_named() -> None:
    script = "import sys; sys.modules['aiobotocore'] = None; import signing_async.archive.s3"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "needs aiobotocore: pip install 'signing-async[s3]'" in done.stderr


@pytest.mark.parametrize("source", ["endpoint", "credential_process"])
async def test_secret_of_a_wrong_setting_in_the_environment_is_not_shown(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint may hold a password; a program may print credentials."""
    if source == "endpoint":
        problem = "invalid endpoint URL"
        monkeypatch.setenv("AWS_ENDPOINT_URL", "user:verysecret@host")
    else:
        problem = "the credentials could not be retrieved"
        for name in CREDENTIALS:
            monkeypatch.delenv(name, raising=False)
        program = "credential_process = sh -c 'echo verysecret >&2; exit 1'"
        (tmp_path / "config").write_text(f"[default]\nregion = us-east-1\n{program}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    async with S3Store("s3://bucket/archive") as store:
        with pytest.raises((ArchiveError, ConfigurationError), match=problem) as failed:
            await content_of(store, "manifest.jsonl")
    assert "verysecret" not in str(failed.value)
