"""The table of sealed PDFs, verdicts.md: the verdict on each file, here and by pyHanko's command."""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from asn1crypto import parser

from tests.sealed.cases import CASES, Case, Parts, roots, sealed
from tests.sealed.pdfs import judged, sandbox_authority

TABLE = Path(__file__).parent / "verdicts.md"


def pyhanko_accepts(data: bytes, folder: Path, trust: list[bytes]) -> bool:
    """Return whether pyHanko's command accepts all signatures as valid and trusted."""
    import click.testing
    from pyhanko.cli import cli_root

    (folder / "file.pdf").write_bytes(data)
    options = ["--soft-revocation-check", "--trust-replace"]
    for number, root in enumerate(trust):
        (folder / f"{number}.pem").write_bytes(root)
        options += ["--trust", str(folder / f"{number}.pem")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what its next version will drop
        ran = click.testing.CliRunner().invoke(cli_root, ["sign", "validate", *options, str(folder / "file.pdf")])
    return ran.exit_code == 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which pyHanko's command finds no settings."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_report_and_pyhanko_give_each_file_its_verdict_of_the_table(case: Case, folder: Path) -> None:
    data = case.make()
    report = judged(data, roots())
    assert report.sound == (not case.words), report.problems
    assert case.words in " / ".join(report.problems)
    assert report.trusted == (report.sound and case.trusted), report.trust_problems
    if report.sound:
        assert report.seals[0].shown == case.shown
        assert bool(report.seals[0].changes) == (report.bytes_after > 0 or len(report.seals) > 1)
    elif report.seals and report.seals[0].shown is not None:
        assert case.shown or not report.seals[0].shown
    agreed = bool(report.trusted) if case.pyhanko is None else case.pyhanko
    assert pyhanko_accepts(data, folder, roots()) == agreed


def altered(data: bytes, part: int, parts: int) -> Iterator[tuple[int, bytes]]:
    """Yield the file with one byte of its signature altered, for every n-th byte."""
    pieces = Parts.of(data)
    contents = bytes.fromhex(pieces.contents[1:-1].decode())
    chance = random.Random(part)
    for at in range(part, parser.peek(contents), parts):
        changed = bytearray(contents)
        changed[at] ^= chance.randrange(1, 256)
        yield at, pieces.before + b"<" + changed.hex().encode() + b">" + pieces.after


PARTS = 16


# The other parts are tested by `.ci/nightly`.
@pytest.mark.parametrize("part", range(PARTS if os.environ.get("SIGNING_NIGHTLY") else 1))
def test_no_altered_byte_of_a_signature_is_sound_if_pyhanko_refuses_it(part: int) -> None:
    import io

    from asn1crypto import pem, x509
    from pyhanko.pdf_utils.reader import PdfFileReader
    from pyhanko.sign.validation import validate_pdf_signature
    from pyhanko_certvalidator import ValidationContext

    root = x509.Certificate.load(pem.unarmor(sandbox_authority().certificate_pem)[2])
    count = 0
    for at, data in altered(sealed(), part, PARTS):
        if judged(data).sound:
            signature = PdfFileReader(io.BytesIO(data)).embedded_signatures[-1]
            assert validate_pdf_signature(signature, ValidationContext(trust_roots=[root])).bottom_line, at
        count += 1
    assert count > 70


def test_table_has_a_row_with_both_verdicts_for_each_file() -> None:
    rows = re.findall(
        r"^\| (.+?) \| (sound|\*\*not sound\*\*)(, not trusted)? \| (valid|invalid) \|", TABLE.read_text("utf-8"), re.M
    )
    verdicts = {
        name: (verdict == "sound", not untrusted, agreed == "valid") for name, verdict, untrusted, agreed in rows
    }
    assert list(verdicts) == list(CASES)
    for name, case in CASES.items():
        sound = not case.words
        valid = (sound and case.trusted) if case.pyhanko is None else case.pyhanko
        assert verdicts[name] == (sound, case.trusted, valid), name
