"""What all commands share: common options, verbosity, warnings, and errors as JSON."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from signing_async.cli.command_base import State
from tests.cli.conftest import Run
from tests.cli.service import Service


def test_errors_as_json_go_to_standard_error_with_type_and_exit_code(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, kind, code in (
        (["list", "--nope", "--json"], "NoSuchOption", 2),
        (["show", "--json"], "MissingParameter", 2),
        (["show", "..", "--json"], "InvalidRequest", 2),
        (["show", "none", "--json"], "NotFound", 1),
        (["me", "--base-url", "x", "--json"], "ConfigurationError", 2),
        (["me", "--json", "--timeout", "1"], "TransportError", 1),
    ):
        if kind == "TransportError":
            monkeypatch.setenv("SIGNING_BASE_URL", "http://127.0.0.1:1")
        ran = run(*arguments)
        assert (ran.code, ran.out) == (code, "")
        assert (ran.error["type"], ran.error["exit_code"]) == (kind, code)
        assert ran.error["message"]
        assert kind != "NotFound" or ran.error["request_id"].startswith("req_")


def test_common_options_work_before_and_after_the_command_and_the_last_one_counts(run: Run, tmp_path: Path) -> None:
    assert "'none' does not exist" in run("webhook", "--json", "verify", "none").error["message"]
    for arguments in (
        ["--base-url", "x", "me"],
        ["me", "--base-url", "x"],
        ["--base-url", "y", "me", "--base-url", "x"],
    ):
        assert "got 'x' (--base-url)" in run(*arguments).err
    (tmp_path / "settings.toml").write_text('base_url = "z"')
    assert "settings.toml" in run("me", "--config", "settings.toml", "--base-url", "https://x.example.com").err
    assert run("--json", "me").lines[0]["email"]


def test_verbose_shows_status_time_request_id_error_and_delay_of_each_attempt(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.do(service.sandbox.faults.add, "me", "500", 1)
    ran = run("me", "-v")
    first, second = ran.err.splitlines()
    assert re.fullmatch(r"me, attempt 1: HTTP 500 in \d+ ms \(req_\w+\) - HTTP 500 .*; retry in [\d.]+ s", first)
    assert re.fullmatch(r"me, attempt 2: HTTP 200 in \d+ ms \(req_\w+\)", second)
    monkeypatch.setenv("SIGNING_BASE_URL", "http://127.0.0.1:1")
    ran = run("me", "--verbose", "--json", "--timeout", "0.1")
    printed = json.loads(ran.err.splitlines()[0])["attempt"]
    assert (printed["operation"], printed["status"]) == ("me", None)
    assert "no response" in run("me", "-v", "--timeout", "0.1").err


async def test_package_warnings_are_printed_while_a_client_is_open(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIGNING_BASE_URL", "https://tenant.example.com")
    monkeypatch.setenv("SIGNING_ACCESS_TOKEN", "t")
    log = logging.getLogger("signing_async")
    async with State().client():
        log.warning("a %s failed", "refresh")
    log.warning("another %s failed", "refresh")
    assert capfd.readouterr().err == "Warning: a refresh failed\n"
