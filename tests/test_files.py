"""Files where POSIX calls are missing, in this process; `tests/other_systems` has the whole flow. Errors of files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from signing_async import (
    ArchiveError,
    Assumptions,
    AuthError,
    ConfigurationError,
    FileTokenStore,
    InvalidRequest,
    JournalError,
    SqliteJournal,
    _files,  # private: Windows is imitated
)
from signing_async._files import locked, place_new, remove_locked, retry_while_open, sync_folder
from signing_async.archive import FolderStore
from signing_async.sealed import inspect_sealed


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


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


def test_lock_is_waited_for_where_a_byte_of_a_file_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def locking(descriptor: int, mode: str, size: int) -> None:
        assert (os.lseek(descriptor, 0, os.SEEK_CUR) > 2**32, size) == (True, 1)  # far behind the content
        calls.append(mode)
        if len(calls) == 1:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_files, "fcntl", None)
    monkeypatch.setattr(_files, "msvcrt", SimpleNamespace(LK_NBLCK="lock", LK_UNLCK="unlock", locking=locking))
    with (tmp_path / "file").open("wb") as file, locked(file.fileno()):
        assert calls == ["lock", "lock"]
    assert calls[2:] == ["unlock"]


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
    monkeypatch.setattr(os, "fsync", failing(number))
    with pytest.raises(OSError, match="Input/output") if number == errno.EIO else nullcontext():
        sync_folder(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_name_is_given_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, "link", failing(errno.EINVAL))
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    place_new(tmp_path / "one", tmp_path / "target")
    with pytest.raises(FileExistsError):
        place_new(tmp_path / "two", tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "two"]
    assert (tmp_path / "target").read_text() == "one"


@pytest.mark.parametrize("moved", [True, False])
def test_failed_move_on_a_file_system_without_links_leaves_the_file_at_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """A network file system may report that the move failed though only its response was lost."""
    replace, fail = Path.replace, failing(errno.EIO)

    def fail_to_move(source: Path, target: Path) -> None:
        if moved:
            replace(source, target)
        fail()

    monkeypatch.setattr(os, "link", failing(errno.EINVAL))
    (tmp_path / "one").write_text("one")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail_to_move)
        with pytest.raises(OSError, match="Input/output error"):
            place_new(tmp_path / "one", tmp_path / "target")
    if not moved:
        place_new(tmp_path / "one", tmp_path / "target")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["one"]


# Which errors may pass


async def test_path_that_no_file_can_have_is_a_permanent_failure(tmp_path: Path) -> None:
    def loop(folder: Path) -> Path:
        folder.mkdir()
        (folder / "loop").symlink_to(folder / "loop")
        return folder / "loop"

    path = loop(tmp_path / "files")
    with pytest.raises(AuthError) as of_token_file:
        await FileTokenStore(path).load()
    async with SqliteJournal(path / "journal") as journal:
        with pytest.raises(JournalError) as of_journal:
            await journal.claim("lease")
    (tmp_path / "source").write_bytes(b"%PDF-")
    archive = loop(tmp_path / "archive").parent
    with pytest.raises(ArchiveError) as of_archive:
        await FolderStore(archive).put("loop/a.pdf", tmp_path / "source", "")
    assert [raised.value.transient for raised in (of_token_file, of_journal, of_archive)] == [False] * 3


@pytest.mark.parametrize(("code", "transient"), [(errno.EMFILE, True), (errno.EACCES, False)])
async def test_file_that_the_system_cannot_open_for_now_is_a_transient_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, transient: bool
) -> None:
    """The files are assumptions, a PDF to inspect, and trusted roots."""
    path = tmp_path / "a.pdf"
    path.touch()

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fail)
        with pytest.raises(ConfigurationError, match=r" cannot be read: ") as of_settings:
            Assumptions.from_file(path)
        with pytest.raises(InvalidRequest, match=r"^source: cannot open ") as of_source:
            await inspect_sealed(path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        with pytest.raises(InvalidRequest, match=r"^trust: cannot read ") as of_trust:
            await inspect_sealed(path, trust=path)
    errors = (of_settings.value, of_source.value, of_trust.value)
    assert [error.transient for error in errors] == [transient] * 3
