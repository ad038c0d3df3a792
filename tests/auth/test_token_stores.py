"""The token store in a file: modes, damage, locks, crashes. `tests.storage.test_tokens` has the promises of all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import multiprocessing
import os
import signal
import stat
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from signing_async import AuthError, ConfigurationError, FileTokenStore, Token

FULL = Token("access-1", "refresh-1", datetime(2031, 5, 6, 7, 8, 9, 250000, UTC), "DPoP")
BARE = Token("access-2")
FORK = multiprocessing.get_context("fork")

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def open_files(folder: Path) -> list[str]:
    """Return the files below the folder that this process has open, one for each descriptor."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.startswith(f"{folder}/")]


async def test_files_have_mode_0600_and_folders_0700_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = FileTokenStore(tmp_path / "a" / "b" / "token.json")
        async with store.lock():
            await store.save(FULL)
    finally:
        os.umask(before)
    assert mode(store.path) == 0o600
    assert mode(tmp_path / "a" / "b" / "token.json.lock") == 0o600
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    assert names(tmp_path / "a" / "b") == ["token.json", "token.json.lock"]


async def test_save_syncs_the_file_before_replacing_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def watched_sync(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"file of {os.fstat(handle).st_size}"
        done.append(kind)
        sync(handle)

    def watched_replace(self: Path, target: Any) -> Path:
        # Between file systems a replace is not atomic.
        assert self.parent == target.parent
        done.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    store = FileTokenStore(tmp_path / "new" / "token.json")
    await store.save(FULL)
    assert done == ["folder", f"file of {store.path.stat().st_size}", "replace", "folder"]


@pytest.mark.parametrize(
    "content",
    [b'{"access_token": ""}', b'{"access_token": "a", "expires_at": NaN}', b"\xff\xfe\x00", b"[" * 200_000],
    ids=range(4),
)
async def test_corrupt_file_is_auth_error_without_content_and_is_not_changed(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token.json"
    path.write_bytes(content)
    with pytest.raises(AuthError) as caught:
        await FileTokenStore(path).load()
    assert str(caught.value) == f"the token file {path} holds no token; it was not changed"
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    assert path.read_bytes() == content


async def test_symbolic_link_is_kept_and_shares_the_lock_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    link = tmp_path / "token.json"
    link.symlink_to(tmp_path / "volume" / "real.json")
    by_link, direct = FileTokenStore(link), FileTokenStore(tmp_path / "volume" / "real.json")
    await by_link.save(FULL)
    assert link.is_symlink()
    assert await direct.load() == FULL
    async with by_link.lock():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), direct.lock():
                pass


async def test_invalid_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[Any] = [3, "", "token\0.json"]
    for path in paths:
        with pytest.raises(ConfigurationError) as caught:
            FileTokenStore(path)
        assert str(caught.value) == f"FileTokenStore: path: must be a path, got {path!r}"
    assert repr(FileTokenStore(tmp_path / "t.json")) == f"FileTokenStore('{tmp_path}/t.json')"
    for path in (tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(AuthError, match=r"cannot be read: (Is a directory|File name too long)"):
            await FileTokenStore(path).load()
    monkeypatch.chdir(tmp_path)
    assert FileTokenStore("~nobody-of-this-name/x").path == tmp_path / "~nobody-of-this-name/x"


# The lock


@pytest.mark.parametrize(("problem", "transient"), [(errno.EIO, True), (errno.EACCES, False)])
async def test_failure_of_the_file_system_is_transient_unless_a_repeat_would_fail_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: int, transient: bool
) -> None:
    """The old token is kept, and no other file is left."""
    store = FileTokenStore(tmp_path / "token.json")
    await store.save(FULL)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(problem, os.strerror(problem))

    async def lock() -> None:
        async with store.lock():
            pass

    for owner, name, call in (
        (Path, "read_bytes", store.load),
        (os, "fsync", lambda: store.save(BARE)),
        (Path, "replace", lambda: store.save(BARE)),
        (os, "open", lock),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            with pytest.raises(AuthError, match=rf"cannot be \w+: {os.strerror(problem)}$") as caught:
                await call()
        assert caught.value.transient is transient, name
        assert await store.load() == FULL
        assert names(tmp_path) == ["token.json"]


def hold(path: Path, held: Any) -> None:
    """Hold the lock until killed."""

    async def run() -> None:
        async with FileTokenStore(path).lock():
            held.set()
            await asyncio.sleep(3600)

    asyncio.run(run())


@forks
def test_lock_holds_across_processes_and_is_released_when_its_holder_dies(tmp_path: Path) -> None:
    path, held = tmp_path / "token.json", FORK.Event()
    holder = FORK.Process(target=hold, args=(path, held))
    holder.start()

    async def lock(timeout: float) -> None:
        async with asyncio.timeout(timeout), FileTokenStore(path).lock():
            pass

    try:
        assert held.wait(60)
        with pytest.raises(TimeoutError):
            asyncio.run(lock(0.2))
    finally:
        holder.kill()
    asyncio.run(lock(20))
    holder.join()


def die(path: Path, owner: Any, step: str) -> None:
    """Be killed at one step of a save, or after it."""

    def kill(*arguments: Any, **settings: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    if owner is not None:
        setattr(owner, step, kill)
    asyncio.run(FileTokenStore(path).save(Token("new", "refresh-new")))
    kill()


@forks
@pytest.mark.parametrize(
    ("owner", "step", "survives"),
    [(os, "fdopen", "old"), (os, "fsync", "old"), (Path, "replace", "old"), (None, "after", "new")],
)
def test_process_killed_at_any_step_of_a_save_leaves_a_whole_token(
    owner: Any, step: str, survives: str, tmp_path: Path
) -> None:
    path = tmp_path / "token.json"
    asyncio.run(FileTokenStore(path).save(Token("old", "refresh-old")))
    process = FORK.Process(target=die, args=(path, owner, step))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert asyncio.run(FileTokenStore(path).load()) == Token(survives, f"refresh-{survives}")


async def test_old_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Young ones may be in use, and those of other stores stay."""
    path = tmp_path / "token[1].json"
    old, young, foreign = (tmp_path / n for n in (".token[1].json.a.new", ".token[1].json.b.new", ".token1.json.c.new"))
    for file in (old, young, foreign):
        file.write_text("{}")
    for file in (old, foreign):
        os.utime(file, (time.time() - 3600,) * 2)
    await FileTokenStore(path).save(FULL)
    assert not old.exists()
    assert young.exists()
    assert foreign.exists()


async def test_cancelled_waiter_and_holder_leave_no_file_open(tmp_path: Path) -> None:
    store = FileTokenStore(tmp_path / "token.json")

    async def hold() -> None:
        async with store.lock():
            await asyncio.sleep(3600)

    tasks = [asyncio.create_task(hold()) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert open_files(tmp_path)
    for task in reversed(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert open_files(tmp_path) == []
    async with asyncio.timeout(5), store.lock():
        pass


@forks
async def test_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """It has inherited the lock's file."""
    store = FileTokenStore(tmp_path / "token.json")
    child = FORK.Process(target=time.sleep, args=(60,))
    async with store.lock():
        child.start()
    try:
        async with asyncio.timeout(5), store.lock():
            pass
    finally:
        child.kill()
        child.join()
