"""`webhook`: output, JSON and exit codes, and that a secret is never an argument."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from signing_async.webhooks import Receiver, WebhookVerifier
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal, screen
from tests.webhooks.deliveries import SECRET, event_body, hex_of
from tests.webhooks.servers import PATH, serve

BODY = event_body("evt_1", signing={"id": "sig_1"})


@pytest.fixture(autouse=True)
def saved(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a delivery and set its secret."""
    (tmp_path / "delivery.json").write_bytes(BODY)
    monkeypatch.setenv("SIGNING_WEBHOOK_SECRET", SECRET)


def test_verify_shows_the_event_of_a_valid_delivery(run: Run) -> None:
    ran = run("webhook", "verify", "delivery.json", "--signature", hex_of(BODY))
    assert (ran.code, ran.out) == (0, "valid: event evt_1 of type signing.completed\n")
    ran = run("webhook", "verify", "delivery.json", "-H", f"x-signature: {hex_of(BODY)}", "--json")
    event = {"id": "evt_1", "type": "signing.completed", "signing_id": "sig_1"}
    assert ran.lines == [{"valid": True, "event": event}]


def test_valid_signature_over_any_body_exits_with_0(run: Run) -> None:
    evil = json.dumps({"event": {"id": "a", "type": "x\x1b]0;title\x07\ny"}}).encode()
    for body, shown in (
        (evil, "valid: event a of type x\ufffd]0;title\ufffd y\n"),
        (b"[]", "valid signature, but not an event: the body must be a JSON object, got a list\n"),
        (b'{"id": "a"}', "valid: event a of type unknown\n"),
    ):
        ran = run("webhook", "verify", "-", "--signature", hex_of(body), stdin=body)
        assert (ran.code, ran.out) == (0, shown)


def test_verify_exits_with_1_and_the_reason_for_an_invalid_signature_or_an_old_one(run: Run) -> None:
    ran = run("webhook", "verify", "delivery.json", "--signature", hex_of(BODY, "another"))
    assert (ran.code, ran.out) == (1, "not valid: no secret matches the signature\n")
    ran = run("webhook", "verify", "delivery.json", "--header", "x-signature: ", "--json")
    facts = {"valid": False, "reason": "missing", "message": "X-Signature is missing or empty"}
    assert (ran.code, ran.lines) == (1, [facts])
    old = f"t=1700000000,v1={hex_of(b'1700000000.' + BODY)}"
    verify = ("webhook", "verify", "delivery.json", "--scheme", "stripe", "--signature", old)
    assert (run(*verify).code, run(*verify, "--any-age").code) == (1, 0)


def test_secret_is_read_without_its_newline_from_a_file_variable_or_standard_input(run: Run) -> None:
    for ending, code in (("\n", 0), ("\n\n", 1)):
        Path("secret").write_text(f"{SECRET}{ending}")
        for source in ("file:secret", "env:OTHER", "-"):
            verify = ("webhook", "verify", "delivery.json", "--signature", hex_of(BODY), "--secret", source)
            assert run(*verify, stdin=f"{SECRET}{ending}".encode(), OTHER=f"{SECRET}{ending[1:]}").code == code


def test_secret_may_be_in_the_settings_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIGNING_WEBHOOK_SECRET")
    settings = Path("settings.toml")
    settings.touch(0o600)
    settings.write_text(f'webhook_secret = "{SECRET}"')
    verify = ("webhook", "verify", "delivery.json", "--signature", hex_of(BODY))
    assert run(*verify, "--config", "settings.toml").code == 0
    ran = run(*verify)
    assert (ran.code, "no secret: set SIGNING_WEBHOOK_SECRET" in ran.err) == (2, True)


def test_secret_is_prompted_for_without_echo_if_stdin_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIGNING_WEBHOOK_SECRET")
    verify = ("webhook", "verify", "delivery.json", "--signature", hex_of(BODY))
    terminal = Terminal(*verify)
    terminal.wait_for("Webhook secret: ")  # click prints the space when the echo is off
    terminal.type(f"{SECRET}\n")
    shown = terminal.end()
    assert (shown.code, shown.text.endswith("\nvalid: event evt_1 of type signing.completed\n")) == (0, True)
    assert SECRET not in shown.text
    assert screen(*verify, "--secret", "env:NOT_SET").code == 2


def test_doctor_exits_with_0_1_or_3_for_valid_explained_or_unexplained(run: Run) -> None:
    """A secret from a file keeps its newline."""
    Path("secret").write_text(SECRET + "\n")
    doctor = ("webhook", "doctor", "delivery.json", "--signature")
    ran = run(*doctor, hex_of(BODY))
    assert (ran.code, ran.out) == (0, "valid: hex of the raw body\n")
    ran = run(*doctor, hex_of(BODY), "--secret", "file:secret")
    assert (ran.code, "the secret has a trailing newline" in ran.out) == (1, True)
    ran = run(*doctor, hex_of(BODY, "another"), "--json")
    (found,) = ran.lines
    assert (ran.code, found["accepted"], found["explained"]) == (3, False, False)
    assert found["findings"][0] == "nothing matches"
    ran = run(*doctor, hex_of(b"1700000000." + BODY), "-H", "X-Stamp: 1700000000")
    assert 'timestamp_header="x-stamp"' in ran.out


def test_check_prints_a_line_per_check_and_exits_with_0_1_or_3(run: Run) -> None:
    receiver = Receiver(WebhookVerifier(SECRET, max_body=100_000), lambda event: None, body_timeout=0.3)
    with serve("aiohttp", receiver) as port:
        check = ("webhook", "check", f"http://127.0.0.1:{port}{PATH}", "--slow-limit", "20", "--over-long", "200000")
        ran = run(*check)
        assert ran.code == 0, ran.out
        assert ran.out.count("ok    ") == 9
        assert ran.out.endswith("all 9 checks passed\n")
        ran = run(*check, SIGNING_WEBHOOK_SECRET="another")
        assert ran.code == 1
        assert "FAIL  valid delivery" in ran.out
        assert "expected 2xx: valid deliveries are rejected" in ran.out
        (facts,) = run(*check, "--json").lines
        assert (facts["ok"], len(facts["checks"]), facts["checks"][0]["got"]) == (True, 9, "202")
    ran = run(*check)
    assert (ran.code, "could not connect to" in ran.err) == (3, True)
    ran = run(*check, "--json")
    assert (ran.code, ran.lines[0]["ok"]) == (3, False)
