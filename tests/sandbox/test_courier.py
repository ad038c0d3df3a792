"""Sending deliveries: retries, and faults on demand."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
import logging
import os
import time

import pytest

from signing_async.sandbox import Sandbox
from signing_async.sandbox.deliveries import BACK_OFF
from signing_async.sandbox.faults import DELIVERY
from tests.sandbox.receiving import SECRET, Receiver
from tests.sandbox.serving import Caller


async def test_failed_delivery_is_retried_with_back_off_and_the_same_body(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    receiver.responses = [500, 302, 404]
    await call.draft()
    for step, seconds in enumerate(list(BACK_OFF)[:3], 1):
        await receiver.got(step)
        await hooked.webhooks.settled()
        [delivery] = hooked.webhooks.deliveries()
        assert (delivery.state, delivery.attempts) == ("pending", step)
        hooked.clock.advance(seconds=seconds)
    await receiver.got(4)
    await hooked.webhooks.settled()
    assert len(set(receiver.bodies)) == 1
    assert [attempt.status for attempt in hooked.webhooks.attempts()] == [500, 302, 404, 202]
    assert hooked.webhooks.deliveries()[0].state == "delivered"


async def test_delivery_fails_after_the_last_retry(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    receiver.responses = [500] * 20
    await call.draft()
    for step in range(len(BACK_OFF)):
        await receiver.got(step + 1)
        await hooked.webhooks.settled()
        hooked.clock.advance(days=2)
    await receiver.got(len(BACK_OFF) + 1)
    await hooked.webhooks.settled()
    hooked.clock.advance(days=30)
    await hooked.webhooks.settled()
    [delivery] = hooked.webhooks.deliveries()
    assert (delivery.state, delivery.attempts, delivery.due_at) == ("failed", len(BACK_OFF) + 1, None)


async def test_unreachable_endpoint_is_recorded_with_the_error_and_retried(
    signing_sandbox: Sandbox, call: Caller
) -> None:
    signing_sandbox.webhooks.register("http://localhost:1/hook")
    await call.draft()
    await signing_sandbox.webhooks.settled()
    [attempt] = signing_sandbox.webhooks.attempts()
    assert attempt.status is None
    assert attempt.error
    assert attempt.error == f"could not connect: {os.strerror(errno.ECONNREFUSED)}"
    assert signing_sandbox.webhooks.deliveries()[0].state == "pending"


async def test_redirect_of_an_endpoint_is_not_followed_and_each_attempt_is_logged(
    hooked: Sandbox, receiver: Receiver, call: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "signing_async.sandbox")
    receiver.responses, receiver.location = [307], "/hooks/"
    await call.draft()
    await hooked.webhooks.settled()
    assert len(receiver.bodies) == 1
    hooked.clock.advance(seconds=5)
    await receiver.got(2)
    await hooked.webhooks.settled()
    assert [message for message in caplog.messages if message.startswith("deliver ")] == [
        f"deliver signing.created -> {receiver.url} 307 redirected to /hooks/: not followed, retry in 5 s",
        f"deliver signing.created -> {receiver.url} 202",
    ]


async def test_endpoint_that_does_not_respond_in_time_is_retried(
    hooked: Sandbox, receiver: Receiver, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    from signing_async.sandbox import deliveries as courier

    monkeypatch.setattr(courier, "TIMEOUT", 0.2)
    hooked.faults.add(DELIVERY, "slow", seconds=30)
    await call.draft()
    await hooked.webhooks.settled()
    [attempt] = hooked.webhooks.attempts()
    assert attempt.error == "no response within 0.2 seconds"


async def test_duplicate_fault_delivers_twice(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    hooked.faults.add(DELIVERY, "duplicate")
    await call.draft()
    await receiver.got(2)
    assert receiver.bodies[0] == receiver.bodies[1]
    await call.draft()
    await receiver.got(3)
    await hooked.webhooks.settled()
    assert [attempt.fault for attempt in hooked.webhooks.attempts()] == ["duplicate", "duplicate", None]


async def test_duplicate_fault_keeps_a_delivery_delivered_whatever_the_second_response(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    receiver.responses = [202, 500]
    hooked.faults.add(DELIVERY, "duplicate")
    await call.draft()
    async with asyncio.timeout(5):
        while len(hooked.webhooks.attempts()) < 2:
            await asyncio.sleep(0.005)
    [delivery] = hooked.webhooks.deliveries()
    assert (delivery.state, delivery.due_at) == ("delivered", None)


async def test_reorder_fault_waits_for_the_next_event_and_delivers_it_first(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    fault = hooked.faults.add(DELIVERY, "reorder")
    await call.draft()
    async with asyncio.timeout(5):
        while not fault.hits:
            await asyncio.sleep(0.005)
    await call.draft()
    await receiver.got(2)
    ids = [event.id for event in hooked.webhooks.events()]
    assert [event_id for _, event_id in receiver.events] == ids[::-1]


async def test_reorder_fault_delivers_a_single_event_after_a_second(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    hooked.faults.add(DELIVERY, "reorder")
    await call.draft()
    await receiver.got(1)
    await hooked.webhooks.settled()
    assert hooked.webhooks.deliveries()[0].state == "delivered"


async def test_wrong_signature_fault_sends_a_well_formed_invalid_signature(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    hooked.faults.add(DELIVERY, "wrong-signature")
    await call.draft()
    await receiver.got(1)
    right = hmac.new(SECRET.encode(), receiver.bodies[0], hashlib.sha256).hexdigest()
    assert len(receiver.signatures[0]) == len(right)
    assert receiver.signatures[0] != right


async def test_slow_fault_pauses_in_the_middle_of_the_body(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    hooked.faults.add(DELIVERY, "slow", seconds=0.1)
    started = time.monotonic()
    await call.draft()
    await receiver.got(1)
    assert time.monotonic() - started >= 0.1
    assert json.loads(receiver.bodies[0])


async def test_drop_fault_breaks_off_and_the_delivery_is_retried(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    hooked.faults.add(DELIVERY, "drop")
    await call.draft()
    await hooked.webhooks.settled()
    assert receiver.bodies == []
    assert hooked.webhooks.deliveries()[0].state == "pending"
    hooked.clock.advance(seconds=5)
    await receiver.got(1)
    assert json.loads(receiver.bodies[0])


async def test_lose_fault_never_delivers_the_event(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    hooked.faults.add(DELIVERY, "lose")
    signing_id = await call.draft()
    await hooked.cancel(signing_id)
    await receiver.got(1)
    await hooked.webhooks.settled()
    assert receiver.types == ["signing.cancelled"]
    assert [d.state for d in hooked.webhooks.deliveries()] == ["lost", "delivered"]


async def test_localhost_names_are_resolved_without_a_name_server(
    signing_sandbox: Sandbox, receiver: Receiver, call: Caller
) -> None:
    signing_sandbox.webhooks.register(receiver.url.replace("127.0.0.1", "hooks.localhost"))
    await call.draft()
    await receiver.got(1)


async def test_delivery_in_flight_leaves_no_trace_in_a_restored_sandbox(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    snapshot = hooked.snapshot()
    receiver.delay = 0.1
    hooked.faults.add(DELIVERY, "duplicate")
    await call.draft()
    await receiver.got(1)
    hooked.restore(snapshot)
    await call.draft()
    await hooked.webhooks.settled()
    assert len(receiver.bodies) == 2
    assert [d.state for d in hooked.webhooks.deliveries()] == ["delivered"]
    assert len(hooked.webhooks.attempts()) == 1


async def test_retry_waits_for_its_time_when_the_clock_is_advanced_less(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    receiver.responses = [500]
    await call.draft()
    await receiver.got(1)
    await hooked.webhooks.settled()
    for _ in range(2):
        hooked.clock.advance(seconds=1)
        await asyncio.sleep(0.02)
    assert len(receiver.bodies) == 1
    hooked.clock.advance(seconds=5 - 2)
    await receiver.got(2)


async def test_deliveries_are_logged_with_what_happens_next(
    hooked: Sandbox, receiver: Receiver, call: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "signing_async.sandbox")
    receiver.location = "/hook/?code=s3cret"
    receiver.responses = [307, 500, 500, 500, 500, 500, 500, 500]
    hooked.faults.add(DELIVERY, "slow", seconds=0.01)
    await call.draft()
    for step in range(len(BACK_OFF)):
        await receiver.got(step + 1)
        await hooked.webhooks.settled()
        hooked.clock.advance(days=2)
    await receiver.got(len(BACK_OFF) + 1)
    await hooked.webhooks.settled()
    hooked.faults.add(DELIVERY, "lose")
    await call.draft()
    await hooked.webhooks.settled()
    await call.draft()
    await hooked.webhooks.settled()
    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("deliver ")]
    start = f"deliver signing.created -> {receiver.url}"
    assert logged == [
        f"{start} 307 redirected to /hook/: not followed, retry in 5 s (fault: slow)",
        *(f"{start} 500, retry in {span}" for span in ("30 s", "2 min", "10 min", "1 h", "6 h", "24 h")),
        f"{start} 500, no more retries",
        f"{start} lost on purpose",
        f"{start} 202",
    ]


async def test_log_has_no_password_or_query_of_an_endpoint(
    signing_sandbox: Sandbox, call: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "signing_async.sandbox")
    signing_sandbox.webhooks.register("http://user:s3cret@localhost:1/hook?key=s3cret")
    await call.draft()
    await signing_sandbox.webhooks.settled()
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("deliver ")]
    assert line.startswith("deliver signing.created -> http://localhost:1/hook could not connect: ")


async def test_endpoint_that_closes_the_connection_is_recorded_as_such(signing_sandbox: Sandbox, call: Caller) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"nonsense\r\n\r\n")
        writer.close()

    errors = []
    for answer in (hang_up, babble):
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            signing_sandbox.webhooks.register(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
            await call.draft()
            await signing_sandbox.webhooks.settled()
        errors.append(signing_sandbox.webhooks.attempts()[-1].error or "")
        signing_sandbox.webhooks.remove(signing_sandbox.webhooks.endpoints()[0].id)
    assert all(error.startswith("the delivery failed: ") for error in errors)
