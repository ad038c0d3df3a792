"""The whole flow in processes that lack what Linux has and Windows or macOS lack."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from signing_async import FileTokenStore, OAuth
from tests.cli.service import Service, running
from tests.cli.terminal import COMMAND, ROOT
from tests.cli.test_account import BROWSER, register_app
from tests.pdfs import make_pdf

SYSTEMS = ("windows", "macos")
on_windows = pytest.mark.parametrize("system", ["windows"], indirect=True)  # macOS has all that these use
LARGE = 400_000
TIMEOUT = 100


@pytest.fixture
def service() -> Iterator[Service]:
    with running(seed=7) as service:
        yield service


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Let every Python that is started behave like the system's."""
    name: str = request.param
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent / name), str(ROOT)]))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return name


def start(*command: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the process, and return what it printed."""
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, f"{out}{err}"
    assert not err
    return out


def start_step(name: str, **arguments: object) -> subprocess.Popen[str]:
    return start(sys.executable, "-m", "tests.other_systems.steps", name, json.dumps(arguments, default=str))


def test_windows_lacks_what_it_should() -> None:
    code = "import os; print(*(hasattr(os, name) for name in ('preadv', 'RWF_NOWAIT', 'O_BINARY')))"
    lacks = {}
    for system in SYSTEMS:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / system)}
        lacks[system] = finish(start(sys.executable, "-c", code, env=environment))
    assert lacks == {"windows": "False False True\n", "macos": "True False False\n"}


def test_files_are_uploaded_byte_for_byte_downloaded_and_archived(
    service: Service, system: str, tmp_path: Path
) -> None:
    contents = {"small": make_pdf(60_000), "large": make_pdf(LARGE)}
    for name, data in contents.items():
        assert b"\x1a" in data  # where reading as text would end
        (tmp_path / f"{name}.pdf").write_bytes(data)
    (tmp_path / "here").mkdir()
    draft, signing = service.draft(), service.draft("lease.pdf", to=("anna@example.com",), completed=True)
    (document,) = service.do(service.sandbox.documents, signing)
    arguments = {name: tmp_path / f"{name}.pdf" for name in contents}
    access = {"base_url": service.sandbox.base_url, "token": service.do(service.sandbox.access_token)}
    signings = {"draft": draft, "signing": signing, "document": document.id}
    finish(start_step("transfers", folder=tmp_path / "here", **arguments, **access, **signings))
    uploaded = Counter(document.sha256 for document in service.do(service.sandbox.documents, draft))
    small, large = (hashlib.sha256(data).hexdigest() for data in contents.values())
    assert uploaded == {small: 2, large: 6}


@on_windows
def test_processes_share_a_token_file(service: Service, system: str, tmp_path: Path) -> None:
    made = service.do(service.sandbox.register_app, redirect_uri="http://127.0.0.1:8000/callback")
    app: dict[str, Any] = {"base_url": service.sandbox.base_url, "redirect_uri": made.redirect_uri}
    app |= {"client_id": made.client_id, "client_secret": made.client_secret}
    file = tmp_path / "tokens" / "token.json"

    async def exchange() -> None:
        async with OAuth(**app, store=FileTokenStore(file)) as oauth:
            state = oauth.authorization_request().state
            code = service.sandbox.authorize(made)
            await oauth.exchange(f"{made.redirect_uri}?code={code}&state={state}", state=state)

    service.call(exchange())
    service.do(service.sandbox.clock.advance, days=1)
    for process in [start_step("refresh", file=file, **app) for _ in range(2)]:
        finish(process)
    refreshes = service.do(service.sandbox.requests_of, "oauth.token")
    assert [record.status for record in refreshes] == [200, 200]  # the exchange and one refresh
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == ["token.json", "token.json.lock"]


@on_windows
def test_lock_excludes_threads_and_processes_and_ends_with_its_holder(system: str, tmp_path: Path) -> None:
    file = tmp_path / "token.json"
    holder = start_step("hold", file=file)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiting = start_step("lock", file=file)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waiting\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.3)
    finally:
        holder.kill()
        holder.communicate()
    finish(waiting)


@on_windows
def test_events_are_received_through_wsgi_and_kept_in_an_inbox(system: str, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    finish(start_step("events", folder=folder))


@on_windows
def test_killed_dispatch_resumes_and_sends_each_package_once(
    service: Service, system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    rows = ["name,language,documents,recipient1_email,key"]
    for number in range(6):
        (tmp_path / f"{number}.pdf").write_bytes(make_pdf(LARGE, seed=number))
        rows.append(f"Lease {number},EN,{number}.pdf,anna@example.com,key-{number}")
    (tmp_path / "leases.csv").write_text("\r\n".join(rows) + "\r\n")
    command = (*COMMAND, "dispatch", "leases.csv", "--concurrency", "2")
    slow = service.fault("signings.send", "slow", times=None, seconds=0.3)
    process = start(*command, cwd=tmp_path)
    end = time.monotonic() + TIMEOUT
    while service.requests_of("signings.send") < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    process.kill()
    process.communicate()
    service.do(slow.remove)
    out, err = start(*command, cwd=tmp_path).communicate(timeout=TIMEOUT)
    assert re.search(r"^6 sent: \d earlier, \d now", out, re.MULTILINE), err
    invited = Counter(each.recipient_id for each in service.do(lambda: service.sandbox.notifications))
    assert sorted(invited.values()) == [1] * 6
    sent = [signing for signing in service.do(lambda: service.sandbox.signings) if not signing.is_draft]
    hashes = {document.sha256 for signing in sent for document in service.do(service.sandbox.documents, signing.id)}
    assert hashes == {hashlib.sha256(make_pdf(LARGE, seed=number)).hexdigest() for number in range(6)}
    assert not list(tmp_path.glob("*.lock"))


@on_windows
def test_login_and_logout(service: Service, system: str, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    register_app(service, monkeypatch, f"http://127.0.0.1:{unused_tcp_port}/callback")
    monkeypatch.setenv("SIGNING_BASE_URL", service.sandbox.base_url)
    monkeypatch.setenv("BROWSER", BROWSER)
    printed = [start(*COMMAND, name).communicate(timeout=TIMEOUT) for name in ("login", "logout")]
    assert "Logged in" in printed[0][0], printed
    assert "user@sandbox.example" in printed[0][0], printed
    assert "Token removed" in printed[1][0], printed


@pytest.mark.skipif(not os.environ.get("SIGNING_NIGHTLY"), reason="a part of `.ci/nightly`")
def test_demo(system: str, tmp_path: Path) -> None:
    out = finish(start(*COMMAND, "demo", "--json", "--folder", str(tmp_path / "signed")))
    archive = json.loads(out)["archive"]
    assert (archive["ok"], archive["documents"]) == (True, 22)
