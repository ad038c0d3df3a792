"""Every store of this package passes its suite, and a store that errs does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from signing_async.archive import FolderStore, S3Store
from signing_async.errors import ArchiveConflict
from tests.archive import archive_stores
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


class Careless:
    """A store in memory that can be told to break each promise."""

    def __init__(self, files: dict[str, bytes], fault: str) -> None:
        self.files = files
        self.fault = fault
        self.ends: dict[str, int] = {}

    async def put(self, name: str, source: Path, sha256: str) -> None:
        name, content = self._name(name), source.read_bytes()
        if self.fault == "half a file":
            self.files[name] = content[: len(content) // 2]
        stored = self.files.get(name)
        await asyncio.sleep(0)
        if self.fault != "check before write":
            stored = self.files.get(name)
        if self.fault == "half a file":
            stored = None
        if stored is not None and self.fault == "never twice":
            raise ArchiveConflict(name)
        same = len(stored or b"") == len(content) if self.fault == "compares sizes" else stored == content
        if stored is not None and not same and self.fault != "overwrites":
            raise ArchiveConflict(name)
        self.files[name] = content

    async def read(self, name: str, offset: int = 0) -> AsyncIterator[bytes]:
        name = self._name(name)
        if self.fault == "prefixes":
            name = next((known for known in self.files if known.startswith(name)), name)
        if name not in self.files:
            if self.fault == "nothing is missing":
                return
            raise FileNotFoundError(name)
        content = self.files[name][offset if self.fault != "reads all" else 0 :]
        if content:
            yield content[:1000]
            yield content[1000 : None if self.fault != "drops the end" else -1]

    async def append(self, name: str, offset: int, data: bytes) -> None:
        length = len(self.files.get(name, b""))
        if self.fault == "remembers its end":
            length = self.ends.get(name, length)
        if self.fault == "append races":
            await asyncio.sleep(0)
        accepted = offset <= length if self.fault == "lower offsets" else offset == length
        if not accepted and self.fault != "any offset":
            raise ArchiveConflict(name)
        self.files[name] = self.files.get(name, b"")[:offset] + data
        self.ends[name] = offset + len(data)

    def _name(self, name: str) -> str:
        return name[:7] if self.fault == "short names" else name

    async def names(self) -> AsyncIterator[str]:
        for name in self.files:
            if "/." not in f"/{name}" or self.fault == "shows all":
                yield name


FAULTS = {
    "": [],
    "half a file": ["test_cancelled_put_leaves_the_whole_file_or_none", "test_other_content_under_a_name_is_refused"],
    "check before write": ["test_one_of_many_concurrent_files_wins"],
    "never twice": [
        "test_same_content_can_be_stored_again",
        "test_concurrent_writers_of_the_same_file_all_succeed",
    ],
    "compares sizes": ["test_other_content_under_a_name_is_refused"],
    "overwrites": ["test_other_content_under_a_name_is_refused", "test_one_of_many_concurrent_files_wins"],
    "nothing is missing": ["test_missing_file_raises_file_not_found"],
    "prefixes": ["test_missing_file_raises_file_not_found"],
    "drops the end": ["test_stored_file_is_read_unchanged"],
    "reads all": ["test_file_is_read_from_an_offset_on"],
    "short names": ["test_names_are_distinct_to_the_last_character"],
    "any offset": ["test_append_at_another_offset_than_the_end_is_refused"],
    "lower offsets": ["test_append_at_another_offset_than_the_end_is_refused"],
    "remembers its end": ["test_stale_writer_is_refused_after_others_appended"],
    "shows all": ["test_all_files_are_listed_and_hidden_ones_are_not"],
    "append races": ["test_one_of_two_writers_at_one_offset_wins", "test_no_line_of_concurrent_writers_is_lost"],
}
SUITE = [
    (suite, name)
    for suite in (ArchiveStoreConformance, ListedStoreConformance)
    for name in vars(suite)
    if name.startswith("test_")
]


@pytest.mark.parametrize("fault", FAULTS)
async def test_suite_detects_each_fault(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_stores, "_LONG", archive_stores._LONG[:70_000])
    failed = []
    for suite, name in SUITE:
        files: dict[str, bytes] = {}
        test = getattr(suite(), name)
        needs = test.__code__.co_varnames[1 : test.__code__.co_argcount]
        values = {"tmp_path": tmp_path, "name": "2031/lease.pdf", "content": b"%PDF-" * 999}
        try:
            await test(partial(Careless, files, fault), **{need: values[need] for need in needs if need in values})
        except (Exception, pytest.fail.Exception):
            failed.append(name)
    assert set(FAULTS[fault]) <= set(failed)
    assert bool(failed) == bool(fault)
