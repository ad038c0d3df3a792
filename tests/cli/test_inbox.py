"""`inbox`: listing, showing, retrying and purging. The tests of `storage` have the differences of PostgreSQL."""

from __future__ import annotations

import asyncio
import base64
import os
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


@pytest.fixture
def inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inbox:
    """The inbox named by SIGNING_INBOX; it is not open, and does not exist."""
    monkeypatch.setenv("SIGNING_INBOX", str(tmp_path / "inbox.db"))
    return Inbox(tmp_path / "inbox.db")


def fill(closed: Inbox) -> None:
    """Store an event of each kind."""

    async def fill() -> None:
        async with closed as inbox:
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


def test_list_and_show_print_stored_events(inbox: Inbox, run: Run) -> None:
    """A list is in order of arrival, and filtered by options."""
    fill(inbox)
    ran = run("inbox", "list")
    rows = [line.split()[:2] for line in ran.out.splitlines()]
    assert rows[0] == ["ID", "STATUS"]
    assert rows[1:4] == [[name, name] for name in ("handled", "dropped", "dead")]
    assert rows[4:] == [[name, "pending"] for name in ("waiting", "pending")]
    assert "ValueError: no archive\ufffd[2J" in ran.out
    lines = run("inbox", "list", "--json").lines
    assert (lines[2]["signing_id"], lines[2]["attempts"], lines[2]["due_at"]) == ("sig-2", 1, None)
    assert lines[2]["error"].startswith("ValueError: no archive")
    assert datetime.fromisoformat(lines[3]["due_at"]) > NOW
    assert "body" not in lines[0]
    for options, expected, remark in (
        ("--status dead", "dead", ""),
        ("--type recipient.*", "handled dead pending", ""),
        ("--since 110h --until 60h", "dropped dead", ""),
        ("--limit 2", "handled dropped", "There are more than 2: use --all, or a filter such as --since.\n"),
        ("--all", "handled dropped dead waiting pending", ""),
        ("--type none", "", "No events.\n"),
    ):
        ran = run("inbox", "list", *options.split(), "--json")
        assert [line["id"] for line in ran.lines] == expected.split(), options
        assert ('"more": true' in ran.err) is (options == "--limit 2")
        assert run("inbox", "list", *options.split()).err == remark
    shown = run("inbox", "show", "dead").out
    assert shown.startswith("dead\n")
    for line in ("status       dead", "signing_id   sig-2", '"id": "dead"', "ValueError: no archive\ufffd[2J"):
        assert line in shown
    assert "due_at" in run("inbox", "show", "waiting").out
    (facts,) = run("inbox", "show", "dead", "--json").lines
    assert (facts["payload"]["event"]["type"], facts["payload_problem"]) == ("recipient.signed", None)


@pytest.mark.usefixtures("inbox")
def test_payload_of_an_encrypted_inbox_needs_the_key(run: Run, tmp_path: Path) -> None:
    """All else is shown without it."""
    fill(Inbox(tmp_path / "inbox.db", key=KEY))
    assert len(run("inbox", "list", "--json").lines) == 5
    (facts,) = run("inbox", "show", "dead", "--json").lines
    assert (facts["status"], facts["payload"]) == ("dead", None)
    assert facts["payload_problem"].endswith("no key was given; set SIGNING_INBOX_KEY")
    assert run("inbox", "retry", "dead").code == 0
    (facts,) = run("inbox", "show", "dead", "--json", SIGNING_INBOX_KEY=KEY).lines
    assert facts["payload"]["event"]["id"] == "dead"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("dead handled", "handled dead pending"), ("--since 110h --until 60h", "dropped dead pending")],
)
def test_retried_events_are_due_with_no_attempts(arguments: str, expected: str, inbox: Inbox, run: Run) -> None:
    fill(inbox)
    ran = run("inbox", "retry", *arguments.split())
    assert (ran.code, ran.out) == (0, "2 events will be handled again.\n")
    fresh = [line["id"] for line in run("inbox", "list", "--json").lines if line["attempts"] == 0]
    assert fresh == expected.split()


def test_purged_events_are_not_retried_and_younger_ones_not_purged(inbox: Inbox, run: Run) -> None:
    fill(inbox)
    assert run("inbox", "purge", "--older-than", "90d").out == "Purged 0 events.\n"
    assert run("inbox", "purge", "--older-than", "0d", "--json").lines == [{"purged": 2}]
    ran = run("inbox", "retry", "handled", "dead")
    assert ran.code == 1
    assert "1 event will be handled again. Left as they are, because they are being handled now or were" in ran.out
    assert run("inbox", "retry", "handled", "--json").lines == [{"retried": 0, "left": 1}]
    assert run("inbox", "show", "handled").out.endswith("purged\n")


def test_unknown_event_is_an_error_and_stats_count_events_and_the_wait_of_the_oldest_pending_one(
    inbox: Inbox, run: Run
) -> None:
    """An error changes nothing."""
    fill(inbox)
    for arguments in (["show", "nosuch"], ["retry", "dead", "nosuch"]):
        ran = run("inbox", *arguments, "--json")
        assert (ran.code, ran.error["type"], ran.error["message"]) == (1, "InboxError", "no such event: nosuch")
    assert run("inbox", "retry", "--dead", "--type", "signing.*").out == "0 events will be handled again.\n"
    (facts,) = run("inbox", "stats", "--json").lines
    seconds = facts.pop("oldest_pending_seconds")
    assert datetime.fromisoformat(facts.pop("oldest_pending")) == NOW - timedelta(days=2)
    assert facts == {"pending": 2, "handled": 1, "dropped": 1, "dead": 1}
    assert 0 <= seconds - 2 * 86_400 < 3600
    assert "2 d ago" in run("inbox", "stats").out


def test_inbox_of_the_settings_file_may_be_in_another_table_and_is_not_created(
    run: Run, postgres: PostgresServer
) -> None:
    dsn = asyncio.run(postgres.new_schema())
    settings = Path("settings.toml")
    settings.touch(0o600)
    settings.write_text(f'inbox = "{dsn}"')
    for _ in range(2):
        ran = run("inbox", "stats", "--config", "settings.toml", "--json")
        assert ran.code == 2
        assert ran.error["message"].endswith(" has no table 'signing_events': no receiver has used it yet")
    fill(PostgresInbox(dsn, table="app_events"))
    ran = run("inbox", "show", "dead", "--table", "app_events", "--config", "settings.toml", "--json")
    assert ran.lines[0]["id"] == "dead"
