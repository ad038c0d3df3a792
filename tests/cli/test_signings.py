"""list, show, create and send."""

from __future__ import annotations

import io
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from signing_async.cli.signings import moment
from tests.cli.conftest import Run
from tests.cli.service import Service


def test_list_for_people(run: Run, service: Service) -> None:
    """A line each, whole where there is no terminal, and a remark where there are none."""
    assert run("list").err == "There are none.\n"
    signing = service.draft(name="Lease åäö")
    ran = run("list")
    assert (ran.code, ran.err) == (0, "")
    head, line = ran.out.splitlines()
    assert head.split() == ["ID", "STATE", "UPDATED", "NAME"]
    assert line.startswith(f"{signing}  draft  ")
    assert line.endswith("  Lease åäö")


def test_list_filters(run: Run, service: Service) -> None:
    """By state, by a part of the name in any case, and by when they were updated."""
    old = service.draft("a.pdf", to=("a@example.com",), name="Old LEASE", sent=True)
    service.do(service.sandbox.clock.advance, days=10)
    new = service.draft(name="New lease")
    other = service.draft(name="Other")

    def listed(*filters: str) -> set[str]:
        return {line["id"] for line in run("list", "--json", *filters).lines}

    assert listed() == {old, new, other}
    assert listed("--name", "LeAsE") == {old, new}
    assert listed("--state", "sent") == {old}
    assert listed("--state", "sent", "--state", "draft") == {old, new, other}
    between = (datetime.now(UTC) + timedelta(days=5)).isoformat()
    assert listed("--updated-since", between) == {new, other}
    assert listed("--updated-before", between, "--name", "lease") == {old}
    assert listed("--updated-since", "2w", "--updated-before", "1min") == set()


def test_a_signing_without_a_time_is_in_no_span(run: Run, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be told is left out where it is asked for."""
    from signing_async.cli.signings import _Wanted
    from signing_async.models import Signing

    assert Signing("1") in _Wanted((), None, None, None)
    assert Signing("1") not in _Wanted((), None, datetime.now(UTC), None)


def test_a_list_goes_on_where_it_stopped(run: Run, service: Service) -> None:
    """In the middle of a page too: nothing is shown twice and nothing is left out."""
    everyone = [service.draft(name=f"Lease {number}") for number in range(7)]
    seen: list[str] = []
    cursor: list[str] = []
    stops = 0
    while True:
        ran = run("list", "--json", "--limit", "2", *cursor)
        seen += [line["id"] for line in ran.lines]
        if not ran.err:
            break
        cursor = ["--cursor", json.loads(ran.err)["next_cursor"]]
        stops += 1
    assert (sorted(seen), stops) == (sorted(everyone), 3)
    assert "--cursor 2. goes on" in run("list", "--limit", "2").err
    assert len(run("list", "--all", "--json").lines) == 7


def test_a_list_goes_on_from_a_later_page(run: Run, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor of the service is part of what is said."""
    everyone = {service.draft(name=str(number)) for number in range(130)}
    first = run("list", "--json", "--limit", "120")
    cursor = json.loads(first.err)["next_cursor"]
    rest = run("list", "--json", "--cursor", cursor)
    assert {line["id"] for line in (*first.lines, *rest.lines)} == everyone
    assert len(first.lines) + len(rest.lines) == 130
    assert not cursor.endswith(".")


@pytest.mark.parametrize("cursor", ["abc", "x.y", ".y", "1234567890.", "²."])
def test_a_cursor_that_no_list_said(cursor: str, run: Run) -> None:
    """Is refused with its text."""
    ran = run("list", "--cursor", cursor)
    assert (ran.code, ran.out) == (2, "")
    assert repr(cursor) in ran.err


@pytest.mark.parametrize(
    ("text", "before"),
    [("90min", timedelta(minutes=90)), ("12h", timedelta(hours=12)), ("7d", timedelta(7)), ("2w", timedelta(14))],
)
def test_spans(text: str, before: timedelta) -> None:
    """A span of time is counted back from now."""
    assert abs(datetime.now(UTC) - before - moment(text)) < timedelta(minutes=1)


def test_moments(run: Run) -> None:
    """A day or a moment; anything else is a sentence that shows what would do."""
    assert moment("2031-03-31T12:00:00+02:00") == datetime(2031, 3, 31, 10, tzinfo=UTC)
    for text in ("soon", "999999w", "7x"):
        ran = run("list", "--updated-since", text)
        assert ran.code == 2
        assert f"{text!r} is neither a span such as 90min" in ran.err


def test_show(run: Run, service: Service) -> None:
    """The signing, its documents and who has signed; all of it for machines too."""
    empty = run("show", service.draft(name="Nothing in it"))
    assert "No documents yet." in empty.out
    assert "No recipients yet." in empty.out
    signing = service.draft("lease.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    anna = next(one for one in service.do(service.sandbox.recipients, signing) if one.email == "anna@example.com")
    service.call(service.sandbox.sign(anna.id))
    said = run("show", signing).out
    for words in ("Lease", "sent", "lease.pdf", "anna@example.com", "signed", "bo@example.com", "pending"):
        assert words in said
    (facts,) = run("show", signing, "--json").lines
    assert (facts["state"], facts["documents"][0]["name"]) == ("sent", "lease.pdf")
    assert {one["email"]: one["finished"] for one in facts["recipients"]} == {
        "anna@example.com": True,
        "bo@example.com": False,
    }
    service.call(service.sandbox.complete(signing))
    assert "signed 2" in run("show", signing).out


def test_create(run: Run, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id alone is on standard output; the message may come from a file or from standard input."""
    ran = run("create", "Lease 2031", "--signing-order", "sequential", "--language", "sv", "--message", "Please.")
    signing = service.do(service.sandbox.signing, ran.out.strip())
    assert (signing.name, signing.message, ran.err) == ("Lease 2031", "Please.", "A draft was created: Lease 2031\n")
    (tmp_path / "message.txt").write_text("Hej åäö\n", "utf-8")
    (facts,) = run("create", "x", "--message-file", "message.txt", "--json").lines
    assert (facts["message"], facts["state"]) == ("Hej åäö", "draft")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    (facts,) = run("create", "x", "--message-file", "-", "--json").lines
    assert facts["message"] == "from a pipe"


def test_languages_are_named_as_the_service_names_them(run: Run) -> None:
    """In capitals, although any case will do."""
    assert "--language [EN|SV] " in run("create", "--help").out


def test_create_what_cannot_be(run: Run, service: Service, tmp_path: Path) -> None:
    """Each mistake is named; nothing is sent."""
    (tmp_path / "binary").write_bytes(b"\xff")
    wrong: list[tuple[list[str], str]] = [
        (["x", "--message", "a", "--message-file", "b"], "exclude each other"),
        (["x", "--message-file", "none"], "none cannot be read: No such file"),
        (["x", "--message-file", "binary"], "it is not UTF-8"),
        (["x", "--language", "FI"], "'FI' is not one of"),
        (["x", "--message", "a" * 401], "at most 400 characters, got 401"),
        ([" "], "name: must be a non-empty string"),
    ]
    for arguments, words in wrong:
        ran = run("create", *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert words in ran.err
    assert service.sandbox.requests == []


def test_send(run: Run, service: Service) -> None:
    """Once; what the service says of a draft that cannot be sent is told, with its code."""
    signing = service.draft("lease.pdf", to=("anna@example.com",))
    assert run("send", signing).out == f"{signing} was sent\n"
    assert service.do(lambda: service.sandbox.signing(signing).state) == "sent"
    ran = run("send", service.draft(), "--json")
    assert (ran.code, ran.out) == (1, "")
    assert (ran.error["type"], ran.error["code"], ran.error["status"]) == ("CannotBeSent", "cannot_be_sent", 400)


def test_send_whose_outcome_is_unknown(run: Run, service: Service) -> None:
    """Has an exit code of its own: the signing may have been sent."""
    signing = service.draft("lease.pdf", to=("anna@example.com",))
    service.do(service.sandbox.faults.add, "signings.send", "drop-after-commit")
    service.do(service.sandbox.faults.add, "signings.get", "500", None)
    ran = run("send", signing, "--json", "--timeout", "1")
    assert ran.code == 3
    assert ran.error["exit_code"] == 3
    assert ran.error["type"].startswith("OutcomeUnknown")


@pytest.mark.parametrize("command", ["show", "send", "watch"])
def test_a_signing_that_is_not_there(command: str, run: Run) -> None:
    """Is the service's own word, in a sentence."""
    ran = run(command, "no-such-signing")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("Error: HTTP 404 on signings.")
    assert ran.err.count("\n") == 1


def test_names_do_not_drive_the_terminal(run: Run, service: Service) -> None:
    """Controls, and marks that turn text around, are shown as what they are; for machines they are escaped."""
    name = "a\x1b]0;title\x07\u202eb\nc"
    signing = service.draft(name=name)
    for ran in (run("list"), run("show", signing), run("create", name)):
        assert not {"\x1b", "\x07", "\u202e"} & {*ran.out, *ran.err}
    (facts,) = run("list", "--json", "--limit", "1").lines
    assert facts["name"] == name
    assert "\x1b" not in run("list", "--json").out
