"""The visible panel of a sealed document."""

from __future__ import annotations

import io
import re
import subprocess
from collections.abc import Callable

import pikepdf
import pytest

from signing_async.sandbox.sealing import Authority
from tests import pdfs
from tests.sandbox.seals import NAMES, accepts, make_panel


def text_of(result: bytes, page: int = -1) -> str:
    """Return the text of a page, extracted by Poppler."""
    with pikepdf.open(io.BytesIO(result)) as pdf:
        number = str(page if page > 0 else len(pdf.pages))
    command = ["pdftotext", "-layout", "-f", number, "-l", number, "-", "-"]
    return subprocess.run(command, input=result, capture_output=True, check=True, timeout=60).stdout.decode()


needs_poppler = pytest.mark.skipif(not pdfs.have("pdftotext"), reason="needs poppler-utils")


@needs_poppler
def test_panel_names_each_signer_and_says_that_the_seal_has_no_legal_value(sealed: Callable[..., bytes]) -> None:
    shown = text_of(sealed(pdfs.make_pdf(), make_panel(*NAMES, "Per (Pelle) \\ Ek", "Lo Ek")))
    for expected in (*NAMES, "Per (Pelle) \\ Ek", "person3@example.com"):
        assert expected in shown
    for expected in ("E-mail", "BankID", "Approval", "smartcard", "SMS"):
        assert expected in shown
    for expected in ("Signed by 5 people", "Agreement.pdf", "Employment of Anna", "ref-2c1f", "no legal value"):
        assert expected in shown
    assert "2026-03-04 05:06:07 UTC" in shown
    assert "2026-03-04 02:06:07 UTC" in shown
    assert "Page 1 of 1" in shown


@needs_poppler
def test_many_signers_take_several_pages_and_the_seal_is_on_the_last(
    sealed: Callable[..., bytes], authority: Authority
) -> None:
    names = [f"Signer Number {number}" for number in range(30)]
    result = sealed(pdfs.make_pdf(), make_panel(*names))
    assert accepts(result, authority)
    with pikepdf.open(io.BytesIO(result)) as pdf:
        count = len(pdf.pages)
        assert "/Annots" in pdf.pages[-1].obj
        assert all("/Annots" not in page.obj for page in list(pdf.pages)[:-1])
    shown = [text_of(result, page) for page in range(2, count + 1)]
    assert len(shown) == 4
    assert re.findall(r"Signer Number \d+", "".join(shown)) == names
    assert all("no legal value" in page for page in shown)
    assert "Page 4 of 4" in shown[-1]


@needs_poppler
def test_long_name_is_wrapped_and_a_very_long_one_cut_with_dots(sealed: Callable[..., bytes]) -> None:
    long = "Maria del Carmen Fernández Villaverde Castañeda Frontera Senior Vice President"
    shown = text_of(sealed(pdfs.make_pdf(), make_panel(long, "x" * 1000)))
    words = iter(re.findall(r"\S+", shown))
    assert all(word in words for word in long.split())
    assert re.search(r"x{20}\.\.\.", shown)


@needs_poppler
def test_names_in_latin_greek_and_cyrillic_are_shown(sealed: Callable[..., bytes], authority: Authority) -> None:
    names = ("Łukasz Żółć", "Дмитрий Иванов", "Ελένη Παπαδοπούλου", "A\u030ake Stro\u0308m", "İpek Şahin", "Đorđe")
    result = sealed(pdfs.make_pdf(), make_panel(*names))
    shown = text_of(result)
    for expected in (*names[:3], "Åke Ström", *names[4:]):
        assert expected in shown
    assert accepts(result, authority)


@needs_poppler
def test_hidden_and_other_characters_are_shown_as_code_points(sealed: Callable[..., bytes]) -> None:
    shown = text_of(sealed(pdfs.make_pdf(), make_panel("Zoë\u202eneila\n\tand \ue123", "山田", "What?")))
    for expected in ("Zoë U+202E neila and U+E123", "U+5C71 U+7530", "What?"):
        assert expected in shown
