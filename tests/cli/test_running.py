"""Running a command: event loops, Ctrl-C and SIGTERM."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from signing_async.cli import running
from signing_async.cli.command_base import State
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import Terminal


def test_commands_run_on_uvloop_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def loop() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert running.run(loop()).startswith("uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert running.run(loop()).startswith("asyncio")
    with ThreadPoolExecutor(1) as threads:  # where signals have no handlers
        assert threads.submit(lambda: running.run(loop())).result().startswith("asyncio")


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
