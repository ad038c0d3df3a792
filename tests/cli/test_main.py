"""The command as a process: help, missing extras, closed streams and full disks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from signing_async.cli import app as cli
from signing_async.cli.exits import CODES
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import COMMAND, ROOT, piped


def test_help_lists_every_command_and_exit_code() -> None:
    ran = piped("--help")
    assert ran.returncode == 0
    printed = " ".join(ran.stdout.split())
    for code, meaning in CODES.items():
        assert f" {code} {meaning}" in printed
    for name, (_, line) in cli.COMMANDS.items():
        assert name in ran.stdout
        assert line.split(",")[0].split(":")[0] in printed


def test_ctrl_c_during_the_start_prints_no_traceback() -> None:
    """The command's own imports take longer than those of Python."""
    script = (
        "import sys\n"
        "from signing_async.cli import main\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "main()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "Error: interrupted\n")


def test_missing_click_is_a_sentence_with_what_to_install(tmp_path: Path) -> None:
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


def test_missing_module_of_an_extra_is_named_with_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "signing_async.cli.demo", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    ran = run("demo")
    assert (ran.code, ran.err) == (1, "Error: demo needs the module aiohttp: pip install 'signing-async[all]'\n")


def test_help_imports_neither_the_client_nor_rich() -> None:
    heavy = ("aiohttp", "attrs", "rich", "asyncio", "signing_async.client")
    script = "import sys; from signing_async.cli.app import run; run(['--help']); "
    script += f"print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["list", "--json"], 141), (["list"], 141), (["completion", "bash"], 141), (["demo"], 141),
        (["sandbox", "--port", "0"], 141), (["--help"], 1),
    ],
)  # fmt: skip
def test_closed_pipe_exits_with_141_silently(arguments: list[str], code: int, service: Service) -> None:
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


def test_full_disk_is_one_sentence_and_exit_code_1(service: Service) -> None:
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
        assert "could not write the output: No space left on device" in ran.stderr
        assert ran.stderr.count("\n") == 1


def test_closed_standard_streams_are_replaced_by_the_null_device(service: Service) -> None:
    script = f"{sys.executable} -c 'from signing_async.cli import main; main()' me <&- >&-"
    env = {**os.environ, **service.environment, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_installed_program_prints_its_version() -> None:
    program = Path(sys.executable).with_name("signing-async")
    ran = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith("signing-async, version ")
