"""Running a command: event loops, Ctrl-C and SIGTERM."""

from __future__ import annotations

import asyncio
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
from tests.cli.conftest import Run
from tests.cli.service import Service, listening
from tests.cli.terminal import Terminal


def test_commands_run_on_uvloop_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And on asyncio's own loop where it is not."""

    async def loop() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert running.run(loop()).startswith("uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert running.run(loop()).startswith("asyncio")


def test_ctrl_c_in_a_terminal(service: Service) -> None:
    """Exit code 130 and a sentence; the cursor is back, and there is no traceback."""
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    terminal = Terminal("watch", signing, environment=service.environment)
    terminal.wait_for("pending")
    terminal.type("\x03")
    ended = terminal.end()
    assert ended.code == 130
    assert ended.text.endswith("Error: interrupted\n")
    assert "Traceback" not in ended.text
    assert ended.raw.rindex(b"\x1b[?25h") > ended.raw.rindex(b"\x1b[?25l")


def test_ctrl_c_while_something_is_changed(service: Service) -> None:
    """It is said that it may have taken effect."""
    service.do(service.sandbox.faults.add, "signings.create", "hang")
    terminal = Terminal("create", "Lease", environment=service.environment)
    while (
        not service.do(service.sandbox.requests_of, "signings.create") and not service.sandbox.faults.arranged[0].hits
    ):
        time.sleep(0.02)
    terminal.type("\x03")
    ended = terminal.end()
    assert (ended.code, "Traceback" in ended.text) == (130, False)
    assert "interrupted; a request that was under way may have taken effect" in ended.text


def test_ctrl_c_at_a_question(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a plain end as well."""
    monkeypatch.delenv("SIGNING_ACCESS_TOKEN")
    terminal = Terminal("login")
    terminal.wait_for("client id")
    ended = terminal.interrupt()
    assert (ended.code, "Traceback" in ended.text) == (130, False)


class Stalled(BaseHTTPRequestHandler):
    """A service whose download stops in the middle, until it is let go on."""

    go_on = threading.Event()

    def do_GET(self) -> None:
        if self.path.endswith("/download-signed"):
            self.send_response(200)
            self.send_header("Content-Length", str(5 * 2**20))
            self.end_headers()
            self.wfile.write(b"%PDF-1.7\n" + bytes(2**20))
            self.go_on.wait(30)
            return
        content = json.dumps({"id": "1", "is_draft": False, "documents": [{"id": "d", "name": "lease.pdf"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def stalled() -> Iterator[str]:
    """The origin of one that is."""
    Stalled.go_on.clear()
    with listening(Stalled) as origin:
        try:
            yield origin
        finally:
            Stalled.go_on.set()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_half_a_file_is_never_left(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """A download that is stopped by Ctrl-C or SIGTERM leaves nothing behind."""
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
