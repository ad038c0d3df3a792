"""Every store of this package passes its suite, and a store that errs does not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest

from signing_async.archive import FolderStore, S3Store
from tests.archive.archive_stores import ArchiveStoreConformance, ListedStoreConformance
from tests.archive.s3_server import S3Server


class TestFolderStore(ArchiveStoreConformance, ListedStoreConformance):
    """In a folder, for one machine."""

    @pytest.fixture
    def open_store(self, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], FolderStore]:
        return partial(FolderStore, tmp_path_factory.mktemp("archive"))


class TestS3Store(ArchiveStoreConformance, ListedStoreConformance):
    """In a bucket, for many machines."""

    @pytest.fixture
    async def open_store(self, s3: S3Server) -> AsyncIterator[Callable[[], S3Store]]:
        async with AsyncExitStack() as opened:
            url = f"s3://{s3.new_bucket()}/a prefix/å"

            def open_store() -> S3Store:
                store = S3Store(url, endpoint_url=s3.url)
                opened.push_async_callback(store.aclose)
                return store

            yield open_store
