"""Manifests as people write them, the problems reported for them, and reports of failures as manifests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from signing_async import InvalidRequest, NewRecipient, SigningPackage
from signing_async.cli.manifest import Entry, FailureReport, Manifest, check_manifest
from tests.full_disk import full_disk
from tests.pdfs import make_pdf

HEADER = "key,name,language,documents,recipient1_email"
ROW = "k,Lease,EN,a.pdf,a@example.com"
Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Return a function that writes a manifest."""

    def write(content: str, name: str = "leases.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
        return path

    return write


def read(path: Path) -> list[Entry]:
    return list(Manifest(path).entries())


def paths(package: SigningPackage | None) -> list[str]:
    assert package is not None
    return [str(document.source) for document in package.documents]  # type: ignore[union-attr]  # each is a PdfSource


def problems(path: Path) -> list[str]:
    """Return the problems that are found when the manifest is read."""
    found = [(entry.line, column, text) for entry in read(path) for column, text in entry.problems]
    return [f"line {line}{', ' if column else ''}{column}: {text}" for line, column, text in found]


FULL = (
    "Key;Name;Language;Signing order;Message;Documents;Recipient1 Email;recipient1-first-name;recipient1_last_name;"
    "recipient1_signing_method;recipient1_order;Recipient1_Extra_Personal_Number;recipient3_email;recipient3_order\r\n"
    'lease-1;Lease 1;EN;sequential;"Please sign\r\nsoon";"a.pdf\r\nc.pdf";anna@example.com;Anna;Berg;bankid;1;'
    "198001011234;bo@example.com;2.0\r\n"
)


@pytest.mark.parametrize("start", ["", "\ufeff", "sep=DELIMITER\r\n"])
@pytest.mark.parametrize("delimiter", [";", ",", "\t"])
def test_csv_written_by_excel_is_read(start: str, delimiter: str, written: Written, tmp_path: Path) -> None:
    """A byte order mark or ``sep=`` line, people's spelling of column names, and line breaks in cells are accepted."""
    (entry,) = read(written(start.replace("DELIMITER", delimiter) + FULL.replace(";", delimiter)))
    assert not entry.problems
    package = entry.package
    assert package is not None
    assert (package.key, package.name, package.language) == ("lease-1", "Lease 1", "EN")
    assert (package.signing_order, package.message) == ("sequential", "Please sign\r\nsoon")
    assert paths(package) == [str(tmp_path / name) for name in ("a.pdf", "c.pdf")]
    extra = {"Personal_Number": "198001011234"}
    anna = NewRecipient("anna@example.com", "Anna", "Berg", "bankid", 1, extra)
    assert package.recipients == (anna, NewRecipient("bo@example.com", order=2))


def test_blank_rows_and_columns_are_skipped_and_any_line_end_is_accepted(written: Written) -> None:
    for end in "\n", "\r\n", "\r":
        (entry,) = read(written(f"\n{HEADER},,\n\n,,,,\n{ROW},\n   \n".replace("\n", end)))
        assert (entry.line, list(entry.problems)) == (5, [])
        assert entry.row == dict(zip(HEADER.split(","), ROW.split(","), strict=True))


def test_json_lines_are_read(written: Written, tmp_path: Path) -> None:
    documents = ["a.pdf", {"path": "/b/c.pdf", "filename": "Lease.pdf"}]
    recipients = [{"email": "anna@example.com", "order": 1, "extra": {"phone": "+46"}}, {"email": "b@example.com"}]
    row = {"key": "k", "name": "Lease", "language": "SV", "documents": documents, "recipients": recipients}
    path = written("\ufeff\n" + json.dumps({**row, "error": "old"}) + "\n\n" + json.dumps({**row, "key": None}))
    first, second = read(path)
    assert (first.line, second.line, list(first.problems)) == (2, 4, [])
    assert first.package is not None
    assert second.package is not None
    assert paths(first.package) == [str(tmp_path / "a.pdf"), "/b/c.pdf"]
    assert first.package.documents[1].filename == "Lease.pdf"  # type: ignore[union-attr]  # a PdfSource
    assert first.package.recipients[0] == NewRecipient("anna@example.com", order=1, extra={"phone": "+46"})
    assert (first.package.key, second.package.key) == ("k", None)


OTHERS = [f"line 1: missing column {name!r}" for name in ("name", "language", "documents", "recipient1_email")]
PROBLEMS = {
    "key,name,langauge,documents,recipient1_email": [
        "line 1: unknown column 'langauge'; did you mean 'language'?",
        "line 1: missing column 'language'",
    ],
    "name,language,documents,recipient2_emial": [
        "line 1: unknown column 'recipient2_emial'; did you mean 'recipient2_email'?",
        "line 1: missing column 'recipient1_email'",
    ],
    f"{HEADER},email\n{ROW}": ["line 1: unknown column 'email'; did you mean 'recipient1_email'?"],
    f"{HEADER},Name\n{ROW}": ["line 1: duplicate column 'Name'"],
    "nonsense": ["line 1: unknown column 'nonsense'", *OTHERS],
    f'{HEADER}\nk,L,EN,"b.pdf\na.pdf",a@b\n{ROW},surplus': ["line 4: 'surplus' has no column"],
    f'{HEADER}\n{ROW}\nk,Lease,EN,a.pdf,"a"b\nx': [
        "line 3: invalid CSV: ',' expected after '\"'; nothing after it was checked"
    ],
    r'{"name": "J\ud800"}': ["line 1: not UTF-8; save the manifest as UTF-8"],
    '{}\n{"name": }': ["line 2: invalid JSON: Expecting value: line 1 column 10 (char 9)"],
    '{}\n{"name": "a", "name": "b"}': ["line 2: invalid JSON: duplicate member 'name'"],
    "{}\n[1]": ["line 2: must be an object, got [1]"],
    '[{"name": "Lease"}]': ["line 1: not one JSON object; a JSON manifest has one object per line"],
    '{"nmae": 1}': ["line 1, nmae: unknown member; did you mean 'name'?"],
    '{"documents": "a.pdf"}': ["line 1, documents: must be a list, got 'a.pdf'"],
    '{"documents": [5]}': ["line 1, documents[0]: must be a path, or an object with a path, got 5"],
    '{"documents": [{"path": "a", "name": "b"}]}': [
        "line 1, documents[0]: unknown member 'name'; did you mean 'filename'?"
    ],
    '{"documents": [{"path": "a", "filename": " "}]}': [
        "line 1, documents[0]: filename must be a non-empty string, got ' '"
    ],
    '{"recipients": [5]}': ["line 1, recipients[0]: must be an object, got 5"],
    '{"recipients": [{"emial": "a"}]}': ["line 1, recipients[0]: unknown member 'emial'; did you mean 'email'?"],
    f'{{"recipients": ["{"x" * 300}"]}}': [f"line 1, recipients[0]: must be an object, got '{'x' * 199}…"],
}


@pytest.mark.parametrize("content", PROBLEMS, ids=range(len(PROBLEMS)))
def test_problem_is_reported_with_line_column_and_value(content: str, written: Written) -> None:
    assert problems(written(content)) == PROBLEMS[content]


async def test_problems_name_the_columns_of_the_csv_file_and_each_member_once(written: Written, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf())
    header = f"{HEADER},recipient1_order,recipient3_email,recipient3_order,recipient3_first_name"
    rows = ["k,Lease,ES,a.pdf,a@example.com,first,b@example.com,2", "l,,EN,,,,,,Anna", "m,Lease,EN,a.pdf,,,,"]
    json_row = '{"name": "L", "language": "DE", "documents": [5], "recipients": 7}'
    for content, expected in (
        (
            "\n".join([header, *rows]),
            [
                "line 2, language: must be EN or SV, got 'ES'",
                "line 2, recipient1_order: must be an integer of at least 1, got 'first'",
                "line 3, name: is empty",
                "line 3, recipient3_email: is empty",
                "line 3, documents: is empty",
                "line 4, recipient1_email: is empty",
            ],
        ),
        (
            json_row,
            [
                "line 1, documents[0]: must be a path, or an object with a path, got 5",
                "line 1, recipients: must be a list, got 7",
                "line 1, language: must be EN or SV, got 'DE'",
            ],
        ),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await check_manifest(Manifest(written(content)), 10_000_000, lambda: None)
        assert [problem.partition(", ")[2] for problem in caught.value.problems] == expected


def test_other_encodings_are_refused_with_what_to_do(written: Written, tmp_path: Path) -> None:
    (tmp_path / "utf16.csv").write_bytes(HEADER.encode("utf-16"))
    with pytest.raises(InvalidRequest, match=r"encoded as UTF-16; save it as UTF-8 \(in Excel: 'CSV UTF-8'\)"):
        Manifest(tmp_path / "utf16.csv")
    with pytest.raises(InvalidRequest, match=r"leases\.csv, line 3: not UTF-8; save the manifest as UTF-8"):
        Manifest(written(f"{HEADER}\n{ROW}\nk,L\udce4ge,EN,a.pdf,a@b"))


CSV = f"{HEADER}\nk1,Lease 1,EN,a.pdf; /b.pdf,a@example.com\n,Lease 2,EN,b.pdf,b@example.com\n"
WITHOUT_KEYS = CSV.replace("key,", "").replace("k1,", "").replace("\n,", "\n")
JSON = '{"name": "L", "language": "EN", "documents": ["a.pdf", {"path": "b.pdf", "filename": "B"}], "recipients": []}'


@pytest.mark.parametrize("content", [CSV, CSV.replace(",", "|"), WITHOUT_KEYS, JSON])
@pytest.mark.parametrize("folder", [".", "elsewhere"])
def test_report_of_failures_is_a_manifest_of_the_same_packages(
    content: str, folder: str, written: Written, tmp_path: Path
) -> None:
    """Keys and paths are kept, from any folder; the errors are ignored. So is a report of a report."""
    (tmp_path / "elsewhere").mkdir()
    target, source = tmp_path / folder / "failed", written(content)
    for _ in range(2):
        manifest = Manifest(source)
        entries = list(manifest.entries())
        report = FailureReport(target, manifest)
        for number, entry in enumerate(entries, 1):
            report.add(entry.row, f"k{number}", 'HTTP 500:\nnot today; "perhaps" tomorrow')
        assert report.write()
        for number, (old, new) in enumerate(zip(entries, read(target), strict=True), 1):
            assert not new.problems
            assert new.package is not None
            assert new.package.key == f"k{number}"
            assert list(map(os.path.normpath, paths(new.package))) == list(map(os.path.normpath, paths(old.package)))
            assert new.row["error"] == 'HTTP 500: not today; "perhaps" tomorrow'
        assert [path.name for path in target.parent.iterdir() if "fail" in path.name] == ["failed"]
        source = target


def test_report_on_a_full_disk_is_an_error_at_its_end_and_leaves_the_older_report(
    written: Written, tmp_path: Path
) -> None:
    path, before = tmp_path / "failed.csv", "an older report"
    path.write_text(before)
    manifest = Manifest(written(CSV))
    report = FailureReport(path, manifest)
    with full_disk():
        report.add(next(manifest.entries()).row, "k", "no")
        with pytest.raises(OSError, match="File too large"):
            report.write()
    assert path.read_text() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["failed.csv", "leases.csv"]
