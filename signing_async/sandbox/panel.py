"""Draw the visible panel of a sealed document: pages that say who signed, how and when.

The text is set in Helvetica, which is not embedded. Characters beyond the Latin, Greek and Cyrillic alphabets are shown
as code points, such as U+5C71.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter

NOTICE: Final = "Sandbox seal with no legal value: made by a local sandbox to try out an integration."
METHODS: Final = {"email": "E-mail", "bankid": "BankID", "approval": "Approval", "sms": "SMS"}

WIDTH: Final = 595
HEIGHT: Final = 842
LEFT: Final = 57
RIGHT: Final = WIDTH - LEFT
TOP: Final = 770
BOTTOM: Final = 210
SEAL_BOX: Final = (LEFT, 84, RIGHT, 132)

INK: Final = b"0.11 0.14 0.20 rg"
MUTED: Final = b"0.40 0.44 0.50 rg"
PLAIN: Final = b"/F1"
BOLD: Final = b"/F2"


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


@dataclass(frozen=True)
class Drawn:
    """The panel's pages and the appearance of the seal, which goes on the last page, in `SEAL_BOX`."""

    pages: Sequence[Any]
    seal: Any


def as_pdf(value: Any) -> Any:
    """Return a plain value as a pyHanko object: dictionaries, lists, integers, and names (with the slash)."""
    generic: Any = import_module("pyhanko.pdf_utils.generic")
    match value:
        case generic.PdfObject():
            return value
        case dict():
            return generic.DictionaryObject({generic.NameObject(key): as_pdf(entry) for key, entry in value.items()})
        case list() | tuple():
            return generic.ArrayObject(map(as_pdf, value))
        case str():
            return generic.NameObject(value)
    return generic.NumberObject(value)


class _Fonts:
    """Helvetica and Helvetica-Bold in Windows-1252, and each again with codes for the panel's other letters."""

    def __init__(self, text: str) -> None:
        others = sorted({char for char in text if _is_letter(char) and not _in_windows_1252(char)})
        self.others = dict(zip(others, range(32, 256), strict=False))

    def spell(self, text: str) -> str:
        """Return the text on one line, with code points for characters that have no code."""
        chars = (
            char if char in self.others or _in_windows_1252(char) else f" U+{ord(char):04X} " for char in _tidy(text)
        )
        return " ".join("".join(chars).split())

    def show(self, text: str, font: bytes, size: float) -> bytes:
        """Return the operators that show a spelled text."""
        out = b""
        for other, group in groupby(text, self.others.__contains__):
            run = list(group)
            raw = bytes(self.others[char] for char in run) if other else "".join(run).encode("cp1252")
            out += b"%b%b %g Tf <%b> Tj " % (font, b"x" * other, size, raw.hex().encode())
        return out

    def resource(self) -> dict[str, Any]:
        """Return the fonts as a resource."""
        names: dict[int, str] = import_module("fontTools.agl").UV2AGL
        glyphs = [f"/{names.get(ord(char), f'uni{ord(char):04X}')}" for char in self.others]
        others = {
            "/FirstChar": 32,
            "/LastChar": 31 + len(glyphs),
            "/Widths": [_width(char) for char in self.others],
            "/Encoding": {"/Type": "/Encoding", "/Differences": [32, *glyphs]},
        }
        fonts: dict[str, Any] = {}
        for key, name in (("/F1", "/Helvetica"), ("/F2", "/Helvetica-Bold")):
            font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": name}
            fonts[key] = {**font, "/Encoding": "/WinAnsiEncoding"}
            if glyphs:
                fonts[f"{key}x"] = font | others
        return fonts


def _width(char: str) -> int:
    """Return about how wide a letter is, in thousandths of the font size: viewers have no metrics of some of them."""
    base = unicodedata.normalize("NFD", char)[0]
    return 310 if base in "fiIjlłrtıιі" else 740 if char.isupper() else 611


def _in_windows_1252(char: str) -> bool:
    return char.isprintable() and char.encode("cp1252", "ignore") != b""


def _is_letter(char: str) -> bool:
    return char.isalpha() and unicodedata.name(char, "").startswith(("LATIN ", "GREEK ", "CYRILLIC "))


class _Sheet:
    """A surface to draw on: a page, or the appearance of the seal."""

    def __init__(self, fonts: _Fonts) -> None:
        self.fonts = fonts
        self.operators: list[bytes] = []

    def text(self, x: float, y: float, text: str, size: float = 9.5, font: bytes = PLAIN, lines: int = 1) -> float:
        """Draw text, wrapped if `lines` is above 1, the first line at the baseline `y`; return the last baseline."""
        color = MUTED if font == PLAIN else INK
        width = 50 if lines > 1 else 90
        wrapped = textwrap.wrap(self.fonts.spell(text), width)
        if len(wrapped) > lines:
            wrapped = [*wrapped[: lines - 1], wrapped[lines - 1][: width - 3] + "..."]
        for line in wrapped:
            self.operators.append(b"BT %b %g %g Td %bET" % (color, x, y, self.fonts.show(line, font, size)))
            y -= size * 1.3
        return y + size * 1.3 * bool(wrapped)

    def rule(self, y: float) -> None:
        """Draw a line from margin to margin."""
        self.operators.append(b"0.86 0.88 0.90 RG 0.7 w %g %g m %g %g l S" % (LEFT, y, RIGHT, y))

    def stream(self, **entries: Any) -> Any:
        """Return the drawing as a stream object."""
        generic: Any = import_module("pyhanko.pdf_utils.generic")
        named = as_pdf({f"/{key}": value for key, value in entries.items()})
        return generic.StreamObject(named, stream_data=b"\n".join(self.operators))


def draw(panel: Panel, writer: IncrementalPdfFileWriter, when: datetime) -> Drawn:
    """Draw the panel's pages and the seal into a writer; the pages are not yet in the page tree."""
    words = [panel.document_name, panel.signing_name, panel.reference]
    words += [word for signer in panel.signers for word in (signer.name, signer.email, signer.method)]
    fonts = _Fonts("".join(map(_tidy, words)))
    resources = as_pdf({"/Font": fonts.resource()})
    sheets = [_Sheet(fonts)]
    y = _heading(sheets[0], panel, when)
    for signer in panel.signers:
        if y < BOTTOM:
            sheets.append(_Sheet(fonts))
            y = sheets[-1].text(LEFT, TOP, f"Signatures, continued: {panel.reference}", 12, BOLD) - 33
        y = _signer(sheets[-1], y, signer)
    for number, sheet in enumerate(sheets, 1):
        sheet.rule(66)
        sheet.text(LEFT, 50, NOTICE, 8)
        sheet.text(RIGHT - 60, 50, f"Page {number} of {len(sheets)}", 8)
    return Drawn([_page(writer, sheet, resources) for sheet in sheets], _seal(writer, fonts, resources, panel, when))


def _heading(sheet: _Sheet, panel: Panel, when: datetime) -> float:
    sheet.text(LEFT, TOP, "Signatures", 24, BOLD)
    y = TOP - 34.0
    rows = {"Document": panel.document_name, "Signing": panel.signing_name, "Reference": panel.reference}
    for label, value in {**rows, "Sealed": _moment(when)}.items():
        sheet.text(LEFT, y, label)
        y = sheet.text(LEFT + 84, y, value, lines=3) - 17
    count = len(panel.signers)
    sheet.text(LEFT, y - 16, f"Signed by {count} {'person' if count == 1 else 'people'}", 12, BOLD)
    sheet.rule(y - 27)
    return y - 49


def _signer(sheet: _Sheet, y: float, signer: Signer) -> float:
    """Draw a signer from the baseline `y`; return the baseline of the next."""
    y = sheet.text(LEFT, y, signer.name, 10.5, BOLD, lines=4)
    sheet.text(LEFT, y - 14, signer.email)
    sheet.text(LEFT, y - 28, f"{METHODS.get(signer.method, signer.method)}, {_moment(signer.signed_at)}")
    sheet.rule(y - 40)
    return y - 61


def _tidy(text: str) -> str:
    """Return the text on one line, in composed characters."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _moment(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _page(writer: IncrementalPdfFileWriter, sheet: _Sheet, resources: Any) -> Any:
    """Return a page that inherits nothing from the document's page tree."""
    contents = sheet.stream()
    contents.compress()
    box = [0, 0, WIDTH, HEIGHT]
    entries = {"/Type": "/Page", "/MediaBox": box, "/CropBox": box, "/Rotate": 0}
    return writer.add_object(as_pdf({**entries, "/Resources": resources, "/Contents": writer.add_object(contents)}))


def _seal(writer: IncrementalPdfFileWriter, fonts: _Fonts, resources: Any, panel: Panel, when: datetime) -> Any:
    """Return the appearance of the signature field, a framed note."""
    width, height = SEAL_BOX[2] - SEAL_BOX[0], SEAL_BOX[3] - SEAL_BOX[1]
    sheet = _Sheet(fonts)
    background = b"0.965 0.975 0.972 rg 0 0 %g %g re f 0.05 0.43 0.36 rg 0 0 3 %g re f"
    sheet.operators.append(background % (width, height, height))
    sheet.text(18, height - 20, "Sealed electronically by the signing sandbox", 10.5, BOLD)
    sheet.text(18, height - 35, f"{_moment(when)}, reference {panel.reference}", 9)
    box = [0, 0, width, height]
    return writer.add_object(sheet.stream(Type="/XObject", Subtype="/Form", BBox=box, Resources=resources))
