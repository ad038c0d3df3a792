"""What all commands share: help, options, errors, exit codes, signals, missing extras, closed streams, completion."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from signing_async import errors
from signing_async.cli import app as cli
from signing_async.cli.exits import CODES, code_of, facts_of  # a table of all errors
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import COMMAND, ROOT, Terminal, piped, screen


def python(script: str, *, path: Path = ROOT) -> tuple[int, str, str]:
    """Run a Python script in a process of its own."""
    return piped(command=[sys.executable, "-c", script], environment={"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"})


def test_help_lists_every_command_and_exit_code(run: Run) -> None:
    ran = run("--help")
    printed = " ".join(ran.out.split())
    assert ran.code == 0
    for code, meaning in CODES.items():
        assert f" {code} {meaning}" in printed
    for name, (_, line) in cli.COMMANDS.items():
        assert f"\n  {name} " in ran.out
        assert line.split(",")[0].split(":")[0] in printed


def test_help_imports_neither_the_client_nor_rich() -> None:
    heavy = ("aiohttp", "attrs", "rich", "asyncio", "signing_async.client")
    script = "import sys; from signing_async.cli.app import run; run(['--help']); "
    assert python(script + f"print([name for name in {heavy} if name in sys.modules])")[1].endswith("\n[]\n")


def test_installed_program_prints_its_version() -> None:
    code, out, _ = piped("--version", command=[Path(sys.executable).with_name("signing-async")])
    assert (code, out.startswith("signing-async, version ")) == (0, True)


def test_errors_as_json_go_to_standard_error_with_type_and_exit_code(run: Run) -> None:
    for line, kind, code in (
        ("list --nope", "NoSuchOption", 2),
        ("show", "MissingParameter", 2),
        ("show ..", "InvalidRequest", 2),
        ("show none", "NotFound", 1),
        ("me --base-url x", "ConfigurationError", 2),
    ):
        ran = run(*line.split(), "--json")
        assert (ran.code, ran.out) == (code, "")
        assert (ran.error["type"], ran.error["exit_code"]) == (kind, code)
        assert ran.error["message"]
        assert kind != "NotFound" or ran.error["request_id"].startswith("req_")


def test_each_error_has_its_documented_exit_code() -> None:
    for code, raised in {
        1: [errors.ServerError("x", status=500), errors.RequestTimeout("x"), errors.DecodeError("x"), OSError("x")],
        2: [errors.ConfigurationError("x"), errors.PdfRejected("x", reason="not_pdf", filename="x")],
        3: [errors.OutcomeUnknown("x"), errors.OutcomeUnknownTimeout("x")],
        4: [errors.Unauthorized("x", status=401), errors.Forbidden("x", status=403), errors.RefreshRejected("x")],
        5: [errors.WaitTimeout("x")],
        6: [errors.SigningCancelled("x")],
        7: [errors.NotSound("x")],
    }.items():
        assert code in CODES
        for error in raised:
            assert code_of(error) == facts_of(error)["exit_code"] == code


def test_common_options_work_before_and_after_the_command_and_the_last_one_counts(run: Run, tmp_path: Path) -> None:
    assert "'none': No such file" in run("webhook", "--json", "verify", "none").error["message"]
    for line in ("--base-url x me", "me --base-url x", "--base-url y me --base-url x"):
        assert "got 'x' (--base-url)" in run(*line.split()).err
    (tmp_path / "settings.toml").write_text('base_url = "z"')
    assert "settings.toml" in run("me", "--config", "settings.toml", "--base-url", "https://x.example.com").err
    assert run("--json", "me").lines[0]["email"]


def test_verbose_shows_status_time_request_id_error_and_delay_of_each_attempt(run: Run, service: Service) -> None:
    service.fault("me", "500")
    first, second = run("me", "-v").err.splitlines()
    assert re.fullmatch(r"me, attempt 1: HTTP 500 in \d+ ms \(req_\w+\) - HTTP 500 .*; retry in [\d.]+ s", first)
    assert re.fullmatch(r"me, attempt 2: HTTP 200 in \d+ ms \(req_\w+\)", second)
    ran = run("me", "--verbose", "--json", "--timeout", "1", SIGNING_BASE_URL="http://127.0.0.1:1")
    printed = json.loads(ran.err.splitlines()[0])["attempt"]
    assert (printed["operation"], printed["status"], printed["headers"]) == ("me", None, {})
    [succeeded] = [json.loads(line)["attempt"] for line in run("me", "-v", "--json").err.splitlines()]
    assert succeeded["headers"]["request_id"] == succeeded["request_id"]


# Signals


def test_ctrl_c_during_a_change_says_that_it_may_have_taken_effect(service: Service) -> None:
    hanging = service.fault("signings.create", "hang")
    terminal = Terminal("create", "Lease", environment=service.environment)
    while not hanging.hits:
        time.sleep(0.02)
    terminal.type("\x03")
    ended = terminal.end()
    assert (ended.code, "Traceback" in ended.text) == (130, False)
    assert "interrupted; a request in flight may have taken effect" in ended.text


def test_ctrl_d_at_a_prompt_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIGNING_ACCESS_TOKEN")
    ended = screen("login", typed="\x04")
    assert (ended.code, ended.text.endswith("Error: interrupted\n")) == (130, True)


@pytest.mark.parametrize(
    ("module", "problem", "code", "words"),
    [
        ("click", "KeyboardInterrupt", 130, "Error: interrupted\n"),
        ("typing", "KeyboardInterrupt", 130, "Error: interrupted\n"),
        (
            "click",
            "ModuleNotFoundError('click')",
            1,
            "signing-async: the command line needs an extra: pip install 'signing-async[cli]'\n",
        ),
    ],
)
def test_ctrl_c_or_a_missing_module_during_the_start_is_a_sentence(
    module: str, problem: str, code: int, words: str, tmp_path: Path
) -> None:
    """The command's own imports take longer than those of Python. Before they begin, little more than Python starts."""
    (tmp_path / f"{module}.py").write_text(f"raise {problem}")
    assert python(COMMAND[2], path=tmp_path) == (code, "", words)


def test_missing_module_that_a_command_needs_later_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "signing_async.postgres", None)
    ran = run("inbox", "stats", SIGNING_INBOX="postgresql://app@127.0.0.1/app")
    assert (ran.code, ran.out, "signing_async.postgres" in ran.err) == (2, "", True)


def test_missing_module_of_an_extra_is_named_with_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "signing_async.cli.demo", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    ran = run("demo")
    assert (ran.code, ran.err) == (1, "Error: demo needs the module aiohttp: pip install 'signing-async[sandbox]'\n")


# Closed streams and full disks


@pytest.mark.parametrize("command", ["list --json", "sandbox --port 0"])
def test_closed_pipe_exits_with_141_silently(command: str, service: Service) -> None:
    service.draft(name="Lease")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        assert piped(*command.split(), environment=service.environment, stdout=pipe) == (141, None, "")


def test_full_disk_is_one_sentence_and_exit_code_1(service: Service) -> None:
    with Path("/dev/full").open("wb") as full:
        code, _, err = piped("me", environment=service.environment, stdout=full)
    assert (code, err) == (1, "Error: could not write the output: No space left on device\n")


def test_closed_standard_streams_are_replaced_by_the_null_device(service: Service) -> None:
    command = ["bash", "-c", f"{sys.executable} -c '{COMMAND[2]}' me <&- >&-"]
    assert piped(command=command, environment=service.environment) == (0, "", "")


# Completion


def test_completion_works_without_extras_and_imports_no_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for module in ("demo", "sandbox", "dispatch"):
        monkeypatch.delitem(sys.modules, f"signing_async.cli.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setenv("_SIGNING_ASYNC_COMPLETE", "zsh_complete")
    for line, candidate in {
        "up": "upload",
        "--ver": "--version",
        "list --st": "--state",
        "list --state dr": "draft",
        "inbox pu": "purge",
        "demo --": "",
        "none ": "",
    }.items():
        monkeypatch.setenv("COMP_WORDS", f"signing-async {line}")
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ") + 1))
        with pytest.raises(SystemExit):
            cli.run([])
        printed = capfd.readouterr()
        assert (candidate in printed.out.splitlines(), printed.err) == (bool(candidate), ""), line
    assert "signing_async.cli.dispatch" not in sys.modules
    monkeypatch.delenv("_SIGNING_ASYNC_COMPLETE")
    assert cli.run(["completion", "fish", "--json"]) == 0
    assert "_SIGNING_ASYNC_COMPLETE" in json.loads(capfd.readouterr().out)["script"]
