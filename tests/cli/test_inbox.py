"""`inbox`: listing, showing, retrying and purging, in a file and in PostgreSQL."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from signing_async.postgres import PostgresInbox
from signing_async.webhooks import Inbox
from tests.cli.conftest import Run
from tests.postgres.server import PostgresServer
from tests.storage.event_stores import delivery

KEY = base64.b64encode(os.urandom(32)).decode()
NOW = datetime.now(UTC)


@pytest.fixture(params=["file", "postgresql"])
def open_inbox(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Inbox]:
    """Return a function that opens the inbox named by SIGNING_INBOX."""
    if request.param == "file":
        monkeypatch.setenv("SIGNING_INBOX", str(tmp_path / "inbox.db"))
        return lambda **settings: Inbox(tmp_path / "inbox.db", **settings)
    postgres: PostgresServer = request.getfixturevalue("postgres")
    dsn = asyncio.run(postgres.new_schema())
    monkeypatch.setenv("SIGNING_INBOX", dsn)
    return lambda **settings: PostgresInbox(dsn, **settings)


def fill(open_inbox: Callable[..., Inbox], **settings: str) -> None:
    """Store an event of each kind."""

    async def fill() -> None:
        async with open_inbox(**settings) as inbox:
            for number, status in enumerate(("handled", "dropped", "dead", "waiting", "pending")):
                received = NOW - timedelta(days=5 - number)
                kind = "signing.completed" if number % 2 else "recipient.signed"
                await inbox.add(*delivery(status, f"sig-{number}", type=kind, received=received))
                if status == "pending":
                    continue
                (claim,) = [each for each in await inbox.store.claim(5) if each.stored.id == status]
                if status == "waiting":
                    await inbox.store.postpone(claim, 3600, "TimeoutError: too slow")
                else:
                    error = None if status == "handled" else "ValueError: no archive\x1b[2J"
                    await inbox.store.settle(claim, type(claim.stored.status)(status), error)

    asyncio.run(fill())


def test_list_shows_events_in_order_of_arrival(open_inbox: Callable[..., Inbox], run: Run) -> None:
    fill(open_inbox)
    ran = run("inbox", "list")
    assert [line.split()[:2] for line in ran.out.splitlines()] == [
        ["ID", "STATE"],
        ["handled", "handled"],
        ["dropped", "dropped"],
        ["dead", "dead"],
        ["waiting", "pending"],
        ["pending", "pending"],
    ]
    assert "ValueError: no archive\ufffd[2J" in ran.out
    lines = run("inbox", "list", "--json").lines
    assert [line["id"] for line in lines] == ["handled", "dropped", "dead", "waiting", "pending"]
    assert (lines[2]["signing_id"], lines[2]["attempts"], lines[2]["due_at"]) == ("sig-2", 1, None)
    assert lines[2]["error"].startswith("ValueError: no archive")
    assert datetime.fromisoformat(lines[3]["due_at"]) > NOW
    assert "body" not in lines[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--status", "dead"], "dead"),
        (["--type", "recipient.*"], "handled dead pending"),
        (["--since", "110h", "--until", "60h"], "dropped dead"),
        (["--limit", "2"], "handled dropped"),
        (["--all"], "handled dropped dead waiting pending"),
        (["--type", "none"], ""),
    ],
)
def test_list_filters_events(options: list[str], expected: str, open_inbox: Callable[..., Inbox], run: Run) -> None:
    fill(open_inbox)
    ran = run("inbox", "list", *options, "--json")
    assert [line["id"] for line in ran.lines] == expected.split()
    assert ('"more": true' in ran.err) is (options == ["--limit", "2"])
    remark = run("inbox", "list", *options).err
    assert remark == ("No events.\n" if not expected else remark if options == ["--limit", "2"] else "")


def test_show_prints_the_event_with_its_payload(open_inbox: Callable[..., Inbox], run: Run) -> None:
    fill(open_inbox)
    shown = run("inbox", "show", "dead").out
    assert shown.startswith("dead\n")
    for line in ("status       dead", "signing_id   sig-2", '"id": "dead"', "ValueError: no archive\ufffd[2J"):
        assert line in shown
    assert "due_at" in run("inbox", "show", "waiting").out
    (facts,) = run("inbox", "show", "dead", "--json").lines
    assert facts["payload"]["event"]["type"] == "recipient.signed"
    assert facts["payload_problem"] is None


@pytest.mark.parametrize("command", ["show", "retry"])
def test_unknown_event_is_an_error_and_nothing_is_changed(
    command: str, open_inbox: Callable[..., Inbox], run: Run
) -> None:
    fill(open_inbox)
    ran = run("inbox", command, *(["dead"] if command == "retry" else []), "nosuch", "--json")
    assert (ran.code, ran.error["type"], ran.error["message"]) == (1, "InboxError", "no such event: nosuch")
    assert run("inbox", "stats", "--json").lines[0]["dead"] == 1


def test_payload_of_an_encrypted_inbox_needs_the_key(
    open_inbox: Callable[..., Inbox], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else is shown without it."""
    fill(open_inbox, key=KEY)
    assert len(run("inbox", "list", "--json").lines) == 5
    (facts,) = run("inbox", "show", "dead", "--json").lines
    assert (facts["status"], facts["payload"]) == ("dead", None)
    assert facts["payload_problem"].endswith("no key was given; set SIGNING_INBOX_KEY")
    assert run("inbox", "retry", "dead").code == 0
    monkeypatch.setenv("SIGNING_INBOX_KEY", KEY)
    (facts,) = run("inbox", "show", "dead", "--json").lines
    assert facts["payload"]["event"]["id"] == "dead"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["dead", "handled"], "handled dead pending"),
        (["--since", "110h", "--until", "60h"], "dropped dead pending"),
        (["--dead", "--type", "signing.*"], "pending"),
    ],
)
def test_retried_events_are_due_with_no_attempts(
    arguments: list[str], expected: str, open_inbox: Callable[..., Inbox], run: Run
) -> None:
    fill(open_inbox)
    ran = run("inbox", "retry", *arguments)
    count = len(expected.split()) - ("recipient.*" not in arguments)
    assert (ran.code, ran.out) == (0, f"{count} event{'' if count == 1 else 's'} will be handled again.\n")
    fresh = [line["id"] for line in run("inbox", "list", "--json").lines if line["attempts"] == 0]
    assert fresh == expected.split()


def test_events_that_cannot_be_retried_are_reported(open_inbox: Callable[..., Inbox], run: Run) -> None:
    """They are being handled, or purged."""
    fill(open_inbox)
    assert run("inbox", "purge", "--older-than", "0d").out == "Purged 2 events.\n"
    ran = run("inbox", "retry", "handled", "dead")
    assert ran.code == 1
    assert "1 event will be handled again. Left as they are, because they are being handled now or were" in ran.out
    assert run("inbox", "retry", "handled", "--json").lines == [{"retried": 0, "left": 1}]
    assert run("inbox", "show", "handled").out.endswith("purged\n")


def test_purge_keeps_what_is_younger_than_the_given_age(open_inbox: Callable[..., Inbox], run: Run) -> None:
    fill(open_inbox)
    assert run("inbox", "purge", "--older-than", "90d").out == "Purged 0 events.\n"
    assert run("inbox", "purge", "--older-than", "0d", "--json").lines == [{"purged": 2}]
    for age, words in (("soon", "must be a duration such as 90min, 12h, 7d or 2w"), ("2931-01-01", "is in the future")):
        ran = run("inbox", "purge", "--older-than", age)
        assert ran.code == 2
        assert words in ran.err
    assert run("inbox", "purge").code == 2


def test_stats_count_events_and_the_wait_of_the_oldest_pending_one(open_inbox: Callable[..., Inbox], run: Run) -> None:
    fill(open_inbox)
    (facts,) = run("inbox", "stats", "--json").lines
    seconds = facts.pop("oldest_pending_seconds")
    assert datetime.fromisoformat(facts.pop("oldest_pending")) == NOW - timedelta(days=2)
    assert facts == {"pending": 2, "handled": 1, "dropped": 1, "dead": 1}
    assert 0 <= seconds - 2 * 86_400 < 3600
    assert "2 d ago" in run("inbox", "stats").out
    run("inbox", "list")


# Which inbox


def test_missing_inbox_is_an_error_and_is_not_created(
    run: Run, tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("inbox", "list", "--inbox", "no/such.db")
    assert (ran.code, ran.err) == (2, "Error: the inbox 'no/such.db' does not exist\n")
    assert not (tmp_path / "no").exists()
    dsn = asyncio.run(postgres.new_schema())
    monkeypatch.setenv("SIGNING_INBOX", dsn)
    for _ in range(2):
        ran = run("inbox", "stats", "--json")
        assert ran.code == 2
        assert ran.error["message"].endswith(" has no table 'signing_events': no receiver has used it yet")
    monkeypatch.delenv("SIGNING_INBOX")
    ran = run("inbox", "list")
    assert ran.code == 2
    assert "no inbox: use --inbox PATH, or set SIGNING_INBOX" in ran.err
    assert "must not be empty" in run("inbox", "list", "--inbox", "").err


def test_inbox_may_be_in_the_settings_file_or_in_another_table(
    run: Run, tmp_path: Path, postgres: PostgresServer
) -> None:
    dsn = asyncio.run(postgres.new_schema())
    fill(lambda: PostgresInbox(dsn, table="app_events"))
    settings = tmp_path / "settings.toml"
    settings.touch(0o600)
    settings.write_text(f'inbox = "{dsn}"')
    ran = run("inbox", "show", "dead", "--table", "app_events", "--config", "settings.toml", "--json")
    assert json.loads(ran.out)["id"] == "dead"
