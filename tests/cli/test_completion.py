"""`completion`, and what a shell completes."""

from __future__ import annotations

import json
import sys

import pytest

from signing_async.cli import app as cli
from tests.cli.conftest import Run
from tests.cli.terminal import piped


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell: str, run: Run) -> None:
    ran = run("completion", shell)
    assert ran.code == 0
    assert "_SIGNING_ASYNC_COMPLETE" in ran.out
    assert json.loads(run("completion", shell, "--json").out)["script"].strip() == ran.out.strip()


@pytest.mark.parametrize(
    ("line", "candidate"),
    [
        ("signing-async up", "upload"),
        ("signing-async list --st", "--state"),
        ("signing-async list --state dr", "draft"),
        ("signing-async inbox pu", "purge"),
        ("signing-async inbox list --status de", "dead"),
    ],
)
def test_bash_completes_commands_options_and_choices(line: str, candidate: str) -> None:
    environment = {"_SIGNING_ASYNC_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    ran = piped(environment=environment)
    assert f"plain,{candidate}" in ran.stdout.splitlines()


def test_completion_works_without_extras_and_imports_no_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for module in ("demo", "sandbox", "dispatch"):
        monkeypatch.delitem(sys.modules, f"signing_async.cli.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setenv("_SIGNING_ASYNC_COMPLETE", "zsh_complete")
    for line, candidate in (
        ("signing-async d", "demo"),
        ("signing-async --ver", "--version"),
        ("signing-async demo --", ""),
    ):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        with pytest.raises(SystemExit):
            cli.run([])
        printed = capfd.readouterr()
        assert (candidate in printed.out.splitlines(), printed.err) == (bool(candidate), "")
    assert "signing_async.cli.dispatch" not in sys.modules
