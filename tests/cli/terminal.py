"""The command as a process: with pipes, or in a pseudo-terminal."""

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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND = (sys.executable, "-c", "from signing_async.cli import main; main()")
ROOT = Path(__file__).parents[2]
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def piped(
    *arguments: str, cwd: Path | None = None, stdin: str = "", environment: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    """Run the command with pipes."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=_environment(environment),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@dataclass
class Screen:
    """The terminal output and exit code of a command."""

    raw: bytes
    code: int

    @property
    def text(self) -> str:
        """Everything that was written, without control sequences."""
        return CONTROL.sub(b"", self.raw).decode().replace("\r\n", "\n")


class Terminal:
    """A command running in a pseudo-terminal."""

    def __init__(
        self,
        *arguments: str,
        command: Sequence[str] = COMMAND,
        columns: int = 100,
        cwd: Path | None = None,
        environment: Mapping[str, str] = {},
    ) -> None:
        self._seen = b""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            try:
                # A shell ignores Ctrl-C for its background jobs, which the tests may be.
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.chdir(cwd or ".")
                size = struct.pack("HHHH", 24, columns, 0, 0)
                fcntl.ioctl(0, termios.TIOCSWINSZ, size)
                os.execve(command[0], [*command, *arguments], _environment({"TERM": "xterm-256color", **environment}))
            finally:
                os._exit(99)

    def wait_for(self, text: str, seconds: float = 30) -> None:
        """Return when the text is on the screen."""
        self._read_until(lambda: text in CONTROL.sub(b"", self._seen).decode("utf-8", "replace"), seconds)

    def type(self, text: str) -> None:
        """Press these keys; \\x03 is Ctrl-C."""
        os.write(self._terminal, text.encode())

    def interrupt(self) -> Screen:
        """Press Ctrl-C at a prompt, again if it came just before the prompt started to read."""
        while True:
            time.sleep(0.2)
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.end(3)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

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
            if not select.select([self._terminal], [], [], 0.1)[0]:
                continue
            try:
                read = os.read(self._terminal, 65536)
            except OSError:  # Linux: the other side is closed
                return
            if not read:
                return
            self._seen += read


def screen(*arguments: str, columns: int = 100, environment: Mapping[str, str] = {}) -> Screen:
    """Run the command in a terminal to its end."""
    return Terminal(*arguments, columns=columns, environment=environment).end()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    # The terminal settings of the developer must not affect the tests.
    own = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "BROWSER")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    path = os.pathsep.join(part for part in (str(ROOT), kept.get("PYTHONPATH")) if part)
    return {**kept, "PYTHONPATH": path, **more}
