"""The command as a process, with pipes or in a pseudo-terminal, and in this process with a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from signing_async.cli import app as cli

COMMAND = (sys.executable, "-c", "from signing_async.cli import main; main()")
ROOT = Path(__file__).parents[2]
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def start(
    *arguments: str, command: Sequence[str] = COMMAND, environment: Mapping[str, str] = {}, **options: Any
) -> subprocess.Popen[str]:
    """Start the command with pipes."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([*command, *arguments], env=_environment(environment), **options)


def piped(*arguments: str, **options: Any) -> tuple[int, str, str]:
    """Run the command with pipes; return its exit code and output."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@dataclass
class Screen:
    """The terminal output and exit code of a command."""

    raw: bytes
    code: int

    @property
    def text(self) -> str:
        """Everything that was written, without control sequences."""
        # The terminal's own ^C may have split a character of several bytes.
        return CONTROL.sub(b"", self.raw).decode("utf-8", "replace").replace("\r\n", "\n")


class Terminal:
    """A command running in a pseudo-terminal."""

    def __init__(self, *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] = {}) -> None:
        self._seen = b""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            try:
                # A shell ignores Ctrl-C for its background jobs, which the tests may be.
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.chdir(cwd or ".")
                fcntl.ioctl(0, termios.TIOCSWINSZ, _size(100))
                os.execve(COMMAND[0], [*COMMAND, *arguments], _environment(environment))
            finally:
                os._exit(99)

    @property
    def text(self) -> str:
        """What is on the screen so far."""
        return Screen(self._seen, 0).text

    def wait_for(self, text: str, seconds: float = 30) -> None:
        """Return when the text is on the screen."""
        self._read_until(lambda: text in self.text, seconds)

    def type(self, text: str) -> None:
        """Press these keys; \\x03 is Ctrl-C."""
        os.write(self._terminal, text.encode())

    def end(self, seconds: float = 30) -> Screen:
        """Wait for the end and return the screen."""
        self._read_until(lambda: False, seconds)
        os.close(self._terminal)
        _, status = os.waitpid(self.pid, 0)
        return Screen(self._seen, os.waitstatus_to_exitcode(status))

    def _read_until(self, enough: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not enough():
            assert time.monotonic() < end, f"still running after {seconds} s; output: {self._seen.decode()}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                read = _read(self._terminal)
                if not read:
                    return
                self._seen += read


def screen(*arguments: str, typed: str = "", columns: int = 100, environment: Mapping[str, str] = {}) -> Screen:
    """Run the command in this process with a pseudo-terminal as its standard streams."""
    terminal, inner = pty.openpty()
    os.write(terminal, typed.encode())
    fcntl.ioctl(inner, termios.TIOCSWINSZ, _size(columns))
    chunks: list[bytes] = []
    reader = threading.Thread(target=lambda: chunks.extend(iter(lambda: _read(terminal), b"")))
    with contextlib.ExitStack() as exits:
        patched = exits.enter_context(pytest.MonkeyPatch.context())
        exits.callback(os.close, terminal)
        exits.callback(reader.join)
        exits.callback(os.close, inner)  # which ends the reader
        for name, value in _environment(environment).items():
            patched.setenv(name, value)
        for name in os.environ.keys() - _environment(environment).keys():
            patched.delenv(name)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            own = os.dup(number)
            exits.callback(os.close, own)
            exits.callback(os.dup2, own, number)
            os.dup2(inner, number)
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115  # below
            exits.enter_context(stream)
            patched.setattr(sys, name, stream)
        reader.start()
        code = cli.run(arguments)
    return Screen(b"".join(chunks), code)


def _read(terminal: int) -> bytes:
    """Return what was written to a pseudo-terminal; nothing once its other side is closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux
        return b""


def _size(columns: int) -> bytes:
    return struct.pack("HHHH", 24, columns, 0, 0)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    # The terminal settings of the developer must not affect the tests.
    own = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "BROWSER")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    path = os.pathsep.join(part for part in (str(ROOT), kept.get("PYTHONPATH")) if part)
    return {**kept, "PYTHONPATH": path, "TERM": "xterm-256color", **more}
