"""Read the objects of a PDF as its readers do, through its cross-references: without a dependency, in bounded work.

From `startxref` at the file's end along the chain of cross-references to the trailer, and from there to whatever object
is asked for. Nothing else is looked at, so a large file costs no more than a small one, and words that look alike in
streams, strings and comments cannot mislead. All work is paid from one budget; there is one reader for all who ask, so
that they cannot come to see different documents in one file.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

__all__ = [
    "OBJECT",
    "REGULAR",
    "ROW",
    "ROWS",
    "SPACE",
    "STEP",
    "WINDOW",
    "Budget",
    "Bytes",
    "Dict",
    "Read",
    "Ref",
    "Text",
    "UnreadablePdf",
    "Value",
    "decode",
    "expect_dict",
]

Bytes: TypeAlias = bytes | bytearray | memoryview
Read: TypeAlias = Callable[[int, int], Bytes]
"""The bytes of a file from an offset on, just so many."""

STEP: Final = 80
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
ROW = re.compile(rb"([0-9]{10}) ([0-9]{5}) ([nf])")
ROWS = re.compile(rb"(?:[0-9]{10} [0-9]{5} [nf][\r\n ]{2})*+")
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
_ENDLESS = (TOKEN, _STRING_PART, ROWS)
_NAME, _NUMBER, _STRING, _WORD = 1, 2, 4, 5  # groups of a token; the third are marks
_CLOSED_BY = {b"[": b"]", b"<<": b">>"}


class Ref(NamedTuple):
    number: int
    generation: int


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


def decode(raw: bytes, entries: Dict, budget: Budget) -> bytes:
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


def expect_dict(value: Value) -> Dict:
    if isinstance(value, dict):
        return value
    raise UnreadablePdf
