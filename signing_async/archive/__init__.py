"""Collect the sealed PDF of every completed signing, each exactly once, in a folder or in another store.

Example::

    async with SigningClient(base_url, token) as client, Archive(client, "archive/", journal="archive.db") as archive:
        async for result in archive.sweep():
            print(result.entry.path if result.error is None else result.error)

All names are loaded when they are first used. ``__all__`` has `S3Store` only with the extra ``s3``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .archive import Archive as Archive
    from .collector import ArchiveResult as ArchiveResult
    from .manifest import ArchivedDocument as ArchivedDocument
    from .s3 import S3Store as S3Store
    from .status import ArchiveStatus as ArchiveStatus
    from .status import OpenDispatch as OpenDispatch
    from .status import StuckSigning as StuckSigning
    from .status import archive_status as archive_status
    from .stores import ArchiveStore as ArchiveStore
    from .stores import FolderStore as FolderStore
    from .stores import ListedStore as ListedStore
    from .verify import ArchiveReport as ArchiveReport
    from .verify import Finding as Finding
    from .verify import verify_archive as verify_archive
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            ".archive": ("Archive",),
            ".collector": ("ArchiveResult",),
            ".manifest": ("ArchivedDocument",),
            ".s3": ("S3Store",),
            ".status": ("ArchiveStatus", "OpenDispatch", "StuckSigning", "archive_status"),
            ".stores": ("ArchiveStore", "FolderStore", "ListedStore"),
            ".verify": ("ArchiveReport", "Finding", "verify_archive"),
        },
    )
    if find_spec("aiobotocore") is None:
        __all__.remove("S3Store")
