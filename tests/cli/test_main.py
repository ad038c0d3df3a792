"""The command as a process: help, missing extras, closed streams and full disks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from signing_async import cli
from signing_async.cli.exits import CODES
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import COMMAND, ROOT


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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lst", "Error: No such command 'lst'; is list meant?\n"),
        ("frobnicate", "Error: No such command 'frobnicate'.\n"),
    ],
)
def test_a_command_that_there_is_not(name: str, words: str, run: Run) -> None:
    """One that is close is named."""
    ran = run(name)
    assert ran.code == 2
    assert ran.err.endswith(words)


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


def test_a_module_of_an_extra_that_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named, with what to install."""
    monkeypatch.delitem(sys.modules, "signing_async.cli.demo", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    ran = run("demo")
    assert (ran.code, ran.err) == (1, "Error: demo needs the module aiohttp: pip install 'signing-async[all]'\n")


def test_help_is_quick() -> None:
    """It loads neither the network nor the tables."""
    heavy = ("aiohttp", "attrs", "rich", "asyncio", "signing_async.client")
    script = "import sys; from signing_async.cli import run; run(['--help']); "
    script += f"print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["list", "--json"], 141), (["list"], 141), (["completion", "bash"], 141), (["demo"], 141),
        (["demo", "--json"], 141), (["sandbox", "--port", "0"], 141), (["--help"], 1),
    ],
)  # fmt: skip
def test_a_reader_that_has_seen_enough(arguments: list[str], code: int, service: Service) -> None:
    """`| head` is quiet; nobody reads any more here."""
    service.draft(name="Lease")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        ran = subprocess.run(
            [*COMMAND, *arguments],
            env={**os.environ, **service.environment, "PYTHONPATH": str(ROOT)},
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (code, "")


def test_a_disk_that_is_full(service: Service) -> None:
    """Is a sentence, and a failure."""
    service.draft()
    for arguments in (["list", "--json"], ["completion", "bash"]):
        with Path("/dev/full").open("w") as full:
            ran = subprocess.run(
                [*COMMAND, *arguments],
                env={**os.environ, **service.environment, "PYTHONPATH": str(ROOT)},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
        assert ran.returncode == 1
        assert "the output cannot be written: No space left on device" in ran.stderr
        assert ran.stderr.count("\n") == 1


def test_a_file_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error of the system that no command foresees is a sentence too."""

    def fail(*args: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr(cli.group, "main", fail)
    monkeypatch.setattr(cli, "discard_output", lambda: None)
    assert cli.run([]) == 1
    assert capfd.readouterr().err == "Error: /somewhere: Permission denied\n"


def test_streams_that_are_closed(service: Service) -> None:
    """Are nothing to fail for; no file and no connection takes their place."""
    script = f"{sys.executable} -c 'from signing_async.cli import main; main()' me <&- >&-"
    env = {**os.environ, **service.environment, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_stream_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Takes what it is given."""
    monkeypatch.setattr(sys, "stdout", None)
    cli._fill_streams()
    print("x", flush=True)
    assert capfd.readouterr().out == "x\n"
