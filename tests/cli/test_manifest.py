"""Manifests as people write them, the problems reported for them, and reports of failures as manifests."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from signing_async import InvalidRequest, NewRecipient, SigningError, SigningPackage
from signing_async.cli.manifest import Entry, FailureReport, Manifest
from signing_async.cli.manifest.rows import MAX_LINE
from tests.full_disk import full_disk

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
    return [str(problem) for entry in read(path) for problem in entry.problems]


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
    assert entry.problems == ()
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
    assert entry.recipient_numbers == (1, 3)


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
    assert (first.line, second.line, first.problems) == (2, 4, ())
    assert first.package is not None
    assert second.package is not None
    assert paths(first.package) == [str(tmp_path / "a.pdf"), "/b/c.pdf"]
    assert [document.filename for document in first.package.documents] == ["a.pdf", "Lease.pdf"]  # type: ignore[union-attr]  # each is a PdfSource
    assert first.package.recipients[0] == NewRecipient("anna@example.com", order=1, extra={"phone": "+46"})
    assert (first.package.key, second.package.key) == ("k", None)


def test_blank_rows_and_columns_are_skipped(written: Written) -> None:
    path = written(f"\n{HEADER},,\n\n,,,,\nk,Lease,EN,a.pdf,a@example.com\n   \n")
    (entry,) = read(path)
    assert (entry.line, entry.problems) == (5, ())
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
    'k,Lease,EN,a.pdf,"a@example.com': "line 3: invalid CSV: unexpected end of data",
    'k,Lease,EN,a.pdf,"a"b': "line 3: invalid CSV: ',' expected after '\"'",
    "k,Lease,EN,a.pdf," + "x" * 140_000: "line 3: invalid CSV: field larger than field limit (131072)",
    "k" * (MAX_LINE + 5): f"line 3: longer than {MAX_LINE} bytes",
    "k,Lease,EN,a.pdf,a@example.com,,surplus": "line 3: cell 7, 'surplus', has no column",
}


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_invalid_line_is_reported_and_the_others_are_read(line: str, written: Written) -> None:
    good = "k,Lease,EN,a.pdf,a@example.com,"
    path = written(f"{HEADER},\n{good}\n{line}\n{good}\n")
    assert problems(path) == [LINES[line]]
    assert sum(entry.package is not None for entry in read(path)) >= (1 if "unexpected" in LINES[line] else 2)


def test_each_line_that_is_not_utf_8_is_reported(written: Written) -> None:
    good = b"k,Lease,EN,a.pdf,a@example.com\n"
    path = written(HEADER.encode() + b"\n" + good + good.replace(b"Lease", b"L\xe4ge") + good)
    assert problems(path) == ["line 3: not UTF-8; save the manifest as UTF-8"]
    lines = [b'{"name": "L\xe4ge"}', b'{"name": "x", "language": "EN"}', b"{" + b" " * MAX_LINE * 2 + b"}"]
    assert problems(written(b"\n".join(lines), "x.jsonl")) == [
        "line 1: not UTF-8; save the manifest as UTF-8",
        f"line 3: longer than {MAX_LINE} bytes",
    ]


def test_order_that_is_no_integer_is_reported_with_its_column(written: Written) -> None:
    header = f"{HEADER},recipient1_order,recipient2_order,recipient2_email"
    (entry,) = read(written(f"{header}\nk,Lease,EN,a.pdf,a@example.com,first,{'9' * 300},b@example.com"))
    assert str(entry.problems[0]) == "line 2, recipient1_order: must be an integer, got 'first'"
    assert len(str(entry.problems[1])) < 300


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


def test_problems_of_the_package_are_reported_under_the_columns_of_the_manifest(written: Written) -> None:
    """A recipient keeps the number of its columns, and a column is reported once."""
    header = f"{HEADER},recipient3_email,recipient3_order,recipient3_extra_phone"
    (entry,) = read(written(f"{header}\nk,Lease,EN,a.pdf,,b@example.com,x,1"))
    found = entry.merge_problems(
        [
            "language: must be EN or SV, got 'DE'",
            "recipients[0].email: must be an e-mail address, got 'b'",
            "recipients[0].order: is missing, while other recipients have one",
            "recipients[0].extra: cannot be sent",
            "documents[0]: a.pdf: not a PDF",
            "recipients: there is none, and at least one is needed",
        ]
    )
    assert [str(problem) for problem in found] == [
        "line 2, recipient3_order: must be an integer, got 'x'",
        "line 2, language: must be EN or SV, got 'DE'",
        "line 2, recipient3_email: must be an e-mail address, got 'b'",
        "line 2, recipient3_extra: cannot be sent",
        "line 2, documents: a.pdf: not a PDF",
        "line 2, recipient1_email: there is none, and at least one is needed",
    ]
    (entry,) = read(written('{"documents": [5], "recipients": 7}', "x.jsonl"))
    found = entry.merge_problems(
        ["documents[0]: document.pdf: it is empty", "recipients: there is none", "name: must be a text"]
    )
    assert [problem.column for problem in found] == ["documents[0]", "recipients", "name"]


def test_file_that_is_no_manifest_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "utf16.csv").write_bytes(HEADER.encode("utf-16"))
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("none.csv", "none.csv: cannot be opened: No such file or directory"),
        (".", "not a regular file"),
        ("pipe", "pipe: not a regular file"),
        ("utf16.csv", "utf16.csv: encoded as UTF-16; save it as UTF-8 (in Excel: 'CSV UTF-8')"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            Manifest(tmp_path / name)
        assert words in str(caught.value)


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


def test_manifest_that_changed_while_it_was_read_is_an_error(written: Written) -> None:
    path = written(HEADER)
    with Manifest(path) as manifest:
        with path.open("a") as file:
            file.write("\nk,Lease,EN,a.pdf,a@example.com\n")
        with pytest.raises(SigningError, match=r"leases\.csv: changed while it was read"):
            manifest.check_unchanged()


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
        assert report.finish()
        report.discard()
    again = read(target)
    assert [entry.problems for entry in again] == [()] * len(entries)
    for number, (old, new) in enumerate(zip(entries, again, strict=True), 1):
        assert new.package is not None
        assert new.package.key == f"k{number}"
        assert list(map(os.path.normpath, paths(new.package))) == list(map(os.path.normpath, paths(old.package)))
        assert new.row["error"] == 'HTTP 500: not today; "perhaps" tomorrow'
    assert sorted(path.name for path in target.parent.iterdir() if "fail" in path.name) == ["failed"]


def test_report_of_a_report_has_the_same_columns_and_replaces_it(written: Written, tmp_path: Path) -> None:
    path = tmp_path / "failed.csv"
    for _ in range(3):
        source = path if path.exists() else written(CSV.replace("key,", "").replace("k1,", "").replace("\n,", "\n"))
        with Manifest(source) as manifest:
            report = FailureReport(path, manifest)
            for entry in manifest.entries():
                report.add(entry.row, f"k{entry.line}", "no")
            assert report.finish()
        header = path.read_text("utf-8-sig").splitlines()[0]
        assert header == "name,language,documents,recipient1_email,key,error"


def test_old_report_is_removed_when_nothing_failed(written: Written, tmp_path: Path) -> None:
    (tmp_path / "failed.csv").write_text("old")
    with Manifest(written(CSV)) as manifest:
        report = FailureReport(tmp_path / "failed.csv", manifest)
        assert not report.finish()
        report.discard()
    assert not (tmp_path / "failed.csv").exists()


def test_discarded_report_leaves_the_old_one(written: Written, tmp_path: Path) -> None:
    (tmp_path / "failed.csv").write_text("old")
    with Manifest(written(CSV)) as manifest:
        report = FailureReport(tmp_path / "failed.csv", manifest)
        report.add(next(manifest.entries()).row, "k", "no")
        report.discard()
    assert (tmp_path / "failed.csv").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_report_that_cannot_be_written_is_an_error_at_the_check(written: Written, tmp_path: Path) -> None:
    with Manifest(written(CSV)) as manifest:
        report = FailureReport(tmp_path / "none" / "failed.csv", manifest)
        with pytest.raises(InvalidRequest, match=r"--failures: '.*/none/failed\.csv' cannot be written: No such file"):
            report.check()


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
                report.finish()
            report.discard()
    assert path.read_text() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["failed.csv", "leases.csv"]


@pytest.mark.parametrize(
    "text",
    [
        r'{"name": "J\ud800"}',
        r'{"recipients": [{"email": "a@example.com", "extra": {"\uDFFF": 1}}]}',
        r'{"documents": [{"path": "a.pdf", "filename": "\udc00\ud800"}]}',
    ],
)
def test_lone_surrogate_in_json_is_reported(text: str, written: Written) -> None:
    whole = r'{"name": "\ud83d\ude00", "documents": "\\ud800"}'
    found = problems(written(f"{text}\n{whole}", "x.jsonl"))
    assert found[0] == "line 1: lone surrogate (\\ud800 to \\udfff), which can't be encoded as UTF-8"
    assert [one.partition(":")[0] for one in found[1:]] == ["line 2, documents"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            HEADER + "\rk,Lease,EN,a.pdf,anna@example.com\r",
            "invalid CSV: the file has the line endings of classic Mac OS; save it as 'CSV UTF-8'",
        ),
        (HEADER + "x" * 200_000, "invalid CSV: field larger than field limit (131072)"),
        (f"sep=;\n{HEADER}{'x' * 200_000}", "invalid CSV: field larger than field limit (131072)"),
    ],
)
def test_header_that_is_no_csv_is_reported(content: str, words: str, written: Written) -> None:
    assert problems(written(content)) == [f"line {content.count(chr(10)) + 1}: {words}"]


@pytest.mark.parametrize("sign", ['"', "", "#"])
def test_sep_line_without_a_known_delimiter_is_an_unknown_column(sign: str, written: Written) -> None:
    assert problems(written(f"sep={sign}\r\n{HEADER}\n"))[0] == f"line 1: unknown column {'sep=' + sign!r}"
