"""Fixtures: a sandbox, and the command in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from signing_async.cli import app as cli
from tests.cli.service import Service, running


@pytest.fixture
def service() -> Iterator[Service]:
    """A sandbox for one test."""
    with running(seed=7) as started:
        yield started


@dataclass
class Ran:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        """The JSON objects of standard output."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> Any:
        """The error in the JSON of standard error."""
        return json.loads(self.err.splitlines()[-1])["error"]


Run = Callable[..., Ran]


@pytest.fixture
def run(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process with an access token, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)

    def run_here(*arguments: str, stdin: bytes | None = None, **environment: str) -> Ran:
        capfd.readouterr()
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            if stdin is not None:
                patched.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            code = cli.run(arguments)
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run_here


@pytest.fixture
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one attempt for each request."""
    monkeypatch.setenv("SIGNING_MAX_ATTEMPTS", "1")
