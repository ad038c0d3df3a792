"""`list`, `show`, `create` and `send`."""

from __future__ import annotations

import io
import json
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.service import Service


def test_list_prints_a_whole_line_per_signing_in_a_pipe(run: Run, service: Service) -> None:
    assert run("list").err == "No signings.\n"
    signing = service.draft(name="Lease åäö")
    ran = run("list")
    assert (ran.code, ran.err) == (0, "")
    head, line = ran.out.splitlines()
    assert head.split() == ["ID", "STATE", "UPDATED", "NAME"]
    assert line.startswith(f"{signing}  draft  ")
    assert line.endswith("  Lease åäö")


def test_list_filters_by_state_name_and_time_of_update(run: Run, service: Service) -> None:
    old = service.draft("a.pdf", to=("a@example.com",), name="Old LEASE", sent=True)
    service.do(service.sandbox.clock.advance, days=10)
    new = service.draft(name="New lease")
    other = service.draft(name="Other")

    def listed(*filters: str) -> set[str]:
        return {line["id"] for line in run("list", "--json", *filters).lines}

    assert listed() == {old, new, other}
    assert listed("--name", "*LeAsE*") == {old, new}
    assert listed("--name", "new lease") == {new}
    assert listed("--state", "sent") == {old}
    assert listed("--state", "sent", "--state", "draft") == {old, new, other}
    between = (datetime.now(UTC) + timedelta(days=5)).isoformat()
    assert listed("--updated-since", between) == {new, other}
    assert listed("--updated-before", between, "--name", "*lease") == {old}
    assert listed("--updated-since", "2w", "--updated-before", "1min") == set()


def test_list_continues_from_its_cursor_within_a_page_without_gaps_or_repeats(run: Run, service: Service) -> None:
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
    assert run("list", "--limit", "2").err == "There may be more. Continue with: --cursor 2\n"
    assert len(run("list", "--cursor", "2", "--all", "--json").lines) == 5
    assert len(run("list", "--all", "--json").lines) == 7


def test_list_continues_from_a_later_page(run: Run, service: Service) -> None:
    everyone = {service.draft(name=str(number)) for number in range(40)}
    first = run("list", "--json", "--limit", "30")
    cursor = json.loads(first.err)["next_cursor"]
    rest = run("list", "--json", "--cursor", cursor)
    assert {line["id"] for line in (*first.lines, *rest.lines)} == everyone
    assert len(first.lines) + len(rest.lines) == 40
    assert re.fullmatch(r"\d+\.\w+", cursor)


def test_show_prints_the_signing_its_documents_and_recipients(run: Run, service: Service) -> None:
    empty = run("show", service.draft(name="Nothing in it"))
    assert "No documents yet." in empty.out
    assert "No recipients yet." in empty.out
    signing = service.draft("lease.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    anna = next(one for one in service.do(service.sandbox.recipients, signing) if one.email == "anna@example.com")
    service.call(service.sandbox.sign(anna.id))
    printed = run("show", signing).out
    for text in ("Lease", "sent", "lease.pdf", "anna@example.com", "signed", "bo@example.com", "pending"):
        assert text in printed
    (facts,) = run("show", signing, "--json").lines
    assert (facts["state"], facts["documents"][0]["name"]) == ("sent", "lease.pdf")
    assert {one["email"]: one["finished"] for one in facts["recipients"]} == {
        "anna@example.com": True,
        "bo@example.com": False,
    }
    service.call(service.sandbox.complete(signing))
    assert "signed 2" in run("show", signing).out


def test_create_prints_only_the_id_and_reads_the_message_from_a_file_or_standard_input(
    run: Run, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("create", "Lease 2031", "--signing-order", "sequential", "--language", "sv", "--message", "Please.")
    signing = service.do(service.sandbox.signing, ran.out.strip())
    assert (signing.name, signing.message, ran.err) == ("Lease 2031", "Please.", "Created the draft Lease 2031.\n")
    (tmp_path / "message.txt").write_text("Hej åäö\n", "utf-8")
    (facts,) = run("create", "x", "--message-file", "message.txt", "--json").lines
    assert (facts["message"], facts["state"]) == ("Hej åäö", "draft")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    (facts,) = run("create", "x", "--message-file", "-", "--json").lines
    assert facts["message"] == "from a pipe"


def test_send_prints_the_signing_or_the_services_refusal(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com",))
    assert run("send", signing).out == f"Sent {signing}.\n"
    assert service.do(lambda: service.sandbox.signing(signing).state) == "sent"
    ran = run("send", service.draft(), "--json")
    assert (ran.code, ran.out) == (1, "")
    assert (ran.error["type"], ran.error["code"], ran.error["status"]) == ("CannotBeSent", "cannot_be_sent", 400)


def test_send_exits_with_3_if_the_outcome_is_unknown(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com",))
    service.do(service.sandbox.faults.add, "signings.send", "drop-after-commit")
    service.do(service.sandbox.faults.add, "signings.get", "500", None)
    ran = run("send", signing, "--json", "--timeout", "1")
    assert ran.code == 3
    assert ran.error["exit_code"] == 3
    assert ran.error["type"].startswith("OutcomeUnknown")
