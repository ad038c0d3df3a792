"""One call from outside: deadlines, the gate, tokens that expire, redirects, hostile answers, what is told of it."""

from __future__ import annotations

import asyncio
import collections
import email.utils
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from signing_async import (
    APIError,
    Assumptions,
    Attempt,
    ClientClosed,
    ConfigurationError,
    DecodeError,
    Forbidden,
    InvalidRequest,
    MemoryTokenStore,
    NotFound,
    OAuth,
    OutcomeUnknown,
    OutcomeUnknownTimeout,
    RateLimited,
    RequestTimeout,
    RetryPolicy,
    ServerError,
    SigningClient,
    Timeouts,
    Token,
    TransportError,
    Unauthorized,
)
from signing_async.sandbox import Profile, Sandbox
from signing_async.transport import wire
from tests.pdfs import make_pdf
from tests.servers import answering, serving, talking

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


async def _raw(raw: bytes, **options: object) -> object:
    async with answering(raw) as origin, SigningClient(origin, "token", retry=QUICK, **options) as client:  # type: ignore[arg-type]  # passed on
        return await client.me()


# Reads under faults


@pytest.mark.parametrize(
    "kind", ["500", "503", "502-html", "drop-before-commit", "drop-after-commit", "truncate", "429"]
)
async def test_a_read_is_repeated(sandbox: Sandbox, client: SigningClient, kind: str) -> None:
    """Whatever passing trouble a read meets, it is made again."""
    sandbox.faults.add("me", kind, times=2, **({"retry_after": 0} if kind == "429" else {}))
    assert (await client.me()).email == "user@sandbox.example"


@pytest.mark.parametrize(("kind", "error"), [("503", ServerError), ("truncate", TransportError), ("429", RateLimited)])
async def test_attempts_end(sandbox: Sandbox, client: SigningClient, kind: str, error: type[Exception]) -> None:
    """After the policy's attempts the last error is raised, and says how many there were."""
    sandbox.faults.add("me", kind, times=None, **({"retry_after": 0} if kind == "429" else {}))
    with pytest.raises(error, match="3 attempts were made"):
        await client.with_options(retry=RetryPolicy(max_attempts=3, base_delay=0.01)).me()
    assert len(sandbox.requests_of("me")) == 3


async def test_an_error_that_stays_is_raised_at_once(sandbox: Sandbox, client: SigningClient) -> None:
    """A 404 is no passing trouble."""
    with pytest.raises(NotFound) as caught:
        await client.signings.get("00000000-0000-4000-8000-000000000000")
    assert len(sandbox.requests_of("signings.get")) == 1
    assert caught.value.request_id
    assert caught.value.request_id in str(caught.value)


async def test_nothing_listens() -> None:
    """A refused connection is tried again, then told as such, with host and port."""
    async with SigningClient("http://127.0.0.1:9", "token", retry=QUICK) as client:
        with pytest.raises(TransportError, match=r"no connection could be made.*127\.0\.0\.1:9") as caught:
            await client.me()
        assert caught.value.attempts == 5
        with pytest.raises(TransportError, match="no connection"):
            await client.signings.send("id")
        with pytest.raises(TransportError, match="no connection"):
            await client.recipients.remind("id", "recipient")


# Deadlines and the gate


async def test_a_deadline_bounds_the_whole_call(sandbox: Sandbox, client: SigningClient) -> None:
    """An answer that never comes ends in RequestTimeout, which is also a TimeoutError."""
    sandbox.faults.add("me", "hang", times=None)
    began = time.monotonic()
    with pytest.raises(RequestTimeout, match=r"within its deadline of 0\.3 s") as caught:
        await client.with_options(timeout=0.3).me()
    assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - began < 5
    assert caught.value.__context__ is None or "aiohttp" not in type(caught.value.__context__).__module__


async def test_a_wait_past_the_deadline_is_refused(sandbox: Sandbox, client: SigningClient) -> None:
    """A Retry-After that the deadline does not allow is raised at once, on the error."""
    sandbox.faults.add("me", "429", retry_after=20)
    began = time.monotonic()
    with pytest.raises(RateLimited, match="deadline leaves no time") as caught:
        await client.with_options(timeout=5).me()
    assert caught.value.retry_after == 20
    assert time.monotonic() - began < 4


async def test_a_retry_after_above_the_cap_is_refused(sandbox: Sandbox, client: SigningClient) -> None:
    """The policy's cap bounds every wait."""
    sandbox.faults.add("me", "503", retry_after=3600)
    with pytest.raises(ServerError, match="longer than the policy's 60 s") as caught:
        await client.me()
    assert caught.value.retry_after == 3600


async def test_retry_after_is_never_undercut(sandbox: Sandbox, client: SigningClient) -> None:
    """The repeat comes no earlier than the service said, in seconds or as a date."""
    sandbox.faults.add("me", "429", retry_after=1)
    await client.me()
    first, second = sandbox.requests_of("me")
    assert (second.received_at - first.received_at).total_seconds() >= 0.99


async def test_a_429_holds_back_every_call(sandbox: Sandbox, client: SigningClient) -> None:
    """While the gate is closed no call of the client is sent, nor any of its views."""
    sandbox.faults.add("me", "429", retry_after=1)
    first = asyncio.create_task(client.me())
    while not sandbox.requests_of("me"):
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)
    await asyncio.gather(first, *(client.with_options(timeout=30).me() for _ in range(5)))
    refused, *others = sandbox.requests_of("me")
    assert len(others) == 6
    assert all((other.received_at - refused.received_at).total_seconds() >= 0.99 for other in others)


async def test_a_call_that_cannot_wait_for_the_gate_is_not_sent(sandbox: Sandbox, client: SigningClient) -> None:
    """It raises RateLimited at once, saying for how long the gate stays closed."""
    sandbox.faults.add("me", "429", retry_after=30)
    with pytest.raises(RateLimited):
        await client.with_options(timeout=10).me()
    began = time.monotonic()
    with pytest.raises(RateLimited, match="nothing was sent") as caught:
        await client.with_options(timeout=10).me()
    assert time.monotonic() - began < 2
    assert caught.value.retry_after is not None
    assert 20 < caught.value.retry_after <= 30
    assert len(sandbox.requests_of("me")) == 1


async def test_one_endpoint_that_asks_for_a_day_does_not_stop_the_others(
    sandbox: Sandbox, client: SigningClient
) -> None:
    """A wait beyond the policy's cap ends that call; the limiter only slows down, as after any 429."""
    sandbox.faults.add("recipients.remind", "429", retry_after=86400)
    with pytest.raises(RateLimited) as caught:
        await client.recipients.remind("s1", "r1")
    assert caught.value.retry_after == 86400
    async with asyncio.timeout(20):  # the default cap is 60 s
        await asyncio.gather(*(client.me() for _ in range(20)))


async def test_retry_after_of_ten_digits_is_not_taken_for_none(sandbox: Sandbox, client: SigningClient) -> None:
    """The call ends with the number instead of repeating at once."""
    sandbox.faults.add("me", "429", retry_after="1000000000")
    with pytest.raises(RateLimited) as caught:
        await client.me()
    assert caught.value.retry_after == 1e9
    assert len(sandbox.requests_of("me")) == 1


async def test_upload_cancelled_while_it_waits_for_the_rate_limiter_leaves_nothing_open(
    sandbox: Sandbox, client: SigningClient
) -> None:
    """Nothing was sent: the next upload of that name is told apart as ever."""
    signing = await client.signings.create(name="x", language="EN")
    sandbox.faults.add("me", "429", retry_after=0.5)
    with pytest.raises(RateLimited):
        await client.with_options(retry=RetryPolicy.none()).me()
    upload = asyncio.create_task(client.documents.upload(signing, make_pdf(), "a.pdf"))
    while not client._tracker.signing(f"/api/1.0/signings/{signing.id}").documents.pending:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    upload.cancel()
    await asyncio.wait([upload])
    assert sandbox.requests_of("documents.upload") == []
    sandbox.faults.add("documents.upload", "500-after-commit")
    document = await client.documents.upload(signing, make_pdf(), "a.pdf")
    assert [one.id for one in sandbox.documents(signing.id)] == [document.id]


async def test_an_outage_is_not_made_worse(sandbox: Sandbox, client: SigningClient) -> None:
    """While everything fails, each call makes two requests on average, apart from the readings that reconcile it."""
    sandbox.faults.add("*", "503", times=None)
    calls = 150
    results = await asyncio.gather(
        *(client.me() for _ in range(calls // 2)),
        *(client.signings.send("00000000-0000-4000-8000-000000000000") for _ in range(calls // 2)),
        return_exceptions=True,
    )
    assert all(isinstance(result, ServerError | TransportError) for result in results)
    assert sum(request.operation != "signings.get" for request in sandbox.requests) <= 2 * calls
    with pytest.raises(ServerError, match="retry budget"):
        await client.me()
    sandbox.faults.clear()
    await client.me()


# Tokens


async def test_a_rejected_fixed_token(sandbox: Sandbox) -> None:
    """There is nothing to refresh it with: the service's 401 is raised, once."""
    async with SigningClient(sandbox.base_url, "wrong", retry=QUICK) as client:
        with pytest.raises(Unauthorized, match="HTTP 401 on me"):
            await client.me()
    assert len(sandbox.requests) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_an_expired_token_is_refreshed(status: int) -> None:
    """The call that met it goes on with the new one, an upload with its whole body."""
    profile = Profile(expired_token_status=status)
    assumptions = Assumptions(expired_token_statuses=status)
    once = RetryPolicy.none()
    async with (
        Sandbox(profile=profile) as sandbox,
        _authorized(sandbox) as oauth,
        SigningClient(sandbox.base_url, oauth, retry=once, assumptions=assumptions) as client,
    ):
        before = await oauth.access_token()
        sandbox.clock.advance(days=1)
        signing = await client.signings.create(name="x", language="EN")
        assert await oauth.access_token() != before
        sandbox.clock.advance(days=1)
        document = await client.documents.upload(signing, make_pdf(), "a.pdf")
        assert sandbox.document_bytes(document.id) == make_pdf()


async def test_a_token_that_is_rejected_twice(sandbox: Sandbox) -> None:
    """A refresh that does not help is not repeated for ever."""
    sandbox.faults.add("me", "expired-token", times=None)
    async with _authorized(sandbox) as oauth, SigningClient(sandbox.base_url, oauth, retry=QUICK) as client:
        with pytest.raises(Unauthorized):
            await client.me()
    assert len(sandbox.requests_of("me")) == 2


async def test_a_token_without_refresh(sandbox: Sandbox) -> None:
    """An OAuth that has only an access token raises the service's own 401."""
    app = sandbox.register_app(redirect_uri="http://127.0.0.1:1/cb")
    async with (
        OAuth(
            sandbox.base_url,
            client_id=app.client_id,
            client_secret=app.client_secret,
            redirect_uri=app.redirect_uri,
            store=MemoryTokenStore(Token("stale")),
        ) as oauth,
        SigningClient(sandbox.base_url, oauth) as client,
    ):
        with pytest.raises(Unauthorized):
            await client.me()


@asynccontextmanager
async def _authorized(sandbox: Sandbox) -> AsyncIterator[OAuth]:
    app = sandbox.register_app(redirect_uri="http://127.0.0.1:1/cb")
    async with OAuth(
        sandbox.base_url, client_id=app.client_id, client_secret=app.client_secret, redirect_uri=app.redirect_uri
    ) as oauth:
        await oauth.exchange(sandbox.authorize(app))
        yield oauth


# Redirects


async def test_a_get_follows_a_redirect_on_the_same_origin() -> None:
    """Absolute or relative, with its own query; the token goes along."""

    async def handle(request: web.Request) -> web.Response:
        if request.path == "/api/1.0/me":
            raise web.HTTPTemporaryRedirect("/api/1.0/elsewhere?who=me")
        if request.query.get("who") == "me":
            raise web.HTTPFound(f"http://{request.host}/final")
        return web.json_response({"id": "1", "authorization": request.headers["Authorization"]})

    async with serving(handle) as server, SigningClient(server.origin, "tok-en") as client:
        assert (await client.me()).extra == {"authorization": "Bearer tok-en"}


async def test_a_redirect_to_another_origin_is_refused() -> None:
    """The token goes nowhere else: not to another port, another scheme, nor by way of a user name in the address."""

    async def trap(request: web.Request) -> web.Response:
        return web.json_response({})

    target = ""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": target} if target else {})

    async with serving(trap) as other, serving(handle) as server, SigningClient(server.origin, "token") as client:
        inner = server.origin.removeprefix("http://")
        for address in (
            other.origin + "/x",
            other.origin.replace("http://", "//") + "/x",
            f"https://{inner}/x",
            f"http://{inner}@{other.origin.removeprefix('http://')}/x",
            "http://[",
            "javascript:alert(1)",
            "",
        ):
            target = address
            with pytest.raises(APIError, match="redirect to another origin is not followed") as caught:
                await client.me()
            assert caught.value.status == 302
        assert other.requests == []


async def test_redirects_end() -> None:
    """A loop of redirects is an error."""

    async def handle(request: web.Request) -> web.Response:
        raise web.HTTPFound("/api/1.0/me")

    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        with pytest.raises(APIError, match="more than 5 redirects"):
            await client.me()
        assert len(server.requests) == 6


async def test_a_write_follows_no_redirect() -> None:
    """A 307 of a POST is the error that it is."""

    async def handle(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/api/1.0/elsewhere")

    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        with pytest.raises(APIError, match="307"):
            await client.signings.create(name="x", language="EN")
        assert len(server.requests) == 1


# Hostile answers


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "empty"),
        (b"<html><title>Welcome</title>", "not JSON"),
        (b"\xff\xfe\x00", "not"),
        (b"[1, 2]", "expected an object"),
        (b"[" * 100_000, "not"),
    ],
)
async def test_a_success_that_cannot_be_read(body: bytes, said: str) -> None:
    """It is a DecodeError with the status and the request id, at once."""
    raw = b"HTTP/1.1 200 OK\r\nX-Request-Id: req_7\r\nContent-Length: %d\r\n\r\n" % len(body)
    with pytest.raises(DecodeError, match=said) as caught:
        await _raw(raw + body)
    assert (caught.value.status, caught.value.request_id) == (200, "req_7")
    assert "req_7" in str(caught.value)


async def test_an_answer_that_is_too_large() -> None:
    """It is read no further than the limit, and is no passing trouble."""
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + b" " * 5_000_000
    with pytest.raises(TransportError, match="larger than 1000 bytes"):
        await _raw(raw, assumptions=Assumptions(max_answer_bytes=1000))


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcd",
        b"HTTP/1.1 200 OK\r\nContent-Length: nonsense\r\n\r\n",
        b"garbage\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 8\r\n\r\nnot gzip",
    ],
)
async def test_a_broken_answer(raw: bytes) -> None:
    """It is a TransportError, after the attempts that it is worth."""
    with pytest.raises(TransportError) as caught:
        await _raw(raw)
    assert caught.value.attempts == 5


async def test_an_error_whose_body_breaks_off() -> None:
    """The status is what counts."""
    with pytest.raises(NotFound, match="404"):
        await _raw(b"HTTP/1.1 404 Not Found\r\nContent-Length: 100\r\n\r\n{")


async def test_an_endless_error_body() -> None:
    """Only its start is read."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=403)
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        with pytest.raises(Forbidden) as caught:
            await client.me()
    assert len(caught.value.body) == 64 * 1024


async def test_the_body_of_a_send_does_not_matter() -> None:
    """Its status says that it took effect; an answer that breaks off after that is still a success."""
    raw = b"HTTP/1.1 202 Accepted\r\nContent-Length: 100\r\n\r\n{"
    async with answering(raw) as origin, SigningClient(origin, "token", retry=RetryPolicy.none()) as client:
        await client.signings.send("id")


# What is told


async def test_the_hook_sees_every_attempt(sandbox: Sandbox, client: SigningClient) -> None:
    """Operation, attempt, status, seconds, request id, and the delay to come."""
    seen: list[Attempt] = []
    sandbox.faults.add("me", "503")
    # Two, since aiohttp repeats a GET by itself when a kept connection turns out to be closed.
    sandbox.faults.add("me", "drop-before-commit", times=2)
    await client.with_options(on_attempt=seen.append).me()
    assert [(one.operation, one.attempt, one.status) for one in seen] == [
        ("me", 1, 503),
        ("me", 2, None),
        ("me", 3, 200),
    ]
    assert [one.delay is None for one in seen] == [False, False, True]
    first, *_, last = sandbox.requests_of("me")
    assert [one.request_id for one in seen] == [first.id, None, last.id]
    assert "503" in (seen[0].error or "")
    assert seen[2].error is None
    assert all(one.seconds > 0 for one in seen)


async def test_a_hook_that_fails_harms_nothing(
    sandbox: Sandbox, client: SigningClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Its exception is logged, and the call goes on."""

    def hook(attempt: Attempt) -> None:
        raise RuntimeError("metrics are down")

    await client.with_options(on_attempt=hook).me()
    assert "metrics are down" in caplog.text


async def test_the_log_tells_the_same(
    sandbox: Sandbox, client: SigningClient, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for each attempt, at DEBUG, without the token."""
    sandbox.faults.add("me", "503")
    with caplog.at_level(logging.DEBUG, "signing_async"):
        await client.me()
    lines = [record.getMessage() for record in caplog.records if record.name == "signing_async"]
    assert len(lines) == 2
    assert lines[0].startswith("me attempt 1: 503 in ")
    assert "; again in " in lines[0]
    assert "request id" in lines[1]


async def test_dates_of_retry_after(sandbox: Sandbox) -> None:
    """A date is understood as well as seconds."""

    async def handle(request: web.Request) -> web.Response:
        if len(server.requests) == 1:
            later = email.utils.formatdate(time.time() + 2, usegmt=True)
            return web.Response(status=429, headers={"Retry-After": later})
        return web.json_response({"id": "1"})

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        began = time.monotonic()
        await client.me()
        assert time.monotonic() - began >= 0.9


async def test_a_session_that_has_credentials_of_its_own(sandbox: Sandbox) -> None:
    """A shared session that insists on other credentials is a configuration error, and nothing is sent."""
    import aiohttp

    async def refuse(request: object, handler: object) -> aiohttp.ClientResponse:
        raise ValueError("Cannot combine AUTHORIZATION header with AUTH argument")

    async with aiohttp.ClientSession(middlewares=[refuse]) as session:  # type: ignore[list-item]  # a stand-in
        client = SigningClient(sandbox.base_url, "token", session=session)
        with pytest.raises(ConfigurationError, match="Cannot combine"):
            await client.me()
    assert sandbox.requests == []


async def test_a_session_that_closes_in_the_middle(sandbox: Sandbox, client: SigningClient) -> None:
    """Calls under way when the client is closed end with an error of the package."""
    sandbox.faults.add("me", "hang", times=None)
    call = asyncio.create_task(client.me())
    while not sandbox.requests_of("me"):
        await asyncio.sleep(0.005)
    await client.aclose()
    with pytest.raises((ClientClosed, TransportError)):
        await call


async def test_timeouts_are_checked() -> None:
    """The error names which one and the value."""
    for settings in ({"call": 0}, {"transfer": -1}, {"connect": float("inf")}, {"call": "5"}, {"connect": True}):
        name = next(iter(settings))
        with pytest.raises(ConfigurationError, match=f"timeout: {name}"):
            Timeouts(**settings)  # type: ignore[arg-type]  # that is the point


# Deadlines in odd places


async def _never() -> AsyncIterator[bytes]:
    yield b"%PDF-1.7\n"
    await asyncio.sleep(3600)


async def test_a_source_that_stalls(sandbox: Sandbox, client: SigningClient) -> None:
    """Reading it is a part of the call."""
    signing = await client.signings.create(name="x", language="EN")
    with pytest.raises(RequestTimeout, match="before anything was sent"):
        await client.with_options(timeout=0.3).documents.upload(signing, _never(), "a.pdf")
    assert sandbox.requests_of("documents.upload") == []


async def test_a_source_that_takes_no_notice_of_the_deadline(sandbox: Sandbox, client: SigningClient) -> None:
    """Where it swallows its cancellation and goes on, nothing is sent all the same, and that is said."""
    signing = await client.signings.create(name="x", language="EN")

    async def stubborn() -> AsyncIterator[bytes]:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        yield make_pdf()

    with pytest.raises(RequestTimeout, match="before anything was sent") as caught:
        await client.with_options(timeout=0.3).documents.upload(signing, stubborn(), "a.pdf")
    assert not isinstance(caught.value, OutcomeUnknown)
    assert sandbox.requests_of("documents.upload") == []
    document = await client.documents.upload(signing, make_pdf(), "a.pdf")
    assert document.name == "a.pdf"


async def test_an_upload_that_waits_for_another_of_its_name(sandbox: Sandbox, client: SigningClient) -> None:
    """Its turn has to come within its own deadline; nothing was sent if it does not."""
    signing = await client.signings.create(name="x", language="EN")
    sandbox.faults.add("documents.upload", "hang")
    first = asyncio.create_task(client.documents.upload(signing, make_pdf(), "a.pdf"))
    while not sandbox.requests_of("documents.upload"):
        await asyncio.sleep(0.005)
    with pytest.raises(RequestTimeout, match="before anything was sent"):
        await client.with_options(timeout=0.3).documents.upload(signing, make_pdf(), "a.pdf")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_first_reading_that_hangs(sandbox: Sandbox, client: SigningClient) -> None:
    """What an upload has to read before it is within its deadline too."""
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as other:
        signing = await other.signings.create(name="x", language="EN")
    sandbox.faults.add("signings.get", "hang", times=None)
    with pytest.raises(RequestTimeout):
        await client.with_options(timeout=0.3).documents.upload(signing, make_pdf(), "a.pdf")
    assert sandbox.requests_of("documents.upload") == []


async def test_a_check_that_waits_for_another_ones_reading(sandbox: Sandbox, client: SigningClient) -> None:
    """It waits no longer than its own deadline, and is then an unknown outcome."""
    signing = await client.signings.create(name="x", language="EN")
    sandbox.faults.add("documents.upload", "500-after-commit", times=2)
    sandbox.faults.add("signings.get", "hang", times=None)
    patient = asyncio.create_task(client.documents.upload(signing, make_pdf(), "a.pdf"))
    while not sandbox.requests_of("signings.get"):
        await asyncio.sleep(0.005)
    began = time.monotonic()
    with pytest.raises(OutcomeUnknownTimeout, match="no time to find out"):
        await client.with_options(timeout=0.5).documents.upload(signing, make_pdf(), "b.pdf")
    assert time.monotonic() - began < 5
    patient.cancel()
    await asyncio.gather(patient, return_exceptions=True)


async def test_a_write_at_the_gate_has_its_whole_deadline(sandbox: Sandbox, client: SigningClient) -> None:
    """The time that is kept for a check is taken from what is left behind the gate."""
    signing = await client.signings.create(name="x", language="EN")
    await client.documents.upload(signing, make_pdf(), "a.pdf")
    await client.recipients.add(signing, email="a@example.com", order=1)
    sandbox.faults.add("me", "429", retry_after=2)
    with pytest.raises(RateLimited):
        await client.with_options(retry=RetryPolicy.none()).me()
    await client.with_options(timeout=2.6).signings.send(signing)
    assert sandbox.signing(signing.id).state == "sent"


async def test_a_refusal_before_a_slow_refresh_leaves_no_doubt(sandbox: Sandbox) -> None:
    """A 401 took no effect: a deadline that passes while the token is renewed is no unknown outcome."""
    async with _authorized(sandbox) as oauth, SigningClient(sandbox.base_url, oauth) as client:
        sandbox.clock.advance(days=2)
        sandbox.faults.add("oauth.token", "slow", seconds=2)
        with pytest.raises(RequestTimeout) as caught:
            await client.with_options(timeout=0.4).recipients.remind("s1", "r1")
        assert not isinstance(caught.value, OutcomeUnknown)


async def _hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("kind", "in_doubt"), [("500", True), ("drop-before-commit", True), ("429", False), ("expired-token", False)]
)
async def test_whether_an_attempt_is_in_doubt(sandbox: Sandbox, kind: str, in_doubt: bool) -> None:
    """The hook is told which attempts may have taken effect though they failed."""
    told: list[Attempt] = []
    async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=QUICK, on_attempt=told.append) as client:
        signing = await client.signings.create(name="Lease", language="EN")
        sandbox.faults.add("recipients.add", kind, **({"retry_after": 0} if kind == "429" else {}))
        with suppress(Unauthorized):
            await client.recipients.add(signing, email="anna@example.com")
    adding = [attempt.in_doubt for attempt in told if attempt.operation == "recipients.add"]
    assert adding[0] is in_doubt
    assert adding[1:] in ([], [False])


def _page(request: web.Request) -> web.Response:
    """What somebody in the way, such as a proxy that wants a login, says in the service's place."""
    return web.Response(text="\n<!DOCTYPE html><html>Please sign in</html>", content_type="text/html")


@pytest.mark.parametrize("is_draft", [True, False])
async def test_a_page_is_no_answer_to_a_sending(is_draft: bool) -> None:
    """Whatever its status: the signing is read, and it is sent if that says so. No second request is made."""

    async def handle(request: web.Request) -> web.Response:
        return _page(request) if request.method == "POST" else web.json_response({"id": "s1", "is_draft": is_draft})

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        if is_draft:
            with pytest.raises(DecodeError, match="a page of HTML"):
                await client.signings.send("s1")
        else:
            await client.signings.send("s1")
        with pytest.raises(OutcomeUnknown, match="a page of HTML"):
            await client.with_options(retry=RetryPolicy.none()).signings.send("s1")
    methods = [request.method for request in server.requests]
    assert [method for method, _ in itertools.groupby(methods)] == ["POST", "GET", "POST"]


async def test_a_page_is_no_answer_to_a_reminder() -> None:
    """Whether it went out is not known."""

    async def handle(request: web.Request) -> web.Response:
        return _page(request)

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        with pytest.raises(OutcomeUnknown, match="a page of HTML"):
            await client.recipients.remind("s1", "r1")
    assert len(server.requests) == 1


@pytest.mark.parametrize("text", ["", " ", "Sent"])
async def test_an_answer_that_only_bears_the_type_of_a_page(text: str) -> None:
    """Some frameworks give it to whatever has no other."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/html")

    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        await client.signings.send("s1")
    assert len(server.requests) == 1


async def test_a_status_whose_body_hangs_is_what_counts() -> None:
    """A success without a record ends the call; an error is raised by its status, with its request id."""
    head = b"HTTP/1.1 %s\r\nX-Request-Id: req_9\r\nContent-Length: 100\r\n\r\n{"
    async with answering(head % b"200 OK", then=_hang) as origin, SigningClient(origin, "token") as client:
        await client.with_options(timeout=20).recipients.remind("s1", "r1")
    async with answering(head % b"403 Forbidden", then=_hang) as origin, SigningClient(origin, "token") as client:
        with pytest.raises(Forbidden) as refused:
            await client.with_options(timeout=20).me()
        assert refused.value.request_id == "req_9"
    async with answering(head % b"200 OK", then=_hang) as origin, SigningClient(origin, "token") as client:
        with pytest.raises(RequestTimeout) as late:
            await client.with_options(timeout=0.3).me()
        assert (late.value.status, late.value.request_id) == (200, "req_9")


async def test_a_stream_that_trickles() -> None:
    """The time that is spent waiting for its chunks is bounded."""

    async def trickle(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    raw = b"HTTP/1.1 200 OK\r\nX-Request-Id: tok-secret-1234\r\nContent-Length: 100000\r\n\r\n%PDF-1.7\n"
    async with answering(raw, then=trickle) as origin, SigningClient(origin, "tok-secret-1234") as client:
        async with client.with_options(timeout=0.4).documents.stream_signed("s1", "d1") as chunks:
            with pytest.raises(RequestTimeout, match="did not arrive in time") as caught:
                [chunk async for chunk in chunks]
        assert caught.value.request_id == "[redacted]"


# Bytes that are no text


async def test_headers_that_are_no_text() -> None:
    """Bytes in a header that are no UTF-8 end in an error of the package."""
    moved = b"HTTP/1.1 302 Found\r\nLocation: /\xff\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(APIError, match="redirect"):
        await _raw(moved)
    for target in (b"/api/1.0/signings?c=\xff", b"\xff"):
        linked = b"HTTP/1.1 200 OK\r\nLink: <%s>; rel=next\r\nContent-Length: 2\r\n\r\n[]" % target
        async with answering(linked) as origin, SigningClient(origin, "token") as client:
            with pytest.raises(DecodeError, match="has a lone surrogate"):
                await client.signings.list()
    async with SigningClient("http://127.0.0.1:9", "token") as client:
        with pytest.raises(InvalidRequest, match="cursor"):
            client.signings.list(cursor="\ud800")


@pytest.mark.parametrize("bad", ["", ".", ".."])
async def test_an_id_that_leads_nowhere(bad: str) -> None:
    """A record whose id cannot be used is an answer that cannot be read."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"id": bad, "name": "x"})

    async with serving(handle) as server, SigningClient(server.origin, "token") as client:
        with pytest.raises(DecodeError, match="id: "):
            await client.signings.create(name="x", language="EN")


async def test_the_hook_is_not_told_of_an_earlier_answer(sandbox: Sandbox, client: SigningClient) -> None:
    """An attempt that was turned away at the gate has no status."""
    seen: list[Attempt] = []
    sandbox.faults.add("signings.list", "429", retry_after=30)
    sandbox.faults.add("me", "503", retry_after=0.3)
    watched = client.with_options(on_attempt=seen.append, timeout=5)
    call = asyncio.create_task(watched.me())
    while not seen:
        await asyncio.sleep(0.005)
    with pytest.raises(RateLimited):
        await client.with_options(timeout=5).signings.list()
    with pytest.raises(RateLimited):
        await call
    assert [(one.status, one.attempt) for one in seen] == [(503, 1), (None, 2)]


# Connections that wait in the pool


@asynccontextmanager
async def _talkative() -> AsyncIterator[str]:
    """A server that answers each request rightly, and a moment later says something that nobody asked for."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"id": "right"}')
            await asyncio.sleep(0.02)
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"id": "wrong"}')

    async with talking(talk) as origin:
        yield origin


async def _spoiled(session: aiohttp.ClientSession) -> None:
    """Wait until more has come than was asked for, on all connections that wait."""
    assert session.connector is not None
    for _ in range(500):
        waiting = [protocol for each in session.connector._conns.values() for protocol, _ in each]
        if waiting and all(protocol.should_close for protocol in waiting):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nothing came")


ODD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no check of certificates": {"ssl": False},
    "another name in the certificate": {"server_hostname": "other.example.com"},
    "a proxy": {"proxy": "{origin}"},
}


@pytest.mark.parametrize("odd", ODD)
async def test_what_nobody_asked_for_is_no_answer_whatever_else_the_session_does(odd: str) -> None:
    """A caller's own requests to the service, with settings of their own, do not hide the client's connections."""
    async with _talkative() as origin, aiohttp.ClientSession() as session:
        client = SigningClient(origin, "token", session=session)
        settings: dict[str, Any] = {key: origin if value == "{origin}" else value for key, value in ODD[odd].items()}
        async with session.get(origin, **settings) as response:
            await response.read()
        await _spoiled(session)
        for _ in range(3):
            assert (await client.me()).id == "right"
            await _spoiled(session)


async def test_what_nobody_asked_for_comes_through_a_proxy_too() -> None:
    """Connections to a session's own proxy are looked at as well."""
    async with _talkative() as proxy, aiohttp.ClientSession(proxy=proxy) as session:
        client = SigningClient("http://127.0.0.9:9", "token", session=session)
        for _ in range(3):
            assert (await client.me()).id == "right"
            await _spoiled(session)


class _Pool(collections.defaultdict[Any, Any]):
    """Counts how often somebody looks at all of it."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.looks += 1
        return super().__iter__()


async def test_a_client_looks_at_its_own_connections_only() -> None:
    """On a session with connections to many hosts a call costs no more than on one with a single host."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"id": "right"})

    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(answer)) for _ in range(20)]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        assert isinstance(session.connector, aiohttp.TCPConnector)
        pool = session.connector._conns = _Pool(collections.deque, session.connector._conns)
        clients = [SigningClient(server.origin, "token", session=session) for server in servers]
        for _ in range(2):
            for client in clients:
                await client.me()
        assert len(pool) == len(clients)
        pool.looks = 0
        for client in clients:
            await client.me()
        assert pool.looks == 0
        assert len(pool) == len(clients)


@pytest.mark.parametrize(
    "other",
    [
        {"host": "other.example.com"},
        {"port": 8443},
        {"is_ssl": False},
        {"ssl": False},
        {"proxy": URL("http://proxy.example.com")},
        {"server_hostname": "other.example.com"},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_which_connections_are_a_clients_own(other: dict[str, Any]) -> None:
    """Only what aiohttp's own key says of the same request is remembered as that."""
    url = URL("https://tenant.example.com/api")
    own = aiohttp.ClientRequest("GET", url, loop=asyncio.get_running_loop()).connection_key
    closed: list[str] = []

    def spoiled(name: str) -> tuple[Any, float]:
        return SimpleNamespace(should_close=True, close=lambda: closed.append(name)), 0.0

    pool = {own._replace(**other): [spoiled("other")]}
    session: Any = SimpleNamespace(connector=SimpleNamespace(_conns=pool))
    sessions = wire.Sessions(session)
    sessions.drop_spoiled(session, url)
    pool[own] = [spoiled("own")]
    closed.clear()
    sessions.drop_spoiled(session, url)
    assert "own" in closed
    closed.clear()
    sessions.drop_spoiled(session, url)
    assert closed == ["own"]
    del pool[own]  # while all of them are in use
    sessions.drop_spoiled(session, url)
    assert own not in pool
