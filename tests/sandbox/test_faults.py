"""Faults on demand, the rate limit, and the request log."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
import time
from typing import Any

import aiohttp
import pytest

from signing_async.sandbox import Profile, Sandbox
from signing_async.sandbox.faults import DELIVERY, DELIVERY_KINDS, KINDS, OPERATIONS
from tests.pdfs import make_pdf
from tests.sandbox.serving import API, Caller

BODY = {"name": "A contract", "language": "EN"}

DROPPED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)


async def create(call: Caller) -> tuple[int, Any]:
    """Try to create a signing."""
    return await call("POST", f"{API}/signings", json=BODY)


# The response of each kind, and whether the request takes effect.

WITH_RESPONSE = [
    ("429", 429, False),
    ("503", 503, False),
    ("500", 500, False),
    ("500-after-commit", 500, True),
    ("502-html", 502, False),
    ("502-html-after-commit", 502, True),
    ("expired-token", 401, False),
    ("empty", 201, True),
    ("not-json", 201, True),
]


@pytest.mark.parametrize(("kind", "status", "done"), WITH_RESPONSE)
async def test_fault_with_a_response_takes_effect_or_not_as_its_name_says(
    call: Caller, signing_sandbox: Sandbox, kind: str, status: int, done: bool
) -> None:
    fault = signing_sandbox.faults.add("signings.create", kind)
    async with call.session.post(f"{API}/signings", json=BODY) as response:
        assert response.status == status
        body = await response.read()
    assert len(signing_sandbox.signings) == int(done)
    assert (fault.hits, signing_sandbox.requests[-1].fault) == (1, kind)
    assert body.startswith(b"<html") == kind.startswith("502")
    assert (body == b"") == (kind == "empty")
    assert (await create(call))[0] == 201


@pytest.mark.parametrize(("kind", "done"), [("drop-before-commit", False), ("drop-after-commit", True)])
async def test_drop_faults_end_the_connection_without_a_response(
    call: Caller, signing_sandbox: Sandbox, kind: str, done: bool
) -> None:
    signing_sandbox.faults.add("signings.create", kind)
    with pytest.raises(DROPPED):
        await create(call)
    assert len(signing_sandbox.signings) == int(done)
    assert signing_sandbox.requests[-1].status is None
    assert (await create(call))[0] == 201


@pytest.mark.parametrize("kind", ["truncate", "truncate-after-commit"])
async def test_truncated_response_has_the_full_length_and_half_the_body(
    call: Caller, signing_sandbox: Sandbox, kind: str
) -> None:
    signing_sandbox.faults.add("signings.create", kind)
    async with call.session.post(f"{API}/signings", json=BODY) as response:
        assert response.status == 201
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert len(signing_sandbox.signings) == 1


async def test_truncating_for_a_disconnected_client_is_no_error(
    signing_sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    signing_sandbox.faults.add("me", "truncate", times=20)
    caplog.set_level(logging.WARNING, "signing_async.sandbox")
    host, port = signing_sandbox.base_url.removeprefix("http://").split(":")
    request = f"GET /api/1.0/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {signing_sandbox.access_token()}\r\n\r\n"
    for _ in range(20):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(request.encode())
        writer.transport.abort()
        await asyncio.sleep(0.005)
    assert caplog.text == ""


async def test_download_is_truncated(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id, document_id, _ = await call.sent()
    await signing_sandbox.complete(signing_id)
    path = f"{API}/signings/{signing_id}/documents/{document_id}/download-signed"
    signing_sandbox.faults.add("documents.download_signed", "truncate")
    whole = 0
    async with call.session.get(path) as response:
        whole = int(response.headers["Content-Length"])
        got = bytearray()
        with contextlib.suppress(aiohttp.ClientPayloadError):
            async for chunk in response.content.iter_any():
                got += chunk
    assert len(got) == whole // 2
    assert len((await call("GET", path))[1]) == whole


async def test_slow_response_is_delayed_and_correct(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.faults.add("signings.create", "slow", seconds=0.2)
    started = time.monotonic()
    assert (await create(call))[0] == 201
    assert time.monotonic() - started >= 0.2


async def test_hang_never_responds_and_has_no_effect(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.faults.add("signings.create", "hang")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await create(call)
    assert signing_sandbox.signings == []
    async with asyncio.timeout(5):
        while signing_sandbox.requests[-1].seconds is None:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("kind", "details"), [("hang", {}), ("slow", {"seconds": 60})])
async def test_sandbox_stops_while_requests_hang(kind: str, details: dict[str, Any]) -> None:
    async with Sandbox() as sandbox:
        sandbox.faults.add("me", kind, times=None, **details)
        headers = {"Authorization": f"Bearer {sandbox.access_token()}"}
        session = aiohttp.ClientSession(sandbox.base_url, headers=headers)
        tasks = [asyncio.create_task(session.get(f"{API}/me")) for _ in range(5)]
        async with asyncio.timeout(5):
            while len(sandbox.requests) < 5:
                await asyncio.sleep(0.01)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    await asyncio.gather(*tasks, return_exceptions=True)
    await session.close()


async def test_sandbox_stops_while_an_upload_stalls() -> None:
    async with Sandbox() as sandbox:
        signing = sandbox.service.create_signing(sandbox.accounts.default_user(), {"name": "A", "language": "EN"})
        _, writer = await asyncio.open_connection("127.0.0.1", int(sandbox.base_url.rpartition(":")[2]))
        head = f"POST {API}/signings/{signing.id}/documents HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n"
        head += f"Authorization: Bearer {sandbox.access_token()}\r\n"
        writer.write(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n".encode())
        async with asyncio.timeout(5):
            while not sandbox.requests:
                await asyncio.sleep(0.01)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    writer.close()


@pytest.mark.parametrize("kind", ["429", "503"])
@pytest.mark.parametrize(
    ("details", "expected"),
    [({"retry_after": 7}, "7"), ({"retry_after": None}, None), ({"retry_after": "soon"}, "soon"),
     ({"retry_after": 0.5}, "0.5")],
)  # fmt: skip
async def test_retry_after_is_as_given_seconds_none_or_text(
    call: Caller, signing_sandbox: Sandbox, kind: str, details: dict[str, Any], expected: str | None
) -> None:
    signing_sandbox.faults.add("me", kind, **details)
    await call("GET", f"{API}/me")
    assert call.headers.get("retry-after") == expected


async def test_retry_after_defaults_to_one_second_for_429_and_none_for_503(
    call: Caller, signing_sandbox: Sandbox
) -> None:
    for kind, expected in (("429", "1"), ("503", None)):
        signing_sandbox.faults.add("me", kind)
        assert (await call("GET", f"{API}/me"))[0] == int(kind)
        assert call.headers.get("retry-after") == expected


async def test_retry_after_as_a_date_is_in_real_time(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.clock.advance(days=1)
    signing_sandbox.faults.add("me", "429", retry_after=100, http_date=True)
    await call("GET", f"{API}/me")
    moment = email.utils.parsedate_to_datetime(call.headers["retry-after"]).timestamp()
    assert 60 < moment - time.time() <= 101


# which requests a fault applies to


async def test_fault_applies_times_requests_after_skip(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.faults.add("me", "500", times=2, skip=1)
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(5)] == [200, 500, 500, 200, 200]
    fault = signing_sandbox.faults.add("me", "500", times=None)
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(3)] == [500, 500, 500]
    fault.remove()
    fault.remove()
    assert (await call("GET", f"{API}/me"))[0] == 200
    assert fault.hits == 3


async def test_probability_with_a_seed_is_repeatable(call: Caller, signing_sandbox: Sandbox) -> None:
    runs = []
    for _ in range(2):
        fault = signing_sandbox.faults.add("me", "500", times=None, probability=0.5, seed=3)
        runs.append([(await call("GET", f"{API}/me"))[0] for _ in range(20)])
        fault.remove()
    assert runs[0] == runs[1]
    assert set(runs[0]) == {200, 500}
    signing_sandbox.faults.add("me", "500", times=None, probability=0)
    assert (await call("GET", f"{API}/me"))[0] == 200


async def test_first_arranged_fault_applies_and_clear_removes_all(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.faults.add("*", "503")
    signing_sandbox.faults.add("me", "500")
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(3)] == [503, 500, 200]
    signing_sandbox.faults.add("me", "500")
    signing_sandbox.faults.clear()
    assert (await call("GET", f"{API}/me"))[0] == 200


async def test_star_is_every_api_operation_but_not_the_token_endpoint(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.faults.add("*", "500", times=None)
    app = signing_sandbox.register_app("http://127.0.0.1:1/")
    assert (await call("POST", "/api/oauth/token", data={"client_id": app.client_id}))[0] == 400
    assert (await call("GET", f"{API}/signings/x"))[0] == 500
    assert (await create(call))[0] == 500


async def test_token_endpoint_and_consent_page_can_have_faults(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.faults.add("oauth.token", "503")
    signing_sandbox.faults.add("oauth.authorize", "500")
    signing_sandbox.faults.add("oauth.authorize", "slow", seconds=0.01)
    assert (await call("POST", "/api/oauth/token", data={}))[0] == 503
    assert (await call("GET", "/oauth/authorize"))[0] == 500
    assert (await call("GET", "/oauth/authorize"))[0] == 400


async def test_upload_dropped_after_commit_is_stored(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id = await call.draft()
    signing_sandbox.faults.add("documents.upload", "drop-after-commit")
    data = make_pdf(300_000)
    with pytest.raises(DROPPED):
        await call.upload(signing_id, data)
    [document] = signing_sandbox.documents(signing_id)
    assert signing_sandbox.document_bytes(document.id) == data


@pytest.mark.signing_sandbox(profile=Profile(expired_token_status=403))
async def test_expired_token_fault_has_the_profiles_status(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.faults.add("me", "expired-token")
    assert (await call("GET", f"{API}/me"))[0] == 403


@pytest.mark.parametrize(
    ("operation", "kind", "options", "words"),
    [
        ("signings.sned", "500", {}, ["signings.sned", "signings.send"]),
        ("me", "501", {}, ["501", "502-html"]),
        ("me", "drop", {}, ["drop", "drop-after-commit"]),
        ("me", "500", {"retry_after": 1}, ["retry_after", "none"]),
        ("me", "429", {"after": 1}, ["after", "retry_after"]),
        ("me", "429", {"retry_after": -1}, ["retry_after", "-1"]),
        ("me", "429", {"retry_after": [1]}, ["retry_after", "[1]"]),
        ("me", "429", {"http_date": 1}, ["http_date"]),
        ("me", "429", {"http_date": True, "retry_after": "soon"}, ["retry_after", "number"]),
        ("me", "slow", {"seconds": float("nan")}, ["seconds", "nan"]),
        ("me", "slow", {"seconds": True}, ["seconds", "True"]),
        ("me", "slow", {"seconds": "1"}, ["seconds", "'1'"]),
        ("me", "500", {"times": 0}, ["times", "0"]),
        ("me", "500", {"times": True}, ["times", "True"]),
        ("me", "500", {"probability": 1.1}, ["probability", "1.1"]),
        ("me", "500", {"probability": "x"}, ["probability", "'x'"]),
        ("me", "500", {"skip": -1}, ["skip", "-1"]),
        ("oauth.token", "expired-token", {}, ["expired-token", "oauth.token"]),
        (DELIVERY, "500", {}, ["500", "duplicate"]),
        (DELIVERY, "drop", {"seconds": 1}, ["seconds"]),
    ],
)
async def test_unknown_operation_kind_or_detail_is_a_value_error_that_names_it(
    signing_sandbox: Sandbox, operation: str, kind: str, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        signing_sandbox.faults.add(operation, kind, **options)
    for word in words:
        assert word in str(caught.value)
    assert signing_sandbox.faults.arranged == []


async def test_every_kind_can_be_arranged_for_every_operation(signing_sandbox: Sandbox) -> None:
    for operation in (*OPERATIONS, "*"):
        for kind in KINDS:
            if kind != "expired-token" or not operation.startswith("oauth"):
                signing_sandbox.faults.add(operation, kind)
    for kind in DELIVERY_KINDS:
        signing_sandbox.faults.add(DELIVERY, kind)


# the rate limit


async def test_rate_limit_passes_a_burst_then_responds_429_with_retry_after(
    call: Caller, signing_sandbox: Sandbox
) -> None:
    signing_sandbox.rate_limit(rate=0.5, burst=3)
    statuses = [(await call("GET", f"{API}/me"))[0] for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    assert call.headers["retry-after"] == "2"
    signing_sandbox.clock.advance(seconds=4)
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(3)] == [200, 200, 429]
    signing_sandbox.rate_limit(None)
    assert (await call("GET", f"{API}/me"))[0] == 200


async def test_rate_limit_has_a_fixed_retry_after_and_a_default_burst(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.rate_limit(rate=0.01, retry_after=0.25)
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(2)] == [200, 429]
    assert call.headers["retry-after"] == "0.25"


async def test_restored_clock_does_not_extend_the_rate_limit(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.rate_limit(rate=1, burst=2)
    snapshot = signing_sandbox.snapshot()
    signing_sandbox.clock.advance(days=14)
    await call.ok("GET", f"{API}/me")
    signing_sandbox.restore(snapshot)
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(2)] == [200, 429]
    assert call.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 0},
        {"rate": -1},
        {"rate": "x"},
        {"rate": True},
        {"rate": 1e-320},
        {"rate": 1, "burst": -1},
        {"rate": 1, "burst": 0},
        {"rate": 1, "burst": 1.5},
        {"rate": 1, "retry_after": "soon"},
        {"rate": 1, "retry_after": -1},
        {"rate": 1, "retry_after": float("inf")},
    ],
)
async def test_invalid_rate_limit_is_a_value_error_that_names_the_argument(
    signing_sandbox: Sandbox, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=list(options)[-1]):
        signing_sandbox.rate_limit(**options)


# the log


async def test_request_log_has_every_request_without_secrets(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id = await call.draft()
    await call("GET", f"{API}/signings/{signing_id}?secret=1")
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
    assert call.session.headers["Authorization"].split()[1] not in repr(records)
    assert abs((records[0].received_at - signing_sandbox.clock.now()).total_seconds()) < 60


async def test_request_log_has_referers_without_the_query(call: Caller, signing_sandbox: Sandbox) -> None:
    await call("GET", f"{API}/me", headers={"Referer": "http://127.0.0.1:1/oauth/authorize?state=st4te&client_id=x"})
    assert signing_sandbox.requests[0].headers["Referer"] == "http://127.0.0.1:1/oauth/authorize"


@pytest.mark.signing_sandbox(keep_requests=3)
async def test_request_log_keeps_only_the_newest_requests(call: Caller, signing_sandbox: Sandbox) -> None:
    for n in range(5):
        await call("GET", f"/{n}")
    assert [record.path for record in signing_sandbox.requests] == ["/2", "/3", "/4"]
