"""An archive gets each sealed document of every completed signing once, by sweeps, events or single calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
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
    SigningClient,
    SqliteJournal,
    Unauthorized,
)
from signing_async.archive import Archive, ArchiveResult, FolderStore, verify_archive
from signing_async.sandbox import Sandbox
from signing_async.webhooks import Event, Wakeups
from tests.archive.tenants import Tenant, archived, completed, count, front_of, judge, lines_of, sent, sweep
from tests.dispatch.holders import taken
from tests.dispatch.observing import Failing

DOWNLOAD = "documents.download_signed"


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


async def test_tenants_share_a_folder_and_a_journal(folder: Path, journal: Path) -> None:
    """Two services with the same ids and names: each document gets a file and a line."""
    for _ in range(2):
        async with Sandbox(seed=5) as sandbox, SigningClient(sandbox.base_url, sandbox.access_token()) as client:
            await completed(sandbox, client, documents=("a.pdf",))
            async with Archive(client, folder, journal=journal) as archive:
                assert len(await archived(archive)) == 1
    assert len({line["service"] for line in lines_of(folder)}) == 2
    assert len({line["signing"] for line in lines_of(folder)}) == 1
    assert (await verify_archive(folder)).documents == 2


# Errors


async def test_document_that_is_not_sealed_yet_is_reported_and_tried_again(
    tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    signing = await tenant.complete()
    async with (
        front_of(tenant.sandbox) as (origin, unsigned),
        SigningClient(origin, tenant.sandbox.access_token()) as slow,
        Archive(slow, tenant.folder, journal=tenant.journal) as archive,
    ):
        unsigned.add(tenant.sandbox.documents(signing.id)[0].id)
        first = await sweep(archive)
        assert [type(result.error).__name__ for result in first] == ["NotYetSigned", "NoneType"]
        assert not [record for record in caplog.records if record.levelname == "WARNING"]
        with pytest.raises(NotYetSigned):
            await archive.collect(signing)
        unsigned.clear()
        before = tenant.count()
        assert len(await archived(archive)) == 1
        assert tenant.count() - before == 1


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


async def test_failing_journal_stops_the_sweep(tenant: Tenant) -> None:
    """Whenever it fails; the next sweep with a journal that works finds what is missing."""
    await tenant.complete("Lease", "a.pdf")
    for at in range(1, 6):
        folder = tenant.folder / f"{at}"
        async with (
            SqliteJournal(tenant.journal) as kept,
            tenant.archive(folder, journal=Failing(kept, at, OSError("disk"))) as archive,
        ):
            with suppress(JournalError):  # a late failure may come after all work
                await sweep(archive)
        async with tenant.archive(folder) as archive:
            await archived(archive)
        assert (await judge(tenant.sandbox, folder)).wrong == []


async def test_failing_store_stops_the_sweep_and_a_name_that_is_always_taken_does_not(tenant: Tenant) -> None:
    await tenant.complete("Lease", "a.pdf", "A.pdf")
    for failing in (Store(tenant.folder, put=ArchiveError("full")), Store(tenant.folder, append=ArchiveError("full"))):
        async with tenant.archive(failing) as archive:
            with pytest.raises(ArchiveError, match="full"):
                await sweep(archive)
    async with tenant.archive(Store(tenant.folder, put=ArchiveConflict("taken"))) as archive:
        assert {str(result.error) for result in await sweep(archive) if result.error} == {"taken"}
    async with tenant.archive() as archive:
        await archived(archive)
    assert (await judge(tenant.sandbox, tenant.folder)).documents == 2


async def test_download_that_cannot_be_written_stops_the_sweep(tenant: Tenant) -> None:
    await tenant.complete()
    tenant.folder.mkdir()
    (tenant.folder / ".incoming").write_bytes(b"a file where a folder is needed")
    async with tenant.archive() as archive:
        with pytest.raises(ArchiveError, match=r"cannot keep a download: File exists: .*\.incoming"):
            await sweep(archive)


async def test_name_that_another_file_has_gets_a_hash(tenant: Tenant) -> None:
    signing = await tenant.complete("Lease", "a.pdf")
    taken_name = tenant.folder / f"{datetime.now(UTC).year}/Lease-{signing.id}/a.pdf"
    taken_name.parent.mkdir(parents=True)
    taken_name.write_bytes(b"mine")
    async with tenant.archive() as archive:
        (name,) = await archived(archive)
    assert name.startswith(f"{datetime.now(UTC).year}/Lease-{signing.id}/a-")
    assert taken_name.read_bytes() == b"mine"


async def test_document_that_is_not_sound_is_not_archived_even_if_another_run_placed_its_file(tenant: Tenant) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": 7}, "name: must be a pattern"),
        ({"since": datetime(2031, 1, 1)}, "since: must be a datetime with a time zone"),
        ({"where": "Lease"}, "where: must be callable, got 'Lease'"),
        ({"to": 7}, "to: must be a folder or an ArchiveStore, got 7"),
        ({"template": "{x}"}, "template: unknown field {x}"),
        ({"to": "s3://key:hunter2@contracts"}, "to: must be a folder, got a URL; for a bucket give an S3Store(url)"),
        ({"journal": 7}, "journal: must be a path or a Journal, got 7"),
        ({"journal": "postgresql://app:hunter2@db/app"}, "journal: must be a path, got a URL; for PostgreSQL give"),
        ({"trust": b"no certificate"}, "trust: no readable certificate"),
    ],
)
async def test_invalid_argument_is_refused(tenant: Tenant, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises((ConfigurationError, InvalidRequest)) as caught:
        tenant.archive(**arguments)
    assert problem in str(caught.value)
    assert "hunter2" not in repr(caught.value)
    assert not tenant.folder.exists()


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


@pytest.mark.parametrize("signing", [None, ".."])
async def test_invalid_id_or_interval_is_refused(sandbox: Sandbox, archive: Archive, signing: Any) -> None:
    """An event need not have one."""
    with pytest.raises(InvalidRequest, match="signing_id"):
        await archive.collect(signing)
    with pytest.raises(InvalidRequest, match="every: must be a number above 0, got 0"):
        await archive.follow(every=0)
    assert not sandbox.requests


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


Follow = Callable[..., asyncio.Task[None]]


@pytest.fixture
async def results() -> asyncio.Queue[ArchiveResult]:
    """The results that the follower reports."""
    return asyncio.Queue()


@pytest.fixture
async def follow(archive: Archive, results: asyncio.Queue[ArchiveResult]) -> AsyncIterator[Follow]:
    """Starts to follow; the task is cancelled at the end of the test."""
    started: list[asyncio.Task[None]] = []

    def start(wakeups: Wakeups | None = None, every: float = 60) -> asyncio.Task[None]:
        started.append(asyncio.create_task(archive.follow(wakeups, every, results.put_nowait)))
        return started[-1]

    yield start
    for task in started:
        task.cancel()
    await asyncio.wait(started)


async def taken_from(results: asyncio.Queue[ArchiveResult], number: int) -> list[ArchiveResult]:
    async with asyncio.timeout(30):
        return [await results.get() for _ in range(number)]


def event(**payload: Any) -> Event:
    return Event("evt_1", "signing.completed", payload, datetime.now(UTC))


async def listed(tenant: Tenant, times: int) -> None:
    """Wait until the signings were listed this many times."""
    async with asyncio.timeout(30):
        while tenant.count("signings.list") < times:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("fault", ["not-json", "503"])
async def test_follow_continues_after_an_unreadable_or_failed_list(
    fault: str, tenant: Tenant, follow: Follow, results: asyncio.Queue[ArchiveResult], caplog: pytest.LogCaptureFixture
) -> None:
    """A page for maintenance may have the status 200."""
    tenant.sandbox.faults.add("signings.list", fault, times=10)
    await tenant.complete()
    follow(every=0.05)
    assert [result.error for result in await taken_from(results, 2)] == [None] * 2
    assert "archiving continues after: " in caplog.text


@pytest.mark.parametrize("wakeups", [None, Wakeups()], ids=["sweeps", "events"])
async def test_follow_sweeps_at_once_and_again(
    tenant: Tenant, follow: Follow, results: asyncio.Queue[ArchiveResult], wakeups: Wakeups | None
) -> None:
    follow(wakeups, 0.05)
    for _ in range(2):
        await tenant.complete()
        assert [result.error for result in await taken_from(results, 2)] == [None] * 2


async def test_event_is_collected_at_once_and_one_that_names_no_signing_starts_a_sweep(
    tenant: Tenant, follow: Follow, results: asyncio.Queue[ArchiveResult]
) -> None:
    wakeups = Wakeups()
    signings = [await sent(tenant.client, f"Lease {number}", ("a.pdf",)) for number in range(2)]
    follow(wakeups)
    await listed(tenant, 1)
    await tenant.sandbox.complete(signings[0].id)
    wakeups.publish(event(signing_id="of another tenant"))
    wakeups.publish(event(signing_id=signings[0].id))
    errors = [result.error for result in await taken_from(results, 2) if result.error is not None]
    assert [type(error) for error in errors] == [NotFound]
    assert tenant.count("signings.list") == 1
    await tenant.sandbox.complete(signings[1].id)
    wakeups.publish(event(signing_id=signings[0].id))  # which is archived already
    wakeups.publish(event())
    await taken_from(results, 1)
    assert tenant.count("signings.list") == 2


async def test_event_during_a_sweep_is_collected_at_once(tenant: Tenant, results: asyncio.Queue[ArchiveResult]) -> None:
    await tenant.complete("Slow", "a.pdf")
    signing = await sent(tenant.client)
    store, wakeups = Store(tenant.folder), Wakeups()
    async with tenant.archive(store) as archive:
        following = asyncio.create_task(archive.follow(wakeups, 60, results.put_nowait))
        await store.reached.wait()
        await tenant.sandbox.complete(signing.id)
        wakeups.publish(event(signing_id=signing.id))
        assert {result.signing.id for result in await taken_from(results, 2)} == {signing.id}
        store.opened.set()
        await taken_from(results, 1)
        following.cancel()
        await asyncio.wait([following])
    assert (await judge(tenant.sandbox, tenant.folder)).wrong == []


async def test_sweep_that_fails_for_now_does_not_end_the_following(
    tenant: Tenant, follow: Follow, results: asyncio.Queue[ArchiveResult], caplog: pytest.LogCaptureFixture
) -> None:
    await tenant.complete()
    hits = tenant.sandbox.faults.add("signings.list", "500", times=6)
    follower = follow(None, 0.02)
    await taken_from(results, 2)
    assert hits.hits == 6
    assert "archiving continues after: HTTP 500 on signings.list" in caplog.text
    assert not follower.done()


@pytest.mark.parametrize("wakeups", [None, Wakeups()], ids=["sweeps", "events"])
async def test_rejected_token_ends_the_following(
    tenant: Tenant, follow: Follow, wakeups: Wakeups | None, caplog: pytest.LogCaptureFixture
) -> None:
    tenant.sandbox.faults.add("signings.list", "expired-token", times=None)
    with pytest.raises(Unauthorized):
        await follow(wakeups)
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


async def test_event_of_a_signing_that_another_run_holds_delays_no_other(
    tenant: Tenant, results: asyncio.Queue[ArchiveResult]
) -> None:
    held, wakeups = await sent(tenant.client), Wakeups()
    free = await sent(tenant.client)
    async with SqliteJournal(tenant.journal) as other, tenant.archive() as archive:
        assert await other.claim(f"archive:{tenant.sandbox.base_url}:{held.id}")
        following = asyncio.create_task(archive.follow(wakeups, 60, results.put_nowait))
        await listed(tenant, 1)
        await asyncio.sleep(0.05)  # the first sweep finds nothing that is completed
        for signing in (held, free):
            await tenant.sandbox.complete(signing.id)
        for signing in (held, free):
            wakeups.publish(event(signing_id=signing.id))
        assert {result.signing.id for result in await taken_from(results, 2)} == {free.id}
        following.cancel()
        await asyncio.wait([following])
