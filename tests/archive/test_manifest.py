"""Each document has one line, whatever writers do, and the lines are chained."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from signing_async.archive import ArchivedDocument, FolderStore
from signing_async.archive.manifest import FIRST, Manifest, decode_line
from signing_async.errors import ArchiveConflict, ArchiveError
from tests.archive.tenants import lines_of

SERVICE = "https://tenant.example.com"


def document(number: int, signing: str = "s", documents: int = 2) -> ArchivedDocument:
    """Return a document whose file is of no interest."""
    return ArchivedDocument(
        service=SERVICE,
        signing=signing,
        document=f"d{number}",
        documents=documents,
        path=f"Å/{number}.pdf",
        size=number,
        sha256=hashlib.sha256(str(number).encode()).hexdigest(),
        completed_at=datetime(2031, 1, 2, 3, 4, 5, tzinfo=UTC) if number % 2 else None,
        fetched_at=datetime(2031, 1, 2, 3, 4, 6, tzinfo=UTC),
        verdict="sound",
    )


class Watched:
    """A folder that counts appends, holds them until they may go on, and fails them."""

    def __init__(self, folder: Path) -> None:
        self._store = FolderStore(folder)
        self.appends = 0
        self.may_append = asyncio.Event()
        self.may_append.set()
        self.error: Exception | None = None
        self.answer_lost = False

    async def put(self, name: str, source: Path, sha256: str) -> None: ...

    def read(self, name: str, offset: int = 0) -> AsyncIterator[bytes]:
        return self._store.read(name, offset)

    async def append(self, name: str, offset: int, data: bytes) -> None:
        self.appends += 1
        await self.may_append.wait()
        if self.error is not None:
            raise self.error
        await self._store.append(name, offset, data)
        if self.answer_lost:
            self.answer_lost = False
            raise ArchiveConflict("the first answer was lost, and the repetition found the name taken")


async def test_line_holds_what_is_documented(folder: Path) -> None:
    manifest = Manifest(FolderStore(folder))
    for number in (1, 2):
        assert await manifest.append(document(number))
    first, second = (folder / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(first) == {
        **document(1).as_dict(),
        "completed_at": "2031-01-02T03:04:05+00:00",
        "previous": FIRST,
        "hash": hashlib.sha256(first[: first.index(b',"hash"')] + b"}").hexdigest(),
    }
    assert decode_line(second) == (document(2), json.loads(first)["hash"])


async def test_document_has_one_line_if_another_writer_appended_it(folder: Path) -> None:
    one, two = Manifest(FolderStore(folder)), Manifest(FolderStore(folder))
    assert await one.append(document(1))
    assert await two.append(document(2))
    assert not await two.append(document(1))
    assert not await one.append(document(2))
    assert [line["document"] for line in lines_of(folder)] == ["d1", "d2"]


async def test_writers_at_the_same_time_lose_no_line(folder: Path) -> None:
    writers = [Manifest(FolderStore(folder)) for _ in range(4)]
    await asyncio.gather(*(writers[number % 4].append(document(number // 2)) for number in range(80)))
    lines = lines_of(folder)
    assert sorted(line["document"] for line in lines) == sorted(f"d{number}" for number in range(40))
    assert [line["previous"] for line in lines] == [FIRST, *(line["hash"] for line in lines[:-1])]


async def test_concurrent_appends_share_a_write(folder: Path) -> None:
    store = Watched(folder)
    manifest = Manifest(store)
    await asyncio.gather(*(manifest.append(document(number)) for number in range(50)))
    assert len(lines_of(folder)) == 50
    assert store.appends <= 2


async def test_failed_append_is_raised_to_each_caller_and_can_be_repeated(folder: Path) -> None:
    store = Watched(folder)
    manifest = Manifest(store)
    store.error = ArchiveError("the disk is full")
    store.may_append.clear()
    appending = [asyncio.create_task(manifest.append(document(number))) for number in range(3)]
    while not store.appends:
        await asyncio.sleep(0)
    appending[0].cancel()
    store.may_append.set()
    await asyncio.wait(appending)
    errors = [task.exception() for task in appending[1:]]
    assert [str(error) for error in errors] == ["the disk is full"] * 2
    store.error = None
    assert await manifest.append(document(1))


async def test_index_knows_documents_and_complete_signings_after_a_restart(folder: Path) -> None:
    manifest = Manifest(FolderStore(folder))
    for one in (document(1), document(2), document(1, "t"), document(1, "u", 1)):
        await manifest.append(one)
    again = Manifest(FolderStore(folder))
    assert (SERVICE, "s", "d1") not in again
    await again.refresh()
    for known in (manifest, again):
        assert (SERVICE, "s", "d1") in known
        assert (SERVICE, "t", "d2") not in known
        assert [known.is_complete(SERVICE, signing) for signing in "stuv"] == [True, False, True, False]
    assert not again.is_complete("https://other.example.com", "s")


async def test_changed_line_is_logged_and_its_document_is_archived_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await Manifest(FolderStore(folder)).append(document(1))
    path = folder / "manifest.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"size":1', b'"size":2'))
    manifest = Manifest(FolderStore(folder))
    await manifest.refresh()
    assert "hash does not match its content; verify the archive" in caplog.text
    assert await manifest.append(document(1))


async def test_line_that_was_copied_does_not_complete_its_signing(folder: Path) -> None:
    await Manifest(FolderStore(folder)).append(document(1))
    path = folder / "manifest.jsonl"
    path.write_bytes(2 * path.read_bytes())
    manifest = Manifest(FolderStore(folder))
    await manifest.refresh()
    assert not manifest.is_complete(SERVICE, "s")


@pytest.mark.parametrize("change", ["removed", "replaced"])
async def test_manifest_that_is_changed_under_a_writer_is_an_error(folder: Path, change: str) -> None:
    manifest = Manifest(FolderStore(folder))
    await manifest.append(document(1))
    path = folder / "manifest.jsonl"
    path.write_bytes(b"\n") if change == "replaced" else path.unlink()
    with pytest.raises(ArchiveError, match="replaced or truncated"):
        await manifest.append(document(2))


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": "A" * 64},
        {"verdict": "good"},
        {"size": "7"},
        {"path": None},
        {"fetched_at": "yesterday"},
        {"fetched_at": None},
        {"document": ...},
    ],
)
def test_line_with_a_right_hash_and_wrong_fields_is_refused(changes: dict[str, object]) -> None:
    fields = {**document(1).as_dict(), "previous": FIRST, **changes}
    body = json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()
    line = body[:-1] + b',"hash":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()
    with pytest.raises(ValueError, match=r"cannot be decoded|isoformat|must"):
        decode_line(line)


async def test_torn_line_is_replaced_by_the_next_append(folder: Path) -> None:
    await Manifest(FolderStore(folder)).append(document(1))
    with (folder / "manifest.jsonl").open("ab") as file:
        file.write(b'{"service":"htt')
    manifest = Manifest(FolderStore(folder))
    await manifest.refresh()
    await manifest.append(document(2))
    assert [line["document"] for line in lines_of(folder)] == ["d1", "d2"]
