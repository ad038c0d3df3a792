"""`signing-async sandbox`, as a process of its own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from signing_async.cli import app as cli

COMMAND = (sys.executable, "-c", "from signing_async.cli import main; main()", "sandbox", "--port", "0")
HOOK = "http://127.0.0.1:1/hook"


@contextlib.contextmanager
def running(*options: str, until: str = "Ctrl-C", **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; return the process and its output until it is ready."""
    process = subprocess.Popen([*COMMAND, *options], stdout=PIPE, stderr=PIPE, text=True, env=os.environ | environment)
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


def get(url: str, token: str) -> str:
    """Return what the sandbox responds."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(response.read().decode())


def test_command_serves_until_a_signal_stops_it_and_prints_lines_to_paste_into_a_shell(tmp_path: Path) -> None:
    options = ["--data", str(tmp_path / "kept"), "--profile", "numeric", "--seed", "7", "--seal-level", "B-LTA"]
    with running(*options, "--webhook-url", HOOK, "--host", "0.0.0.0") as (process, said):
        assert "not a legal signing service" in said
        assert "asks for no password" in said
        exports = [line.strip() for line in said.splitlines() if line.strip().startswith("export ")]
        shown = "; ".join([*exports, 'echo "$SIGNING_BASE_URL $SIGNING_ACCESS_TOKEN $SIGNING_WEBHOOK_SECRET"'])
        done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, timeout=30, check=True)
        url, token, secret = done.stdout.split()
        assert url in said.splitlines()[0]
        assert f"{secret} (for {HOOK})" in said
        assert re.search(r'"id": "\d+"', get(f"{url}/api/1.0/me", token))
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=10)
        assert (process.returncode, rest) == (0, "Stopped.\n")
        assert re.fullmatch(r"GET /api/1.0/me 200 \d+ ms\n", errors)
    assert (tmp_path / "kept" / "sandbox.db").exists()


def test_app_is_registered_once_and_nothing_printed_or_logged_later_holds_a_secret(tmp_path: Path) -> None:
    redirect_uri, secret = "http://127.0.0.1:8765/callback", "s3cret-of-a-client"
    options = ("--data", str(tmp_path), "--webhook-url", HOOK, "--app", f"My app={redirect_uri}")
    with running(*options, SIGNING_WEBHOOK_SECRET=secret) as (_, said):
        assert "then run `signing-async login`" in said
        assert "asks for no password" not in said
        assert f"{HOOK} (signed with SIGNING_WEBHOOK_SECRET)" in said
        assert secret not in said
        exports = dict(re.findall(r"^  export (\w+)=(\S+)$", said, re.MULTILINE))
        names = ("BASE_URL", "CLIENT_ID", "CLIENT_SECRET", "REDIRECT_URI")
        assert list(exports) == [f"SIGNING_{name}" for name in names]
        assert exports["SIGNING_REDIRECT_URI"] == redirect_uri

    with running(*options, "--json", until="}\n") as (process, said):
        ready = json.loads(said)
        url, app = ready["base_url"], ready["app"]
        assert (app["redirect_uri"], app["client_id"]) == (redirect_uri, exports["SIGNING_CLIENT_ID"])
        assert app["client_secret"] == exports["SIGNING_CLIENT_SECRET"]
        for path in (f"/api/nowhere?code={secret}&state={secret}", "/api/1.0/me"):
            with pytest.raises(urllib.error.HTTPError):
                get(url + path, secret)
        body = json.dumps({"url": HOOK, "secret": secret}).encode()
        asked = urllib.request.Request(f"{url}/sandbox/api/webhooks", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(asked, timeout=10).close()
        address = urllib.parse.urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as connection:
            connection.sendall(f"GET /?code={secret}{'a' * 9000} HTTP/1.1\r\n\r\n".encode())
            assert connection.recv(4096).split()[1] == b"400"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    lines = [json.loads(line) for line in errors.splitlines()]
    assert [re.sub(r"\d+ ms", "N ms", line["log"]) for line in lines if "log" in line] == [
        "GET /api/nowhere 404 N ms",
        "GET /api/1.0/me 401 N ms",
        "POST /sandbox/api/webhooks 201 N ms",
    ]
    assert [line["warning"] for line in lines if "warning" in line] == [
        f"webhook endpoint registered twice: {HOOK} gets every event once more",
        "Error handling request from 127.0.0.1: malformed HTTP",
    ]
    assert secret not in errors


INVALID = (
    (["--profile", "nope"], 2, "nope"),
    (["--webhook-url", "http://192.0.2.1/"], 2, "--allow-remote-webhooks"),
    (["--host", ""], 2, "host"),
    (["--app", "My app"], 2, "must have the form NAME=REDIRECT_URI"),
    (["--app", "A=http://127.0.0.1/", "--app", "B=http://127.0.0.1/"], 2, "only one app"),
    (["--data", "{folder}/sandbox.db/x"], 1, "{folder}/sandbox.db/x: Not a directory"),
    (["--data", "{folder}"], 1, "another sandbox is using {folder}\n"),
    (["--port", "{port}"], 1, f"127.0.0.1:{{port}}: {os.strerror(errno.EADDRINUSE)}; choose another --port\n"),
)


def test_invalid_option_is_an_error_that_names_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "sandbox.db")) as database, socket.socket() as listening:
        database.execute("BEGIN EXCLUSIVE")  # as another sandbox does
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        used = {"folder": str(tmp_path), "port": listening.getsockname()[1]}
        for options, code, words in INVALID:
            assert cli.run(["sandbox", "--port", "0", *(option.format(**used) for option in options)]) == code
            said = capfd.readouterr().err
            assert "Error: " in said
            assert words.format(**used) in said
            assert "validation_failed" not in said
