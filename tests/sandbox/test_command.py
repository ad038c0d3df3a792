"""`signing-async sandbox`, as a process of its own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from signing_async.cli import app as cli

COMMAND = (sys.executable, "-c", "from signing_async.cli import main; main()", "sandbox")


@contextlib.contextmanager
def running(*options: str, until: str = "Ctrl-C", **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; return the process and its output until it is ready."""
    process = subprocess.Popen(
        [*COMMAND, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdout
    try:
        said = ""
        for line in process.stdout:
            said += line
            if until in line:
                break
        yield process, said
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def get(said: str, path: str) -> tuple[int, str]:
    """Ask the sandbox that said this, with the token it gave."""
    url, token = re.search(r"http://\S+", said), re.search(r"access_\S+", said)
    assert url
    assert token
    request = urllib.request.Request(url[0] + path, headers={"Authorization": f"Bearer {token[0]}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.status, response.read().decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_until_a_signal_stops_it(number: signal.Signals) -> None:
    with running("--port", "0") as (process, said):
        assert "not a legal signing service" in said
        assert get(said, "/api/1.0/me")[0] == 200
        process.send_signal(number)
        rest, errors = process.communicate(timeout=10)
        assert (process.returncode, rest) == (0, "Stopped.\n")
        assert re.fullmatch(r"GET /api/1.0/me 200 \d+ ms\n", errors)


def test_options_set_folder_profile_seed_and_webhook_and_the_secret_comes_from_the_environment(tmp_path: Path) -> None:
    options = ["--port", "0", "--data", str(tmp_path / "kept"), "--profile", "numeric", "--seed", "7"]
    options += ["--seal-level", "B-LTA"]
    options += ["--webhook-url", "http://127.0.0.1:1/hook"]
    with running(*options, SIGNING_WEBHOOK_SECRET="whsec") as (_, said):
        assert re.search(r'"id": "\d+"', get(said, "/api/1.0/me")[1])
        assert "127.0.0.1:1" in get(said, "/sandbox/api/webhooks")[1]
        assert "http://127.0.0.1:1/hook (signed with SIGNING_WEBHOOK_SECRET)" in said
        assert "asks for no password" not in said
    assert (tmp_path / "kept" / "sandbox.db").exists()


def test_app_is_registered_once_and_its_settings_are_printed(tmp_path: Path) -> None:
    redirect_uri = "http://127.0.0.1:8765/callback"
    options = ("--port", "0", "--data", str(tmp_path / "kept"), "--app", f"My app={redirect_uri}")
    with running(*options) as (_, said):
        assert "after `signing-async login`" in said
        exports = dict(re.findall(r"^  export (\w+)=(\S+)$", said, re.MULTILINE))
        names = ("BASE_URL", "CLIENT_ID", "CLIENT_SECRET", "REDIRECT_URI")
        assert list(exports) == [f"SIGNING_{name}" for name in names]
        assert exports["SIGNING_REDIRECT_URI"] == redirect_uri
    with running(*options, "--json", until="}") as (_, said):
        app = json.loads(said)["app"]
        assert (app["redirect_uri"], app["client_id"]) == (redirect_uri, exports["SIGNING_CLIENT_ID"])
        assert app["client_secret"] != exports["SIGNING_CLIENT_SECRET"]


def test_port_in_use_is_an_error_without_a_traceback() -> None:
    with running("--port", "0") as (_, said):
        port = re.search(r"127\.0\.0\.1:(\d+)", said)
        assert port
        done = subprocess.run([*COMMAND, "--port", port[1]], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr == f"Error: 127.0.0.1:{port[1]}: {os.strerror(errno.EADDRINUSE)}\n"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--port", "x"], 2, "'x' is not a valid integer"),
        (["--profile", "nope"], 2, "nope"),
        (["--seal-level", "nope"], 2, "nope"),
        (["--webhook-secret", "s"], 2, "--webhook-secret"),
        (["--webhook-url", "http://192.0.2.1/"], 2, "--allow-remote-webhooks"),
        (["--host", ""], 2, "host"),
        (["--nope"], 2, "--nope"),
        (["--app", "My app"], 2, "absolute URL"),
        (["--app", "=http://127.0.0.1/"], 2, "name"),
        (["--data", "{file}/x"], 1, "{file}/x: Not a directory"),
    ],
)
def test_invalid_option_is_an_error_that_names_it(
    options: list[str], code: int, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    options = [option.replace("{file}", str(file)) for option in options]
    assert cli.run(["sandbox", "--port", "0", *options]) == code
    said = capfd.readouterr().err
    assert "Error: " in said
    assert words.replace("{file}", str(file)) in said
    assert "validation_failed" not in said


def test_folder_in_use_by_another_sandbox_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running("--port", "0", "--data", str(tmp_path)):
        assert cli.run(["sandbox", "--port", "0", "--data", str(tmp_path)]) == 1
    assert capfd.readouterr().err == f"Error: another sandbox is using {tmp_path}\n"


def test_help_has_an_example(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["sandbox", "--help"]) == 0
    assert "signing-async sandbox --port 8080 --data ./sandbox" in capfd.readouterr().out


def test_listening_on_all_addresses_warns_that_there_is_no_password() -> None:
    with running("--port", "0", "--host", "0.0.0.0") as (_, said):
        assert "asks for no password" in said


@pytest.mark.parametrize("command", ["demo", "sandbox"])
def test_missing_module_is_named_at_start(command: str) -> None:
    hidden = (
        "import importlib.util as u; seen = u.find_spec; u.find_spec = lambda n: seen(n) if n != 'pikepdf' else None; "
    )
    code = hidden + COMMAND[2]
    ended = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: {command} needs the module pikepdf: pip install 'signing-async[all]'\n"


def test_export_lines_can_be_pasted_into_a_shell() -> None:
    with running("--port", "0", "--webhook-url", "http://127.0.0.1:1/hook") as (_, said):
        exports = [line.strip() for line in said.splitlines() if line.strip().startswith("export ")]
        shown = "; ".join([*exports, 'echo "$SIGNING_BASE_URL $SIGNING_ACCESS_TOKEN $SIGNING_WEBHOOK_SECRET"'])
        done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, timeout=30, check=True)
        url, token, secret = done.stdout.split()
        assert url in said.splitlines()[0]
        assert get(f"{url} {token}", "/api/1.0/me")[0] == 200
        assert f"{secret} (for http://127.0.0.1:1/hook)" in said


def test_requests_are_logged_without_secrets_and_warnings_are_marked() -> None:
    with running("--port", "0", "--json", until="}\n") as (process, said):
        ready = json.loads(said)
        secret = "s3cret-of-a-client"
        for path in (f"/api/nowhere?code={secret}&state={secret}", "/api/1.0/me"):
            headers = {"Authorization": f"Bearer {secret}"}
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(urllib.request.Request(ready["base_url"] + path, headers=headers), timeout=10)
        for _ in range(2):
            body = json.dumps({"url": "http://127.0.0.1:1/hook", "secret": secret}).encode()
            headers = {"Content-Type": "application/json"}
            asked = urllib.request.Request(f"{ready['base_url']}/sandbox/api/webhooks", body, headers)
            urllib.request.urlopen(asked, timeout=10).close()
        address = urllib.parse.urlsplit(ready["base_url"])
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as connection:
            connection.sendall(f"GET /?code={secret}{'a' * 9000} HTTP/1.1\r\n\r\n".encode())
            assert connection.recv(4096).split()[1] == b"400"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    lines = [json.loads(line) for line in errors.splitlines()]
    logged = [re.sub(r"\d+ ms", "N ms", line["log"]) for line in lines if "log" in line]
    assert logged == [
        "GET /api/nowhere 404 N ms",
        "GET /api/1.0/me 401 N ms",
        *["POST /sandbox/api/webhooks 201 N ms"] * 2,
    ]
    assert [line["warning"] for line in lines if "warning" in line] == [
        "webhook endpoint registered twice: http://127.0.0.1:1/hook gets every event once more",
        "Error handling request from 127.0.0.1: malformed HTTP",
    ]
    assert secret not in errors
