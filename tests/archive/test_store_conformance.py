"""The promises of the `ArchiveStore` protocol, which let an archive keep each file once and whole."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from signing_async import ArchiveConflict
from signing_async.archive import FolderStore, S3Store
from tests.archive.s3_server import S3Server
from tests.archive.tenants import content_of, put

pytestmark = pytest.mark.asyncio(loop_scope="module")

Stores = list[FolderStore] | list[S3Store]

PDF = b"%PDF-1.7 \x00\xff\r\n%%EOF\n"
LONG = bytes(range(256)) * 4096 * 9  # 9 MiB: stores may treat long files differently


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["folder", "bucket"])
async def stores(
    request: pytest.FixtureRequest, s3: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stores]:
    """Three stores over the same files, as three processes would open them. A bucket takes long to open."""
    if request.param == "folder":
        folder = tmp_path_factory.mktemp("archive")
        yield [FolderStore(folder) for _ in range(3)]
        return
    url = f"s3://{s3.new_bucket()}/a prefix/å"
    async with AsyncExitStack() as opened:
        yield [await opened.enter_async_context(S3Store(url, endpoint_url=s3.url)) for _ in range(3)]


@pytest.fixture
def name() -> str:
    """A name that no other test uses, with characters that URLs and file systems treat specially."""
    return f"{secrets.token_hex(4)}/Lease Å ☃ 😀+%20&=#'-1/lägenhet (2).pdf"


@pytest.mark.parametrize("content", [PDF, LONG], ids=["short", "long"])
async def test_first_content_of_a_name_is_kept_unchanged(
    stores: Stores, name: str, tmp_path: Path, content: bytes
) -> None:
    """The same content may be stored again: after a crash, the archive cannot know whether it was stored."""
    first, second, third = stores
    for store in (first, first, second):
        await put(store, name, content, tmp_path)
    for other in (content[:-1] + b"?", content[:-1], content + b"?"):
        with pytest.raises(ArchiveConflict):
            await put(third, name, other, tmp_path)
    for store in stores:
        for offset in (0, 5, len(content) - 1, len(content), len(content) + 100):
            assert await content_of(store, name, offset) == content[offset:]


async def test_one_of_many_concurrent_files_wins(stores: Stores, name: str, tmp_path: Path) -> None:
    """Writers of other content are refused; the name holds the content of the writer that succeeded."""
    contents = [bytes([65 + number]) * 70_000 for number in range(6)]
    writes = [put(store, name, content, tmp_path) for store, content in zip([*stores] * 2, contents, strict=True)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    won = [content for content, outcome in zip(contents, outcomes, strict=True) if outcome is None]
    assert [await content_of(stores[0], name)] == won
    assert sum(isinstance(outcome, ArchiveConflict) for outcome in outcomes) == len(contents) - 1


@pytest.mark.parametrize("steps", [0, 2, 20, 100])
async def test_cancelled_put_leaves_the_whole_file_or_none(
    stores: Stores, name: str, tmp_path: Path, steps: int
) -> None:
    putting = asyncio.create_task(put(stores[0], name, LONG, tmp_path))
    for _ in range(steps):
        await asyncio.sleep(0)
    putting.cancel()
    await asyncio.wait([putting])
    try:
        assert await content_of(stores[1], name) == LONG
    except FileNotFoundError:
        assert putting.cancelled()
    await put(stores[0], name, LONG, tmp_path)
    assert await content_of(stores[1], name) == LONG


async def test_appends_are_read_in_order_and_from_any_offset(stores: Stores, name: str) -> None:
    """By every store. The offset may be in the middle of an append; at the end and beyond, nothing is read."""
    with pytest.raises(FileNotFoundError):
        await content_of(stores[0], name, 5)
    written = b""
    for number in range(15):
        line = f"{number} {'x' * number}\n".encode()
        await stores[number % 3].append(name, len(written), line)
        written += line
    assert len(written) > 100  # offsets of one, two and three digits
    for store in stores:
        for offset in (0, 1, 10, 15, len(written) - 1, len(written), len(written) + 100):
            assert await content_of(store, name, offset) == written[offset:]


async def test_append_at_another_offset_than_the_end_is_refused(stores: Stores, name: str) -> None:
    """The file does not change, and an append at its end is accepted afterwards."""
    first, second, third = stores
    with pytest.raises(ArchiveConflict):
        await first.append(name, 6, b"x\n")
    with pytest.raises(FileNotFoundError):
        await content_of(first, name)
    await first.append(name, 0, b"first\n")
    await second.append(name, 6, b"second\n")
    for writer in stores:
        for offset in (0, 1, 6, 7, 12, 14, 600):
            with pytest.raises(ArchiveConflict):
                await writer.append(name, offset, b"x\n")
    await third.append(name, 13, b"third\n")
    assert await content_of(first, name) == b"first\nsecond\nthird\n"


async def test_one_of_several_writers_at_one_offset_wins(stores: Stores, name: str) -> None:
    """First to a missing file, then to the same file again."""
    written = b""
    for _ in range(4):
        lines = [b"aa\n", b"b\n", b"cccc\n"]
        appends = [store.append(name, len(written), line) for store, line in zip(stores, lines, strict=True)]
        outcomes = await asyncio.gather(*appends, return_exceptions=True)
        assert sum(isinstance(outcome, ArchiveConflict) for outcome in outcomes) == 2
        written += next(line for line, outcome in zip(lines, outcomes, strict=True) if outcome is None)
    assert await content_of(stores[0], name) == written


async def test_all_files_are_listed_and_hidden_ones_are_not(stores: Stores, tmp_path: Path) -> None:
    """Each file is listed once, put or appended. A file is hidden if a part of its name begins with a dot."""
    folder = secrets.token_hex(4)
    names = [f"{folder}/Lease Å {number}/a.pdf" for number in range(3)] + [f"{folder}/a.pdf", f"{folder}-b.pdf"]
    for name in [*names, f".{folder}/a.pdf", f"{folder}/.part"]:
        await put(stores[0], name, PDF, tmp_path)
    for offset in (0, 3):
        await stores[0].append(f"{folder}/manifest.jsonl", offset, b"{}\n")
    for store in stores:
        listed = [name async for name in store.names() if folder in name]
        assert sorted(listed) == sorted([*names, f"{folder}/manifest.jsonl"])
