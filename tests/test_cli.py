"""The command as a user runs it: help, versions, errors in a sentence; and the demo, whole."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from signing_async import cli
from signing_async.cli import running
from signing_async.cli.exits import CODES
from signing_async.testing import sample_pdf

COMMANDS = sorted(cli.COMMANDS)


def _run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from signing_async.cli import main; main()", *arguments],
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(Path(cli.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_demo_tells_the_whole_story(tmp_path: Path) -> None:
    """Step by step, to two sealed PDFs on disk and the commands to look further."""
    ran = _run("demo", "--folder", str(tmp_path / "signed"))
    assert (ran.returncode, ran.stderr) == (0, "")
    for said in ("no legal signing service", "sent once: 1 invitation", "signing.completed", "refused", "Look further"):
        assert said in ran.stdout
    assert sorted(path.name for path in (tmp_path / "signed").iterdir()) == ["inventory.pdf", "lease.pdf"]
    assert (tmp_path / "signed/lease.pdf").read_bytes().startswith(sample_pdf("Lease of the boat house"))


def test_the_demo_for_machines() -> None:
    """--json prints what came out, and nothing else; the sealed files are where it says, as it says."""
    ran = _run("demo", "--json")
    told = json.loads(ran.stdout)
    assert told["signing"]["state"] == "completed"
    assert told["events"][-1] == "signing.completed"
    for file in told["sealed"]:
        data = Path(file["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"])


def test_the_demo_in_a_folder_that_cannot_be() -> None:
    """The error names the option, the reason and the path."""
    ran = _run("demo", "--folder", "/dev/null/x")
    assert (ran.returncode, ran.stderr) == (2, "Error: --folder: Not a directory: '/dev/null/x'\n")


def test_commands_run_on_uvloop_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And on asyncio's own loop where it is not."""

    async def loop() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert running.run(loop()).startswith("uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert running.run(loop()).startswith("asyncio")


def test_a_shell_can_complete_the_commands() -> None:
    """Their names are known without loading them."""
    assert cli.group.list_commands(click.Context(cli.group)) == COMMANDS


def test_help_lists_every_command() -> None:
    """With a line on each, and what the exit codes mean."""
    ran = _run("--help")
    assert ran.returncode == 0
    for code, meaning in CODES.items():
        assert f"  {code:<3}  {meaning}" in ran.stdout
    for name, (_, line) in cli.COMMANDS.items():
        assert name in ran.stdout
        assert line.split(",")[0].split(":")[0] in " ".join(ran.stdout.split())


def test_mistakes_are_told_in_a_sentence() -> None:
    """No traceback, and an exit code that means something."""
    unknown = _run("no-such-command")
    assert unknown.returncode == 2
    assert "No such command" in unknown.stderr
    version = _run("--version")
    assert version.returncode == 0


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    """A sentence, not a traceback."""
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('click')")
    ran = subprocess.run(
        [sys.executable, "-c", "from signing_async.cli import main; main()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[2])])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert "pip install 'signing-async[cli]'" in ran.stderr
    assert "Traceback" not in ran.stderr
