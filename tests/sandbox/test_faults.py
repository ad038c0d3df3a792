"""Faults on demand, the rate limit, and the request log."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import time
from typing import Any

import aiohttp
import pytest

from signing_async.sandbox import Sandbox
from tests.sandbox.receiving import until
from tests.sandbox.serving import API, Caller, begin_upload

DROPPED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)


async def create(call: Caller) -> tuple[int, Any]:
    """Try to create a signing."""
    return await call("POST", f"{API}/signings", json={"name": "A contract", "language": "EN"})


async def statuses(call: Caller, count: int) -> list[int]:
    """Return the statuses of so many requests."""
    return [(await call("GET", f"{API}/me"))[0] for _ in range(count)]


# The status of the response to a creation, or None without a response.
BEFORE = {"429": 429, "503": 503, "500": 500, "502-html": 502, "expired-token": 401, "drop-before-commit": None}
AFTER = {"500-after-commit": 500, "502-html-after-commit": 502, "empty": 201, "not-json": 201, "slow": 201}
AFTER |= {"drop-after-commit": None, "truncate": 201, "truncate-after-commit": 201}


@pytest.mark.parametrize(("kind", "status"), (BEFORE | AFTER).items())
async def test_request_takes_effect_or_not_as_the_name_of_the_fault_says(
    call: Caller, signing_sandbox: Sandbox, kind: str, status: int | None
) -> None:
    details = {"seconds": 0.1} if kind == "slow" else {}
    fault = signing_sandbox.faults.add("signings.create", kind, **details)
    started, seen, body = time.monotonic(), None, b""
    with contextlib.suppress(*DROPPED, aiohttp.ClientPayloadError):
        async with call.session.post(f"{API}/signings", json={"name": "A", "language": "EN"}) as response:
            seen = response.status
            body = await response.read()
    assert seen == status
    assert len(signing_sandbox.signings) == int(kind in AFTER)
    record = signing_sandbox.requests[-1]
    assert (fault.hits, record.fault, record.status) == (1, kind, status)
    assert body.startswith(b"<html") == kind.startswith("502")
    assert (body == b"") == (kind == "empty" or kind.startswith(("drop", "truncate")))
    assert (time.monotonic() - started >= 0.1) or kind != "slow"
    assert (await create(call))[0] == 201


async def test_hang_never_responds_and_has_no_effect(call: Caller, signing_sandbox: Sandbox) -> None:
    fault = signing_sandbox.faults.add("signings.create", "hang")
    hanging = asyncio.create_task(create(call))
    await until(lambda: fault.hits)
    hanging.cancel()
    await until(lambda: signing_sandbox.requests[-1].seconds is not None)
    assert signing_sandbox.signings == []


@pytest.mark.parametrize("kind", ["hang", "slow", "stalled upload"])
async def test_sandbox_stops_while_requests_hang(kind: str) -> None:
    async with Sandbox() as sandbox:
        signing = sandbox.service.create_signing(sandbox.accounts.default_user(), {"name": "A", "language": "EN"})
        if kind != "stalled upload":
            sandbox.faults.add("*", kind, **({"seconds": 60} if kind == "slow" else {}))
        _, writer = await begin_upload(sandbox, signing.id)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    writer.close()


async def test_retry_after_is_as_given_or_by_default_one_second_for_429(call: Caller, signing_sandbox: Sandbox) -> None:
    given: tuple[tuple[str, dict[str, Any], str | None], ...] = (
        ("429", {}, "1"),
        ("503", {}, None),
        ("429", {"retry_after": None}, None),
        ("503", {"retry_after": 0.5}, "0.5"),
        ("503", {"retry_after": "soon"}, "soon"),
    )
    for kind, details, expected in given:
        signing_sandbox.faults.add("me", kind, **details)
        assert await statuses(call, 1) == [int(kind)]
        assert call.headers.get("retry-after") == expected
    signing_sandbox.clock.advance(days=1)
    signing_sandbox.faults.add("me", "429", retry_after=100, http_date=True)
    await call("GET", f"{API}/me")
    moment = email.utils.parsedate_to_datetime(call.headers["retry-after"]).timestamp()
    assert 60 < moment - time.time() <= 101  # in real time


# which requests a fault applies to


async def test_first_arranged_fault_applies_times_requests_after_skip(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.faults.add("me", "500", times=2, skip=1)
    assert await statuses(call, 5) == [200, 500, 500, 200, 200]
    fault = signing_sandbox.faults.add("me", "500", times=None)
    assert await statuses(call, 3) == [500, 500, 500]
    fault.remove()
    fault.remove()
    assert (await statuses(call, 1), fault.hits) == ([200], 3)
    signing_sandbox.faults.add("*", "503")
    signing_sandbox.faults.add("me", "500")
    assert await statuses(call, 3) == [503, 500, 200]
    signing_sandbox.faults.add("me", "500")
    signing_sandbox.faults.clear()
    assert await statuses(call, 1) == [200]


async def test_probability_with_a_seed_makes_the_same_choices_also_after_skip(call: Caller) -> None:
    runs = []
    for skip in (0, 0, 3):
        fault = call.sandbox.faults.add("me", "500", times=None, probability=0.5, seed=3, skip=skip)
        runs.append(await statuses(call, skip + 20))
        fault.remove()
    assert runs[0] == runs[1] == runs[2][3:]
    assert runs[2][:3] == [200, 200, 200]
    assert set(runs[0]) == {200, 500}


async def test_star_is_every_api_operation_but_not_oauth_which_can_have_its_own(call: Caller) -> None:
    star = call.sandbox.faults.add("*", "500", times=None)
    assert (await call("POST", "/api/oauth/token", data={}))[0] == 400
    assert (await call("GET", f"{API}/signings/x"))[0] == 500
    star.remove()
    call.sandbox.faults.add("oauth.token", "503")
    call.sandbox.faults.add("oauth.authorize", "500")
    call.sandbox.faults.add("oauth.authorize", "slow", seconds=0.01)
    assert (await call("POST", "/api/oauth/token", data={}))[0] == 503
    assert (await call("GET", "/oauth/authorize"))[0] == 500
    assert (await call("GET", "/oauth/authorize"))[0] == 400


INVALID: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("signings.sned", "500", {}, ["signings.sned", "signings.send"]),
    ("me", "501", {}, ["501", "502-html"]),
    ("me", "500", {"retry_after": 1}, ["retry_after", "none"]),
    ("me", "429", {"retry_after": -1}, ["retry_after", "-1"]),
    ("me", "429", {"retry_after": [1]}, ["retry_after", "[1]"]),
    ("me", "429", {"http_date": 1}, ["http_date"]),
    ("me", "429", {"http_date": True, "retry_after": "soon"}, ["retry_after", "number"]),
    ("me", "slow", {"seconds": float("nan")}, ["seconds", "nan"]),
    ("me", "500", {"times": 0}, ["times", "0"]),
    ("me", "500", {"probability": 1.1}, ["probability", "1.1"]),
    ("me", "500", {"skip": -1}, ["skip", "-1"]),
    ("oauth.token", "expired-token", {}, ["expired-token", "oauth.token"]),
    ("webhooks.deliver", "500", {}, ["500", "duplicate"]),
]


def test_invalid_fault_or_rate_limit_is_a_value_error_that_names_it(signing_sandbox: Sandbox) -> None:
    for operation, kind, options, words in INVALID:
        with pytest.raises(ValueError) as caught:
            signing_sandbox.faults.add(operation, kind, **options)
        assert [word for word in words if word not in str(caught.value)] == []
    assert signing_sandbox.faults.arranged == []
    limits: tuple[dict[str, Any], ...] = ({"rate": "x"}, {"rate": 1e-320}, {"rate": 1, "burst": 1.5})
    for limit in (*limits, {"rate": 1, "retry_after": "soon"}):
        with pytest.raises(ValueError, match=list(limit)[-1]):
            signing_sandbox.rate_limit(**limit)


# the rate limit


async def test_rate_limit_passes_a_burst_then_responds_429_with_retry_after(call: Caller) -> None:
    call.sandbox.rate_limit(rate=0.5, burst=3)
    assert await statuses(call, 5) == [200, 200, 200, 429, 429]
    assert call.headers["retry-after"] == "2"
    call.sandbox.clock.advance(seconds=4)
    assert await statuses(call, 3) == [200, 200, 429]
    call.sandbox.rate_limit(None)
    assert await statuses(call, 1) == [200]
    call.sandbox.rate_limit(rate=0.01, retry_after=0.25)
    assert await statuses(call, 2) == [200, 429]
    assert call.headers["retry-after"] == "0.25"


# the log


@pytest.mark.signing_sandbox(keep_requests=4)
async def test_request_log_has_the_newest_requests_without_secrets(call: Caller, signing_sandbox: Sandbox) -> None:
    await call("GET", "/dropped")
    signing_id = await call.draft()
    await call("GET", f"{API}/signings/{signing_id}", headers={"Referer": "http://x/authorize?state=st4te"})
    await call("DELETE", f"{API}/me")
    await call("GET", "/nope")
    records = signing_sandbox.requests
    assert [(r.operation, r.method, r.path, r.status) for r in records] == [
        ("signings.create", "POST", f"{API}/signings", 201),
        ("signings.get", "GET", f"{API}/signings/{signing_id}", 200),
        (None, "DELETE", f"{API}/me", 405),
        (None, "GET", "/nope", 404),
    ]
    assert signing_sandbox.requests_of("signings.get") == [records[1]]
    assert all(record.seconds is not None for record in records)
    assert records[0].headers["Authorization"] == "[redacted]"
    assert records[1].headers["Referer"] == "http://x/authorize"
    assert call.session.headers["Authorization"].split()[1] not in repr(records)
    assert abs((records[0].received_at - signing_sandbox.clock.now()).total_seconds()) < 60
