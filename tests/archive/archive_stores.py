"""A conformance suite for archive stores."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from signing_async import ArchiveConflict
from signing_async.archive import ArchiveStore

__all__ = ["ArchiveStoreConformance", "ListedStoreConformance", "OpenStore"]

OpenStore = Callable[[], ArchiveStore]
"""Opens the same storage again, as another process would: a new object each time."""

_PDF = b"%PDF-1.7 \x00\xff\r\n%%EOF\n"
_LONG = bytes(range(256)) * 4096 * 9  # 9 MiB: stores may treat long files differently


class ArchiveStoreConformance:
    """The promises of the `ArchiveStore` protocol, which let an archive keep each file once and whole."""

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    @pytest.mark.parametrize("content", [b"x", _PDF, _LONG], ids=["one byte", "short", "long"])
    @pytest.mark.parametrize("name", ["a.pdf", "2031/Lease Å ☃ 😀+%20&=#'-1/lägenhet (2).pdf"], ids=["plain", "odd"])
    async def test_stored_file_is_read_unchanged(
        self, open_store: OpenStore, tmp_path: Path, name: str, content: bytes
    ) -> None:
        """Every store object on the storage reads the same bytes."""
        store = open_store()
        await put(store, name, content, tmp_path)
        assert await content_of(store, name) == content
        assert await content_of(open_store(), name) == content

    @pytest.mark.parametrize("content", [_PDF, _LONG], ids=["short", "long"])
    async def test_same_content_can_be_stored_again(
        self, open_store: OpenStore, tmp_path: Path, content: bytes
    ) -> None:
        """After a crash, the archive cannot know whether the file was stored."""
        store = open_store()
        await put(store, "lease.pdf", content, tmp_path)
        await put(store, "lease.pdf", content, tmp_path)
        await put(open_store(), "lease.pdf", content, tmp_path)
        assert await content_of(store, "lease.pdf") == content

    @pytest.mark.parametrize("content", [_PDF, _LONG], ids=["short", "long"])
    async def test_other_content_under_a_name_is_refused(
        self, open_store: OpenStore, tmp_path: Path, content: bytes
    ) -> None:
        """The first file stays, even if the other has the same length."""
        await put(open_store(), "lease.pdf", content, tmp_path)
        for other in (content[:-1] + b"?", content[:-1], content + b"?"):
            with pytest.raises(ArchiveConflict):
                await put(open_store(), "lease.pdf", other, tmp_path)
        assert await content_of(open_store(), "lease.pdf") == content

    async def test_one_of_many_concurrent_files_wins(self, open_store: OpenStore, tmp_path: Path) -> None:
        """Writers of other content are refused; the name holds the content of the writer that succeeded."""
        contents = [bytes([65 + number]) * 70_000 for number in range(6)]
        stores = [open_store() for _ in contents]
        for name in ("a.pdf", "b.pdf"):
            outcomes = await asyncio.gather(
                *(put(store, name, content, tmp_path) for store, content in zip(stores, contents, strict=True)),
                return_exceptions=True,
            )
            won = [content for content, outcome in zip(contents, outcomes, strict=True) if outcome is None]
            assert [await content_of(open_store(), name)] == won
            assert sum(isinstance(outcome, ArchiveConflict) for outcome in outcomes) == len(contents) - 1

    async def test_cancelled_put_leaves_the_whole_file_or_none(self, open_store: OpenStore, tmp_path: Path) -> None:
        store = open_store()
        for steps in (0, 1, 2, 5, 20, 100):
            name = f"{steps}.pdf"
            putting = asyncio.create_task(put(store, name, _LONG, tmp_path))
            for _ in range(steps):
                await asyncio.sleep(0)
            putting.cancel()
            await asyncio.wait([putting])
            try:
                assert await content_of(open_store(), name) == _LONG
            except FileNotFoundError:
                assert putting.cancelled()
            await put(store, name, _LONG, tmp_path)
            assert await content_of(open_store(), name) == _LONG

    async def test_appends_are_read_in_order(self, open_store: OpenStore) -> None:
        """By every store object. Offsets of one, two and three digits must not confuse the order."""
        store, other = open_store(), open_store()
        written = b""
        for number in range(30):
            line = f"{number} {'x' * number}\n".encode()
            await (store, other, open_store())[number % 3].append("manifest.jsonl", len(written), line)
            written += line
        for reader in (store, other, open_store()):
            assert await content_of(reader, "manifest.jsonl") == written

    async def test_file_is_read_from_an_offset_on(self, open_store: OpenStore, tmp_path: Path) -> None:
        """The offset may be in the middle of an append. At the end and beyond, nothing is read."""
        store = open_store()
        await put(store, "lease.pdf", _PDF, tmp_path)
        for number in range(0, 30, 10):
            await store.append("manifest.jsonl", number, b"123456789\n")
        for name, content in (("lease.pdf", _PDF), ("manifest.jsonl", b"123456789\n" * 3)):
            for offset in (1, 5, 10, 15, 20, len(content) - 1, len(content), len(content) + 100):
                for reader in (store, open_store()):
                    assert await content_of(reader, name, offset) == content[offset:]
        with pytest.raises(FileNotFoundError):
            await content_of(store, "missing", 5)

    async def test_append_at_another_offset_than_the_end_is_refused(self, open_store: OpenStore) -> None:
        """The file does not change, and an append at its end is accepted afterwards."""
        store = open_store()
        for offset in (1, 6):
            with pytest.raises(ArchiveConflict):
                await store.append("manifest.jsonl", offset, b"x\n")
        with pytest.raises(FileNotFoundError):
            await content_of(store, "manifest.jsonl")
        await store.append("manifest.jsonl", 0, b"first\n")
        await store.append("manifest.jsonl", 6, b"second\n")
        for writer in (store, open_store()):
            for offset in (0, 1, 5, 6, 7, 12, 14, 600):
                with pytest.raises(ArchiveConflict):
                    await writer.append("manifest.jsonl", offset, b"x\n")
        await open_store().append("manifest.jsonl", 13, b"third\n")
        assert await content_of(store, "manifest.jsonl") == b"first\nsecond\nthird\n"

    async def test_stale_writer_is_refused_after_others_appended(self, open_store: OpenStore) -> None:
        """Its offset is no longer the end of the file."""
        stale, other = open_store(), open_store()
        await stale.append("manifest.jsonl", 0, b"a\n")
        await other.append("manifest.jsonl", 2, b"bcd\n")
        for offset in (2, 4):
            with pytest.raises(ArchiveConflict):
                await stale.append("manifest.jsonl", offset, b"x\n")
        assert await content_of(stale, "manifest.jsonl") == b"a\nbcd\n"
        await stale.append("manifest.jsonl", 6, b"e\n")
        assert await content_of(other, "manifest.jsonl") == b"a\nbcd\ne\n"

    async def test_one_of_two_writers_at_one_offset_wins(self, open_store: OpenStore) -> None:
        """Three writers append at once, first to a missing file, then to the same file again."""
        stores = [open_store() for _ in range(3)]
        written = b""
        for _ in range(10):
            lines = [b"aa\n", b"b\n", b"cccc\n"]
            outcomes = await asyncio.gather(
                *(
                    store.append("manifest.jsonl", len(written), line)
                    for store, line in zip(stores, lines, strict=True)
                ),
                return_exceptions=True,
            )
            assert sum(isinstance(outcome, ArchiveConflict) for outcome in outcomes) == 2
            written += next(line for line, outcome in zip(lines, outcomes, strict=True) if outcome is None)
        assert await content_of(open_store(), "manifest.jsonl") == written


class ListedStoreConformance:
    """Tests the listing of a `ListedStore`, with the fixture of `ArchiveStoreConformance`."""

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    async def test_all_files_are_listed_and_hidden_ones_are_not(
        self, open_store: Callable[[], Any], tmp_path: Path
    ) -> None:
        """Each file is listed once, put or appended. A file is hidden if a part of its name begins with a dot."""
        store = open_store()
        assert [name async for name in store.names()] == []
        names = [f"2031/Lease Å {number}/a.pdf" for number in range(30)] + ["2031/a.pdf", "b.pdf"]
        for name in [*names, ".hidden/a.pdf", "2031/.part"]:
            await put(store, name, _PDF, tmp_path)
        for offset in (0, 3):
            await store.append("manifest.jsonl", offset, b"{}\n")
        for each in (store, open_store()):
            assert sorted([name async for name in each.names()]) == sorted([*names, "manifest.jsonl"])


async def put(store: ArchiveStore, name: str, content: bytes, folder: Path) -> None:
    """Store content under a name, from a new local file."""
    # Never reuse a name: a thread of a cancelled call may still read its source.
    source = folder / f"source-{secrets.token_hex(8)}"
    source.write_bytes(content)
    try:
        await store.put(name, source, hashlib.sha256(content).hexdigest())
    finally:
        source.unlink(missing_ok=True)


async def content_of(store: ArchiveStore, name: str, offset: int = 0) -> bytes:
    """Return the content of a file from ``offset`` on."""
    return b"".join([chunk async for chunk in store.read(name, offset)])
