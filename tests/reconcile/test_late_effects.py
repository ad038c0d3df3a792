"""Effects that show late: never two of them silently, and never a definite error for what took effect.

`tests.simulation` plays every history of one call; here calls go over real sockets.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from signing_async import (
    CannotBeSent,
    ClientClosed,
    DecodeError,
    Forbidden,
    MemoryTokenStore,
    NewRecipient,
    OutcomeUnknown,
    OutcomeUnknownTimeout,
    PdfSource,
    RateLimited,
    RetryPolicy,
    Signing,
    SigningClient,
    SigningError,
    SigningPackage,
    Timeouts,
    Token,
    TransportError,
)
from signing_async.dispatch import send as sending_module  # the client is closed before this step
from tests.auth.oauth_servers import oauth_for
from tests.dispatch.observing import state_of
from tests.pdfs import make_pdf
from tests.reconcile.late_service import (
    PATIENT,
    POLICY,
    SETTLE,
    WRITES,
    Fate,
    Held,
    LateService,
    judge,
    make_call,
    outcome,
    script,
)
from tests.reconcile.limiter import FailingLimiter

CREATIONS = ["upload", "add"]
UNREADABLE = [("send", "page"), ("upload", "garbled"), ("add", "garbled")]
PACKAGE = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [NewRecipient("anna@example.com")])


def _scripted(
    service: LateService, client: SigningClient, write: str, *fates: Fate | str
) -> tuple[Held, Awaitable[Any]]:
    """Return a call with this history, and what the service holds of it."""
    key, call = make_call(client, write)
    service.scripts[key] += script(*fates)
    return service.held[key], call


async def _make_each_write(
    service: LateService, client: SigningClient, *fates: Fate | str
) -> list[SigningError | None]:
    """Make one call of each kind at once, all with this history, and return their errors."""
    calls = [_scripted(service, client, write, *fates)[1] for write in WRITES]
    return [error for error, _ in await asyncio.gather(*map(outcome, calls))]


async def _at_once(check: Callable[..., Coroutine[Any, Any, None]], *values: Sequence[Any]) -> None:
    """Check every combination of these values at once, each on a service of its own."""

    async def run(case: Sequence[Any]) -> None:
        try:
            await check(*case)
        except Exception as error:
            error.add_note(f"in the case {case}")
            raise

    async with asyncio.TaskGroup() as group:
        for case in product(*values):
            group.create_task(run(case))


def _effects(service: LateService) -> list[int]:
    """Return how often each of these calls took effect."""
    return [len(service.held[key].effects) for key in ("s1", "1.pdf", "1@example.com")]


def _requests(service: LateService) -> list[int]:
    return [service.held[key].requests for key in ("s1", "1.pdf", "1@example.com")]


@asynccontextmanager
async def _authorized(
    service: LateService, store: MemoryTokenStore | None = None, **options: Any
) -> AsyncIterator[SigningClient]:
    """A client whose token can be refreshed, and that has created the signing ``s1``."""
    store = store or MemoryTokenStore(Token("old", "refresh"))
    async with (
        oauth_for(service.origin, store=store, **options) as oauth,
        SigningClient(service.origin, oauth, retry=POLICY, timeout=30) as client,
    ):
        await client.signings.create(name="Lease", language="EN")
        yield client


# Any history


FIRST = ["408", "504", "502", "html", "drop"]
FOLLOWING = ["ok", "504", "503", "429", "long-429", "401", "403", "303", "drop", "refuse"]
DELAYS = [0.0, 0.1, 0.7 * SETTLE, SETTLE + 0.1, SETTLE + 0.3, None]


@pytest.mark.parametrize("write", WRITES)
async def test_effect_within_the_settle_time_is_the_result(write: str) -> None:
    """Whatever the next request would have met: it is never made, since the effect shows before."""

    async def check(first: str, following: str) -> None:
        async with LateService().running(PATIENT) as service:
            delay = 0.02 if first == "drop" else 0.25
            held, call = _scripted(service, service.client, write, Fate(first, delay), following)
            error, _ = await outcome(call)
            assert error is None
            await service.calm()
            assert len(held.effects) == 1
            assert held.requests == 1

    await _at_once(check, FIRST, ["ok", "429", "refuse"])


@pytest.mark.parametrize("write", WRITES)
async def test_effect_that_shows_while_the_service_is_unreachable_is_the_result(
    service: LateService, write: str
) -> None:
    held, call = _scripted(service, service.client.with_options(retry=PATIENT), write, Fate("504", 0.1), "refuse")
    await call
    assert (len(held.effects), held.requests) == (1, 1)


@pytest.mark.parametrize("write", WRITES)
async def test_effect_after_the_settle_time_is_never_silent(write: str) -> None:
    """If it shows while the call lasts, the call says so."""

    async def check(first: str, following: str) -> None:
        async with LateService().running() as service:
            held, call = _scripted(service, service.client, write, Fate(first, SETTLE + 0.1), following)
            error, ended_at = await outcome(call)
            await service.calm()
            judge(held, error, ended_at)

    await _at_once(check, ["504", "html"], FOLLOWING)


@pytest.mark.parametrize("write", WRITES)
async def test_effect_at_any_time_before_any_outcome_is_never_silent(service: LateService, write: str) -> None:
    """All at once with one client: effects before and after the settle time, or none."""
    histories = list(product(DELAYS, FOLLOWING[:-1]))  # a service that refuses connections refuses them to all calls
    calls = [make_call(service.client, write, number) for number in range(len(histories))]
    for number, ((key, _), (delay, following)) in enumerate(zip(calls, histories, strict=True)):
        service.scripts[key] += script(Fate(["504", "502", "html"][number % 3], delay), following)
    outcomes = await asyncio.gather(*(outcome(call) for _, call in calls))
    await service.calm()
    for (key, _), (error, ended_at) in zip(calls, outcomes, strict=True):
        judge(service.held[key], error, ended_at)
    assert {"value", "none"} <= {"value" if error is None else error.effect for error, _ in outcomes}


@pytest.mark.parametrize("write", WRITES)
async def test_twenty_five_calls_at_once(write: str) -> None:
    """Each one's effect shows late, each is found, and the calls on one signing share their readings."""

    async def check(first: str) -> None:
        async with LateService().running(PATIENT) as service:
            delay = 0.02 if first == "drop" else 0.25
            calls = [make_call(service.client, write, number, signing="s") for number in range(25)]
            for key, _ in calls:
                service.scripts[key] += script(Fate(first, delay))
            outcomes = await asyncio.gather(*(outcome(call) for _, call in calls))
            assert [error for error, _ in outcomes] == [None] * 25
            await service.calm()
            assert [len(service.held[key].effects) for key, _ in calls] == [1] * 25
            if write != "send":
                assert service.readings < 100

    await _at_once(check, FIRST)


@pytest.mark.parametrize("write", WRITES)
async def test_twenty_five_calls_with_different_histories(service: LateService, write: str) -> None:
    """Effects before and after the settle time, or none, each followed by another outcome."""
    calls = [make_call(service.client, write, number, signing="s") for number in range(25)]
    for number, (key, _) in enumerate(calls):
        first = Fate(["504", "502", "html"][number % 3], DELAYS[number % 6])
        service.scripts[key] += script(first, FOLLOWING[number % len(FOLLOWING)])
    outcomes = await asyncio.gather(*(outcome(call) for _, call in calls))
    await service.calm()
    for (key, _), (error, ended_at) in zip(calls, outcomes, strict=True):
        judge(service.held[key], error, ended_at)


fates = st.builds(
    Fate, st.sampled_from(["504", "502", "html", "503", "drop", "303"]), st.sampled_from([None, 0.0, 0.02, 0.1, 0.3])
) | st.sampled_from(script("ok", "429", "long-429", "401", "403", "refuse"))


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    write=st.sampled_from([*WRITES, "request send", "request add"]),
    sequences=st.lists(st.lists(fates, max_size=4), min_size=6, max_size=12),
    attempts=st.integers(1, 4),
)
def test_any_sequence_of_outcomes(write: str, sequences: list[list[Fate]], attempts: int) -> None:
    """Several calls at once, each with a history of its own: the caller is never told what is not so."""

    async def run() -> None:
        policy = RetryPolicy(max_attempts=attempts, base_delay=0.005, settle=SETTLE)
        async with LateService().running(policy) as service:
            calls = [make_call(service.client, write, number, signing="s") for number in range(len(sequences))]
            for (key, _), sequence in zip(calls, sequences, strict=True):
                service.scripts[key] += sequence
            outcomes = await asyncio.gather(*(outcome(call) for _, call in calls))
            await service.calm()
            for (key, _), (error, ended_at) in zip(calls, outcomes, strict=True):
                judge(service.held[key], error, ended_at)

    asyncio.run(run())


# Readings


async def test_retry_after_a_wait_is_preceded_by_a_fresh_reading(service: LateService) -> None:
    """The settle time has passed without an effect, and a 429 asks for patience: meanwhile the effect shows."""
    assert await _make_each_write(service, service.client, Fate("504", SETTLE + 0.3), "1-s-429", "ok") == [None] * 3
    assert _effects(service) == [1] * 3
    # One, if the machine pauses until the effect shows.
    assert set(_requests(service)) <= {1, 2}


async def test_retry_with_a_new_token_is_preceded_by_a_fresh_reading(service: LateService) -> None:
    """The effect shows while the token is refreshed."""
    service.refresh_seconds = 0.6
    async with _authorized(service) as client:
        assert await _make_each_write(service, client, Fate("504", SETTLE + 0.3), "401", "ok") == [None] * 3
    assert _effects(service) == [1] * 3
    assert set(_requests(service)) <= {1, 2}


@pytest.mark.parametrize("write", WRITES)
async def test_lost_response_costs_one_reading(service: LateService, write: str) -> None:
    """The effect shows at once: nothing is waited for."""
    async with SigningClient(service.origin, "token") as client:
        for number in range(2):
            key, call = make_call(client, write, number, signing="s")
            before = service.readings
            service.scripts[key] += script(Fate("drop", 0.0))
            await call
            known = 1 if write == "upload" and not number else 0
            assert service.readings - before == 1 + known


async def test_unambiguous_send_is_one_request(service: LateService) -> None:
    """Nothing is read, whatever a reading would show."""
    service.lag = 60.0
    await service.client.signings.send("s1")
    assert (service.held["s1"].requests, service.readings) == (1, 0)


async def test_deadline_that_leaves_no_settle_time_is_an_unknown_outcome(service: LateService) -> None:
    """The error does not guess whether the write took effect."""
    patient = service.client.with_options(retry=RetryPolicy(), timeout=Timeouts(call=0.5, transfer=0.5))
    for error in await _make_each_write(service, patient, Fate("504", 0.7)):
        assert isinstance(error, OutcomeUnknownTimeout)
        assert isinstance(error, TimeoutError)
        assert str(error).endswith("the deadline passed before it could be reconciled")
    await service.calm()
    assert _requests(service) == [1] * 3


async def test_last_attempt_is_settled_before_its_error_is_raised(service: LateService) -> None:
    """Its effect shows a while after its 504."""
    twice = service.client.with_options(retry=RetryPolicy(max_attempts=2, base_delay=0.01, settle=2.0))
    assert await _make_each_write(service, twice, "503", Fate("504", 0.3)) == [None] * 3
    assert _effects(service) == [1] * 3
    assert _requests(service) == [2] * 3


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ["504", "ok"])
async def test_reading_that_hangs_ends_at_the_deadline_as_an_unknown_outcome(
    service: LateService, write: str, kind: str
) -> None:
    """The reading follows an ambiguous attempt, or a success that is confirmed; that record is in ``known``."""

    def hang(fate: Fate, record: Any) -> None:
        if fate.kind == kind:
            service.response_seconds = 60.0

    service.before_response = hang
    held, call = _scripted(service, service.client.with_options(timeout=0.9), write, "504", "ok")
    async with asyncio.timeout(20):
        error, _ = await outcome(call)
    assert isinstance(error, OutcomeUnknownTimeout)
    assert (error.effect, error.transient) == ("unknown", False)
    assert held.requests == (1 if kind == "504" else 2)
    assert len(error.known) == (kind == "ok" and write != "send")


# Tokens

DISK_IS_GONE = AsyncMock(side_effect=OSError(errno.EIO, "the disk is gone"))


@pytest.mark.parametrize("effect_after", [None, SETTLE + 0.2])
async def test_refresh_that_fails_after_an_ambiguous_attempt_leaves_the_outcome_unknown(
    service: LateService, effect_after: float | None
) -> None:
    """The settle time has passed, and without a token nobody can see what happened since."""
    service.refresh_fails, service.refresh_seconds = True, 0.4
    async with _authorized(service) as client:
        service.rejects_after_a_write = True
        for error in await _make_each_write(service, client, "503", Fate("504", effect_after), "401"):
            assert isinstance(error, OutcomeUnknown)
            assert (error.effect, error.transient, error.client_wide, error.fatal) == ("unknown", False, True, True)


async def test_rejected_token_after_an_ambiguous_attempt_does_not_make_the_failure_permanent(
    service: LateService,
) -> None:
    """A dispatch may then try another draft."""

    def reject(fate: Fate, _: object) -> None:
        service.rejects_after_a_write = fate.kind == "401"

    service.before_response = reject
    async with _authorized(service) as client:
        for error in await _make_each_write(service, client, "504", "401"):
            assert isinstance(error, OutcomeUnknown)
            assert error.after_transient


async def test_token_endpoint_that_hangs_while_a_call_is_ambiguous_is_no_timeout_of_the_call(
    service: LateService,
) -> None:
    service.refresh_seconds = 60
    async with _authorized(service, timeout=0.3) as client:
        service.rejects_after_a_write = True
        for error in await _make_each_write(service, client, "504"):
            assert isinstance(error, OutcomeUnknown)
            assert not isinstance(error, TimeoutError)
            assert (error.may_clear, error.client_wide, error.fatal) == (True, True, False)


async def test_token_store_that_fails_while_a_call_is_ambiguous_leaves_the_outcome_unknown(
    service: LateService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the store raises."""
    store = MemoryTokenStore(Token("old", "refresh"))
    async with _authorized(service, store) as client:
        monkeypatch.setattr(store, "load", DISK_IS_GONE)
        service.rejects_after_a_write = True
        for error in await _make_each_write(service, client, "504"):
            assert isinstance(error, OutcomeUnknown)
            # Other calls fail too until the store works again; this one is not to be repeated even then.
            facts = error.effect, error.may_clear, error.client_wide, error.transient, error.fatal
            assert facts == ("unknown", True, True, False, False)


async def test_token_store_that_fails_during_the_verification_leaves_the_outcome_unknown(
    service: LateService, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryTokenStore(Token("old", "refresh"))

    def break_the_store(fate: Fate, record: Any) -> None:
        if fate.kind == "ok":
            monkeypatch.setattr(store, "load", DISK_IS_GONE)
            service.rejects_after_a_write = True

    service.before_response = break_the_store
    service.scripts["s1"] += script("503", "ok")
    async with _authorized(service, store) as client:
        with pytest.raises(OutcomeUnknown, match=r"could not be verified: the service could not be read"):
            await client.signings.send("s1")


# The caller's rate limiter

LIMITER_ERROR = LookupError("the limiter is gone")


def _failing(service: LateService, when: str, error: Exception = LIMITER_ERROR) -> FailingLimiter:
    """Return a limiter that fails once a write was sent."""
    return FailingLimiter(lambda: any(held.requests for held in service.held.values()), when, error)


@asynccontextmanager
async def _limited(service: LateService, when: str, error: Exception = LIMITER_ERROR) -> AsyncIterator[SigningClient]:
    """A client whose limiter fails."""
    limiter = _failing(service, when, error)
    async with SigningClient(service.origin, "token", retry=POLICY, rate_limiter=limiter) as client:
        yield client


@pytest.mark.parametrize("write", WRITES)
async def test_rate_limiter_that_fails_while_a_call_is_ambiguous_leaves_the_outcome_unknown(
    service: LateService, write: str
) -> None:
    """Whatever it raises."""
    async with _limited(service, "acquire") as client:
        with pytest.raises(OutcomeUnknown, match=r"the service could not be read \(LookupError\)") as caught:
            await _scripted(service, client, write, "504")[1]
    assert caught.value.may_clear


@pytest.mark.parametrize("fate", ["ok", "504", "drop"])
@pytest.mark.parametrize("failure", [LIMITER_ERROR, TransportError("the limiter is gone")])
@pytest.mark.parametrize("write", WRITES)
async def test_rate_limiter_that_fails_after_the_first_request_leaves_the_outcome_unknown(
    service: LateService, write: str, failure: Exception, fate: str
) -> None:
    async with _limited(service, "release", failure) as client:
        held, call = _scripted(service, client, write, fate)
        error, _ = await outcome(call)
    assert error is not None
    assert error.effect == "unknown"
    if isinstance(failure, LookupError):
        assert isinstance(error, OutcomeUnknown)
        assert str(error).endswith("the outcome is unknown: the call failed (LookupError)")
        assert (error.may_clear, error.__cause__) == (True, failure)
    assert held.requests == 1


@pytest.mark.parametrize("write", WRITES)
async def test_rate_limiter_that_fails_after_a_refusal_leaves_the_outcome_known(
    service: LateService, write: str
) -> None:
    async with _limited(service, "release") as client:
        with pytest.raises(LookupError):
            await _scripted(service, client, write, "403")[1]


@pytest.mark.parametrize("effect_after", [None, 0.8])
@pytest.mark.parametrize("write", WRITES)
async def test_rate_limiter_that_fails_before_a_repeat_does_not_hide_a_late_effect(
    service: LateService, write: str, effect_after: float | None
) -> None:
    limiter, times = _failing(service, "repeat"), Timeouts(call=30, transfer=30)
    async with SigningClient(service.origin, "token", retry=POLICY, rate_limiter=limiter, timeout=times) as client:
        held, call = _scripted(service, client, write, Fate("504", effect_after))
        if effect_after is None:
            with pytest.raises(LookupError, match="the limiter is gone"):
                await call
        else:
            limiter.until = lambda: bool(held.effects)
            await call
            assert len(held.effects) == 1
        assert held.requests == 1


@pytest.mark.parametrize("write", WRITES)
async def test_call_that_would_start_too_late_is_rate_limited_at_once(service: LateService, write: str) -> None:
    """A paused call keeps the time for its response and one reading."""
    service.response_seconds = 0.5
    await make_call(service.client, write, 2)[1]
    with pytest.raises(RateLimited):
        await service.client.with_options(retry=RetryPolicy.none()).me()
    held, call = _scripted(service, service.client.with_options(timeout=3.6), write)
    began = asyncio.get_running_loop().time()
    with pytest.raises(RateLimited) as caught:
        await call
    assert asyncio.get_running_loop().time() - began < 2
    assert caught.value.effect == "none"
    assert caught.value.retry_after is not None
    assert held.requests == 0


# Two effects


def _records(service: LateService, write: str) -> list[dict[str, Any]]:
    return service.documents["s1"] if write == "upload" else service.recipients["s1"]


@pytest.mark.parametrize("write", CREATIONS)
async def test_two_effects_are_an_unknown_outcome_that_lists_both(service: LateService, write: str) -> None:
    """The retry succeeds slowly, and meanwhile the first request takes effect."""

    def carry_out_the_first(fate: Fate, record: dict[str, Any]) -> None:
        if fate.kind == "ok":
            _records(service, write).append({**record, "id": "late"})

    service.before_response = carry_out_the_first
    key, call = make_call(service.client, write)
    service.scripts[key] += script("504", "ok")
    with pytest.raises(OutcomeUnknown, match="holds 2 such records") as caught:
        await call
    assert {record.id for record in caught.value.known} == {f"{key}-0", "late"}  # type: ignore[attr-defined]  # records
    assert caught.value.effect == "unknown"


# The service's own error: the call reads for a tenth of the settle time.
SLOW = RetryPolicy(max_attempts=4, base_delay=0.02, settle=3.0)


@pytest.mark.parametrize("write", CREATIONS)
async def test_two_effects_that_readings_show_late_are_an_unknown_outcome(service: LateService, write: str) -> None:
    """A reading that does not show the repeat's record shows nothing of the first request either."""
    service.lag = 1.0
    key, call = make_call(service.client.with_options(retry=SLOW), write)
    service.scripts[key] += script(Fate("503", 0.0), "ok")
    error, _ = await outcome(call)
    assert isinstance(error, OutcomeUnknown)
    assert "holds 2 such records" in str(error)
    assert {record.id for record in error.known} == {f"{key}-0", f"{key}-1"}  # type: ignore[attr-defined]  # records


async def test_refused_repeat_of_a_send_that_readings_show_late_is_a_success(service: LateService) -> None:
    service.lag = 1.0
    held, call = _scripted(service, service.client.with_options(retry=SLOW), "send", Fate("503", 0.0), "ok")
    await call
    assert held.requests == 2
    assert len(held.effects) == 1


@pytest.mark.parametrize("write", CREATIONS)
async def test_two_ambiguous_attempts_are_both_settled(service: LateService, write: str) -> None:
    """The first one's effect shows while the second is still under way."""
    key, call = make_call(service.client, write)

    def show_the_first(fate: Fate, record: Any) -> None:
        if fate.effect_after is not None:
            _records(service, write).append({"id": "first", "name": key, "email": key})

    service.before_response = show_the_first
    service.scripts[key] += script("504", Fate("504", 0.8 * SETTLE))
    error, _ = await outcome(call)
    assert isinstance(error, OutcomeUnknown)
    assert len(error.known) == 2


async def test_document_of_another_host_does_not_pass_for_the_effect(service: LateService) -> None:
    """Two hosts upload one file name to one signing: where the service reports a hash, each gets its own record."""
    mine, theirs = make_pdf(text="mine"), make_pdf(text="theirs")
    async with (
        SigningClient(service.origin, "token", retry=PATIENT) as client,
        SigningClient(service.origin, "token", retry=PATIENT) as other,
    ):
        service.scripts["1.pdf"] += script(Fate("504", 0.5), "ok")
        upload = asyncio.create_task(client.documents.upload("s", mine, "1.pdf"))
        while not service.held["1.pdf"].requests:
            await asyncio.sleep(0.01)
        strange = await other.documents.upload("s", theirs, "1.pdf")
        document = await upload
    assert document.id != strange.id
    assert document.extra["sha256"] == hashlib.sha256(mine).hexdigest()
    assert service.held["1.pdf"].requests == 2


# Verification


@pytest.mark.parametrize("write", CREATIONS)
@pytest.mark.parametrize("reading", ["rejected", "too slow", "odd"])
async def test_success_that_cannot_be_verified_is_an_unknown_outcome(
    service: LateService, write: str, reading: str
) -> None:
    """The record of the request that succeeded is in ``known``."""

    def spoil_the_reading(fate: Fate, record: Any) -> None:
        if fate.kind == "ok" and reading == "rejected":
            service.rejects_after_a_write = True
        elif fate.kind == "ok" and reading == "too slow":
            service.response_seconds = 60.0
        elif fate.kind == "ok":
            # A file that the service renamed; a recipient without an address.
            _records(service, write).append({"id": "odd", "name": "1 (1).pdf"})

    service.before_response = spoil_the_reading
    key, call = make_call(service.client.with_options(timeout=2), write)
    service.scripts[key] += script("504", "ok")
    with pytest.raises(OutcomeUnknown, match="could not be verified") as caught:
        await call
    assert caught.value.known[0].id == f"{key}-0"  # type: ignore[attr-defined]  # a record


@pytest.mark.parametrize("write", CREATIONS)
async def test_success_that_readings_never_show_is_an_unknown_outcome(service: LateService, write: str) -> None:
    """The record that was created is in ``known``."""
    service.lag = 600.0
    key, call = make_call(service.client, write)
    service.scripts[key] += script("503", "ok")
    error, _ = await outcome(call)
    assert isinstance(error, OutcomeUnknown)
    assert "could not be verified: the service does not list it" in str(error)
    assert [record.id for record in error.known] == [f"{key}-0"]  # type: ignore[attr-defined]  # a record


async def test_success_after_an_ambiguous_send_is_verified_by_a_reading_that_may_lag(service: LateService) -> None:
    """While the service still shows a draft it is read again."""
    service.scripts["s1"] += script("503", "ok")
    service.lag = 0.3
    await service.client.with_options(retry=RetryPolicy(base_delay=0.02, settle=3.0)).signings.send("s1")
    assert asyncio.get_running_loop().time() >= service.held["s1"].effects[0][0] + service.lag


async def test_success_after_an_ambiguous_send_that_never_shows_is_an_unknown_outcome(service: LateService) -> None:
    """The draft that was read is in ``known``."""
    service.scripts["s1"] += script("503", "ok")
    service.lag = 60.0
    with pytest.raises(OutcomeUnknown, match="could not be verified: the service still shows a draft") as caught:
        await service.client.signings.send("s1")
    assert [(one.id, one.is_draft) for one in caught.value.known] == [("s1", True)]  # type: ignore[attr-defined]  # signings
    assert (caught.value.effect, caught.value.transient) == ("unknown", False)


# Successes that cannot be read


@pytest.mark.parametrize(("write", "kind"), UNREADABLE)
async def test_success_that_cannot_be_read_is_reconciled(service: LateService, write: str, kind: str) -> None:
    """What the service shows is the result; nothing is repeated."""
    key, call = make_call(service.client.with_options(retry=PATIENT), write)
    service.scripts[key] += [Fate(kind, 0.25)]
    result = await call
    assert write == "send" or result.id == f"{key}-0"
    assert (len(service.held[key].effects), service.held[key].requests) == (1, 1)


@pytest.mark.parametrize(("write", "kind"), UNREADABLE)
async def test_success_that_cannot_be_read_and_does_not_show_is_a_decode_error_of_unknown_effect(
    service: LateService, write: str, kind: str
) -> None:
    """The service contradicts itself; what it does later must not pass for the next call's effect."""
    held, call = _scripted(service, service.client, write, kind)
    with pytest.raises(DecodeError) as caught:
        await call
    assert (caught.value.effect, held.requests) == ("unknown", 1)
    tracked = service.client._ledger.signing("/api/1.0/signings/s1")
    unresolved = tracked.documents.unresolved.total() + tracked.recipients.unresolved.total()
    assert unresolved == (0 if write == "send" else 1)
    if write != "send":
        await _assert_next_call_is_undecidable(service, write)


@pytest.mark.parametrize(("write", "kind"), UNREADABLE)
async def test_success_that_cannot_be_read_is_an_unknown_outcome_without_retries(
    service: LateService, write: str, kind: str
) -> None:
    """`RetryPolicy.none()` reads nothing."""
    _, call = _scripted(service, service.client.with_options(retry=RetryPolicy.none()), write, Fate(kind, 0.0))
    error, _ = await outcome(call)
    assert isinstance(error, OutcomeUnknown)


async def _assert_next_call_is_undecidable(service: LateService, write: str) -> None:
    """What shows may be the effect of the call before."""
    with pytest.raises(OutcomeUnknown, match="more than one request may have created"):
        await _scripted(service, service.client, write, Fate("504", 0.0))[1]


@pytest.mark.parametrize("kind", ["endless-408", "endless-504"])
async def test_upload_cancelled_while_a_gateways_page_arrives_is_unresolved(service: LateService, kind: str) -> None:
    """Its document must not pass for the next upload's."""
    held, call = _scripted(service, service.client, "upload", kind)
    upload = asyncio.ensure_future(call)
    while not held.requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    upload.cancel()
    await asyncio.wait([upload])
    assert service.client._ledger.signing("/api/1.0/signings/s1").documents.unresolved.total() == 1
    await _assert_next_call_is_undecidable(service, "upload")


# Dispatches


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


async def _lose_the_sending(service: LateService, journal: Path, effect_after: float | None = None) -> None:
    """Dispatch the package, without retries, until its sending is lost."""
    service.scripts["s1"] += [Fate("504", effect_after)]
    with pytest.raises(OutcomeUnknown):
        await service.client.with_options(retry=RetryPolicy.none()).dispatch(PACKAGE, journal)


async def test_dispatch_does_not_send_again_while_an_earlier_sending_may_be_under_way(
    service: LateService, journal: Path
) -> None:
    """A second run right after the first one reads for the settle time before it sends."""
    await _lose_the_sending(service, journal, 0.5)
    signing = await service.client.with_options(retry=PATIENT).dispatch(PACKAGE, journal)
    assert (signing.id, signing.is_draft) == ("s1", False)
    assert (len(service.held["s1"].effects), service.held["s1"].requests) == (1, 1)


async def test_dispatch_whose_readings_hang_leaves_the_outcome_unknown_until_the_next_run(
    service: LateService, journal: Path
) -> None:
    """It sends nothing, so it may be repeated."""
    await _lose_the_sending(service, journal)
    service.response_seconds = 60.0
    async with asyncio.timeout(20):
        with pytest.raises(OutcomeUnknownTimeout) as caught:
            await service.client.with_options(timeout=1).dispatch(PACKAGE, journal)
    assert (caught.value.effect, caught.value.transient) == ("unknown", True)
    assert service.held["s1"].requests == 1
    service.response_seconds = 0.0
    assert (await service.client.dispatch(PACKAGE, journal)).is_draft is False
    assert len(service.held["s1"].effects) == 1


@pytest.mark.parametrize("took_effect", [True, False])
async def test_dispatch_takes_a_refusal_for_success_only_if_the_draft_was_sent(
    service: LateService, journal: Path, took_effect: bool
) -> None:
    """Somebody on the way has repeated the request, or the service cannot send the draft."""
    service.scripts["s1"] += [Fate("cannot-be-sent", 0.0 if took_effect else None)]
    if not took_effect:
        with pytest.raises(CannotBeSent):
            await service.client.dispatch(PACKAGE, journal)
        assert state_of(journal)["status"] == "draft"
    assert (await service.client.dispatch(PACKAGE, journal)).is_draft is False
    assert state_of(journal)["status"] == "sent"
    assert (len(service.held["s1"].effects), service.created) == (1, 1)


@pytest.mark.parametrize("second", ["503", "504"])
async def test_dispatch_does_not_send_a_draft_that_a_lost_request_may_still_change(
    service: LateService, journal: Path, second: str
) -> None:
    """The recipient that shows may be the second attempt's, and the first one's may follow."""
    service.scripts["anna@example.com"] += script(Fate("504", 4 * SETTLE), Fate(second, 0.0))
    signing = await service.client.dispatch(PACKAGE, journal)
    await service.calm()
    assert [recipient["email"] for recipient in service.recipients[signing.id]] == ["anna@example.com"]
    assert state_of(journal)["abandoned"] == ["s1"]


async def test_dispatch_refused_after_a_lost_sending_says_that_the_package_may_be_sent(
    service: LateService, journal: Path
) -> None:
    """The settle time has passed without an effect, but the journal rules out a late one only in the next run."""
    service.scripts["s1"] += script(Fate("504", 4 * SETTLE), "403")
    with pytest.raises(Forbidden) as caught:
        await service.client.dispatch(PACKAGE, journal)
    assert state_of(journal)["status"] == "sending"
    assert (caught.value.effect, caught.value.exit_code) == ("unknown", 3)
    await service.calm()
    assert (await service.client.dispatch(PACKAGE, journal)).is_draft is False
    assert len(service.held["s1"].effects) == 1


async def test_dispatch_that_is_refused_and_cannot_be_read_leaves_the_outcome_unknown(
    service: LateService, journal: Path
) -> None:
    """The next run reads that the package was sent."""
    service.scripts["s1"] += [Fate("cannot-be-sent", 0.0)]
    service.rejects_after_a_write = True
    with pytest.raises(OutcomeUnknown, match="could not be read"):
        await service.client.dispatch(PACKAGE, journal)
    assert state_of(journal)["status"] == "sending"
    service.rejects_after_a_write = False
    assert (await service.client.dispatch(PACKAGE, journal)).is_draft is False
    assert (len(service.held["s1"].effects), service.held["s1"].requests) == (1, 1)


async def test_dispatch_with_a_client_closed_after_a_lost_sending_says_that_the_package_may_be_sent(
    service: LateService, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent, but a late effect of the lost request is not ruled out."""
    await _lose_the_sending(service, journal)
    send = sending_module.send_own

    async def close_and_send(api: Any, signing_id: str) -> Signing | None:
        await service.client.aclose()
        return await send(api, signing_id)

    monkeypatch.setattr(sending_module, "send_own", close_and_send)
    with pytest.raises(ClientClosed) as caught:
        await service.client.dispatch(PACKAGE, journal)
    assert state_of(journal)["status"] == "sending"
    assert (caught.value.effect, caught.value.exit_code) == ("unknown", 3)
    assert service.held["s1"].requests == 1
