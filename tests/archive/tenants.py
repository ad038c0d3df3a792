"""Completed signings in a sandbox, and a check of an archive against them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
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
async def front_of(sandbox: Sandbox) -> AsyncIterator[tuple[str, set[str]]]:
    """Yield the origin of a proxy, and a set: downloads of documents whose ids are in it get a 404."""
    unsigned: set[str] = set()
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            if unsigned.intersection(request.path.split("/")):
                return web.json_response({"code": "not_signed"}, status=404)
            headers = {"Authorization": request.headers["Authorization"]}
            async with session.request(request.method, sandbox.base_url + request.path_qs, headers=headers) as found:
                return web.Response(body=await found.read(), status=found.status, content_type=found.content_type)

        async with serving(forward) as proxy:
            yield proxy.origin, unsigned


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
