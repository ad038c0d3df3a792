"""Faults on demand, the rate limit, and the request log."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
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


# what each kind does: the answer, and whether the work was done

ANSWERED = [
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


@pytest.mark.parametrize(("kind", "status", "done"), ANSWERED)
async def test_kinds_that_answer(call: Caller, signing_sandbox: Sandbox, kind: str, status: int, done: bool) -> None:
    """The answer is the fault's, the work is done or not as its name says, and the next request is well."""
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
async def test_kinds_that_drop(call: Caller, signing_sandbox: Sandbox, kind: str, done: bool) -> None:
    """The connection ends without an answer."""
    signing_sandbox.faults.add("signings.create", kind)
    with pytest.raises(DROPPED):
        await create(call)
    assert len(signing_sandbox.signings) == int(done)
    assert signing_sandbox.requests[-1].status is None
    assert (await create(call))[0] == 201


@pytest.mark.parametrize("kind", ["truncate", "truncate-after-commit"])
async def test_truncated(call: Caller, signing_sandbox: Sandbox, kind: str) -> None:
    """The length is right, half of the body comes, and the work is done."""
    signing_sandbox.faults.add("signings.create", kind)
    async with call.session.post(f"{API}/signings", json=BODY) as response:
        assert response.status == 201
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert len(signing_sandbox.signings) == 1


async def test_truncated_for_a_client_that_has_gone(signing_sandbox: Sandbox, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is left to be told anything; it is no failure of the sandbox."""
    signing_sandbox.faults.add("me", "truncate", times=20)
    host, port = signing_sandbox.base_url.removeprefix("http://").split(":")
    request = f"GET /api/1.0/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {signing_sandbox.access_token()}\r\n\r\n"
    for _ in range(20):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(request.encode())
        writer.transport.abort()
        await asyncio.sleep(0.005)
    assert caplog.text == ""


async def test_a_truncated_download(call: Caller, signing_sandbox: Sandbox) -> None:
    """A file breaks off as well."""
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


async def test_slow(call: Caller, signing_sandbox: Sandbox) -> None:
    """The answer takes its time, and is right."""
    signing_sandbox.faults.add("signings.create", "slow", seconds=0.2)
    started = time.monotonic()
    assert (await create(call))[0] == 201
    assert time.monotonic() - started >= 0.2


async def test_hanging_until_the_client_leaves(call: Caller, signing_sandbox: Sandbox) -> None:
    """No answer ever comes, and nothing is done."""
    signing_sandbox.faults.add("signings.create", "hang")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await create(call)
    assert signing_sandbox.signings == []
    async with asyncio.timeout(5):
        while signing_sandbox.requests[-1].seconds is None:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("kind", "details"), [("hang", {}), ("slow", {"seconds": 60})])
async def test_it_stops_while_requests_hang(kind: str, details: dict[str, Any]) -> None:
    """Requests that hang do not keep the sandbox from stopping."""
    async with Sandbox() as sandbox:
        sandbox.faults.add("me", kind, times=None, **details)
        headers = {"Authorization": f"Bearer {sandbox.access_token()}"}
        session = aiohttp.ClientSession(sandbox.base_url, headers=headers)
        tasks = [asyncio.create_task(session.get(f"{API}/me")) for _ in range(5)]
        async with asyncio.timeout(5):
            while len(sandbox.requests) < 5:
                await asyncio.sleep(0.01)
        started = time.monotonic()
    assert time.monotonic() - started < 3
    await asyncio.gather(*tasks, return_exceptions=True)
    await session.close()


async def test_it_stops_while_an_upload_stalls() -> None:
    """A client that stops in the middle of its body does not keep the sandbox from stopping."""
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
    assert time.monotonic() - started < 3
    writer.close()


@pytest.mark.parametrize("kind", ["429", "503"])
@pytest.mark.parametrize(
    ("details", "expected"),
    [({"retry_after": 7}, "7"), ({"retry_after": None}, None), ({"retry_after": "soon"}, "soon"),
     ({"retry_after": 0.5}, "0.5")],
)  # fmt: skip
async def test_retry_after(
    call: Caller, signing_sandbox: Sandbox, kind: str, details: dict[str, Any], expected: str | None
) -> None:
    """Retry-After is what was asked for: seconds, nothing, or nonsense."""
    signing_sandbox.faults.add("me", kind, **details)
    await call("GET", f"{API}/me")
    assert call.headers.get("retry-after") == expected


async def test_retry_after_by_default(call: Caller, signing_sandbox: Sandbox) -> None:
    """A 429 has one second, a 503 nothing."""
    for kind, expected in (("429", "1"), ("503", None)):
        signing_sandbox.faults.add("me", kind)
        assert (await call("GET", f"{API}/me"))[0] == int(kind)
        assert call.headers.get("retry-after") == expected


async def test_retry_after_as_a_date(call: Caller, signing_sandbox: Sandbox) -> None:
    """With http_date it is a date in real time, whatever the sandbox's clock says."""
    signing_sandbox.clock.advance(days=1)
    signing_sandbox.faults.add("me", "429", retry_after=100, http_date=True)
    await call("GET", f"{API}/me")
    moment = email.utils.parsedate_to_datetime(call.headers["retry-after"]).timestamp()
    assert 60 < moment - time.time() <= 101


# which requests are struck


async def test_times(call: Caller, signing_sandbox: Sandbox) -> None:
    """`times` requests are struck, None means all, and `skip` lets some pass first."""
    signing_sandbox.faults.add("me", "500", times=2, skip=1)
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(5)] == [200, 500, 500, 200, 200]
    fault = signing_sandbox.faults.add("me", "500", times=None)
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(3)] == [500, 500, 500]
    fault.remove()
    fault.remove()
    assert (await call("GET", f"{API}/me"))[0] == 200
    assert fault.hits == 3


async def test_probability(call: Caller, signing_sandbox: Sandbox) -> None:
    """Dice decide, the same ones with the same seed."""
    runs = []
    for _ in range(2):
        fault = signing_sandbox.faults.add("me", "500", times=None, probability=0.5, seed=3)
        runs.append([(await call("GET", f"{API}/me"))[0] for _ in range(20)])
        fault.remove()
    assert runs[0] == runs[1]
    assert set(runs[0]) == {200, 500}
    signing_sandbox.faults.add("me", "500", times=None, probability=0)
    assert (await call("GET", f"{API}/me"))[0] == 200


async def test_the_first_that_fits(call: Caller, signing_sandbox: Sandbox) -> None:
    """Faults strike in the order in which they were arranged; clear() removes them all."""
    signing_sandbox.faults.add("*", "503")
    signing_sandbox.faults.add("me", "500")
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(3)] == [503, 500, 200]
    signing_sandbox.faults.add("me", "500")
    signing_sandbox.faults.clear()
    assert (await call("GET", f"{API}/me"))[0] == 200


async def test_star_is_the_api(call: Caller, signing_sandbox: Sandbox) -> None:
    """ "*" is every operation of /api/1.0, and not the token endpoint."""
    signing_sandbox.faults.add("*", "500", times=None)
    app = signing_sandbox.register_app("http://127.0.0.1:1/")
    assert (await call("POST", "/api/oauth/token", data={"client_id": app.client_id}))[0] == 400
    assert (await call("GET", f"{API}/signings/x"))[0] == 500
    assert (await create(call))[0] == 500


async def test_faults_of_oauth(call: Caller, signing_sandbox: Sandbox) -> None:
    """The token endpoint and the consent page can be struck by name."""
    signing_sandbox.faults.add("oauth.token", "503")
    signing_sandbox.faults.add("oauth.authorize", "500")
    signing_sandbox.faults.add("oauth.authorize", "slow", seconds=0.01)
    assert (await call("POST", "/api/oauth/token", data={}))[0] == 503
    assert (await call("GET", "/oauth/authorize"))[0] == 500
    assert (await call("GET", "/oauth/authorize"))[0] == 400


async def test_an_upload_dropped_after_commit(call: Caller, signing_sandbox: Sandbox) -> None:
    """The document is there though the client heard nothing."""
    signing_id = await call.draft()
    signing_sandbox.faults.add("documents.upload", "drop-after-commit")
    data = make_pdf(300_000)
    with pytest.raises(DROPPED):
        await call.upload(signing_id, data)
    [document] = signing_sandbox.documents(signing_id)
    assert signing_sandbox.document_bytes(document.id) == data


@pytest.mark.signing_sandbox(profile=Profile(expired_token_status=403))
async def test_expired_token_as_the_profile_says(call: Caller, signing_sandbox: Sandbox) -> None:
    """The fault's status is the profile's."""
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
async def test_mistakes_are_told(
    signing_sandbox: Sandbox, operation: str, kind: str, options: dict[str, Any], words: list[str]
) -> None:
    """An unknown operation, kind or detail is a ValueError that names it and what there is."""
    with pytest.raises(ValueError) as caught:
        signing_sandbox.faults.add(operation, kind, **options)
    for word in words:
        assert word in str(caught.value)
    assert signing_sandbox.faults.arranged == []


async def test_every_kind_can_be_arranged_everywhere(signing_sandbox: Sandbox) -> None:
    """Every kind is known for every operation that can have it."""
    for operation in (*OPERATIONS, "*"):
        for kind in KINDS:
            if kind != "expired-token" or not operation.startswith("oauth"):
                signing_sandbox.faults.add(operation, kind)
    for kind in DELIVERY_KINDS:
        signing_sandbox.faults.add(DELIVERY, kind)


# the rate limit


async def test_rate_limit(call: Caller, signing_sandbox: Sandbox) -> None:
    """A burst passes, the rest is 429 with Retry-After, and time lets more pass."""
    signing_sandbox.rate_limit(rate=0.5, burst=3)
    statuses = [(await call("GET", f"{API}/me"))[0] for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    assert call.headers["retry-after"] == "2"
    signing_sandbox.clock.advance(seconds=4)
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(3)] == [200, 200, 429]
    signing_sandbox.rate_limit(None)
    assert (await call("GET", f"{API}/me"))[0] == 200


async def test_rate_limit_with_a_fixed_retry_after(call: Caller, signing_sandbox: Sandbox) -> None:
    """Retry-After can be what one wants; without a burst one second's worth passes at once."""
    signing_sandbox.rate_limit(rate=0.01, retry_after=0.25)
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(2)] == [200, 429]
    assert call.headers["retry-after"] == "0.25"


async def test_the_rate_limit_after_going_back(call: Caller, signing_sandbox: Sandbox) -> None:
    """A clock that a snapshot puts back makes nobody wait for the time that was undone."""
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
async def test_rate_limit_mistakes(signing_sandbox: Sandbox, options: dict[str, Any]) -> None:
    """A rate, burst or Retry-After that is none is a ValueError that names it."""
    with pytest.raises(ValueError, match=list(options)[-1]):
        signing_sandbox.rate_limit(**options)


# the log


async def test_the_log(call: Caller, signing_sandbox: Sandbox) -> None:
    """Every request is there, with operation, method, path, status and time; secrets are not."""
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


async def test_the_log_knows_no_states(call: Caller, signing_sandbox: Sandbox) -> None:
    """A browser's Referer names the consent page with its state: the log keeps the page alone."""
    await call("GET", f"{API}/me", headers={"Referer": "http://127.0.0.1:1/oauth/authorize?state=st4te&client_id=x"})
    assert signing_sandbox.requests[0].headers["Referer"] == "http://127.0.0.1:1/oauth/authorize"


@pytest.mark.signing_sandbox(keep_requests=3)
async def test_the_log_is_bounded(call: Caller, signing_sandbox: Sandbox) -> None:
    """Only the last requests are kept."""
    for n in range(5):
        await call("GET", f"/{n}")
    assert [record.path for record in signing_sandbox.requests] == ["/2", "/3", "/4"]
