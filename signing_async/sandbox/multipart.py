"""A multipart/form-data body, taken apart as it arrives: headers and slices of data, never a whole part."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

MAX_HEADERS = 16 * 1024

_BOUNDARY = re.compile(r"""(?i);\s*boundary\s*=\s*(?:"([^"\\]{1,200})"|([^\s;"]{1,200}))""")
_PARAMETER = re.compile(r""";\s*([\w*!#$%&'+.^`|~-]{1,40})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))""")


class MalformedMultipart(ValueError):
    """The body is not what its content type says."""


@dataclass(frozen=True, slots=True)
class PartHeaders:
    """A part begins: the field it is for, and the file's name if it is a file."""

    name: str | None
    filename: str | None


def boundary_of(content_type: str) -> bytes | None:
    """The boundary that a Content-Type of multipart/form-data names; None for anything else."""
    kind, _, _ = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        return None
    found = _BOUNDARY.search(content_type)
    return (found[1] or found[2]).encode("utf-8", "surrogateescape") if found else None


class Multipart:
    """Feed it bytes; it gives a `PartHeaders` where a part begins and `bytes` for its content."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # the first delimiter may stand at the very beginning
        self._in_data = False
        self._started = False
        self.finished: bool = False

    def feed(self, data: bytes) -> Iterator[PartHeaders | bytes]:
        """What these bytes bring to light."""
        if self.finished:
            return  # an epilogue means nothing
        self._buffer += data
        while not self.finished:
            if self._started and not self._in_data:
                headers = self._headers()
                if headers is None:
                    return
                if not self.finished:
                    yield headers
            else:
                found, chunk = self._until_delimiter()
                if chunk and self._in_data:
                    yield chunk
                if not found:
                    return
                self._started, self._in_data = True, False

    def _until_delimiter(self) -> tuple[bool, bytes]:
        at = self._buffer.find(self._delimiter)
        if at < 0:
            keep = len(self._delimiter) - 1
            chunk = bytes(self._buffer[:-keep])
            del self._buffer[:-keep]
            return False, chunk
        chunk = bytes(memoryview(self._buffer)[:at])
        del self._buffer[: at + len(self._delimiter)]
        return True, chunk

    def _headers(self) -> PartHeaders | None:
        if self._buffer.startswith(b"--"):
            self.finished = True
            return PartHeaders(None, None)
        end = self._buffer.find(b"\r\n\r\n")
        if (end if end >= 0 else len(self._buffer)) > MAX_HEADERS:
            raise MalformedMultipart("the headers of a part are too long")
        if end < 0:
            return None
        lines = bytes(self._buffer[:end]).decode("utf-8", "replace").split("\r\n")
        if lines[0].strip(" \t"):
            raise MalformedMultipart("a boundary is followed by something else than a line end")
        del self._buffer[: end + 4]
        self._in_data = True
        return _describe(lines[1:])


def _describe(lines: list[str]) -> PartHeaders:
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise MalformedMultipart("a part has a header that is none")
        if name.lower() == "content-disposition":
            return _disposition(value)
    return PartHeaders(None, None)


def _disposition(value: str) -> PartHeaders:
    if value.partition(";")[0].strip().lower() != "form-data":
        return PartHeaders(None, None)
    found: dict[str, str] = {}
    for match in _PARAMETER.finditer(value):
        text = re.sub(r"\\([\"\\])", r"\1", match[2]) if match[2] is not None else match[3]
        found.setdefault(match[1].lower(), text)
    filename = found.get("filename")
    if "filename*" in found:
        charset, _, encoded = found["filename*"].partition("''")
        if charset.lower() in {"utf-8", "iso-8859-1"}:
            filename = unquote(encoded, charset, "replace")
    elif filename is not None:
        for escaped, character in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
            filename = filename.replace(escaped, character)
    return PartHeaders(found.get("name"), filename)
