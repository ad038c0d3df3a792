"""Starting and stopping a sandbox, snapshots and seeds, and a folder that survives a kill at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import socket
import sqlite3
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import signing_async.sandbox
from signing_async.sandbox import Profile, Sandbox
from tests.pdfs import make_pdf
from tests.sandbox.serving import API, Caller, caller, contents

SERVER = (sys.executable, "-c", "from signing_async.cli import main; main()", "sandbox", "--port", "0", "--json")


@pytest.mark.parametrize("style", ["uuid", "ulid", "integer"])
async def test_same_seed_gives_the_same_ids_tokens_and_secrets_also_after_a_restore(style: Any) -> None:
    async def run(seed: int | str | None) -> list[Any]:
        async with Sandbox(seed=seed, profile=Profile(ids=style)) as sandbox:
            app = sandbox.register_app("http://127.0.0.1:1/")
            user = sandbox.add_user("A", "a@b.example")
            snapshot, seen = sandbox.snapshot(), []
            for _ in range(2):
                signings = [sandbox.service.create_signing(user, {"name": "A", "language": "EN"}).id for _ in range(9)]
                seen.append([sandbox.authorize(app), sandbox.access_token(), signings])
                sandbox.restore(snapshot)
            assert seed is None or seen[0] == seen[1]
            return [app.client_id, app.client_secret, user.id, *seen[0]]

    same, again, other, unseeded = await run(7), await run(7), await run("x"), await run(None)
    assert same == again
    assert same[4] != other[4]
    assert unseeded[4] != (await run(None))[4]
    assert (same[5] == other[5]) == (style == "integer")
    for ids in (same[5], unseeded[5]) if style == "ulid" else ():
        assert ids == sorted(set(ids))  # by age
        assert all(len(one) == 26 and set(one) <= set("0123456789ABCDEFGHJKMNPQRSTVWXYZ") for one in ids)


# starting and stopping


def test_invalid_setting_is_a_value_error_that_names_it() -> None:
    wrong = {"port": 70_000, "keep_requests": 0, "host": "", "webhook_secret": "x", "seal_level": "B"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            Sandbox(**{name: value})  # type: ignore[arg-type]  # that is the point


async def test_port_in_use_is_an_os_error_and_a_sandbox_starts_only_once(signing_sandbox: Sandbox) -> None:
    other = Sandbox(port=int(signing_sandbox.base_url.rpartition(":")[2]))
    with pytest.raises(OSError, match="address"):
        await other.start()
    assert repr(other) == "<Sandbox not started>"
    await other.aclose()
    with pytest.raises(RuntimeError, match="already started once"):
        await signing_sandbox.start()


async def test_sandbox_listens_on_the_given_host_and_its_base_url_works() -> None:
    hosts = {"localhost": "localhost", "0.0.0.0": "127.0.0.1"}
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        hosts |= {"::": "[::1]", "::1": "[::1]"}
    for host, shown in hosts.items():
        async with Sandbox(host=host) as sandbox, caller(sandbox) as call:
            assert sandbox.base_url.startswith(f"http://{shown}:")
            assert repr(sandbox) == f"<Sandbox {sandbox.base_url}>"
            assert await call.works(sandbox.access_token())


def test_missing_module_is_named_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="Sandbos"):
        _ = signing_async.sandbox.Sandbos
    monkeypatch.setattr(signing_async.sandbox, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs cryptography: pip install 'signing-async\[sandbox\]'"):
        _ = signing_async.sandbox.Sandbox


# a folder


async def test_everything_survives_a_restore_and_a_restart(tmp_path: Path) -> None:
    """Signings, files, sealed files, tokens, apps, webhooks, the authority, the clock, and a restored snapshot."""
    data = make_pdf(5000)

    async with Sandbox(data=tmp_path) as sandbox, caller(sandbox) as call:
        token, app = sandbox.access_token(), sandbox.register_app("http://127.0.0.1:1/")
        signing_id, _, _ = await call.sent()
        await sandbox.complete(signing_id)
        draft = await call.draft()
        await call.upload(draft, data)
        sandbox.webhooks.register("http://127.0.0.1:1/")
        sandbox.clock.advance(days=3)
        authority, held, snapshot = await sandbox.certificate_pem(), contents(sandbox), sandbox.snapshot()
        later, gone = sandbox.access_token(), await call.draft()
        sandbox.clock.advance(days=1)
        sandbox.restore(snapshot)
        assert contents(sandbox) == held
        assert (await call("GET", f"{API}/signings/{gone}"))[0] == 404
        assert not await call.works(later)
        await call.draft(name="After the restore")
    async with Sandbox(data=str(tmp_path)) as sandbox, caller(sandbox) as call:
        assert sandbox.signings[-1].name == "After the restore"
        sandbox.service.delete(sandbox.signings[-1].id, sandbox.accounts.default_user())
        assert contents(sandbox) == held
        assert await sandbox.certificate_pem() == authority
        assert sandbox.document_bytes(sandbox.documents(draft)[0].id) == data
        assert sandbox.authorize(app)
        assert await call.works(token)
        done = await call.ok("GET", f"{API}/signings/{signing_id}")
        assert (await call("GET", done["documents"][0]["signed_file_path"]))[0] == 200


async def test_second_sandbox_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with Sandbox(data=tmp_path):
        with pytest.raises(RuntimeError, match=re.escape(str(tmp_path))):
            await Sandbox(data=tmp_path).start()
    async with Sandbox(data=tmp_path):
        pass


async def test_invalid_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "sandbox.db"
    for statement, version in (("PRAGMA user_version = 99", 99), ("CREATE TABLE apps (id)", 0)):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(statement)
        before = path.read_bytes()
        with pytest.raises(ValueError, match=f"version {version};"):
            await Sandbox(data=tmp_path).start()
        assert path.read_bytes() == before
        path.unlink()
    path.mkdir()
    with pytest.raises(RuntimeError, match=re.escape(str(path))):
        await Sandbox(data=tmp_path).start()
    path.rmdir()
    path.write_text("not a database at all " * 100)
    with pytest.raises(RuntimeError, match=re.escape(str(path))):
        await Sandbox(data=tmp_path).start()


async def test_only_files_of_interrupted_uploads_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    async with Sandbox(data=tmp_path) as sandbox, caller(sandbox) as call:
        await call.upload(await call.draft())
    (tmp_path / "files" / "notes").mkdir()
    (tmp_path / "files" / "contract.pdf").write_bytes(b"precious")
    before = sorted((tmp_path / "files").iterdir())
    name = "0123456789abcdef01234567"
    for stray in (f"{name}.part", f"{name}.pdf"):
        (tmp_path / "files" / stray).write_bytes(b"x")
    async with Sandbox(data=tmp_path) as sandbox:
        assert sorted((tmp_path / "files").iterdir()) == before
        assert sandbox.document_bytes(sandbox.documents()[0].id)


async def work_until_killed(url: str, token: str, told: dict[str, dict[str, str]], dice: random.Random) -> None:
    """Create whole signings until the server is gone."""
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        call = Caller(None, session)  # type: ignore[arg-type]  # the sandbox is another process
        try:
            while True:
                signing = await call.draft()
                told["drafts"][signing] = ""
                data = make_pdf(dice.randrange(600, 90_000))
                status, document = await call.upload(signing, data)
                assert status == 201
                told["documents"][document["id"]] = hashlib.sha256(data).hexdigest()
                told["recipients"][await call.recipient(signing)] = ""
                await call.ok("POST", f"{API}/signings/{signing}/send")
                told["sent"][signing] = ""
                if dice.random() < 0.4:
                    await call.ok("POST", f"/sandbox/api/signings/{signing}/complete", json={})
                    told["completed"][signing] = ""
        except (aiohttp.ClientError, ConnectionError):
            return


@pytest.mark.timeout(400)
async def test_everything_acknowledged_survives_sigkill_at_random_moments(tmp_path: Path) -> None:
    dice = random.Random(11)
    told: dict[str, dict[str, str]] = defaultdict(dict)
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(*SERVER, "--data", tmp_path, stdout=PIPE, stderr=DEVNULL)
        assert process.stdout
        ready = json.loads(await process.stdout.readline())
        work = [work_until_killed(ready["base_url"], ready["access_token"], told, dice) for _ in range(4)]
        clients = asyncio.gather(*work)
        enough = len(told["sent"]) + 3
        async with asyncio.timeout(60):
            while len(told["sent"]) < enough or not told["completed"]:
                await asyncio.sleep(0.005)
        await asyncio.sleep(dice.uniform(0, 0.2))
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await clients
    async with Sandbox(data=tmp_path) as sandbox:
        signings = {signing.id: signing for signing in sandbox.signings}
        documents = {document.id: document for document in sandbox.documents()}
        assert told["drafts"].keys() <= signings.keys()
        assert told["recipients"].keys() <= {recipient.id for recipient in sandbox.recipients()}
        assert all(signings[one].times_sent == 1 for one in told["sent"])
        assert all(signings[one].is_completed for one in told["completed"])
        for document_id, sha256 in told["documents"].items():
            assert hashlib.sha256(sandbox.document_bytes(document_id)).hexdigest() == sha256
        for document in documents.values():
            assert (document.sealed_file is None) == (signings[document.signing_id].completed_at is None)
            if document.sealed_file is not None:
                assert b"/ByteRange" in sandbox.service.signed_path(document.signing_id, document.id).read_bytes()
    assert len(told["sent"]) >= 6
