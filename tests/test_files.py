"""Files where POSIX calls are missing, in this process; `tests/other_systems` has the whole flow."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from signing_async import _files  # private: Windows is imitated
from signing_async._files import locked, place_new, remove_locked, retry_while_open, sync_folder, try_lock, unlock


class Locks:
    """The locks of Windows: one byte of a file, for one descriptor."""

    LK_UNLCK, LK_NBLCK = 0, 2

    def __init__(self) -> None:
        self._holders: dict[tuple[int, int], int] = {}

    def locking(self, descriptor: int, mode: int, size: int) -> None:
        byte = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
        assert byte[1] > os.fstat(descriptor).st_size
        assert size == 1
        if mode == self.LK_UNLCK:
            assert self._holders.pop(byte) == descriptor
        elif self._holders.setdefault(byte, descriptor) != descriptor:
            raise PermissionError(13, "Permission denied")


@pytest.fixture(params=["fcntl", "msvcrt"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    if request.param == "msvcrt":
        monkeypatch.setattr(_files, "fcntl", None)
        monkeypatch.setattr(_files, "msvcrt", Locks())
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


def test_lock_has_one_holder_at_a_time(path: Path) -> None:
    with path.open("r+b") as one, path.open("r+b") as other:
        assert try_lock(one.fileno())
        assert not try_lock(other.fileno())
        unlock(one.fileno())
        assert try_lock(other.fileno())
        unlock(other.fileno())


def test_locked_waits_for_the_holder(path: Path) -> None:
    order: list[str] = []

    def wait() -> None:
        with path.open("r+b") as file, locked(file.fileno()):
            order.append("second")

    with path.open("r+b") as file:
        with locked(file.fileno()):
            waiting = threading.Thread(target=wait)
            waiting.start()
            waiting.join(0.1)
            order.append("first")
        waiting.join(30)
    assert order == ["first", "second"]


def _in_use() -> PermissionError:
    error = PermissionError(13, "Permission denied")
    error.winerror = 32  # type: ignore[attr-defined]  # only Windows has it
    return error


def test_file_in_use_is_tried_again_and_a_refusal_of_other_systems_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(_files, "time", SimpleNamespace(sleep=pauses.append))

    def fail_with(*errors: Exception) -> Callable[[], str]:
        left = list(errors)

        def work() -> str:
            if left:
                raise left.pop(0)
            return "done"

        return work

    assert retry_while_open(fail_with(_in_use(), _in_use())) == "done"
    assert len(pauses) == 2
    with pytest.raises(PermissionError, match="Permission denied"):
        retry_while_open(fail_with(*[_in_use()] * 1000))
    assert 0.5 <= sum(pauses) <= 2
    pauses.clear()
    with pytest.raises(PermissionError):
        retry_while_open(fail_with(PermissionError(13, "Permission denied")))
    assert not pauses


@pytest.mark.parametrize("used", [False, True])
def test_locked_file_is_closed_first_where_open_files_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    """A file that another process uses stays: that process removes it."""
    path, unlink = tmp_path / "lock", os.unlink
    path.touch()
    file = path.open("r+b")

    def refuse(path: Any) -> None:
        if used or not file.closed:
            raise _in_use()
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    remove_locked(path, file.close)
    assert file.closed
    assert path.exists() is used


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_folder_sync_is_optional_but_its_io_errors_are_raised(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output") if number == errno.EIO else nullcontext():
        sync_folder(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_name_is_given_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(22, "The request is not supported")

    if not links:
        monkeypatch.setattr(os, "link", unsupported)
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    place_new(tmp_path / "one", tmp_path / "target")
    with pytest.raises(FileExistsError):
        place_new(tmp_path / "two", tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "two"]
    assert (tmp_path / "target").read_text() == "one"


def test_name_stays_free_if_the_move_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without hard links: the next attempt must not find an empty file in the way."""

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "link", fail)
    (tmp_path / "one").write_text("one")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="Input/output error"):
            place_new(tmp_path / "one", tmp_path / "target")
    place_new(tmp_path / "one", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "one"


def test_folder_that_cannot_be_opened_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    sync_folder(tmp_path)


def test_moved_file_is_kept_although_its_move_is_reported_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a network file system whose response was lost."""
    replace = Path.replace

    def unsupported(*_: object) -> None:
        raise OSError(22, "The request is not supported")

    def lose_response(source: Path, target: Path) -> None:
        replace(source, target)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "link", unsupported)
    monkeypatch.setattr(Path, "replace", lose_response)
    (tmp_path / "one").write_text("one")
    with pytest.raises(OSError, match="Input/output error"):
        place_new(tmp_path / "one", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "one"
