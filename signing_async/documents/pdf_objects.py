"""Read the objects of a PDF as its readers do, through its cross-references: without a dependency, in bounded work.

From `startxref` at the file's end along the chain of cross-references to the trailer, and from there to whatever object
is asked for. Nothing else is looked at, so a large file costs no more than a small one, and words that look alike in
streams, strings and comments cannot mislead. All work is paid from one budget; there is one reader for all who ask, so
that they cannot come to see different documents in one file.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

__all__ = [
    "HEADER_WINDOW",
    "OBJECT",
    "ROW",
    "SPACE",
    "START",
    "STEP",
    "TAIL_WINDOW",
    "WINDOW",
    "Budget",
    "Dict",
    "Document",
    "Read",
    "Ref",
    "Text",
    "UnreadablePdf",
    "Value",
    "signature_values",
]

Bytes: TypeAlias = bytes | bytearray | memoryview
Read: TypeAlias = Callable[[int, int], Bytes]
"""The bytes of a file from an offset on, just so many."""

HEADER_WINDOW: Final = 1024
"""Readers look for `%PDF-` within so many first bytes."""

TAIL_WINDOW: Final = 1054
"""Readers look for `startxref` within so many last bytes."""

STEP: Final = 80
VERIFY_COST: Final = 16
MAX_DEPTH: Final = 100
WINDOW: Final = 2048
"""How much of a file a glance reads at a time."""

ROOM: Final = 512
"""More than any of the patterns below can match, but for those that have no end of their own."""

SPACE = rb"[\x00\t\n\f\r ]"
REGULAR = rb"[^\x00\t\n\f\r ()<>\[\]{}/%]"
TOKEN = re.compile(
    rb"(?:%b++|%%[^\r\n]*+)*+" % SPACE
    + rb"(?:(/%b*+)|([+-]?[0-9]{1,18}+)(?!%b)|(<<|>>|[\[\]()])|(<[0-9A-Fa-f\x00\t\n\f\r ]*+>)|(%b++))"
    % (REGULAR, REGULAR, REGULAR)
)
_STRING_PART = re.compile(rb"[^()\\]*+(?:\\.|([()]))", re.DOTALL)
OBJECT = re.compile(rb"%b{0,64}+([0-9]{1,10})%b{1,64}+([0-9]{1,5})%b{1,64}+obj" % (SPACE, SPACE, SPACE))
_OBJECT_END = re.compile(rb"%b{0,64}+(?:endobj|stream)" % SPACE)
_STREAM = re.compile(rb"%b{0,64}+stream(?:\r\n|\n|\r)" % SPACE)
_STREAM_END = re.compile(rb"%b{0,64}+endstream" % SPACE)
_TABLE = re.compile(rb"%b{0,64}+xref(?=%b)" % (SPACE, SPACE))
_SUBSECTION = re.compile(rb"%b{0,64}+([0-9]{1,10})%b{1,64}+([0-9]{1,10})%b{1,64}+" % (SPACE, SPACE, SPACE))
_TABLE_END = re.compile(rb"%b{0,64}+trailer" % SPACE)
ROW = re.compile(rb"([0-9]{10}) ([0-9]{5}) ([nf])")
_ROWS = re.compile(rb"(?:[0-9]{10} [0-9]{5} [nf][\r\n ]{2})*+")
START = re.compile(rb"startxref%b{1,64}+([0-9]{1,10})(?!%b)" % (SPACE, REGULAR))
_ESCAPED = re.compile(rb"#([0-9A-Fa-f]{2})")


def _plain_entry(group: bytes) -> bytes:
    """A name and its value, where both are plain; ``group`` opens what is a key, a reference, a number or a name."""
    name = rb"%b/[^\x00\t\n\f\r ()<>\[\]{}/%%#]*+)" % group
    reference = rb"%b[0-9]{1,10}+)%b{1,9}+%b[0-9]{1,5}+)%b{1,9}+R(?!%b)" % (group, SPACE, group, SPACE, REGULAR)
    number = rb"%b[+-]?[0-9]{1,18}+)(?!%b)" % (group, REGULAR)
    strings = rb"<[0-9A-Fa-f]*+>|\([^()\\]*+\)|\[(?:<[0-9A-Fa-f]*+>%b*+)++\]" % SPACE
    return rb"%b%b*+(?:%b|%b|%b|%b)%b*+" % (name, SPACE, reference, number, name, strings, SPACE)


_PLAIN_ENTRY = re.compile(_plain_entry(rb"("))
# Python 3.11 loses count of groups within what is possessive.
_PLAIN_DICTIONARY = re.compile(rb"%b*+<<%b*+(?:%b)*+>>" % (SPACE, SPACE, _plain_entry(rb"(?:")))
_ENDLESS = (TOKEN, _STRING_PART, _ROWS)
_NAME, _NUMBER, _STRING, _WORD = 1, 2, 4, 5  # groups of a token; the third are marks
_CLOSED_BY = {b"[": b"]", b"<<": b">>"}


class Ref(NamedTuple):
    number: int
    generation: int


class Place(NamedTuple):
    """Where an object is: at an offset of the file, or in the object stream `container`, or (neither) nowhere."""

    offset: int = 0
    generation: int = 0
    container: int = 0


# Names are bytes with their slash. Nothing here depends on strings, reals and booleans: each of them is the empty str,
# and an array of strings may be so too.
Value: TypeAlias = "dict[bytes, Value] | list[Value] | Ref | bytes | int | str | None"
Dict: TypeAlias = "dict[bytes, Value]"


class UnreadablePdf(Exception):  # stays inside the package
    """The file cannot be followed, or not within the budget."""


class Budget:
    """What is left to spend on one file: 1 for each byte read or inflated, and `STEP` for each thing that is read."""

    def __init__(self, left: int) -> None:
        self.left: int = left

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left <= 0:
            raise UnreadablePdf


class Text:
    """Bytes in PDF's syntax, the file's own or an object stream's: all of them, or a window that moves over a file."""

    def __init__(
        self, data: memoryview | bytes, budget: Budget, size: int | None = None, read: Read | None = None
    ) -> None:
        self.data: Bytes = data
        self.budget = budget
        self.size: int = len(data) if size is None else size
        self._base = 0
        self._read = read
        self._sure = self.size + 1
        """Matches that end in the window before here stay as they are, whatever comes after the window."""

    def part(self, at: int, least: int) -> Bytes:
        """The bytes from an offset on, so many of them; fewer only at the end."""
        if self._read is None:
            return self.data[at : at + least]
        self.budget.spend(STEP)
        least = min(least, self.size - at)
        return self._read(at, least) if least > 0 else b""

    def _here(self, at: int, room: int) -> int:
        """Where an offset is in the window, which is moved if too little comes after it."""
        if at < 0:
            raise UnreadablePdf
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
        raise UnreadablePdf

    def value(self, at: int) -> tuple[Value, int]:
        """The value that starts at an offset, and where it ends. An outermost reference is read as its number alone."""
        if plain := self._plain_dictionary(at):
            return plain
        items: list[Value] = []
        levels: list[tuple[list[Value], bytes]] = []
        budget = self.budget
        while levels or not items:
            # As `need` does it, but for what is rare: most of all time is spent here.
            here = at - self._base
            token = TOKEN.match(self.data, here, here + budget.left)
            if token and (end := token.end()) <= self._sure:
                at += end - here
                budget.spend(STEP + end - here)
            else:
                token, at = self.need(TOKEN, at)
            kind = token.lastindex
            word: bytes = token[kind or 0]
            if kind == _NAME:
                items.append(unescaped(word))
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
                    raise UnreadablePdf
                levels.append((items, _CLOSED_BY[word]))
                items = []
            elif levels and levels[-1][1] == word:
                inner = items if word == b"]" else _dictionary(items)
                items = levels.pop()[0]
                items.append(inner)
            else:
                raise UnreadablePdf
        return items[0], at

    def _plain_dictionary(self, at: int) -> tuple[Value, int] | None:
        """The same for a dictionary with nothing in it that takes more than a pattern to read, as most of them are."""
        here = at - self._base
        found = _PLAIN_DICTIONARY.match(self.data, here, here + self.budget.left)
        if not found or found.end() > self._sure:
            return None
        entries: Dict = {}
        for key, number, generation, whole, name in _PLAIN_ENTRY.findall(self.data, found.start(), found.end()):
            entries[key] = Ref(int(number), int(generation)) if number else int(whole) if whole else name or ""
        self.budget.spend(STEP * (1 + len(entries)) + found.end() - here)
        return entries, at + found.end() - here

    def _string_end(self, at: int) -> int:
        depth = 1
        while depth:
            part, at = self.need(_STRING_PART, at)
            depth += {b"(": 1, b")": -1, None: 0}[part[1]]
        return at

    def numbered(self, at: int, ref: Ref) -> tuple[Value, int]:
        """The value of the object that starts at an offset and must be the one meant."""
        found, end = self.need(OBJECT, at)
        if (int(found[1]), int(found[2])) != ref:
            raise UnreadablePdf
        value, end = self.value(end)
        self.need(_OBJECT_END, end)
        return value, end

    def stream(self, at: int, length: Value) -> bytes:
        """The bytes of the stream whose dictionary ends at an offset."""
        _, start = self.need(_STREAM, at)
        if not isinstance(length, int) or not 0 <= length <= self.size - start:
            raise UnreadablePdf
        self.budget.spend(length)
        self.need(_STREAM_END, start + length)
        return bytes(self.part(start, length))


def unescaped(name: bytes) -> bytes:
    return _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), name) if b"#" in name else name


def _read_word(word: bytes, items: list[Value]) -> None:
    if word == b"R":
        match items[-2:]:
            case [int(number), int(generation)]:
                items[-2:] = [Ref(number, generation)]
            case _:
                raise UnreadablePdf
    elif word == b"null":
        items.append(None)
    elif word in (b"true", b"false") or word[:1] in b"+-.0123456789":
        items.append("")
    else:
        raise UnreadablePdf


def _dictionary(items: list[Value]) -> Dict:
    """Names and values in turn; of a repeated name the last counts, and a null is no entry."""
    entries: Dict = {}
    for key, value in zip(items[::2], items[1::2], strict=False):
        if not isinstance(key, bytes):
            raise UnreadablePdf
        entries[key] = value
    if len(items) % 2:
        raise UnreadablePdf
    return {key: value for key, value in entries.items() if value is not None}


def _decoded(raw: bytes, entries: Dict, budget: Budget) -> bytes:
    """A stream's bytes without their compression; a predictor is left in."""
    match entries.get(b"/Filter", []):
        case []:
            return raw
        case b"/FlateDecode" | [b"/FlateDecode"]:
            pass
        case _:
            raise UnreadablePdf
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(raw, budget.left)
    except zlib.error:
        raise UnreadablePdf from None
    budget.spend(len(data))
    if not unpacker.eof:
        raise UnreadablePdf
    return data


class _Section:
    """One cross-reference section: where the objects are that it speaks of, and its trailer."""

    def __init__(self, text: Text, at: int) -> None:
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
                found = OBJECT.match(self.text.data, place.offset) if place.offset else None
                if place.offset and not (found and (int(found[1]), int(found[2])) == (number, place.generation)):
                    raise UnreadablePdf
            if number != first + count - 1:
                raise UnreadablePdf
        if self.hidden:
            self.hidden.verify()

    def _table_places(self, start: int) -> Iterator[Place]:
        _, end = self.text.need(_ROWS, start)
        return map(_row_place, ROW.finditer(self.text.data, start, end))

    def _read_table(self, at: int) -> Dict:
        while not (end := self.text.match(_TABLE_END, at)):
            head, start = self.text.need(_SUBSECTION, at)
            self.runs.append((int(head[1]), int(head[2]), start))
            at = start + 20 * int(head[2])
        trailer = _expect_dict(self.text.value(end[1])[0])
        if isinstance(hidden := trailer.get(b"/XRefStm"), int):
            if self.text.match(_TABLE, hidden):
                raise UnreadablePdf  # it has to be a stream, which hides nothing further
            self.hidden = _Section(self.text, hidden)
        return trailer

    def _read_stream(self, at: int) -> Dict:
        _, end = self.text.need(OBJECT, at)
        value, end = self.text.value(end)
        entries = _expect_dict(value)
        if entries.get(b"/Type") != b"/XRef" or not isinstance(entries.get(b"/Size"), int):
            raise UnreadablePdf
        data = _decoded(self.text.stream(end, entries.get(b"/Length")), entries, self.text.budget)
        self.rows = _Rows(data, entries, self.text.budget)
        index = entries.get(b"/Index", [0, entries.get(b"/Size")])
        row = 0
        for first, count in _pairs(index):
            self.runs.append((first, count, row))
            row += count
        return entries

    def find(self, number: int) -> Place | None:
        """Where the object is; None when this section does not speak of it."""
        self.text.budget.spend(STEP + len(self.runs))
        place = None
        for first, count, start in self.runs:
            if first <= number < first + count:
                place = self._row(number - first, start)
                break
        if not self.hidden:
            return place
        if place == Place():
            raise UnreadablePdf  # free here, defined in the hidden stream: readers disagree about which one counts
        return place or self.hidden.find(number)

    def _row(self, index: int, start: int) -> Place:
        if self.rows:
            return self.rows.place(start + index)
        return _row_place(self.text.need(ROW, start + 20 * index)[0])


def _row_place(row: re.Match[bytes]) -> Place:
    return Place(int(row[1]), int(row[2])) if row[3] == b"n" and int(row[1]) else Place()


def _expect_dict(value: Value) -> Dict:
    if isinstance(value, dict):
        return value
    raise UnreadablePdf


def _pairs(numbers: Value) -> list[tuple[int, int]]:
    if not isinstance(numbers, list) or len(numbers) % 2:
        raise UnreadablePdf
    whole = [number for number in numbers if isinstance(number, int)]
    if len(whole) != len(numbers) or any(number < 0 for number in whole):
        raise UnreadablePdf
    return list(zip(whole[::2], whole[1::2], strict=True))


class _Rows:
    """The rows of a cross-reference stream, each computed when it is asked for."""

    def __init__(self, data: bytes, entries: Dict, budget: Budget) -> None:
        match entries.get(b"/W"):
            case [int(kind), int(middle), int(last)] if 0 <= kind <= 4 and 0 < middle <= 8 and 0 <= last <= 8:
                self.widths = (kind, middle, last)
            case _:
                raise UnreadablePdf
        self.columns = kind + middle + last
        self.data = data
        self.budget = budget
        self.marks = self._filter_marks(entries.get(b"/DecodeParms"))

    def _filter_marks(self, parameters: Value) -> bytes | None:
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
            raise UnreadablePdf
        return marks

    def place(self, row: int) -> Place:
        """Where the object of this row is."""
        return self._place(self._cells(row))

    def places(self, row: int) -> Iterator[Place]:
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

    def _place(self, cells: bytes) -> Place:
        if len(cells) != self.columns:
            raise UnreadablePdf
        kind_width, middle_width, _ = self.widths
        kind = int.from_bytes(cells[:kind_width], "big") if kind_width else 1
        middle = int.from_bytes(cells[kind_width : kind_width + middle_width], "big")
        last = int.from_bytes(cells[kind_width + middle_width :], "big")
        if kind == 2:
            return Place(container=middle)
        return Place(middle, last) if kind == 1 and middle else Place()

    def _cells(self, row: int) -> bytes:
        if self.marks is None:
            return self.data[row * self.columns : (row + 1) * self.columns]
        if row >= len(self.marks):
            raise UnreadablePdf
        base = max(0, self.marks.rfind(b"\x00", 0, row + 1))  # a plain row; every later one adds to it
        stride = self.columns + 1
        self.budget.spend((row - base) * self.columns)
        lines = self.data[base * stride : (row + 1) * stride]
        return bytes(sum(lines[column::stride]) & 255 for column in range(1, stride))


class Document:
    """The file's objects, found through as many of its cross-reference sections as are needed."""

    def __init__(self, text: Text) -> None:
        self.text = text
        tail = bytes(text.part(max(0, text.size - TAIL_WINDOW), TAIL_WINDOW))
        start = START.match(tail, max(0, tail.rfind(b"startxref")))
        if not start:
            raise UnreadablePdf
        self._sections: list[_Section] = []
        self._next: Value = int(start[1])
        self._seen: dict[int, None] = {}
        self._packed: dict[int, tuple[Text, dict[int, int]]] = {}
        self.trailer: Dict = self._load(int(start[1])).trailer
        if not isinstance(self.trailer.get(b"/Root"), Ref) or not isinstance(self.trailer.get(b"/Size"), int):
            raise UnreadablePdf

    def verify(self) -> None:
        """Raise unless every cross-reference section of the file can be read."""
        self._load_all()
        for section in self._sections:
            section.verify()

    def _load(self, at: int) -> _Section:
        if at in self._seen:
            raise UnreadablePdf
        self._seen[at] = None
        section = _Section(self.text, at)
        self._sections.append(section)
        self._next = section.trailer.get(b"/Prev")
        return section

    def _load_all(self) -> None:
        while isinstance(self._next, int):
            self._load(self._next)

    def find(self, number: int) -> Place:
        """Where an object is."""
        for section in self._sections:
            if place := section.find(number):
                return place
        while isinstance(self._next, int):
            if place := self._load(self._next).find(number):
                return place
        return Place()

    def resolve(self, value: Value) -> Value:
        """What a reference leads to (None when nowhere); any other value itself."""
        if not isinstance(value, Ref):
            return value
        place = self.find(value.number)
        if place.generation != value.generation:
            return None
        if place.container:
            return self._unpacked(place.container, value.number)
        return self.text.numbered(place.offset, value)[0] if place.offset else None

    def get(self, entries: Dict, key: bytes) -> Value:
        return self.resolve(entries.get(key))

    def get_dict(self, entries: Dict, key: bytes) -> Dict:
        """The dictionary under this key, an empty one when there is none."""
        value = self.get(entries, key)
        return value if isinstance(value, dict) else {}

    def _unpacked(self, container: int, number: int) -> Value:
        if container not in self._packed:
            self._packed[container] = self._unpack(container)
        text, starts = self._packed[container]
        return text.value(starts[number])[0] if number in starts else None

    def _unpack(self, container: int) -> tuple[Text, dict[int, int]]:
        """An object stream's text, and where each of its objects starts in it."""
        value, end = self._unpackable(Ref(container, 0))
        entries = _expect_dict(value)
        length = entries.get(b"/Length")
        if isinstance(length, Ref):
            length, _ = self._unpackable(length)
        data = _decoded(self.text.stream(end, length), entries, self.text.budget)
        match entries.get(b"/Type"), entries.get(b"/N"), entries.get(b"/First"):
            case b"/ObjStm", int(count), int(first) if b"/DecodeParms" not in entries:
                heads = data[: max(0, first)].split()[: max(0, 2 * count)]
            case _:
                raise UnreadablePdf
        self.text.budget.spend(STEP * len(heads))
        if not all(head.isdigit() and len(head) < 11 for head in heads) or len(set(heads[::2])) != len(heads[1::2]):
            raise UnreadablePdf
        starts = {int(n): first + int(at) for n, at in zip(heads[::2], heads[1::2], strict=True)}
        return Text(data, self.text.budget), starts

    def _unpackable(self, ref: Ref) -> tuple[Value, int]:
        """An object of the file itself, and where it ends: what unpacks object streams cannot be in one."""
        place = self.find(ref.number)
        if not place.offset or place.generation != ref.generation:
            raise UnreadablePdf
        return self.text.numbered(place.offset, ref)


def signature_values(document: Document, form: Dict) -> Iterator[Value]:
    """The values of the form's signature fields, each numbered field seen once however the tree is tangled."""
    seen: set[Value] = set()
    waiting = [(document.get(form, b"/Fields"), False)]
    while waiting:
        kids, inherits = waiting.pop()
        for kid in kids if isinstance(kids, list) else ():
            document.text.budget.spend(STEP)
            if isinstance(kid, Ref):
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
