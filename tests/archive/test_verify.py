"""`verify_archive` finds every difference between a folder and its manifest, offline."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import attrs
import pytest

from signing_async import Progress
from signing_async.archive import FolderStore, verify_archive
from signing_async.archive.manifest import ArchivedDocument, Manifest
from tests.archive.test_manifest import document


@pytest.fixture
async def filled(folder: Path, tmp_path: Path) -> Path:
    """A folder with five documents."""
    store = FolderStore(folder)
    manifest = Manifest(store)
    for number in range(5):
        await add(store, manifest, document(number), tmp_path)
    return folder


async def add(store: FolderStore, manifest: Manifest, entry: ArchivedDocument, folder: Path) -> None:
    data = b"%PDF-" + str(entry.document).encode()
    source = folder / "source"
    source.write_bytes(data)
    entry = attrs.evolve(entry, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    await store.put(entry.path, source, entry.sha256)
    await manifest.append(entry)


def edit(folder: Path, change: Callable[[list[bytes]], object]) -> None:
    path = folder / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    change(lines)
    path.write_bytes(b"".join(lines))


async def found(folder: Path) -> list[tuple[str, str | None, int | None]]:
    report = await verify_archive(folder)
    assert report.ok == (not report.findings)
    return [(finding.kind, finding.path, finding.line) for finding in report.findings]


async def test_whole_archive_is_ok(filled: Path) -> None:
    report = await verify_archive(filled)
    assert report.ok
    assert (report.documents, report.size, report.lines) == (5, 35, 5)
    assert f'"hash":"{report.head}"' in (filled / "manifest.jsonl").read_text("utf-8").splitlines()[-1]


async def test_missing_file_is_found(filled: Path) -> None:
    (filled / "Å/1.pdf").unlink()
    assert await found(filled) == [("missing_file", "Å/1.pdf", 2)]
    assert (await verify_archive(filled)).documents == 4


async def test_file_changed_in_one_byte_is_found(filled: Path) -> None:
    (filled / "Å/2.pdf").write_bytes(b"%PDF-d3")
    assert await found(filled) == [("changed_file", "Å/2.pdf", 3)]


async def test_extra_file_is_found(filled: Path) -> None:
    (filled / "notes.txt").touch()
    (filled / ".journal.db").touch()
    assert await found(filled) == [("extra_file", "notes.txt", None)]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"fetched_at":"2031', b'"fetched_at":"2032'),
        (b'"verdict":"sound"', b'"verdict":"trusted"'),
        (b'"hash":"', b'"hash":"0'),
        (b"{", b"[" * 10_000),
        (b"{", b""),
    ],
)
async def test_changed_line_is_found(filled: Path, number: int, old: bytes, new: bytes) -> None:
    edit(filled, lambda lines: lines.__setitem__(number, lines[number].replace(old, new, 1)))
    kinds = await found(filled)
    assert ("changed_line", None, number + 1) in kinds
    assert {kind for kind, *_ in kinds} <= {"changed_line", "extra_file", "removed_line"}


@pytest.mark.parametrize("number", range(4))
async def test_removed_line_is_found(filled: Path, number: int) -> None:
    edit(filled, lambda lines: lines.pop(number))
    assert await found(filled) == [("removed_line", None, number + 1), ("extra_file", f"Å/{number}.pdf", None)]


async def test_exchanged_and_repeated_lines_are_found(filled: Path) -> None:
    edit(filled, lambda lines: lines.reverse())
    assert {kind for kind, *_ in await found(filled)} == {"removed_line"}
    edit(filled, lambda lines: (lines.reverse(), lines.append(lines[-1])))
    assert await found(filled) == [("removed_line", None, 6)]


async def test_line_that_was_rewritten_with_its_hash_is_found(filled: Path) -> None:
    def rewrite(lines: list[bytes]) -> None:
        body = lines[1].replace(b"2031", b"2032")[: lines[1].index(b',"hash"')] + b"}"
        lines[1] = body[:-1] + b',"hash":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()

    edit(filled, rewrite)
    assert await found(filled) == [("removed_line", None, 3)]


async def test_torn_line_is_found(filled: Path) -> None:
    edit(filled, lambda lines: lines.__setitem__(4, lines[4][:50]))
    assert await found(filled) == [("torn_line", None, 5), ("extra_file", "Å/4.pdf", None)]


async def test_path_that_leads_out_of_the_archive_is_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"1")
    entry = attrs.evolve(document(1), path="../secret", size=1)
    await Manifest(FolderStore(folder)).append(entry)
    assert await found(folder) == [("missing_file", "../secret", 1)]


async def test_progress_covers_all_files(filled: Path) -> None:
    seen: list[Progress] = []
    (filled / "Å/1.pdf").unlink()
    await verify_archive(filled, seen.append)
    assert seen[0] == Progress(0, 5, 0, 35)
    assert seen[-1] == Progress(5, 5, 35, 35)


async def test_file_archived_meanwhile_is_not_extra(filled: Path, tmp_path: Path) -> None:
    store = FolderStore(filled)

    class Growing(FolderStore):
        async def names(self) -> AsyncIterator[str]:
            manifest = Manifest(store)
            await manifest.refresh()
            await add(store, manifest, document(7), tmp_path)
            async for name in super().names():
                yield name

    class Torn(Growing):
        async def names(self) -> AsyncIterator[str]:
            async for name in super().names():
                yield name
            with (filled / "manifest.jsonl").open("ab") as file:
                file.write(b"torn")

    for kind in (Growing, Torn):
        report = await verify_archive(kind(filled))
        assert (report.ok, report.lines) == (True, 5 if kind is Growing else 6)


async def test_store_that_cannot_be_listed_is_verified_without_extra_files(filled: Path) -> None:
    class Unlisted:
        def __init__(self) -> None:
            store = FolderStore(filled)
            self.put, self.read, self.append = store.put, store.read, store.append

    (filled / "notes.txt").touch()
    report = await verify_archive(Unlisted())
    assert (report.ok, report.documents) == (True, 5)


async def test_nothing_is_changed(filled: Path) -> None:
    def state() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in filled.rglob("*"))

    before = state()
    assert (await verify_archive(filled)).ok
    assert state() == before


async def test_empty_archive_is_ok(folder: Path) -> None:
    report = await verify_archive(str(folder))
    assert (report.ok, report.documents, report.head) == (True, 0, "0" * 64)
    assert not folder.exists()
