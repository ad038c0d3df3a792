"""Requests with a ``reconcile`` of the caller: never two silent effects, and never a definite error for an effect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import attrs
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from signing_async import (
    DecodeError,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    Reader,
    Response,
    RetryPolicy,
    ServerError,
    Signing,
    SigningClient,
    SigningError,
)
from tests.reconcile.late_service import OK, Fate, LateService, script
from tests.reconcile.test_late_effects import (
    PATIENT,
    POLICY,
    _judge,
    _outcome,
    fates,
)
from tests.servers import serving

WRITES = ["send", "add", "add into"]
SEND, FOLDER = "/api/1.0/signings/{id}/send", "/api/1.0/signings/{id}/recipients"


@attrs.frozen
class Person:
    """A class of the caller."""

    id: str
    email: str
    extra: dict[str, Any] = attrs.field(factory=dict)


def _send(client: SigningClient, signing: str, **options: Any) -> Awaitable[Response]:
    async def find(read: Reader) -> Response | None:
        response = await read("/api/1.0/signings/{id}", path={"id": signing})
        return None if response.decode(Signing).is_draft else response

    return client.request("POST", SEND, path={"id": signing}, reconcile=find, **options)


def _add(client: SigningClient, email: str, **options: Any) -> Awaitable[Any]:
    async def find(read: Reader) -> Person | None:
        return read.only(
            [each async for each in read.paginate(FOLDER, into=Person, path={"id": "s"}) if each.email == email]
        )

    return client.request("POST", FOLDER, path={"id": "s"}, json={"email": email}, reconcile=find, **options)


def _call(client: SigningClient, write: str, number: int = 0) -> tuple[str, Awaitable[Any]]:
    """A call, and the key of its script."""
    if write == "send":
        return f"s{number}", _send(client, f"s{number}")
    email = f"{number}@example.com"
    return email, _add(client, email, **({"into": Person} if write == "add into" else {}))


async def test_success_that_does_not_fit_the_class_is_reconciled() -> None:
    """The service shows a record that does."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=PATIENT) as client:
        service.scripts["0@example.com"] += [Fate("garbled", 0.25)]
        assert await _add(client, "0@example.com", into=Person) == Person("0@example.com-0", "0@example.com")
        service.scripts["1@example.com"] += script("garbled")
        with pytest.raises(DecodeError) as caught:
            await _add(client.with_options(retry=POLICY), "1@example.com", into=Person)
        assert caught.value.effect == "unknown"
        assert service.held["1@example.com"].requests == 1


# The caller's function


async def _ambiguous(function: Any, *, policy: RetryPolicy = POLICY) -> tuple[SigningError | None, LateService]:
    """A send that has no effect, and is reconciled by this function."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=policy) as client:
        service.scripts["s0"] += script("503", "503", "503", "503")
        error, _ = await _outcome(client.request("POST", SEND, path={"id": "s0"}, reconcile=function))
        return error, service


async def test_function_that_fails_is_the_cause_of_an_unknown_outcome() -> None:
    async def broken(read: Reader) -> None:
        raise KeyError("cancelled_at")

    error, service = await _ambiguous(broken)
    assert isinstance(error, OutcomeUnknown)
    assert "reconcile raised KeyError" in str(error)
    assert isinstance(error.__cause__, KeyError)
    assert service.held["s0"].requests == 1


async def test_none_without_a_reading_is_no_evidence() -> None:
    """The request is not repeated."""

    async def lazy(read: Reader) -> None:
        return None

    error, service = await _ambiguous(lazy)
    assert isinstance(error, OutcomeUnknown)
    assert "without reading the service" in str(error)
    assert service.held["s0"].requests == 1


async def test_failed_reading_that_the_function_swallows_is_no_evidence() -> None:
    """None then means that nothing is known."""

    async def handle(request: web.Request) -> web.Response:
        status = {"/forbidden": 403, "/x": 503}.get(request.path, 200)
        return web.json_response({"code": "busy"}, status=status)

    async def swallowing(read: Reader) -> None:
        with suppress(SigningError):
            await read("/forbidden")
        await read("/allowed")

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=POLICY) as client:
        with pytest.raises(OutcomeUnknown, match="the service could not be read: HTTP 403 on GET /forbidden"):
            await client.request("POST", "/x", reconcile=swallowing)
    assert [request.path for request in server.requests] == ["/x", "/forbidden", "/allowed"]


async def test_record_that_is_not_found_is_evidence() -> None:
    """The request is repeated until the attempts are used up."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"code": "gone"}, status=404 if request.method == "GET" else 503)

    async def find(read: Reader) -> Response | None:
        try:
            return await read("/api/1.0/templates/t1")
        except NotFound:
            return None

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=POLICY) as client:
        with pytest.raises(ServerError):
            await client.request("DELETE", "/api/1.0/templates/t1", reconcile=find)
    assert [request.method for request in server.requests].count("DELETE") == POLICY.max_attempts


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("GET", {}, "reconcile: not for GET, HEAD or repeat=True: these requests are retried without it"),
        (
            "POST",
            {"repeat": True},
            "reconcile: not for GET, HEAD or repeat=True: these requests are retried without it",
        ),
        ("POST", {"reconcile": 5}, "reconcile: must be an async function of a Reader, got 5"),
    ],
)
async def test_useless_reconcile_is_refused(method: str, options: dict[str, Any], said: str) -> None:
    async with LateService().running() as service, SigningClient(service.origin, "token") as client:
        arguments: dict[str, Any] = {"path": {"id": "s0"}, "reconcile": print, **options}
        with pytest.raises(InvalidRequest, match=said):
            await client.request(method, SEND, **arguments)
        assert not service.held


# Many at once


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
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
                service.scripts[key] += sequence
            outcomes = await asyncio.gather(*(_outcome(call) for _, call in calls))
            await service.calm()
            for (key, _), (error, ended_at) in zip(calls, outcomes, strict=True):
                _judge(service, key, error, ended_at, settle)

    asyncio.run(run())


@pytest.mark.parametrize("write", ["add", "add into"])
async def test_two_effects_are_an_unknown_outcome_that_lists_both(write: str) -> None:
    """The retry succeeds slowly, and meanwhile the first request takes effect."""
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        key, call = _call(client, write)
        _make_another_of(service)
        service.scripts[key] += script("504", "ok")
        with pytest.raises(OutcomeUnknown, match="the service holds 2 such records") as caught:
            await call
        assert {f"{key}-0", "late"} <= {getattr(each, "id", None) for each in caught.value.known}


@pytest.mark.parametrize("into", [None, Person, dict])
async def test_record_other_than_the_requests_own_is_an_unknown_outcome(into: Any) -> None:
    """A function that takes the first match does not see two effects; their ids differ."""

    async def first(read: Reader) -> Any:
        response = await read(FOLDER, path={"id": "s"})
        return next(iter(response.json()), None)

    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        _make_another_of(service, first=True)
        service.scripts["0@example.com"] += script("504", "ok")
        with pytest.raises(OutcomeUnknown, match="reconcile finds another record"):
            await client.request(
                "POST", FOLDER, path={"id": "s"}, json={"email": "0@example.com"}, reconcile=first, into=into
            )


def _make_another_of(service: LateService, *, first: bool = False) -> None:
    """The backend of an earlier request gets done as a later one succeeds."""
    respond = service._respond

    def late_respond(request: Any, fate: Fate, record: dict[str, Any]) -> Any:
        if fate is OK:
            service.recipients["s"].insert(0 if first else 1, {**record, "id": "late"})
        return respond(request, fate, record)

    service._respond = late_respond  # type: ignore[method-assign]  # the race is arranged here


async def test_success_without_a_record_is_verified() -> None:
    """A response without a body has no id to compare."""
    deletions = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal deletions
        deletions += request.method == "DELETE"
        if request.method == "GET":
            return web.json_response({"id": "t1", "deleted": deletions > 1})
        return web.json_response({"code": "busy"}, status=503) if deletions == 1 else web.Response(status=204)

    async def find(read: Reader) -> Response | None:
        response = await read("/api/1.0/templates/t1")
        return response if response.json()["deleted"] else None

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=POLICY) as client:
        response = await client.request("DELETE", "/api/1.0/templates/t1", reconcile=find)
    assert (response.status, deletions) == (204, 2)


async def test_success_that_never_shows_is_an_unknown_outcome() -> None:
    async with LateService().running() as service, SigningClient(service.origin, "token", retry=POLICY) as client:
        service.scripts["s0"] += script("503", "ok")
        service.lag = 60.0
        with pytest.raises(OutcomeUnknown, match="could not be verified: reconcile does not find the effect"):
            await _send(client, "s0")
