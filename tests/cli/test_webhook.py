"""`webhook`: output, JSON and exit codes, and that a secret is never an argument."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from signing_async.cli.webhook import webhook
from signing_async.webhooks import Receiver, WebhookVerifier
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal, screen
from tests.webhooks.deliveries import SECRET, event_body, hex_of
from tests.webhooks.servers import PATH, serve

BODY = event_body("evt_1", signing={"id": "sig_1"})


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """Return the path of a saved delivery."""
    path = tmp_path / "delivery.json"
    path.write_bytes(BODY)
    return str(path)


def run(
    *arguments: str, secret: str | None = SECRET, stdin: bytes | str | None = None, env: dict[str, str] | None = None
) -> Result:
    """Run a webhook command with the secret in the environment."""
    environment: dict[str, str | None] = {"SIGNING_WEBHOOK_SECRET": secret, "NO_COLOR": None, **(env or {})}
    return CliRunner().invoke(webhook, list(arguments), input=stdin, env=environment)


def test_verify_shows_the_event_of_a_valid_delivery(saved: str) -> None:
    done = run("verify", saved, "--signature", hex_of(BODY))
    assert (done.exit_code, done.output) == (0, "valid: event evt_1 of type signing.completed\n")
    done = run("verify", saved, "-H", f"x-signature: {hex_of(BODY)}", "--json")
    assert json.loads(done.output) == {
        "valid": True,
        "event": {"id": "evt_1", "type": "signing.completed", "signing_id": "sig_1"},
    }


def test_verify_removes_escape_sequences_from_the_event_type() -> None:
    body = json.dumps({"event": {"id": "a", "type": "x\x1b]0;title\x07\ny"}}).encode()
    done = run("verify", "-", "--signature", hex_of(body), stdin=body)
    assert done.output == "valid: event a of type x\ufffd]0;title\ufffd y\n"


def test_verify_exits_with_1_and_the_reason_for_an_invalid_signature(saved: str) -> None:
    done = run("verify", saved, "--signature", hex_of(BODY, "another"))
    assert (done.exit_code, done.output) == (1, "not valid: no secret matches the signature\n")
    done = run("verify", saved, "--header", "x-signature: ", "--json")
    assert done.exit_code == 1
    assert json.loads(done.output) == {
        "valid": False,
        "reason": "missing",
        "message": "X-Signature is missing or empty",
    }


def test_verify_exits_with_0_for_a_valid_signature_over_a_body_that_is_not_an_event() -> None:
    done = run("verify", "-", "--signature", hex_of(b"[]"), stdin=b"[]")
    assert (done.exit_code, done.output) == (
        0,
        "valid signature, but not an event: the body must be a JSON object, got an array\n",
    )
    body = b'{"id": "a"}'
    assert run("verify", "-", "--signature", hex_of(body), stdin=body).output == "valid: event a of type unknown\n"


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
def test_secret_is_read_from_file_variable_or_standard_input(
    source: str, stdin: str | None, saved: str, tmp_path: Path
) -> None:
    """A final newline is not part of it."""
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


def test_secret_is_prompted_for_without_echo_if_stdin_is_a_terminal(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SIGNING_WEBHOOK_SECRET", raising=False)
    verify = ("webhook", "verify", saved, "--signature", hex_of(BODY))
    terminal = Terminal(*verify)
    terminal.wait_for("Webhook secret: ")  # click prints the space when the echo is off
    terminal.type(f"{SECRET}\n")
    shown = terminal.end()
    assert (shown.code, shown.lines[-2:]) == (0, ["valid: event evt_1 of type signing.completed", ""])
    assert SECRET not in shown.text
    assert screen(*verify, "--secret", "env:NOT_SET").code == 2


def test_doctor_exits_with_0_1_or_3_for_valid_explained_or_unexplained(saved: str, tmp_path: Path) -> None:
    """A secret from a file keeps its newline."""
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


def test_check_prints_a_line_per_check_and_exits_with_0_or_1() -> None:
    receiver = Receiver(WebhookVerifier(SECRET, max_body=100_000), lambda event: None, body_timeout=1.0)
    with serve("aiohttp", receiver) as port:
        options = ["--slow-limit", "20", "--over-long", "200000", "--secret", "env:SIGNING_WEBHOOK_SECRET"]
        url = f"http://127.0.0.1:{port}{PATH}"
        done = run("check", url, *options)
        assert done.exit_code == 0, done.output
        assert done.output.count("ok    ") == 9
        assert done.output.endswith("all 9 checks passed\n")
        wrong = run("check", url, *options, secret="another")
        assert wrong.exit_code == 1
        assert "FAIL  valid delivery" in wrong.output
        assert "expected 2xx: valid deliveries are rejected" in wrong.output
        as_json = run("check", url, *options, "--json")
        facts = json.loads(as_json.output)
        assert (facts["ok"], len(facts["checks"]), facts["checks"][0]["got"]) == (True, 9, "202")


def test_check_of_an_unreachable_endpoint_exits_with_3() -> None:
    done = run("check", "http://127.0.0.1:1/")
    assert done.exit_code == 3
    assert "could not connect to" in done.output
    done = run("check", "http://127.0.0.1:1/", "--json")
    assert (done.exit_code, json.loads(done.output)["ok"]) == (3, False)


def test_secret_may_be_in_the_settings_file(run: Run, tmp_path: Path) -> None:
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
    assert "settings.toml: must be a non-empty string" in ran.error["message"]
