"""The table of sealed PDFs, verdicts.md: the verdict on each file, here and by pyHanko's command."""

from __future__ import annotations

import io
import os
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import click.testing
import pytest
from asn1crypto import parser, pem, x509
from pyhanko.cli import cli_root
from pyhanko.pdf_utils.reader import PdfFileReader
from pyhanko.sign.validation import validate_pdf_signature
from pyhanko_certvalidator import ValidationContext

from tests.sealed.cases import CASES, Parts, roots, sealed
from tests.sealed.pdfs import judged, sandbox_authority

ROWS = re.findall(
    r"^\| (.+?) \| (sound|\*\*not sound\*\*) \| (valid|invalid) \|",
    (Path(__file__).parent / "verdicts.md").read_text("utf-8"),
    re.MULTILINE,
)
"""The names of files, with the verdicts of this package and of pyHanko."""


def pyhanko_accepts(data: bytes, folder: Path, trust: list[bytes]) -> bool:
    """Return whether pyHanko's command accepts all signatures as valid and trusted."""
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


@pytest.mark.parametrize(("name", "verdict", "by_pyhanko"), ROWS, ids=[name for name, *_ in ROWS])
def test_report_and_pyhanko_give_each_file_its_verdict_of_the_table(
    name: str, verdict: str, by_pyhanko: str, folder: Path
) -> None:
    case = CASES[name]
    data = case.make()
    report = judged(data, roots())
    assert report.sound == (verdict == "sound") == (not case.words), report.problems
    assert case.words in " / ".join(report.problems)
    assert report.trusted == report.sound, report.trust_problems
    if report.sound:
        assert report.seals[0].shown == case.shown
        assert bool(report.seals[0].changes) == (report.bytes_after > 0 or len(report.seals) > 1)
    elif report.seals and report.seals[0].shown is not None:
        assert case.shown or not report.seals[0].shown
    assert pyhanko_accepts(data, folder, roots()) == (by_pyhanko == "valid")


def test_table_has_a_row_for_each_file() -> None:
    assert [name for name, *_ in ROWS] == list(CASES)


def altered(data: bytes, part: int, parts: int) -> Iterator[tuple[int, bytes]]:
    """Yield the file with one byte of its signature altered, for every n-th byte."""
    pieces = Parts.of(data)
    contents = bytes.fromhex(pieces.contents[1:-1].decode())
    chance = random.Random(part)
    for at in range(part, parser.peek(contents), parts):
        changed = bytearray(contents)
        changed[at] ^= chance.randrange(1, 256)
        yield at, pieces.before + b"<" + changed.hex().encode() + b">" + pieces.after


PARTS = 32


# The other parts are tested by `.ci/nightly`.
@pytest.mark.parametrize("part", range(PARTS if os.environ.get("SIGNING_NIGHTLY") else 1))
def test_no_altered_byte_of_a_signature_is_sound_if_pyhanko_refuses_it(part: int) -> None:
    root = x509.Certificate.load(pem.unarmor(sandbox_authority().certificate_pem)[2])
    count = 0
    for at, data in altered(sealed(), part, PARTS):
        if judged(data).sound:
            signature = PdfFileReader(io.BytesIO(data)).embedded_signatures[-1]
            assert validate_pdf_signature(signature, ValidationContext(trust_roots=[root])).bottom_line, at
        count += 1
    assert count > 35
