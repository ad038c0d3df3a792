"""Collect the sealed PDF of every completed signing, each exactly once, in a folder or in another store.

Example::

    async with SigningClient(base_url, token) as client, Archive(client, "archive/", journal="archive.db") as archive:
        async for result in archive.sweep():
            print(result.error or result.entry.path)

All names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .archive import Archive
    from .collector import ArchiveResult
    from .folder import FolderStore
    from .manifest import ArchivedDocument
    from .s3 import S3Store
    from .status import ArchiveStatus, OpenDispatch, StuckSigning, archive_status
    from .store import ArchiveStore, ListedStore
    from .verify import ArchiveReport, Finding, verify_archive

__all__ = [
    "Archive",
    "ArchiveReport",
    "ArchiveResult",
    "ArchiveStatus",
    "ArchiveStore",
    "ArchivedDocument",
    "Finding",
    "FolderStore",
    "ListedStore",
    "OpenDispatch",
    "S3Store",
    "StuckSigning",
    "archive_status",
    "verify_archive",
]

_MODULES = {
    "Archive": "archive",
    "ArchiveReport": "verify",
    "ArchiveResult": "collector",
    "ArchiveStatus": "status",
    "ArchiveStore": "store",
    "ArchivedDocument": "manifest",
    "Finding": "verify",
    "FolderStore": "folder",
    "ListedStore": "store",
    "OpenDispatch": "status",
    "S3Store": "s3",
    "StuckSigning": "status",
    "archive_status": "status",
    "verify_archive": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
