"""signing-async webhook: its words, its JSON, its exit codes, and that no secret is an argument."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from signing_async.cli.webhook import webhook
from signing_async.webhooks import STANDARD_WEBHOOKS, Receiver, WebhookVerifier, sign
from signing_async.webhooks.check import CheckResult
from tests.webhooks.deliveries import SECRET, event_body, hex_of
from tests.webhooks.servers import PATH, serve

BODY = event_body("evt_1")


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A saved delivery."""
    path = tmp_path / "delivery.json"
    path.write_bytes(BODY)
    return str(path)


def run(
    *arguments: str, secret: str | None = SECRET, stdin: bytes | str | None = None, env: dict[str, str] | None = None
) -> Result:
    """Run a command of the group, with the secret in the environment."""
    environment: dict[str, str | None] = {"SIGNING_WEBHOOK_SECRET": secret, "NO_COLOR": None, **(env or {})}
    return CliRunner().invoke(webhook, list(arguments), input=stdin, env=environment)


def test_verify_a_valid_delivery(saved: str) -> None:
    """Exit code 0, and which event it is; the signature as an option or as a header."""
    done = run("verify", saved, "--signature", hex_of(BODY))
    assert (done.exit_code, done.output) == (0, "valid: event evt_1 of type signing.completed\n")
    done = run("verify", saved, "-H", f"x-signature: {hex_of(BODY)}", "--json")
    assert json.loads(done.output) == {"valid": True, "event": {"id": "evt_1", "type": "signing.completed"}}


def test_a_delivery_does_not_reach_into_the_terminal() -> None:
    """A kind of event that holds escape sequences is shown without them."""
    body = json.dumps({"event": {"id": "a", "type": "x\x1b]0;title\x07\ny"}}).encode()
    done = run("verify", "-", "--signature", hex_of(body), stdin=body)
    assert done.output == "valid: event a of type x ]0;title y\n"


def test_verify_an_invalid_delivery(saved: str) -> None:
    """Exit code 1, and the kind of fault."""
    done = run("verify", saved, "--signature", hex_of(BODY, "another"))
    assert (done.exit_code, done.output) == (1, "not valid: no secret matches the signature\n")
    done = run("verify", saved, "--json")
    assert done.exit_code == 1
    assert json.loads(done.output) == {
        "valid": False,
        "reason": "missing",
        "message": "X-Signature is missing or empty",
    }


def test_verify_a_genuine_body_that_is_no_event() -> None:
    """The signature is what is asked for: exit code 0, and words about the body; from standard input."""
    done = run("verify", "-", "--signature", hex_of(b"[]"), stdin=b"[]")
    assert (done.exit_code, done.output) == (0, "valid, but no event: the body is JSON, and no object but an array\n")
    body = b'{"id": "a"}'
    assert run("verify", "-", "--signature", hex_of(body), stdin=body).output == "valid: event a of type unknown\n"


def test_verify_an_old_delivery_of_another_scheme(saved: str) -> None:
    """A saved delivery is old: --any-age."""
    text = "whsec_" + base64.b64encode(b"key").decode()
    headers = sign(text, BODY, STANDARD_WEBHOOKS, id="msg_1", timestamp=1_700_000_000)
    options = [part for name, value in headers.items() for part in ("-H", f"{name}: {value}")]
    command = ["verify", saved, "--scheme", "standard-webhooks", *options]
    assert "too long" in run(*command, secret=text).output
    assert run(*command, "--any-age", secret=text).exit_code == 0


@pytest.mark.parametrize(
    ("source", "stdin"),
    [
        ("file:{dir}/secret", None),
        ("env:OTHER", None),
        ("env:SIGNING_WEBHOOK_SECRET", None),
        ("-", SECRET + "\n"),
        ("-", SECRET + "\r\n"),
        ("-", SECRET),
    ],
)
def test_where_a_secret_may_be(source: str, stdin: str | None, saved: str, tmp_path: Path) -> None:
    """A file, a variable, standard input: the line end at its end is not part of it."""
    (tmp_path / "secret").write_text(SECRET + "\n")
    done = run(
        "verify",
        saved,
        "--signature",
        hex_of(BODY),
        "--secret",
        source.format(dir=tmp_path),
        stdin=stdin,
        env={"OTHER": SECRET},
    )
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("arguments", "secret", "words"),
    [
        (["verify", "{saved}", "--secret", "hunter2"], SECRET, "can be read by every process"),
        (["verify", "{saved}", "--secret", "env:"], SECRET, "can be read by every process"),
        (["verify", "{saved}", "--secret", "file:/no/such"], SECRET, "cannot be read: No such file"),
        (["verify", "{saved}", "--secret", "file:{binary}"], SECRET, "it is not UTF-8"),
        (["verify", "{saved}", "--secret", "env:NOT_SET"], SECRET, "set NOT_SET"),
        (["verify", "{saved}"], None, "no secret: set SIGNING_WEBHOOK_SECRET"),
        (["verify", "{saved}"], "", "the webhook secret is empty"),
        (["verify", "-", "--secret", "-"], SECRET, "cannot be both"),
        (["verify", "/no/such/file"], SECRET, "does not exist"),
        (["verify", "/proc/self/mem"], SECRET, "cannot be read"),
        (["verify", "{saved}", "-H", "nonsense"], SECRET, "not of the form 'NAME: VALUE'"),
        (["verify", "{saved}", "--scheme", "x"], SECRET, "'x' is not one of"),
        (["check", "http://example.com/"], SECRET, "plain http to another machine"),
        (["check", "http://127.0.0.1:1/"], "", "the webhook secret is empty"),
    ],
)
def test_a_wrong_call_is_told_in_a_sentence(
    arguments: list[str], secret: str | None, words: str, saved: str, tmp_path: Path
) -> None:
    """Exit code 2, one sentence, no traceback, and the secret is not repeated."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    done = run(*(part.format(saved=saved, binary=binary) for part in arguments), secret=secret, stdin="")
    assert done.exit_code == 2, done.output
    assert words in done.output.replace("\n", " ")
    assert "Traceback" not in done.output
    assert "hunter2" not in done.output


def test_a_secret_is_asked_for_on_a_terminal(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one, and nothing else says where the secret is; it is not shown."""
    asked: list[dict[str, Any]] = []

    def prompt(text: str, **options: Any) -> str:
        asked.append(options)
        return SECRET

    monkeypatch.setattr(click, "prompt", prompt)
    monkeypatch.setattr("signing_async.cli.webhook._on_a_terminal", lambda: True)
    assert run("verify", saved, "--signature", hex_of(BODY), secret=None).exit_code == 0
    assert asked[0]["hide_input"]
    assert run("verify", saved, "--secret", "env:NOT_SET", secret=None).exit_code == 2


def test_doctor(saved: str, tmp_path: Path) -> None:
    """Exit code 0 for a valid delivery, 1 with the cause, 3 when nothing matches; a line end in a file is a cause."""
    (tmp_path / "secret").write_text(SECRET + "\n")
    done = run("doctor", saved, "--signature", hex_of(BODY))
    assert (done.exit_code, done.output) == (0, "valid: hex of the raw body\n")
    done = run("doctor", saved, "--signature", hex_of(BODY), "--secret", f"file:{tmp_path}/secret")
    assert done.exit_code == 1
    assert "the secret has a trailing newline" in done.output
    done = run("doctor", saved, "--signature", hex_of(BODY, "another"), "--json")
    assert done.exit_code == 3
    found = json.loads(done.output)
    assert (found["accepted"], found["explained"], found["findings"][0]) == (False, False, "nothing matches")
    stamped = hex_of(b"1700000000." + BODY)
    done = run("doctor", saved, "--signature", stamped, "-H", "X-Stamp: 1700000000")
    assert 'timestamp_header="x-stamp"' in done.output


@pytest.mark.parametrize("color", ["", "1"])
def test_check(color: str, caplog: pytest.LogCaptureFixture) -> None:
    """A line for each delivery and exit code 0 when all are right, 1 when one is wrong."""
    receiver = Receiver(WebhookVerifier(SECRET, max_body=100_000), lambda event: None, body_timeout=0.3)
    with serve("aiohttp", receiver) as port:
        options = ["--slow-limit", "2", "--over-long", "200000", "--secret", "env:SIGNING_WEBHOOK_SECRET"]
        url = f"http://127.0.0.1:{port}{PATH}"
        done = run("check", url, *options, env={"NO_COLOR": color})
        assert done.exit_code == 0, done.output
        assert done.output.count("right  ") == 9
        assert done.output.endswith("all 9 are handled rightly\n")
        wrong = run("check", url, *options, secret="another")
        assert wrong.exit_code == 1
        assert "WRONG  valid delivery" in wrong.output
        assert "expected 2xx: genuine events are refused" in wrong.output
        as_json = run("check", url, *options, "--json")
        facts = json.loads(as_json.output)
        assert (facts["ok"], len(facts["checks"]), facts["checks"][0]["got"]) == (True, 9, "202")


@pytest.mark.parametrize(
    ("ok", "code", "words"), [(True, 0, "all 2 are handled rightly"), (False, 1, "1 of 2 are handled wrongly")]
)
def test_what_check_prints(ok: bool, code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each result, what was expected and why it matters where it is wrong, and a verdict."""
    results = [CheckResult("one", True, "2xx", "202", 0.001, ""), CheckResult("two", ok, "4xx", "200", 1.5, "so what")]

    async def canned(url: str, secret: str, **settings: Any) -> AsyncIterator[CheckResult]:
        for result in results:
            yield result

    monkeypatch.setattr("signing_async.webhooks.check.check_receiver", canned)
    done = run("check", "http://127.0.0.1:1/")
    assert done.exit_code == code
    assert done.output.splitlines()[-1] == words
    assert ("expected 4xx: so what" in done.output) is not ok
    assert "200 in 1500 ms" in done.output
    facts = json.loads(run("check", "http://127.0.0.1:1/", "--json").output)
    assert (facts["ok"], [one["ok"] for one in facts["checks"]]) == (ok, [True, ok])


def test_check_of_an_endpoint_that_is_not_there() -> None:
    """Exit code 3, in words or as JSON."""
    done = run("check", "http://127.0.0.1:1/")
    assert done.exit_code == 3
    assert "cannot be reached" in done.output
    done = run("check", "http://127.0.0.1:1/", "--json")
    assert (done.exit_code, json.loads(done.output)["ok"]) == (3, False)


@pytest.mark.parametrize("command", [[], ["verify"], ["doctor"], ["check"]])
def test_help_has_an_example(command: list[str]) -> None:
    """Each command shows how it is called and what its exit codes mean."""
    done = run(*command, "--help")
    assert done.exit_code == 0
    assert f"Example:\n    signing-async webhook {command[0] if command else 'verify'} " in done.output
    assert "..." not in done.output.partition("Commands:")[2]
    if command:
        assert "Exit code 0" in done.output


def test_the_installed_command(saved: str) -> None:
    """Through the main command, in a process of its own without a terminal."""
    env = {**os.environ, "SIGNING_WEBHOOK_SECRET": SECRET}
    command = [sys.executable, "-c", "from signing_async.cli import main; main()", "webhook", "verify", saved]
    done = subprocess.run(
        [*command, "--signature", hex_of(BODY)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "valid: event evt_1 of type signing.completed\n", "")
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (1, "not valid: X-Signature is missing or empty\n")
