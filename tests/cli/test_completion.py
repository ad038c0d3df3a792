"""`completion`, and what a shell completes."""

from __future__ import annotations

import json
import sys

import click
import pytest

from signing_async import cli
from tests.cli.conftest import Run
from tests.cli.terminal import piped


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, run: Run) -> None:
    """A script for each shell; it completes names of commands and of options."""
    ran = run("completion", shell)
    assert ran.code == 0
    assert "_SIGNING_ASYNC_COMPLETE" in ran.out
    assert json.loads(run("completion", shell, "--json").out)["script"].strip() == ran.out.strip()


@pytest.mark.parametrize(
    ("words", "among"),
    [
        ("signing-async up", "upload"),
        ("signing-async list --st", "--state"),
        ("signing-async list --state dr", "draft"),
    ],
)
def test_what_is_completed(words: str, among: str) -> None:
    """As bash would ask."""
    asked = {"_SIGNING_ASYNC_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    ran = piped(environment=asked)
    assert f"plain,{among}" in ran.stdout.splitlines()


def test_completion_needs_no_extra(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Names are completed without a look at the commands; the options of one that cannot be loaded are none."""
    for module in ("demo", "sandbox", "dispatch"):
        monkeypatch.delitem(sys.modules, f"signing_async.cli.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setenv("_SIGNING_ASYNC_COMPLETE", "zsh_complete")
    for words, among in (
        ("signing-async d", "demo"),
        ("signing-async --ver", "--version"),
        ("signing-async demo --", ""),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit):
            cli.run([])
        told = capfd.readouterr()
        assert (among in told.out.splitlines(), told.err) == (bool(among), "")
    assert "signing_async.cli.dispatch" not in sys.modules


def test_a_shell_can_complete_the_commands() -> None:
    """Their names are known without loading them."""
    assert cli.group.list_commands(click.Context(cli.group)) == sorted(cli.COMMANDS)
