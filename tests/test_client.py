"""The client's options, arguments that are checked before sending, and waiting for completion."""

from __future__ import annotations

import asyncio
import inspect
import re
from functools import partial
from unittest.mock import Mock

import aiohttp
import aioresponses.core
import pytest
from aiohttp import web

from signing_async import (
    ConfigurationError,
    FileTokenStore,
    InvalidRequest,
    MemoryTokenStore,
    OAuth,
    RefreshRejected,
    RetryPolicy,
    Signing,
    SigningCancelled,
    SigningClient,
    SigningState,
    Tenants,
    Token,
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
        ("http://tenant.example.com", "must be https"),
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
    "base_url",
    [
        "https://tenant.example.com",
        "https://TENANT.example.com:8443",
        "http://app.localhost",
        "http://127.8.9.10:1",
        "http://[::1]:8080",
        "https://å_ä-ö.example.com:",
    ],
)
def test_base_url_is_https_or_http_on_loopback(base_url: str) -> None:
    assert repr(SigningClient(base_url, "token"))


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
        ({"name": ""}, ["name: must be a non-empty string, got ''"]),
        ({"name": "a\udcff"}, [r"name: must be valid UTF-8, without lone surrogates, got 'a\udcff'"]),
        ({"language": "FI"}, ["language: must be EN or SV, got 'FI'"]),
        ({"signing_order": "random"}, ["signing_order: must be sequential or parallel, got 'random'"]),
        ({"message": 5}, ["message: must be a string, got 5"]),
        ({"message": "x" * 401}, [f"message: must be at most 400 characters, got 401: '{'x' * 40}'..."]),
        (
            {"name": " ", "language": "xx"},
            ["name: must be a non-empty string, got ' '", "language: must be EN or SV, got 'xx'"],
        ),
    ],
)
async def test_all_problems_of_create_are_raised_before_sending(
    sandbox: Sandbox, client: SigningClient, arguments: dict[str, object], problems: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.signings.create(**{"name": "x", "language": "EN", **arguments})  # type: ignore[arg-type]  # the point
    assert list(caught.value.problems) == problems
    assert sandbox.requests == []


async def test_message_of_exactly_400_characters_is_accepted(client: SigningClient) -> None:
    signing = await client.signings.create(name="x", language="SV", signing_order="sequential", message="å" * 400)
    assert signing.message == "å" * 400


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"email": "nobody"}, "email: must be an e-mail address, got 'nobody'"),
        ({"first_name": ""}, "first_name: must be a non-empty string, got ''"),
        ({"first_name": "\udcff"}, r"first_name: must be valid UTF-8, without lone surrogates, got '\udcff'"),
        ({"signing_method": 5}, "signing_method: must be a non-empty string, got 5"),
        ({"order": 0}, "order: must be an integer of at least 1, got 0"),
        ({"extra": {"email": "x"}}, "extra: pass email as a separate argument"),
        ({"extra": {1: 2}}, "extra: must be a mapping with string keys, got {1: 2}"),
        ({"extra": {"phone": float("nan")}}, "extra: cannot encode as JSON"),
    ],
)
async def test_invalid_recipient_is_refused_before_sending(
    sandbox: Sandbox, client: SigningClient, arguments: dict[str, object], problem: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.recipients.add("id", **{"email": "a@example.com", **arguments})  # type: ignore[arg-type]  # the point
    assert str(caught.value).startswith(problem)
    assert sandbox.requests == []


@pytest.mark.parametrize("bad", ["", "..", None, "\ud800"])
async def test_unusable_id_is_refused_by_name(sandbox: Sandbox, client: SigningClient, bad: str) -> None:
    with pytest.raises(InvalidRequest, match="signing_id"):
        await client.signings.get(bad)
    with pytest.raises(InvalidRequest, match="recipient_id"):
        await client.recipients.remind("id", bad)
    with pytest.raises(InvalidRequest, match="document_id"):
        await client.documents.read_signed("id", bad)
    assert sandbox.requests == []


async def test_id_is_percent_encoded(sandbox: Sandbox, client: SigningClient) -> None:
    with pytest.raises(Exception, match="404"):
        await client.signings.get("../me?x=/#")
    assert [record.operation for record in sandbox.requests] == ["signings.get"]


# Waiting


async def sent(client: SigningClient) -> Signing:
    signing = await client.signings.create(name="x", language="EN")
    await client.documents.upload(signing, make_pdf(), "a.pdf")
    await client.recipients.add(signing, email="a@example.com", order=1)
    await client.signings.send(signing)
    return signing


async def test_waiting_for_completion_survives_an_outage(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await sent(client)
    waiting = asyncio.create_task(client.signings.wait_until_completed(signing, poll=0.02, max_poll=0.05))
    await asyncio.sleep(0.05)
    sandbox.faults.add("signings.get", "503", times=12)
    await asyncio.sleep(0.1)
    await sandbox.complete(signing.id)
    done = await asyncio.wait_for(waiting, 10)
    assert done.state is SigningState.COMPLETED
    assert all(document.completed_at for document in done.documents)


@pytest.mark.parametrize("status", [503, 400])
async def test_waiting_survives_an_outage_of_the_token_endpoint_but_not_a_rejected_refresh_token(status: int) -> None:
    statuses = [status, 200]

    async def respond(request: web.Request) -> web.Response:
        if request.path != "/api/oauth/token":
            return web.json_response({"id": "s1", "is_completed": True})
        return web.json_response({"access_token": "new", "error": "invalid_grant"}, status=statuses.pop(0))

    store = MemoryTokenStore(Token("old", "refresh", expires_at=1))
    app = {"client_id": "c", "client_secret": "s", "redirect_uri": "https://app.example.com/"}
    async with (
        serving(respond) as server,
        OAuth(server.origin, retry=RetryPolicy.none(), **app, store=store) as oauth,
        SigningClient(server.origin, oauth) as client,
    ):
        waiting = client.signings.wait_until_completed("s1", poll=0.02)
        if status == 400:
            with pytest.raises(RefreshRejected):
                await waiting
        else:
            assert (await waiting).state is SigningState.COMPLETED


async def test_webhook_event_ends_the_wait_before_the_next_poll() -> None:
    wakeups = Wakeups()
    handle = aiohttp_handler(Receiver(WebhookVerifier("whsec"), wakeups.publish))
    async with (
        serving(handle) as server,
        Sandbox(webhook_url=server.origin, webhook_secret="whsec") as sandbox,
        SigningClient(sandbox.base_url, sandbox.access_token()) as client,
    ):
        signing = await sent(client)
        wait = client.signings.wait_until_completed(signing, poll=600, max_poll=600, wakeups=wakeups)
        waiting = asyncio.create_task(wait)
        while not sandbox.requests_of("signings.get"):
            await asyncio.sleep(0.01)
        await sandbox.complete(signing.id)
        assert (await asyncio.wait_for(waiting, 20)).state is SigningState.COMPLETED


async def test_waiting_for_a_cancelled_signing_raises_it(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await client.signings.create(name="x", language="EN")
    await sandbox.cancel(signing.id)
    with pytest.raises(SigningCancelled) as caught:
        await client.signings.wait_until_completed(signing)
    assert caught.value.signing.id == signing.id


async def test_wait_timeout_carries_the_last_state(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await client.signings.create(name="x", language="EN")
    with pytest.raises(WaitTimeout, match=r"not completed within 0\.15 s") as caught:
        await client.signings.wait_until_completed(signing.id, timeout=0.15, poll=0.03)
    assert caught.value.signing.state is SigningState.DRAFT
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.transient
    for name in ("timeout", "poll", "max_poll"):
        with pytest.raises(InvalidRequest, match=rf"^{name}: must be a number above 0, got 0"):
            await client.signings.wait_until_completed(signing, **{name: 0})


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
