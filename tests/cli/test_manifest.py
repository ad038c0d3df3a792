"""Manifests as people write them, the problems reported for them, and reports of failures as manifests."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from signing_async import InvalidRequest, NewRecipient, SigningPackage
from signing_async.cli.manifest import Entry, FailureReport, Manifest, check_manifest
from tests.full_disk import full_disk
from tests.pdfs import make_pdf

HEADER = "key,name,language,documents,recipient1_email"
Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Return a function that writes a manifest."""

    def write(content: str | bytes, name: str = "leases.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def read(path: Path) -> list[Entry]:
    """Read all entries, twice, and compare."""
    with Manifest(path) as manifest:
        entries = list(manifest.entries())
        manifest.check_unchanged()
        assert list(map(_comparable, manifest.entries())) == list(map(_comparable, entries))
    return entries


def _comparable(entry: Entry) -> tuple[Any, ...]:
    return entry.line, entry.row, entry.problems, entry.recipient_numbers


def problems(path: Path) -> list[str]:
    return [
        f"line {entry.line}{', ' if column else ''}{column}: {text}"
        for entry in read(path)
        for column, text in entry.problems
    ]


def paths(package: SigningPackage | None) -> list[str]:
    """Return the paths of the package's documents."""
    assert package is not None
    return [str(document.source) for document in package.documents]  # type: ignore[union-attr]  # each is a PdfSource


FULL = (
    "Key;Name;Language;Signing order;Message;Documents;Recipient1 Email;recipient1-first-name;recipient1_last_name;"
    "recipient1_signing_method;recipient1_order;Recipient1_Extra_Personal_Number;recipient3_email;recipient3_order\r\n"
    'lease-1;Lease 1;EN;sequential;"Please sign;\r\nsoon";"a.pdf; b.pdf\r\nc.pdf";anna@example.com;Anna;Berg;bankid;1;'
    "198001011234;bo@example.com;2.0\r\n"
)


@pytest.mark.parametrize("encode", [lambda text: text.encode("utf-8-sig"), lambda text: b"sep=;\r\n" + text.encode()])
@pytest.mark.parametrize("delimiter", [";", ",", "\t"])
def test_csv_written_by_excel_is_read(
    encode: Callable[[str], bytes], delimiter: str, written: Written, tmp_path: Path
) -> None:
    """A byte order mark or ``sep=`` line, people's spelling of column names, and line breaks in cells are accepted."""
    data = (
        encode(FULL)
        if delimiter == ";"
        else encode(FULL.replace(";", delimiter)).replace(b"a.pdf" + delimiter.encode(), b"a.pdf;")
    )
    if delimiter != ";":
        data = data.removeprefix(b"sep=;\r\n").replace(b"sign" + delimiter.encode(), b"sign;")
        data = data.replace(b"sep=" + delimiter.encode() + b"\r\n", b"")
    (entry,) = read(written(data))
    assert not entry.problems
    package = entry.package
    assert package is not None
    assert (package.key, package.name, package.language) == ("lease-1", "Lease 1", "EN")
    assert (package.signing_order, package.message) == ("sequential", "Please sign;\r\nsoon")
    assert paths(package) == [str(tmp_path / name) for name in ("a.pdf", "b.pdf", "c.pdf")]
    extra = {"Personal_Number": "198001011234"}
    assert package.recipients == (
        NewRecipient("anna@example.com", "Anna", "Berg", "bankid", 1, extra),
        NewRecipient("bo@example.com", order=2),
    )
    assert list(entry.recipient_numbers) == [1, 3]


def test_json_lines_are_read(written: Written, tmp_path: Path) -> None:
    row = {
        "key": "k",
        "name": "Lease",
        "language": "SV",
        "documents": ["a.pdf", {"path": "/b/c.pdf", "filename": "Lease.pdf"}],
        "recipients": [
            {"email": "anna@example.com", "order": 1, "extra": {"phone": "+46"}},
            {"email": "b@example.com"},
        ],
        "error": "of the last run",
    }
    path = written("\ufeff\n" + json.dumps(row) + "\n\n" + json.dumps({**row, "key": None}), "leases.jsonl")
    first, second = read(path)
    assert (first.line, second.line, list(first.problems)) == (2, 4, [])
    assert first.package is not None
    assert second.package is not None
    assert paths(first.package) == [str(tmp_path / "a.pdf"), "/b/c.pdf"]
    assert [document.filename for document in first.package.documents] == ["a.pdf", "Lease.pdf"]  # type: ignore[union-attr]  # each is a PdfSource
    assert first.package.recipients[0] == NewRecipient("anna@example.com", order=1, extra={"phone": "+46"})
    assert (first.package.key, second.package.key) == ("k", None)


def test_blank_rows_and_columns_are_skipped(written: Written) -> None:
    path = written(f"\n{HEADER},,\n\n,,,,\nk,Lease,EN,a.pdf,a@example.com\n   \n")
    (entry,) = read(path)
    assert (entry.line, list(entry.problems)) == (5, [])
    assert entry.row == {
        "key": "k",
        "name": "Lease",
        "language": "EN",
        "documents": "a.pdf",
        "recipient1_email": "a@example.com",
    }


HEADERS = {
    "key,name,langauge,documents,recipient1_email": [
        "line 1: unknown column 'langauge'; did you mean 'language'?",
        "line 1: missing column 'language'",
    ],
    "name,language,documents,recipient2_emial": [
        "line 1: unknown column 'recipient2_emial'; did you mean 'recipient2_email'?",
        "line 1: missing column 'recipient1_email'",
    ],
    "name,language,documents,email,recipient1_email": [
        "line 1: unknown column 'email'; did you mean 'recipient1_email'?"
    ],
    "name,language,documents,recipient1_email,xyzzy": ["line 1: unknown column 'xyzzy'"],
    "name,language,documents,recipient1_email,Name": ["line 1: duplicate column 'Name'"],
    "nonsense": [
        "line 1: unknown column 'nonsense'",
        *(f"line 1: missing column {name!r}" for name in ("name", "language", "documents", "recipient1_email")),
    ],
}


@pytest.mark.parametrize("header", HEADERS)
def test_each_unknown_duplicate_or_missing_column_is_reported(header: str, written: Written) -> None:
    assert problems(written(header + "\nx,EN,a.pdf,a@example.com,\n")) == HEADERS[header]


LINES = {
    'k,Lease,EN,a.pdf,"a@example.com': "line 4: invalid CSV: ',' expected after '\"'",
    'k,Lease,EN,a.pdf,"a"b': "line 4: invalid CSV: ',' expected after '\"'",
    "k,Lease,EN,a.pdf," + "x" * 140_000: "line 4: invalid CSV: field larger than field limit (131072)",
    "k,Lease,EN,a.pdf,a@example.com,,surplus": "line 4: 'surplus' has no column",
    "k,Lease,EN,a.pdf,a@example.com,surplus": "line 4: 'surplus' has no column",
}


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_invalid_line_is_reported_with_its_number(line: str, written: Written) -> None:
    good = 'k,"Lease",EN,"a.pdf\nb.pdf",a@example.com,'
    path = written(f"{HEADER},\n{good}\n{line}\n{good}\n")
    is_csv = "invalid CSV" not in LINES[line]
    assert problems(path) == [LINES[line] + ("" if is_csv else "; nothing after it was checked")]
    assert sum(entry.package is not None for entry in read(path)) == 1 + is_csv


@pytest.mark.parametrize(
    ("content", "name", "line"),
    [
        (f"{HEADER}\nk,Lease,EN,a.pdf,a@example.com\nk,L\udce4ge,EN,a.pdf,a@example.com\n", "x.csv", 3),
        ('{}\n{"name": "L\udce4ge"}', "x.jsonl", 2),
        (r'{"name": "J\ud800"}', "x.jsonl", 1),
        (r'{"recipients": [{"email": "a@example.com", "extra": {"\uDFFF": 1}}]}', "x.jsonl", 1),
    ],
)
def test_line_that_is_not_utf_8_is_reported(content: str, name: str, line: int, written: Written) -> None:
    path = written(content.encode("utf-8", "surrogateescape"), name)
    assert problems(path) == [f"line {line}: not UTF-8; save the manifest as UTF-8"]
    assert not problems(written(r'{"name": "\ud83d\ude00", "message": "\\ud800"}', "x.jsonl"))


async def checked(path: Path) -> list[str]:
    """Return all problems that the check of a manifest reports."""
    with Manifest(path) as manifest, pytest.raises(InvalidRequest) as caught:
        await check_manifest(manifest, 10_000_000, lambda: None)
    return [problem.partition(", ")[2] for problem in caught.value.problems]


async def test_problems_name_the_columns_of_the_csv_file(written: Written, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf())
    header = f"{HEADER},recipient1_order,recipient3_email,recipient3_order,recipient3_first_name"
    rows = ["k,Lease,ES,a.pdf,a@example.com,first,b@example.com,2", "l,,EN,,,,,,Anna", "m,Lease,EN,a.pdf,,,,"]
    assert await checked(written("\n".join([header, *rows]))) == [
        "line 2, language: must be EN or SV, got 'ES'",
        "line 2, recipient1_order: must be an integer of at least 1, got 'first'",
        "line 3, name: is empty",
        "line 3, recipient3_email: is empty",
        "line 3, documents: is empty",
        "line 4, recipient1_email: is empty",
    ]


OBJECTS = {
    "[1]": "must be an object, got [1]",
    '{"name": }': "invalid JSON: Expecting value",
    '{"name": "a", "name": "b"}': "duplicate member 'name'",
    '{"a": ' * 100_000: "invalid JSON: ",
    '{"nmae": 1}': "nmae: unknown member; did you mean 'name'?",
    '{"documents": "a.pdf"}': "documents: must be a list, got 'a.pdf'",
    '{"recipients": {}}': "recipients: must be a list, got {}",
    '{"documents": [5]}': "documents[0]: must be a path, or an object with a path, got 5",
    '{"documents": [{"path": ""}]}': "documents[0]: must be a path",
    '{"documents": [{"path": "a", "name": "b"}]}': "documents[0]: unknown member 'name'; did you mean 'filename'?",
    '{"documents": [{"path": "a", "filename": " "}]}': "documents[0]: filename must be a non-empty string, got ' '",
    '{"recipients": [5]}': "recipients[0]: must be an object, got 5",
    '{"recipients": [{"emial": "a"}]}': "recipients[0]: unknown member 'emial'; did you mean 'email'?",
}


@pytest.mark.parametrize("text", OBJECTS, ids=range(len(OBJECTS)))
def test_invalid_object_is_reported_with_line_field_and_value(text: str, written: Written) -> None:
    found = problems(written("{}\n" + text, "x.jsonl"))
    assert len(found) == 1
    assert found[0].startswith("line 2")
    assert OBJECTS[text] in found[0]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("value", [{"name": "Lease", "documents": ["a.pdf"]}, [{"name": "Lease"}, {"name": "Lease"}]])
@pytest.mark.parametrize("start", ["", "\ufeff", " "])
def test_json_that_is_not_one_object_per_line_is_one_problem(
    value: Any, indent: int | None, start: str, written: Written
) -> None:
    found = problems(written(start + json.dumps(value, indent=indent) + "\n", "x.json"))
    if indent is None and isinstance(value, dict):
        assert found == []
    else:
        assert found == ["line 1: not one JSON object; a JSON manifest has one object per line"]


@pytest.mark.parametrize(("code", "transient"), [(errno.EMFILE, True), (errno.ENOSPC, True), (errno.EACCES, False)])
def test_manifest_or_report_that_cannot_be_opened_for_now_is_a_transient_error(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, transient: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    path = written(CSV)
    with Manifest(path) as manifest, monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        with pytest.raises(InvalidRequest, match="cannot be opened") as of_manifest:
            Manifest(path)
        with pytest.raises(InvalidRequest, match="cannot be written") as of_report:
            FailureReport(tmp_path / "failed.csv", manifest).check()
    assert (of_manifest.value.transient, of_report.value.transient) == (transient, transient)


# Reports of failures

CSV = f"{HEADER}\nk1,Lease 1,EN,a.pdf; /b.pdf,a@example.com\n,Lease 2,EN,b.pdf,b@example.com\n"
JSON = (
    '{"name": "Lease", "language": "EN", "documents": ["a.pdf", {"path": "b.pdf", "filename": "B"}], "recipients": []}'
)


@pytest.mark.parametrize(
    ("content", "name"),
    [(CSV, "leases.csv"), (CSV.replace(",", ";").replace("; /", ", /"), "x.csv"), (JSON, "x.jsonl")],
)
@pytest.mark.parametrize("folder", [".", "elsewhere"])
def test_report_of_failures_is_a_manifest_of_the_same_packages(
    content: str, name: str, folder: str, written: Written, tmp_path: Path
) -> None:
    """Keys and paths are kept, from any folder; the reasons are ignored."""
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / folder / "failed"
    with Manifest(written(content, name)) as manifest:
        entries = list(manifest.entries())
        report = FailureReport(target, manifest)
        for number, entry in enumerate(entries, 1):
            report.add(entry.row, f"k{number}", 'HTTP 500:\nnot today; "perhaps" tomorrow')
        assert report.write()
    again = read(target)
    assert [list(entry.problems) for entry in again] == [[]] * len(entries)
    for number, (old, new) in enumerate(zip(entries, again, strict=True), 1):
        assert new.package is not None
        assert new.package.key == f"k{number}"
        assert list(map(os.path.normpath, paths(new.package))) == list(map(os.path.normpath, paths(old.package)))
        assert new.row["error"] == 'HTTP 500: not today; "perhaps" tomorrow'
    assert sorted(path.name for path in target.parent.iterdir() if "fail" in path.name) == ["failed"]


def test_report_on_a_full_disk_is_an_error_at_its_end_and_leaves_the_older_report(
    written: Written, tmp_path: Path
) -> None:
    path, before = tmp_path / "failed.csv", "an older report"
    path.write_text(before)
    with Manifest(written(CSV)) as manifest:
        report = FailureReport(path, manifest)
        with full_disk():
            report.add(next(manifest.entries()).row, "k", "no")
            with pytest.raises(OSError, match="File too large"):
                report.write()
        assert path.read_text() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["failed.csv", "leases.csv"]
