"""watch: what it tells, and how it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from signing_async import FileTokenStore, OAuth
from signing_async.sandbox.records import App
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import Terminal

WATCH = ("--poll", "0.05")


def _soon(service: Service, *steps: Callable[[], object]) -> threading.Thread:
    """Carry out these steps, one after the other, once somebody is watching."""

    def work() -> None:
        for step in steps:
            looked = len(service.sandbox.requests_of("recipients.list"))
            while len(service.sandbox.requests_of("recipients.list")) < looked + 2:
                time.sleep(0.01)
            step()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_changes_are_told_a_line_each(run: Run, service: Service) -> None:
    """Until it is completed: exit code 0."""
    signing = service.draft("lease.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    anna, _ = service.do(service.sandbox.recipients, signing)
    thread = _soon(
        service,
        lambda: service.call(service.sandbox.sign(anna.id)),
        lambda: service.call(service.sandbox.complete(signing)),
    )
    ran = run("watch", signing, *WATCH)
    thread.join()
    assert (ran.code, ran.err) == (0, "")
    told = [line.split("  ", 1)[1] for line in ran.out.splitlines()]
    assert told[0] == "Lease is sent"
    assert told[1] == f"{anna.email} has signed"
    assert sorted(told[2:]) == ["Lease is completed", "bo@example.com has signed", "lease.pdf is signed"]


def test_changes_for_machines(run: Run, service: Service) -> None:
    """An object for each change, whole."""
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    thread = _soon(service, lambda: service.call(service.sandbox.complete(signing)))
    ran = run("watch", signing, *WATCH, "--json")
    thread.join()
    # In between it may be seen signed and not yet sealed.
    assert [line["state"] for line in ran.lines] in (["sent", "completed"], ["sent", "sent", "completed"])
    assert ran.lines[-1]["recipients"][0]["finished"] is True
    assert ran.lines[-1]["documents"][0]["completed_at"]


def test_a_cancelled_signing(run: Run, service: Service) -> None:
    """Exit code 6."""
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    service.call(service.sandbox.cancel(signing))
    ran = run("watch", signing)
    assert (ran.code, ran.err) == (6, f"Error: {signing} was cancelled\n")
    assert run("watch", signing, "--json").error["exit_code"] == 6


def test_the_time_is_up(run: Run, service: Service) -> None:
    """Exit code 5."""
    signing = service.draft(name="Draft")
    ran = run("watch", signing, *WATCH, "--for", "0.4")
    assert (ran.code, ran.err) == (5, f"Error: {signing} was not completed within 0.4 s\n")
    assert "Draft is draft" in ran.out


def test_an_outage_on_the_way_is_waited_out(run: Run, service: Service, tmp_path: Path) -> None:
    """And told; one at the beginning is an error, since nothing was seen yet."""
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    thread = _soon(
        service,
        lambda: service.do(service.sandbox.faults.add, "signings.get", "500", 2),
        lambda: service.call(service.sandbox.complete(signing)),
    )
    ran = run("watch", signing, *WATCH, "--config", _once(tmp_path))
    thread.join()
    assert ran.code == 0
    assert "Warning: watching goes on: HTTP 500" in ran.err
    service.do(service.sandbox.faults.add, "signings.get", "500", 1)
    assert run("watch", signing, "--config", _once(tmp_path)).code == 1


def test_an_outage_of_the_token_endpoint_is_waited_out(
    run: Run, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the service's too."""
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    redirect_uri = "http://127.0.0.1/callback"
    app = service.do(service.sandbox.register_app, redirect_uri=redirect_uri)
    code = service.do(service.sandbox.authorize, app)
    asyncio.run(_log_in(service.sandbox.base_url, app, code, tmp_path / "token.json"))
    monkeypatch.delenv("SIGNING_ACCESS_TOKEN")
    monkeypatch.setenv("SIGNING_CLIENT_ID", app.client_id)
    monkeypatch.setenv("SIGNING_CLIENT_SECRET", app.client_secret or "")
    monkeypatch.setenv("SIGNING_REDIRECT_URI", redirect_uri)
    monkeypatch.setenv("SIGNING_TOKEN_FILE", str(tmp_path / "token.json"))
    faults = service.sandbox.faults
    thread = _soon(
        service,
        lambda: (
            service.do(faults.add, "oauth.token", "500", 1),
            service.do(faults.add, "signings.get", "expired-token", 1),
        ),
        lambda: service.call(service.sandbox.complete(signing)),
    )
    ran = run("watch", signing, *WATCH, "--config", _once(tmp_path))
    thread.join()
    assert ran.code == 0, ran.err
    assert "Warning: watching goes on: HTTP 500" in ran.err


async def _log_in(base_url: str, app: App, code: str, file: Path) -> None:
    async with OAuth(
        base_url,
        client_id=app.client_id,
        client_secret=app.client_secret or "",
        redirect_uri=app.redirect_uri,
        store=FileTokenStore(file),
    ) as oauth:
        request = oauth.authorization_request()
        await oauth.exchange(f"{app.redirect_uri}?code={code}&state={request.state}", state=request.state)


def test_a_call_that_times_out_is_no_end_of_the_watch(run: Run, service: Service) -> None:
    """The first look fails: as what it is."""
    service.do(service.sandbox.faults.add, "signings.get", "slow", None, seconds=5)
    ran = run("watch", "1", "--for", "60", "--timeout", "0.2", "--json")
    assert (ran.code, ran.error["type"]) == (1, "RequestTimeout")


def _once(folder: Path) -> str:
    """A settings file that allows no retries."""
    path = folder / "once.toml"
    path.write_text("max_attempts = 1\n")
    return str(path)


def test_on_a_terminal_that_cannot_move_its_cursor(service: Service) -> None:
    """Each change is a line, and it ends when the signing is completed."""
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    terminal = Terminal("watch", signing, *WATCH, environment={**service.environment, "TERM": "dumb"})
    terminal.wait_for("Lease is sent")
    service.call(service.sandbox.complete(signing))
    screen = terminal.end()
    assert screen.code == 0
    assert "Lease is completed" in screen.text
    assert b"\x1b" not in screen.raw


def test_on_a_terminal_it_is_shown_live(service: Service) -> None:
    """It moves, ends with the last picture, and leaves the cursor as it was."""
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    terminal = Terminal("watch", signing, *WATCH, environment=service.environment)
    terminal.wait_for("watching; Ctrl-C")
    terminal.wait_for("pending")
    service.call(service.sandbox.complete(signing))
    screen = terminal.end()
    assert screen.code == 0
    assert screen.lines[1] == "Lease    completed"
    assert [line for line in screen.lines if line.startswith("anna@example.com  signed")]
    assert not [line for line in screen.lines if "watching" in line]
    assert screen.raw.count(b"\x1b[?25l") == screen.raw.count(b"\x1b[?25h") == 1
