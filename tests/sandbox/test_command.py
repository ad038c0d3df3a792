"""`signing-async sandbox`, as a process of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from signing_async.cli.output import Output
from signing_async.cli.sandbox import _tell, sandbox
from signing_async.sandbox import Sandbox

COMMAND = (sys.executable, "-c", "from signing_async.cli import main; main()", "sandbox")


@contextlib.contextmanager
def running(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with these options, and what it says when it is ready."""
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
            if "Ctrl-C" in line:
                break
        yield process, said
    finally:
        process.kill()
        process.communicate()


def get(said: str, path: str) -> tuple[int, str]:
    """Ask the sandbox that said this, with the token it gave."""
    url, token = re.search(r"http://\S+", said), re.search(r"access_\S+", said)
    assert url
    assert token
    request = urllib.request.Request(url[0] + path, headers={"Authorization": f"Bearer {token[0]}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.status, response.read().decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_runs_until_it_is_told_to_stop(number: signal.Signals) -> None:
    """It says where it is and that it is no legal service, serves, and ends cleanly."""
    with running("--port", "0") as (process, said):
        assert "no legal signing service" in said
        assert get(said, "/api/1.0/me")[0] == 200
        process.send_signal(number)
        rest, errors = process.communicate(timeout=10)
        assert (process.returncode, rest, errors) == (0, "Stopped.\n", "")


def test_its_options(tmp_path: Path) -> None:
    """Folder, profile, seed and webhook are taken; the secret comes from the environment."""
    options = ["--port", "0", "--data", str(tmp_path / "kept"), "--profile", "numeric", "--seed", "7"]
    options += ["--seal-level", "B-LTA"]
    options += ["--webhook-url", "http://127.0.0.1:1/hook"]
    with running(*options, SIGNING_WEBHOOK_SECRET="whsec") as (_, said):
        assert re.search(r'"id": "\d+"', get(said, "/api/1.0/me")[1])
        assert "127.0.0.1:1" in get(said, "/sandbox/api/webhooks")[1]
    assert (tmp_path / "kept" / "sandbox.db").exists()


def test_a_port_in_use() -> None:
    """A port that is taken is a sentence, not a traceback."""
    with running("--port", "0") as (_, said):
        port = re.search(r"127\.0\.0\.1:(\d+)", said)
        assert port
        done = subprocess.run([*COMMAND, "--port", port[1]], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr == f"Error: 127.0.0.1:{port[1]}: {os.strerror(errno.EADDRINUSE)}\n"


@pytest.mark.parametrize(
    "options",
    [
        ["--port", "x"],
        ["--profile", "nope"],
        ["--seal-level", "nope"],
        ["--webhook-secret", "s"],
        ["--webhook-url", "http://192.0.2.1/"],
        ["--nope"],
    ],
)
def test_wrong_options(options: list[str]) -> None:
    """A wrong option is told in a sentence."""
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in {1, 2}
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_in_use(tmp_path: Path) -> None:
    """Two sandboxes would write over each other: the second one is told."""
    with running("--port", "0", "--data", str(tmp_path)):
        done = CliRunner().invoke(sandbox, ["--port", "0", "--data", str(tmp_path)])
    assert (done.exit_code, done.output) == (1, f"Error: another sandbox is using {tmp_path}\n")


def test_a_host_that_is_none() -> None:
    """Is named."""
    done = CliRunner().invoke(sandbox, ["--port", "0", "--host", "256.256.256.256"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: 256.256.256.256:0: ")
    assert "Errno" not in done.output


def test_help() -> None:
    """--help has an example."""
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=30, check=True)
    assert "signing-async sandbox --port 8080 --data ./sandbox" in done.stdout


def test_it_runs_in_this_process() -> None:
    """The command itself, without a process of its own: it says where it is, and Ctrl-C ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def interrupt() -> None:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5) as connection:
                connection.sendall(b"GET /api/1.0/me HTTP/1.0\r\n\r\n")
                if connection.recv(100):
                    break
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    done = CliRunner().invoke(sandbox, ["--port", str(port)])
    thread.join()
    assert done.exit_code == 0, done.output
    assert f"127.0.0.1:{port}" in done.output
    assert done.output.endswith("Stopped.\n")


def test_a_mistake_in_this_process(tmp_path: Path) -> None:
    """A folder that is a file, and an address on another machine, are sentences."""
    (tmp_path / "file").write_text("")
    for options, code in (
        (["--data", str(tmp_path / "file" / "x")], 1),
        (["--webhook-url", "http://192.0.2.1/"], 2),
        (["--host", ""], 2),
    ):
        done = CliRunner().invoke(sandbox, ["--port", "0", *options])
        assert done.exit_code == code
        assert "Error: " in done.output


def test_a_webhook_secret_that_it_made_is_shown(tmp_path: Path) -> None:
    """Whoever receives the deliveries has to know it."""
    with running("--port", "0", "--webhook-url", "http://127.0.0.1:1/hook") as (_, said):
        assert re.search(r"Webhook secret +whsec_\S+ \(for http://127\.0\.0\.1:1/hook\)", said)


async def test_what_it_says_at_the_start(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret only if it made it, the warning only if others can reach it."""
    for host, known, shown in (("127.0.0.1", "whsec", False), ("0.0.0.0", None, True)):
        monkeypatch.delenv("SIGNING_WEBHOOK_SECRET", raising=False)
        if known:
            monkeypatch.setenv("SIGNING_WEBHOOK_SECRET", known)
        async with Sandbox(host=host, webhook_url="http://127.0.0.1:1/hook", webhook_secret=known) as server:
            _tell(server, Output())
        said = capsys.readouterr().out
        assert ("Webhook secret" in said) is shown
        assert ("knows no passwords" in said) is shown


def test_it_says_what_listening_elsewhere_means() -> None:
    """On another address than loopback it is open to everyone there."""
    with running("--port", "0", "--host", "0.0.0.0") as (_, said):
        assert "it knows no passwords" in said


def test_a_webhook_on_another_machine_is_refused_by_the_options_name() -> None:
    """The error says which option would allow it."""
    result = CliRunner().invoke(sandbox, ["--port", "0", "--webhook-url", "https://hooks.example.com/"])
    assert result.exit_code == 2
    assert "--allow-remote-webhooks" in result.output
    assert "validation_failed" not in result.output


@pytest.mark.parametrize("command", ["demo", "sandbox"])
def test_a_module_that_is_missing_is_named_at_once(command: str) -> None:
    """Not at the first upload, which may be much later."""
    hidden = (
        "import importlib.util as u; seen = u.find_spec; u.find_spec = lambda n: seen(n) if n != 'pikepdf' else None; "
    )
    code = hidden + COMMAND[2]
    ended = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: {command} needs the module pikepdf: pip install 'signing-async[all]'\n"
