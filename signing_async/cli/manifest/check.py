"""Check a manifest and all of its PDFs before anything is sent."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import attrs

from ...errors import InvalidRequest
from .manifest import Manifest
from .rows import Entry, Problem

__all__ = ["CheckedManifest", "check_manifest"]

MAX_PROBLEMS = 1000
"""The number of problems that are listed; the others are counted."""


@attrs.define
class CheckedManifest:
    """The totals of a valid manifest, and the hashes of its packages."""

    packages: int = 0
    documents: int = 0
    size: int = 0
    hashes: bytearray = attrs.field(factory=bytearray)
    """The content hash of each package without a key, in order, 32 bytes each."""

    def key_of(self, number: int) -> str:
        """Return the hash of the ``number``-th package without a key, counted from 0."""
        return self.hashes[32 * number : 32 * number + 32].hex()


class _Checker:
    """Collects a manifest's totals, hashes and problems."""

    def __init__(self, max_pdf_bytes: int) -> None:
        self.checked: CheckedManifest = CheckedManifest()
        self.problems: list[Problem] = []
        self.problem_count: int = 0
        self.transient: bool = True
        """Whether all problems are transient."""
        self._max_pdf_bytes = max_pdf_bytes
        self._lines: dict[bytes, int] = {}
        """The line of each key or content hash, by its short hash."""

    def add_problems(self, *problems: Problem, transient: bool = False) -> None:
        self.problem_count += len(problems)
        self.transient = self.transient and (transient or not problems)
        self.problems += problems[: max(0, MAX_PROBLEMS - len(self.problems))]

    async def check(self, entry: Entry) -> None:
        from ...dispatch.package import prepare

        if entry.package is None:
            self.add_problems(*entry.problems)
            return
        self.checked.packages += 1
        try:
            prepared = await prepare(entry.package, self._max_pdf_bytes)
        except InvalidRequest as error:
            transient = error.transient and not entry.problems
            self.add_problems(*entry.merge_problems(error.problems), transient=transient)
            return
        prepared.close()
        self.add_problems(*entry.problems)
        self.checked.documents += len(prepared.documents)
        self.checked.size += sum(document.size for document in prepared.documents)
        self._check_key(entry, entry.package.key, prepared.content)

    def _check_key(self, entry: Entry, key: str | None, content: str) -> None:
        """Register the package's key or content hash; add a problem if an earlier package has the same."""
        if key is None:
            self.checked.hashes += bytes.fromhex(content)
        short = hashlib.blake2b((key or content).encode(), digest_size=12).digest()
        first = self._lines.setdefault(short, entry.line)
        if first != entry.line and key is not None:
            self.add_problems(Problem(entry.line, "key", f"{key!r} is also the key of line {first}"))
        elif first != entry.line:
            text = f"missing, and this is the same package as line {first}; if both are to be sent, give each a key"
            self.add_problems(Problem(entry.line, "key", text))


async def check_manifest(manifest: Manifest, max_pdf_bytes: int, on_entry: Callable[[], None]) -> CheckedManifest:
    """Check a manifest and its PDFs; raise `InvalidRequest` with all problems."""
    checker = _Checker(max_pdf_bytes)
    for entry in manifest.entries():
        await checker.check(entry)
        on_entry()
        # Small files are read without suspending; this lets Ctrl-C through.
        await asyncio.sleep(0)
    if not checker.checked.packages and not checker.problem_count:
        checker.add_problems(Problem(1, "", "the manifest has no packages"))
    if checker.problem_count:
        raise _make_error(manifest, checker)
    return checker.checked


def _make_error(manifest: Manifest, checker: _Checker) -> InvalidRequest:
    lines = [f"{manifest.path}, {problem}" for problem in checker.problems]
    more = checker.problem_count - len(lines)
    lines += [f"and {more} more"] if more else []
    count = "1 problem" if checker.problem_count == 1 else f"{checker.problem_count} problems"
    error = InvalidRequest("\n  ".join([f"{count} in {manifest.path}; nothing was sent:", *lines]), problems=lines)
    error.transient = checker.transient
    return error
