"""The webhook commands and the settings file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.terminal import COMMAND, ROOT, screen
from tests.webhooks.deliveries import SECRET, event_body, hex_of


def test_the_secret_may_be_in_the_settings_file(run: Run, tmp_path: Path) -> None:
    """Where the environment has none; a file that cannot work is said to be one."""
    body = event_body("evt_1")
    (tmp_path / "delivery.json").write_bytes(body)
    settings = tmp_path / "settings.toml"
    settings.touch(0o600)
    settings.write_text(f'webhook_secret = "{SECRET}"')
    verify = ("webhook", "verify", "delivery.json", "--signature", hex_of(body), "--config", "settings.toml")
    assert run(*verify).out == "valid: event evt_1 of type signing.completed\n"
    settings.write_text("webhook_secret = 5")
    ran = run(*verify, "--json")
    assert (ran.code, ran.error["exit_code"]) == (2, 2)
    assert "settings.toml must be a text" in ran.error["message"]


def test_colours_of_a_verdict(tmp_path: Path) -> None:
    """On a terminal alone, and not with NO_COLOR."""
    body = event_body("evt_1")
    (tmp_path / "delivery.json").write_bytes(body)
    verify = ("webhook", "verify", str(tmp_path / "delivery.json"), "--signature", hex_of(body))
    secret = {"SIGNING_WEBHOOK_SECRET": SECRET}
    assert b"\x1b[32mvalid: event evt_1" in screen(*verify, environment=secret).raw
    assert b"\x1b" not in screen(*verify, environment={**secret, "NO_COLOR": "1"}).raw
    assert b"\x1b[31mnot valid" in screen(*verify, environment={"SIGNING_WEBHOOK_SECRET": "another"}).raw


def test_a_reader_that_has_seen_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code of a closed pipe, as with the other commands."""
    (tmp_path / "delivery.json").write_bytes(event_body("evt_1"))
    monkeypatch.setenv("SIGNING_WEBHOOK_SECRET", SECRET)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    process = subprocess.Popen(
        [*COMMAND, "webhook", "verify", str(tmp_path / "delivery.json")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=30)[1] == b""
    assert process.returncode == 141
