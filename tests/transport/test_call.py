"""A call: retries, its deadline, the rate limiter, and what the hook and the log are told."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from contextlib import suppress

import aiohttp
import pytest

from signing_async import (
    Attempt,
    ClientClosed,
    ConfigurationError,
    OutcomeUnknown,
    RateLimited,
    RequestTimeout,
    RetryPolicy,
    ServerError,
    SigningClient,
    TransportError,
    Unauthorized,
)
from signing_async.sandbox import Sandbox
from tests.auth.oauth_servers import warnings_in

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


# Retries of reads


@pytest.mark.parametrize(("kind", "error"), [("truncate", TransportError), ("429", RateLimited)])
async def test_last_error_is_raised_after_the_policys_attempts(
    sandbox: Sandbox, client: SigningClient, kind: str, error: type[Exception]
) -> None:
    sandbox.faults.add("me", kind, times=None, **({"retry_after": 0} if kind == "429" else {}))
    with pytest.raises(error, match="3 attempts were made"):
        await client.with_options(retry=RetryPolicy(max_attempts=3, base_delay=0.01)).me()
    assert len(sandbox.requests_of("me")) == 3


async def test_delay_doubles_up_to_its_maximum_and_is_not_shorter_than_retry_after(
    sandbox: Sandbox, client: SigningClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signing_async.transport.retry.random.random", lambda: 1.0)  # the longest delays
    attempts: list[Attempt] = []
    policy = RetryPolicy(base_delay=0.02, max_delay=0.05)
    quick = client.with_options(retry=policy, on_attempt=attempts.append)
    sandbox.faults.add("me", "500", times=4)
    await quick.me()
    assert [attempt.delay for attempt in attempts] == [0.02, 0.04, 0.05, 0.05, None]
    attempts.clear()
    sandbox.faults.add("me", "503", times=1, retry_after=0.1)
    await quick.me()
    assert [attempt.delay for attempt in attempts] == [0.1, None]


async def test_refused_connection_is_retried_then_raised_with_host_and_port() -> None:
    async with SigningClient("http://127.0.0.1:9", "token", retry=QUICK) as client:
        with pytest.raises(TransportError, match=r"could not connect.*127\.0\.0\.1:9") as caught:
            await client.me()
        assert caught.value.attempts == 5
        for write in (client.signings.send("id"), client.recipients.remind("id", "recipient")):
            with pytest.raises(TransportError, match="could not connect"):
                await write


async def test_outage_costs_two_requests_a_call_on_average(sandbox: Sandbox, client: SigningClient) -> None:
    """Not counting the readings that reconcile a call."""
    sandbox.faults.add("*", "503", times=None)
    calls = 60
    results = await asyncio.gather(
        *(client.me() for _ in range(calls // 2)),
        *(client.signings.send("00000000-0000-4000-8000-000000000000") for _ in range(calls // 2)),
        return_exceptions=True,
    )
    assert all(isinstance(result, ServerError | TransportError | OutcomeUnknown) for result in results)
    assert sum(request.operation != "signings.get" for request in sandbox.requests) <= 2 * calls
    with pytest.raises(ServerError, match="retry budget"):
        await client.me()
    sandbox.faults.clear()
    await client.me()


@pytest.mark.parametrize(("field", "value"), [("max_attempts", 0), ("base_delay", -1), ("max_delay", math.inf)])
def test_policy_refuses_invalid_fields_by_name_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"^RetryPolicy\.{field}: must be an? .*, got {value!r}$"):
        RetryPolicy(**{field: value})  # type: ignore[arg-type]  # that is the point


# Deadlines


async def test_call_without_response_ends_at_its_deadline_as_request_timeout(
    sandbox: Sandbox, client: SigningClient
) -> None:
    sandbox.faults.add("me", "hang", times=None)
    with pytest.raises(RequestTimeout, match=r"within its timeout of 0\.3 s") as caught:
        await client.with_options(timeout=0.3).me()
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.__context__ is None or "aiohttp" not in type(caught.value.__context__).__module__


# The rate limiter


async def test_retry_after_past_the_deadline_or_above_the_policys_cap_is_raised_at_once(
    sandbox: Sandbox, client: SigningClient
) -> None:
    sandbox.faults.add("me", "429", retry_after=2000)
    with pytest.raises(RateLimited, match="deadline leaves no time") as caught:
        await client.with_options(timeout=1000, retry=RetryPolicy(max_retry_after=3000)).me()
    assert caught.value.retry_after == 2000
    sandbox.faults.add("signings.list", "503", retry_after=3600)
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as other:
        with pytest.raises(ServerError, match="longer than the policy's 60 s") as failed:
            await other.signings.list()
    assert failed.value.retry_after == 3600


async def test_retry_after_of_a_day_does_not_pause_other_endpoints(sandbox: Sandbox, client: SigningClient) -> None:
    """The call ends, and the limiter only slows down, as after any 429."""
    sandbox.faults.add("recipients.remind", "429", retry_after=86400)
    with pytest.raises(RateLimited) as caught:
        await client.recipients.remind("s1", "r1")
    assert caught.value.retry_after == 86400
    async with asyncio.timeout(20):  # the default cap is 60 s
        await asyncio.gather(*(client.me() for _ in range(5)))


# Reports


async def test_on_attempt_and_the_log_are_told_of_every_attempt(
    sandbox: Sandbox, client: SigningClient, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of the hook is logged, and the call goes on."""
    seen: list[Attempt] = []

    def hook(attempt: Attempt) -> None:
        seen.append(attempt)
        raise RuntimeError("metrics are down")

    sandbox.faults.add("me", "503")
    # Two, since aiohttp repeats a GET by itself when a kept connection turns out to be closed.
    sandbox.faults.add("me", "drop-before-commit", times=2)
    with caplog.at_level(logging.DEBUG, "signing_async"):
        await client.with_options(on_attempt=hook).me()
    expected = [("me", 1, 503), ("me", 2, None), ("me", 3, 200)]
    assert [(one.operation, one.attempt, one.status) for one in seen] == expected
    assert [one.delay is None for one in seen] == [False, False, True]
    first, *_, last = sandbox.requests_of("me")
    assert [one.request_id for one in seen] == [first.id, None, last.id]
    assert "503" in (seen[0].error or "")
    assert seen[2].error is None
    assert all(0 <= one.seconds < 60 for one in seen)  # the clock of uvloop has whole milliseconds
    assert caplog.text.count("RuntimeError: metrics are down") == 3
    retried, *_, succeeded = [record for record in caplog.records if "me attempt" in record.getMessage()]
    assert (retried.levelno, succeeded.levelno) == (logging.INFO, logging.DEBUG)
    pattern = r"me attempt 1: 503 in [\d.]+ s, request id \w+: HTTP 503 on me: .*; retry in [\d.]+ s"
    assert re.fullmatch(pattern, retried.getMessage())
    assert re.fullmatch(r"me attempt 3: 200 in [\d.]+ s, request id \w+", succeeded.getMessage())


@pytest.mark.parametrize(
    ("kind", "ambiguous"), [("500", [True, False]), ("429", [False, False]), ("expired-token", [False])]
)
async def test_attempt_is_ambiguous_if_it_failed_and_may_have_taken_effect(
    sandbox: Sandbox, client: SigningClient, kind: str, ambiguous: list[bool]
) -> None:
    told: list[Attempt] = []
    signing = await client.signings.create(name="Lease", language="EN")
    sandbox.faults.add("recipients.add", kind, **({"retry_after": 0} if kind == "429" else {}))
    with suppress(Unauthorized):
        await client.with_options(on_attempt=told.append).recipients.add(signing, email="anna@example.com")
    assert [attempt.ambiguous for attempt in told if attempt.operation == "recipients.add"] == ambiguous


async def test_outcome_unknown_is_logged_as_a_warning_without_the_token(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox.faults.add("recipients.remind", "drop-after-commit")
    token = sandbox.access_token()
    with caplog.at_level(logging.DEBUG, "signing_async"):
        async with SigningClient(sandbox.base_url, token, retry=QUICK) as client:
            with pytest.raises(OutcomeUnknown) as caught:
                await client.recipients.remind("s1", "r1")
    (warned,) = warnings_in(caplog)
    assert warned == str(caught.value)
    assert warned.startswith("recipients.remind: the outcome is unknown: the connection was closed")
    assert token not in caplog.text


# The session


@pytest.mark.filterwarnings("ignore:BasicAuth is deprecated", "ignore:The .auth. parameter is deprecated")
async def test_session_with_credentials_or_requests_in_two_steps_is_a_configuration_error() -> None:
    """Whether a request was sent is known from its body."""
    for options, said in (
        ({"auth": aiohttp.BasicAuth("anna", "S3CR3T")}, "must have no credentials of its own"),
        ({"headers": {"expect": "100-continue"}}, "must not have the header Expect$"),
    ):
        async with aiohttp.ClientSession(**options) as session:  # type: ignore[arg-type]  # of each its own type
            with pytest.raises(ConfigurationError, match=f"^session: {said}"):
                SigningClient("https://tenant.example.com", "token", session=session)


async def test_pending_call_ends_with_an_error_of_the_package_when_the_client_is_closed(
    sandbox: Sandbox, client: SigningClient
) -> None:
    sandbox.faults.add("me", "hang", times=None)
    call = asyncio.create_task(client.me())
    while not sandbox.requests_of("me"):
        await asyncio.sleep(0.005)
    await client.aclose()
    with pytest.raises((ClientClosed, TransportError)):
        await call
