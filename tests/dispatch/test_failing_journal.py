"""A journal that fails, that cannot be decoded, or that belongs to another service."""

from __future__ import annotations

from pathlib import Path

import pytest

from signing_async import (
    ClaimLost,
    ConfigurationError,
    DispatchResult,
    JournalError,
    OutcomeUnknown,
    SigningClient,
    SqliteJournal,
)
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import Fate, fated_client
from tests.dispatch.observing import (
    Failing,
    all_of,
    count,
    parcel_of,
    sent_well,
)
from tests.dispatch.parcels import make_parcel


async def test_journal_failure_at_any_step_stops_the_call_before_an_unjournaled_send(tmp_path: Path) -> None:
    async with Sandbox(seed=7) as sandbox, fated_client(sandbox, Fate()) as client:
        for at in range(1, 9):
            parcel, path = parcel_of(name=f"Lease {at}"), tmp_path / f"{at}"
            async with SqliteJournal(path) as journal:
                failing = Failing(journal, at, JournalError("the journal x: database or disk is full"))
                before = count(sandbox)["signings.send"]
                with pytest.raises(JournalError, match=r"^the journal x: database or disk is full") as caught:
                    await client.dispatch(parcel.package, failing)
                was_sent = count(sandbox)["signings.send"] > before
                assert was_sent == (at == 8)
                assert caught.value.effect == ("unknown" if at >= 7 else "none")
            await client.dispatch(parcel.package, path)
            sent_well(sandbox, parcel, spare=1)


@pytest.mark.parametrize("change", ["removed", "replaced"])
async def test_nothing_more_is_sent_once_the_file_of_the_journal_is_gone(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, change: str
) -> None:
    """The next run would know nothing of it."""
    path, parcels = tmp_path / "the.journal", [make_parcel(number, tmp_path) for number in range(8)]
    results: list[DispatchResult] = []

    async with SqliteJournal(tmp_path / "other.journal") as other:
        await other.claim("another")

    async def run() -> None:
        async for result in client.dispatch_many([parcel.package for parcel in parcels], path, concurrency=1):
            results.append(result)
            if len(results) == 2:
                if change == "removed":
                    path.unlink()
                else:
                    (tmp_path / "other.journal").replace(path)

    with pytest.raises(JournalError, match=rf"the\.journal was {change}.* while it was open: restore it") as caught:
        await run()
    assert not caught.value.transient
    sent = sum(not signing.is_draft for signing in sandbox.signings)
    assert len(results) == 2 <= sent <= 3  # the next package may have been about to be sent
    sent_well(sandbox, *parcels[:2])


async def test_failed_release_does_not_change_the_result(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SqliteJournal(tmp_path / "journal") as journal:
        for error in (ClaimLost("lease"), OSError("gone")):
            failing = Failing(journal, 1, error, only="release")
            assert (await client.dispatch(parcel_of(name=str(error)).package, failing)).is_draft is False
    assert caplog.messages[-1] == "the journal failed: OSError: gone"


@pytest.mark.parametrize(
    "state",
    [
        "no JSON",
        '{"content": "x", "service": "y", "status": "unheard of", "signing": "z"}',
        '{"content": "x", "service": "y", "status": "sent"}',
        '{"content": "x", "service": "y", "documents": {"a": "b"}}',
    ],
)
async def test_journal_entry_that_cannot_be_decoded_is_an_unknown_outcome_and_is_kept(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, state: str
) -> None:
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


async def test_package_sent_at_another_service_is_a_configuration_error(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    package = parcel_of().package
    signing = await client.dispatch(package, tmp_path / "journal")
    async with Sandbox(seed=8) as other, fated_client(other, Fate()) as elsewhere:
        with pytest.raises(ConfigurationError, match=f"holds this package for {sandbox.base_url}; use another"):
            await elsewhere.dispatch(package, tmp_path / "journal")
        (result,) = await all_of(elsewhere.dispatch_many([package], tmp_path / "journal"))
        assert result.signing is None
        assert other.requests == []
    assert (await client.dispatch(package, tmp_path / "journal")).id == signing.id
