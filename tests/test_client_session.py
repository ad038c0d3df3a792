"""The client's session, views, event loop and end."""

from __future__ import annotations

import asyncio
import gc
import warnings

import aiohttp
import pytest

from signing_async import Attempt, ClientClosed, ConfigurationError, RetryPolicy, SigningClient, TransportError
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


async def test_callers_session_is_shared_by_clients_and_stays_open(sandbox: Sandbox) -> None:
    async with aiohttp.ClientSession() as session:
        for number in range(3):
            user = sandbox.add_user(f"User {number}", f"u{number}@example.com", tenant=f"tenant {number}")
            async with SigningClient(sandbox.base_url, sandbox.access_token(user=user), session=session) as client:
                assert (await client.me()).email == f"u{number}@example.com"
        assert not session.closed
    with pytest.raises(ClientClosed, match="session"):
        await SigningClient(sandbox.base_url, "token", session=session).me()


async def test_settings_of_the_callers_session_do_not_change_the_client(sandbox: Sandbox) -> None:
    """raise_for_status, a timeout and headers."""
    async with aiohttp.ClientSession(
        raise_for_status=True, timeout=aiohttp.ClientTimeout(total=60), headers={"Authorization": "Bearer other"}
    ) as session:
        client = SigningClient(sandbox.base_url, sandbox.access_token(), session=session, retry=QUICK)
        sandbox.faults.add("me", "503")
        assert (await client.me()).email


async def test_trace_configs_of_the_callers_session_see_every_request(sandbox: Sandbox) -> None:
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


def open_sessions() -> set[aiohttp.ClientSession]:
    """Return the sessions of this process, those of other tests' fixtures included."""
    return {one for one in gc.get_objects() if type(one) is aiohttp.ClientSession}


async def test_client_that_was_not_closed_is_a_resource_warning(sandbox: Sandbox) -> None:
    """A view is not."""
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
