"""Draw the visible panel of a sealed document: pages that say who signed, how and when.

The text is set in Courier, which is not embedded: every letter has the same width. Characters that are not Latin,
Greek or Cyrillic letters are shown as code points, such as U+5C71.
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pyhanko.pdf_utils import generic
from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter

NOTICE = "Sandbox seal with no legal value: made by a local sandbox to try out an integration."
METHODS = {"email": "E-mail", "bankid": "BankID", "approval": "Approval", "sms": "SMS"}
SEAL_BOX = (57, 84, 538, 132)

_ROWS, _COLUMNS = 38, 86  # the heading has 6 rows, each signer 4
_PLAIN, _BOLD = b"/F1", b"/F2"
# A page inherits nothing from the document's page tree.
_PAGE = b"""<</Type/Page/MediaBox[0 0 595 842]/CropBox[0 0 595 842]/Rotate 0/Resources<</Font<<
/F1<</Type/Font/Subtype/Type1/BaseFont/Courier ENCODING>>/F2<</Type/Font/Subtype/Type1/BaseFont/Courier-Bold ENCODING>>
>>>>>>""".replace(
    b"ENCODING",
    b"/Encoding<</Type/Encoding/BaseEncoding/WinAnsiEncoding/Differences[GLYPHS]>>"
    b"/FirstChar 32/LastChar 255/Widths[%b]" % (b"600 " * 224),
)

_ALPHABETS = re.compile("LATIN|GREEK|CYRILLIC")
_LETTER = re.compile(r"(?:LATIN|GREEK) (CAPITAL|SMALL) LETTER (\w+)(?: WITH (.+))?")
_MARKS: dict[str | None, str] = {
    name.upper(): name for name in ("acute", "breve", "caron", "circumflex", "macron", "ogonek", "tonos")
}
_MARKS |= {None: "", "CEDILLA": "commaaccent", "DOT ABOVE": "dotaccent", "DOUBLE ACUTE": "hungarumlaut"}
_MARKS |= {"RING ABOVE": "ring", "STROKE": "slash"}
_GLYPHS = {"Ş": "Scedilla", "ş": "scedilla", "Đ": "Dcroat", "đ": "dcroat", "Ħ": "Hbar", "ħ": "hbar", "ı": "dotlessi"}
_GLYPHS |= {"Λ": "Lambda", "λ": "lambda", "ς": "sigma1"}


@dataclass(frozen=True)
class Signer:
    """A person who signed, the method, and the time (aware)."""

    name: str
    email: str
    method: str
    signed_at: datetime


@dataclass(frozen=True)
class Panel:
    """The contents of the panel."""

    signing_name: str
    document_name: str
    reference: str
    signers: Sequence[Signer]


def draw(panel: Panel, writer: IncrementalPdfFileWriter, when: datetime) -> None:
    """Append the panel's pages to a document. The last page has room for the seal, in `SEAL_BOX`."""
    about = {"Document": panel.document_name, "Signing": panel.signing_name, "Reference": panel.reference}
    rows = [(_BOLD, f"Signed by {len(panel.signers)} {'person' if len(panel.signers) == 1 else 'people'}")]
    rows += [(_PLAIN, f"{label:12}{_tidy(value)}") for label, value in {**about, "Sealed": _moment(when)}.items()]
    rows += [(_PLAIN, "")]
    for signer in panel.signers:
        how = f"{METHODS.get(signer.method, signer.method)}, {_moment(signer.signed_at)}"
        rows += [(_BOLD, _tidy(signer.name)), (_PLAIN, _tidy(signer.email)), (_PLAIN, _tidy(how)), (_PLAIN, "")]
    codes = _codes("".join(text for _, text in rows) + NOTICE + "0123456789ABCDEF+.Pageof")
    others = [char for char in codes if not char.encode("cp1252", "ignore")]
    glyphs = b" ".join(b"%d /%b" % (codes[char], _glyph(char).encode()) for char in others)
    pages = [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
    for number, page in enumerate(pages, 1):
        drawing = [b"0.7 w 57 66 m 538 66 l S", _text(_BOLD, 18, 780, "Signatures", codes)]
        drawing += [_text(font, 10, 740 - 15 * row, text, codes) for row, (font, text) in enumerate(page)]
        drawing += [_text(_PLAIN, 8, 50, NOTICE, codes), _text(_PLAIN, 8, 36, f"Page {number} of {len(pages)}", codes)]
        added: Any = generic.read_object(io.BytesIO(_PAGE.replace(b"GLYPHS", glyphs)), writer.root_ref)
        contents = generic.StreamObject(stream_data=b"\n".join(drawing))
        added[generic.NameObject("/Contents")] = writer.add_object(contents)
        writer.insert_page(added)


def _codes(text: str) -> dict[str, int]:
    """Return the code of each character: its Windows-1252 code or, if it has none, an unused code."""
    codes = {char: code for char in set(text) if char.isprintable() for code in char.encode("cp1252", "ignore")}
    letters = [char for char in sorted(set(text) - codes.keys()) if _ALPHABETS.match(unicodedata.name(char, ""))]
    free = [code for code in range(128, 256) if code not in codes.values()]
    return codes | dict(zip(letters, free, strict=False))


def _glyph(char: str) -> str:
    """Return the name of a letter in the Adobe Glyph List, by which viewers find it."""
    letter = _LETTER.fullmatch(unicodedata.name(char, ""))
    if char in _GLYPHS or letter is None or letter[3] not in _MARKS:
        return _GLYPHS.get(char, f"uni{ord(char):04X}")
    return (letter[2].capitalize() if letter[1] == "CAPITAL" else letter[2].lower()) + _MARKS[letter[3]]


def _text(font: bytes, size: int, y: int, text: str, codes: dict[str, int]) -> bytes:
    """Return the operators that show a line, with code points for characters that have no code."""
    shown = "".join(char if char in codes else f" U+{ord(char):04X} " for char in text).strip()
    shown = shown if len(shown) <= _COLUMNS else f"{shown[: _COLUMNS - 3]}..."
    return b"BT %b %d Tf 57 %d Td <%b> Tj ET" % (font, size, y, bytes(codes[char] for char in shown).hex().encode())


def _tidy(text: str) -> str:
    """Return the text on one line, in composed characters."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _moment(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
