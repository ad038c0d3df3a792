"""Requests with a ``reconcile`` of the caller: never two silent effects, and never a definite error for an effect."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

from signing_async import (
    DecodeError,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    Reader,
    Response,
    ServerError,
    SigningClient,
    SigningError,
)
from tests.reconcile.late_service import (
    PATIENT,
    POLICY,
    RECIPIENTS,
    Fate,
    LateService,
    Person,
    request_add,
    request_send,
    script,
)
from tests.servers import serving

SEND = "/api/1.0/signings/{id}/send"


async def test_success_that_does_not_fit_the_class_is_reconciled(service: LateService) -> None:
    """The service shows a record that does."""
    patient = service.client.with_options(retry=PATIENT)
    service.scripts["0@example.com"] += [Fate("garbled", 0.25)]
    assert await request_add(patient, "0@example.com") == Person("0@example.com-0", "0@example.com")
    service.scripts["1@example.com"] += script("garbled")
    with pytest.raises(DecodeError) as caught:
        await request_add(service.client, "1@example.com")
    assert caught.value.effect == "unknown"
    assert service.held["1@example.com"].requests == 1


# The caller's function


async def _broken(read: Reader) -> None:
    raise KeyError("cancelled_at")


async def _lazy(read: Reader) -> None:
    return None


@pytest.mark.parametrize(
    ("function", "said", "cause"),
    [(_broken, "reconcile raised KeyError", KeyError), (_lazy, "without reading the service", type(None))],
)
async def test_function_that_fails_or_reads_nothing_is_no_evidence(
    service: LateService, function: Any, said: str, cause: type
) -> None:
    """The request is not repeated."""
    service.scripts["s0"] += script("503")
    with pytest.raises(OutcomeUnknown, match=said) as caught:
        await service.client.request("POST", SEND, path={"id": "s0"}, reconcile=function)
    assert isinstance(caught.value.__cause__, cause)
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


@pytest.mark.parametrize(("method", "repeat"), [("GET", False), ("POST", True)])
async def test_useless_reconcile_is_refused(method: str, repeat: bool) -> None:
    said = "reconcile: not for GET, HEAD or repeat=True: these requests are retried without it"
    async with SigningClient("http://127.0.0.1:9", "token") as client:
        with pytest.raises(InvalidRequest, match=said):
            await client.request(method, SEND, path={"id": "s0"}, reconcile=print, repeat=repeat)


# Verification


def _carry_out_another(service: LateService, at: int) -> None:
    """The backend of an earlier request gets done as a later one succeeds."""

    def insert(fate: Fate, record: dict[str, Any]) -> None:
        if fate.kind == "ok":
            service.recipients["s1"].insert(at, {**record, "id": "late"})

    service.before_response = insert


async def test_two_effects_are_an_unknown_outcome_that_lists_both(service: LateService) -> None:
    """The retry succeeds slowly, and meanwhile the first request takes effect."""
    _carry_out_another(service, 1)
    service.scripts["a@example.com"] += script("504", "ok")
    with pytest.raises(OutcomeUnknown, match="the service holds 2 such records") as caught:
        await request_add(service.client, "a@example.com")
    assert {"a@example.com-0", "late"} <= {getattr(each, "id", None) for each in caught.value.known}


@pytest.mark.parametrize("into", [None, Person, dict])
async def test_record_other_than_the_requests_own_is_an_unknown_outcome(service: LateService, into: Any) -> None:
    """A function that takes the first match does not see two effects; their ids differ."""

    async def first(read: Reader) -> Any:
        response = await read(RECIPIENTS, path={"id": "s1"})
        return next(iter(response.json()), None)

    _carry_out_another(service, 0)
    service.scripts["a@example.com"] += script("504", "ok")
    with pytest.raises(OutcomeUnknown, match="reconcile finds another record"):
        await service.client.request(
            "POST", RECIPIENTS, path={"id": "s1"}, json={"email": "a@example.com"}, reconcile=first, into=into
        )


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


async def test_success_that_never_shows_is_an_unknown_outcome(service: LateService) -> None:
    service.scripts["s1"] += script("503", "ok")
    service.lag = 60.0
    with pytest.raises(OutcomeUnknown, match="could not be verified: reconcile does not find the effect"):
        await request_send(service.client, "s1")
