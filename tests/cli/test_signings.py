"""`list`, `show`, `create`, `send` and `watch`."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.service import Service


def test_list_prints_a_whole_line_per_signing_and_filters_by_state_name_and_time_of_update(
    run: Run, service: Service
) -> None:
    assert run("list").err == "No signings.\n"
    old = service.draft("a.pdf", to=("a@example.com",), name="Old LEASE åäö", sent=True)
    ran = run("list")
    assert (ran.code, ran.err) == (0, "")
    head, line = ran.out.splitlines()
    assert head.split() == ["ID", "STATE", "UPDATED", "NAME"]
    assert line.startswith(f"{old}  sent   ")
    assert line.endswith("  Old LEASE åäö")
    service.do(service.sandbox.clock.advance, days=10)
    new = service.draft(name="New lease")
    other = service.draft(name="Other")
    between = (datetime.now(UTC) + timedelta(days=5)).isoformat()
    for filters, expected in (
        ((), {old, new, other}),
        (("--name", "*LeAsE*"), {old, new}),
        (("--name", "new lease"), {new}),
        (("--state", "sent"), {old}),
        (("--state", "sent", "--state", "draft"), {old, new, other}),
        (("--updated-since", between), {new, other}),
        (("--updated-before", between, "--name", "*lease*"), {old}),
        (("--updated-since", "2w", "--updated-before", "1min"), set()),
    ):
        assert {line["id"] for line in run("list", "--json", *filters).lines} == expected, filters


def test_list_continues_from_its_cursor_within_a_page_and_on_a_later_one(run: Run, service: Service) -> None:
    """Without gaps or repeats."""
    everyone = [service.draft(name=f"Lease {number}") for number in range(33)]
    seen: list[str] = []
    cursors: list[str] = []
    while True:
        ran = run("list", "--json", "--limit", "10", *(["--cursor", cursors[-1]] if cursors else []))
        seen += [line["id"] for line in ran.lines]
        if not ran.err:
            break
        cursors.append(json.loads(ran.err)["next_cursor"])
    assert (sorted(seen), cursors[0]) == (sorted(everyone), "10")
    assert re.fullmatch(r"\d+\.\w+", cursors[-1])
    assert run("list", "--limit", "2").err == "There may be more. Continue with: --cursor 2\n"
    assert len(run("list", "--cursor", "2", "--all", "--json").lines) == 31


def test_show_prints_the_signing_its_documents_and_recipients(run: Run, service: Service) -> None:
    empty = run("show", service.draft(name="Nothing in it"))
    assert "No documents yet." in empty.out
    assert "No recipients yet." in empty.out
    signing = service.draft("lease.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    service.call(service.sandbox.sign(service.recipient(signing, "anna@example.com").id))
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
    run: Run, service: Service, tmp_path: Path
) -> None:
    ran = run("create", "Lease 2031", "--signing-order", "sequential", "--language", "sv", "--message", "Please.")
    signing = service.do(service.sandbox.signing, ran.out.strip())
    assert (signing.name, signing.message, ran.err) == ("Lease 2031", "Please.", "Created the draft Lease 2031.\n")
    (tmp_path / "message.txt").write_text("Hej åäö\n", "utf-8")
    (facts,) = run("create", "x", "--message-file", "message.txt", "--json").lines
    assert (facts["message"], facts["state"]) == ("Hej åäö", "draft")
    (facts,) = run("create", "x", "--message-file", "-", "--json", stdin=b"from a pipe").lines
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
    service.fault("signings.send", "drop-after-commit")
    service.fault("signings.get", "500", None)
    ran = run("send", signing, "--json", "--timeout", "1")
    assert (ran.code, ran.error["exit_code"]) == (3, 3)
    assert ran.error["type"].startswith("OutcomeUnknown")


# Watching

WATCH = ("--poll", "0.05")


def _soon(service: Service, *steps: Callable[[], object]) -> threading.Thread:
    """Run these steps in a thread, each after the watch has read the signing again."""

    def work() -> None:
        for step in steps:
            reads = len(service.sandbox.requests_of("recipients.list"))
            while len(service.sandbox.requests_of("recipients.list")) < reads + 2:
                time.sleep(0.01)
            step()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_watch_prints_a_line_per_change_until_completion(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    anna, _ = service.do(service.sandbox.recipients, signing)
    thread = _soon(
        service,
        lambda: service.call(service.sandbox.sign(anna.id)),
        lambda: service.call(service.sandbox.complete(signing)),
    )
    ran = run("watch", signing, *WATCH)
    thread.join()
    assert (ran.code, ran.err) == (0, "")
    printed = [line.split("  ", 1)[1] for line in ran.out.splitlines()]
    assert printed[0] == "Lease is sent"
    assert printed[1] == f"{anna.email} has signed"
    assert sorted(printed[2:]) == ["Lease is completed", "bo@example.com has signed", "lease.pdf is signed"]


def test_watch_exits_with_6_for_a_cancelled_signing_and_1_if_its_first_call_times_out(
    run: Run, service: Service
) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    service.call(service.sandbox.cancel(signing))
    ran = run("watch", signing)
    assert (ran.code, ran.err) == (6, f"Error: {signing} was cancelled\n")
    assert run("watch", signing, "--json").error["exit_code"] == 6
    service.fault("signings.get", "slow", None, seconds=5)
    ran = run("watch", signing, "--for", "60", "--timeout", "0.2", "--json")
    assert (ran.code, ran.error["type"]) == (1, "RequestTimeout")  # and not the end of the wait


@pytest.mark.usefixtures("one_attempt")
def test_watch_as_json_waits_out_an_outage_with_a_warning_but_not_at_the_start(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    thread = _soon(
        service,
        lambda: service.fault("signings.get", "500", 2),
        lambda: service.call(service.sandbox.complete(signing)),
    )
    ran = run("watch", signing, *WATCH, "--json")
    thread.join()
    assert ran.code == 0
    assert '{"warning": "still watching: HTTP 500' in ran.err
    # In between, a read may find the signing signed but not yet sealed.
    assert [line["state"] for line in ran.lines] in (["sent", "completed"], ["sent", "sent", "completed"])
    assert ran.lines[-1]["recipients"][0]["finished"] is True
    assert ran.lines[-1]["documents"][0]["completed_at"]
    service.fault("signings.get", "500")
    assert run("watch", signing).code == 1
