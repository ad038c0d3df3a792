"""Draw the visible panel of a sealed document: pages that say who signed, how and when.

Text in Helvetica's encoding is set in Helvetica, which is not embedded. Other text is shaped with an installed font,
which is embedded. Characters without a font are shown as code points, such as U+5C71.
"""

from __future__ import annotations

import io
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter

NOTICE: Final = "Sandbox seal with no legal value: made by a local sandbox to try out an integration."
METHODS: Final = {"email": "E-mail", "bankid": "BankID", "approval": "Approval", "sms": "SMS"}

WIDTH: Final = 595
HEIGHT: Final = 842
LEFT: Final = 57
RIGHT: Final = WIDTH - LEFT
BOTTOM: Final = 210
SEAL_BOX: Final = (LEFT, 84, RIGHT, 132)
METHOD_AT: Final = 352

JOINERS: Final = "\u200c\u200d"
"""Invisible characters that some scripts need; all others are shown as code points."""

INK: Final = (0.11, 0.14, 0.20)
MUTED: Final = (0.40, 0.44, 0.50)
FAINT: Final = (0.86, 0.88, 0.90)
ACCENT: Final = (0.05, 0.43, 0.36)

_WIDTHS: Final = {  # in thousandths of the font size; the wider of Helvetica and Helvetica-Bold
    238: "'", 278: " ,./I\\ijl‚‘’\xa0·ÌÍÎÏìíîï", 280: "|¦", 333: "!()-:;[]`ftˆ‹˜›¡¨\xad¯²³´¸¹", 350: "•", 365: "º",
    370: "ª", 389: "*r{}", 400: "°", 474: '"', 500: "z„“”ž", 556: "#$0123456789J_aceksvxy€ƒ†‡–š¢£¤¥§«¶»àáâãäåçèéêëýÿ",
    584: "+<=>^~¬±×÷", 611: "?FLTZbdghnopquŽµ¿ßðñòóôõöøùúûüþ", 667: "EPSVXYŠŸÈÉÊËÝÞ", 722: "&ABCDHKNRUÀÁÂÃÄÅÇÐÑÙÚÛÜ",
    737: "©®", 778: "GOQwÒÓÔÕÖØ", 833: "M", 834: "¼½¾", 889: "%mæ", 944: "Wœ", 1000: "…‰Œ—™Æ", 1015: "@",
}  # fmt: skip
_ADVANCE: Final = {char: width / 1000 for width, chars in _WIDTHS.items() for char in chars}

FONT_FILES: Final = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "FreeSans.ttf",
    "LiberationSans-Regular.ttf",
    "NotoSansCJKsc-Regular.otf",
    "NotoSansSC-Regular.otf",
    "NotoSansJP-Regular.otf",
    "DroidSansFallbackFull.ttf",
    "Arial Unicode.ttf",
    "arialuni.ttf",
    "arial.ttf",
)
FONT_FOLDERS: Final = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/System/Library/Fonts",
    "/Library/Fonts",
    "C:/Windows/Fonts",
)


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


class _Face(Protocol):
    """A font: measures text as a multiple of the font size, and returns the operators that show it."""

    @property
    def name(self) -> str: ...

    @property
    def resource(self) -> Any: ...

    def width(self, text: str) -> float: ...

    def show(self, text: str) -> bytes: ...


@dataclass(frozen=True)
class _Helvetica:
    name: str
    resource: Any

    def width(self, text: str) -> float:
        return sum(_ADVANCE.get(char, 1.0) for char in text)

    def show(self, text: str) -> bytes:
        raw = text.encode("cp1252", "replace")
        return b"(%b) Tj" % raw.replace(b"\\", rb"\\").replace(b"(", rb"\(").replace(b")", rb"\)")


@dataclass(frozen=True)
class _Embedded:
    name: str
    engine: Any

    @property
    def resource(self) -> Any:
        return self.engine.as_resource()

    def width(self, text: str) -> float:
        return float(self.engine.shape(text).x_advance)

    def show(self, text: str) -> bytes:
        return bytes(self.engine.shape(text).graphics_ops)


class _Typography:
    """The fonts of one panel: Helvetica, Helvetica-Bold, and embedded fonts for other scripts."""

    def __init__(self, writer: IncrementalPdfFileWriter, panel: Panel) -> None:
        self.writer = writer
        self.plain: _Face = _Helvetica("/F1", _standard_font("Helvetica"))
        self.bold: _Face = _Helvetica("/F2", _standard_font("Helvetica-Bold"))
        self.embedded: dict[Path, _Face] = {}
        words = [panel.document_name, panel.signing_name, panel.reference]
        words += [word for signer in panel.signers for word in (signer.name, signer.email, signer.method)]
        self.characters = frozenset("".join(map(_tidy, words))) | set("U+0123456789ABCDEF .")

    def choose(self, text: str, *, bold: bool) -> tuple[_Face, str]:
        """Return the font for a text, and the text with code points for the characters that the font lacks."""
        text = _tidy(text)
        foreign = {char for char in text if char not in _ADVANCE}
        best = max(_fonts(), key=lambda font: len(foreign & font.characters), default=None) if foreign else None
        if best is None or not foreign & best.characters:
            return (self.bold if bold else self.plain), _spelled_out(text, _ADVANCE.keys())
        if best.path not in self.embedded:
            name = f"/F{3 + len(self.embedded)}"
            self.embedded[best.path] = _embed(name, best.path, self.characters & best.characters, self.writer)
        return self.embedded[best.path], _spelled_out(text, best.characters)


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


def _standard_font(name: str) -> Any:
    return as_pdf({"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": f"/{name}", "/Encoding": "/WinAnsiEncoding"})


def _embed(name: str, path: Path, characters: frozenset[str], writer: IncrementalPdfFileWriter) -> _Embedded:
    from pyhanko.pdf_utils.font.opentype import GlyphAccumulator

    return _Embedded(name, GlyphAccumulator(writer, io.BytesIO(_subset(path, characters)), font_size=1))


@lru_cache(maxsize=32)
def _subset(path: Path, characters: frozenset[str]) -> bytes:
    """Return a font file with only these characters, at 1000 units per em, which pyHanko assumes."""
    library: Any = import_module("fontTools.ttLib")
    subset: Any = import_module("fontTools.subset")
    scaling: Any = import_module("fontTools.ttLib.scaleUpem")
    options = subset.Options(drop_tables=["FFTM"], layout_features=["*"], hinting=False, notdef_outline=True)
    with library.TTFont(path, lazy=True) as font:
        subsetter = subset.Subsetter(options)
        subsetter.populate(text="".join(sorted(characters)))
        subsetter.subset(font)
        scaling.scale_upem(font, 1000)
        out = io.BytesIO()
        font.save(out)
    return out.getvalue()


def _tidy(text: str) -> str:
    """Return the text on one line, in composed characters."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _spelled_out(text: str, known: Any) -> str:
    spelled = "".join(char if char in known else f" U+{ord(char):04X} " for char in text)
    return " ".join(spelled.split())


@dataclass(frozen=True)
class _Font:
    path: Path
    characters: frozenset[str]


@cache
def _fonts() -> tuple[_Font, ...]:
    """Return the installed fonts that can be embedded; none without pyHanko's extra `opentype`."""
    try:
        import_module("uharfbuzz")  # pyHanko needs it to embed a font
        library: Any = import_module("fontTools.ttLib")
    except ImportError:
        return ()
    fonts = []
    for path in _font_files():
        try:
            with path.open("rb") as file, library.TTFont(file, lazy=True) as font:
                codes = font.getBestCmap() or {}
        except (library.TTLibError, OSError, KeyError):
            continue
        characters = map(chr, codes)
        fonts.append(_Font(path, frozenset(char for char in characters if char.isprintable() or char in JOINERS)))
    return tuple(fonts)


def _font_files() -> list[Path]:
    """Return the installed files of FONT_FILES, best first."""
    found: dict[str, Path] = {}
    for root in FONT_FOLDERS:
        for folder, _, names in os.walk(Path(root).expanduser()):
            for name in FONT_FILES:
                if name in names:
                    found.setdefault(name, Path(folder, name))
    return [found[name] for name in FONT_FILES if name in found]


def _wrap(text: str, face: _Face, limit: float, lines: int) -> list[str]:
    """Return the text in lines no wider than `limit`; text beyond `lines` lines is cut with an ellipsis."""
    wrapped: list[str] = []
    rest = text
    while rest and len(wrapped) < lines:
        fitting = _fitting(rest, face, limit)
        if len(wrapped) == lines - 1 and fitting < len(rest):
            wrapped.append(rest[: _fitting(rest, face, limit - face.width("..."))].rstrip() + "...")
            break
        space = rest.rfind(" ", 0, fitting + 1) if fitting < len(rest) else -1
        cut = space if space > 0 else fitting
        wrapped.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return wrapped


def _fitting(text: str, face: _Face, limit: float) -> int:
    """Return how many characters fit, at least one, by bisection: shaping text is expensive."""
    low, high = 1, min(len(text), 400)
    while low < high:
        middle = (low + high + 1) // 2
        if face.width(text[:middle]) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class _Sheet:
    """A surface to draw on: a page, or the appearance of the seal."""

    typography: _Typography
    operators: list[bytes] = field(default_factory=list)
    fonts: dict[str, Any] = field(default_factory=dict)

    def text(
        self,
        at: tuple[float, float],
        text: str,
        *,
        size: float,
        width: float,
        lines: int = 1,
        bold: bool = False,
        color: tuple[float, float, float] = INK,
    ) -> float:
        """Draw text in at most `lines` lines, the first with its baseline at `at`; return the last baseline."""
        face, text = self.typography.choose(text, bold=bold)
        self.fonts[face.name] = face.resource
        x, y = at
        heavier = bold and isinstance(face, _Embedded)  # only one weight is embedded; an outline makes the text bold
        weight = b"%g %g %g RG 0.35 w 2 Tr" % color if heavier else b"0 Tr"
        for number, line in enumerate(_wrap(text, face, width / size, lines)):
            y = at[1] - number * size * 1.3
            place = b"%g %g %g rg %b 1 Tf %g 0 0 %g %g %g Tm" % (*color, face.name.encode(), size, size, x, y)
            self.operators.append(b"BT %b %b %b ET" % (weight, place, face.show(line)))
        return y

    def rule(self, y: float) -> None:
        """Draw a line from margin to margin."""
        self.operators.append(b"%g %g %g RG 0.7 w %g %g m %g %g l S" % (*FAINT, LEFT, y, RIGHT, y))

    def tick(self, x: float, y: float) -> None:
        """Draw a filled circle with a check mark, centred on a point."""
        self.operators += [
            b"q 1 0 0 1 %g %g cm %g %g %g rg" % (x, y, *ACCENT),
            b"8 0 m 8 4.42 4.42 8 0 8 c -4.42 8 -8 4.42 -8 0 c -8 -4.42 -4.42 -8 0 -8 c 4.42 -8 8 -4.42 8 0 c f",
            b"1 1 1 RG 1.6 w 1 J 1 j -3.6 -0.1 m -1.1 -2.7 l 3.8 2.8 l S Q",
        ]

    def stream(self, **entries: Any) -> Any:
        """Return the drawing as a stream object."""
        generic: Any = import_module("pyhanko.pdf_utils.generic")
        named = as_pdf({f"/{key}": value for key, value in entries.items()})
        return generic.StreamObject(named, stream_data=b"\n".join(self.operators))

    def resources(self) -> dict[str, Any]:
        """Return the fonts of the drawing."""
        return {"/Font": self.fonts}


def draw(panel: Panel, writer: IncrementalPdfFileWriter, when: datetime) -> Drawn:
    """Draw the panel's pages and the seal into a writer; the pages are not yet in the page tree."""
    typography = _Typography(writer, panel)
    sheet = _Sheet(typography)
    sheets = [sheet]
    y = _heading(sheet, panel, when)
    for signer in panel.signers:
        if y < BOTTOM:
            sheet = _Sheet(typography)
            sheets.append(sheet)
            y = _continued_heading(sheet, panel)
        y = _signer(sheet, y, signer)
    for number, each in enumerate(sheets, 1):
        each.rule(66)
        each.text((LEFT, 50), NOTICE, size=8, width=400, color=MUTED)
        each.text((RIGHT - 60, 50), f"Page {number} of {len(sheets)}", size=8, width=60, color=MUTED)
    return Drawn([_page(writer, each) for each in sheets], _seal(writer, typography, panel, when))


def _heading(sheet: _Sheet, panel: Panel, when: datetime) -> float:
    sheet.text((LEFT, 770), "Signatures", size=24, width=300, bold=True)
    y = 736.0
    rows = (
        ("Document", panel.document_name),
        ("Signing", panel.signing_name),
        ("Reference", panel.reference),
        ("Sealed", _moment(when)),
    )
    for label, value in rows:
        sheet.text((LEFT, y), label, size=9.5, width=80, color=MUTED)
        y = sheet.text((LEFT + 84, y), value, size=9.5, width=RIGHT - LEFT - 84, lines=3) - 17
    count = len(panel.signers)
    y -= 16
    sheet.text((LEFT, y), f"Signed by {count} {'person' if count == 1 else 'people'}", size=12, width=280, bold=True)
    sheet.text((METHOD_AT, y), "Method and time", size=9.5, width=180, color=MUTED)
    sheet.rule(y - 11)
    return y - 33


def _continued_heading(sheet: _Sheet, panel: Panel) -> float:
    sheet.text((LEFT, 770), "Signatures, continued", size=12, width=280, bold=True)
    sheet.text((METHOD_AT, 770), panel.reference, size=9.5, width=RIGHT - METHOD_AT, color=MUTED)
    sheet.rule(759)
    return 737


def _signer(sheet: _Sheet, y: float, signer: Signer) -> float:
    """Draw a signer from the baseline `y`; return the baseline of the next."""
    sheet.tick(LEFT + 8, y - 3)
    sheet.text((METHOD_AT, y), METHODS.get(signer.method, signer.method), size=10.5, width=RIGHT - METHOD_AT)
    sheet.text((METHOD_AT, y - 14), _moment(signer.signed_at), size=9, width=RIGHT - METHOD_AT, color=MUTED)
    width = METHOD_AT - LEFT - 40
    y = sheet.text((LEFT + 28, y), signer.name, size=10.5, width=width, lines=4, bold=True)
    y = sheet.text((LEFT + 28, y - 14), signer.email, size=9, width=width, color=MUTED)
    sheet.rule(y - 12)
    return y - 33


def _moment(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _page(writer: IncrementalPdfFileWriter, sheet: _Sheet) -> Any:
    """Return a page that inherits nothing from the document's page tree."""
    contents = sheet.stream()
    contents.compress()
    box = [0, 0, WIDTH, HEIGHT]
    entries = {
        "/Type": "/Page",
        "/MediaBox": box,
        "/CropBox": box,
        "/Rotate": 0,
        "/Resources": sheet.resources(),
        "/Contents": writer.add_object(contents),
    }
    return writer.add_object(as_pdf(entries))


def _seal(writer: IncrementalPdfFileWriter, typography: _Typography, panel: Panel, when: datetime) -> Any:
    """Return the appearance of the signature field, a framed note."""
    width, height = SEAL_BOX[2] - SEAL_BOX[0], SEAL_BOX[3] - SEAL_BOX[1]
    sheet = _Sheet(typography)
    sheet.operators += [
        b"0.965 0.975 0.972 rg 0 0 %g %g re f" % (width, height),
        b"%g %g %g rg 0 0 3 %g re f" % (*ACCENT, height),
    ]
    sheet.text(
        (18, height - 20), "Sealed electronically by the signing sandbox", size=10.5, width=width - 36, bold=True
    )
    words = f"{_moment(when)}, reference {panel.reference}"
    sheet.text((18, height - 35), words, size=9, width=width - 36, color=MUTED)
    box = [0, 0, width, height]
    return writer.add_object(sheet.stream(Type="/XObject", Subtype="/Form", BBox=box, Resources=sheet.resources()))
