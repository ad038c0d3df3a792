"""The client's options and arguments, waiting for completion, the session, views, and the end."""

from __future__ import annotations

import asyncio
import gc
import inspect
import re
import warnings
from functools import partial
from typing import Any
from unittest.mock import Mock

import aiohttp
import aioresponses.core
import pytest
from aiohttp import web

from signing_async import (
    Attempt,
    ClientClosed,
    ConfigurationError,
    FileTokenStore,
    InvalidRequest,
    MemoryTokenStore,
    NotFound,
    OAuth,
    RefreshRejected,
    RetryPolicy,
    SigningCancelled,
    SigningClient,
    SigningState,
    Tenants,
    Token,
    TransportError,
    WaitTimeout,
)
from signing_async.sandbox import Sandbox
from signing_async.webhooks import Receiver, Wakeups, WebhookVerifier, aiohttp_handler
from tests.pdfs import make_pdf
from tests.servers import serving

# Settings


@pytest.mark.parametrize(
    ("base_url", "said"),
    [
        ("tenant.example.com", "must be an origin"),
        ("https://tenant.example.com/api", "without path"),
        ("https://me:secret@tenant.example.com", "user name or a password"),
        ("https://tenant.example.com:port", "must be a URL"),
        ("http://127.0.0.1.example.com", "must be https"),
        ("https://tenant.example.com\\", "white space, backslashes or control"),
        ("https://tenant..example.com", "must have a valid host and port"),
        (5, "must be a URL"),
    ],
)
def test_invalid_base_url_is_refused_without_showing_a_password(base_url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"base_url.*{said}") as caught:
        SigningClient(base_url, "token")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "host", ["http://app.localhost", "http://127.8.9.10:1", "http://[::1]:8080", "https://å_ä-ö.se:"]
)
def test_base_url_is_https_or_http_on_loopback(host: str) -> None:
    assert repr(SigningClient(host, "token"))


@pytest.mark.parametrize("auth", ["", "line\nbreak", "ünicode", None, b"bytes"])
def test_token_that_cannot_be_sent_is_refused_without_showing_it(auth: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        SigningClient("https://tenant.example.com", auth)
    assert not auth or str(auth) not in str(caught.value)


def test_oauth_of_another_origin_is_refused() -> None:
    oauth = OAuth("https://one.example.com", client_id="x", client_secret="y", redirect_uri="z")
    with pytest.raises(ConfigurationError, match=r"pass base_url='https://one\.example\.com'$"):
        SigningClient("https://two.example.com", oauth)


class _AsyncHook:
    async def __call__(self, value: object) -> None: ...


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"retry": 3}, "retry: must be RetryPolicy, got 3"),
        ({"assumptions": {}}, "assumptions: must be Assumptions, got {}"),
        ({"on_attempt": 5}, "on_attempt: must be callable, got 5"),
        ({"on_attempt": asyncio.sleep}, "on_attempt: must be a plain function, because it is not awaited, got"),
        ({"on_response": _AsyncHook()}, "on_response: must be a plain function, because it is not awaited, got"),
        ({"telemetry": "off"}, "telemetry: must be True or False, got 'off'"),
        ({"session": "x"}, "session: must be an aiohttp.ClientSession, got str"),
        ({"timeout": "5"}, "timeout.call: must be a number above 0, got '5'"),
    ],
)
def test_invalid_option_is_refused_by_name_when_the_client_is_made(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        SigningClient("https://tenant.example.com", "token", **settings)  # type: ignore[arg-type]  # the point
    if settings.keys() <= {"retry", "on_response"}:
        with pytest.raises(ConfigurationError, match=re.escape(said)):
            SigningClient("https://tenant.example.com", "token").with_options(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [SigningClient, OAuth, Tenants, FileTokenStore])
def test_object_whose_constructor_raised_has_a_repr(cls: type) -> None:
    """Some tracebacks show it."""
    assert cls.__name__ in repr(object.__new__(cls))


def test_from_env_takes_the_constructors_options() -> None:
    constructor = inspect.signature(SigningClient).parameters
    options = inspect.signature(SigningClient.from_env).parameters
    assert list(options) == list(constructor)[2:]
    assert {parameter.kind for parameter in options.values()} == {inspect.Parameter.KEYWORD_ONLY}


# Arguments


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (
            {"name": " ", "language": "FI", "signing_order": "random"},
            [
                "name: must be a non-empty string, got ' '",
                "language: must be EN or SV, got 'FI'",
                "signing_order: must be sequential or parallel, got 'random'",
            ],
        ),
        ({"name": "a\udcff"}, [r"name: must be valid UTF-8, without lone surrogates, got 'a\udcff'"]),
        ({"message": 5}, ["message: must be a string, got 5"]),
        ({"message": "x" * 401}, [f"message: must be at most 400 characters, got 401: '{'x' * 40}'..."]),
    ],
)
async def test_all_problems_of_create_are_raised_before_sending(
    sandbox: Sandbox, client: SigningClient, arguments: dict[str, Any], problems: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.signings.create(**{"name": "x", "language": "EN", **arguments})
    assert list(caught.value.problems) == problems
    assert sandbox.requests == []
    signing = await client.signings.create(name="x", language="SV", signing_order="sequential", message="å" * 400)
    assert signing.message == "å" * 400


async def test_id_is_percent_encoded_or_refused_by_name(sandbox: Sandbox, client: SigningClient) -> None:
    bad: Any
    for bad in ("", "..", None, "\ud800"):
        with pytest.raises(InvalidRequest, match="signing_id"):
            await client.signings.get(bad)
        with pytest.raises(InvalidRequest, match="recipient_id"):
            await client.recipients.remind("id", bad)
        with pytest.raises(InvalidRequest, match="document_id"):
            await client.documents.read_signed("id", bad)
    assert sandbox.requests == []
    with pytest.raises(NotFound, match="404"):
        await client.signings.get("../me?x=/#")
    assert [record.operation for record in sandbox.requests] == ["signings.get"]


# Waiting


async def test_waiting_survives_an_outage_but_not_a_rejected_refresh_token() -> None:
    statuses = [503, 503, 400]

    async def respond(request: web.Request) -> web.Response:
        if request.path != "/api/oauth/token":
            return web.json_response({"id": "s1", "is_completed": True})
        return web.json_response({"error": "invalid_grant"}, status=statuses.pop(0))

    store = MemoryTokenStore(Token("old", "refresh", expires_at=1))
    app = {"client_id": "c", "client_secret": "s", "redirect_uri": "https://app.example.com/"}
    async with (
        serving(respond) as server,
        OAuth(server.origin, retry=RetryPolicy.none(), **app, store=store) as oauth,
        SigningClient(server.origin, oauth) as client,
    ):
        with pytest.raises(RefreshRejected):
            await client.signings.wait_until_completed("s1", poll=0.02)
    assert not statuses


async def test_webhook_event_ends_the_wait_before_the_next_poll() -> None:
    wakeups = Wakeups()
    handle = aiohttp_handler(Receiver(WebhookVerifier("whsec"), wakeups.publish))
    async with (
        serving(handle) as server,
        Sandbox(webhook_url=server.origin, webhook_secret="whsec") as sandbox,
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
        done = await asyncio.wait_for(waiting, 20)
        assert done.state is SigningState.COMPLETED
        assert all(document.completed_at for document in done.documents)


async def test_end_of_the_wait_without_completion_carries_the_last_state(
    sandbox: Sandbox, client: SigningClient
) -> None:
    signing = await client.signings.create(name="x", language="EN")
    with pytest.raises(WaitTimeout, match=r"not completed within 0\.5 s") as timed_out:
        await client.signings.wait_until_completed(signing.id, timeout=0.5, poll=0.1)
    assert timed_out.value.signing.state is SigningState.DRAFT
    assert isinstance(timed_out.value, TimeoutError)
    assert timed_out.value.transient
    for name in ("timeout", "poll", "max_poll"):
        with pytest.raises(InvalidRequest, match=rf"^{name}: must be a number above 0, got 0"):
            await client.signings.wait_until_completed(signing, **{name: 0})
    await sandbox.cancel(signing.id)
    with pytest.raises(SigningCancelled) as cancelled:
        await client.signings.wait_until_completed(signing)
    assert cancelled.value.signing.id == signing.id


# The session


async def test_callers_session_is_shared_by_clients_and_stays_open(sandbox: Sandbox) -> None:
    """The session's settings (raise_for_status, a timeout and headers) do not change a client."""
    async with aiohttp.ClientSession(
        raise_for_status=True, timeout=aiohttp.ClientTimeout(total=60), headers={"Authorization": "Bearer other"}
    ) as session:
        for number in range(2):
            user = sandbox.add_user(f"User {number}", f"u{number}@example.com", tenant=f"tenant {number}")
            token = sandbox.access_token(user=user)
            sandbox.faults.add("me", "503")
            async with SigningClient(
                sandbox.base_url, token, session=session, retry=RetryPolicy(base_delay=0.01)
            ) as client:
                assert (await client.me()).email == f"u{number}@example.com"
        assert not session.closed
    with pytest.raises(ClientClosed, match="session"):
        await SigningClient(sandbox.base_url, "token", session=session).me()


def open_sessions() -> set[aiohttp.ClientSession]:
    """Return the sessions of this process, those of other tests' fixtures included."""
    return {one for one in gc.get_objects() if type(one) is aiohttp.ClientSession}


async def test_client_that_was_not_closed_is_a_resource_warning(sandbox: Sandbox) -> None:
    """A view need not be closed."""
    client = SigningClient(sandbox.base_url, sandbox.access_token())
    before = open_sessions()
    await client.me()
    (session,) = open_sessions() - before
    view = client.with_options(timeout=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del view
        gc.collect()
        assert not caught
        del client
        gc.collect()
    assert any("SigningClient" in str(one.message) for one in caught if one.category is ResourceWarning)
    await session.close()


def test_client_or_session_of_another_event_loop_is_a_configuration_error() -> None:
    attempts: list[Attempt] = []

    async def first() -> tuple[SigningClient, aiohttp.ClientSession]:
        client = SigningClient("http://127.0.0.1:9", "token", retry=RetryPolicy.none())
        with pytest.raises(TransportError):
            await client.me()
        return client, aiohttp.ClientSession()

    async def second(client: SigningClient, session: aiohttp.ClientSession) -> None:
        with pytest.raises(ConfigurationError, match="event loop"):
            await client.me()
        await client.aclose()
        client = SigningClient("http://127.0.0.1:9", "token", session=session, on_attempt=attempts.append)
        with pytest.raises(ConfigurationError, match="the session belongs to another event loop"):
            await client.me()

    client, session = asyncio.run(first())
    asyncio.run(second(client, session))
    assert len(attempts) == 1
    session.detach()  # its loop is closed, and it has no connections


# Views and the end


class _Named(SigningClient):
    def __init__(self, base_url: str, token: str, name: str) -> None:
        super().__init__(base_url, token)
        self.name = name


async def test_view_of_a_subclass_keeps_its_attributes(sandbox: Sandbox) -> None:
    async with _Named(sandbox.base_url, sandbox.access_token(), "acme") as client:
        view = client.with_options(timeout=5)
        assert (type(view), view.name) == (_Named, "acme")
        view.name = "other"
        assert client.name == "acme"
        assert (await view.me()).email
        assert repr(view) == f"_Named({sandbox.base_url!r})"


@pytest.mark.parametrize("closed", ["client", "view"])
async def test_operations_after_the_end_raise_client_closed(client: SigningClient, closed: str) -> None:
    """A client and its views end together. Closing again is allowed."""
    view = client.with_options(timeout=5)
    await client.me()
    for _ in range(2):
        await (client if closed == "client" else view).aclose()
    for one in (client, view):
        for call in (one.me(), one.signings.list(), one.documents.upload("id", make_pdf()), one.recipients.list("id")):
            with pytest.raises(ClientClosed):
                await call
        with pytest.raises(ClientClosed):
            await one.recipients.remind_pending("id")


# Suites that replace aiohttp's requests


async def test_calls_succeed_and_are_retried_under_aioresponses(monkeypatch: pytest.MonkeyPatch) -> None:
    # aioresponses 0.7.9 does not know aiohttp 3.14, whose responses need a writer, and whose readers a protocol.
    response = partial(aiohttp.ClientResponse, stream_writer=Mock(output_size=0))
    monkeypatch.setattr(aioresponses.core, "ClientResponse", response)

    def reader(loop: asyncio.AbstractEventLoop) -> aiohttp.StreamReader:
        return aiohttp.StreamReader(Mock(_reading_paused=False), limit=2**30, loop=loop)

    monkeypatch.setattr(aioresponses.core, "stream_reader_factory", reader)
    origin, policy = "https://tenant.example.com", RetryPolicy(base_delay=0.0)
    with aioresponses.aioresponses() as responses:
        responses.get(f"{origin}/api/1.0/signings/s1", status=503)
        responses.get(f"{origin}/api/1.0/signings/s1", payload={"id": "s1", "is_draft": True})
        responses.post(f"{origin}/api/1.0/signings/s1/recipients", payload={"id": "r1", "email": "a@example.com"})
        async with SigningClient(origin, "token", retry=policy) as client:
            assert (await client.signings.get("s1")).state is SigningState.DRAFT
            assert (await client.recipients.add("s1", email="a@example.com")).id == "r1"
        assert sum(len(calls) for calls in responses.requests.values()) == 3
