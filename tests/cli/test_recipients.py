"""`add-recipient` and `remind`."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run
from tests.cli.service import Service


def test_add_recipient_takes_fields_from_options_a_file_or_standard_input_and_prints_the_id(
    run: Run, service: Service, tmp_path: Path
) -> None:
    signing = service.draft()
    ran = run("add-recipient", signing, "anna@example.com", "--first-name", "Anna", "--last-name", "Berg")
    assert (ran.code, ran.err) == (0, "Added anna@example.com.\n")
    (anna,) = service.do(service.sandbox.recipients, signing)
    assert (anna.id, anna.first_name, anna.last_name) == (ran.out.strip(), "Anna", "Berg")

    arguments = ["add-recipient", signing, "bo@example.com", "--method", "bankid", "--order", "2", "--json"]
    (tmp_path / "fields.json").write_text('{"personal_number": "198001011234", "phone": "1"}')
    (facts,) = run(*arguments, "--fields", "fields.json", "--field", "phone=+46=1").lines
    assert (facts["signing_method"], facts["order"], facts["phone"]) == ("bankid", 2, "+46=1")
    (facts,) = run("add-recipient", signing, "c@example.com", "--fields", "-", "--json", stdin=b'{"phone": "2"}').lines
    assert facts["phone"] == "2"


def test_remind_finds_the_recipient_by_address_in_any_case_or_by_id(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    bo = service.recipient(signing, "bo@example.com")
    assert run("remind", signing, "Anna@Example.com").out == "Reminded anna@example.com.\n"
    (facts,) = run("remind", signing, bo.id, "--json").lines
    assert facts == {"id": bo.id, "email": "bo@example.com", "reminded": True}
    reminded = service.do(lambda: [one for one in service.sandbox.notifications if one.kind == "reminder"])
    assert len(reminded) == 2


def test_remind_refuses_an_unknown_or_ambiguous_recipient(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com", "anna@example.com"), sent=True)
    for recipient, message in (
        ("x@example.com", "no recipient of the signing with the id or address 'x@example.com'"),
        ("anna@example.com", "2 recipients of the signing with the id or address 'anna@example.com': use an id"),
    ):
        ran = run("remind", signing, recipient)
        assert (ran.code, ran.out) == (2, "")
        assert message in ran.err
    assert not [one for one in service.do(lambda: service.sandbox.notifications) if one.kind == "reminder"]


def test_remind_all_pending_continues_after_a_failure_and_exits_with_3_for_an_unknown_outcome(
    run: Run, service: Service
) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com", "bo@example.com", "c@example.com"), sent=True)
    service.call(service.sandbox.sign(service.recipient(signing, "anna@example.com").id))
    assert run("remind", signing, "--all-pending").out == "Reminded bo@example.com.\nReminded c@example.com.\n"
    service.fault("recipients.remind", "drop-after-commit")
    ran = run("remind", signing, "--all-pending", "--json")
    assert (ran.code, [line["reminded"] for line in ran.lines]) == (3, [False, True])
    assert ran.lines[0]["error"]["type"] == "OutcomeUnknown"
    service.fault("recipients.remind", "drop-after-commit")
    ran = run("remind", signing, "--all-pending")
    assert ran.out == "Reminded c@example.com.\n"
    assert ran.err.startswith("Error: bo@example.com: ")
    service.call(service.sandbox.complete(signing))
    assert run("remind", signing, "--all-pending").err == "No recipient is pending.\n"
