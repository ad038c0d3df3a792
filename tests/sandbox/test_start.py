"""Starting and stopping a sandbox, its clock, snapshots and seeds, and a folder that survives a kill at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import signing_async.sandbox
from signing_async.sandbox import Profile, Sandbox
from tests.pdfs import make_pdf
from tests.sandbox.serving import API, Caller, caller
from tests.sandbox.token_requests import works

SERVER = """
import asyncio, sys
from signing_async.sandbox import Sandbox

async def main():
    async with Sandbox(data=sys.argv[1]) as sandbox:
        print(sandbox.base_url, sandbox.access_token(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


# the clock


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ({}, ValueError, "forward"),
        ({"days": -1}, ValueError, "forward"),
        ({"days": 1, "hours": "1"}, ValueError, r"^hours: must be a number, got "),
        ({"days": 365 * 8000}, OverflowError, "date"),  # past the year 9999
    ],
)
def test_clock_goes_only_forward_by_numbers(
    signing_sandbox: Sandbox, step: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        signing_sandbox.clock.advance(**step)
    assert signing_sandbox.clock.offset.total_seconds() == 0


# snapshots and seeds


async def test_restore_brings_back_signings_documents_tokens_and_the_clock(call: Caller) -> None:
    signing_id, _, [person] = await call.sent()
    snapshot = call.sandbox.snapshot()
    before = call.sandbox.signings, call.sandbox.recipients(), call.sandbox.notifications
    later = await call.draft()
    token = call.sandbox.access_token()
    await call.sandbox.complete(signing_id)
    call.sandbox.clock.advance(days=20)
    call.sandbox.restore(snapshot)
    assert (call.sandbox.signings, call.sandbox.recipients(), call.sandbox.notifications) == before
    assert call.sandbox.clock.offset == timedelta(0)
    assert (await call("GET", f"{API}/signings/{later}"))[0] == 404
    assert not await works(call, token)
    assert (await call.sandbox.sign(person)).is_completed


@pytest.mark.parametrize("style", ["uuid", "ulid", "integer"])
async def test_same_seed_gives_the_same_ids_tokens_and_secrets_also_after_a_restore(style: Any) -> None:
    async def run(seed: int | str | None) -> list[object]:
        async with Sandbox(seed=seed, profile=Profile(ids=style)) as sandbox:
            app = sandbox.register_app("http://127.0.0.1:1/")
            user = sandbox.add_user("A", "a@b.example")
            snapshot, seen = sandbox.snapshot(), []
            for _ in range(2):
                signings = [sandbox.service.create_signing(user, {"name": "A", "language": "EN"}).id for _ in range(3)]
                seen.append([sandbox.authorize(app), sandbox.access_token(), signings])
                sandbox.restore(snapshot)
            assert seed is None or seen[0] == seen[1]
            return [app.client_id, app.client_secret, user.id, *seen[0]]

    same, again, other = await run(7), await run(7), await run("x")
    assert same == again
    assert same[4] != other[4]
    assert (await run(None))[4] != (await run(None))[4]
    assert (same[5] == other[5]) == (style == "integer")


@pytest.mark.parametrize("seed", [1, None])
async def test_ulids_are_26_crockford_characters_that_sort_by_age(seed: int | None) -> None:
    async with Sandbox(seed=seed, profile=Profile(ids="ulid")) as sandbox:
        user = sandbox.accounts.default_user()
        ids = [sandbox.service.create_signing(user, {"name": "A", "language": "EN"}).id for _ in range(50)]
    assert ids == sorted(set(ids))
    assert all(len(one) == 26 and set(one) <= set("0123456789ABCDEFGHJKMNPQRSTVWXYZ") for one in ids)


# starting and stopping


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70_000},
        {"port": True},
        {"keep_requests": 0},
        {"host": ""},
        {"webhook_secret": "x"},
        {"seal_level": "B"},
    ],
)
def test_invalid_setting_is_a_value_error_that_names_it(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sandbox(**settings)  # type: ignore[arg-type]  # that is the point


async def test_port_in_use_is_an_os_error_and_a_sandbox_starts_only_once(signing_sandbox: Sandbox) -> None:
    other = Sandbox(port=int(signing_sandbox.base_url.rpartition(":")[2]))
    with pytest.raises(OSError, match="address"):
        await other.start()
    assert repr(other) == "<Sandbox not started>"
    await other.aclose()
    with pytest.raises(RuntimeError, match="already started once"):
        await signing_sandbox.start()


def has_ipv6() -> bool:
    """Return whether this machine has an IPv6 loopback address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


IPV4 = [("localhost", "localhost"), ("0.0.0.0", "127.0.0.1")]
IPV6 = [("::", "[::1]"), ("::1", "[::1]")]


@pytest.mark.parametrize(("host", "shown"), [*IPV4, *(IPV6 if has_ipv6() else [])])
async def test_sandbox_listens_on_the_given_host_and_its_base_url_works(host: str, shown: str) -> None:
    async with Sandbox(host=host) as sandbox:
        assert sandbox.base_url.startswith(f"http://{shown}:")
        assert repr(sandbox) == f"<Sandbox {sandbox.base_url}>"
        async with aiohttp.ClientSession() as session, session.get(f"{sandbox.base_url}/openapi.json") as response:
            assert response.status == 200


def test_missing_module_is_named_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing_async.sandbox, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs cryptography: pip install 'signing-async\[sandbox\]'"):
        _ = signing_async.sandbox.Sandbox


def test_importing_the_package_loads_no_heavy_modules() -> None:
    with pytest.raises(AttributeError, match="Sandbos"):
        _ = signing_async.sandbox.Sandbos
    code = "import sys, signing_async.sandbox.server; print({'pikepdf', 'pyhanko', 'cryptography'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# a folder


async def test_everything_survives_a_restart(tmp_path: Path) -> None:
    """Signings, files, sealed files, tokens, apps, webhooks, the authority, the clock, and a restored snapshot."""
    data = make_pdf(5000)

    def contents(sandbox: Sandbox) -> list[object]:
        held = [sandbox.signings, sandbox.documents(), sandbox.recipients(), sandbox.notifications, sandbox.apps]
        return [*held, sandbox.webhooks.endpoints(), sandbox.clock.offset]

    async with Sandbox(data=tmp_path) as sandbox, caller(sandbox) as call:
        token, app = sandbox.access_token(), sandbox.register_app("http://127.0.0.1:1/")
        signing_id, _, _ = await call.sent()
        await sandbox.complete(signing_id)
        draft = await call.draft()
        await call.upload(draft, data)
        sandbox.webhooks.register("http://127.0.0.1:1/")
        sandbox.clock.advance(days=3)
        authority, held, snapshot = await sandbox.certificate_pem(), contents(sandbox), sandbox.snapshot()
        await call.draft()
        sandbox.clock.advance(days=1)
        sandbox.restore(snapshot)
        await call.draft(name="After the restore")
    async with Sandbox(data=str(tmp_path)) as sandbox, caller(sandbox) as call:
        assert sandbox.signings[-1].name == "After the restore"
        sandbox.service.delete(sandbox.signings[-1].id, sandbox.accounts.default_user())
        assert contents(sandbox) == held
        assert await sandbox.certificate_pem() == authority
        assert sandbox.document_bytes(sandbox.documents(draft)[0].id) == data
        assert sandbox.authorize(app)
        assert await works(call, token)
        done = await call.ok("GET", f"{API}/signings/{signing_id}")
        assert (await call("GET", done["documents"][0]["signed_file_path"]))[0] == 200


async def test_second_sandbox_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with Sandbox(data=tmp_path):
        with pytest.raises(RuntimeError, match=re.escape(str(tmp_path))):
            await Sandbox(data=tmp_path).start()
    async with Sandbox(data=tmp_path):
        pass


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


@pytest.mark.parametrize("kind", ["text", "folder"])
async def test_invalid_database_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "sandbox.db"
    path.mkdir() if kind == "folder" else path.write_text("not a database at all " * 100)
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
                if dice.random() < 0.2:
                    await call.ok("POST", f"/sandbox/api/signings/{signing}/complete", json={})
                    told["completed"][signing] = ""
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
    told: dict[str, dict[str, str]] = defaultdict(dict)
    for _ in range(3):
        process, url, token = await start(tmp_path)
        clients = [asyncio.create_task(work_until_killed(url, token, told, dice)) for _ in range(4)]
        enough = len(told["sent"]) + 2
        async with asyncio.timeout(60):
            while len(told["sent"]) < enough:
                await asyncio.sleep(0.005)
        await asyncio.sleep(dice.uniform(0, 0.5))
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.gather(*clients)
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
