"""Completed signings in a sandbox, a check of an archive against them, and the files of its store."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from signing_async import Signing, SigningClient
from signing_async.archive import Archive, ArchiveResult, ArchiveStore, FolderStore, verify_archive
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.servers import serving


async def sent(
    client: SigningClient, name: str = "Lease", documents: tuple[str, ...] = ("lease.pdf", "annex.pdf")
) -> Signing:
    """Send a signing with these documents."""
    signing = await client.signings.create(name=name, language="EN")
    for number, document in enumerate(documents):
        await client.documents.upload(signing, make_pdf(text=f"{name} {number}"), document)
    await client.recipients.add(signing, email="anna@example.com", order=1)
    await client.signings.send(signing)
    return signing


async def completed(
    sandbox: Sandbox,
    client: SigningClient,
    name: str = "Lease",
    documents: tuple[str, ...] = ("lease.pdf", "annex.pdf"),
) -> Signing:
    """Send a signing with these documents, and sign it."""
    signing = await sent(client, name, documents)
    await sandbox.complete(signing.id)
    return signing


@asynccontextmanager
async def listing(
    listed: list[dict[str, Any]], respond: Callable[[str], tuple[Any, int]]
) -> AsyncIterator[SigningClient]:
    """Yield a client of a service with these signings, which responds to other paths with a body and a status."""

    async def handle(request: web.Request) -> web.Response:
        if request.path.endswith("/signings"):
            return web.json_response({"data": listed})
        body, status = respond(request.path)
        is_file = isinstance(body, bytes)
        return web.Response(body=body) if is_file else web.json_response(body, status=status)

    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        yield client


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a folder's manifest."""
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text("utf-8").splitlines()]


def files_in(folder: Path) -> list[str]:
    """Return the names of all files in a folder, hidden ones included, but not the manifest."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != "manifest.jsonl")


def count(sandbox: Sandbox) -> Counter[str | None]:
    """Return the number of requests of each operation."""
    return Counter(record.operation for record in sandbox.requests)


@dataclass
class Verdict:
    """What an archive holds of a sandbox's completed signings."""

    documents: int = 0
    wrong: list[str] = field(default_factory=list)


async def judge(sandbox: Sandbox, archive: Path | ArchiveStore) -> Verdict:
    """Check that each sealed document has one line and one file, and that there is nothing else."""
    verdict = Verdict()
    store = FolderStore(archive) if isinstance(archive, Path) else archive
    report = await verify_archive(store)
    verdict.wrong += [finding.text for finding in report.findings]
    manifest = b"".join([chunk async for chunk in store.read("manifest.jsonl")])
    entries = [json.loads(line) for line in manifest.splitlines()]
    lines = Counter((line["signing"], line["document"]) for line in entries)
    verdict.wrong += [f"{key}: {times} lines" for key, times in lines.items() if times > 1]
    paths = Counter(line["path"] for line in entries)
    verdict.wrong += [f"{path}: in {times} lines" for path, times in paths.items() if times > 1]
    due = {
        (signing.id, document.id)
        for signing in sandbox.signings
        if signing.state == "completed"
        for document in sandbox.documents(signing.id)
    }
    verdict.documents = len(due & lines.keys())
    verdict.wrong += [f"{key}: not archived" for key in due - lines.keys()]
    verdict.wrong += [f"{key}: not a sealed document" for key in lines.keys() - due]
    if isinstance(archive, Path):
        # Hidden files too: downloads of dead processes.
        verdict.wrong += [f"{name}: left over" for name in files_in(archive) if name not in paths]
    return verdict


@dataclass
class Tenant:
    """A sandbox with a client, and where its archive and journal are."""

    sandbox: Sandbox
    client: SigningClient
    folder: Path
    journal: Path

    def archive(self, to: Any = None, **settings: Any) -> Archive:
        """Open the archive, or another one."""
        return Archive(self.client, self.folder if to is None else to, **{"journal": self.journal, **settings})

    async def complete(self, name: str = "Lease", *documents: str) -> Signing:
        """Send a signing with these documents, or with two, and sign it."""
        return await completed(self.sandbox, self.client, name, documents or ("lease.pdf", "annex.pdf"))

    def count(self, operation: str = "documents.download_signed") -> int:
        """Return the number of requests of an operation."""
        return count(self.sandbox)[operation]


async def sweep(archive: Archive) -> list[ArchiveResult]:
    """Return the results of a sweep."""
    return [result async for result in archive.sweep()]


async def archived(archive: Archive) -> list[str]:
    """Sweep without an error, and return the names of the files that were added."""
    results = await sweep(archive)
    assert [result.error for result in results if result.error] == []
    return sorted(result.entry.path for result in results if result.entry)


async def put(store: ArchiveStore, name: str, content: bytes, folder: Path) -> None:
    """Store content under a name, from a new local file."""
    # Never reuse a name: a thread of a cancelled call may still read its source.
    source = folder / f"source-{secrets.token_hex(8)}"
    source.write_bytes(content)
    try:
        await store.put(name, source, hashlib.sha256(content).hexdigest())
    finally:
        source.unlink(missing_ok=True)


async def content_of(store: ArchiveStore, name: str, offset: int = 0) -> bytes:
    """Return the content of a file from ``offset`` on."""
    return b"".join([chunk async for chunk in store.read(name, offset)])
