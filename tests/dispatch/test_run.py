"""Runs over many packages: pulled as they are needed, each with a result, killed at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from signing_async import (
    Claim,
    ClientClosed,
    ConfigurationError,
    DispatchResult,
    InvalidRequest,
    PdfSource,
    Progress,
    RateLimited,
    RetryPolicy,
    SigningClient,
    SigningPackage,
    SqliteJournal,
    Unauthorized,
)
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import MemoryJournal
from tests.dispatch.holders import taken
from tests.dispatch.kill import run
from tests.dispatch.observing import Office, all_of, parcel_of, sent_well
from tests.dispatch.parcels import make_parcel
from tests.pdfs import make_pdf


@pytest.mark.parametrize("problem", ["rejected token", "closed client"])
async def test_fatal_error_is_the_result_of_every_remaining_package_and_nothing_is_sent(
    sandbox: Sandbox, tmp_path: Path, problem: str
) -> None:
    """The packages that are waited for as well: another run holds every second one."""
    parcels = [parcel_of(1, 1, name=f"Lease {number}", key=f"{number}") for number in range(20)]
    reports: list[Progress] = []
    async with SqliteJournal(tmp_path / "journal") as other, SigningClient(sandbox.base_url, "wrong") as client:
        for number in range(0, 4, 2):
            await other.claim(f"{number}")
        if problem == "closed client":
            await client.aclose()
        packages = [parcel.package for parcel in parcels]
        async with asyncio.timeout(60):
            results = await all_of(client.dispatch_many(packages, tmp_path / "journal", 2, reports.append))
    kind = Unauthorized if problem == "rejected token" else ClientClosed
    assert [type(result.error) for result in results] == [kind] * 20
    assert {id(result.package) for result in results} == {id(package) for package in packages}
    assert len({id(result.error) for result in results}) == 20
    assert len(sandbox.requests) <= 4
    assert reports[-1].files_total is not None
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as client:
        await all_of(client.dispatch_many(packages, tmp_path / "journal"))
    sent_well(sandbox, *parcels)


async def test_failed_packages_are_results_and_a_second_run_sends_them(office: Office, tmp_path: Path) -> None:
    good = [make_parcel(number, tmp_path) for number in range(5)]
    bad = SigningPackage("", "EN", [b"text"], [])
    office.fail("recipients.add", "429", skip=3, retry_after=3600)

    async def broken() -> AsyncIterator[bytes]:
        yield make_pdf()
        raise ZeroDivisionError

    crooked = SigningPackage("Lease", "EN", [PdfSource(broken(), "a.pdf")], good[0].package.recipients)
    given: list[Any] = [good[0].package, bad, "lease.pdf", crooked, None, *(one.package for one in good[1:])]
    results = await all_of(office.client.dispatch_many(given, office.path))
    errors = Counter(type(result.error).__name__ for result in results if result.error)
    assert errors == {"InvalidRequest": 3, "ZeroDivisionError": 1, "RateLimited": 1}
    assert Counter(id(result.package) for result in results) == Counter(id(one) for one in given)
    assert {result.signing for result in results if isinstance(result.error, InvalidRequest)} == {None}
    (refused,) = [result for result in results if isinstance(result.error, RateLimited)]
    assert refused.signing is not None
    assert refused.signing.is_draft is True
    again = await office.dispatch_many(refused)
    assert again[0].signing is not None
    assert again[0].signing.id == refused.signing.id
    office.sent_well(*good)


async def test_second_of_two_identical_packages_without_a_key_is_refused_unless_the_first_failed(
    office: Office,
) -> None:
    first, second, other = parcel_of(), parcel_of(), parcel_of(name="Other")
    packages = [first.package, other.package, second.package]
    progress: list[Progress] = []
    many = office.client.dispatch_many(packages, office.path, concurrency=1, on_progress=progress.append)
    errors = {id(result.package): result.error for result in await all_of(many)}
    assert (errors[id(first.package)], errors[id(other.package)]) == (None, None)
    refusal = errors[id(second.package)]
    assert isinstance(refusal, InvalidRequest)
    assert refusal.problems == (
        "key: missing, and packages[2] is the same package as packages[0]; if both are to be sent, give each a key",
    )
    assert progress[-1].files_done == progress[-1].files_total == 4
    third = parcel_of(name="Third")
    office.fail("recipients.add", "429", retry_after=3600)
    results = await all_of(office.client.dispatch_many([third.package] * 2, office.path, concurrency=1))
    assert [type(result.error) for result in results] == [RateLimited, type(None)]
    office.sent_well(first, other, third)


async def test_endless_iterable_is_pulled_as_needed_and_leaving_releases_all_claims(office: Office) -> None:
    pulled = 0

    def endless() -> Iterator[SigningPackage]:
        nonlocal pulled
        while True:
            pulled += 1
            yield parcel_of(1, 1, name=f"Lease {pulled}").package

    async with SqliteJournal(office.path) as journal:
        async with office.client.dispatch_many(endless(), journal, concurrency=4) as results:
            taken = 0
            async for result in results:
                assert result.error is None
                taken += 1
                if taken == 10:
                    break
        assert 10 <= pulled <= 10 + 3 * 4
        assert not [task for task in asyncio.all_tasks() if "signing_async bulk" in task.get_name()]
        with contextlib.closing(sqlite3.connect(office.path)) as database:
            async with asyncio.timeout(10):
                # What was asked for at the moment of leaving is given back when it comes.
                held = "SELECT count(*) FROM packages WHERE leased_until IS NOT NULL"
                while database.execute(held).fetchone() != (0,):
                    await asyncio.sleep(0.01)
        parcels = [parcel_of(1, 1, name=f"Lease {number}") for number in range(1, pulled + 1)]
        await all_of(office.client.dispatch_many([parcel.package for parcel in parcels], journal))
    office.sent_well(*parcels, spare=4)


async def test_progress_counts_all_documents_with_totals_once_the_last_package_is_known(office: Office) -> None:
    parcels = [parcel_of(2, 1, name=f"Lease {number}") for number in range(10)]
    told: list[Progress] = []
    office.fail("documents.upload", "drop-before-commit", times=3)
    size = sum(len(data) for parcel in parcels for _, data in parcel.documents)
    for _ in range(2):
        packages = [parcel.package for parcel in parcels] + [SigningPackage("", "EN", [], [])]
        await all_of(office.client.dispatch_many(packages, office.path, on_progress=told.append))
        assert told[0].files_total is None
        assert told[-1] == Progress(20, 20, size, size)
        assert all(one.files_done <= 20 and one.bytes_done <= size for one in told)
        assert all(one.files_total in (None, 20) and one.bytes_total in (None, size) for one in told)
        told.clear()


@pytest.mark.parametrize(("ordered", "most"), [(True, 3), (False, 8)])
async def test_uploads_of_a_run_are_no_more_than_its_concurrency(sandbox: Sandbox, ordered: bool, most: int) -> None:
    """Those of one package are made one after the other, unless their order does not matter."""
    parcels = [parcel_of(6, 1, name=f"Lease {number}") for number in range(3)]
    sandbox.faults.add("documents.upload", "slow", times=None, seconds=0.1)
    changes: list[int] = []

    async def change(by: int, url: URL) -> None:
        changes.append(by if url.path.endswith("/documents") else 0)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(lambda _, __, params: change(1, params.url))
    trace.on_request_end.append(lambda _, __, params: change(-1, params.url))
    async with (
        aiohttp.ClientSession(trace_configs=[trace]) as session,
        SigningClient(sandbox.base_url, sandbox.access_token(), session=session) as client,
    ):
        packages = [parcel.package for parcel in parcels]
        await all_of(client.dispatch_many(packages, MemoryJournal(), concurrency=8, ordered=ordered))
    assert max(itertools.accumulate(changes)) == most
    sent_well(sandbox, *parcels)


HALF_A_JOURNAL = type("Half", (), {"claim": print, "write": print})()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"packages": parcel_of().package}, "packages: must be an iterable of SigningPackage, got SigningPackage"),
        ({"concurrency": 0}, "concurrency: must be an integer of at least 1"),
        ({"journal": HALF_A_JOURNAL}, "journal: must be a path or a Journal, got "),
        ({"journal": ""}, "journal: must be a path"),
        ({"journal": "postgresql://me:secret@host/signings"}, "got a URL; for PostgreSQL give a PostgresJournal"),
        ({"on_progress": 5}, "on_progress: must be callable"),
    ],
)
async def test_invalid_argument_is_refused_by_the_call(
    client: SigningClient, tmp_path: Path, arguments: Any, problem: str
) -> None:
    given = {"packages": [parcel_of().package], "journal": tmp_path / "journal", **arguments}
    with pytest.raises((InvalidRequest, ConfigurationError), match=problem) as caught:
        client.dispatch_many(**given)
    assert "secret" not in str(caught.value)


# What is told


async def test_token_is_redacted_from_journal_and_log(
    sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    token = sandbox.access_token()

    async def echo(*_: object, **__: object) -> None:
        raise InvalidRequest(f"no such thing: {token}")

    monkeypatch.setattr("signing_async.recipients.Recipients.add", echo)
    async with SigningClient(sandbox.base_url, token, retry=RetryPolicy.none()) as client:
        await all_of(client.dispatch_many([parcel_of().package], tmp_path / "journal"))
    assert token not in caplog.text
    assert "was not sent: no such thing: " in caplog.text
    assert token.encode() not in (tmp_path / "journal").read_bytes()
    assert b"no such thing" in (tmp_path / "journal").read_bytes()


# Kills


async def test_killed_processes_on_one_journal_send_each_package_once() -> None:
    """`python -m tests.dispatch.kill` does this at length."""
    packages, kills = 20, 4
    outcome = await run(packages=packages, kills=kills, seed=2, workers=2)
    assert (outcome.verdict.sent, outcome.verdict.wrong, outcome.failures) == (packages, [], [])
    assert outcome.kills == kills
    assert outcome.faults > 5
    # Of those under way at a kill, and after a response that was lost.
    assert outcome.verdict.spare <= 8 * kills + outcome.faults


# Runs that share a journal


async def test_package_claimed_by_another_run_is_postponed_and_sent_after_its_release(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    parcels = [parcel_of(1, 1, name=f"Lease {number}", key=f"{number}") for number in range(10)]
    async with SqliteJournal(office.path) as other:
        claim = await taken(other, "3")
        results: list[DispatchResult] = []

        packages = [parcel.package for parcel in parcels]
        many = office.client.dispatch_many(packages, office.path, concurrency=2)
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
    office.sent_well(*parcels)


async def test_postponed_package_does_not_wait_for_the_next_item_of_the_iterable(office: Office) -> None:
    package, results = parcel_of(1, 1, key="lease").package, 0

    async def messages() -> AsyncIterator[SigningPackage]:
        yield package
        yield package
        await asyncio.sleep(3600)

    async with asyncio.timeout(30), office.client.dispatch_many(messages(), office.path, concurrency=4) as run:
        async for result in run:
            assert result.error is None
            results += 1
            if results == 2:
                break
    office.sent_well(parcel_of(1, 1))


async def test_claim_is_released_even_if_the_run_is_cancelled_twice(sandbox: Sandbox, client: SigningClient) -> None:
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


async def test_each_step_is_journaled_before_it_begins_with_the_outcome_of_the_one_before(
    sandbox: Sandbox, client: SigningClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = MemoryJournal()
    seen: list[tuple[int, str, bool, str, str]] = []
    write = journal.write

    def marks(ids: dict[str, str | None]) -> str:
        return "".join("?" if one is None else "x" for one in ids.values())

    async def noted(claim: Claim, text: str) -> None:
        state = json.loads(text)
        has_signing, documents, recipients = state["signing"] is not None, state["documents"], state["recipients"]
        seen.append((len(sandbox.requests), state["status"], has_signing, marks(documents), marks(recipients)))
        await write(claim, text)

    monkeypatch.setattr(journal, "write", noted)
    await all_of(client.dispatch_many([parcel_of(3, 2).package], journal, concurrency=1))
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
