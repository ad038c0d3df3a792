"""The whole story with commands alone, each a process of its own: from a new app to a sealed PDF on disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.browser import submit
from tests.cli.terminal import COMMAND, ROOT, Terminal
from tests.cli.test_account import BROWSER, free_port
from tests.pdfs import make_pdf


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[str]:
    """Run `signing-async sandbox` in a process, and yield its origin."""
    process = subprocess.Popen(
        [*COMMAND, "sandbox", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["base_url"]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    process.stdout.close()


@pytest.fixture
def signing_async(origin: str, tmp_path: Path) -> Callable[..., str]:
    """Run a command like a script would: return its output, and fail if its exit code differs."""
    redirect_uri = f"http://127.0.0.1:{free_port()}/callback"
    page = submit(f"{origin}/developer/my-apps", name="Test", redirect_uri=redirect_uri)
    folder = tmp_path / "config" / "signing-async"
    folder.mkdir(parents=True)
    (folder / "config.toml").touch(0o600)
    (folder / "config.toml").write_text(
        f'base_url = "{origin}"\n'
        f'client_id = "{_find("app_", page)}"\n'
        f'client_secret = "{_find("secret_", page)}"\n'
        f'redirect_uri = "{redirect_uri}"\n'
    )

    def run(*arguments: str, code: int = 0) -> str:
        ran = subprocess.run(
            [*COMMAND, *arguments],
            env={**os.environ, **environment(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == code, f"{arguments}: {ran.stderr}"
        return ran.stdout

    return run


def _find(prefix: str, page: str) -> str:
    found = re.search(rf"\b{prefix}[\w-]+", page)
    assert found, page
    return found[0]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a user whose settings are in this folder and whose browser consents."""
    return {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(folder / "config"), "BROWSER": BROWSER}


def post(address: str, **body: Any) -> None:
    """Control the sandbox."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as response:
        assert response.status == 200


def test_from_a_new_app_to_a_sealed_pdf_with_commands_alone(
    origin: str, signing_async: Callable[..., str], tmp_path: Path
) -> None:
    for name in ("lease.pdf", "inventory.pdf"):
        (tmp_path / name).write_bytes(make_pdf(text=name))

    assert "Logged in" in signing_async("login")
    assert "user@sandbox.example" in signing_async("me")
    signing = signing_async("create", "Boat house", "--signing-order", "sequential").strip()
    assert len(signing_async("upload", signing, "lease.pdf", "inventory.pdf").splitlines()) == 2
    anna = signing_async("add-recipient", signing, "anna@example.com", "--order", "1").strip()
    bo = signing_async("add-recipient", signing, "bo@example.com", "--order", "2").strip()
    signing_async("send", signing)
    signing_async("remind", signing, "--all-pending")
    assert json.loads(signing_async("list", "--state", "sent", "--json"))["id"] == signing

    watching = Terminal("watch", signing, "--poll", "0.1", environment=environment(tmp_path))
    watching.wait_for("pending")
    for recipient in (anna, bo):
        post(f"{origin}/sandbox/api/recipients/{recipient}/sign")
    seen = watching.end()
    assert (seen.code, seen.lines[1]) == (0, "Boat house  completed")

    signing_async("download", signing, "--all", "--output", "signed")
    for name in ("lease", "inventory"):
        sealed = (tmp_path / "signed" / f"{name}-signed.pdf").read_bytes()
        assert sealed.startswith((tmp_path / f"{name}.pdf").read_bytes())
    signing_async("verify-sealed", "signed/lease-signed.pdf")
    assert "removed" in signing_async("logout")
    signing_async("me", code=4)
    assert not list((tmp_path / "config").rglob("*.json"))


def test_expired_token_is_refreshed_and_saved_by_the_next_command(
    origin: str, signing_async: Callable[..., str]
) -> None:
    signing_async("login")
    post(f"{origin}/sandbox/api/clock/advance", days=3)
    for _ in range(2):
        assert "user@sandbox.example" in signing_async("me")


def test_installed_program_prints_its_version(signing_async: Callable[..., str]) -> None:
    program = Path(sys.executable).with_name("signing-async")
    ran = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith("signing-async, version ")
