"""Parse the values of a PDF, with bounded work and no dependency.

All work on a file is charged to one `Budget`, which limits the time that a hostile file can take.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

__all__ = [
    "FLAT",
    "OBJECT",
    "PLAIN_FIELD",
    "REGULAR",
    "ROW",
    "ROWS",
    "SPACE",
    "STEP",
    "STRING",
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
"""Returns the bytes of a file at an offset: takes the offset and the number of bytes."""

STEP: Final = 80
MAX_DEPTH: Final = 100
WINDOW: Final = 2048
"""How many bytes of a file `glance` reads at a time."""

MARGIN: Final = 512
"""More than any pattern below can match, except those in `_UNBOUNDED`."""

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


# Patterns that skip strings, arrays and dictionaries. Patterns for deeper nesting would take longer to compile.
STRING = rb"<[0-9A-Fa-f\x00\t\n\f\r ]*+>|\((?:[^()\\]++|\\[\x00-\xff])*+\)"
_FLAT_CONTENT = rb"(?:[^\[\]<>(){}%%]++|%b)*+" % STRING
FLAT = rb"\[%b\]|<<%b>>" % (_FLAT_CONTENT, _FLAT_CONTENT)
_CONTENT = rb"(?:[^\[\]<>(){}%%]++|%b|%b)*+" % (STRING, FLAT)
_CONTAINER = rb"\[%b\]|<<%b>>" % (_CONTENT, _CONTENT)
_READ_CONTAINERS = frozenset(
    b"/AcroForm /DecodeParms /DocMDP /Encrypt /Fields /Filter /Index /Kids /Perms /V /W".split()
)
"""The keys whose arrays and dictionaries are parsed, not skipped."""


def _plain_item(group: bytes) -> bytes:
    """Return the pattern of a reference or an integer; ``group`` opens the group of each number."""
    reference = rb"%b[0-9]{1,10}+)%b{1,9}+%b[0-9]{1,5}+)%b{1,9}+R(?!%b)" % (group, SPACE, group, SPACE, REGULAR)
    return rb"%b|%b[+-]?[0-9]{1,18}+)(?!%b)" % (reference, group, REGULAR)


def _plain_entry(group: bytes) -> bytes:
    """Return the pattern of a plain name and value; ``group`` opens the group of a key, number, name or container."""
    name = rb"%b/[^\x00\t\n\f\r ()<>\[\]{}/%%#]*+)" % group
    word = rb"(?:true|false|[+.0-9-]%b*+)(?!%b)" % (REGULAR, REGULAR)
    values = (_plain_item(group), name, group + _CONTAINER + rb")", STRING, word)
    return rb"%b%b*+(?:%b)%b*+" % (name, SPACE, b"|".join(values), SPACE)


_PLAIN_ENTRY = re.compile(_plain_entry(rb"("))
_PLAIN_ITEM = re.compile(_plain_item(rb"("))
# Without groups: Python 3.11 miscounts groups inside possessive quantifiers.
_PLAIN_DICTIONARY = re.compile(rb"%b*+<<%b*+(?:%b)*+>>" % (SPACE, SPACE, _plain_entry(rb"(?:")))
_PLAIN_ARRAY = re.compile(rb"%b*+\[%b*+(?:(?:%b)%b*+)*+\]" % (SPACE, SPACE, _plain_item(rb"(?:"), SPACE))
PLAIN_FIELD = re.compile(
    rb"%b*+<<%b*+(?:(?!/Kids|/FT(?!%b*+/(?:Btn|Ch|Tx))|(?:%b)%b*+(?:\[|<<))%b)*+>>"
    % (SPACE, SPACE, SPACE, b"|".join(sorted(_READ_CONTAINERS)), SPACE, _plain_entry(rb"(?:"))
)
"""A plain dictionary without kids, without a parsed container, and with no ``/FT`` but ``/Btn``, ``/Ch`` or ``/Tx``."""
_UNBOUNDED = (TOKEN, _STRING_PART, ROWS)
_NAME, _NUMBER, _STRING, _WORD = 1, 2, 4, 5  # groups of TOKEN; the third holds delimiters
_CLOSING = {b"[": b"]", b"<<": b">>"}


class Ref(NamedTuple):
    number: int
    generation: int


# Names are bytes with their slash. Strings, reals and booleans do not matter here: each becomes an empty str, and so
# may an array of strings.
Value: TypeAlias = "dict[bytes, Value] | list[Value] | Ref | bytes | int | str | None"
Dict: TypeAlias = "dict[bytes, Value]"


class UnreadablePdf(Exception):  # stays inside the package
    """The file cannot be parsed, or not within the budget."""


class Budget:
    """The work left for one file: 1 per byte read or inflated, and `STEP` per object, entry or row."""

    def __init__(self, left: int) -> None:
        self.left: int = left

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left <= 0:
            raise UnreadablePdf


class Text:
    """Text in PDF syntax: a whole file, an object stream, or a window that moves over a file."""

    def __init__(
        self, data: memoryview | bytes, budget: Budget, size: int | None = None, read: Read | None = None
    ) -> None:
        self.data: Bytes = data
        self.budget = budget
        self.size: int = len(data) if size is None else size
        self._base = 0
        self._read = read
        self._settled = self.size + 1
        """A match that ends here or before does not depend on what follows the window."""

    def part(self, at: int, least: int) -> Bytes:
        """Return ``least`` bytes from an offset, or fewer at the end of the text."""
        if self._read is None:
            return self.data[at : at + least]
        self.budget.spend(STEP)
        least = min(least, self.size - at)
        return self._read(at, least) if least > 0 else b""

    def _locate(self, at: int, margin: int) -> int:
        """Return the position of an offset in the window; move the window if too little of it follows."""
        if at < 0:
            raise UnreadablePdf
        here = at - self._base
        is_enough = len(self.data) - here >= margin or self._settled > len(self.data) >= here
        if self._read is None or (here >= 0 and is_enough):
            return here
        self.data, self._base = self.part(at, max(WINDOW, margin)), at
        self._settled = len(self.data) + (1 if at + len(self.data) >= self.size else -2)
        return 0

    def match(self, pattern: re.Pattern[bytes], at: int) -> tuple[re.Match[bytes], int] | None:
        """Return the match at an offset, never longer than the budget, and the offset of its end."""
        margin = MARGIN
        while True:
            here = self._locate(at, margin)
            found = pattern.match(self.data, here, here + self.budget.left)
            if self._settled > len(self.data) or (found.end() <= self._settled if found else pattern not in _UNBOUNDED):
                break
            margin *= 4
            self.budget.spend(margin)
        length = found.end() - here if found else 0
        self.budget.spend(STEP + length)
        return (found, at + length) if found else None

    def need(self, pattern: re.Pattern[bytes], at: int) -> tuple[re.Match[bytes], int]:
        """Return what `match` returns; raise `UnreadablePdf` if nothing matches."""
        if found := self.match(pattern, at):
            return found
        raise UnreadablePdf

    def value(self, at: int, skip: re.Pattern[bytes] | None = None) -> tuple[Value, int]:
        """Return the value at an offset, and its end. Of a reference at the outermost level, only the number is read.

        A value that ``skip`` matches is not parsed; None is returned for it.
        """
        if skip and (skipped := self._plain_match(skip, at)):
            length = skipped.end() - skipped.start()
            self.budget.spend(STEP + length)
            return None, at + length
        if plain := self._plain_dictionary(at) or self._plain_array(at):
            return plain
        items: list[Value] = []
        levels: list[tuple[list[Value], bytes]] = []
        budget = self.budget
        while levels or not items:
            # An inlined `need`: most of the time is spent here.
            here = at - self._base
            token = TOKEN.match(self.data, here, here + budget.left)
            if token and (end := token.end()) <= self._settled:
                at += end - here
                budget.spend(STEP + end - here)
            else:
                token, at = self.need(TOKEN, at)
            kind = token.lastindex
            word: bytes = token[kind or 0]
            if kind == _NAME:
                items.append(unescape(word))
            elif kind == _NUMBER:
                items.append(int(word))
            elif kind == _WORD:
                _read_word(word, items)
            elif kind == _STRING:
                items.append("")
            elif word == b"(":
                at = self._string_end(at)
                items.append("")
            elif word in _CLOSING:
                if len(levels) >= MAX_DEPTH - 1:
                    raise UnreadablePdf
                levels.append((items, _CLOSING[word]))
                items = []
            elif levels and levels[-1][1] == word:
                inner = items if word == b"]" else _dictionary(items)
                items = levels.pop()[0]
                items.append(inner)
            else:
                raise UnreadablePdf
        return items[0], at

    def _plain_dictionary(self, at: int) -> tuple[Value, int] | None:
        """Return a dictionary and its end if one pattern can parse it; skipped containers become ""."""
        found = self._plain_match(_PLAIN_DICTIONARY, at)
        if not found:
            return None
        entries: Dict = {}
        for key, number, generation, whole, name, container in _PLAIN_ENTRY.findall(
            self.data, found.start(), found.end()
        ):
            if number:
                entries[key] = Ref(int(number), int(generation))
            elif whole:
                entries[key] = int(whole)
            elif container and key in _READ_CONTAINERS:
                entries[key], _ = Text(container, self.budget).value(0)
            else:
                entries[key] = name or ""
        self.budget.spend(STEP * (1 + len(entries)) + found.end() - found.start())
        return entries, at + found.end() - found.start()

    def _plain_array(self, at: int) -> tuple[Value, int] | None:
        """Return an array and its end if it holds only references and integers."""
        found = self._plain_match(_PLAIN_ARRAY, at)
        if not found:
            return None
        items: list[Value] = [
            Ref(int(number), int(generation)) if number else int(whole)
            for number, generation, whole in _PLAIN_ITEM.findall(self.data, found.start(), found.end())
        ]
        self.budget.spend(STEP * (1 + len(items)) + found.end() - found.start())
        return items, at + found.end() - found.start()

    def _plain_match(self, pattern: re.Pattern[bytes], at: int) -> re.Match[bytes] | None:
        here = at - self._base
        found = pattern.match(self.data, here, here + self.budget.left)
        return found if found and found.end() <= self._settled else None

    def _string_end(self, at: int) -> int:
        depth = 1
        while depth:
            part, at = self.need(_STRING_PART, at)
            depth += {b"(": 1, b")": -1, None: 0}[part[1]]
        return at

    def numbered(self, at: int, ref: Ref, skip: re.Pattern[bytes] | None = None) -> tuple[Value, int]:
        """Return the value of the object ``ref``, which must begin at the offset, and its end; see `value`."""
        found, end = self.need(OBJECT, at)
        if (int(found[1]), int(found[2])) != ref:
            raise UnreadablePdf
        value, end = self.value(end, skip)
        self.need(_OBJECT_END, end)
        return value, end

    def stream(self, at: int, length: Value) -> bytes:
        """Return the bytes of the stream whose dictionary ends at an offset."""
        _, start = self.need(_STREAM, at)
        if not isinstance(length, int) or not 0 <= length <= self.size - start:
            raise UnreadablePdf
        self.budget.spend(length)
        self.need(_STREAM_END, start + length)
        return bytes(self.part(start, length))


def unescape(name: bytes) -> bytes:
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
    """Return a dictionary of alternating names and values; the last of equal names counts, null values are left out."""
    entries: Dict = {}
    for key, value in zip(items[::2], items[1::2], strict=False):
        if not isinstance(key, bytes):
            raise UnreadablePdf
        entries[key] = value
    if len(items) % 2:
        raise UnreadablePdf
    return {key: value for key, value in entries.items() if value is not None}


def decode(raw: bytes, entries: Dict, budget: Budget) -> bytes:
    """Return the decompressed bytes of a stream; a PNG predictor is not undone."""
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
