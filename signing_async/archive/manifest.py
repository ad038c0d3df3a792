"""The manifest of an archive: a line for each sealed document, chained by hashes.

A document is archived once it has a line. A line is a JSON object. Its last member, ``hash``, is the SHA-256 of the
line without ``hash``, and ``previous`` is the hash of the line before. This reveals changed and removed lines.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal

import attrs
from attrs import validators

from ..bulk import log
from ..errors import ArchiveConflict, ArchiveError
from .stores import ArchiveStore

__all__ = [
    "FIRST",
    "MANIFEST",
    "ArchivedDocument",
    "Manifest",
    "Verdict",
    "decode_line",
    "digest",
    "hash_of",
    "read_lines",
]

MANIFEST = "manifest.jsonl"
FIRST = "0" * 64
"""The ``previous`` of the first line."""

Verdict = Literal["complete", "sound", "trusted"]

_HASH = re.compile(rb',"hash":"([0-9a-f]{64})"\}\n\Z')
_text, _count = validators.instance_of(str), validators.instance_of(int)


@attrs.frozen(kw_only=True)
class ArchivedDocument:
    """A sealed document in an archive, as described by its line in the manifest."""

    service: str = attrs.field(validator=_text)
    """The origin of the service."""
    signing: str = attrs.field(validator=_text)
    """The id of the signing."""
    document: str = attrs.field(validator=_text)
    """The id of the document."""
    documents: int = attrs.field(validator=_count)
    """The number of documents in the signing."""
    path: str = attrs.field(validator=_text)
    """The file's name in the archive, with parts separated by ``/``."""
    size: int = attrs.field(validator=_count)
    sha256: str = attrs.field(validator=validators.matches_re(r"[0-9a-f]{64}"))
    completed_at: datetime | None
    """When the document was fully signed, if the service says so."""
    fetched_at: datetime
    verdict: Verdict = attrs.field(validator=validators.in_(("complete", "sound", "trusted")))
    """``"trusted"`` with ``trust``, ``"sound"`` with only ``verify``, else ``"complete"``: whole, but not verified."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        completed = None if self.completed_at is None else self.completed_at.isoformat()
        return {**attrs.asdict(self), "completed_at": completed, "fetched_at": self.fetched_at.isoformat()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ArchivedDocument:
        """Return the document with these fields. Raise KeyError, TypeError or ValueError if one is invalid."""
        known = {field.name: fields[field.name] for field in attrs.fields(cls)}
        completed, fetched = known["completed_at"], known["fetched_at"]
        known["completed_at"] = None if completed is None else datetime.fromisoformat(completed)
        return cls(**{**known, "fetched_at": datetime.fromisoformat(fetched)})


def encode_line(document: ArchivedDocument, previous: str) -> bytes:
    """Return the line of a document, which follows the line whose hash is ``previous``."""
    fields = {**document.as_dict(), "previous": previous}
    body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    return b'%s,"hash":"%s"}\n' % (body[:-1], hashlib.sha256(body).hexdigest().encode())


def decode_line(line: bytes) -> tuple[ArchivedDocument, str]:
    """Return the document of a line, and the hash of the line before it. Raise ValueError if the line was changed."""
    found = _HASH.search(line)
    if found is None or hashlib.sha256(line[: found.start()] + b"}").hexdigest().encode() != found[1]:
        raise ValueError("the line's hash does not match its content")
    try:
        fields = json.loads(line)
        return ArchivedDocument.from_dict(fields), str(fields["previous"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the line cannot be decoded: {type(error).__name__}") from None


def hash_of(line: bytes) -> str:
    """Return the hash that a line contains, or the hash of its bytes if it contains none."""
    found = _HASH.search(line)
    return hashlib.sha256(line).hexdigest() if found is None else found[1].decode()


async def read_lines(store: ArchiveStore, offset: int = 0) -> AsyncIterator[bytes]:
    """Yield the lines of the manifest with their newlines, from ``offset`` on; the last one may lack its newline."""
    rest = b""
    with suppress(FileNotFoundError):
        async for chunk in store.read(MANIFEST, offset):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line + b"\n"
    if rest:
        yield rest


class Manifest:
    """The manifest of one store, and an index of the lines read so far.

    However many writers there are, a document has one line: a writer appends a line only after it has read all others.
    """

    def __init__(self, store: ArchiveStore) -> None:
        self._store = store
        self._end, self._head = 0, FIRST
        self._known: set[bytes] = set()
        """Digests of documents that have a line (service, signing, document), and of signings that are complete."""
        self._missing: dict[bytes, int] = {}
        """For each signing of which some documents have a line: how many have none yet."""
        self._lock = asyncio.Lock()

    def __contains__(self, document: tuple[str, str, str]) -> bool:
        """Return whether a document, given as service, signing id and document id, has a line that was read."""
        return digest(*document) in self._known

    def is_complete(self, service: str, signing: str) -> bool:
        """Return whether all documents of a signing have a line that was read."""
        return digest(service, signing) in self._known

    async def refresh(self) -> None:
        """Read the lines that were appended since the last read."""
        async with self._lock:
            await self._read_new()

    async def append(self, document: ArchivedDocument) -> bool:
        """Append the line of a document, durably; return False if it has one."""
        async with self._lock:
            while (document.service, document.signing, document.document) not in self:
                line, end = encode_line(document, self._head), self._end
                try:
                    await self._store.append(MANIFEST, end, line)
                    self._note(line)
                    return True
                except ArchiveError as error:
                    # Another writer was first, or only the response was lost.
                    is_own = await self._read_new(line) and not isinstance(error, ArchiveConflict)
                    self._check_growth(end, error)
                    if is_own:
                        return True
        return False

    def _check_growth(self, end: int, error: ArchiveError) -> None:
        """Raise the error of an append at ``end``, unless lines were read behind it."""
        if self._end == end and isinstance(error, ArchiveConflict):
            message = f"{MANIFEST} was replaced or truncated after it was read; verify the archive"
            raise ArchiveError(message, transient=False) from None
        if self._end == end:
            raise error

    async def _read_new(self, attempted: bytes = b"") -> bool:
        """Read the new lines; return whether ``attempted`` is among them."""
        is_among = False
        async for line in read_lines(self._store, self._end):
            if line.endswith(b"\n"):  # else its writer has not finished, or was interrupted
                self._note(line)
                is_among = is_among or line == attempted
        return is_among

    def _note(self, line: bytes) -> None:
        """Add a line to the index."""
        self._end += len(line)
        self._head = hash_of(line)
        try:
            document = decode_line(line)[0]
        except ValueError as error:
            log.error("%s, before byte %d: %s; verify the archive", MANIFEST, self._end, error)
            return
        signing = digest(document.service, document.signing)
        if (document.service, document.signing, document.document) not in self:
            self._known.add(digest(document.service, document.signing, document.document))
            left = self._missing.pop(signing, document.documents) - 1
            if left > 0:
                self._missing[signing] = left
            else:
                self._known.add(signing)


def digest(*texts: str) -> bytes:
    """Return a short stand-in for the texts: a set of a million takes some 100 MB, of the texts themselves far more."""
    return hashlib.blake2b(repr(texts).encode(), digest_size=15).digest()
