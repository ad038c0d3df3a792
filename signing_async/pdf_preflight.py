"""Find, before anything is sent, the PDFs that the service is sure to refuse: without a dependency, in bounded work.

The file is read as a PDF reader reads it: from `startxref` at its end along the chain of cross-references to the
trailer (`/Encrypt`), the catalog and its form (signature fields with a value). Nothing else is looked at, so a large
file costs no more than a small one, and words that look alike in streams, strings and comments cannot mislead.
All work is paid from one budget; a file that exhausts it, or that cannot be followed, is left to the service to judge.
"""

from __future__ import annotations

import mmap
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal["not_pdf", "protected", "already_signed"]

_Bytes: TypeAlias = bytes | bytearray | memoryview
Read: TypeAlias = Callable[[int, int], _Bytes]
"""The bytes of a file from an offset on, just so many."""

HEADER_WINDOW: Final = 1024
"""Readers look for `%PDF-` within so many first bytes."""

TAIL_WINDOW: Final = 1054
"""Readers look for `startxref` within so many last bytes."""

BUDGET: Final = 2 * 2**20
"""What one file may cost: 1 for each byte that is read or inflated, and `STEP` for each thing that is read."""

GLANCE_BUDGET: Final = 128 * 2**10
"""What a glance may cost, which is two milliseconds at the most: it is taken where others wait."""

STEP: Final = 80
VERIFY_COST: Final = 16
MAX_DEPTH: Final = 100
WINDOW: Final = 2048
"""How much of a file a glance reads at a time."""

ROOM: Final = 512
"""More than any of the patterns below can match, but for those that have no end of their own."""

_SPACE = rb"[\x00\t\n\f\r ]"
_REGULAR = rb"[^\x00\t\n\f\r ()<>\[\]{}/%]"
_TOKEN = re.compile(
    rb"(?:%b++|%%[^\r\n]*+)*+" % _SPACE
    + rb"(?:(/%b*+)|([+-]?[0-9]{1,18}+)(?!%b)|(<<|>>|[\[\]()])|(<[0-9A-Fa-f\x00\t\n\f\r ]*+>)|(%b++))"
    % (_REGULAR, _REGULAR, _REGULAR)
)
_STRING_PART = re.compile(rb"[^()\\]*+(?:\\.|([()]))", re.DOTALL)
_OBJECT = re.compile(rb"%b{0,64}+([0-9]{1,10})%b{1,64}+([0-9]{1,5})%b{1,64}+obj" % (_SPACE, _SPACE, _SPACE))
_OBJECT_END = re.compile(rb"%b{0,64}+(?:endobj|stream)" % _SPACE)
_STREAM = re.compile(rb"%b{0,64}+stream(?:\r\n|\n|\r)" % _SPACE)
_STREAM_END = re.compile(rb"%b{0,64}+endstream" % _SPACE)
_TABLE = re.compile(rb"%b{0,64}+xref(?=%b)" % (_SPACE, _SPACE))
_SUBSECTION = re.compile(rb"%b{0,64}+([0-9]{1,10})%b{1,64}+([0-9]{1,10})%b{1,64}+" % (_SPACE, _SPACE, _SPACE))
_TABLE_END = re.compile(rb"%b{0,64}+trailer" % _SPACE)
_ROW = re.compile(rb"([0-9]{10}) ([0-9]{5}) ([nf])")
_ROWS = re.compile(rb"(?:[0-9]{10} [0-9]{5} [nf][\r\n ]{2})*+")
_START = re.compile(rb"startxref%b{1,64}+([0-9]{1,10})(?!%b)" % (_SPACE, _REGULAR))
_TRAILER = re.compile(rb"trailer")
_OBJ = re.compile(rb"obj")
_ESCAPED = re.compile(rb"#([0-9A-Fa-f]{2})")


def _plain_entry(group: bytes) -> bytes:
    """A name and its value, where both are plain; ``group`` opens what is a key, a reference, a number or a name."""
    name = rb"%b/[^\x00\t\n\f\r ()<>\[\]{}/%%#]*+)" % group
    reference = rb"%b[0-9]{1,10}+)%b{1,9}+%b[0-9]{1,5}+)%b{1,9}+R(?!%b)" % (group, _SPACE, group, _SPACE, _REGULAR)
    number = rb"%b[+-]?[0-9]{1,18}+)(?!%b)" % (group, _REGULAR)
    strings = rb"<[0-9A-Fa-f]*+>|\([^()\\]*+\)|\[(?:<[0-9A-Fa-f]*+>%b*+)++\]" % _SPACE
    return rb"%b%b*+(?:%b|%b|%b|%b)%b*+" % (name, _SPACE, reference, number, name, strings, _SPACE)


_PLAIN_ENTRY = re.compile(_plain_entry(rb"("))
# Python 3.11 loses count of groups within what is possessive.
_PLAIN_DICTIONARY = re.compile(rb"%b*+<<%b*+(?:%b)*+>>" % (_SPACE, _SPACE, _plain_entry(rb"(?:")))
_ENDLESS = (_TOKEN, _STRING_PART, _ROWS)
_NAME, _NUMBER, _STRING, _WORD = 1, 2, 4, 5  # groups of a token; the third are marks
_CLOSED_BY = {b"[": b"]", b"<<": b">>"}


class _Ref(NamedTuple):
    number: int
    generation: int


class _Place(NamedTuple):
    """Where an object is: at an offset of the file, or in the object stream `container`, or (neither) nowhere."""

    offset: int = 0
    generation: int = 0
    container: int = 0


# Names are bytes with their slash. Nothing here depends on strings, reals and booleans: each of them is the empty str,
# and an array of strings may be so too.
_Value: TypeAlias = "dict[bytes, _Value] | list[_Value] | _Ref | bytes | int | str | None"
_Dict: TypeAlias = "dict[bytes, _Value]"


class _UnreadableError(Exception):
    """The file cannot be followed, or not within the budget."""


def preflight(data: bytes | bytearray | memoryview | mmap.mmap) -> Verdict | None:
    """Why the service is sure to refuse this file, or None.

    "not_pdf": no header, or nothing that could be an object. "protected": encrypted, with whatever password.
    "already_signed": a signature field has a signature; empty fields and Adobe's usage rights do not count.
    None promises nothing: what cannot be told cheaply and surely is left to the service. The size is not judged.

    >>> preflight(b"Dear Sir or Madam")
    'not_pdf'
    """
    with memoryview(data) as whole, whole.cast("B") as view:
        header = bytes(view[:HEADER_WINDOW]).find(b"%PDF-")
        if header < 0:
            return "not_pdf"
        budget = _Budget()
        for start in sorted({0, header}, reverse=True):  # offsets count from the header, or in sloppy files from 0
            with view[start:] as data_from_start:
                try:
                    return _judge(_Document(_Text(data_from_start, budget)))
                except _UnreadableError:
                    continue
        return _judge_wreck(_Text(view, budget))


def glance(read: Read, size: int) -> bool:
    """Whether a look at a few places of a file finds all in order, so that `preflight` would have nothing against it.

    False says nothing: then `preflight` has to see the whole file.
    """
    header = bytes(read(0, min(size, HEADER_WINDOW))).find(b"%PDF-")
    if header < 0:
        return False
    text = _Text(b"", _Budget(GLANCE_BUDGET), size - header, lambda at, least: read(header + at, least))
    try:
        return _verdict(_Document(text)) is None
    except _UnreadableError:
        return False


def _judge(document: _Document) -> Verdict | None:
    """The verdict on a file whose newest trailer can be read; raises when it cannot."""
    try:
        verdict = _verdict(document)
        if verdict:
            document.verify()  # a reader that rebuilds a damaged file may come to see another document
    except _UnreadableError:
        return None
    return verdict


def _verdict(document: _Document) -> Verdict | None:
    if isinstance(document.get(document.trailer, b"/Encrypt"), dict):
        return "protected"
    return "already_signed" if _is_signed(document, document.get_dict(document.trailer, b"/Root")) else None


def _is_signed(document: _Document, catalog: _Dict) -> bool:
    rights = document.get_dict(catalog, b"/Perms")
    if _is_signature(document.get(rights, b"/DocMDP")):
        return True
    usage = [rights[key] for key in (b"/UR", b"/UR3") if isinstance(rights.get(key), _Ref)]
    fields = _fields(document, document.get_dict(catalog, b"/AcroForm"))
    return any(value not in usage and _is_signature(document.resolve(value)) for value in fields)


def _is_signature(value: _Value) -> bool:
    return isinstance(value, dict) and b"/ByteRange" in value and b"/Contents" in value


def _fields(document: _Document, form: _Dict) -> Iterator[_Value]:
    """The values of the form's signature fields, each numbered field seen once however the tree is tangled."""
    seen: set[_Value] = set()
    waiting = [(document.get(form, b"/Fields"), False)]
    while waiting:
        kids, inherits = waiting.pop()
        for kid in kids if isinstance(kids, list) else ():
            document.text.budget.spend(STEP)
            if isinstance(kid, _Ref):
                if kid in seen:
                    continue
                seen.add(kid)
            found = document.resolve(kid)
            if not isinstance(found, dict):
                continue
            kind = document.get(found, b"/FT")
            is_signature = inherits if kind is None else kind == b"/Sig"
            if is_signature:
                yield found.get(b"/V")
            waiting.append((document.get(found, b"/Kids"), is_signature))


def _judge_wreck(text: _Text) -> Verdict | None:
    """The verdict on a file that readers must rebuild: protected when every trailer in it says so and can mean it."""
    if not _OBJ.search(text.data) and not _TRAILER.search(text.data):
        return "not_pdf"
    try:
        trailers = [trailer for trailer in _trailers(text) if b"/Root" in trailer]
        meant = [_is_defined(text, trailer[key]) for trailer in trailers for key in (b"/Root", b"/Encrypt")]
    except (_UnreadableError, KeyError):
        return None
    return "protected" if meant and all(meant) else None


def _trailers(text: _Text) -> Iterator[_Dict]:
    for found in _TRAILER.finditer(text.data):
        text.budget.spend(STEP)
        if text.data[found.start() - 1] in b"\r\n":
            value, _ = text.value(found.end())
            if isinstance(value, dict):
                yield value


def _is_defined(text: _Text, entry: _Value) -> bool:
    """Whether an entry is a reference to a dictionary that the file defines exactly once, found by its number."""
    if not isinstance(entry, _Ref):
        return False
    text.budget.spend(len(text.data) // 16)
    places = [found.start() for found in re.finditer(rb"(?<=[\r\n])%d %d obj" % entry, text.data)]
    return len(places) == 1 and isinstance(text.numbered(places[0], entry)[0], dict)


class _Budget:
    """What is left to spend on one file."""

    def __init__(self, left: int = BUDGET) -> None:
        self.left = left

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left <= 0:
            raise _UnreadableError


class _Text:
    """Bytes in PDF's syntax, the file's own or an object stream's: all of them, or a window that moves over a file."""

    def __init__(
        self, data: memoryview | bytes, budget: _Budget, size: int | None = None, read: Read | None = None
    ) -> None:
        self.data: _Bytes = data
        self.budget = budget
        self.size: int = len(data) if size is None else size
        self._base = 0
        self._read = read
        self._sure = self.size + 1
        """Matches that end in the window before here stay as they are, whatever comes after the window."""

    def part(self, at: int, least: int) -> _Bytes:
        """The bytes from an offset on, so many of them; fewer only at the end."""
        if self._read is None:
            return self.data[at : at + least]
        self.budget.spend(STEP)
        least = min(least, self.size - at)
        return self._read(at, least) if least > 0 else b""

    def _here(self, at: int, room: int) -> int:
        """Where an offset is in the window, which is moved if too little comes after it."""
        if at < 0:
            raise _UnreadableError
        here = at - self._base
        if self._read is None or (here >= 0 and (len(self.data) - here >= room or self._sure > len(self.data) >= here)):
            return here
        self.data, self._base = self.part(at, max(WINDOW, room)), at
        self._sure = len(self.data) + (1 if at + len(self.data) >= self.size else -2)
        return 0

    def match(self, pattern: re.Pattern[bytes], at: int) -> tuple[re.Match[bytes], int] | None:
        """The pattern's match at an offset, never longer than the budget, and where it ends."""
        room = ROOM
        while True:
            here = self._here(at, room)
            found = pattern.match(self.data, here, here + self.budget.left)
            if self._sure > len(self.data) or (found.end() <= self._sure if found else pattern not in _ENDLESS):
                break
            room *= 4
            self.budget.spend(room)
        length = found.end() - here if found else 0
        self.budget.spend(STEP + length)
        return (found, at + length) if found else None

    def need(self, pattern: re.Pattern[bytes], at: int) -> tuple[re.Match[bytes], int]:
        if found := self.match(pattern, at):
            return found
        raise _UnreadableError

    def value(self, at: int) -> tuple[_Value, int]:
        """The value that starts at an offset, and where it ends. An outermost reference is read as its number alone."""
        if plain := self._plain_dictionary(at):
            return plain
        items: list[_Value] = []
        levels: list[tuple[list[_Value], bytes]] = []
        budget = self.budget
        while levels or not items:
            # As `need` does it, but for what is rare: most of all time is spent here.
            here = at - self._base
            token = _TOKEN.match(self.data, here, here + budget.left)
            if token and (end := token.end()) <= self._sure:
                at += end - here
                budget.spend(STEP + end - here)
            else:
                token, at = self.need(_TOKEN, at)
            kind = token.lastindex
            word: bytes = token[kind or 0]
            if kind == _NAME:
                items.append(_unescaped(word))
            elif kind == _NUMBER:
                items.append(int(word))
            elif kind == _WORD:
                _read_word(word, items)
            elif kind == _STRING:
                items.append("")
            elif word == b"(":
                at = self._string_end(at)
                items.append("")
            elif word in _CLOSED_BY:
                if len(levels) >= MAX_DEPTH - 1:
                    raise _UnreadableError
                levels.append((items, _CLOSED_BY[word]))
                items = []
            elif levels and levels[-1][1] == word:
                inner = items if word == b"]" else _dictionary(items)
                items = levels.pop()[0]
                items.append(inner)
            else:
                raise _UnreadableError
        return items[0], at

    def _plain_dictionary(self, at: int) -> tuple[_Value, int] | None:
        """The same for a dictionary with nothing in it that takes more than a pattern to read, as most of them are."""
        here = at - self._base
        found = _PLAIN_DICTIONARY.match(self.data, here, here + self.budget.left)
        if not found or found.end() > self._sure:
            return None
        entries: _Dict = {}
        for key, number, generation, whole, name in _PLAIN_ENTRY.findall(self.data, found.start(), found.end()):
            entries[key] = _Ref(int(number), int(generation)) if number else int(whole) if whole else name or ""
        self.budget.spend(STEP * (1 + len(entries)) + found.end() - here)
        return entries, at + found.end() - here

    def _string_end(self, at: int) -> int:
        depth = 1
        while depth:
            part, at = self.need(_STRING_PART, at)
            depth += {b"(": 1, b")": -1, None: 0}[part[1]]
        return at

    def numbered(self, at: int, ref: _Ref) -> tuple[_Value, int]:
        """The value of the object that starts at an offset and must be the one meant."""
        found, end = self.need(_OBJECT, at)
        if (int(found[1]), int(found[2])) != ref:
            raise _UnreadableError
        value, end = self.value(end)
        self.need(_OBJECT_END, end)
        return value, end

    def stream(self, at: int, length: _Value) -> bytes:
        """The bytes of the stream whose dictionary ends at an offset."""
        _, start = self.need(_STREAM, at)
        if not isinstance(length, int) or not 0 <= length <= self.size - start:
            raise _UnreadableError
        self.budget.spend(length)
        self.need(_STREAM_END, start + length)
        return bytes(self.part(start, length))


def _unescaped(name: bytes) -> bytes:
    return _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), name) if b"#" in name else name


def _read_word(word: bytes, items: list[_Value]) -> None:
    if word == b"R":
        match items[-2:]:
            case [int(number), int(generation)]:
                items[-2:] = [_Ref(number, generation)]
            case _:
                raise _UnreadableError
    elif word == b"null":
        items.append(None)
    elif word in (b"true", b"false") or word[:1] in b"+-.0123456789":
        items.append("")
    else:
        raise _UnreadableError


def _dictionary(items: list[_Value]) -> _Dict:
    """Names and values in turn; of a repeated name the last counts, and a null is no entry."""
    entries: _Dict = {}
    for key, value in zip(items[::2], items[1::2], strict=False):
        if not isinstance(key, bytes):
            raise _UnreadableError
        entries[key] = value
    if len(items) % 2:
        raise _UnreadableError
    return {key: value for key, value in entries.items() if value is not None}


def _decoded(raw: bytes, entries: _Dict, budget: _Budget) -> bytes:
    """A stream's bytes without their compression; a predictor is left in."""
    match entries.get(b"/Filter", []):
        case []:
            return raw
        case b"/FlateDecode" | [b"/FlateDecode"]:
            pass
        case _:
            raise _UnreadableError
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(raw, budget.left)
    except zlib.error:
        raise _UnreadableError from None
    budget.spend(len(data))
    if not unpacker.eof:
        raise _UnreadableError
    return data


class _Section:
    """One cross-reference section: where the objects are that it speaks of, and its trailer."""

    def __init__(self, text: _Text, at: int) -> None:
        self.text = text
        self.runs: list[tuple[int, int, int]] = []  # first number, how many, and where its rows are
        self.rows: _Rows | None = None
        self.hidden: _Section | None = None
        if keyword := text.match(_TABLE, at):
            self.trailer = self._read_table(keyword[1])
        else:
            self.trailer = self._read_stream(at)

    def verify(self) -> None:
        """Raise unless every row is there, and leads to the object that it is for."""
        for first, count, start in self.runs:
            places = self.rows.places(start) if self.rows else self._table_places(start)
            number = first - 1
            for number, place in zip(range(first, first + count), places, strict=False):
                self.text.budget.spend(VERIFY_COST)
                found = _OBJECT.match(self.text.data, place.offset) if place.offset else None
                if place.offset and not (found and (int(found[1]), int(found[2])) == (number, place.generation)):
                    raise _UnreadableError
            if number != first + count - 1:
                raise _UnreadableError
        if self.hidden:
            self.hidden.verify()

    def _table_places(self, start: int) -> Iterator[_Place]:
        _, end = self.text.need(_ROWS, start)
        return map(_row_place, _ROW.finditer(self.text.data, start, end))

    def _read_table(self, at: int) -> _Dict:
        while not (end := self.text.match(_TABLE_END, at)):
            head, start = self.text.need(_SUBSECTION, at)
            self.runs.append((int(head[1]), int(head[2]), start))
            at = start + 20 * int(head[2])
        trailer = _expect_dict(self.text.value(end[1])[0])
        if isinstance(hidden := trailer.get(b"/XRefStm"), int):
            if self.text.match(_TABLE, hidden):
                raise _UnreadableError  # it has to be a stream, which hides nothing further
            self.hidden = _Section(self.text, hidden)
        return trailer

    def _read_stream(self, at: int) -> _Dict:
        _, end = self.text.need(_OBJECT, at)
        value, end = self.text.value(end)
        entries = _expect_dict(value)
        if entries.get(b"/Type") != b"/XRef" or not isinstance(entries.get(b"/Size"), int):
            raise _UnreadableError
        data = _decoded(self.text.stream(end, entries.get(b"/Length")), entries, self.text.budget)
        self.rows = _Rows(data, entries, self.text.budget)
        index = entries.get(b"/Index", [0, entries.get(b"/Size")])
        row = 0
        for first, count in _pairs(index):
            self.runs.append((first, count, row))
            row += count
        return entries

    def find(self, number: int) -> _Place | None:
        """Where the object is; None when this section does not speak of it."""
        self.text.budget.spend(STEP + len(self.runs))
        place = None
        for first, count, start in self.runs:
            if first <= number < first + count:
                place = self._row(number - first, start)
                break
        if not self.hidden:
            return place
        if place == _Place():
            raise _UnreadableError  # free here, defined in the hidden stream: readers disagree about which one counts
        return place or self.hidden.find(number)

    def _row(self, index: int, start: int) -> _Place:
        if self.rows:
            return self.rows.place(start + index)
        return _row_place(self.text.need(_ROW, start + 20 * index)[0])


def _row_place(row: re.Match[bytes]) -> _Place:
    return _Place(int(row[1]), int(row[2])) if row[3] == b"n" and int(row[1]) else _Place()


def _expect_dict(value: _Value) -> _Dict:
    if isinstance(value, dict):
        return value
    raise _UnreadableError


def _pairs(numbers: _Value) -> list[tuple[int, int]]:
    if not isinstance(numbers, list) or len(numbers) % 2:
        raise _UnreadableError
    whole = [number for number in numbers if isinstance(number, int)]
    if len(whole) != len(numbers) or any(number < 0 for number in whole):
        raise _UnreadableError
    return list(zip(whole[::2], whole[1::2], strict=True))


class _Rows:
    """The rows of a cross-reference stream, each computed when it is asked for."""

    def __init__(self, data: bytes, entries: _Dict, budget: _Budget) -> None:
        match entries.get(b"/W"):
            case [int(kind), int(middle), int(last)] if 0 <= kind <= 4 and 0 < middle <= 8 and 0 <= last <= 8:
                self.widths = (kind, middle, last)
            case _:
                raise _UnreadableError
        self.columns = kind + middle + last
        self.data = data
        self.budget = budget
        self.marks = self._filter_marks(entries.get(b"/DecodeParms"))

    def _filter_marks(self, parameters: _Value) -> bytes | None:
        """Each row's PNG filter, None when there is no predictor; only plain rows and differences (Up) are read."""
        if isinstance(parameters, list) and len(parameters) == 1:
            parameters = parameters[0]
        settings = parameters if isinstance(parameters, dict) else {}
        predictor = settings.get(b"/Predictor", 1)
        if predictor == 1:
            return None
        marks = self.data[:: self.columns + 1]
        usual = isinstance(predictor, int) and predictor >= 10 and settings.get(b"/Columns") == self.columns
        if not usual or marks.strip(b"\x00\x02") or settings.keys() - {b"/Predictor", b"/Columns"}:
            raise _UnreadableError
        return marks

    def place(self, row: int) -> _Place:
        """Where the object of this row is."""
        return self._place(self._cells(row))

    def places(self, row: int) -> Iterator[_Place]:
        """Where the objects of this and all later rows are."""
        above = b""
        skip = 1 if self.marks else 0
        for number in range(row, len(self.data) // (self.columns + skip)):
            at = number * (self.columns + skip) + skip
            cells = self.data[at : at + self.columns]
            if self.marks and number == row:
                cells = self._cells(row)
            elif self.marks and self.marks[number]:
                cells = bytes((new + old) & 255 for new, old in zip(cells, above, strict=True))
            above = cells
            yield self._place(cells)

    def _place(self, cells: bytes) -> _Place:
        if len(cells) != self.columns:
            raise _UnreadableError
        kind_width, middle_width, _ = self.widths
        kind = int.from_bytes(cells[:kind_width], "big") if kind_width else 1
        middle = int.from_bytes(cells[kind_width : kind_width + middle_width], "big")
        last = int.from_bytes(cells[kind_width + middle_width :], "big")
        if kind == 2:
            return _Place(container=middle)
        return _Place(middle, last) if kind == 1 and middle else _Place()

    def _cells(self, row: int) -> bytes:
        if self.marks is None:
            return self.data[row * self.columns : (row + 1) * self.columns]
        if row >= len(self.marks):
            raise _UnreadableError
        base = max(0, self.marks.rfind(b"\x00", 0, row + 1))  # a plain row; every later one adds to it
        stride = self.columns + 1
        self.budget.spend((row - base) * self.columns)
        lines = self.data[base * stride : (row + 1) * stride]
        return bytes(sum(lines[column::stride]) & 255 for column in range(1, stride))


class _Document:
    """The file's objects, found through as many of its cross-reference sections as are needed."""

    def __init__(self, text: _Text) -> None:
        self.text = text
        tail = bytes(text.part(max(0, text.size - TAIL_WINDOW), TAIL_WINDOW))
        start = _START.match(tail, max(0, tail.rfind(b"startxref")))
        if not start:
            raise _UnreadableError
        self._sections: list[_Section] = []
        self._next: _Value = int(start[1])
        self._seen: set[int] = set()
        self._packed: dict[int, tuple[_Text, dict[int, int]]] = {}
        self.trailer = self._load(int(start[1])).trailer
        if not isinstance(self.trailer.get(b"/Root"), _Ref) or not isinstance(self.trailer.get(b"/Size"), int):
            raise _UnreadableError

    def verify(self) -> None:
        """Raise unless every cross-reference section of the file can be read."""
        self._find(-1)
        for section in self._sections:
            section.verify()

    def _load(self, at: int) -> _Section:
        if at in self._seen:
            raise _UnreadableError
        self._seen.add(at)
        section = _Section(self.text, at)
        self._sections.append(section)
        self._next = section.trailer.get(b"/Prev")
        return section

    def _find(self, number: int) -> _Place:
        for section in self._sections:
            if place := section.find(number):
                return place
        while isinstance(self._next, int):
            if place := self._load(self._next).find(number):
                return place
        return _Place()

    def resolve(self, value: _Value) -> _Value:
        """What a reference leads to (None when nowhere); any other value itself."""
        if not isinstance(value, _Ref):
            return value
        place = self._find(value.number)
        if place.generation != value.generation:
            return None
        if place.container:
            return self._unpacked(place.container, value.number)
        return self.text.numbered(place.offset, value)[0] if place.offset else None

    def get(self, entries: _Dict, key: bytes) -> _Value:
        return self.resolve(entries.get(key))

    def get_dict(self, entries: _Dict, key: bytes) -> _Dict:
        """The dictionary under this key, an empty one when there is none."""
        value = self.get(entries, key)
        return value if isinstance(value, dict) else {}

    def _unpacked(self, container: int, number: int) -> _Value:
        if container not in self._packed:
            self._packed[container] = self._unpack(container)
        text, starts = self._packed[container]
        return text.value(starts[number])[0] if number in starts else None

    def _unpack(self, container: int) -> tuple[_Text, dict[int, int]]:
        """An object stream's text, and where each of its objects starts in it."""
        value, end = self._unpackable(_Ref(container, 0))
        entries = _expect_dict(value)
        length = entries.get(b"/Length")
        if isinstance(length, _Ref):
            length, _ = self._unpackable(length)
        data = _decoded(self.text.stream(end, length), entries, self.text.budget)
        match entries.get(b"/Type"), entries.get(b"/N"), entries.get(b"/First"):
            case b"/ObjStm", int(count), int(first) if b"/DecodeParms" not in entries:
                heads = data[: max(0, first)].split()[: max(0, 2 * count)]
            case _:
                raise _UnreadableError
        self.text.budget.spend(STEP * len(heads))
        if not all(head.isdigit() and len(head) < 11 for head in heads) or len(set(heads[::2])) != len(heads[1::2]):
            raise _UnreadableError
        starts = {int(n): first + int(at) for n, at in zip(heads[::2], heads[1::2], strict=True)}
        return _Text(data, self.text.budget), starts

    def _unpackable(self, ref: _Ref) -> tuple[_Value, int]:
        """An object of the file itself, and where it ends: what unpacks object streams cannot be in one."""
        place = self._find(ref.number)
        if not place.offset or place.generation != ref.generation:
            raise _UnreadableError
        return self.text.numbered(place.offset, ref)
