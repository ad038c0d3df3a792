"""The manifest has a documented line for each document, and `verify_archive` finds every difference, offline."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from signing_async import ArchiveConflict, ArchiveError, Progress
from signing_async.archive import Archive, FolderStore, verify_archive
from tests.archive.tenants import Tenant, archived, lines_of, sweep


@pytest.fixture
async def filled(tenant: Tenant, archive: Archive) -> Path:
    """A folder with five documents of the sandbox."""
    for number in range(5):
        signing = await tenant.complete(f"Lease {number}", "å.pdf")
        await archive.collect(signing.id)
    return tenant.folder


def edit(folder: Path, change: Callable[[list[bytes]], object]) -> None:
    path = folder / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    change(lines)
    path.write_bytes(b"".join(lines))


def rewritten(line: bytes, **changes: Any) -> bytes:
    """Return a line with other fields and the right hash."""
    fields = {**json.loads(line), **changes}
    del fields["hash"]
    body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    return body[:-1] + b',"hash":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


async def found(folder: Path) -> list[tuple[str, str | None, int | None]]:
    report = await verify_archive(folder)
    assert report.ok == (not report.findings)
    return [(finding.kind, finding.path, finding.line) for finding in report.findings]


async def test_each_document_has_a_line_with_the_hash_of_the_line_before(
    tenant: Tenant, archive: Archive, filled: Path
) -> None:
    lines, raw = lines_of(filled), (filled / "manifest.jsonl").read_bytes().splitlines()
    assert [line["previous"] for line in lines] == ["0" * 64, *(line["hash"] for line in lines[:-1])]
    for line, text, entry in zip(lines, raw, [one async for one in archive.entries()], strict=True):
        assert line["hash"] == hashlib.sha256(text[: text.index(b',"hash"')] + b"}").hexdigest()
        assert line == entry.as_dict() | {"previous": line["previous"], "hash": line["hash"]}
        assert (line["service"], line["documents"], line["verdict"]) == (tenant.sandbox.base_url, 1, "complete")
        assert line["size"] == (filled / line["path"]).stat().st_size
        assert line["sha256"] == hashlib.sha256((filled / line["path"]).read_bytes()).hexdigest()
    report = await verify_archive(filled)
    size = sum(line["size"] for line in lines)
    assert (report.ok, report.documents, report.size, report.lines) == (True, 5, size, 5)
    assert report.head == lines[-1]["hash"]
    empty = await verify_archive(str(filled / "nothing"))
    assert (empty.ok, empty.documents, empty.head) == (True, 0, "0" * 64)
    assert not (filled / "nothing").exists()


async def test_missing_changed_and_extra_files_are_found(filled: Path) -> None:
    """A path that leads out of the archive is not read. A store that cannot be listed has no extra files."""

    class Unlisted:
        def __init__(self) -> None:
            store = FolderStore(filled)
            self.put, self.read, self.append = store.put, store.read, store.append

    (filled / "notes.txt").touch()
    report = await verify_archive(Unlisted())
    assert (report.ok, report.documents) == (True, 5)
    paths = [line["path"] for line in lines_of(filled)]
    (filled / paths[1]).unlink()
    data = (filled / paths[2]).read_bytes()
    (filled / paths[2]).write_bytes(data[:-1] + b"?")
    filled.with_name("secret").write_bytes((filled / paths[4]).read_bytes())
    edit(filled, lambda lines: lines.__setitem__(4, rewritten(lines[4], path="../secret")))
    seen: list[Progress] = []
    report = await verify_archive(filled, seen.append)
    assert [(one.kind, one.path, one.line) for one in report.findings] == [
        ("missing_file", paths[1], 2),
        ("changed_file", paths[2], 3),
        ("missing_file", "../secret", 5),
        ("extra_file", paths[4], None),
        ("extra_file", "notes.txt", None),
    ]
    assert report.documents == 2
    size = sum(line["size"] for line in lines_of(filled))
    assert seen[-1] == Progress(5, None, size, None)


async def test_changed_line_is_found(filled: Path) -> None:
    """Also one whose hash is right, if a field cannot be what an archive writes."""
    manifest = filled / "manifest.jsonl"
    original = manifest.read_bytes()
    line = original.splitlines(keepends=True)[2]
    replacements = [
        (b'"fetched_at":"', b'"fetched_at":"1'),
        (b'"verdict":"complete"', b'"verdict":"trusted"'),
        (b'"hash":"', b'"hash":"0'),
        (b"{", b""),
    ]
    fields = [{"sha256": "A" * 64}, {"verdict": "good"}, {"size": "7"}, {"path": None}, {"fetched_at": "yesterday"}]
    changed = [line.replace(old, new, 1) for old, new in replacements]
    for other in changed + [rewritten(line, **each) for each in fields]:
        manifest.write_bytes(original.replace(line, other))
        kinds = await found(filled)
        assert ("changed_line", None, 3) in kinds, other
        assert {kind for kind, *_ in kinds} <= {"changed_line", "extra_file", "removed_line"}


async def test_removed_exchanged_repeated_and_rewritten_lines_are_found(filled: Path) -> None:
    manifest = filled / "manifest.jsonl"
    lines, paths = manifest.read_bytes().splitlines(keepends=True), [line["path"] for line in lines_of(filled)]
    for number in (0, 3):
        manifest.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
        assert await found(filled) == [("removed_line", None, number + 1), ("extra_file", paths[number], None)]
    manifest.write_bytes(b"".join(lines[::-1]))
    assert {kind for kind, *_ in await found(filled)} == {"removed_line"}
    manifest.write_bytes(b"".join([*lines, lines[-1]]))
    assert await found(filled) == [("removed_line", None, 6)]
    manifest.write_bytes(b"".join([lines[0], rewritten(lines[1], signing="another"), *lines[2:]]))
    assert await found(filled) == [("removed_line", None, 3)]


async def test_torn_line_is_found_and_replaced_by_the_next_document(tenant: Tenant, filled: Path) -> None:
    path = lines_of(filled)[4]["path"]
    edit(filled, lambda lines: lines.__setitem__(4, lines[4][:50]))
    assert await found(filled) == [("torn_line", None, 5), ("extra_file", path, None)]
    async with tenant.archive() as archive:
        assert len(await archived(archive)) == 1
    assert await found(filled) == []


async def test_changed_line_is_logged_and_its_document_is_archived_again(
    tenant: Tenant, filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(filled, lambda lines: lines.__setitem__(1, lines[1].replace(b"complete", b"trusted")))
    edit(filled, lambda lines: lines.append(lines[-1]))
    async with tenant.archive() as archive:
        assert len(await archived(archive)) == 1
        assert len([entry async for entry in archive.entries()]) == 6
    assert "hash does not match its content; verify the archive" in caplog.text


async def test_manifest_that_is_changed_under_a_run_is_an_error(tenant: Tenant, archive: Archive, filled: Path) -> None:
    signing = await tenant.complete()
    for change in (lambda path: path.write_bytes(b"\n"), Path.unlink):
        change(filled / "manifest.jsonl")
        with pytest.raises(ArchiveError, match="replaced or truncated"):
            await archive.collect(signing)


async def test_file_archived_meanwhile_is_not_extra(tenant: Tenant, archive: Archive, filled: Path) -> None:
    signing = await tenant.complete()

    class Growing(FolderStore):
        async def names(self) -> AsyncIterator[str]:
            await archive.collect(signing)
            with (filled / "manifest.jsonl").open("ab") as file:
                file.write(b"torn")
            async for name in super().names():
                yield name

    report = await verify_archive(Growing(filled))
    assert (report.ok, report.lines) == (True, 5)


async def test_document_whose_append_is_reported_as_failed_but_took_effect_has_a_result(tenant: Tenant) -> None:
    class Lossy(FolderStore):
        async def append(self, name: str, offset: int, data: bytes) -> None:
            await super().append(name, offset, data)
            raise errors[-1]

    errors: list[Exception] = [ArchiveError("the response was lost")]
    await tenant.complete()
    async with tenant.archive(Lossy(tenant.folder)) as archive:
        assert [result.error for result in await sweep(archive)] == [None, None]
        await tenant.complete()
        errors.append(ArchiveConflict("another writer was first"))
        assert await sweep(archive) == []
    assert (await verify_archive(tenant.folder)).documents == 4
