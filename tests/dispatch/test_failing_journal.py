"""A journal that fails, that cannot be decoded, or that belongs to another service."""

from __future__ import annotations

from pathlib import Path

import pytest

from signing_async import (
    ConfigurationError,
    DispatchResult,
    JournalError,
    OutcomeUnknown,
    SqliteJournal,
)
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import Fate, fated_client
from tests.dispatch.holders import taken
from tests.dispatch.observing import Failing, Office, all_of, parcel_of, sent_well
from tests.dispatch.parcels import make_parcel


async def test_journal_failure_at_any_step_stops_the_call_before_an_unjournaled_send(tmp_path: Path) -> None:
    async with Sandbox(seed=7) as sandbox, fated_client(sandbox, Fate()) as client:
        for at in range(1, 9):
            parcel, path = parcel_of(name=f"Lease {at}"), tmp_path / f"{at}"
            async with SqliteJournal(path) as journal:
                failing = Failing(journal, at, JournalError("the journal x: database or disk is full"))
                before = len(sandbox.requests_of("signings.send"))
                with pytest.raises(JournalError, match=r"^the journal x: database or disk is full") as caught:
                    await client.dispatch(parcel.package, failing)
                was_sent = len(sandbox.requests_of("signings.send")) > before
                assert was_sent == (at == 8)
                assert caught.value.effect == ("unknown" if was_sent else "none")
            await client.dispatch(parcel.package, path)
            sent_well(sandbox, parcel, spare=1)


@pytest.mark.parametrize("change", ["removed", "replaced"])
async def test_nothing_more_is_sent_once_the_file_of_the_journal_is_gone(
    office: Office, tmp_path: Path, change: str
) -> None:
    """The next run would know nothing of it."""
    parcels = [make_parcel(number, tmp_path) for number in range(4)]
    results: list[DispatchResult] = []

    async with SqliteJournal(tmp_path / "other.journal") as other:
        await other.claim("another")

    async def run() -> None:
        packages = [parcel.package for parcel in parcels]
        async for result in office.client.dispatch_many(packages, office.path, concurrency=1):
            results.append(result)
            if len(results) == 2 and change == "removed":
                office.path.unlink()
            elif len(results) == 2:
                (tmp_path / "other.journal").replace(office.path)

    with pytest.raises(JournalError, match=rf"the\.journal was {change}.* while it was open: restore it") as caught:
        await run()
    assert not caught.value.transient
    sent = sum(not signing.is_draft for signing in office.sandbox.signings)
    assert len(results) == 2 <= sent <= 3  # the next package may have been about to be sent
    office.sent_well(*parcels[:2])


@pytest.mark.parametrize("operation", ["claim", "draft", "sending", "sent"])
async def test_package_that_the_journal_refuses_fails_alone(office: Office, operation: str) -> None:
    """The journal cannot store the package's key or its state."""
    keys, was_sent = ["first", "refused", "third", "fourth"], operation == "sent"
    parcels = [parcel_of(1, 1, name=key, key=key) for key in keys]
    failure = JournalError("the database cannot hold it", transient=False, client_wide=False)
    only = "claim refused" if operation == "claim" else f'write refused .*"status": "{operation}"'
    async with SqliteJournal(office.path) as journal:
        packages = [parcel.package for parcel in parcels]
        many = office.client.dispatch_many(packages, Failing(journal, 1, failure, only), concurrency=1)
        results = await all_of(many)
    assert [result.package.key for result in results] == keys
    (error,) = (result.error for result in results if result.error is not None)
    assert isinstance(error, JournalError)
    assert (error.effect, error.transient) == ("unknown" if was_sent else "none", False)
    office.sent_well(*(parcel for parcel in parcels if was_sent or parcel.package.key != "refused"), spare=1)
    await office.dispatch(parcels[1])
    office.sent_well(*parcels, spare=1)


@pytest.mark.parametrize(("kind", "effect"), [("drop-after-commit", "unknown"), ("expired-token", "none")])
async def test_effect_of_a_journal_failure_after_a_failed_send_is_unknown_unless_the_send_was_refused(
    office: Office, kind: str, effect: str
) -> None:
    office.fail("signings.send", kind)
    office.fail("signings.get", "503", times=None)
    async with SqliteJournal(office.path) as journal:
        failing = Failing(journal, 5, OSError(28, "No space left on device"), only="write")
        with pytest.raises(JournalError, match="No space left") as caught:
            await office.client.dispatch(parcel_of(1, 1).package, failing)
    assert len(office.sandbox.requests_of("signings.send")) == 1
    assert caught.value.effect == effect


async def test_effect_of_a_journal_failure_is_unknown_if_an_earlier_run_began_to_send(office: Office) -> None:
    package = parcel_of(1, 1).package
    office.fail("signings.send", "drop-after-commit")
    unread = office.fail("signings.get", "503", times=None)
    async with SqliteJournal(office.path) as journal:
        with pytest.raises(OutcomeUnknown):
            await office.client.dispatch(package, journal)
        unread.remove()
        with pytest.raises(JournalError) as caught:
            await office.client.dispatch(package, Failing(journal, 1, JournalError("gone"), only="write"))
        assert (caught.value.effect, caught.value.exit_code) == ("unknown", 3)
        assert (await office.client.dispatch(package, journal)).is_draft is False


@pytest.mark.parametrize(
    "state",
    [
        "no JSON",
        '{"content": "x", "service": "y", "status": "sent"}',
        '{"content": "x", "service": "y", "newer": 1}',
    ],
)
async def test_journal_entry_that_cannot_be_decoded_is_an_unknown_outcome_and_is_kept(
    office: Office, state: str
) -> None:
    broken, good = parcel_of(name="Broken", key="broken"), parcel_of(name="Good", key="good")
    async with SqliteJournal(office.path) as journal:
        claim = await taken(journal, "broken")
        await journal.write(claim, state)
        await journal.release(claim)
        results = await all_of(office.client.dispatch_many([broken.package, good.package], journal))
        errors = {result.package.key: result.error for result in results}
        assert isinstance(errors["broken"], OutcomeUnknown)
        assert str(errors["broken"]).startswith("the journal entry of this package cannot be decoded: ")
        assert errors["broken"].__notes__ == ["package 'broken'"]
        assert errors["good"] is None
        assert (await taken(journal, "broken")).state == state
    assert len(office.sandbox.signings) == 1


async def test_package_sent_at_another_service_is_a_configuration_error(office: Office) -> None:
    package = parcel_of().package
    signing = await office.client.dispatch(package, office.path)
    async with Sandbox(seed=8) as other, fated_client(other, Fate()) as elsewhere:
        with pytest.raises(ConfigurationError, match=f"holds this package for {office.sandbox.base_url}; use another"):
            await elsewhere.dispatch(package, office.path)
        (result,) = await all_of(elsewhere.dispatch_many([package], office.path))
        assert result.signing is None
        assert other.requests == []
    assert (await office.client.dispatch(package, office.path)).id == signing.id
