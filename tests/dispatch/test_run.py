"""Thousands of packages: pulled as they are needed, each with a result, shared between runs, stopped by the journal."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sqlite3
import tempfile
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from signing_async import (
    ConfigurationError,
    DispatchResult,
    InvalidRequest,
    JournalError,
    OutcomeUnknown,
    PdfSource,
    Progress,
    RetryPolicy,
    SigningClient,
    SigningPackage,
    SqliteJournal,
    Unauthorized,
)
from signing_async.dispatch.journal import Claim, ClaimLost
from signing_async.dispatch.package import Prepared, prepare
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import Fate, Fated, MemoryJournal, fated_client
from tests.dispatch.kill import run
from tests.dispatch.parcels import judge, make_parcel
from tests.dispatch.test_steps import concurrent_uploads, count, key_of, parcel_of, sent_well
from tests.pdfs import make_pdf


async def all_of(results: Any, into: list[DispatchResult] | None = None) -> list[DispatchResult]:
    """All results of a run, also those before it ended in an error."""
    into = [] if into is None else into
    async for result in results:
        into.append(result)
    return into


@pytest.mark.parametrize("kind", ["list", "generator", "async generator"])
async def test_packages_from_anything(sandbox: Sandbox, client: SigningClient, tmp_path: Path, kind: str) -> None:
    """Each has its result, which names the very package."""
    parcels = [make_parcel(number, tmp_path) for number in range(20)]
    packages = [parcel.package for parcel in parcels]

    async def stream() -> AsyncIterator[SigningPackage]:
        for package in packages:
            await asyncio.sleep(0)
            yield package

    given: Any = {"list": packages, "generator": (one for one in packages), "async generator": stream()}[kind]
    results = await all_of(client.dispatch_many(given, tmp_path / "journal"))
    assert {id(result.package) for result in results} == {id(package) for package in packages}
    assert all(result.error is None and result.signing.is_draft is False for result in results if result.signing)
    sent_well(sandbox, *parcels)


async def test_a_second_run_makes_no_request(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """All were sent: their signings are told from the journal."""
    packages = [make_parcel(number, tmp_path).package for number in range(20)]
    first = await all_of(client.dispatch_many(packages, tmp_path / "journal"))
    before = len(sandbox.requests)
    second = await all_of(client.dispatch_many(packages, tmp_path / "journal"))
    assert len(sandbox.requests) == before
    assert {result.signing.id for result in first if result.signing} == {
        result.signing.id for result in second if result.signing
    }


async def test_one_that_fails_does_not_stop_the_others(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """Bad packages, things that are no packages, refusals: each is a result, and a second run sends what it can."""
    good = [make_parcel(number, tmp_path) for number in range(10)]
    bad = SigningPackage("", "EN", [b"text"], [])
    sandbox.faults.add("recipients.add", "expired-token", skip=3)

    async def broken() -> AsyncIterator[bytes]:
        yield make_pdf()
        raise ZeroDivisionError

    crooked = SigningPackage("Lease", "EN", [PdfSource(broken(), "a.pdf")], good[0].package.recipients)
    given: list[Any] = [good[0].package, bad, "lease.pdf", crooked, None, *(one.package for one in good[1:])]
    results = await all_of(client.dispatch_many(given, tmp_path / "journal"))
    errors = Counter(type(result.error).__name__ for result in results if result.error)
    assert errors == {"InvalidRequest": 3, "ZeroDivisionError": 1, "Unauthorized": 1}
    assert Counter(id(result.package) for result in results) == Counter(id(one) for one in given)
    assert {result.signing for result in results if isinstance(result.error, InvalidRequest)} == {None}
    (refused,) = [result for result in results if isinstance(result.error, Unauthorized)]
    assert refused.signing is not None
    assert refused.signing.is_draft is True
    again = await all_of(client.dispatch_many([refused.package], tmp_path / "journal"))
    assert again[0].signing is not None
    assert again[0].signing.id == refused.signing.id
    sent_well(sandbox, *good)


async def test_package_with_a_key_is_sent_once_however_often_it_is_in_the_run(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel = parcel_of(key="lease")
    results = await all_of(client.dispatch_many([parcel.package] * 6, tmp_path / "journal"))
    assert [result.error for result in results] == [None] * 6
    assert len({result.signing.id for result in results if result.signing}) == 1
    sent_well(sandbox, parcel)


async def test_second_of_two_identical_packages_without_a_key_is_refused(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    first, second, other = parcel_of(), parcel_of(), parcel_of(name="Other")
    packages = [first.package, other.package, second.package]
    progress: list[Progress] = []
    many = client.dispatch_many(packages, tmp_path / "journal", concurrency=1, on_progress=progress.append)
    errors = {id(result.package): result.error for result in await all_of(many)}
    assert (errors[id(first.package)], errors[id(other.package)]) == (None, None)
    refusal = errors[id(second.package)]
    assert isinstance(refusal, InvalidRequest)
    assert refusal.problems == (
        "key: missing, and packages[2] is the same package as packages[0]; if both are to be sent, give each a key",
    )
    assert progress[-1].files_done == progress[-1].files_total == 4
    sent_well(sandbox, first, other)


async def test_identical_packages_with_keys_are_all_sent(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    packages = [parcel_of(key=key).package for key in ("a", "b")]
    results = await all_of(client.dispatch_many([*packages, parcel_of().package], tmp_path / "journal"))
    assert len({result.signing.id for result in results if result.signing}) == 3


async def test_package_without_a_key_that_failed_may_be_given_again_in_the_same_run(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel = parcel_of()
    sandbox.faults.add("recipients.add", "expired-token")
    results = await all_of(client.dispatch_many([parcel.package] * 2, tmp_path / "journal", concurrency=1))
    assert [type(result.error) for result in results] == [Unauthorized, type(None)]
    sent_well(sandbox, parcel)


async def test_same_package_without_a_key_is_resumed_by_the_next_run(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """Later calls of `dispatch` or `dispatch_many` return the first one's signing, with the same or an equal object."""
    parcel = parcel_of()
    async with SqliteJournal(tmp_path / "journal") as journal:
        first = await client.dispatch(parcel.package, journal)
        again = await client.dispatch(parcel.package, journal)
        (result,) = await all_of(client.dispatch_many([parcel_of().package], journal))
    assert result.signing is not None
    assert first.id == again.id == result.signing.id
    sent_well(sandbox, parcel)


async def test_packages_are_pulled_as_they_are_needed(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """Of an endless row no more are pulled than there is work for; leaving early lets go of everything."""
    pulled = 0

    def endless() -> Iterator[SigningPackage]:
        nonlocal pulled
        while True:
            pulled += 1
            yield parcel_of(1, 1, name=f"Lease {pulled}").package

    async with SqliteJournal(tmp_path / "journal") as journal:
        async with client.dispatch_many(endless(), journal, concurrency=4) as results:
            taken = 0
            async for result in results:
                assert result.error is None
                taken += 1
                if taken == 10:
                    break
        assert 10 <= pulled <= 10 + 3 * 4
        assert not [task for task in asyncio.all_tasks() if "signing_async bulk" in task.get_name()]
        with contextlib.closing(sqlite3.connect(tmp_path / "journal")) as database:
            async with asyncio.timeout(10):
                # What was asked for at the moment of leaving is given back when it comes.
                while database.execute("SELECT count(*) FROM packages WHERE owner IS NOT NULL").fetchone() != (0,):
                    await asyncio.sleep(0.01)
        names = [f"Lease {number}" for number in range(1, pulled + 1)]
        parcels = [parcel_of(1, 1, name=name) for name in names]
        await all_of(client.dispatch_many([parcel.package for parcel in parcels], journal))
    sent_well(sandbox, *parcels, spare=4)


async def test_a_row_that_fails(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """The error of the caller's own generator is raised, after the results of what was under way.

    How many there would have been is not told.
    """
    parcel = parcel_of(1, 1)

    def failing() -> Iterator[SigningPackage]:
        yield parcel.package
        raise ZeroDivisionError

    results, told = list[DispatchResult](), list[Progress]()
    with pytest.raises(ZeroDivisionError):
        await all_of(client.dispatch_many(failing(), tmp_path / "journal", on_progress=told.append), results)
    assert len(results) == 1
    assert {one.files_total for one in told} == {None}
    sent_well(sandbox, parcel)


async def test_a_run_that_is_cancelled(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """Ctrl-C in the middle: what is under way is let go of, and another run does it."""
    parcels = [make_parcel(number, tmp_path) for number in range(12)]
    packages = [parcel.package for parcel in parcels]
    sandbox.faults.add("documents.upload", "hang", skip=8, times=3)
    async with SqliteJournal(tmp_path / "journal") as journal:
        run = asyncio.create_task(all_of(client.dispatch_many(packages, journal)))
        while len(sandbox.requests_of("documents.upload")) < 10:
            await asyncio.sleep(0.005)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        results = await asyncio.wait_for(all_of(client.dispatch_many(packages, journal)), 60)
    assert [result.error for result in results] == [None] * 12
    sent_well(sandbox, *parcels, spare=8)


async def test_a_call_that_is_cancelled_tells_of_the_draft(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """The exception notes which draft there is; the package is free."""
    parcel = parcel_of()
    sandbox.faults.add("documents.upload", "hang")
    run = asyncio.create_task(client.dispatch(parcel.package, tmp_path / "journal"))
    while not sandbox.requests_of("documents.upload"):
        await asyncio.sleep(0.005)
    run.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await run
    assert any(sandbox.signings[0].id in note for note in caught.value.__notes__)
    await client.dispatch(parcel.package, tmp_path / "journal")
    sent_well(sandbox, parcel, spare=1)


async def test_how_far_it_is(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """Files and bytes of all packages; the totals are known when the last package is; a repeat takes its own back."""
    parcels = [parcel_of(2, 1, name=f"Lease {number}") for number in range(10)]
    told: list[Progress] = []
    sandbox.faults.add("documents.upload", "drop-before-commit", times=3)
    size = sum(len(data) for parcel in parcels for _, data in parcel.documents)
    for _ in range(2):
        packages = [parcel.package for parcel in parcels] + [SigningPackage("", "EN", [], [])]
        await all_of(client.dispatch_many(packages, tmp_path / "journal", on_progress=told.append))
        assert told[0].files_total is None
        assert told[-1] == Progress(20, 20, size, size)
        assert all(one.files_done <= 20 and one.bytes_done <= size for one in told)
        assert all(one.files_total in (None, 20) and one.bytes_total in (None, size) for one in told)
        told.clear()


async def test_no_more_is_told_than_there_is(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """A document counts as done when the service has it, and not before."""
    parcels = [parcel_of(3, 1, name=f"Lease {number}") for number in range(3)]
    there: list[tuple[int, int]] = []

    def listen(progress: Progress) -> None:
        there.append((progress.files_done, len(sandbox.documents())))

    await all_of(client.dispatch_many([one.package for one in parcels], tmp_path / "journal", on_progress=listen))
    assert all(told <= held for told, held in there)
    assert there[-1] == (9, 9)


async def test_an_end_that_is_found_late(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """The totals are told also where all uploads are done before it is known that there are no more packages."""
    told: list[Progress] = []
    parcel = parcel_of(2, 1)

    async def packages() -> AsyncIterator[SigningPackage]:
        yield parcel.package
        while not sandbox.signings or sandbox.signings[0].state != "sent":
            await asyncio.sleep(0.01)

    await all_of(client.dispatch_many(packages(), tmp_path / "journal", on_progress=told.append))
    size = sum(len(data) for _, data in parcel.documents)
    assert [one for one in told if one.files_total is not None] == [Progress(2, 2, size, size)]


async def test_a_last_package_that_is_no_good(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """The totals are told also where what is found out last is that there is nothing more to upload."""
    told: list[Progress] = []
    parcel = parcel_of(2, 1)

    async def slow() -> AsyncIterator[bytes]:
        while not sandbox.signings or sandbox.signings[0].state != "sent":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        yield b"no PDF"

    packages = [parcel.package, SigningPackage("Lease", "EN", [slow()], parcel.package.recipients)]
    await all_of(client.dispatch_many(packages, tmp_path / "journal", on_progress=told.append))
    size = sum(len(data) for _, data in parcel.documents)
    assert [one for one in told if one.files_total is not None] == [Progress(2, 2, size, size)]


async def test_a_draft_that_is_given_up_is_taken_back(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """Progress goes back to where it was when a package begins anew."""
    told: list[Progress] = []
    sandbox.faults.add("recipients.add", "drop-before-commit")
    sandbox.faults.add("recipients.list", "503", times=5)
    await all_of(client.dispatch_many([parcel_of(2, 1).package], tmp_path / "journal", on_progress=told.append))
    assert told[-1].files_done == 2
    done = next(at for at, one in enumerate(told) if one.files_done == 2)
    assert any((one.files_done, one.bytes_done) == (0, 0) for one in told[done:])


@pytest.mark.parametrize("ordered", [True, False])
async def test_uploads_of_a_run_are_no_more_than_its_concurrency(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, ordered: bool
) -> None:
    parcels = [parcel_of(6, 1, name=f"Lease {number}") for number in range(6)]
    packages = [parcel.package for parcel in parcels]
    sandbox.faults.add("documents.upload", "slow", times=None, seconds=0.02)
    with concurrent_uploads() as uploads:
        await all_of(client.dispatch_many(packages, tmp_path / "journal", concurrency=3, ordered=ordered))
    assert uploads.most == 3
    sent_well(sandbox, *parcels)


async def test_arguments(client: SigningClient, tmp_path: Path) -> None:
    """What cannot work is told by the call itself."""
    packages = [parcel_of().package]
    many: Any = client.dispatch_many
    with pytest.raises(InvalidRequest, match="packages: must be an iterable of SigningPackage, got SigningPackage"):
        many(packages[0], tmp_path / "journal")
    for concurrency in (0, -1, True, "8", None):
        with pytest.raises(InvalidRequest, match="concurrency: must be a whole number from 1"):
            many(packages, tmp_path / "journal", concurrency=concurrency)
    half = type("Half", (), {"claim": print, "write": print})()
    for journal in (None, 5, object(), half):
        with pytest.raises(InvalidRequest, match=r"^journal: must be a path or a Journal, got .+"):
            many(packages, journal)
    with pytest.raises(ConfigurationError, match="journal: must be a path"):
        many(packages, "")
    with pytest.raises(InvalidRequest, match="on_progress: must be callable"):
        many(packages, tmp_path / "journal", on_progress=5)
    with pytest.raises(InvalidRequest, match="journal: must be a path or a Journal"):
        await client.dispatch(packages[0], 5)  # type: ignore[arg-type]  # wrong on purpose


async def test_a_listener_that_fails(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told of, and the packages are sent."""

    def fail(progress: Progress) -> None:
        raise ZeroDivisionError

    parcel = parcel_of()
    await all_of(client.dispatch_many([parcel.package], tmp_path / "journal", on_progress=fail))
    sent_well(sandbox, parcel)
    assert sum("on_progress failed" in record.message for record in caplog.records) == 1


# Runs that share a journal


async def test_runs_share_the_work(sandbox: Sandbox, tmp_path: Path) -> None:
    """Three runs over the same packages at once: each package is sent once, and every run has every result."""
    parcels = [make_parcel(number, tmp_path) for number in range(30)]
    packages = [parcel.package for parcel in parcels]
    async with contextlib.AsyncExitStack() as stack:
        runs = []
        for _ in range(3):
            fate = Fate()
            client = await stack.enter_async_context(fated_client(sandbox, fate))
            journal = await stack.enter_async_context(SqliteJournal(tmp_path / "journal"))
            runs.append(all_of(client.dispatch_many(packages, journal, concurrency=4)))
        results = await asyncio.gather(*runs)
    for result in results:
        assert len(result) == 30
        assert [one.error for one in result] == [None] * 30
    assert len(sandbox.signings) == 30
    sent_well(sandbox, *parcels)


async def test_a_package_that_another_run_has(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left for later; the others go on; in the end it is waited for, and taken over if it is let go of unsent."""
    caplog.set_level(logging.INFO)
    parcels = [parcel_of(1, 1, name=f"Lease {number}", key=f"{number}") for number in range(10)]
    async with SqliteJournal(tmp_path / "journal") as other:
        claim = await other.claim("3")
        assert claim is not None
        results: list[DispatchResult] = []

        packages = [parcel.package for parcel in parcels]
        many = client.dispatch_many(packages, tmp_path / "journal", concurrency=1)
        run = asyncio.create_task(all_of(many, results))
        while len(results) < 9:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            while "waiting for package '3': another run is working on it" not in caplog.messages:
                await asyncio.sleep(0.01)
        assert "3" not in {result.package.key for result in results}
        await other.release(claim)
        await run
    assert len(results) == 10
    sent_well(sandbox, *parcels)


async def test_who_waits_asks_less_and_less_often(
    sandbox: Sandbox, client: SigningClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A journal is not kept busy by those who wait for a package that another run has for long. That is told once."""
    caplog.set_level(logging.INFO)
    journal, asked, told = MemoryJournal(), list[float](), list[int]()
    claim = journal.claim

    async def counted(key: str) -> Claim | None:
        asked.append(asyncio.get_running_loop().time())
        told.append(sum("waiting for package" in message for message in caplog.messages))
        if len(asked) == 6:
            journal.taken.clear()
        return await claim(key)

    journal.taken.add("lease")
    journal.claim = counted  # type: ignore[method-assign]  # one that notes the time
    await client.dispatch(parcel_of(key="lease").package, journal)
    waits = [after - before for before, after in itertools.pairwise(asked)]
    assert [wait >= 0.024 * 2**number for number, wait in enumerate(waits)] == [True] * 5
    assert told == [0, 0, 0, 0, 1, 1]


async def test_who_has_nothing_to_do_takes_nothing_from_who_waits(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """Some workers wait for packages of another run, and the others, whose work is done, do not get in their way."""
    parcels = [parcel_of(1, 1, name=f"Lease {number}", key=f"{number}") for number in range(8)]
    async with SqliteJournal(tmp_path / "journal") as other:
        claims = [await other.claim(f"{number}") for number in range(4)]
        packages = [parcel.package for parcel in parcels]
        run = asyncio.create_task(all_of(client.dispatch_many(packages, tmp_path / "journal", concurrency=8)))
        await asyncio.sleep(0.8)
        for claim in claims:
            assert claim is not None
            await other.release(claim)
        results = await run
    assert [result.error for result in results] == [None] * 8
    sent_well(sandbox, *parcels)


async def test_never_many_are_left_for_later(client: SigningClient, tmp_path: Path) -> None:
    """Where another run has them all, no more are pulled than are worth waiting for."""
    pulled = 0
    async with SqliteJournal(tmp_path / "journal") as other:
        for number in range(100):
            assert await other.claim(f"{number}") is not None

        def packages() -> Iterator[SigningPackage]:
            nonlocal pulled
            for number in range(100):
                pulled += 1
                yield parcel_of(1, 1, key=f"{number}").package

        run = asyncio.create_task(all_of(client.dispatch_many(packages(), tmp_path / "journal", concurrency=2)))
        await asyncio.sleep(0.5)
        assert 2 < pulled <= 12
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_a_row_in_which_nothing_comes_for_long(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """A package that was left for later does not wait for the next one to come; nor does leaving."""
    package, results = parcel_of(1, 1, key="lease").package, 0

    async def messages() -> AsyncIterator[SigningPackage]:
        yield package
        yield package
        await asyncio.sleep(3600)

    async with asyncio.timeout(30), client.dispatch_many(messages(), tmp_path / "journal", concurrency=4) as run:
        async for result in run:
            assert result.error is None
            results += 1
            if results == 2:
                break
    sent_well(sandbox, parcel_of(1, 1))


async def test_leaving_lets_go_of_the_row(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """What waits for the next package is cancelled, and the caller's generator has come to its end."""
    ended: list[str] = []

    async def messages() -> AsyncIterator[SigningPackage]:
        try:
            yield parcel_of(1, 1).package
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        finally:
            ended.append("closed")

    async with asyncio.timeout(30), client.dispatch_many(messages(), tmp_path / "journal", concurrency=4) as run:
        assert (await anext(run)).error is None
    assert ended == ["cancelled", "closed"]
    assert list(tmp_path.glob("*.lock")) == []


async def test_leaving_closes_a_generator(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """It is not kept as it stands for as long as somebody keeps the run."""
    ended: list[bool] = []

    def endless() -> Iterator[SigningPackage]:
        try:
            while True:
                yield parcel_of(1, 1).package
        finally:
            ended.append(True)

    async with client.dispatch_many(endless(), tmp_path / "journal", concurrency=1) as run:
        assert (await anext(run)).error is None
    assert ended == [True]


def streamed(data: bytes, key: str) -> SigningPackage:
    """A package whose only document can be read once."""

    async def stream() -> AsyncIterator[bytes]:
        yield data

    return SigningPackage("Lease", "EN", [PdfSource(stream(), "a.pdf")], parcel_of(1, 1).package.recipients, key=key)


async def test_a_stream_of_a_package_that_another_run_has(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """What was read of it is kept as long as its turn has not come, and counted once."""
    data, told = make_pdf(), list[Progress]()
    async with SqliteJournal(tmp_path / "journal") as other:
        claim = await other.claim("lease")
        assert claim is not None
        packages = [streamed(data, "lease")]
        run = asyncio.create_task(all_of(client.dispatch_many(packages, tmp_path / "journal", on_progress=told.append)))
        await asyncio.sleep(0.3)
        await other.release(claim)
        (result,) = await run
    assert result.error is None
    assert [sandbox.document_bytes(one.id) for one in sandbox.documents()] == [data]
    assert told[-1] == Progress(1, 1, len(data), len(data))


@pytest.mark.parametrize("end", ["sent", "no claim", "left", "taken by another run"])
async def test_no_stream_is_kept_longer_than_it_is_needed(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """However a package ends, the file in which its streams were kept aside is closed."""
    files: list[IO[bytes]] = []
    make = tempfile.TemporaryFile

    def made(**named: Any) -> IO[bytes]:
        files.append(make(**named))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", made)
    async with SqliteJournal(tmp_path / "journal") as journal, SqliteJournal(tmp_path / "journal") as other:
        failing = Failing(journal, 1 if end == "no claim" else 1_000, JournalError("gone"), only="claim")
        if end == "taken by another run":
            assert await other.claim("lease") is not None
        many = client.dispatch_many([streamed(make_pdf(), "lease")], failing)
        if end == "sent":
            assert [result.error for result in await all_of(many)] == [None]
        elif end == "no claim":
            with pytest.raises(JournalError, match="gone"):
                await all_of(many)
        else:
            sandbox.faults.add("signings.create", "hang")
            run = asyncio.create_task(anext(many))
            async with asyncio.timeout(30):
                while not failing.steps:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            await many.aclose()
    assert [file.closed for file in files] == [True]


async def test_a_row_that_fails_behind_what_another_run_has(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """What was pulled before the failure has its result all the same."""
    parcel, pulled = parcel_of(1, 1, key="lease"), asyncio.Event()

    async def failing() -> AsyncIterator[SigningPackage]:
        yield parcel.package
        pulled.set()
        raise ZeroDivisionError

    results: list[DispatchResult] = []
    async with SqliteJournal(tmp_path / "journal") as other:
        claim = await other.claim("lease")
        assert claim is not None
        many = client.dispatch_many(failing(), tmp_path / "journal", concurrency=1)
        run = asyncio.create_task(all_of(many, results))
        await pulled.wait()
        await other.release(claim)
        with pytest.raises(ZeroDivisionError):
            await run
    assert [result.error for result in results] == [None]
    sent_well(sandbox, parcel)


async def test_a_package_is_let_go_of_however_often_a_run_is_cancelled(sandbox: Sandbox, client: SigningClient) -> None:
    """Also when it is cancelled again while it lets go."""
    releasing, go_on = asyncio.Event(), asyncio.Event()
    journal = MemoryJournal()
    release = journal.release

    async def slow(claim: Claim) -> None:
        releasing.set()
        await go_on.wait()
        await release(claim)

    journal.release = slow  # type: ignore[method-assign]  # a slow one
    sandbox.faults.add("signings.create", "hang")
    run = asyncio.create_task(client.dispatch(parcel_of().package, journal))
    while not sandbox.requests_of("signings.create"):
        await asyncio.sleep(0.005)
    run.cancel()
    await releasing.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    go_on.set()
    async with asyncio.timeout(30):
        while journal.taken:
            await asyncio.sleep(0.005)


async def test_a_claim_that_is_lost(sandbox: Sandbox, client: SigningClient, caplog: pytest.LogCaptureFixture) -> None:
    """Another run has taken the package over: nothing more is done here, and its result is waited for."""
    parcel, journal, fate = parcel_of(), MemoryJournal(), Fate(12, pause=True)
    async with fated_client(sandbox, fate) as slow:
        first = asyncio.create_task(all_of(slow.dispatch_many([parcel.package], Fated(journal, fate))))
        await fate.paused.wait()
        journal.expire()
        signing = await client.dispatch(parcel.package, journal)
        requests = len(sandbox.requests)
        fate.resumed.set()
        (result,) = await first
    assert result.signing is not None
    assert result.signing.id == signing.id
    assert len(sandbox.requests) <= requests + 2
    assert any("was lost: another run has claimed it" in record.message for record in caplog.records)
    sent_well(sandbox, parcel, spare=1)


async def test_a_claim_that_is_lost_at_once(sandbox: Sandbox, client: SigningClient) -> None:
    """A run that stands still as soon as it has a package makes no draft of it when it goes on."""
    parcel, journal = parcel_of(), MemoryJournal()
    claim = journal.claim

    async def paused(key: str) -> Claim | None:
        got = await claim(key)
        journal.claim = claim  # type: ignore[method-assign]  # paused once
        journal.expire()
        await client.dispatch(parcel.package, journal)
        return got

    journal.claim = paused  # type: ignore[method-assign]  # by a machine that sleeps
    signing = await client.dispatch(parcel.package, journal)
    assert [one.id for one in sandbox.signings] == [signing.id]
    sent_well(sandbox, parcel)


async def test_each_step_is_written_down_once(sandbox: Sandbox, client: SigningClient) -> None:
    """Before it begins, with what came of the one before."""
    journal = MemoryJournal()
    states: list[dict[str, Any]] = []
    write = journal.write

    async def noted(claim: Claim, state: str) -> None:
        states.append({"requests": len(sandbox.requests), **json.loads(state)})
        await write(claim, state)

    journal.write = noted  # type: ignore[method-assign]  # one that takes notes
    await all_of(client.dispatch_many([parcel_of(3, 2).package], journal, concurrency=1))
    seen = [
        (
            state["requests"],
            state["status"],
            state["signing"] is not None,
            "".join("?" if one is None else "x" for one in state["documents"].values()),
            "".join("?" if one is None else "x" for one in state["recipients"].values()),
        )
        for state in states
    ]
    assert seen == [
        (0, "draft", False, "", ""),
        (1, "draft", True, "?", ""),
        (2, "draft", True, "x?", ""),
        (3, "draft", True, "xx?", ""),
        (4, "draft", True, "xxx", "?"),
        (5, "draft", True, "xxx", "x?"),
        (6, "sending", True, "xxx", "xx"),
        (8, "sent", True, "xxx", "xx"),
    ]


async def test_a_claim_that_is_lost_while_a_failure_is_written(
    sandbox: Sandbox, client: SigningClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is nobody's any more; the result is that of the run which has the package."""
    parcel, journal = parcel_of(), MemoryJournal()
    sandbox.faults.add("recipients.add", "expired-token")
    write = journal.write

    async def lose(claim: Claim, state: str) -> None:
        if json.loads(state)["error"] is not None:
            journal.expire()
        await write(claim, state)

    journal.write = lose  # type: ignore[method-assign]  # a journal that goes wrong once
    signing = await client.dispatch(parcel.package, journal)
    assert signing.is_draft is False
    assert [message for message in caplog.messages if "another run has claimed it" in message]
    sent_well(sandbox, parcel, spare=1)


# A journal that fails


class Failing:
    """A journal whose n-th step fails, and, unless it is just ``once``, every one after it."""

    def __init__(
        self, journal: SqliteJournal, at: int, error: Exception, only: str = "", *, once: bool = False
    ) -> None:
        self._journal = journal
        self._at = range(at, at + 1) if once else range(at, 1_000_000)
        self._error = error
        self._only = only
        self.steps = 0

    def _step(self, name: str) -> None:
        self.steps += name.startswith(self._only)
        if name.startswith(self._only) and self.steps in self._at:
            raise self._error

    async def claim(self, key: str) -> Claim | None:
        self._step("claim")
        return await self._journal.claim(key)

    async def write(self, claim: Claim, state: str) -> None:
        self._step("write")
        await self._journal.write(claim, state)

    async def release(self, claim: Claim) -> None:
        self._step("release")
        await self._journal.release(claim)

    async def aclose(self) -> None: ...


async def test_a_journal_that_fails_at_any_step(tmp_path: Path) -> None:
    """The run stops with an error that says so: nothing is sent without being written down. The next run ends it."""
    async with Sandbox(seed=7) as sandbox, fated_client(sandbox, Fate()) as client:
        for at in range(1, 9):
            parcel, path = parcel_of(name=f"Lease {at}"), tmp_path / f"{at}"
            async with SqliteJournal(path) as journal:
                failing = Failing(journal, at, JournalError("the journal x: database or disk is full"))
                before = count(sandbox)["signings.send"]
                with pytest.raises(JournalError, match=r"^the journal x: database or disk is full"):
                    await client.dispatch(parcel.package, failing)
                if at <= 6:
                    assert count(sandbox)["signings.send"] == before
            await client.dispatch(parcel.package, path)
            sent_well(sandbox, parcel, spare=1)


async def test_a_journal_that_fails_stops_the_run(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """Other packages are not begun any more; an exception of any kind is named as the journal's."""
    parcels = [make_parcel(number, tmp_path) for number in range(40)]
    packages = [parcel.package for parcel in parcels]
    async with SqliteJournal(tmp_path / "journal") as journal:
        failing = Failing(journal, 60, ZeroDivisionError("by a replica"))
        results: list[DispatchResult] = []
        with pytest.raises(JournalError, match="the journal failed: ZeroDivisionError: by a replica"):
            await all_of(client.dispatch_many(packages, failing), results)
        assert len(results) < 20
        assert len(sandbox.signings) < 30
    await all_of(client.dispatch_many(packages, tmp_path / "journal"))
    sent_well(sandbox, *parcels, spare=16)


async def test_a_journal_that_fails_once(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """One write that could not be made is enough: what comes after it is for another run."""
    parcels = [parcel_of(1, 1, name=f"Lease {number}") for number in range(10)]
    packages = [parcel.package for parcel in parcels]
    async with SqliteJournal(tmp_path / "journal") as journal:
        failing = Failing(journal, 12, JournalError("the journal x: disk I/O error"), only="write", once=True)
        with pytest.raises(JournalError, match="I/O error"):
            await all_of(client.dispatch_many(packages, failing, concurrency=2))
        assert len(sandbox.signings) < 10
        await all_of(client.dispatch_many(packages, journal))
    sent_well(sandbox, *parcels, spare=2)


@pytest.mark.parametrize("once", [False, True])
async def test_a_journal_that_fails_while_others_wait(client: SigningClient, tmp_path: Path, once: bool) -> None:
    """Workers that wait for another run's packages stop as well, though the journal may be well for them."""
    async with SqliteJournal(tmp_path / "journal") as other, SqliteJournal(tmp_path / "journal") as journal:
        for number in range(4):
            await other.claim(f"{number}")
        failing = Failing(journal, 20, JournalError("gone"), once=once)
        packages = [parcel_of(1, 1, key=f"{number}").package for number in range(4)]
        with pytest.raises(JournalError, match="gone"):
            await asyncio.wait_for(all_of(client.dispatch_many(packages, failing, concurrency=4)), 60)


async def test_a_release_that_fails_takes_nothing_back(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was sent, and that is written down: the result says so."""
    async with SqliteJournal(tmp_path / "journal") as journal:
        failing = Failing(journal, 1, ClaimLost("lease"), only="release")
        assert (await client.dispatch(parcel_of(name="One").package, failing)).is_draft is False
        failing = Failing(journal, 1, OSError("gone"), only="release")
        assert (await client.dispatch(parcel_of(name="Two").package, failing)).is_draft is False
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the journal failed: OSError: gone"
    ]


@pytest.mark.parametrize(
    "state",
    [
        "no JSON",
        "[1]",
        "{}",
        '{"content": "x"}',
        '{"content": 5, "service": "y"}',
        '{"content": "x", "service": "y", "status": "unheard of"}',
        '{"content": "x", "service": "y", "status": "unheard of", "signing": "z"}',
        '{"content": "x", "service": "y", "status": "sent"}',
        '{"content": "x", "service": "y", "status": "sending", "signing": ""}',
        '{"content": "x", "service": 5}',
        '{"content": "x", "service": "y", "signing": 5}',
        '{"content": "x", "service": "y", "error": 5}',
        '{"content": "x", "service": "y", "abandoned": "z"}',
        '{"content": "x", "service": "y", "abandoned": [5]}',
        '{"content": "x", "service": "y", "documents": {"0": 5}}',
        '{"content": "x", "service": "y", "recipients": {"0": 5}}',
        '{"content": "x", "service": "y", "documents": {"a": "b"}}',
        '{"content": "x", "service": "y", "documents": []}',
        '{"content": "x", "service": "y", "recipients": ""}',
        '{"content": "x", "service": "y", "newer": 1}',
        "[" * 100_000,
    ],
)
async def test_a_state_that_cannot_be_read(sandbox: Sandbox, client: SigningClient, tmp_path: Path, state: str) -> None:
    """Whether that package was sent is not known, and not guessed; the others go on; what is there stays."""
    broken, good = parcel_of(name="Broken", key="broken"), parcel_of(name="Good", key="good")
    async with SqliteJournal(tmp_path / "journal") as journal:
        claim = await journal.claim("broken")
        assert claim is not None
        await journal.write(claim, state)
        await journal.release(claim)
        results = await all_of(client.dispatch_many([broken.package, good.package], journal))
        errors = {result.package.key: result.error for result in results}
        assert isinstance(errors["broken"], OutcomeUnknown)
        assert str(errors["broken"]).startswith("the journal entry of this package cannot be decoded: ")
        assert errors["good"] is None
        claim = await journal.claim("broken")
        assert claim is not None
        assert claim.state == state
    assert len(sandbox.signings) == 1


async def test_a_journal_of_another_service(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """What was sent at one service, say a sandbox, was not sent at another: neither sent nor left out silently."""
    package = parcel_of().package
    signing = await client.dispatch(package, tmp_path / "journal")
    async with Sandbox(seed=8) as other, fated_client(other, Fate()) as elsewhere:
        with pytest.raises(ConfigurationError, match=f"knows this package at {sandbox.base_url}; use another"):
            await elsewhere.dispatch(package, tmp_path / "journal")
        (result,) = await all_of(elsewhere.dispatch_many([package], tmp_path / "journal"))
        assert result.signing is None
        assert other.requests == []
    assert (await client.dispatch(package, tmp_path / "journal")).id == signing.id


async def test_a_draft_at_another_service(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """It is not gone on with where it is not, nor begun anew: one journal is for one service."""
    package = parcel_of().package
    sandbox.faults.add("recipients.add", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(package, tmp_path / "journal")
    async with Sandbox(seed=8) as other, fated_client(other, Fate()) as elsewhere:
        with pytest.raises(ConfigurationError, match=f"knows this package at {sandbox.base_url}; use another"):
            await elsewhere.dispatch(package, tmp_path / "journal")
        assert other.requests == []


async def test_a_journal_file_that_is_no_journal(client: SigningClient, tmp_path: Path) -> None:
    """The run stops, and the file is named."""
    (tmp_path / "journal").write_bytes(b"minutes of the meeting" * 200)
    with pytest.raises(JournalError, match=str(tmp_path / "journal")):
        await all_of(client.dispatch_many([parcel_of().package], tmp_path / "journal"))


# What is told


async def test_no_secret_is_written_down(sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A service that echoes the token: neither the journal nor the log holds it."""
    caplog.set_level(logging.DEBUG)
    token = sandbox.access_token()
    async with SigningClient(sandbox.base_url, token, retry=RetryPolicy.none()) as client:
        package = parcel_of(name="Lease").package

        async def echo(*_: object, **__: object) -> None:
            raise InvalidRequest(f"no such thing: {token}")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("signing_async.recipients.Recipients.add", echo)
            await all_of(client.dispatch_many([package], tmp_path / "journal"))
    assert token not in caplog.text
    assert "was not sent: no such thing: " in caplog.text
    assert token.encode() not in (tmp_path / "journal").read_bytes()
    assert b"no such thing" in (tmp_path / "journal").read_bytes()


async def test_what_the_log_tells(sandbox: Sandbox, client: SigningClient, caplog: pytest.LogCaptureFixture) -> None:
    """One line for each package that was sent, with its name and its signing."""
    caplog.set_level(logging.INFO)
    signing = await client.dispatch(parcel_of(key="the lease of flat 7").package)
    other = await client.dispatch(parcel_of().package)
    key = await key_of(parcel_of().package)
    assert [record.message for record in caplog.records if record.name == "signing_async"] == [
        f"package 'the lease of flat 7' was sent as signing {signing.id}",
        f"package {key[:12]!r} was sent as signing {other.id}",
    ]


async def test_nothing_is_kept_of_what_is_done(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    """Packages whose results were taken are let go of: the number of them takes no memory."""
    alive: list[weakref.ref[Prepared]] = []

    async def noted(package: object, most: int) -> Prepared:
        prepared = await prepare(package, most)
        alive.append(weakref.ref(prepared))
        return prepared

    most = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("signing_async.dispatch.run.prepare", noted)
        packages = (parcel_of(1, 1, name=f"Lease {number}").package for number in range(60))
        async for _ in client.dispatch_many(packages, tmp_path / "journal", concurrency=4):
            most = max(most, sum(one() is not None for one in alive))
    assert len(alive) == 60
    assert most <= 16


# Kills


async def test_kills() -> None:
    """A hundred packages, twenty kills at random moments, faults all the way: each is sent once, as it should be."""
    outcome = await run(packages=100, kills=20, seed=1)
    assert outcome.kills == 20
    assert outcome.failures == []
    assert outcome.verdict.wrong == []
    assert outcome.verdict.sent == 100
    assert outcome.faults > 50
    # Of those under way at a kill, and after an answer that was lost.
    assert outcome.verdict.spare <= 8 * 20 + outcome.faults


async def test_two_processes_that_are_killed() -> None:
    """Two processes share one journal and the work, and are killed now and then: nothing is done twice."""
    outcome = await run(packages=60, kills=8, seed=2, workers=2)
    assert outcome.kills == 8
    assert outcome.failures == []
    assert outcome.verdict.wrong == []
    assert outcome.verdict.sent == 60


def test_the_judge_is_strict(tmp_path: Path) -> None:
    """What it is to find it does find: twice sent, other bytes, other people, nothing sent."""

    async def judged() -> list[str]:
        async with Sandbox(seed=7) as sandbox, fated_client(sandbox, Fate()) as client:
            wrong, twice, unsent = parcel_of(name="Wrong"), parcel_of(name="Twice"), parcel_of(name="Unsent")
            await client.dispatch(
                SigningPackage("Wrong", "EN", [PdfSource(make_pdf(), "part 0.pdf")], twice.package.recipients[:1])
            )
            for _ in range(2):
                await client.dispatch(twice.package)
            verdict = judge(sandbox, [wrong, twice, unsent])
            assert verdict.sent == 2
            return verdict.wrong

    wrong = asyncio.run(judged())
    assert len(wrong) == 3
    assert "Wrong: sent with other documents" in wrong[0]
    assert "Wrong: sent to others" in wrong[1]
    assert "Twice: sent as 2 signings" in wrong[2]
