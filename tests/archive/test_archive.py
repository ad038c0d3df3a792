"""An archive gets each sealed document of every completed signing once, by sweeps, events or single calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from signing_async import (
    ArchiveConflict,
    ArchiveError,
    ConfigurationError,
    DecodeError,
    InvalidRequest,
    JournalError,
    NotFound,
    NotSound,
    NotYetSigned,
    Progress,
    ServerError,
    SigningClient,
    SqliteJournal,
    Unauthorized,
)
from signing_async.archive import Archive, ArchiveResult, FolderStore, verify_archive
from signing_async.sandbox import Profile, Sandbox
from signing_async.webhooks import Event, Wakeups
from tests.archive.tenants import Tenant, archived, completed, count, judge, lines_of, listing, sent, sweep
from tests.dispatch.holders import taken
from tests.dispatch.observing import Failing
from tests.pdfs import make_pdf
from tests.sealed.pdfs import judge_here

DOWNLOAD = "documents.download_signed"


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A sandbox with pages of two signings."""
    async with Sandbox(seed=7, profile=Profile(page_size=2)) as running:
        yield running


class Store(FolderStore):
    """A folder whose operations fail, or wait at the files of signings with the name ``Slow``."""

    def __init__(self, folder: Path, put: Exception | None = None, append: Exception | None = None) -> None:
        super().__init__(folder)
        self._put_error, self._append_error = put, append
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def put(self, name: str, source: Path, sha256: str) -> None:
        if self._put_error is not None:
            raise self._put_error
        if "Slow" in name:
            self.reached.set()
            await self.opened.wait()
        await super().put(name, source, sha256)

    async def append(self, name: str, offset: int, data: bytes) -> None:
        if self._append_error is not None:
            raise self._append_error
        await super().append(name, offset, data)


# Sweeps


async def test_sweep_archives_each_sealed_document_of_every_completed_signing(tenant: Tenant) -> None:
    done = [await tenant.complete(f"Lease {number}") for number in range(2)]
    await sent(tenant.client)
    await tenant.client.signings.create(name="draft", language="EN")
    await tenant.sandbox.cancel((await sent(tenant.client)).id)
    year, seen = datetime.now(UTC).year, list[Progress]()
    async with tenant.archive() as archive:
        results = [result async for result in archive.sweep(seen.append)]
        for result in results:
            assert result.error is None
            sealed = await tenant.client.documents.read_signed(result.signing, result.document)
            assert (tenant.folder / result.entry.path).read_bytes() == sealed
            assert (result.entry.sha256, result.entry.size) == (hashlib.sha256(sealed).hexdigest(), len(sealed))
            assert (result.entry.verdict, result.entry.documents) == ("complete", 2)
            assert result.entry.completed_at == result.document.completed_at
            assert (result.signing.id, result.document.id) == (result.entry.signing, result.entry.document)
        entries = [entry async for entry in archive.entries()]
    assert sorted(entry.path for entry in entries) == sorted(
        f"{year}/Lease {number}-{signing.id}/{name}.pdf"
        for number, signing in enumerate(done)
        for name in ("annex", "lease")
    )
    assert [one.files_done for one in seen] == [1, 2, 3, 4]
    assert seen[-1] == Progress(4, None, sum(entry.size for entry in entries), None)
    verdict = await judge(tenant.sandbox, tenant.folder)
    assert (verdict.documents, verdict.wrong) == (4, [])


async def test_second_sweep_requests_only_the_list(tenant: Tenant) -> None:
    """In the same process, in another one, and with another journal."""
    await tenant.complete()
    async with tenant.archive() as archive:
        await archived(archive)
        before = count(tenant.sandbox)
        assert await sweep(archive) == []
    for journal in (tenant.journal, tenant.journal.with_name("another")):
        async with tenant.archive(journal=journal) as again:
            assert await sweep(again) == []
    assert count(tenant.sandbox) - before == {"signings.list": 3}


async def test_tenants_share_a_folder_and_a_journal(folder: Path) -> None:
    """Two services with the same ids and names: each document gets a file and a line."""
    for _ in range(2):
        async with Sandbox(seed=5) as sandbox, SigningClient(sandbox.base_url, sandbox.access_token()) as client:
            await completed(sandbox, client, documents=("a.pdf",))
            async with Archive(client, folder, journal=folder.with_name("the.journal")) as archive:
                assert len(await archived(archive)) == 1
    assert len({line["service"] for line in lines_of(folder)}) == 2
    assert len({line["signing"] for line in lines_of(folder)}) == 1
    assert (await verify_archive(folder)).documents == 2


async def test_sweep_after_an_interrupted_one_downloads_only_what_is_missing(tenant: Tenant) -> None:
    """Signings of pages that were read before may be completed since."""
    for number in range(4):
        await tenant.complete(f"Lease {number}", "a.pdf")
    late = await sent(tenant.client, "Late", ("a.pdf",))
    for number in range(4):
        await tenant.complete(f"Boat {number}", "a.pdf")
    async with tenant.archive(concurrency=1) as archive:
        results = archive.sweep()
        for _ in range(3):
            await anext(results)
        tenant.sandbox.faults.add("signings.list", "500", times=None)
        with pytest.raises(ServerError):
            async for _ in results:
                pass
    tenant.sandbox.faults.clear()
    assert 3 <= tenant.count() < 8
    await tenant.sandbox.complete(late.id)
    async with tenant.archive() as archive:
        await archived(archive)
    verdict = await judge(tenant.sandbox, tenant.folder)
    assert (verdict.documents, verdict.wrong, tenant.count()) == (9, [], 9)


# Errors


async def test_document_that_is_not_sealed_yet_is_reported_and_tried_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = [{"id": f"d{number}", "name": f"{number}.pdf"} for number in (1, 2)]
    signing = {"id": "s1", "name": "Lease", "is_draft": False, "is_completed": True, "documents": documents}
    responses = {"s1": (signing, 200), "d1": ({"code": "not_signed"}, 404), "d2": (make_pdf(), 200)}
    downloads: list[str] = []

    def respond(path: str) -> tuple[Any, int]:
        name = path.removesuffix("/download-signed").rpartition("/")[2]
        downloads.extend([name] if name != "s1" else [])
        return responses[name]

    async with (
        listing([signing], respond) as client,
        Archive(client, folder, journal=folder.with_name("the.journal")) as archive,
    ):
        assert [type(result.error).__name__ for result in await sweep(archive)] == ["NotYetSigned", "NoneType"]
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert not [record for record in warnings if record.name.startswith("signing_async")]
        with pytest.raises(NotYetSigned):
            await archive.collect("s1")
        responses["d1"] = make_pdf(), 200
        assert len(await archived(archive)) == 1
    assert downloads == ["d1", "d2", "d1", "d1"]


@pytest.mark.parametrize(("operation", "added"), [(DOWNLOAD, 3), ("signings.get", 2)])
async def test_failure_of_one_document_or_signing_does_not_stop_the_sweep(
    tenant: Tenant, caplog: pytest.LogCaptureFixture, operation: str, added: int
) -> None:
    for number in range(2):
        await tenant.complete(f"Lease {number}")
    tenant.sandbox.faults.add(operation, "not-json")
    async with tenant.archive() as archive:
        results = await sweep(archive)
        (failed,) = [result for result in results if result.error]
        assert len(results) == added + 1
        assert isinstance(failed.error, DecodeError)
        assert (failed.document is not None, failed.entry) == (operation == DOWNLOAD, None)
        assert f"signing {failed.signing.id} was not archived" in caplog.text
        assert len(await archived(archive)) == 4 - added


async def test_failing_store_or_journal_stops_the_sweep_and_a_name_always_taken_does_not(
    tenant: Tenant,
) -> None:
    """The next sweep finds what is missing."""
    await tenant.complete("Lease", "a.pdf", "A.pdf")
    full = ArchiveError("full")
    for store in (Store(tenant.folder, put=full), Store(tenant.folder, append=full)):
        async with tenant.archive(store) as archive:
            with pytest.raises(ArchiveError, match="full"):
                await sweep(archive)
    for at in range(1, 3):
        async with (
            SqliteJournal(tenant.journal) as kept,
            tenant.archive(journal=Failing(kept, at, OSError("disk"))) as archive,
        ):
            with pytest.raises(JournalError):
                await sweep(archive)
    async with tenant.archive(Store(tenant.folder, put=ArchiveConflict("taken"))) as archive:
        assert {str(result.error) for result in await sweep(archive) if result.error} == {"taken"}
    incoming = tenant.folder / ".incoming"
    incoming.rename(incoming.with_name(".moved"))
    incoming.write_bytes(b"a file where a folder is needed")
    async with tenant.archive() as archive:
        with pytest.raises(ArchiveError, match=r"cannot keep a download: File exists: .*\.incoming"):
            await sweep(archive)
        incoming.unlink()
        await archived(archive)
    assert (await judge(tenant.sandbox, tenant.folder)).documents == 2


async def test_name_that_another_file_has_gets_a_hash(tenant: Tenant) -> None:
    signing = await tenant.complete("Lease", "a.pdf")
    taken_name = tenant.folder / f"{datetime.now(UTC).year}/Lease-{signing.id}/a.pdf"
    taken_name.parent.mkdir(parents=True)
    taken_name.write_bytes(b"mine")
    async with tenant.archive() as archive:
        (name,) = await archived(archive)
    assert name.startswith(f"{datetime.now(UTC).year}/Lease-{signing.id}/a-")
    assert taken_name.read_bytes() == b"mine"


async def test_document_that_is_not_sound_is_not_archived_even_if_another_run_placed_its_file(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signing_async.sealed.run_worker", judge_here)
    await tenant.complete("Lease", "a.pdf")
    async with Sandbox() as other:
        foreign = await other.certificate_pem()
    async with tenant.archive(Store(tenant.folder, append=ArchiveError("full"))) as archive:
        with pytest.raises(ArchiveError, match="full"):
            await sweep(archive)
    async with tenant.archive(trust=foreign) as archive:
        (result,) = await sweep(archive)
        assert isinstance(result.error, NotSound)
    own = await tenant.sandbox.certificate_pem()
    for settings, verdict in (({"verify": True}, "sound"), ({"trust": own}, "trusted")):
        folder = tenant.folder if verdict == "sound" else tenant.folder.with_name(verdict)
        async with tenant.archive(folder, **settings) as archive:
            (result,) = await sweep(archive)
            assert result.entry is not None
            assert result.entry.verdict == verdict
    assert (await judge(tenant.sandbox, tenant.folder)).wrong == []


async def test_file_that_is_being_placed_gets_its_line_if_the_sweep_is_cancelled(tenant: Tenant) -> None:
    signing, store = await tenant.complete("Slow"), Store(tenant.folder)
    async with tenant.archive(store) as archive:
        collecting = asyncio.create_task(archive.collect(signing.id))
        await store.reached.wait()
        collecting.cancel()
        await asyncio.sleep(0)
        store.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await collecting
    report = await verify_archive(tenant.folder)
    assert (report.documents, report.findings) == (1, ())


# Arguments


async def test_only_matching_signings_are_archived(tenant: Tenant) -> None:
    for name in ("Lease 1", "Lease 2", "lease 3"):
        await tenant.complete(name, "a.pdf")
    boat, now = await tenant.complete("Boat", "a.pdf"), datetime.now(UTC)
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"name": "Lease *"}, ["Lease 1", "Lease 2"]),
        ({"where": lambda signing: signing.id == boat.id}, ["Boat"]),
        ({"since": now + timedelta(days=1)}, []),
        ({"since": now - timedelta(days=1)}, ["Boat", "Lease 1", "Lease 2", "lease 3"]),
        ({"since": timedelta(days=1), "name": "B*"}, ["Boat"]),
        ({"name": "Lease *", "where": lambda signing: signing.name.endswith("1")}, ["Lease 1"]),
    ]
    for number, (filters, expected) in enumerate(cases):
        target = tenant.folder / f"{number}"
        async with tenant.archive(target, template="{signing.name}-{signing.id}", **filters) as archive:
            assert [name.split("-")[0] for name in await archived(archive)] == expected
            for signing in tenant.sandbox.signings:
                assert await archive.collect(signing.id) == ()


async def test_invalid_argument_is_refused(tenant: Tenant) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": 7}, "name: must be a pattern"),
        ({"since": datetime(2031, 1, 1)}, "since: must be a datetime with a time zone"),
        ({"where": "Lease"}, "where: must be callable, got 'Lease'"),
        ({"to": 7}, "to: must be a folder or an ArchiveStore, got 7"),
        ({"template": "{x}"}, "template: unknown field {x}"),
        ({"to": "s3://key:hunter2@contracts"}, "to: must be a folder, got a URL; for a bucket give an S3Store(url)"),
        ({"journal": 7}, "journal: must be a path or a Journal, got 7"),
        ({"journal": "postgresql://app:hunter2@db/app"}, "journal: must be a path, got a URL; for PostgreSQL give"),
        ({"trust": b"no certificate"}, "trust: no readable certificate"),
    ]
    for arguments, problem in cases:
        with pytest.raises((ConfigurationError, InvalidRequest)) as caught:
            tenant.archive(**arguments)
        assert problem in str(caught.value)
        assert "hunter2" not in repr(caught.value)
    assert not tenant.folder.exists()
    async with tenant.archive() as archive:
        for signing in (None, ".."):  # an event need not have one
            with pytest.raises(InvalidRequest, match="signing_id"):
                await archive.collect(signing)  # type: ignore[arg-type]  # what a caller may give
        with pytest.raises(InvalidRequest, match="every: must be a number above 0, got 0"):
            await archive.follow(every=0)
    assert not tenant.sandbox.requests


async def test_journal_in_the_folder_must_be_hidden(tenant: Tenant, tmp_path: Path) -> None:
    """Otherwise it would be an extra file of the archive."""
    (tmp_path / "link").symlink_to(tenant.folder)
    problem = r"^journal: .*the\.journal is in the archive: choose another folder, or a name that begins with a dot$"
    for path in (tenant.folder / "state/the.journal", str(tmp_path / "link/state/the.journal")):
        with pytest.raises(ConfigurationError, match=problem):
            tenant.archive(journal=path)
    assert not tenant.folder.exists()
    for name in ("state/.journal.db", ".state/journal.db"):
        await tenant.complete("Lease", "a.pdf")
        async with tenant.archive(journal=tenant.folder / name) as archive:
            await archived(archive)
        assert (tenant.folder / name).exists()
        assert (await verify_archive(tenant.folder)).findings == ()


# One signing


async def test_collect_raises_the_first_error_after_all_documents(tenant: Tenant, archive: Archive) -> None:
    signing = await sent(tenant.client)
    assert await archive.collect(signing) == ()
    await tenant.sandbox.complete(signing.id)
    tenant.sandbox.faults.add(DOWNLOAD, "not-json")
    with pytest.raises(DecodeError):
        await archive.collect(signing)
    assert len(lines_of(tenant.folder)) == 1
    assert len(await archive.collect(signing)) == 1
    with pytest.raises(NotFound):
        await archive.collect("unknown")


async def test_collect_waits_for_another_run_and_leaves_the_callers_journal_open(tenant: Tenant) -> None:
    signing = await tenant.complete()
    async with SqliteJournal(tenant.journal) as other, SqliteJournal(tenant.journal) as kept:
        async with tenant.archive(journal=kept) as archive:
            claim = await taken(other, f"archive:{tenant.sandbox.base_url}:{signing.id}")
            collecting = asyncio.create_task(archive.collect(signing))
            done, _ = await asyncio.wait([collecting], timeout=0.2)
            assert not done
            await other.release(claim)
            assert len(await collecting) == 2
            assert repr(archive) == f"Archive(FolderStore({str(tenant.folder)!r}))"
        await kept.release(await taken(kept))


async def test_client_archives_one_signing_and_returns_all_its_documents_each_time(tenant: Tenant) -> None:
    client, folder, journal = tenant.client, tenant.folder, tenant.journal
    signing, other = await tenant.complete(), await tenant.complete()
    first = await client.archive(signing, folder)
    assert [Path(folder, entry.path).stat().st_size for entry in first] == [entry.size for entry in first]
    assert len(first) == 2
    assert await client.archive(other.id, folder, journal, template="{document.id}") != ()
    before = count(tenant.sandbox)
    assert await client.archive(signing.id, folder, journal) == first
    assert await client.archive(signing, str(folder)) == first
    assert count(tenant.sandbox) == before


# Follow


@asynccontextmanager
async def following(
    archive: Archive, wakeups: Wakeups | None = None, every: float = 60
) -> AsyncIterator[Callable[[int], Awaitable[list[ArchiveResult]]]]:
    """Follow until the end of the block; give a function that waits for a number of results."""
    results = asyncio.Queue[ArchiveResult]()

    async def take(number: int) -> list[ArchiveResult]:
        async with asyncio.timeout(30):
            return [await results.get() for _ in range(number)]

    task = asyncio.create_task(archive.follow(wakeups, every, results.put_nowait))
    try:
        yield take
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


def event(**payload: Any) -> Event:
    return Event("evt_1", "signing.completed", payload, datetime.now(UTC))


async def listed(tenant: Tenant, times: int) -> None:
    """Wait until the signings were listed this many times."""
    async with asyncio.timeout(30):
        while tenant.count("signings.list") < times:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("fault", ["not-json", "503"])
async def test_follow_sweeps_at_once_and_again_also_after_an_unreadable_or_failed_list(
    fault: str, tenant: Tenant, archive: Archive, caplog: pytest.LogCaptureFixture
) -> None:
    """A page for maintenance may have the status 200."""
    await tenant.complete()
    async with following(archive, Wakeups() if fault == "503" else None, 0.05) as take:
        assert [result.error for result in await take(2)] == [None] * 2
        failing = tenant.sandbox.faults.add("signings.list", fault, times=10)
        await tenant.complete()
        assert [result.error for result in await take(2)] == [None] * 2
    assert failing.hits == 10
    assert "archiving continues after: " in caplog.text


async def test_event_is_collected_at_once_and_one_that_names_no_signing_starts_a_sweep(
    tenant: Tenant, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signing_async.archive.archive._REQUESTED_SWEEP_DELAY", 0.1)
    wakeups = Wakeups()
    signings = [await sent(tenant.client, f"Lease {number}", ("a.pdf",)) for number in range(2)]
    async with following(archive, wakeups) as take:
        await listed(tenant, 1)
        await tenant.sandbox.complete(signings[0].id)
        wakeups.publish(event(signing_id="of another tenant"))
        wakeups.publish(event(signing_id=signings[0].id))
        errors = [result.error for result in await take(2) if result.error is not None]
        assert [type(error) for error in errors] == [NotFound]
        assert tenant.count("signings.list") == 1
        await tenant.sandbox.complete(signings[1].id)
        wakeups.publish(event(signing_id=signings[0].id))  # which is archived already
        wakeups.publish(event())
        await take(1)
        assert tenant.count("signings.list") == 2


async def test_event_during_a_sweep_is_collected_at_once(tenant: Tenant) -> None:
    await tenant.complete("Slow", "a.pdf")
    signing = await sent(tenant.client)
    store, wakeups = Store(tenant.folder), Wakeups()
    async with tenant.archive(store) as archive, following(archive, wakeups) as take:
        await store.reached.wait()
        await tenant.sandbox.complete(signing.id)
        wakeups.publish(event(signing_id=signing.id))
        assert {result.signing.id for result in await take(2)} == {signing.id}
        store.opened.set()
        await take(1)
    assert (await judge(tenant.sandbox, tenant.folder)).wrong == []


async def test_rejected_token_ends_the_following(
    tenant: Tenant, archive: Archive, caplog: pytest.LogCaptureFixture
) -> None:
    tenant.sandbox.faults.add("signings.list", "expired-token", times=None)
    with pytest.raises(Unauthorized):
        await archive.follow(Wakeups())
    assert "archiving ends: HTTP 401" in caplog.text


async def test_closing_ends_the_iteration_of_a_sweep(tenant: Tenant) -> None:
    await tenant.complete("Slow", "a.pdf")
    tenant.sandbox.faults.add(DOWNLOAD, "hang")
    async with tenant.archive() as archive:
        consumer = asyncio.create_task(sweep(archive))
        while not tenant.count():
            await asyncio.sleep(0.01)
        await archive.aclose()
        async with asyncio.timeout(10):
            assert await consumer == []


async def test_event_of_a_signing_that_another_run_holds_delays_no_other(tenant: Tenant, archive: Archive) -> None:
    held, free = await sent(tenant.client), await sent(tenant.client)
    wakeups = Wakeups()
    async with SqliteJournal(tenant.journal) as other, following(archive, wakeups) as take:
        await taken(other, f"archive:{tenant.sandbox.base_url}:{held.id}")
        await listed(tenant, 1)
        await asyncio.sleep(0.05)  # the first sweep finds nothing that is completed
        for signing in (held, free):
            await tenant.sandbox.complete(signing.id)
        for signing in (held, free):
            wakeups.publish(event(signing_id=signing.id))
        assert {result.signing.id for result in await take(2)} == {free.id}
