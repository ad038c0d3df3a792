"""The webhook commands and the settings file."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run
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
