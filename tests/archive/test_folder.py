"""A folder as a store: whole files or none, no name outside, and appends of which one at a time wins."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from signing_async import ArchiveConflict, ArchiveError, ConfigurationError, InvalidRequest
from signing_async.archive import FolderStore
from tests.archive.archive_stores import content_of, put


@pytest.fixture
def store(folder: Path) -> FolderStore:
    return FolderStore(folder)


def failing(code: int) -> Callable[..., None]:
    """Return a function that raises this `OSError`."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


async def test_symbolic_link_in_place_of_a_file_is_another_file(
    store: FolderStore, folder: Path, tmp_path: Path
) -> None:
    folder.mkdir()
    (tmp_path / "elsewhere").write_bytes(b"one")
    (folder / "a.pdf").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArchiveConflict):
        await put(store, "a.pdf", b"one", tmp_path)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
async def test_file_is_copied_and_never_replaces_one_where_it_cannot_be_linked(
    store: FolderStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", failing(code))
    await put(store, "x/a.pdf", b"one", tmp_path)
    await put(store, "x/a.pdf", b"one", tmp_path)
    with pytest.raises(ArchiveConflict):
        await put(store, "x/a.pdf", b"two", tmp_path)
    assert await content_of(store, "x/a.pdf") == b"one"
    assert [path.name for path in (folder / "x").iterdir()] == ["a.pdf"]


async def test_copied_file_is_stored_whole_or_not_at_all(
    store: FolderStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    monkeypatch.setattr(Path, "replace", failing(errno.EIO))
    with pytest.raises(ArchiveError, match=os.strerror(errno.EIO)):
        await put(store, "a.pdf", b"one", tmp_path)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("way", ["link", "copy"])
async def test_file_is_synced_before_it_gets_its_name_and_its_folder_after(
    store: FolderStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    sync, target, synced = os.fsync, folder / "a.pdf", list[tuple[int, bool]]()

    def watched_sync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, target.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched_sync)
    if way == "copy":
        monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    await put(store, "a.pdf", b"one", tmp_path)
    assert (target.stat().st_ino, False) in synced
    assert synced[-1] == (folder.stat().st_ino, True)


async def test_name_that_cannot_hold_a_file_is_a_conflict_of_that_name(
    store: FolderStore, folder: Path, tmp_path: Path
) -> None:
    """And reading it finds no file."""
    folder.mkdir()
    (folder / "x").write_bytes(b"a file where a folder is needed")
    (folder / "y.pdf").mkdir()
    for name in ("x/a.pdf", "x/y/a.pdf", "y.pdf"):
        with pytest.raises(ArchiveConflict, match="holds another file") as caught:
            await put(store, name, b"one", tmp_path)
        assert str(tmp_path / "source") not in str(caught.value)
        assert not caught.value.client_wide
        with pytest.raises(FileNotFoundError):
            await content_of(store, name)
    await put(store, "a.pdf", b"one", tmp_path)


async def test_file_in_place_of_the_archive_is_a_permanent_error_of_all_names(
    store: FolderStore, folder: Path, tmp_path: Path
) -> None:
    folder.write_bytes(b"a file where the archive should be")
    with pytest.raises(ArchiveError, match="Not a directory"):
        _ = [name async for name in store.names()]
    with pytest.raises(ArchiveError, match="File exists") as caught:
        await put(store, "x/a.pdf", b"one", tmp_path)
    assert caught.value.fatal


async def test_full_disk_is_a_transient_error(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(ArchiveError, match="No space left on device") as caught:
        await put(store, "a.pdf", b"one", tmp_path)
    assert (caught.value.transient, caught.value.client_wide) == (True, True)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "a/../../x", "a//b", "./a", "a\\b", "a\0b", 7])
async def test_name_outside_of_the_folder_is_refused(store: FolderStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^name: must be a relative path"):
        await put(store, name, b"one", tmp_path)
    with pytest.raises(InvalidRequest):
        await content_of(store, name)


@pytest.mark.parametrize("torn", [b"t", b"x" * 10_000], ids=["short", "long"])
async def test_append_removes_an_incomplete_line(store: FolderStore, folder: Path, torn: bytes) -> None:
    await store.append("lines", 0, b"one\n")
    with (folder / "lines").open("ab") as file:
        file.write(torn)
    await store.append("lines", 4, b"two\n")
    assert await content_of(store, "lines") == b"one\ntwo\n"


async def test_append_waits_for_the_lock_of_its_file(store: FolderStore, folder: Path) -> None:
    await store.append("lines", 0, b"one\n")
    with (folder / "lines").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        append = asyncio.create_task(store.append("lines", 4, b"two\n"))
        await asyncio.wait({append}, timeout=0.2)
        assert not append.done()
        other.write(b"another\n")
    with pytest.raises(ArchiveConflict):
        await append
    assert await content_of(store, "lines") == b"one\nanother\n"


def test_path_is_checked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (7, "", b"folder", None):
        with pytest.raises(ConfigurationError, match="path: must be a path"):
            FolderStore(wrong)  # type: ignore[arg-type]  # what a caller may give
    with pytest.raises(ConfigurationError, match="is not a folder"):
        FolderStore(tmp_path / "file")


def test_system_without_file_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signing_async._files.fcntl", None)
    monkeypatch.setattr("signing_async._files.msvcrt", None)
    with pytest.raises(ConfigurationError, match="FolderStore needs file locks"):
        FolderStore(tmp_path)
