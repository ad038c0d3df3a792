"""Every operation, cancelled anywhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from signing_async import RetryPolicy, SigningClient
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


Operate = Callable[[SigningClient, str, Path], Awaitable[object]]


async def _read(client: SigningClient, signing: str, folder: Path) -> None:
    ids = [each.id async for each in client.signings.list(limit=1)]
    assert signing in ids
    document = (await client.signings.get(signing)).documents[0]
    async with client.documents.stream_signed(signing, document) as chunks:
        async for _ in chunks:
            pass
    await client.documents.read_signed(signing, document)
    await client.recipients.list(signing)


async def _download(client: SigningClient, signing: str, folder: Path) -> None:
    document = (await client.signings.get(signing)).documents[0]
    await client.documents.download_signed(signing, document, folder / "sealed.pdf")


async def _draft_and_send(client: SigningClient, signing: str, folder: Path) -> None:
    draft = await client.signings.create(name="x", language="EN")
    await client.documents.upload(draft, folder / "source.pdf")
    person = await client.recipients.add(draft, email="a@example.com", order=1)
    await client.signings.send(draft)
    await client.recipients.remind(draft, person)
    await client.recipients.remind_pending(draft)


async def _wait(client: SigningClient, signing: str, folder: Path) -> None:
    await client.me()
    await client.signings.wait_until_completed(signing)


@pytest.mark.parametrize("operate", [_draft_and_send, _read, _download, _wait])
@pytest.mark.parametrize("faults", [(), ("503", "drop-after-commit")], ids=["calm", "faults"])
async def test_cancellation_anywhere_leaks_no_connection_task_or_file(
    sandbox: Sandbox, tmp_path: Path, operate: Operate, faults: tuple[str, ...]
) -> None:
    (tmp_path / "source.pdf").write_bytes(make_pdf(50_000))
    async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=QUICK) as client:
        signing = await client.signings.create(name="x", language="EN")
        await client.signings.create(name="y", language="EN")
        await client.documents.upload(signing, tmp_path / "source.pdf")
        await client.recipients.add(signing, email="a@example.com", order=1)
        await client.signings.send(signing)
        await sandbox.complete(signing.id)
        await operate(client, signing.id, tmp_path)
        (tmp_path / "sealed.pdf").unlink(missing_ok=True)
        files = _open_files()
        for kind in faults:
            sandbox.faults.add("*", kind, times=None, probability=0.2, seed=3)
        for turns in (*range(1, 30), *range(30, 400, 15)):
            task = asyncio.create_task(operate(client, signing.id, tmp_path))  # type: ignore[arg-type]  # coroutines
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        sandbox.faults.clear()
        await _settle(lambda: not _own_tasks())
        assert not _own_tasks()
        connector = client._shared.sessions.get().connector
        assert connector is not None
        assert not connector._acquired  # aiohttp's own count of connections in use
        # A thread that writes a download may outlive its cancellation by a moment, and cleans up behind itself.
        await _settle(lambda: {path.name for path in tmp_path.iterdir()} <= {"source.pdf", "sealed.pdf"})
        assert {path.name for path in tmp_path.iterdir()} <= {"source.pdf", "sealed.pdf"}
        await connector.close()
        await _settle(lambda: _open_files() <= files)
        assert _open_files() <= files


def _own_tasks() -> list[str]:
    """The tasks of the package that are still there: the sandbox has its own, of aiohttp."""
    coroutines = [str(task.get_coro()) for task in asyncio.all_tasks()]
    return [one for one in coroutines if "signing_async/" in one and "sandbox" not in one] + [
        task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("signing_async")
    ]


def _open_files() -> int:
    """Files, and not sockets: connections that wait in the pool are no leak."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    return sum(not link.startswith("socket:") and "sandbox" not in link for link in links)


async def _settle(done: Callable[[], bool]) -> None:
    for _ in range(200):
        if done():
            return
        await asyncio.sleep(0.01)
