"""Running a command: event loops, Ctrl-C and SIGTERM."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from signing_async.cli import running
from signing_async.cli.command_base import State
from tests.cli.conftest import Run
from tests.cli.service import Service, listening
from tests.cli.terminal import Terminal


def test_commands_run_on_uvloop_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def loop() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert running.run(loop()).startswith("uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert running.run(loop()).startswith("asyncio")


def test_ctrl_c_before_a_coroutine_starts_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(main: object) -> None:
        raise KeyboardInterrupt

    async def never() -> None: ...

    monkeypatch.setattr(running, "run", interrupted)
    coroutine = never()
    with pytest.raises(KeyboardInterrupt):
        State().run(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_ctrl_c_exits_with_130_and_restores_the_cursor(service: Service) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    terminal = Terminal("watch", signing, environment=service.environment)
    terminal.wait_for("pending")
    terminal.type("\x03")
    ended = terminal.end()
    assert ended.code == 130
    assert ended.text.endswith("Error: interrupted\n")
    assert "Traceback" not in ended.text
    assert ended.raw.rindex(b"\x1b[?25h") > ended.raw.rindex(b"\x1b[?25l")


def test_ctrl_c_during_a_change_says_that_it_may_have_taken_effect(service: Service) -> None:
    service.do(service.sandbox.faults.add, "signings.create", "hang")
    terminal = Terminal("create", "Lease", environment=service.environment)
    while (
        not service.do(service.sandbox.requests_of, "signings.create") and not service.sandbox.faults.arranged[0].hits
    ):
        time.sleep(0.02)
    terminal.type("\x03")
    ended = terminal.end()
    assert (ended.code, "Traceback" in ended.text) == (130, False)
    assert "interrupted; a request in flight may have taken effect" in ended.text


def test_ctrl_c_at_a_prompt_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIGNING_ACCESS_TOKEN")
    terminal = Terminal("login")
    terminal.wait_for("client id")
    ended = terminal.interrupt()
    assert (ended.code, "Traceback" in ended.text) == (130, False)


class Stalled(BaseHTTPRequestHandler):
    """A service whose download stalls in the middle until ``proceed`` is set."""

    proceed = threading.Event()

    def do_GET(self) -> None:
        if self.path.endswith("/download-signed"):
            self.send_response(200)
            self.send_header("Content-Length", str(5 * 2**20))
            self.end_headers()
            self.wfile.write(b"%PDF-1.7\n" + bytes(2**20))
            self.proceed.wait(30)
            return
        content = json.dumps({"id": "1", "is_draft": False, "documents": [{"id": "d", "name": "lease.pdf"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def stalled() -> Iterator[str]:
    """Run a stalled service and yield its origin."""
    Stalled.proceed.clear()
    with listening(Stalled) as origin:
        try:
            yield origin
        finally:
            Stalled.proceed.set()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_download_leaves_no_file(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with stalled() as origin:
        environment = {"SIGNING_BASE_URL": origin, "SIGNING_ACCESS_TOKEN": "token-of-the-test"}
        terminal = Terminal("download", "1", cwd=tmp_path, environment=environment)
        end = time.monotonic() + 20
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < end
            time.sleep(0.02)
        terminal.signal(number)
        ended = terminal.end()
    assert (ended.code, "Traceback" in ended.text, list(tmp_path.iterdir())) == (code, False, [])
