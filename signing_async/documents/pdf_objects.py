"""Find the objects of a PDF through its cross-references, as PDF readers do.

The search starts at `startxref` at the end of the file and follows the chain of cross-references to the trailer, and
from there to the requested objects. The rest of the file is not read: a large file costs no more than a small one, and
text that looks like an object inside a stream, string or comment cannot mislead the search. All callers use this one
reader, so they cannot see different documents in the same file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from .pdf_syntax import (
    OBJECT,
    PLAIN_FIELD,
    REGULAR,
    ROW,
    ROWS,
    SPACE,
    STEP,
    Budget,
    Dict,
    Ref,
    Text,
    UnreadablePdf,
    Value,
    decode,
    expect_dict,
)

__all__ = ["START", "TAIL_WINDOW", "Document", "signature_values"]

TAIL_WINDOW: Final = 1054
"""Readers look for `startxref` within this many bytes at the end."""

_VERIFY_COST: Final = 16

_TABLE = re.compile(rb"%b{0,64}+xref(?=%b)" % (SPACE, SPACE))
_SUBSECTION = re.compile(rb"%b{0,64}+([0-9]{1,10})%b{1,64}+([0-9]{1,10})%b{1,64}+" % (SPACE, SPACE, SPACE))
_TABLE_END = re.compile(rb"%b{0,64}+trailer" % SPACE)
START = re.compile(rb"startxref%b{1,64}+([0-9]{1,10})(?!%b)" % (SPACE, REGULAR))


class Place(NamedTuple):
    """The place of an object: an offset in the file, an object stream (``container``), or neither if it is missing."""

    offset: int = 0
    generation: int = 0
    container: int = 0


class _Section:
    """A cross-reference section: the places of the objects that it lists, and its trailer."""

    def __init__(self, text: Text, at: int) -> None:
        self.text = text
        self.runs: list[tuple[int, int, int]] = []  # first number, count, position of the rows
        self.rows: _Rows | None = None
        self.hidden: _Section | None = None
        if keyword := text.match(_TABLE, at):
            self.trailer = self._read_table(keyword[1])
        else:
            self.trailer = self._read_stream(at)

    def verify(self) -> None:
        """Raise `UnreadablePdf` unless every row exists and leads to its object."""
        for first, count, start in self.runs:
            places = self.rows.places(start) if self.rows else self._table_places(start)
            number = first - 1
            for number, place in zip(range(first, first + count), places, strict=False):
                self.text.budget.spend(_VERIFY_COST)
                found = OBJECT.match(self.text.data, place.offset) if place.offset else None
                if place.offset and not (found and (int(found[1]), int(found[2])) == (number, place.generation)):
                    raise UnreadablePdf
            if number != first + count - 1:
                raise UnreadablePdf
        if self.hidden:
            self.hidden.verify()

    def _table_places(self, start: int) -> Iterator[Place]:
        _, end = self.text.need(ROWS, start)
        return map(_row_place, ROW.finditer(self.text.data, start, end))

    def _read_table(self, at: int) -> Dict:
        while not (end := self.text.match(_TABLE_END, at)):
            head, start = self.text.need(_SUBSECTION, at)
            self.runs.append((int(head[1]), int(head[2]), start))
            at = start + 20 * int(head[2])
        trailer = expect_dict(self.text.value(end[1])[0])
        if isinstance(hidden := trailer.get(b"/XRefStm"), int):
            if self.text.match(_TABLE, hidden):
                raise UnreadablePdf  # it must be a stream, which has no hidden section of its own
            self.hidden = _Section(self.text, hidden)
        return trailer

    def _read_stream(self, at: int) -> Dict:
        _, end = self.text.need(OBJECT, at)
        value, end = self.text.value(end)
        entries = expect_dict(value)
        if entries.get(b"/Type") != b"/XRef" or not isinstance(entries.get(b"/Size"), int):
            raise UnreadablePdf
        data = decode(self.text.stream(end, entries.get(b"/Length")), entries, self.text.budget)
        self.rows = _Rows(data, entries, self.text.budget)
        index = entries.get(b"/Index", [0, entries.get(b"/Size")])
        row = 0
        for first, count in _pairs(index):
            self.runs.append((first, count, row))
            row += count
        return entries

    def find(self, number: int) -> Place | None:
        """Return the place of an object; None if this section does not list it."""
        self.text.budget.spend(STEP + len(self.runs))
        place = None
        for first, count, start in self.runs:
            if first <= number < first + count:
                place = self._row(number - first, start)
                break
        if not self.hidden:
            return place
        if place == Place():
            raise UnreadablePdf  # free here, defined in the hidden stream: readers disagree on which counts
        return place or self.hidden.find(number)

    def _row(self, index: int, start: int) -> Place:
        if self.rows:
            return self.rows.place(start + index)
        return _row_place(self.text.need(ROW, start + 20 * index)[0])


def _row_place(row: re.Match[bytes]) -> Place:
    return Place(int(row[1]), int(row[2])) if row[3] == b"n" and int(row[1]) else Place()


def _pairs(numbers: Value) -> list[tuple[int, int]]:
    if not isinstance(numbers, list) or len(numbers) % 2:
        raise UnreadablePdf
    whole = [number for number in numbers if isinstance(number, int)]
    if len(whole) != len(numbers) or any(number < 0 for number in whole):
        raise UnreadablePdf
    return list(zip(whole[::2], whole[1::2], strict=True))


class _Rows:
    """The rows of a cross-reference stream, computed on demand."""

    def __init__(self, data: bytes, entries: Dict, budget: Budget) -> None:
        match entries.get(b"/W"):
            case [int(kind), int(middle), int(last)] if 0 <= kind <= 4 and 0 < middle <= 8 and 0 <= last <= 8:
                self.widths = (kind, middle, last)
            case _:
                raise UnreadablePdf
        self.columns = kind + middle + last
        self.data = data
        self.budget = budget
        self.filters = self._row_filters(entries.get(b"/DecodeParms"))
        # The row computed last: the next lookup is usually of a later row, which builds on it.
        self._last_row, self._last_cells = -1, b""

    def _row_filters(self, parameters: Value) -> bytes | None:
        """Return the PNG filter of each row, None without a predictor. Only the filters None and Up are supported."""
        if isinstance(parameters, list) and len(parameters) == 1:
            parameters = parameters[0]
        settings = parameters if isinstance(parameters, dict) else {}
        predictor = settings.get(b"/Predictor", 1)
        if predictor == 1:
            return None
        filters = self.data[:: self.columns + 1]
        usual = isinstance(predictor, int) and predictor >= 10 and settings.get(b"/Columns") == self.columns
        if not usual or filters.strip(b"\x00\x02") or settings.keys() - {b"/Predictor", b"/Columns"}:
            raise UnreadablePdf
        return filters

    def place(self, row: int) -> Place:
        """Return the place that a row gives for its object."""
        return self._place(self._cells(row))

    def places(self, row: int) -> Iterator[Place]:
        """Yield the places in this row and all later rows."""
        above = b""
        skip = 1 if self.filters else 0
        for number in range(row, len(self.data) // (self.columns + skip)):
            at = number * (self.columns + skip) + skip
            cells = self.data[at : at + self.columns]
            if self.filters and number == row:
                cells = self._cells(row)
            elif self.filters and self.filters[number]:
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
        if self.filters is None:
            return self.data[row * self.columns : (row + 1) * self.columns]
        if row >= len(self.filters):
            raise UnreadablePdf
        base = max(0, self.filters.rfind(b"\x00", 0, row + 1))  # the last row without a filter; later ones add to it
        stride = self.columns + 1
        start, above = base, bytes(self.columns)
        if base <= self._last_row <= row:
            start, above = self._last_row + 1, self._last_cells
        self.budget.spend((row - start) * self.columns)
        lines = self.data[start * stride : (row + 1) * stride]
        cells = bytes(sum(lines[column + 1 :: stride], above[column]) & 255 for column in range(self.columns))
        self._last_row, self._last_cells = row, cells
        return cells


class Document:
    """The objects of a file. Cross-reference sections are loaded as needed."""

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
        """Raise `UnreadablePdf` unless all cross-reference sections can be read and lead to their objects."""
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
        """Return the place of an object."""
        for section in self._sections:
            if place := section.find(number):
                return place
        while isinstance(self._next, int):
            if place := self._load(self._next).find(number):
                return place
        return Place()

    def resolve(self, value: Value, skip: re.Pattern[bytes] | None = None) -> Value:
        """Return the object of a reference, or None if it is missing or ``skip`` matches it; keep any other value."""
        if not isinstance(value, Ref):
            return value
        place = self.find(value.number)
        if place.generation != value.generation:
            return None
        if place.container:
            return self._unpacked(place.container, value.number, skip)
        return self.text.numbered(place.offset, value, skip)[0] if place.offset else None

    def get(self, entries: Dict, key: bytes) -> Value:
        return self.resolve(entries.get(key))

    def get_dict(self, entries: Dict, key: bytes) -> Dict:
        """Return the dictionary under a key, an empty one if there is none."""
        value = self.get(entries, key)
        return value if isinstance(value, dict) else {}

    def _unpacked(self, container: int, number: int, skip: re.Pattern[bytes] | None) -> Value:
        if container not in self._packed:
            self._packed[container] = self._unpack(container)
        text, starts = self._packed[container]
        return text.value(starts[number], skip)[0] if number in starts else None

    def _unpack(self, container: int) -> tuple[Text, dict[int, int]]:
        """Return the text of an object stream, and the start of each object in it."""
        value, end = self._outer_object(Ref(container, 0))
        entries = expect_dict(value)
        length = entries.get(b"/Length")
        if isinstance(length, Ref):
            length, _ = self._outer_object(length)
        data = decode(self.text.stream(end, length), entries, self.text.budget)
        match entries.get(b"/Type"), entries.get(b"/N"), entries.get(b"/First"):
            case b"/ObjStm", int(count), int(first) if b"/DecodeParms" not in entries:
                heads = data[: max(0, first)].split()[: max(0, 2 * count)]
            case _:
                raise UnreadablePdf
        self.text.budget.spend(STEP * len(heads))
        are_numbers = b"".join(heads).isdigit() and max(map(len, heads)) < 11
        if (heads and not are_numbers) or len(set(heads[::2])) != len(heads[1::2]):
            raise UnreadablePdf
        starts = {int(n): first + int(at) for n, at in zip(heads[::2], heads[1::2], strict=True)}
        return Text(data, self.text.budget), starts

    def _outer_object(self, ref: Ref) -> tuple[Value, int]:
        """Return an object and its end. An object stream, and its length, cannot be in another object stream."""
        place = self.find(ref.number)
        if not place.offset or place.generation != ref.generation:
            raise UnreadablePdf
        return self.text.numbered(place.offset, ref)


def signature_values(document: Document, form: Dict) -> Iterator[Value]:
    """Yield the values of the signature fields. Each numbered field is visited once, even in a cyclic tree."""
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
            found = document.resolve(kid, None if inherits else PLAIN_FIELD)
            if not isinstance(found, dict):
                continue
            kind = document.get(found, b"/FT")
            is_signature = inherits if kind is None else kind == b"/Sig"
            if is_signature:
                yield found.get(b"/V")
            waiting.append((document.get(found, b"/Kids"), is_signature))
