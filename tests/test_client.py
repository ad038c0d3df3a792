"""The client as a whole: its settings, its session, its views, its end; and every operation, cancelled anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from signing_async import (
    Assumptions,
    ClientClosed,
    ConfigurationError,
    FileTokenStore,
    InvalidRequest,
    MemoryTokenStore,
    OAuth,
    RefreshRejected,
    RetryPolicy,
    SigningCancelled,
    SigningClient,
    SigningState,
    Timeouts,
    Token,
    WaitTimeout,
)
from signing_async.sandbox import Profile, Sandbox
from signing_async.webhooks import Receiver, Wakeups, WebhookVerifier, aiohttp_handler
from tests.pdfs import make_pdf
from tests.servers import serving

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


# Settings


_STRAY = (
    "https://tenant.example.com\\",
    "https://tenant\\.example.com",
    "https:\\\\tenant.example.com",
    "https://ten\tant.example.com",
    "https://tenant.example.com\n",
    " https://tenant.example.com",
    "https://tenant.example.com\x00",
    "https://tenant.example.com\u2028",
)
_NO_HOST = (
    "https://tenant.example.com:0",
    "http://127.0.0.1:0",
    "https://tenant%00.example.com",
    "https://tenant..example.com",
    "https://" + "a" * 64 + ".example.com",
    "https://.",
    'https://tenant".example.com',
    "https://ten\u200bant.example.com",
    "https://[::1]x",
    "https://[v1.a]",
    "https://\ud800.example.com",
)


@pytest.mark.parametrize(
    ("base_url", "said"),
    [
        ("http://tenant.example.com", "must be https"),
        ("ftp://tenant.example.com", "must be an origin"),
        ("tenant.example.com", "must be an origin"),
        ("https://", "must be an origin"),
        ("https://tenant.example.com/api", "without path"),
        ("https://tenant.example.com?x=1", "without path"),
        ("https://me:secret@tenant.example.com", "user name or a password"),
        ("https://me:secret@[", "user name or a password"),
        ("https://tenant.example.com:port", "not a URL"),
        ("https://[", "not a URL"),
        ("http://127.0.0.1.example.com", "must be https"),
        *((address, "white space, backslashes or control") for address in _STRAY),
        *((address, "no usable host and port") for address in _NO_HOST),
        (None, "not a URL"),
        (5, "not a URL"),
    ],
)
def test_base_urls_that_are_refused(base_url: str, said: str) -> None:
    """The error names base_url, and never shows a password in it."""
    with pytest.raises(ConfigurationError, match=rf"base_url.*{said}") as caught:
        SigningClient(base_url, "token")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "base_url",
    [
        "https://tenant.example.com",
        "https://tenant.example.com:443/",
        "https://TENANT.example.com:8443",
        "http://localhost:8080",
        "http://app.localhost",
        "http://127.8.9.10:1",
        "http://[::1]:8080",
        "https://example.com.",
        "https://å_ä-ö.example.com:",
    ],
)
def test_base_urls_that_are_taken(base_url: str) -> None:
    """HTTPS anywhere, plain HTTP on loopback."""
    assert "example.com" in repr(SigningClient(base_url, "token")) or "http://" in repr(
        SigningClient(base_url, "token")
    )


@pytest.mark.parametrize("auth", ["", "with space", "line\nbreak", "ünicode", None, 5, b"bytes"])
def test_auth_that_is_refused(auth: str) -> None:
    """A token that cannot be sent is refused when the client is made, without showing it."""
    with pytest.raises(ConfigurationError) as caught:
        SigningClient("https://tenant.example.com", auth)
    assert not auth or str(auth) not in str(caught.value)


def test_tokens_of_another_origin_are_refused() -> None:
    """A token goes to the tenant that it is for, and nowhere else."""
    oauth = OAuth("https://one.example.com", client_id="x", client_secret="y", redirect_uri="z")
    with pytest.raises(ConfigurationError, match=r"for https://one\.example\.com, not for https://two\.example\.com"):
        SigningClient("https://two.example.com", oauth)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"retry": None}, "retry: must be RetryPolicy, not None"),
        ({"retry": 3}, "retry: must be RetryPolicy, not 3"),
        ({"assumptions": {}}, "assumptions: must be Assumptions, not {}"),
        ({"on_attempt": 5}, "on_attempt: must be callable, not 5"),
        ({"session": "x"}, "session: must be an aiohttp.ClientSession, not str"),
        ({"timeout": "5"}, "timeout: call must be seconds above 0, not '5'"),
    ],
)
def test_settings_are_checked_at_once(settings: dict[str, object], said: str) -> None:
    """When the client is made, and not at the first call, and by name."""
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        SigningClient("https://tenant.example.com", "token", **settings)  # type: ignore[arg-type]  # the point


def test_timeout_is_a_number_or_timeouts() -> None:
    """A number bounds every call; the error names what is wrong."""
    with pytest.raises(ConfigurationError, match="timeout: call must be seconds above 0, not -1"):
        SigningClient("https://tenant.example.com", "token", timeout=-1)


def test_from_env_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two variables are enough."""
    monkeypatch.setenv("SIGNING_BASE_URL", "https://tenant.example.com")
    monkeypatch.setenv("SIGNING_ACCESS_TOKEN", "token")
    assert repr(SigningClient.from_env()) == "SigningClient('https://tenant.example.com')"


async def test_from_env_with_an_app(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Client id and secret, and the file that holds the token."""
    app = sandbox.register_app(redirect_uri="http://127.0.0.1:1/cb")
    store = FileTokenStore(tmp_path / "token.json")
    await store.save(Token(sandbox.access_token()))
    monkeypatch.delenv("SIGNING_ACCESS_TOKEN", raising=False)
    for name, value in {
        "SIGNING_BASE_URL": sandbox.base_url,
        "SIGNING_CLIENT_ID": app.client_id,
        "SIGNING_CLIENT_SECRET": app.client_secret,
        "SIGNING_REDIRECT_URI": app.redirect_uri,
        "SIGNING_TOKEN_FILE": str(tmp_path / "token.json"),
    }.items():
        monkeypatch.setenv(name, value)
    async with SigningClient.from_env(retry=QUICK) as client:
        assert (await client.me()).email


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "SIGNING_BASE_URL is not set"),
        ({"SIGNING_BASE_URL": "https://t.example.com"}, "neither SIGNING_ACCESS_TOKEN nor SIGNING_CLIENT_ID"),
        ({"SIGNING_BASE_URL": "https://t.example.com", "SIGNING_CLIENT_ID": "x"}, "SIGNING_CLIENT_SECRET is not set"),
    ],
)
def test_from_env_says_what_is_missing(given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name."""
    for name in [name for name in os.environ if name.startswith("SIGNING_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=said):
        SigningClient.from_env()


# The session


async def test_a_given_session_is_shared_and_stays_open(sandbox: Sandbox) -> None:
    """Many clients use it, none closes it, and each sends its own token."""
    async with aiohttp.ClientSession() as session:
        for number in range(3):
            user = sandbox.add_user(f"User {number}", f"u{number}@example.com", tenant=f"tenant {number}")
            async with SigningClient(sandbox.base_url, sandbox.access_token(user=user), session=session) as client:
                assert (await client.me()).email == f"u{number}@example.com"
        assert not session.closed
    with pytest.raises(ClientClosed, match="session"):
        await SigningClient(sandbox.base_url, "token", session=session).me()


async def test_thousands_of_clients_on_one_session(sandbox: Sandbox) -> None:
    """They cost no connections, and nothing complains when they are dropped unclosed."""
    async with aiohttp.ClientSession() as session:
        token = sandbox.access_token()
        clients = [SigningClient(sandbox.base_url, token, session=session) for _ in range(3000)]
        assert (await clients[-1].me()).email
        del clients
        gc.collect()


async def test_settings_of_a_given_session_do_no_harm(sandbox: Sandbox) -> None:
    """raise_for_status, a time-out and headers of its own do not change what the client does."""
    async with aiohttp.ClientSession(
        raise_for_status=True, timeout=aiohttp.ClientTimeout(total=60), headers={"Authorization": "Bearer other"}
    ) as session:
        client = SigningClient(sandbox.base_url, sandbox.access_token(), session=session, retry=QUICK)
        sandbox.faults.add("me", "503")
        assert (await client.me()).email


async def test_traces_see_the_requests(sandbox: Sandbox) -> None:
    """trace_configs of the caller's session work."""
    seen: list[str] = []
    trace = aiohttp.TraceConfig()

    async def on_end(session: aiohttp.ClientSession, context: object, params: aiohttp.TraceRequestEndParams) -> None:
        seen.append(f"{params.method} {params.url.path} {params.response.status}")

    trace.on_request_end.append(on_end)
    async with aiohttp.ClientSession(trace_configs=[trace]) as session:
        client = SigningClient(sandbox.base_url, sandbox.access_token(), session=session)
        signing = await client.signings.create(name="x", language="EN")
        await client.documents.upload(signing, make_pdf(), "a.pdf")
    assert seen == ["POST /api/1.0/signings 201", f"POST /api/1.0/signings/{signing.id}/documents 201"]


async def test_opentelemetry_sees_the_requests(sandbox: Sandbox) -> None:
    """OpenTelemetry's instrumentation of aiohttp gives a span for each request of the client's own session."""
    from opentelemetry.instrumentation.aiohttp_client import AioHttpClientInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    AioHttpClientInstrumentor().instrument(tracer_provider=provider)
    try:
        async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=QUICK) as client:
            sandbox.faults.add("me", "503")
            await client.me()
    finally:
        AioHttpClientInstrumentor().uninstrument()
        provider.shutdown()
    spans = exporter.get_finished_spans()
    assert len(spans) == 2
    assert all(span.name == "GET" for span in spans)


async def test_a_client_that_is_forgotten_is_told_of(sandbox: Sandbox) -> None:
    """ResourceWarning, with the client's name; a view says nothing."""
    client = SigningClient(sandbox.base_url, sandbox.access_token())
    await client.me()
    view = client.with_options(timeout=5)
    session = client._shared.sessions.get()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del view
        gc.collect()
        assert not caught
        del client
        gc.collect()
    assert any("SigningClient" in str(one.message) for one in caught if one.category is ResourceWarning)
    await session.close()


async def test_a_client_that_was_never_used_needs_no_closing() -> None:
    """No session was made, so there is nothing to warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SigningClient("https://tenant.example.com", "token")
        gc.collect()


def test_a_client_belongs_to_one_loop() -> None:
    """Used in a second event loop, its own session cannot serve: that is said, not hung on."""

    async def first() -> SigningClient:
        client = SigningClient("http://127.0.0.1:9", "token", retry=RetryPolicy.none())
        client._shared.sessions.get()
        return client

    async def second(client: SigningClient) -> None:
        with pytest.raises(ConfigurationError, match="event loop"):
            await client.me()
        await client.aclose()

    client = asyncio.run(first())
    asyncio.run(second(client))


# Views and the end


async def test_views_share_all_but_their_options(sandbox: Sandbox, client: SigningClient) -> None:
    """A view has its own time-outs, retries and assumptions; the session is the client's."""
    view = client.with_options(
        timeout=Timeouts(call=5), retry=RetryPolicy.none(), assumptions=Assumptions(limit_param="limit")
    )
    assert (await view.me()) is not None
    assert view._shared is client._shared
    async with view:
        pass
    with pytest.raises(ClientClosed):
        await client.me()


async def test_after_aclose(sandbox: Sandbox, client: SigningClient) -> None:
    """Every operation raises ClientClosed; closing again is fine."""
    view = client.with_options(timeout=5)
    await client.me()
    await client.aclose()
    await client.aclose()
    for one in (client, view):
        with pytest.raises(ClientClosed):
            await one.me()
        with pytest.raises(ClientClosed):
            await one.signings.list()
        with pytest.raises(ClientClosed):
            await one.documents.upload("id", make_pdf())
        with pytest.raises(ClientClosed):
            await one.recipients.remind_pending("id")


# Arguments


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        ({"name": ""}, ["name: must be a non-empty string, got ''"]),
        ({"name": 5}, ["name: must be a non-empty string, got 5"]),
        ({"language": "FI"}, ["language: must be EN or SV, got 'FI'"]),
        ({"language": None}, ["language: must be EN or SV, got None"]),
        ({"signing_order": "random"}, ["signing_order: must be sequential or parallel, got 'random'"]),
        ({"message": 5}, ["message: must be a string, got 5"]),
        ({"message": "x" * 401}, [f"message: must be at most 400 characters, got 401: '{'x' * 40}'..."]),
        (
            {"name": " ", "language": "xx"},
            ["name: must be a non-empty string, got ' '", "language: must be EN or SV, got 'xx'"],
        ),
    ],
)
async def test_limits_of_create_are_checked_before_sending(
    sandbox: Sandbox, client: SigningClient, arguments: dict[str, object], problems: list[str]
) -> None:
    """All problems at once, each naming the field, the limit and the value; nothing is sent."""
    with pytest.raises(InvalidRequest) as caught:
        await client.signings.create(**{"name": "x", "language": "EN", **arguments})  # type: ignore[arg-type]  # the point
    assert list(caught.value.problems) == problems
    assert sandbox.requests == []


async def test_limits_are_not_checked_too_strictly(client: SigningClient) -> None:
    """What the service takes is let through: exactly 400 characters, of any kind."""
    signing = await client.signings.create(name="x", language="SV", signing_order="sequential", message="å" * 400)
    assert signing.message == "å" * 400


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"email": ""}, "email: must be an e-mail address, got ''"),
        ({"email": "nobody"}, "email: must be an e-mail address, got 'nobody'"),
        ({"email": None}, "email: must be an e-mail address, got None"),
        ({"first_name": ""}, "first_name: must be a non-empty string, got ''"),
        ({"signing_method": 5}, "signing_method: must be a non-empty string, got 5"),
        ({"order": 0}, "order: must be an integer of at least 1, got 0"),
        ({"order": True}, "order: must be an integer of at least 1, got True"),
        ({"extra": {"email": "x"}}, "extra: pass email as an argument of its own"),
        ({"extra": {1: 2}}, "extra: must be a mapping with string keys, got {1: 2}"),
        ({"extra": ["phone"]}, "extra: must be a mapping with string keys, got ['phone']"),
        ({"extra": {"phone": object}}, "extra: cannot encode as JSON"),
        ({"extra": {"phone": float("nan")}}, "extra: cannot encode as JSON"),
    ],
)
async def test_recipients_are_checked_before_sending(
    sandbox: Sandbox, client: SigningClient, arguments: dict[str, object], problem: str
) -> None:
    """The error names the field and the value; nothing is sent."""
    with pytest.raises(InvalidRequest) as caught:
        await client.recipients.add("id", **{"email": "a@example.com", **arguments})  # type: ignore[arg-type]  # the point
    assert str(caught.value).startswith(problem)
    assert sandbox.requests == []


@pytest.mark.parametrize("bad", ["", " ", ".", "..", None, 5, "\ud800"])
async def test_ids_are_checked(sandbox: Sandbox, client: SigningClient, bad: str) -> None:
    """An id that would lead elsewhere, or nowhere, is refused by its name."""
    with pytest.raises(InvalidRequest, match="signing_id"):
        await client.signings.get(bad)
    with pytest.raises(InvalidRequest, match="recipient_id"):
        await client.recipients.remind("id", bad)
    with pytest.raises(InvalidRequest, match="document_id"):
        await client.documents.read_signed("id", bad)
    assert sandbox.requests == []


async def test_ids_are_encoded(sandbox: Sandbox, client: SigningClient) -> None:
    """A slash or a question mark in an id stays in its segment."""
    with pytest.raises(Exception, match="404"):
        await client.signings.get("../me?x=/#")
    assert [record.operation for record in sandbox.requests] == ["signings.get"]


# Reminders and waiting


async def test_remind_pending(sandbox: Sandbox, client: SigningClient) -> None:
    """Those who have not finished are reminded; one failure does not stop the rest."""
    signing = await client.signings.create(name="x", language="EN", signing_order="parallel")
    await client.documents.upload(signing, make_pdf(), "a.pdf")
    people = [await client.recipients.add(signing, email=f"p{n}@example.com", order=n) for n in (1, 2, 3)]
    await client.signings.send(signing)
    await sandbox.sign(people[0].id)
    sandbox.faults.add("recipients.remind", "drop-before-commit")
    first, second = await client.recipients.remind_pending(signing)
    assert (first.recipient.id, type(first.error).__name__) == (people[1].id, "OutcomeUnknown")
    assert (second.recipient.id, second.error) == (people[2].id, None)
    reminded = [one.recipient_id for one in sandbox.notifications if one.kind == "reminder"]
    assert reminded == [people[2].id]


async def test_who_is_pending_can_be_told() -> None:
    """The field of completion is an assumption."""
    async with Sandbox(profile=Profile(recipient_completed_field="signed_at")) as sandbox:
        for fields, expected in ((("signed_at",), 1), (("no_such_field",), 2)):
            assumptions = Assumptions(recipient_done_fields=fields)
            async with SigningClient(sandbox.base_url, sandbox.access_token(), assumptions=assumptions) as client:
                signing = await client.signings.create(name="x", language="EN")
                await client.documents.upload(signing, make_pdf(), "a.pdf")
                people = [await client.recipients.add(signing, email=f"p{n}@example.com", order=n) for n in (1, 2)]
                await client.signings.send(signing)
                await sandbox.sign(people[0].id)
                assert len(await client.recipients.remind_pending(signing)) == expected


async def test_waiting_for_completion(sandbox: Sandbox, client: SigningClient) -> None:
    """It ends when everyone has signed, an outage on the way notwithstanding."""
    signing = await client.signings.create(name="x", language="EN")
    await client.documents.upload(signing, make_pdf(), "a.pdf")
    await client.recipients.add(signing, email="a@example.com", order=1)
    await client.signings.send(signing)
    waiting = asyncio.create_task(client.signings.wait_until_completed(signing, poll=0.02, max_poll=0.05))
    await asyncio.sleep(0.05)
    sandbox.faults.add("signings.get", "503", times=12)
    await asyncio.sleep(0.1)
    await sandbox.complete(signing.id)
    done = await asyncio.wait_for(waiting, 10)
    assert done.state is SigningState.COMPLETED
    assert all(document.completed_at for document in done.documents)


@pytest.mark.parametrize("status", [503, 429, 400])
async def test_waiting_while_no_token_can_be_had(status: int) -> None:
    """An outage of the token endpoint is waited out like any other; a refresh token that is refused ends the wait."""
    statuses = [status, 200]

    async def answer(request: web.Request) -> web.Response:
        if request.path != "/api/oauth/token":
            return web.json_response({"id": "s1", "is_completed": True})
        return web.json_response({"access_token": "new", "error": "invalid_grant"}, status=statuses.pop(0))

    store = MemoryTokenStore(Token("old", "refresh", expires_at=1))
    redirect = "https://app.example.com/"
    async with (
        serving(answer) as server,
        OAuth(
            server.origin,
            client_id="c",
            client_secret="s",
            redirect_uri=redirect,
            store=store,
            retry=RetryPolicy.none(),
        ) as oauth,
        SigningClient(server.origin, oauth) as client,
    ):
        waiting = client.signings.wait_until_completed("s1", poll=0.02)
        if status == 400:
            with pytest.raises(RefreshRejected):
                await waiting
        else:
            assert (await waiting).state is SigningState.COMPLETED


async def test_a_webhook_wakes_who_waits(unused_tcp_port: int) -> None:
    """Completion is seen when its event comes, long before the next poll."""
    wakeups = Wakeups()
    receiver = Receiver(WebhookVerifier("whsec"), wakeups.publish)
    app = web.Application()
    app.router.add_post("/hook", aiohttp_handler(receiver))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    url = f"http://127.0.0.1:{unused_tcp_port}/hook"
    async with (
        Sandbox(webhook_url=url, webhook_secret="whsec") as sandbox,
        SigningClient(sandbox.base_url, sandbox.access_token()) as client,
    ):
        signing = await client.signings.create(name="x", language="EN")
        await client.documents.upload(signing, make_pdf(), "a.pdf")
        await client.recipients.add(signing, email="a@example.com", order=1)
        await client.signings.send(signing)
        wait = client.signings.wait_until_completed(signing, poll=600, max_poll=600, wakeups=wakeups)
        waiting = asyncio.create_task(wait)
        while not sandbox.requests_of("signings.get"):
            await asyncio.sleep(0.01)
        await sandbox.complete(signing.id)
        assert (await asyncio.wait_for(waiting, 20)).state is SigningState.COMPLETED
    await runner.cleanup()


async def test_waiting_for_what_is_cancelled(sandbox: Sandbox, client: SigningClient) -> None:
    """SigningCancelled carries the signing."""
    signing = await client.signings.create(name="x", language="EN")
    await sandbox.cancel(signing.id)
    with pytest.raises(SigningCancelled) as caught:
        await client.signings.wait_until_completed(signing)
    assert caught.value.signing.id == signing.id


async def test_a_signing_whose_id_has_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """An id comes from the service: no line of a log or of an error begins inside of it."""
    async with SigningClient("http://127.0.0.1:1", "token", retry=RetryPolicy.none()) as client:
        with pytest.raises(WaitTimeout, match=r"^signing a b was not completed within 0.1 s$"):
            await client.signings.wait_until_completed("a\n\x1b[b".replace("[", ""), timeout=0.1, poll=0.02)
    assert "polling of signing a b continues after" in caplog.text


async def test_tenants_on_one_session_keep_their_connections() -> None:
    """Calls to one tenant leave the connections alone that wait for another."""
    ports: list[object] = []

    async def answer(request: web.Request) -> web.Response:
        ports.append(request.transport.get_extra_info("peername") if request.transport else None)
        return web.json_response({"id": request.host})

    async with serving(answer) as one, serving(answer) as other, aiohttp.ClientSession() as session:
        clients = [SigningClient(server.origin, "token", session=session) for server in (one, other)]
        for client, server in [*zip(clients, (one, other), strict=True)] * 3:
            assert (await client.me()).id == server.origin.removeprefix("http://")
    assert len(ports) == 6
    assert len(set(ports)) == 2


async def test_waiting_in_vain(sandbox: Sandbox, client: SigningClient) -> None:
    """WaitTimeout is a TimeoutError, and carries the last state seen."""
    signing = await client.signings.create(name="x", language="EN")
    with pytest.raises(WaitTimeout, match=r"not completed within 0\.15 s") as caught:
        await client.signings.wait_until_completed(signing.id, timeout=0.15, poll=0.03)
    assert caught.value.signing.state is SigningState.DRAFT
    assert isinstance(caught.value, TimeoutError)
    for name in ("timeout", "poll", "max_poll"):
        with pytest.raises(InvalidRequest, match=rf"^{name}: must be a number above 0, got 0"):
            await client.signings.wait_until_completed(signing, **{name: 0})


# Cancellation

Operate = Callable[[SigningClient, str, Path], Awaitable[object]]


async def _page_through(client: SigningClient, signing: str, folder: Path) -> None:
    async for _ in client.signings.list(limit=1):
        pass


async def _stream(client: SigningClient, signing: str, folder: Path) -> None:
    document = (await client.signings.get(signing)).documents[0]
    async with client.documents.stream_signed(signing, document) as chunks:
        async for _ in chunks:
            pass
    await client.documents.read_signed(signing, document)
    await client.recipients.list(signing)


async def _download(client: SigningClient, signing: str, folder: Path) -> None:
    document = (await client.signings.get(signing)).documents[0]
    await client.documents.download_signed(signing, document, folder / "sealed.pdf")


async def _draft_and_send(client: SigningClient, signing: str, folder: Path) -> None:
    draft = await client.signings.create(name="x", language="EN")
    await client.documents.upload(draft, folder / "source.pdf")
    person = await client.recipients.add(draft, email="a@example.com", order=1)
    await client.signings.send(draft)
    await client.recipients.remind(draft, person)
    await client.recipients.remind_pending(draft)


async def _wait(client: SigningClient, signing: str, folder: Path) -> None:
    await client.me()
    await client.signings.wait_until_completed(signing)


@pytest.mark.parametrize("operate", [_draft_and_send, _page_through, _stream, _download, _wait])
@pytest.mark.parametrize("trouble", [None, "503", "drop-after-commit"])
async def test_cancelled_anywhere_nothing_leaks(
    sandbox: Sandbox, tmp_path: Path, operate: Operate, trouble: str | None
) -> None:
    """Cancelled at many points, no operation leaves a connection in use, a task, an open file or a temporary one."""
    (tmp_path / "source.pdf").write_bytes(make_pdf(50_000))
    async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=QUICK) as client:
        signing = await client.signings.create(name="x", language="EN")
        await client.signings.create(name="y", language="EN")
        await client.documents.upload(signing, tmp_path / "source.pdf")
        await client.recipients.add(signing, email="a@example.com", order=1)
        await client.signings.send(signing)
        await sandbox.complete(signing.id)
        await operate(client, signing.id, tmp_path)
        (tmp_path / "sealed.pdf").unlink(missing_ok=True)
        files = _open_files()
        if trouble is not None:
            sandbox.faults.add("*", trouble, times=None, probability=0.3, seed=3)
        for turns in (*range(1, 40), *range(40, 400, 9)):
            task = asyncio.create_task(operate(client, signing.id, tmp_path))  # type: ignore[arg-type]  # coroutines
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        sandbox.faults.clear()
        await _settle(lambda: not _own_tasks())
        assert not _own_tasks()
        connector = client._shared.sessions.get().connector
        assert connector is not None
        assert not connector._acquired  # aiohttp's own count of connections in use
        # A thread that writes a download may outlive its cancellation by a moment, and cleans up behind itself.
        await _settle(lambda: {path.name for path in tmp_path.iterdir()} <= {"source.pdf", "sealed.pdf"})
        assert {path.name for path in tmp_path.iterdir()} <= {"source.pdf", "sealed.pdf"}
        await connector.close()
        await _settle(lambda: _open_files() <= files)
        assert _open_files() <= files


def _own_tasks() -> list[str]:
    """The tasks of the package that are still there: the sandbox has its own, of aiohttp."""
    coroutines = [str(task.get_coro()) for task in asyncio.all_tasks()]
    return [one for one in coroutines if "signing_async/" in one and "sandbox" not in one] + [
        task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("signing_async")
    ]


def _open_files() -> int:
    """Files, and not sockets: connections that wait in the pool are no leak."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    return sum(not link.startswith("socket:") and "sandbox" not in link for link in links)


async def _settle(done: Callable[[], bool]) -> None:
    for _ in range(200):
        if done():
            return
        await asyncio.sleep(0.01)
