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
from tests.archive.tenants import content_of, put


@pytest.fixture
def store(folder: Path) -> FolderStore:
    return FolderStore(folder)


def failing(code: int) -> Callable[..., None]:
    """Return a function that raises this `OSError`."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


async def test_file_is_copied_and_never_replaces_one_where_it_cannot_be_linked(
    store: FolderStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is stored whole or not at all."""
    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    await put(store, "x/a.pdf", b"one", tmp_path)
    await put(store, "x/a.pdf", b"one", tmp_path)
    with pytest.raises(ArchiveConflict):
        await put(store, "x/a.pdf", b"two", tmp_path)
    assert await content_of(store, "x/a.pdf") == b"one"
    monkeypatch.setattr(Path, "replace", failing(errno.EIO))
    with pytest.raises(ArchiveError, match=os.strerror(errno.EIO)):
        await put(store, "x/b.pdf", b"one", tmp_path)
    assert [path.name for path in (folder / "x").iterdir()] == ["a.pdf"]


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
    """Reading such a name finds no file. A symbolic link is another file, even if it leads to the same content."""
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
    (folder / "link.pdf").symlink_to(folder / "a.pdf")
    with pytest.raises(ArchiveConflict):
        await put(store, "link.pdf", b"one", tmp_path)


async def test_error_of_the_disk_concerns_all_names_and_is_transient_if_the_disk_is_full(
    store: FolderStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_bytes(b"a file where the archive should be")
    with pytest.raises(ArchiveError, match="Not a directory"):
        _ = [name async for name in store.names()]
    with pytest.raises(ArchiveError, match="File exists") as caught:
        await put(store, "x/a.pdf", b"one", tmp_path)
    assert caught.value.fatal
    folder.unlink()
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


async def test_append_returns_when_its_line_is_synced(
    store: FolderStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, synced = os.fsync, list[tuple[int, int]]()

    def watched_sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched_sync)
    await store.append("lines", 0, b"one\n")
    assert ((folder / "lines").stat().st_ino, 4) in synced
    assert synced[-1][0] == folder.stat().st_ino


async def test_append_removes_an_incomplete_line(store: FolderStore, folder: Path) -> None:
    await store.append("lines", 0, b"one\n")
    for torn in (b"t", b"x" * 10_000):
        end = (folder / "lines").stat().st_size
        with (folder / "lines").open("ab") as file:
            file.write(torn)
        await store.append("lines", end, b"two\n")
    assert await content_of(store, "lines") == b"one\ntwo\ntwo\n"


async def test_append_waits_for_the_lock_of_its_file(store: FolderStore, folder: Path) -> None:
    await store.append("lines", 0, b"one\n")
    with (folder / "lines").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        append = asyncio.create_task(store.append("lines", 4, b"two\n"))
        await asyncio.wait({append}, timeout=0.1)
        assert not append.done()
        other.write(b"another\n")
    with pytest.raises(ArchiveConflict):
        await append
    assert await content_of(store, "lines") == b"one\nanother\n"


def test_path_is_checked_and_a_system_without_file_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for wrong in (7, "", b"folder"):
        with pytest.raises(ConfigurationError, match="path: must be a path"):
            FolderStore(wrong)  # type: ignore[arg-type]  # what a caller may give
    with pytest.raises(ConfigurationError, match="is not a folder"):
        FolderStore(tmp_path / "file")
    monkeypatch.setattr("signing_async._files.fcntl", None)
    monkeypatch.setattr("signing_async._files.msvcrt", None)
    with pytest.raises(ConfigurationError, match="FolderStore needs file locks"):
        FolderStore(tmp_path)
