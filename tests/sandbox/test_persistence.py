"""A sandbox with a folder: everything survives a restart, and a kill at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.sandbox.serving import API, Caller

SERVER = """
import asyncio, sys
from signing_async.sandbox import Sandbox

async def main():
    async with Sandbox(data=sys.argv[1]) as sandbox:
        print(sandbox.base_url, sandbox.access_token(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_everything_survives_a_restart(tmp_path: Path) -> None:
    """Signings, files, sealed files, tokens, apps, webhooks, the authority and the clock."""
    data = make_pdf(5000)
    async with Sandbox(data=tmp_path) as sandbox:
        token = sandbox.access_token()
        app = sandbox.register_app("http://127.0.0.1:1/")
        async with aiohttp.ClientSession(sandbox.base_url, headers={"Authorization": f"Bearer {token}"}) as session:
            call = Caller(sandbox, session)
            signing_id, _, _ = await call.sent()
            await sandbox.complete(signing_id)
            draft = await call.draft()
            await call.upload(draft, data)
        sandbox.webhooks.register("http://127.0.0.1:1/")
        sandbox.clock.advance(days=3)
        authority = await sandbox.certificate_pem()
        held = sandbox.signings, sandbox.documents(), sandbox.recipients(), sandbox.notifications, sandbox.apps
        endpoints = sandbox.webhooks.endpoints()
    async with Sandbox(data=str(tmp_path)) as sandbox:
        again = sandbox.signings, sandbox.documents(), sandbox.recipients(), sandbox.notifications, sandbox.apps
        assert again == held
        assert sandbox.webhooks.endpoints() == endpoints
        assert sandbox.clock.offset.days == 3
        assert await sandbox.certificate_pem() == authority
        assert sandbox.document_bytes(sandbox.documents(draft)[0].id) == data
        assert sandbox.authorize(app)
        async with aiohttp.ClientSession(sandbox.base_url, headers={"Authorization": f"Bearer {token}"}) as session:
            call = Caller(sandbox, session)
            done = await call.ok("GET", f"{API}/signings/{signing_id}")
            assert (await call("GET", done["documents"][0]["signed_file_path"]))[0] == 200


async def test_pending_delivery_is_sent_by_the_next_process(tmp_path: Path) -> None:
    from aiohttp import web

    got: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        got.append(await request.read())
        return web.Response(status=202)

    settings: dict[str, Any] = {"data": tmp_path, "webhook_url": "http://127.0.0.1:1/hook", "webhook_secret": "s"}
    async with Sandbox(**settings) as sandbox:
        sandbox.service.create_signing(sandbox.accounts.default_user(), {"name": "A", "language": "EN"})
        await sandbox.webhooks.settled()
    async with Sandbox(**settings) as sandbox:
        assert len(sandbox.webhooks.endpoints()) == 1
        app = web.Application()
        app.router.add_post("/hook", take)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        target = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
        sandbox._state.database.run("UPDATE endpoints SET url = ?", target)  # the port was not known before
        sandbox.clock.advance(minutes=1)
        await sandbox.webhooks.settled()
        await runner.cleanup()
    assert len(got) == 1


async def test_second_sandbox_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with Sandbox(data=tmp_path):
        with pytest.raises(RuntimeError, match=re.escape(str(tmp_path))):
            async with Sandbox(data=tmp_path):
                pass
    async with Sandbox(data=tmp_path):
        pass


async def test_restored_snapshot_of_a_kept_sandbox_survives_a_restart(tmp_path: Path) -> None:
    async with Sandbox(data=tmp_path) as sandbox:
        user = sandbox.accounts.default_user()
        kept = sandbox.service.create_signing(user, {"name": "Kept", "language": "EN"})
        snapshot = sandbox.snapshot()
        sandbox.service.create_signing(user, {"name": "Gone", "language": "EN"})
        sandbox.clock.advance(days=1)
        sandbox.restore(snapshot)
        assert sandbox.signings == [kept]
        assert sandbox._state.database.value("PRAGMA journal_mode") == "wal"  # durability is not lost by it
    async with Sandbox(data=tmp_path) as sandbox:
        assert sandbox.signings == [kept]
        assert sandbox.clock.offset.days == 0


@pytest.mark.parametrize(("statement", "version"), [("PRAGMA user_version = 99", 99), ("CREATE TABLE apps (id)", 0)])
async def test_database_of_another_format_is_refused_and_not_changed(
    tmp_path: Path, statement: str, version: int
) -> None:
    path = tmp_path / "sandbox.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"version {version};"):
        async with Sandbox(data=tmp_path):
            pass
    assert path.read_bytes() == before


async def test_invalid_database_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "sandbox.db").write_text("not a database at all " * 100)
    (tmp_path / "folder" / "sandbox.db").mkdir(parents=True)
    for name in ("text", "folder"):
        with pytest.raises(RuntimeError, match=re.escape(str(tmp_path / name / "sandbox.db"))):
            async with Sandbox(data=tmp_path / name):
                pass


async def test_files_of_interrupted_uploads_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    async with Sandbox(data=tmp_path) as sandbox:
        headers = {"Authorization": f"Bearer {sandbox.access_token()}"}
        async with aiohttp.ClientSession(sandbox.base_url, headers=headers) as session:
            call = Caller(sandbox, session)
            await call.upload(await call.draft())
    name = "0123456789abcdef01234567"
    for stray in (f"{name}.part", f"{name}.pdf", f".{name}.pdf.ab_3xyz9"):
        (tmp_path / "files" / stray).write_bytes(b"x")
    async with Sandbox(data=tmp_path) as sandbox:
        assert len(list((tmp_path / "files").iterdir())) == 1
        assert sandbox.document_bytes(sandbox.documents()[0].id)


async def test_foreign_files_in_the_folder_are_kept(tmp_path: Path) -> None:
    theirs = tmp_path / "files" / "contract.pdf"
    (theirs.parent / "notes").mkdir(parents=True)
    theirs.write_bytes(b"precious")
    async with Sandbox(data=tmp_path):
        pass
    assert theirs.read_bytes() == b"precious"
    assert (theirs.parent / "notes").is_dir()


@dataclass
class Acknowledged:
    """What the sandbox has acknowledged."""

    drafts: set[str] = field(default_factory=set)
    documents: dict[str, str] = field(default_factory=dict)
    recipients: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    completed: set[str] = field(default_factory=set)


async def work_until_killed(url: str, token: str, told: Acknowledged, dice: random.Random) -> None:
    """Create whole signings until the server is gone."""
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        call = Caller(None, session)  # type: ignore[arg-type]  # the sandbox is another process
        try:
            while True:
                signing = await call.draft()
                told.drafts.add(signing)
                data = make_pdf(dice.randrange(600, 90_000))
                status, document = await call.upload(signing, data)
                assert status == 201
                told.documents[document["id"]] = hashlib.sha256(data).hexdigest()
                told.recipients.add(await call.recipient(signing))
                await call.ok("POST", f"{API}/signings/{signing}/send")
                told.sent.add(signing)
                if dice.random() < 0.2:
                    await call.ok("POST", f"/sandbox/api/signings/{signing}/complete", json={})
                    told.completed.add(signing)
        except (aiohttp.ClientError, ConnectionError):
            return


async def start(folder: Path) -> tuple[asyncio.subprocess.Process, str, str]:
    """Start a sandbox in a child process; return the process, its URL and a token."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(folder), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    url, token = (await process.stdout.readline()).decode().split()
    return process, url, token


@pytest.mark.timeout(400)
async def test_everything_acknowledged_survives_sigkill_at_random_moments(tmp_path: Path) -> None:
    dice = random.Random(11)
    told = Acknowledged()
    for _ in range(6):
        process, url, token = await start(tmp_path)
        clients = [asyncio.create_task(work_until_killed(url, token, told, dice)) for _ in range(4)]
        enough = len(told.sent) + 2
        async with asyncio.timeout(60):
            while len(told.sent) < enough:
                await asyncio.sleep(0.005)
        await asyncio.sleep(dice.uniform(0, 0.5))
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.gather(*clients)
    async with Sandbox(data=tmp_path) as sandbox:
        signings = {signing.id: signing for signing in sandbox.signings}
        documents = {document.id: document for document in sandbox.documents()}
        assert told.drafts <= set(signings)
        assert told.recipients <= {recipient.id for recipient in sandbox.recipients()}
        assert all(signings[one].times_sent == 1 for one in told.sent)
        assert all(signings[one].is_completed for one in told.completed)
        for document_id, sha256 in told.documents.items():
            assert hashlib.sha256(sandbox.document_bytes(document_id)).hexdigest() == sha256
        for document in documents.values():
            assert (document.sealed_file is None) == (signings[document.signing_id].completed_at is None)
            if document.sealed_file is not None:
                assert b"/ByteRange" in sandbox.service.signed_path(document.signing_id, document.id).read_bytes()
    assert len(told.sent) >= 12


async def test_sandbox_stops_while_an_abandoned_thread_still_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    rmdir = os.rmdir
    late: list[Path] = []

    def write_and_remove(path: Any, **more: Any) -> None:
        if not late:
            late.append(folder / "files" / "late.pdf")
            late[0].touch()
        rmdir(path, **more)

    async with Sandbox() as sandbox:
        headers = {"Authorization": f"Bearer {sandbox.access_token()}"}
        async with aiohttp.ClientSession(sandbox.base_url, headers=headers) as session:
            call = Caller(sandbox, session)
            _, document = await call.upload(await call.draft())
        folder = sandbox.service.document_path(document["id"]).parent.parent
        monkeypatch.setattr(os, "rmdir", write_and_remove)
    monkeypatch.undo()
    assert [path for path in folder.rglob("*") if path.is_file()] == late
    shutil.rmtree(folder)
