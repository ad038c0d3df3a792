"""Manifests as people write them, the problems reported for them, and reports of failures as manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.pdfs import make_pdf

HEADER = "key,name,language,documents,recipient1_email"
ROW = "k,Lease,EN,a.pdf,a@example.com"


@pytest.fixture(autouse=True)
def documents(run: Run) -> None:
    """Write documents into the folder where the command runs."""
    for name in ("a.pdf", "c.pdf"):
        Path(name).write_bytes(make_pdf(text=name))


def write(content: str, name: str = "leases.csv") -> None:
    Path(name).write_bytes(content.encode("utf-8", "surrogateescape"))


FULL = (
    "Key;Name;Language;Signing order;Message;Documents;Recipient1 Email;recipient1-first-name;recipient1_last_name;"
    "recipient1_signing_method;recipient1_order;Recipient1_Extra_personal_number;recipient3_email;recipient3_order;\r\n"
    "\r\n"
    'lease-1;Lease 1;EN;sequential;"Please sign\r\nsoon";"a.pdf\r\nc.pdf";anna@example.com;Anna;Berg;bankid;1;'
    "198001011234;bo@example.com;2.0;\r\n;;;\r\n"
)


@pytest.mark.parametrize(("start", "delimiter"), [("\ufeff", ";"), ("", "\t")])
def test_csv_of_a_spreadsheet_is_sent(start: str, delimiter: str, run: Run, service: Service) -> None:
    """A byte order mark, people's spelling of column names, blank rows and line breaks in cells are accepted."""
    write(start + FULL.replace(";", delimiter))
    (package, _) = run("dispatch", "leases.csv", "--json").lines
    assert (package["key"], package["line"]) == ("lease-1", 3)
    signing = service.do(service.sandbox.signing, package["signing"])
    assert (signing.name, signing.language, signing.signing_order) == ("Lease 1", "EN", "sequential")
    assert (signing.message or "").split() == ["Please", "sign", "soon"]
    assert [one.name for one in service.do(service.sandbox.documents, signing.id)] == ["a.pdf", "c.pdf"]
    anna, bo = service.do(service.sandbox.recipients, signing.id)
    assert (anna.email, anna.first_name, anna.last_name, anna.order) == ("anna@example.com", "Anna", "Berg", 1)
    assert anna.signing_method == "bankid"
    assert (bo.email, bo.order) == ("bo@example.com", 2)


def test_json_lines_are_sent(run: Run, service: Service) -> None:
    documents = ["a.pdf", {"path": str(Path("c.pdf").absolute()), "filename": "Lease.pdf"}]
    recipients = [{"email": "anna@example.com", "extra": {"phone": "+46"}}, {"email": "b@example.com"}]
    row = {"key": "k", "name": "Lease", "language": "SV", "documents": documents, "recipients": recipients}
    write("\ufeff\n" + json.dumps({**row, "error": "old"}) + "\n\n" + json.dumps({**row, "key": None}), "leases.jsonl")
    *packages, _ = run("dispatch", "leases.jsonl", "--json", "--concurrency", "1").lines
    assert [(one["line"], len(one["key"])) for one in packages] == [(2, 1), (4, 64)]
    names = [one.name for one in service.do(service.sandbox.documents, packages[0]["signing"])]
    assert sorted(names) == ["Lease.pdf", "a.pdf"]


KEYLESS, INVALID = ",L,EN,a.pdf,a@example.com", ",L,EN,none.pdf; n.pdf,nobody"
ORDERS = f"{HEADER},recipient1_order,recipient3_email,recipient3_order,recipient3_first_name\n"
JSON = '"name": "L", "language": "EN", "recipients": [{"email": "a@example.com"}], "documents": ["a.pdf"]'
PROBLEMS = {
    "key,name,langauge,documents,recipient2_emial,recipient2_phone": [
        "line 1, unknown column 'langauge'; did you mean 'language'?",
        "line 1, unknown column 'recipient2_emial'; did you mean 'recipient2_email'?",
        "line 1, unknown column 'recipient2_phone'; a field that your tenant adds is recipient2_extra_phone",
        "line 1, missing column 'language'",
        "line 1, missing column 'recipient1_email'",
    ],
    f"{HEADER},email\nk,L,DE,a.pdf,a@b.example,": [
        "line 1, unknown column 'email'; did you mean 'recipient1_email'?",
        "line 2, language: must be EN or SV, got 'DE'",
    ],
    f"{HEADER},,Name\n{ROW},,L,lost": ["line 1, duplicate column 'Name'", "line 2, 'lost' has no column"],
    f'{HEADER}\n{ROW}\nk,Lease,EN,a.pdf,"a"b\nx': [
        "line 3, invalid CSV: ',' expected after '\"'; nothing after it was checked"
    ],
    f"{ORDERS}k,Lease,ES,a.pdf,a@example.com,first,b@example.com,2\nl,,EN,,,,,,Anna\nm,Lease,EN,a.pdf,,,,": [
        "line 2, language: must be EN or SV, got 'ES'",
        "line 2, recipient1_order: must be an integer of at least 1, got 'first'",
        "line 3, name: is empty",
        "line 3, recipient3_email: is empty",
        "line 3, documents: is empty",
        "line 4, recipient1_email: is empty",
    ],
    f"{{{JSON}}}\n[1]": ["line 2, must be an object, got [1]"],
    f'{{"name": \n{{{JSON}}}': [
        "line 1, invalid JSON: Expecting value: line 1 column 10 (char 9); a JSON manifest has one object per line"
    ],
    f'{{{JSON}}}\n{{"x\n{{{JSON}, "language": "DE"}}': [
        "line 2, invalid JSON: Unterminated string starting at: line 1 column 2 (char 1);"
        " a JSON manifest has one object per line",
        "line 3, language: must be EN or SV, got 'DE'",
    ],
    '[{"name": "Lease"}]': ["line 1, not one JSON object; a JSON manifest has one object per line"],
    '{"name": "L", "language": "DE", "documents": [5, "a.pdf"], "recipients": 7, "nmae": 1}': [
        "line 1, nmae: unknown member; did you mean 'name'?",
        "line 1, documents[0]: must be a path, or an object with a path, got 5",
        "line 1, recipients: must be a list, got 7",
        "line 1, language: must be EN or SV, got 'DE'",
    ],
    f'{{{JSON}, "documents": [{{"path": "a.pdf", "name": "b"}}]}}': [
        "line 1, documents[0]: unknown member 'name'; did you mean 'filename'?"
    ],
    f'{{{JSON}, "recipients": [{{"emial": "a"}}]}}': [
        "line 1, recipients[0]: unknown member 'emial'; did you mean 'email'?"
    ],
    f'{{{JSON}, "recipients": ["{"x" * 300}"]}}': [f"line 1, recipients[0]: must be an object, got '{'x' * 199}…"],
    "\n".join([HEADER, ROW, ROW, INVALID, KEYLESS, KEYLESS]): [
        "line 3, key: 'k' is also the key of line 2",
        "line 4, recipient1_email: must be an e-mail address, got 'nobody'",
        "line 4, documents: cannot open 'FOLDER/none.pdf': No such file or directory",
        "line 4, documents: n.pdf: not a PDF",
        "line 6, key: missing, and this is the same package as line 5; if both are to be sent, give each a key",
    ],
    f"{HEADER}\n{ROW}\nk,,EN,a.pdf,a@example.com": [
        "line 3, key: 'k' is also the key of line 2",
        "line 3, name: is empty",
    ],
    HEADER: ["the manifest has no packages"],
}


@pytest.mark.parametrize("content", PROBLEMS, ids=range(len(PROBLEMS)))
def test_every_problem_is_reported_with_line_column_and_value(content: str, run: Run, service: Service) -> None:
    """Files that are missing or no PDFs are reported too. Nothing is sent."""
    Path("n.pdf").write_text("no PDF at all")
    write(content, "x.csv")
    start = "x.csv: " if content == HEADER else "x.csv, "
    problems = [f"{start}{problem}".replace("FOLDER", str(Path.cwd())) for problem in PROBLEMS[content]]
    ran = run("dispatch", "x.csv", "--json")
    assert (ran.code, ran.out, ran.error["problems"]) == (2, "", problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    ran = run("dispatch", "x.csv")
    assert ran.err == "\n  ".join([f"Error: {count} in x.csv; nothing was sent:", *problems]) + "\n"
    assert service.sandbox.requests == []
    assert not Path("x.journal").exists()


def test_other_encodings_are_refused_with_what_to_do(run: Run) -> None:
    write(f"{HEADER}\n{ROW}\nk,L\udce4ge,EN,a.pdf,a@b")
    assert (
        "leases.csv, line 3: not UTF-8; save the manifest as UTF-8 (in Excel: 'CSV UTF-8')"
        in run("dispatch", "leases.csv").err
    )


CSV = f"{HEADER}\nk1,Lease 1,EN,a.pdf; c.pdf,a@example.com\n,Lease 2,EN,c.pdf,b@example.com\n"
WITHOUT_KEYS = CSV.replace("key,", "").replace("k1,", "").replace("\n,", "\n")
LINES = f'{{{JSON}}}\n{{{JSON}, "documents": [{{"path": "c.pdf", "filename": "B.pdf"}}]}}\n'


@pytest.mark.usefixtures("one_attempt")
@pytest.mark.parametrize(
    ("content", "folder"),
    [(CSV, "."), (WITHOUT_KEYS.replace(",", "|"), "elsewhere"), (LINES, "elsewhere")],
)
def test_report_of_failures_sends_the_same_packages(content: str, folder: str, run: Run, service: Service) -> None:
    """Keys and paths are kept, from any folder. So are those of a report of a report."""
    Path("elsewhere").mkdir()
    write(content, "manifest")
    service.fault("signings.create", "500", times=None)
    first, second = f"{folder}/first", f"{folder}/second"
    keys = []
    for source, report in (("manifest", first), (first, second)):
        ran = run("dispatch", source, "--failures", report, "--json", "--journal", "j")
        assert ran.code == 1, ran.err
        keys.append(sorted(line["key"] for line in ran.lines if "key" in line))
        assert all(key in Path(report).read_text("utf-8") for key in keys[-1])
    service.do(service.sandbox.faults.clear)
    assert run("dispatch", second, "--journal", "j").out.startswith("2 sent: 0 earlier, 2 now.\n")
    assert keys[0] == keys[1]
    assert len(service.do(lambda: service.sandbox.signings)) == 2
