"""add-recipient and remind."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.service import Service


def test_add_a_recipient(run: Run, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fields that have an option, and others from options, a file or standard input; the id alone is printed."""
    signing = service.draft()
    ran = run("add-recipient", signing, "anna@example.com", "--first-name", "Anna", "--last-name", "Berg")
    assert (ran.code, ran.err) == (0, "anna@example.com was added\n")
    (anna,) = service.do(service.sandbox.recipients, signing)
    assert (anna.id, anna.first_name, anna.last_name) == (ran.out.strip(), "Anna", "Berg")

    arguments = ["add-recipient", signing, "bo@example.com", "--method", "bankid", "--order", "2", "--json"]
    (tmp_path / "fields.json").write_text('{"personal_number": "198001011234", "phone": "1"}')
    (facts,) = run(*arguments, "--fields", "fields.json", "--field", "phone=+46=1").lines
    assert (facts["signing_method"], facts["order"], facts["phone"]) == ("bankid", 2, "+46=1")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"phone": "2"}')))
    (facts,) = run("add-recipient", signing, "c@example.com", "--fields", "-", "--json").lines
    assert facts["phone"] == "2"


def test_who_cannot_be_a_recipient(run: Run, service: Service, tmp_path: Path) -> None:
    """Each mistake is named, and nothing is sent."""
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    for arguments, words in (
        (["nobody"], "email: must be an e-mail address, got 'nobody'"),
        (["a@b", "--order", "0"], "order: must be an integer of at least 1"),
        (["a@b", "--order", "x"], "'x' is not a valid integer"),
        (["a@b", "--field", "x"], "'x' is not of the form NAME=VALUE"),
        (["a@b", "--field", "=x"], "'=x' is not of the form NAME=VALUE"),
        (["a@b", "--field", "order=1"], "extra: pass order as an argument of its own"),
        (["a@b", "--fields", "list.json"], "list.json holds no JSON object"),
        (["a@b", "--fields", "broken.json"], "broken.json holds no JSON object"),
        (["a@b", "--fields", "none.json"], "none.json cannot be read"),
    ):
        ran = run("add-recipient", "1", *arguments)
        assert (ran.code, ran.out) == (2, ""), arguments
        assert words in ran.err
    assert service.sandbox.requests == []


def test_remind_one(run: Run, service: Service) -> None:
    """By address, in any case, or by id."""
    signing = service.draft("lease.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    bo = next(one for one in service.do(service.sandbox.recipients, signing) if one.email == "bo@example.com")
    assert run("remind", signing, "Anna@Example.com").out == "anna@example.com was reminded\n"
    (facts,) = run("remind", signing, bo.id, "--json").lines
    assert facts == {"id": bo.id, "email": "bo@example.com", "reminded": True}
    reminded = service.do(lambda: [one for one in service.sandbox.notifications if one.kind == "reminder"])
    assert len(reminded) == 2


def test_remind_whom_there_is_no_telling(run: Run, service: Service) -> None:
    """Nobody of that name, or two, or nobody named: nobody is reminded."""
    signing = service.draft("lease.pdf", to=("anna@example.com", "anna@example.com"), sent=True)
    for arguments, words in (
        (["x@example.com"], "no recipient of this signing has the id or the address 'x@example.com'"),
        (["anna@example.com"], "'anna@example.com' is 2 recipients of this signing"),
        ([], "say whom to remind"),
        (["anna@example.com", "--all-pending"], "say whom to remind"),
    ):
        ran = run("remind", signing, *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert words in ran.err
    assert not [one for one in service.do(lambda: service.sandbox.notifications) if one.kind == "reminder"]


def test_remind_all_pending(run: Run, service: Service) -> None:
    """Those who have not finished; one that fails does not stop the others, and the exit code tells."""
    signing = service.draft("lease.pdf", to=("anna@example.com", "bo@example.com", "c@example.com"), sent=True)
    anna = next(one for one in service.do(service.sandbox.recipients, signing) if one.email == "anna@example.com")
    service.call(service.sandbox.sign(anna.id))
    assert run("remind", signing, "--all-pending").out == "bo@example.com was reminded\nc@example.com was reminded\n"
    service.do(service.sandbox.faults.add, "recipients.remind", "drop-after-commit")
    ran = run("remind", signing, "--all-pending", "--json")
    assert (ran.code, [line["reminded"] for line in ran.lines]) == (3, [False, True])
    assert ran.lines[0]["error"]["type"] == "OutcomeUnknown"
    service.do(service.sandbox.faults.add, "recipients.remind", "drop-after-commit")
    ran = run("remind", signing, "--all-pending")
    assert ran.out == "c@example.com was reminded\n"
    assert ran.err.startswith("Error: bo@example.com: ")
    service.call(service.sandbox.complete(signing))
    assert run("remind", signing, "--all-pending").err == "Nobody is pending.\n"
