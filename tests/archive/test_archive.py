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
    ConfigurationError,
    DecodeError,
    InvalidRequest,
    NotFound,
    NotSound,
    NotYetSigned,
    Progress,
    SigningClient,
    SqliteJournal,
    Unauthorized,
)
from signing_async.archive import Archive, ArchiveResult, FolderStore, verify_archive
from signing_async.dispatch.journal import Claim
from signing_async.errors import ArchiveConflict, ArchiveError, JournalError
from signing_async.sandbox import Sandbox
from signing_async.webhooks import Event, Wakeups
from tests.archive.tenants import completed, count, files_in, front_of, judge, lines_of, sent
from tests.dispatch.holders import taken
from tests.dispatch.observing import Failing

DOWNLOAD = "documents.download_signed"


async def sweep(archive: Archive) -> list[ArchiveResult]:
    """Return the results of a sweep."""
    return [result async for result in archive.sweep()]


async def archived(archive: Archive) -> list[str]:
    """Sweep without an error, and return the names of the files that were added."""
    results = await sweep(archive)
    assert [result.error for result in results if result.error] == []
    return sorted(result.entry.path for result in results if result.entry)


# Sweeps


async def test_sweep_archives_each_sealed_document_of_every_completed_signing(
    sandbox: Sandbox, client: SigningClient, archive: Archive, folder: Path
) -> None:
    done = [await completed(sandbox, client, f"Lease {number}") for number in range(3)]
    await sent(client)
    await client.signings.create(name="draft", language="EN")
    await sandbox.cancel((await sent(client)).id)
    year = datetime.now(UTC).year
    expected = [
        f"{year}/Lease {number}-{signing.id}/{name}.pdf"
        for number, signing in enumerate(done)
        for name in ("annex", "lease")
    ]
    assert await archived(archive) == sorted(expected)
    await archive.aclose()
    verdict = await judge(sandbox, folder)
    assert (verdict.documents, verdict.wrong) == (6, [])


async def test_archived_file_is_the_sealed_document(
    sandbox: Sandbox, client: SigningClient, archive: Archive, folder: Path
) -> None:
    signing = await completed(sandbox, client, documents=("a.pdf",))
    (result,) = await sweep(archive)
    assert result.entry is not None
    assert result.document is not None
    sealed = await client.documents.read_signed(signing, result.document)
    assert (folder / result.entry.path).read_bytes() == sealed
    assert result.entry.sha256 == hashlib.sha256(sealed).hexdigest()
    assert result.entry.size == len(sealed)
    assert result.entry.verdict == "complete"
    assert result.entry.completed_at == result.document.completed_at
    assert (result.signing.id, result.entry.signing, result.entry.documents) == (signing.id, signing.id, 1)
    assert [entry async for entry in archive.entries()] == [result.entry]


async def test_second_sweep_requests_only_the_list(
    sandbox: Sandbox, client: SigningClient, archive: Archive, folder: Path, journal: Path
) -> None:
    """In the same process, in another one, and with another journal."""
    for _ in range(3):
        await completed(sandbox, client)
    await archived(archive)
    before = count(sandbox)
    assert await sweep(archive) == []
    async with Archive(client, folder, journal=journal) as again:
        assert await sweep(again) == []
    async with Archive(client, folder, journal=journal.with_name("another")) as again:
        assert await sweep(again) == []
    assert count(sandbox) - before == {"signings.list": 3}


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


async def test_progress_counts_documents_and_bytes(
    sandbox: Sandbox, client: SigningClient, archive: Archive, folder: Path
) -> None:
    await completed(sandbox, client)
    seen: list[Progress] = []
    async for _ in archive.sweep(seen.append):
        pass
    size = sum(line["size"] for line in lines_of(folder))
    assert [one.files_done for one in seen] == [1, 2]
    assert seen[-1] == Progress(2, None, size, None)


# Errors of single documents


async def test_document_that_is_not_sealed_yet_is_reported_and_tried_again(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signing = await completed(sandbox, client)
    async with (
        front_of(sandbox) as (origin, unsigned),
        SigningClient(origin, sandbox.access_token()) as slow,
        Archive(slow, folder, journal=journal) as archive,
    ):
        unsigned.add(sandbox.documents(signing.id)[0].id)
        first = await sweep(archive)
        assert [type(result.error).__name__ for result in first] == ["NotYetSigned", "NoneType"]
        assert not [record for record in caplog.records if record.levelname == "WARNING"]
        with pytest.raises(NotYetSigned):
            await archive.collect(signing)
        unsigned.clear()
        before = count(sandbox)
        assert len(await archived(archive)) == 1
        assert (count(sandbox) - before)[DOWNLOAD] == 1
        assert await sweep(archive) == []


async def test_failure_of_one_document_does_not_stop_the_sweep(
    sandbox: Sandbox, client: SigningClient, archive: Archive, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        await completed(sandbox, client, f"Lease {number}", ("a.pdf",))
    sandbox.faults.add(DOWNLOAD, "not-json")
    results = await sweep(archive)
    (failed,) = [result for result in results if result.error]
    assert isinstance(failed.error, DecodeError)
    assert failed.entry is None
    assert failed.document is not None
    assert f"document {failed.document.id} of signing {failed.signing.id} was not archived" in caplog.text
    assert len(files_in(folder)) - len([name for name in files_in(folder) if name.startswith(".")]) == 2
    assert len(await archived(archive)) == 1


async def test_signing_that_cannot_be_read_is_a_result_without_a_document(
    sandbox: Sandbox, client: SigningClient, archive: Archive
) -> None:
    signing = await completed(sandbox, client)
    sandbox.faults.add("signings.get", "not-json")
    (failed,) = await sweep(archive)
    assert (failed.signing.id, failed.document, failed.entry) == (signing.id, None, None)
    assert failed.error is not None
    assert len(await archived(archive)) == 2


async def test_signing_whose_claim_the_journal_refuses_is_a_result_and_the_others_are_archived(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signings = [await completed(sandbox, client, f"Lease {number}", ("a.pdf",)) for number in range(3)]
    long = signings[1].id

    class WithLongId(SqliteJournal):
        """A journal that finds one signing's id too long."""

        async def claim(self, key: str) -> Claim | None:
            return await super().claim(key + "x" * 1000 if key.endswith(long) else key)

    async with WithLongId(journal) as refusing, Archive(client, folder, journal=refusing) as archive:
        for new in (2, 0):
            results = await sweep(archive)
            assert len([result for result in results if result.entry is not None]) == new
            (failed,) = (result for result in results if result.error is not None)
            assert (failed.signing.id, failed.document) == (long, None)
            assert isinstance(failed.error, InvalidRequest)
        with pytest.raises(InvalidRequest, match="at most 1,000 bytes"):
            await archive.collect(long)
    assert f"signing {long} was not archived: " in caplog.text


async def test_failing_journal_stops_the_sweep(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    """Whenever it fails; the next sweep with a journal that works finds what is missing."""
    await completed(sandbox, client)
    for at in range(1, 8):
        async with SqliteJournal(journal) as kept:
            failing = Failing(kept, at, OSError("disk"))
            async with Archive(client, folder / f"{at}", journal=failing) as archive:
                with suppress(JournalError):  # a late failure may come after all work
                    await sweep(archive)
        async with Archive(client, folder / f"{at}", journal=journal) as archive:
            await archived(archive)
        assert (await judge(sandbox, folder / f"{at}")).wrong == []


class Broken:
    """A store that cannot store."""

    def __init__(self, folder: Path, error: Exception) -> None:
        self._store = FolderStore(folder)
        self._error = error
        self.read, self.append = self._store.read, self._store.append

    async def put(self, name: str, source: Path, sha256: str) -> None:
        raise self._error


async def test_failing_store_stops_the_sweep(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    await completed(sandbox, client)
    async with Archive(client, Broken(folder, ArchiveError("no space")), journal=journal) as archive:
        with pytest.raises(ArchiveError, match="no space"):
            await sweep(archive)
    async with Archive(client, folder, journal=journal) as archive:
        assert len(await archived(archive)) == 2


async def test_name_that_is_always_taken_is_a_result_with_an_error(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    await completed(sandbox, client, documents=("a.pdf", "A.pdf"))
    async with Archive(client, Broken(folder, ArchiveConflict("taken")), journal=journal) as archive:
        assert [str(result.error) for result in await sweep(archive)] == ["taken", "taken"]


async def test_download_that_cannot_be_written_stops_the_sweep(
    sandbox: Sandbox, client: SigningClient, archive: Archive, folder: Path
) -> None:
    await completed(sandbox, client)
    folder.mkdir()
    (folder / ".incoming").write_bytes(b"a file where a folder is needed")
    with pytest.raises(ArchiveError, match=r"cannot keep a download: File exists: .*\.incoming"):
        await sweep(archive)
    (folder / ".incoming").unlink()
    assert len(await archived(archive)) == 2


async def test_name_that_another_file_has_gets_a_hash(
    sandbox: Sandbox, client: SigningClient, archive: Archive, folder: Path
) -> None:
    signing = await completed(sandbox, client, documents=("a.pdf",))
    taken_name = folder / f"{datetime.now(UTC).year}/Lease-{signing.id}/a.pdf"
    taken_name.parent.mkdir(parents=True)
    taken_name.write_bytes(b"mine")
    (name,) = await archived(archive)
    assert name.startswith(f"{datetime.now(UTC).year}/Lease-{signing.id}/a-")
    assert taken_name.read_bytes() == b"mine"


async def test_not_sound_document_is_not_archived(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    await completed(sandbox, client, documents=("a.pdf",))
    async with Archive(client, folder, journal=journal, trust=await _other_authority()) as archive:
        (result,) = await sweep(archive)
        assert isinstance(result.error, NotSound)
    judgements: list[tuple[dict[str, Any], str]] = [
        ({"verify": True}, "sound"),
        ({"trust": await sandbox.certificate_pem()}, "trusted"),
    ]
    for settings, verdict in judgements:
        async with Archive(client, folder / verdict, journal=journal, **settings) as archive:
            (result,) = await sweep(archive)
            assert result.entry is not None
            assert result.entry.verdict == verdict


async def test_file_that_another_run_placed_without_verifying_it_is_not_listed(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    await completed(sandbox, client, documents=("a.pdf",))

    async def fail(name: str, offset: int, data: bytes) -> None:
        raise ArchiveError("no space")

    unlisted = Gated(folder, "nothing")
    unlisted.append = fail  # type: ignore[method-assign]  # the store of this test
    async with Archive(client, unlisted, journal=journal) as archive:
        with pytest.raises(ArchiveError, match="no space"):
            await sweep(archive)
    async with Archive(client, folder, journal=journal, trust=await _other_authority()) as archive:
        (result,) = await sweep(archive)
        assert isinstance(result.error, NotSound)
    async with Archive(client, folder, journal=journal, verify=True) as archive:
        (result,) = await sweep(archive)
        assert result.entry is not None
        assert result.entry.verdict == "sound"
    assert (await judge(sandbox, folder)).wrong == []


async def _other_authority() -> bytes:
    async with Sandbox() as other:
        return await other.certificate_pem()


async def test_file_that_is_being_placed_gets_its_line_if_the_sweep_is_cancelled(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    await completed(sandbox, client)
    begun, may_end, store = asyncio.Event(), asyncio.Event(), FolderStore(folder)

    async def put(name: str, source: Path, sha256: str) -> None:
        begun.set()
        await may_end.wait()
        await store.put(name, source, sha256)

    slow = Broken(folder, ZeroDivisionError())
    slow.put = put  # type: ignore[method-assign]  # the store of this test
    async with Archive(client, slow, journal=journal) as archive:
        collecting = asyncio.create_task(archive.collect(sandbox.signings[0].id))
        await begun.wait()
        collecting.cancel()
        await asyncio.wait([collecting], timeout=0.05)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await collecting
    report = await verify_archive(folder)
    assert (report.documents, report.findings) == (1, ())


# Filters


async def test_only_matching_signings_are_archived(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    for name in ("Lease 1", "Lease 2", "lease 3", "Boat"):
        await completed(sandbox, client, name, ("a.pdf",))
    (boat,) = [signing for signing in sandbox.signings if signing.name == "Boat"]
    now = datetime.now(UTC)

    async def names(**filters: Any) -> list[str]:
        target = folder / str(len(list(folder.glob("*"))))
        async with Archive(client, target, journal=journal, template="{signing.name}-{signing.id}", **filters) as one:
            found = await archived(one)
            for signing in sandbox.signings:
                assert await one.collect(signing.id) == ()
            return sorted(name.split("-")[0] for name in found)

    assert await names(name="Lease *") == ["Lease 1", "Lease 2"]
    assert await names(name="Boat") == ["Boat"]
    assert await names(where=lambda signing: signing.id == boat.id) == ["Boat"]
    assert await names(since=now + timedelta(days=1)) == []
    assert len(await names(since=now - timedelta(days=1))) == 4
    assert len(await names(since=timedelta(days=1))) == 4
    assert await names(name="Lease *", where=lambda signing: signing.name.endswith("1")) == ["Lease 1"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": 7}, "name: must be a pattern"),
        ({"since": datetime(2031, 1, 1)}, "since: must be a datetime with a time zone"),
        ({"since": 30}, "since: must be a datetime with a time zone, or a timedelta, got 30"),
        ({"where": "Lease"}, "where: must be callable, got 'Lease'"),
        ({"concurrency": 0}, "concurrency: must be an integer of at least 1, got 0"),
        ({"template": "{x}"}, "template: unknown field {x}"),
        ({"to": 7}, "to: must be a folder or an ArchiveStore, got 7"),
        ({"journal": 7}, "journal: must be a path or a Journal, got 7"),
        ({"trust": b"no certificate"}, "trust: no readable certificate"),
    ],
)
async def test_invalid_argument_is_refused(
    client: SigningClient, folder: Path, journal: Path, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises((ConfigurationError, InvalidRequest)) as caught:
        Archive(client, **{"to": folder, "journal": journal, **arguments})
    assert problem in str(caught.value)
    assert not folder.exists()


async def test_url_is_not_taken_for_a_path(
    client: SigningClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its password is in no error."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"^journal: must be a path, .* PostgresJournal\(dsn\)") as one:
        Archive(client, "archive", journal="postgresql://app:hunter2@db/app")
    with pytest.raises(ConfigurationError, match=r"^to: must be a folder, .* S3Store\(url\)") as other:
        Archive(client, "s3://key:hunter2@contracts/signed", journal="the.journal")
    with pytest.raises(ConfigurationError, match="to: must be a folder, got a URL"):
        await verify_archive("s3://contracts/signed")
    assert "hunter2" not in f"{one.value!r} {other.value!r}"
    assert list(tmp_path.iterdir()) == []


# One signing


async def test_collect_returns_what_was_added(sandbox: Sandbox, client: SigningClient, archive: Archive) -> None:
    signing = await sent(client)
    assert await archive.collect(signing) == ()
    await sandbox.complete(signing.id)
    assert len(await archive.collect(signing)) == 2
    before = count(sandbox)
    assert await archive.collect(signing.id) == ()
    assert count(sandbox) == before


@pytest.mark.parametrize("signing", [None, "", 7, ".."])
async def test_collect_refuses_an_invalid_id(sandbox: Sandbox, archive: Archive, signing: Any) -> None:
    """An event need not have one."""
    with pytest.raises(InvalidRequest, match="signing_id"):
        await archive.collect(signing)
    assert not sandbox.requests


async def test_collect_raises_the_first_error_after_all_documents(
    sandbox: Sandbox, client: SigningClient, archive: Archive, folder: Path
) -> None:
    signing = await completed(sandbox, client)
    sandbox.faults.add(DOWNLOAD, "not-json")
    with pytest.raises(DecodeError):
        await archive.collect(signing)
    assert len(lines_of(folder)) == 1
    assert len(await archive.collect(signing)) == 1
    with pytest.raises(NotFound):
        await archive.collect("unknown")


async def test_collect_waits_for_another_run(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    signing = await completed(sandbox, client)
    async with SqliteJournal(journal) as other, Archive(client, folder, journal=journal) as archive:
        claim = await taken(other, f"archive:{sandbox.base_url}:{signing.id}")
        collecting = asyncio.create_task(archive.collect(signing))
        done, _ = await asyncio.wait([collecting], timeout=0.2)
        assert not done
        await other.release(claim)
        assert len(await collecting) == 2


async def test_client_archives_one_signing_and_returns_all_its_documents_each_time(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    signing, other = await completed(sandbox, client), await completed(sandbox, client)
    first = await client.archive(signing, folder)
    assert [Path(folder, entry.path).stat().st_size for entry in first] == [entry.size for entry in first]
    assert len(first) == 2
    assert await client.archive(other.id, folder, journal, template="{document.id}") != ()
    before = count(sandbox)
    assert await client.archive(signing.id, folder, journal) == first
    assert await client.archive(signing, str(folder)) == first
    assert count(sandbox) == before


# Follow


class Follower:
    """A task that follows, and the results that it reported."""

    def __init__(self, archive: Archive, wakeups: Wakeups | None = None, every: float = 60) -> None:
        self.results: list[ArchiveResult] = []
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(archive.follow(wakeups, every, self._note))

    def _note(self, result: ArchiveResult) -> None:
        self.results.append(result)
        self._changed.set()

    async def wait_for(self, number: int) -> None:
        """Wait until there are this many results."""
        async with asyncio.timeout(30):
            while len(self.results) < number:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def following(archive: Archive) -> AsyncIterator[Callable[..., Follower]]:
    """Starts a follower, which is cancelled at the end of the test."""
    started: list[Follower] = []

    def start(*arguments: Any) -> Follower:
        started.append(Follower(archive, *arguments))
        return started[-1]

    yield start
    for follower in started:
        if not follower.task.done():
            follower.task.cancel()
            await asyncio.wait([follower.task])
            assert follower.task.cancelled()


def event(**payload: Any) -> Event:
    return Event("evt_1", "signing.completed", payload, datetime.now(UTC))


async def listed(sandbox: Sandbox, times: int) -> None:
    """Wait until the signings were listed this many times."""
    async with asyncio.timeout(30):
        while count(sandbox)["signings.list"] < times:
            await asyncio.sleep(0.005)


async def test_follow_sweeps_at_once_and_again(
    sandbox: Sandbox, client: SigningClient, following: Callable[..., Follower]
) -> None:
    await completed(sandbox, client)
    follower = following(None, 0.05)
    await follower.wait_for(2)
    await completed(sandbox, client)
    await follower.wait_for(4)
    assert [result.error for result in follower.results] == [None] * 4


async def test_event_is_collected_at_once_without_a_sweep(
    sandbox: Sandbox, client: SigningClient, following: Callable[..., Follower]
) -> None:
    wakeups = Wakeups()
    signing = await sent(client)
    follower = following(wakeups)
    await listed(sandbox, 1)
    await sandbox.complete(signing.id)
    wakeups.publish(event(signing_id="of another tenant"))
    wakeups.publish(event(signing_id=signing.id))
    await follower.wait_for(3)
    assert sum(result.entry is not None for result in follower.results) == 2
    (failed,) = [result for result in follower.results if result.error]
    assert isinstance(failed.error, NotFound)
    assert count(sandbox)["signings.list"] == 1


async def test_event_that_names_no_signing_starts_a_sweep(
    sandbox: Sandbox, client: SigningClient, following: Callable[..., Follower]
) -> None:
    wakeups = Wakeups()
    signing = await sent(client)
    follower = following(wakeups)
    await listed(sandbox, 1)
    await sandbox.complete(signing.id)
    wakeups.publish(event())
    await follower.wait_for(2)
    assert count(sandbox)["signings.list"] == 2


class Gated:
    """A folder whose ``put`` or ``read`` of one name waits."""

    def __init__(self, folder: Path, gated: str) -> None:
        self._store = FolderStore(folder)
        self._gated = gated
        self.append = self._store.append
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def put(self, name: str, source: Path, sha256: str) -> None:
        await self._pass(name)
        await self._store.put(name, source, sha256)

    async def read(self, name: str, offset: int = 0) -> AsyncIterator[bytes]:
        await self._pass(name)
        async for chunk in self._store.read(name, offset):
            yield chunk

    async def _pass(self, name: str) -> None:
        if self._gated in name:
            self.reached.set()
            await self.opened.wait()


async def test_event_during_a_sweep_is_collected_at_once(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> None:
    await completed(sandbox, client, "Slow", ("a.pdf",))
    signing = await sent(client)
    store, wakeups = Gated(folder, "Slow"), Wakeups()
    async with Archive(client, store, journal=journal) as archive:
        follower = Follower(archive, wakeups)
        await store.reached.wait()
        await sandbox.complete(signing.id)
        wakeups.publish(event(signing_id=signing.id))
        await follower.wait_for(2)
        assert {result.signing.id for result in follower.results} == {signing.id}
        store.opened.set()
        await follower.wait_for(3)
        follower.task.cancel()
        await asyncio.wait([follower.task])
        assert follower.task.cancelled()
    assert (await judge(sandbox, folder)).wrong == []


async def test_sweep_that_fails_for_now_does_not_end_the_following(
    sandbox: Sandbox, following: Callable[..., Follower], client: SigningClient, caplog: pytest.LogCaptureFixture
) -> None:
    await completed(sandbox, client)
    hits = sandbox.faults.add("signings.list", "500", times=6)
    follower = following(None, 0.02)
    await follower.wait_for(2)
    assert hits.hits == 6
    assert "archiving continues after: HTTP 500 on signings.list" in caplog.text
    assert not follower.task.done()


@pytest.mark.parametrize("wakeups", [None, Wakeups()], ids=["sweeps", "events"])
async def test_rejected_token_ends_the_following(
    sandbox: Sandbox, following: Callable[..., Follower], wakeups: Wakeups | None
) -> None:
    sandbox.faults.add("signings.list", "expired-token", times=None)
    with pytest.raises(Unauthorized):
        await following(wakeups, 0.02).task


async def test_interval_is_checked(archive: Archive) -> None:
    with pytest.raises(InvalidRequest, match="every: must be a number above 0, got 0"):
        await archive.follow(every=0)


# The object


async def test_callers_journal_stays_open(client: SigningClient, folder: Path, journal: Path) -> None:
    async with SqliteJournal(journal) as kept:
        async with Archive(client, folder, journal=kept) as archive:
            assert repr(archive) == f"Archive(FolderStore({str(folder)!r}))"
        await kept.release(await taken(kept))


@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "kept"])
async def test_closing_ends_the_sweeps_first(
    sandbox: Sandbox,
    client: SigningClient,
    folder: Path,
    journal: Path,
    is_kept: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sweep that was left by ``break``."""
    for number in range(4):
        await completed(sandbox, client, f"Lease {number}")
    kept = []
    async with Archive(client, folder, journal=journal) as archive:
        results = archive.sweep()
        if is_kept:
            kept.append(results)
        async for _ in results:
            break
        del results
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    async with Archive(client, folder, journal=journal) as other:
        await archived(other)
    assert (await judge(sandbox, folder)).wrong == []


@pytest.mark.parametrize("name", [".journal.db", "state/.journal.db", ".state/journal.db"])
async def test_journal_may_be_a_hidden_file_in_the_folder(
    sandbox: Sandbox, client: SigningClient, folder: Path, name: str
) -> None:
    await completed(sandbox, client)
    async with Archive(client, folder, journal=folder / name) as archive:
        assert len(await archived(archive)) == 2
    assert (folder / name).exists()
    assert (await verify_archive(folder)).findings == ()


async def test_journal_that_would_be_an_extra_file_is_refused(
    client: SigningClient, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(folder)
    problem = (
        r"^journal: .*state/the\.journal is in the archive: choose another folder, or a name that begins with a dot$"
    )
    for path in (folder / "state/the.journal", str(tmp_path / "link/state/the.journal")):
        with pytest.raises(ConfigurationError, match=problem):
            Archive(client, folder, journal=path)
    with pytest.raises(ConfigurationError, match=problem):
        async with SqliteJournal(folder / "state/the.journal") as journal:
            Archive(client, folder, journal=journal)
    assert not folder.exists()
    folder.parent.joinpath("file").touch()
    with pytest.raises(ArchiveError, match="Not a directory"):
        Archive(client, tmp_path / "file/archive", journal=tmp_path / "file/archive/.journal")
