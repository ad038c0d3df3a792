"""Errors of the file system: which of them may pass."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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
)
from signing_async.archive import FolderStore
from signing_async.sealed import inspect_sealed


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
    """Of assumptions, of the file to inspect, and of the trusted roots."""
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
