"""Effects that show late: never two of them silently, and never a definite error for what took effect."""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from signing_async import (
    CannotBeSent,
    ClientClosed,
    DecodeError,
    Forbidden,
    LocalRateLimiter,
    MemoryTokenStore,
    NewRecipient,
    OAuth,
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
from signing_async._api import Api  # a step of a dispatch is called alone
from signing_async.dispatch import send as sending_module
from tests.dispatch.observing import state_of
from tests.pdfs import make_pdf
from tests.reconcile.late_service import OK, Fate, LateService, script

SETTLE = 0.5
POLICY = RetryPolicy(max_attempts=4, base_delay=0.02, settle=SETTLE)
# Effects that show within the settle time end a call at once, so these tests take no longer for it.
PATIENT = RetryPolicy(max_attempts=4, base_delay=0.02, settle=10.0)
WRITES = ["send", "upload", "add"]
Write = Callable[[SigningClient, str], Awaitable[Any]]


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
async def test_retry_after_a_wait_is_preceded_by_a_fresh_reading(write: str) -> None:
    """The settle time has passed without an effect, and a 429 asks for patience: meanwhile the effect shows."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        key, call = _call(client, write)
        service.scripts[key] += script(Fate("504", SETTLE + 0.3), "1-s-429", "ok")
        error, _ = await _outcome(call)
        assert error is None
        assert len(service.held[key].effects) == 1
        # One, if the machine pauses until the effect shows.
        assert service.held[key].requests in (1, 2)


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
async def test_token_endpoint_that_hangs_while_a_call_is_ambiguous_is_no_timeout_of_the_call(write: str) -> None:
    async with LateService().running() as service:
        service.refresh_seconds = 60
        store = MemoryTokenStore(Token("old", "refresh"))
        oauth = OAuth(
            service.origin, client_id="id", client_secret="x", redirect_uri="https://app/cb", store=store, timeout=0.3
        )
        async with oauth, SigningClient(service.origin, oauth, retry=POLICY, timeout=30) as client:
            await client.signings.get("s")
            key, call = _call(client, write)
            service.rejects_after_a_write = True
            service.scripts[key] += script("504")
            error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknown)
        assert not isinstance(error, TimeoutError)
        assert (error.may_clear, error.client_wide, error.fatal) == (True, True, False)


@pytest.mark.parametrize("write", WRITES)
async def test_token_store_that_fails_while_a_call_is_ambiguous_leaves_the_outcome_unknown(write: str) -> None:
    """Whatever the store raises."""

    class Fickle(MemoryTokenStore):
        broken = False

        async def load(self) -> Token | None:
            if self.broken:
                raise OSError(errno.EIO, "the disk is gone")
            return await super().load()

    async with LateService().running() as service:
        store = Fickle(Token("old", "refresh"))
        oauth = OAuth(service.origin, client_id="id", client_secret="x", redirect_uri="https://app/cb", store=store)
        async with oauth, SigningClient(service.origin, oauth, retry=POLICY) as client:
            await client.signings.get("s")
            store.broken = service.rejects_after_a_write = True
            key, call = _call(client, write)
            service.scripts[key] += script("504")
            error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknown)
        # Other calls fail too until the store works again; this one is not to be repeated even then.
        facts = error.effect, error.may_clear, error.client_wide, error.transient, error.fatal
        assert facts == ("unknown", True, True, False, False)


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


class _FailingRelease(LocalRateLimiter):
    """Fails after the requests of a call."""

    def __init__(self, service: LateService, error: Exception) -> None:
        super().__init__()
        self._service = service
        self._error = error

    def release(self, acquired_at: float, accepted: bool | None) -> None:
        super().release(acquired_at, accepted)
        if any(held.requests for held in self._service.held.values()):
            raise self._error


@pytest.mark.parametrize("fate", ["ok", "504", "drop"])
@pytest.mark.parametrize("failure", [LookupError("the limiter is gone"), TransportError("the limiter is gone")])
@pytest.mark.parametrize("write", WRITES)
async def test_rate_limiter_that_fails_after_the_first_request_leaves_the_outcome_unknown(
    write: str, failure: Exception, fate: str
) -> None:
    async with LateService().running() as service:
        limiter = _FailingRelease(service, failure)
        async with SigningClient(service.origin, "token", retry=POLICY, rate_limiter=limiter) as client:
            key, call = _call(client, write)
            service.scripts[key] += script(fate)
            error, _ = await _outcome(call)
        assert error is not None
        assert error.effect == "unknown"
        if isinstance(failure, LookupError):
            assert isinstance(error, OutcomeUnknown)
            assert str(error).endswith("the outcome is unknown: the call failed (LookupError)")
            assert (error.may_clear, error.__cause__) == (True, failure)
        assert service.held[key].requests == 1


@pytest.mark.parametrize("write", WRITES)
async def test_rate_limiter_that_fails_after_a_refusal_leaves_the_outcome_known(write: str) -> None:
    async with LateService().running() as service:
        limiter = _FailingRelease(service, LookupError("the limiter is gone"))
        async with SigningClient(service.origin, "token", retry=POLICY, rate_limiter=limiter) as client:
            key, call = _call(client, write)
            service.scripts[key] += script("403")
            with pytest.raises(LookupError):
                await call


@pytest.mark.parametrize("effect_after", [None, 0.8])
@pytest.mark.parametrize("write", WRITES)
async def test_rate_limiter_that_fails_before_a_repeat_does_not_hide_a_late_effect(
    write: str, effect_after: float | None
) -> None:
    class Fickle(LocalRateLimiter):
        async def acquire(self, deadline: float) -> bool:
            # The deadlines of readings are nearer.
            if service.held[key].requests and deadline > asyncio.get_running_loop().time() + 15:
                while effect_after is not None and not service.held[key].effects:
                    await asyncio.sleep(0.02)
                raise LookupError("the limiter is gone")
            return await super().acquire(deadline)

    async with (
        LateService().running() as service,
        SigningClient(
            service.origin, "token", retry=POLICY, rate_limiter=Fickle(), timeout=Timeouts(call=30, transfer=30)
        ) as client,
    ):
        key, call = _call(client, write)
        service.scripts[key] += [Fate("504", effect_after)]
        if effect_after is None:
            with pytest.raises(LookupError, match="the limiter is gone"):
                await call
        else:
            await call
            assert len(service.held[key].effects) == 1
        assert service.held[key].requests == 1


@pytest.mark.parametrize("write", WRITES)
async def test_call_that_would_start_too_late_is_rate_limited_at_once(write: str) -> None:
    """A paused call keeps the time for its response and one reading, as long as those took before."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.response_seconds = 0.5
        await _call(client, write)[1]
        with pytest.raises(RateLimited):
            await client.with_options(retry=RetryPolicy.none()).me()
        key, call = _call(client.with_options(timeout=3.6), write, 1)
        began = asyncio.get_running_loop().time()
        with pytest.raises(RateLimited) as caught:
            await call
        assert asyncio.get_running_loop().time() - began < 2
        assert caught.value.effect == "none"
        assert caught.value.retry_after is not None
        assert service.held[key].requests == 0


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


@pytest.mark.parametrize("write", ["upload", "add"])
async def test_two_effects_that_readings_show_late_are_an_unknown_outcome(write: str) -> None:
    """A reading that does not show the repeat's record shows nothing of the first request either."""
    policy = RetryPolicy(max_attempts=4, base_delay=0.02, settle=8.0)
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=policy) as client:
        service.lag = 2.0
        key, call = _call(client, write)
        # The service's own error: the call reads for a tenth of the settle time.
        service.scripts[key] += script(Fate("503", 0.0), "ok")
        error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknown)
        assert "holds 2 such records" in str(error)
        assert {record.id for record in error.known} == {f"{key}-0", f"{key}-1"}  # type: ignore[attr-defined]  # records


@pytest.mark.parametrize("write", ["upload", "add"])
async def test_success_that_readings_never_show_is_an_unknown_outcome(write: str) -> None:
    """The record that was created is in ``known``."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.lag = 600.0
        key, call = _call(client, write)
        service.scripts[key] += script("503", "ok")
        error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknown)
        assert "could not be verified: the service does not list it" in str(error)
        assert [record.id for record in error.known] == [f"{key}-0"]  # type: ignore[attr-defined]  # a record


async def test_refused_repeat_of_a_send_that_readings_show_late_is_a_success() -> None:
    policy = RetryPolicy(max_attempts=4, base_delay=0.02, settle=8.0)
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=policy) as client:
        service.lag = 4.0
        service.scripts["s0"] += script(Fate("503", 0.0), "ok")
        await client.signings.send("s0")
        assert service.held["s0"].requests == 2
        assert len(service.held["s0"].effects) == 1


async def test_document_of_another_host_does_not_pass_for_the_effect() -> None:
    """Two hosts upload one file name to one signing: where the service reports a hash, each gets its own record."""
    mine, theirs = make_pdf(text="mine"), make_pdf(text="theirs")
    async with (
        LateService().running() as service,
        SigningClient(service.origin, "token", retry=PATIENT) as client,
        SigningClient(service.origin, "token", retry=PATIENT) as other,
    ):
        service.scripts["0.pdf"] += script(Fate("504", 0.5), "ok")
        upload = asyncio.create_task(client.documents.upload("s", mine, "0.pdf"))
        while not service.held["0.pdf"].requests:
            await asyncio.sleep(0.01)
        strange = await other.documents.upload("s", theirs, "0.pdf")
        document = await upload
        assert document.id != strange.id
        assert document.extra["sha256"] == hashlib.sha256(mine).hexdigest()
        assert service.held["0.pdf"].requests == 2


@pytest.mark.parametrize("write", ["upload", "add"])
@pytest.mark.parametrize("reading", ["rejected", "too slow", "odd"])
async def test_success_that_cannot_be_verified_is_an_unknown_outcome(write: str, reading: str) -> None:
    """The record of the request that succeeded is in ``known``."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        key, call = _call(client.with_options(timeout=3), write)
        respond = service._respond

        def respond_and_stop_reading(request: Any, fate: Fate, record: dict[str, Any]) -> Any:
            if fate is OK and reading == "rejected":
                service.rejects_after_a_write = True
            elif fate is OK and reading == "too slow":
                service.response_seconds = 60.0
            elif fate is OK:
                # A file that the service renamed; a recipient without an address.
                service.documents["s"].append({"id": "odd", "name": "0 (1).pdf"})
                service.recipients["s"].append({"id": "odd"})
            return respond(request, fate, record)

        service._respond = respond_and_stop_reading  # type: ignore[method-assign]  # arranged at this very moment
        service.scripts[key] += script("504", "ok")
        error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknown)
        assert "could not be verified" in str(error)
        assert error.known[0].id == f"{key}-0"  # type: ignore[attr-defined]  # a record


async def test_success_after_an_ambiguous_send_is_verified_by_a_reading_that_may_lag() -> None:
    """While the service still shows a draft it is read again."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=PATIENT) as client:
        service.scripts["s0"] += script("503", "ok")
        service.lag = 0.3
        await client.signings.send("s0")
        sent_at = service.held["s0"].effects[0][0]
        assert asyncio.get_running_loop().time() >= sent_at + service.lag


async def test_success_after_an_ambiguous_send_that_never_shows_is_an_unknown_outcome() -> None:
    """The draft that was read is in ``known``."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.scripts["s0"] += script("503", "ok")
        service.lag = 60.0
        with pytest.raises(OutcomeUnknown, match="could not be verified: the service still shows a draft") as caught:
            await client.signings.send("s0")
        assert [(one.id, one.is_draft) for one in caught.value.known] == [("s0", True)]  # type: ignore[attr-defined]  # signings
        assert (caught.value.effect, caught.value.transient) == ("unknown", False)


async def test_unambiguous_send_is_one_request() -> None:
    """Nothing is read, whatever a reading would show."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.lag = 60.0
        await client.signings.send("s0")
        assert (service.held["s0"].requests, service.readings) == (1, 0)


def _hang_after(service: LateService, kind: str) -> None:
    """From the first response of this kind on, nothing else is answered."""
    respond = service._respond

    def respond_and_hang(request: Any, fate: Fate, record: dict[str, Any]) -> Any:
        if fate.kind == kind:
            service.response_seconds = 60.0
        return respond(request, fate, record)

    service._respond = respond_and_hang  # type: ignore[method-assign]  # arranged at this very moment


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ["504", "ok"])
async def test_reading_that_hangs_ends_at_the_deadline_as_an_unknown_outcome(write: str, kind: str) -> None:
    """After the ambiguous attempt, and after the success that is to be verified."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        key, call = _call(client.with_options(timeout=2), write)
        service.scripts[key] += script("504", "ok")
        _hang_after(service, kind)
        async with asyncio.timeout(20):
            error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknownTimeout)
        assert (error.effect, error.transient) == ("unknown", False)
        assert service.held[key].requests == (1 if kind == "504" else 2)


async def test_token_store_that_fails_during_the_verification_leaves_the_outcome_unknown() -> None:
    """Whatever the store raises."""

    class Fickle(MemoryTokenStore):
        broken = False

        async def load(self) -> Token | None:
            if self.broken:
                raise OSError("the disk is gone")
            return await super().load()

    async with LateService().running() as service:
        store = Fickle(Token("old", "refresh"))
        oauth = OAuth(service.origin, client_id="id", client_secret="x", redirect_uri="https://app/cb", store=store)
        async with oauth, SigningClient(service.origin, oauth, retry=POLICY) as client:
            respond = service._respond

            def respond_and_break(request: Any, fate: Fate, record: dict[str, Any]) -> Any:
                store.broken = service.rejects_after_a_write = fate is OK
                return respond(request, fate, record)

            service._respond = respond_and_break  # type: ignore[method-assign]  # arranged at this very moment
            service.scripts["s0"] += script("503", "ok")
            with pytest.raises(OutcomeUnknown, match=r"could not be verified: the service could not be read"):
                await client.signings.send("s0")


@pytest.mark.parametrize(("write", "kind"), [("send", "page"), ("upload", "garbled"), ("add", "garbled")])
async def test_success_that_cannot_be_read_is_reconciled(write: str, kind: str) -> None:
    """What the service shows is the result; nothing is repeated."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=PATIENT) as client:
        key, call = _call(client, write)
        service.scripts[key] += [Fate(kind, 0.25)]
        result = await call
        assert write == "send" or result.id == f"{key}-0"
        assert (len(service.held[key].effects), service.held[key].requests) == (1, 1)


@pytest.mark.parametrize(("write", "kind"), [("send", "page"), ("upload", "garbled"), ("add", "garbled")])
async def test_success_that_cannot_be_read_and_does_not_show_is_a_decode_error_of_unknown_effect(
    write: str, kind: str
) -> None:
    """The service contradicts itself; what it does later must not pass for the next call's effect."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        key, call = _call(client, write)
        service.scripts[key] += script(kind)
        error, _ = await _outcome(call)
        assert isinstance(error, DecodeError)
        assert error.effect == "unknown"
        assert service.held[key].requests == 1
        tracked = client._ledger.signing("/api/1.0/signings/s")
        unresolved = tracked.documents.unresolved.total() + tracked.recipients.unresolved.total()
        assert unresolved == (0 if write == "send" else 1)


@pytest.mark.parametrize(("write", "kind"), [("send", "page"), ("upload", "garbled"), ("add", "garbled")])
async def test_success_that_cannot_be_read_is_an_unknown_outcome_without_retries(write: str, kind: str) -> None:
    """`RetryPolicy.none()` reads nothing."""
    async with (
        LateService().running() as service,
        SigningClient(service.origin, "token", retry=RetryPolicy.none()) as client,
    ):
        key, call = _call(client, write)
        service.scripts[key] += [Fate(kind, 0.0)]
        error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknown)


@pytest.mark.parametrize("write", ["upload", "add"])
async def test_two_ambiguous_attempts_are_both_settled(write: str) -> None:
    """The first one's effect shows while the second is still under way."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        key, call = _call(client, write)
        respond = service._respond

        def respond_and_show_the_first(request: Any, fate: Fate, record: dict[str, Any]) -> Any:
            if fate.effect_after is not None:
                records = service.documents["s"] if write == "upload" else service.recipients["s"]
                records.append({"id": "first", "name": key, "email": key})
            return respond(request, fate, record)

        service._respond = respond_and_show_the_first  # type: ignore[method-assign]  # arranged at this very moment
        service.scripts[key] += script("504", Fate("504", 0.8 * SETTLE))
        error, _ = await _outcome(call)
        assert isinstance(error, OutcomeUnknown)
        assert len(error.known) == 2


@pytest.mark.parametrize("status", [408, 504])
async def test_upload_cancelled_while_a_gateways_page_arrives_is_unresolved(status: int) -> None:
    """Its document must not pass for the next upload's."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        read = asyncio.Event()

        async def trickle(request: Any, fate: Fate, record: dict[str, Any]) -> Any:
            response = web.StreamResponse(status=status)
            await response.prepare(request)
            read.set()
            await asyncio.sleep(60)

        service._respond = trickle  # type: ignore[method-assign, assignment]  # a response that never ends
        key, call = _call(client, "upload")
        service.scripts[key] += script("504")
        upload = asyncio.ensure_future(call)
        await read.wait()
        await asyncio.sleep(0.05)
        upload.cancel()
        await asyncio.wait([upload])
        assert client._ledger.signing("/api/1.0/signings/s").documents.unresolved.total() == 1


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


async def test_dispatch_whose_readings_hang_leaves_the_outcome_unknown_until_the_next_run(tmp_path: Path) -> None:
    """It sends nothing, so it may be repeated."""
    package = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [NewRecipient("anna@example.com")])
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.scripts["s1"] += script("504")
        with pytest.raises(OutcomeUnknown):
            await client.with_options(retry=RetryPolicy.none()).dispatch(package, tmp_path / "journal")
        service.response_seconds = 60.0
        async with asyncio.timeout(20):
            with pytest.raises(OutcomeUnknownTimeout) as caught:
                await client.with_options(timeout=1).dispatch(package, tmp_path / "journal")
        assert (caught.value.effect, caught.value.transient) == ("unknown", True)
        assert service.held["s1"].requests == 1
        service.response_seconds = 0.0
        assert (await client.dispatch(package, tmp_path / "journal")).is_draft is False
        assert len(service.held["s1"].effects) == 1


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


async def test_dispatch_refused_after_a_lost_sending_says_that_the_package_may_be_sent(tmp_path: Path) -> None:
    """The settle time has passed without an effect, but the journal rules out a late one only in the next run."""
    package = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [NewRecipient("anna@example.com")])
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.scripts["s1"] += script(Fate("504", 10 * SETTLE), "403")
        with pytest.raises(Forbidden) as caught:
            await client.dispatch(package, tmp_path / "journal")
        assert state_of(tmp_path / "journal")["status"] == "sending"
        assert (caught.value.effect, caught.value.exit_code) == ("unknown", 3)
        await service.calm()
        assert (await client.dispatch(package, tmp_path / "journal")).is_draft is False
        assert len(service.held["s1"].effects) == 1


async def test_dispatch_that_is_refused_and_cannot_be_read_leaves_the_outcome_unknown(tmp_path: Path) -> None:
    """The next run reads that the package was sent."""
    package = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [NewRecipient("anna@example.com")])
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.scripts["s1"] += [Fate("cannot-be-sent", 0.0)]
        service.rejects_after_a_write = True
        with pytest.raises(OutcomeUnknown, match="could not be read"):
            await client.dispatch(package, tmp_path / "journal")
        assert state_of(tmp_path / "journal")["status"] == "sending"
        service.rejects_after_a_write = False
        assert (await client.dispatch(package, tmp_path / "journal")).is_draft is False
        assert (len(service.held["s1"].effects), service.held["s1"].requests) == (1, 1)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("first", FIRST)
async def test_twenty_five_calls_at_once(write: str, first: str) -> None:
    """Each one's effect shows late, each is found, and the calls on one signing share their readings."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=PATIENT) as client:
        delay = 0.02 if first == "drop" else 0.25
        calls = [_call(client, write, number) for number in range(25)]
        for key, _ in calls:
            service.scripts[key] += script(Fate(first, delay))
        outcomes = await asyncio.gather(*(_outcome(call) for _, call in calls))
        assert [error for error, _ in outcomes] == [None] * 25
        await service.calm()
        assert [len(service.held[key].effects) for key, _ in calls] == [1] * 25
        if write != "send":
            assert service.readings < 100


@pytest.mark.parametrize("write", WRITES)
async def test_twenty_five_calls_with_different_histories(write: str) -> None:
    """Effects before and after the settle time, or none, each followed by another outcome."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        calls = [_call(client, write, number) for number in range(25)]
        for number, (key, _) in enumerate(calls):
            delay = [0.0, 0.1, 0.3, SETTLE + 0.1, SETTLE + 0.3, None][number % 6]
            first = Fate(["504", "502", "html"][number % 3], delay)
            service.scripts[key] += script(first, FOLLOWING[number % len(FOLLOWING)])
        outcomes = await asyncio.gather(*(_outcome(call) for _, call in calls))
        await service.calm()
        for (key, _), (error, ended_at) in zip(calls, outcomes, strict=True):
            _judge(service, key, error, ended_at)


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


@pytest.mark.parametrize("write", WRITES)
async def test_last_attempt_is_settled_before_its_error_is_raised(write: str) -> None:
    """Its effect shows a while after its 504."""
    twice = RetryPolicy(max_attempts=2, base_delay=0.01, settle=2.0)
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=twice) as client:
        key, call = _call(client, write)
        service.scripts[key] += script("503", Fate("504", 0.3))
        error, _ = await _outcome(call)
        assert error is None
        assert len(service.held[key].effects) == 1
        assert service.held[key].requests == 2


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


async def test_dispatch_with_a_client_closed_after_a_lost_sending_says_that_the_package_may_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent, but a late effect of the lost request is not ruled out."""
    package = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [NewRecipient("anna@example.com")])
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.scripts["s1"] += script("504")
        with pytest.raises(OutcomeUnknown):
            await client.with_options(retry=RetryPolicy.none()).dispatch(package, tmp_path / "journal")
        send = sending_module.send_own

        async def close_and_send(api: Api, signing_id: str) -> Signing | None:
            await client.aclose()
            return await send(api, signing_id)

        monkeypatch.setattr(sending_module, "send_own", close_and_send)
        with pytest.raises(ClientClosed) as caught:
            await client.dispatch(package, tmp_path / "journal")
        assert state_of(tmp_path / "journal")["status"] == "sending"
        assert (caught.value.effect, caught.value.exit_code) == ("unknown", 3)
        assert service.held["s1"].requests == 1
