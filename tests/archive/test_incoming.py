"""Incomplete downloads: kept apart from the archive, and removed with their process."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from signing_async.archive import FolderStore
from signing_async.archive.incoming import Incoming


class Elsewhere:
    """A store that is not a folder."""

    def __init__(self, folder: Path) -> None:
        store = FolderStore(folder)
        self.put, self.read, self.append = store.put, store.read, store.append


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def test_downloads_are_on_the_file_system_of_the_folder(folder: Path) -> None:
    incoming = Incoming(FolderStore(folder))
    paths = await asyncio.gather(*(incoming.new_path() for _ in range(4)))
    assert len(set(paths)) == 4
    assert {path.parent.parent for path in paths} == {folder / ".incoming"}
    paths[0].write_bytes(b"%PDF-")
    await incoming.aclose()
    assert list((folder / ".incoming").iterdir()) == []


async def test_downloads_for_another_store_are_private_temporary_files(temporary: Path, folder: Path) -> None:
    incoming = Incoming(Elsewhere(folder))
    path = await incoming.new_path()
    for parent in (path.parent, path.parent.parent):
        assert stat.S_IMODE(parent.stat().st_mode) == 0o700
        assert parent.is_relative_to(temporary)
    await incoming.aclose()
    assert [path for path in temporary.rglob("*") if path.is_file()] == []


async def test_what_a_killed_process_left_among_the_temporary_files_is_removed(temporary: Path, folder: Path) -> None:
    incoming = Incoming(Elsewhere(folder))
    path = await incoming.new_path()
    dead = path.parent.with_name("dead")
    dead.mkdir()
    (dead / "half.pdf").touch()
    dead.with_name("download.dead.lock").touch()
    await Incoming(Elsewhere(folder)).aclose()
    assert not dead.exists()
    assert path.parent.exists()
    await incoming.aclose()


async def test_system_without_user_ids_has_temporary_files_too(
    temporary: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.getuid")
    incoming = Incoming(Elsewhere(folder))
    assert (await incoming.new_path()).parent.parent == temporary
    await incoming.aclose()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("prepared", [False, True])
async def test_temporary_folder_that_was_removed_is_made_again(temporary: Path, folder: Path, prepared: bool) -> None:
    """Not where another user may have prepared one meanwhile."""
    incoming = Incoming(Elsewhere(folder))
    before = await incoming.new_path()
    shared = before.parent.parent
    shutil.rmtree(shared)
    if prepared:
        shared.mkdir()
        shared.chmod(0o777)
    path = await incoming.new_path()
    assert path.parent.parent == (temporary if prepared else shared)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await incoming.aclose()
    assert [path for path in temporary.rglob("*") if path not in (shared,)] == []


async def test_lock_of_a_folder_that_cannot_be_made_is_released(
    temporary: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = FolderStore(folder)
    store.incoming.mkdir(parents=True)
    incoming = Incoming(store)
    await incoming.new_path()
    await incoming.aclose()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", full)
        for _ in range(5):
            with pytest.raises(OSError, match="No space left"):
                await incoming.new_path()
    await incoming.aclose()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list(store.incoming.iterdir()) == []


@pytest.mark.parametrize("trap", ["link", "dangling link", "file", "open"])
async def test_temporary_folder_that_others_may_have_prepared_is_not_used(
    temporary: Path, folder: Path, trap: str
) -> None:
    path = await (first := Incoming(Elsewhere(folder))).new_path()
    await first.aclose()
    prepared = path.parent.parent
    if trap == "open":
        prepared.chmod(0o755)
    else:
        prepared.rename(temporary / "elsewhere")
        if trap == "file":
            prepared.touch()
        else:
            prepared.symlink_to("elsewhere" if trap == "link" else "nowhere")
    incoming = Incoming(Elsewhere(folder))
    path = await incoming.new_path()
    assert path.parent.parent == temporary
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await incoming.aclose()
    assert not path.parent.exists()
