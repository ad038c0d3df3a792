"""Effects that show late: never two of them silently, and never a definite error for what took effect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from signing_async import (
    CannotBeSent,
    LocalRateLimiter,
    MemoryTokenStore,
    NewRecipient,
    OAuth,
    OutcomeUnknown,
    OutcomeUnknownTimeout,
    PdfSource,
    RetryPolicy,
    SigningClient,
    SigningError,
    SigningPackage,
    Token,
)
from tests.dispatch.observing import state_of
from tests.pdfs import make_pdf
from tests.reconcile.late_service import OK, Fate, LateService, script

SETTLE = 0.5
POLICY = RetryPolicy(max_attempts=4, base_delay=0.02, settle=SETTLE)
# Effects that show within the settle time end a call at once, so these tests take no longer for it.
PATIENT = RetryPolicy(max_attempts=4, base_delay=0.02, settle=10.0)
WRITES = ["send", "upload", "add"]


def _call(client: SigningClient, write: str, number: int = 0) -> tuple[str, Awaitable[Any]]:
    """A call, and the key of its script."""
    if write == "send":
        return f"s{number}", client.signings.send(f"s{number}")
    if write == "upload":
        return f"{number}.pdf", client.documents.upload("s", make_pdf(), f"{number}.pdf")
    return f"{number}@example.com", client.recipients.add("s", email=f"{number}@example.com", first_name="Anna")


async def _outcome(call: Awaitable[Any]) -> tuple[SigningError | None, float]:
    try:
        await call
    except SigningError as error:
        return error, asyncio.get_running_loop().time()
    return None, asyncio.get_running_loop().time()


def _judge(service: LateService, key: str, error: SigningError | None, ended_at: float, settle: float = SETTLE) -> None:
    """Compare what the caller was told with the effects that showed during the call or within their settle time."""
    seen = [fate for at, fate in service.held[key].effects if at < ended_at - 0.02 or _is_in_time(fate, settle)]
    if error is None:
        assert len(seen) <= 1, f"{len(seen)} silent effects"
        assert service.held[key].effects, "a success without an effect"
    elif error.effect == "none":
        assert not seen, f"a definite {error!r} for what took effect"
    else:
        assert isinstance(error, OutcomeUnknown)


def _is_in_time(fate: Fate, settle: float) -> bool:
    """Whether the effect shows well within the settle time, of which some outcomes have a tenth."""
    most = 0.0 if fate.kind in ("503", "drop") else 0.7 * settle
    return fate.effect_after is not None and fate.effect_after <= most


FIRST = ["408", "504", "502", "html", "drop"]
FOLLOWING = ["ok", "504", "503", "429", "long-429", "401", "403", "303", "drop", "refuse"]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("following", ["ok", "429", "refuse"])
@pytest.mark.parametrize("first", FIRST)
async def test_effect_within_the_settle_time_is_the_result(write: str, first: str, following: str) -> None:
    """Whatever the next request would have met: it is never made, since the effect shows before."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=PATIENT) as client:
        delay = 0.02 if first == "drop" else 0.25
        key, call = _call(client, write)
        service.scripts[key] += script(Fate(first, delay), following)
        error, _ = await _outcome(call)
        assert error is None
        await service.calm()
        assert len(service.held[key].effects) == 1
        assert service.held[key].requests == 1


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("first", ["504", "html"])
async def test_effect_after_the_settle_time_is_never_silent(write: str, first: str, following: str) -> None:
    """If it shows while the call lasts, the call says so."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        key, call = _call(client, write)
        service.scripts[key] += script(Fate(first, SETTLE + 0.1), following)
        error, ended_at = await _outcome(call)
        await service.calm()
        _judge(service, key, error, ended_at)


@pytest.mark.parametrize("write", WRITES)
async def test_retry_with_a_new_token_is_preceded_by_a_fresh_reading(write: str) -> None:
    """The effect shows while the token is refreshed."""
    async with LateService().running() as service:
        service.refresh_seconds = 0.6
        store = MemoryTokenStore(Token("old", "refresh"))
        oauth = OAuth(service.origin, client_id="id", client_secret="x", redirect_uri="https://app/cb", store=store)
        async with oauth, SigningClient(service.origin, oauth, retry=POLICY) as client:
            key, call = _call(client, write)
            service.scripts[key] += script(Fate("504", SETTLE + 0.3), "401", "ok")
            error, _ = await _outcome(call)
        assert error is None
        assert len(service.held[key].effects) == 1
        # One, if the machine pauses until the effect shows.
        assert service.held[key].requests in (1, 2)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("effect_after", [None, SETTLE + 0.2])
async def test_refresh_that_fails_after_an_ambiguous_attempt_leaves_the_outcome_unknown(
    write: str, effect_after: float | None
) -> None:
    """The settle time has passed, and without a token nobody can see what happened since."""
    async with LateService().running() as service:
        service.refresh_fails, service.refresh_seconds = True, 0.4
        store = MemoryTokenStore(Token("old", "refresh"))
        oauth = OAuth(service.origin, client_id="id", client_secret="x", redirect_uri="https://app/cb", store=store)
        async with oauth, SigningClient(service.origin, oauth, retry=POLICY) as client:
            await client.signings.get("s")
            key, call = _call(client, write)
            service.rejects_after_a_write = True
            service.scripts[key] += script("503", Fate("504", effect_after), "401")
            error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknown)
        assert (error.effect, error.transient, error.client_wide, error.fatal) == ("unknown", False, True, True)


@pytest.mark.parametrize("write", WRITES)
async def test_rate_limiter_that_fails_while_a_call_is_ambiguous_leaves_the_outcome_unknown(write: str) -> None:
    """Whatever it raises."""

    class Fickle(LocalRateLimiter):
        async def acquire(self, deadline: float) -> bool:
            if service.held[key].requests:
                raise LookupError("the limiter is gone")
            return await super().acquire(deadline)

    async with (
        LateService().running() as service,
        SigningClient(service.origin, "token", retry=POLICY, rate_limiter=Fickle()) as client,
    ):
        key, call = _call(client, write)
        service.scripts[key] += script("504")
        error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknown)
        assert "the service could not be read (LookupError)" in str(error)
        assert error.may_clear


@pytest.mark.parametrize("write", ["upload", "add"])
async def test_two_effects_are_an_unknown_outcome_that_lists_both(write: str) -> None:
    """The retry succeeds slowly, and meanwhile the first request takes effect."""

    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        key, call = _call(client, write)
        respond = service._respond

        def late_respond(request: Any, fate: Fate, record: dict[str, Any]) -> Any:
            if fate is OK:
                # The backend of the first request gets done at this very moment.
                records = service.documents["s"] if write == "upload" else service.recipients["s"]
                records.append({**record, "id": "late"})
            return respond(request, fate, record)

        service._respond = late_respond  # type: ignore[method-assign]  # the race is arranged here
        service.scripts[key] += script("504", "ok")
        error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknown)
        assert "holds 2 such records" in str(error)
        assert {record.id for record in error.known} == {f"{key}-0", "late"}  # type: ignore[attr-defined]  # records
        assert error.effect == "unknown"


async def test_unambiguous_send_is_one_request() -> None:
    """Nothing is read, whatever a reading would show."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.lag = 60.0
        await client.signings.send("s0")
        assert (service.held["s0"].requests, service.readings) == (1, 0)


@pytest.mark.parametrize(("write", "kind"), [("send", "page"), ("upload", "garbled"), ("add", "garbled")])
async def test_success_that_cannot_be_read_is_reconciled(write: str, kind: str) -> None:
    """What the service shows is the result; nothing is repeated."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=PATIENT) as client:
        key, call = _call(client, write)
        service.scripts[key] += [Fate(kind, 0.25)]
        result = await call
        assert write == "send" or result.id == f"{key}-0"
        assert (len(service.held[key].effects), service.held[key].requests) == (1, 1)


async def test_dispatch_does_not_send_again_while_an_earlier_sending_may_be_under_way(tmp_path: Path) -> None:
    """A second run right after the first one reads for the settle time before it sends."""
    package = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [NewRecipient("anna@example.com")])
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=PATIENT) as client:
        service.scripts["s1"] += script(Fate("504", 0.5))
        with pytest.raises(OutcomeUnknown):
            await client.with_options(retry=RetryPolicy.none()).dispatch(package, tmp_path / "journal")
        signing = await client.dispatch(package, tmp_path / "journal")
        assert (signing.id, signing.is_draft) == ("s1", False)
        assert (len(service.held["s1"].effects), service.held["s1"].requests) == (1, 1)


@pytest.mark.parametrize("took_effect", [True, False])
async def test_dispatch_takes_a_refusal_for_success_only_if_the_draft_was_sent(
    tmp_path: Path, took_effect: bool
) -> None:
    """Somebody on the way has repeated the request, or the service cannot send the draft."""
    package = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [NewRecipient("anna@example.com")])
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.scripts["s1"] += [Fate("cannot-be-sent", 0.0 if took_effect else None)]
        if not took_effect:
            with pytest.raises(CannotBeSent):
                await client.dispatch(package, tmp_path / "journal")
            assert state_of(tmp_path / "journal")["status"] == "draft"
        assert (await client.dispatch(package, tmp_path / "journal")).is_draft is False
        assert state_of(tmp_path / "journal")["status"] == "sent"
        assert (len(service.held["s1"].effects), service.created) == (1, 1)


@pytest.mark.parametrize("second", ["503", "504"])
async def test_dispatch_does_not_send_a_draft_that_a_lost_request_may_still_change(tmp_path: Path, second: str) -> None:
    """The recipient that shows may be the second attempt's, and the first one's may follow."""
    package = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [NewRecipient("anna@example.com")])
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.scripts["anna@example.com"] += script(Fate("504", 10 * SETTLE), Fate(second, 0.0))
        signing = await client.dispatch(package, tmp_path / "journal")
        await service.calm()
        assert [recipient["email"] for recipient in service.recipients[signing.id]] == ["anna@example.com"]
        assert state_of(tmp_path / "journal")["abandoned"] == ["s1"]


@pytest.mark.parametrize("write", WRITES)
async def test_lost_response_costs_one_reading(write: str) -> None:
    """The effect shows at once: nothing is waited for."""
    async with LateService().running() as service, SigningClient(service.origin, "token") as client:
        for number in range(2):
            key, call = _call(client, write, number)
            before = service.readings
            service.scripts[key] += script(Fate("drop", 0.0))
            await call
            known = 1 if write == "upload" and not number else 0
            assert service.readings - before == 1 + known


fates = st.builds(
    Fate,
    st.sampled_from(["504", "502", "html", "503", "drop", "303"]),
    st.sampled_from([None, 0.0, 0.02, 0.1, 0.3]),
) | st.sampled_from(script("ok", "429", "long-429", "401", "403", "refuse"))


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    write=st.sampled_from(WRITES),
    sequences=st.lists(st.lists(fates, max_size=4), min_size=1, max_size=8),
    attempts=st.integers(1, 4),
)
def test_any_sequence_of_outcomes(write: str, sequences: list[list[Fate]], attempts: int) -> None:
    """Several calls at once, each with a history of its own: the caller is never told what is not so."""

    async def run() -> None:
        settle = 0.6
        policy = RetryPolicy(max_attempts=attempts, base_delay=0.005, settle=settle)
        async with LateService().running() as service, SigningClient(service.origin, "token", retry=policy) as client:
            calls = [_call(client, write, number) for number in range(len(sequences))]
            for (key, _), sequence in zip(calls, sequences, strict=True):
                # A request that was refused or put off has no effect.
                service.scripts[key] += sequence
            outcomes = await asyncio.gather(*(_outcome(call) for _, call in calls))
            await service.calm()
            for (key, _), (error, ended_at) in zip(calls, outcomes, strict=True):
                _judge(service, key, error, ended_at, settle)

    asyncio.run(run())


async def test_success_after_an_ambiguous_send_that_never_shows_is_an_unknown_outcome() -> None:
    """The draft that was read is in ``known``."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.scripts["s0"] += script("503", "ok")
        service.lag = 60.0
        with pytest.raises(OutcomeUnknown, match="could not be verified: the service still shows a draft") as caught:
            await client.signings.send("s0")
        assert [(one.id, one.is_draft) for one in caught.value.known] == [("s0", True)]  # type: ignore[attr-defined]  # signings
        assert (caught.value.effect, caught.value.transient) == ("unknown", False)


@pytest.mark.parametrize("write", WRITES)
async def test_deadline_that_leaves_no_settle_time_is_an_unknown_outcome(write: str) -> None:
    """Not a guess."""
    async with LateService().running() as service, SigningClient(service.origin, "token", timeout=0.5) as client:
        key, call = _call(client, write)
        service.scripts[key] += script(Fate("504", 1.0))
        error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknownTimeout)
        await service.calm()
        assert service.held[key].requests == 1
