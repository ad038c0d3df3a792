"""Webhooks (section 6 of the specification): endpoints, events, signatures, retries, and faults on demand."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from signing_async.sandbox import Profile, Refused, Sandbox
from signing_async.webhooks import WebhookVerifier
from tests.sandbox.receiving import SECRET, Receiver
from tests.sandbox.serving import Caller

DELIVERY = "webhooks.deliver"
SPANS = ["5 s", "30 s", "2 min", "10 min", "1 h", "6 h", "24 h"]


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def create(sandbox: Sandbox, name: str = "A") -> str:
    """Create a signing, which emits an event, and return its id."""
    return sandbox.service.create_signing(sandbox.accounts.default_user(), {"name": name, "language": "EN"}).id


async def test_every_change_of_a_signing_is_delivered_in_order(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    signing_id, _, people = await call.sent(recipients=2)
    await call("POST", f"/api/1.0/signings/{signing_id}/send")  # refused: no event
    for person in people:
        await hooked.sign(person)
    await receiver.got(5)
    assert receiver.types == [
        "signing.created", "signing.sent", "recipient.signed", "recipient.signed", "signing.completed",
    ]  # fmt: skip
    assert len({event_id for _, event_id in receiver.events}) == 5
    last = json.loads(receiver.bodies[-1])
    assert (last["signing"]["id"], last["signing"]["is_completed"]) == (signing_id, True)
    assert json.loads(receiver.bodies[2])["recipient_id"] == people[0]
    assert [event.body for event in hooked.webhooks.events()] == receiver.bodies


@pytest.mark.parametrize("encoding", ["hex", "base64", "sha256", "timestamped"])
async def test_x_signature_is_the_hmac_of_the_raw_body_in_the_profiles_encoding(
    receiver: Receiver, encoding: Any
) -> None:
    async with Sandbox(profile=Profile(signature=encoding), webhook_url=receiver.url, webhook_secret=SECRET) as sandbox:
        create(sandbox, "åäö 🖋")
        await receiver.got(1)
    [body], [sent] = receiver.bodies, receiver.signatures
    moment = sent.partition(",")[0].removeprefix("t=")
    signed = moment.encode() + b"." + body if encoding == "timestamped" else body
    digest = hmac.new(SECRET.encode(), signed, hashlib.sha256)
    if encoding == "timestamped":
        assert abs(int(moment) - time.time()) < 60
    expected = {
        "hex": digest.hexdigest(),
        "base64": base64.b64encode(digest.digest()).decode(),
        "sha256": f"sha256={digest.hexdigest()}",
        "timestamped": f"t={moment},v1={digest.hexdigest()}",
    }
    assert sent == expected[encoding]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "signing.created"),
        ({"event_names": "snake"}, "signing_created"),
        ({"event_names": "upper"}, "SIGNING_CREATED"),
        ({"event_shape": "flat"}, "signing.created"),
    ],
)
async def test_payload_follows_the_profile_and_is_read_by_the_webhooks_package(
    receiver: Receiver, settings: dict[str, Any], expected: str
) -> None:
    async with Sandbox(profile=Profile(**settings), webhook_url=receiver.url, webhook_secret=SECRET) as sandbox:
        create(sandbox)
        await receiver.got(1)
    sent = json.loads(receiver.bodies[0])
    assert (sent["event.type"] if "event_shape" in settings else sent["event"]["type"]) == expected
    assert WebhookVerifier(SECRET).parse(receiver.bodies[0], receiver.signatures[0]).type == expected


# endpoints


async def test_each_endpoint_gets_each_event_and_a_second_registration_is_warned_of(
    hooked: Sandbox, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    other = hooked.webhooks.register(receiver.url)
    assert "registered twice" in caplog.text
    create(hooked)
    await receiver.got(2)
    assert len(set(receiver.bodies)) == 1
    keys = {SECRET.encode(), other.secret.encode()}
    assert {hmac.new(key, receiver.bodies[0], hashlib.sha256).hexdigest() for key in keys} == set(receiver.signatures)


async def test_removed_endpoint_gets_nothing_more_not_even_pending_deliveries(
    hooked: Sandbox, receiver: Receiver
) -> None:
    receiver.responses = [500]
    create(hooked)
    await receiver.got(1)
    await hooked.webhooks.settled()
    [endpoint] = hooked.webhooks.endpoints()
    hooked.webhooks.remove(endpoint.id)
    hooked.webhooks.remove(hooked.webhooks.register("http://127.0.0.1:1/").id)  # which was never used
    hooked.clock.advance(days=1)
    create(hooked)
    await hooked.webhooks.settled()
    assert len(receiver.bodies) == 1
    [delivery] = hooked.webhooks.deliveries()
    assert (delivery.state, delivery.last_error) == ("failed", "the endpoint was removed")
    with pytest.raises(Refused, match="no such"):
        hooked.webhooks.event("nope")
    with pytest.raises(Refused, match="no such"):
        hooked.webhooks.resend(delivery.id)


async def test_resend_delivers_the_same_event_as_a_new_delivery(hooked: Sandbox, receiver: Receiver) -> None:
    create(hooked)
    await receiver.got(1)
    again = hooked.webhooks.resend(hooked.webhooks.deliveries()[0].id)
    await receiver.got(2)
    await hooked.webhooks.settled()
    assert receiver.bodies[0] == receiver.bodies[1]
    assert [delivery.id for delivery in hooked.webhooks.deliveries(1)] == [again.id]
    assert (len(hooked.webhooks.deliveries()), len(hooked.webhooks.attempts(1))) == (2, 1)
    assert (hooked.webhooks.deliveries(0), hooked.webhooks.attempts(0)) == ([], [])


def test_webhook_url_off_this_machine_is_refused(signing_sandbox: Sandbox) -> None:
    for url in (
        *("http://192.0.2.1/hook", "https://example.com/hook", "http://127.0.0.1.example.com/", "ftp://127.0.0.1/"),
        *("/hook", "", "http://", "http://[::1", "http://127.0.0.1:99999/", "http://127.0.0.1/a b"),
        "http://2130706433/",
    ):
        with pytest.raises(Refused) as caught:
            signing_sandbox.webhooks.register(url, "")
        assert set(caught.value.errors) == {"url", "secret"}
        assert "; " in str(caught.value)


async def test_every_loopback_url_is_accepted_and_resolved_without_a_name_server(
    signing_sandbox: Sandbox, receiver: Receiver
) -> None:
    for url in ("http://127.8.9.1/", "http://[::1]:1/", "https://LOCALHOST./x"):
        assert signing_sandbox.webhooks.register(url).secret
    signing_sandbox.webhooks.register(receiver.url.replace("127.0.0.1", "hooks.localhost"))
    create(signing_sandbox)
    await receiver.got(1)


async def test_webhook_url_is_registered_once_however_often_the_sandbox_starts(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with Sandbox(data=tmp_path, webhook_url=receiver.url) as sandbox:
        made = sandbox.webhooks.endpoints()
    async with Sandbox(data=tmp_path, webhook_url=receiver.url) as sandbox:
        assert sandbox.webhooks.endpoints() == made
    async with Sandbox(data=tmp_path, webhook_url=receiver.url, webhook_secret=SECRET) as sandbox:
        create(sandbox)
        await sandbox.webhooks.settled()
    assert receiver.signatures == [hmac.new(SECRET.encode(), receiver.bodies[0], hashlib.sha256).hexdigest()]
    with pytest.raises(Refused, match="secret"):
        async with Sandbox(data=tmp_path, webhook_url=receiver.url, webhook_secret=""):
            pass


async def test_remote_endpoints_need_allow_remote_webhooks_in_every_run(tmp_path: Path, receiver: Receiver) -> None:
    elsewhere = receiver.url.replace("127.0.0.1", "0.0.0.0")  # no loopback address, and yet this machine
    async with Sandbox(data=tmp_path, allow_remote_webhooks=True) as sandbox:
        sandbox.webhooks.register(elsewhere)
        create(sandbox)
        await receiver.got(1)
    async with Sandbox(data=tmp_path) as sandbox:
        create(sandbox)
        await sandbox.webhooks.settled()
        [delivery] = sandbox.webhooks.deliveries(1)
        assert (len(receiver.bodies), delivery.state) == (1, "pending")
        assert "not on this machine" in (delivery.last_error or "")


async def test_event_of_a_request_that_ends_while_stopping_is_delivered_by_the_next_run(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with Sandbox(data=tmp_path, webhook_url=receiver.url) as sandbox:
        create(sandbox, "A")
        await sandbox.webhooks.settled()
        await sandbox.webhooks.close()
        create(sandbox, "B")
        assert len(receiver.bodies) == 1
    async with Sandbox(data=tmp_path):
        await receiver.got(2)
    assert [json.loads(body)["signing"]["name"] for body in receiver.bodies] == ["A", "B"]


# retries


async def test_failed_delivery_is_retried_on_the_sandboxs_clock_and_logged(
    hooked: Sandbox, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "signing_async.sandbox")
    receiver.location = "/hook/?code=s3cret"
    receiver.responses = [307, 500, 500, 500, 500, 500, 500, 500]
    hooked.faults.add(DELIVERY, "slow", seconds=0.01)
    create(hooked)
    for step, seconds in enumerate((5, 30, 120, 600, 3600, 6 * 3600, 24 * 3600), 1):
        await receiver.got(step)
        await hooked.webhooks.settled()
        [delivery] = hooked.webhooks.deliveries()
        assert (delivery.state, delivery.attempts) == ("pending", step)
        hooked.clock.advance(seconds=seconds - 4)
        await asyncio.sleep(0.01)
        assert len(receiver.bodies) == step
        hooked.clock.advance(seconds=4)
    await receiver.got(8)
    await hooked.webhooks.settled()
    hooked.clock.advance(days=30)
    await hooked.webhooks.settled()
    [delivery] = hooked.webhooks.deliveries()
    assert (delivery.state, delivery.attempts, delivery.due_at) == ("failed", 8, None)
    assert len(set(receiver.bodies)) == 1
    assert [attempt.status for attempt in hooked.webhooks.attempts()] == [307] + [500] * 7
    hooked.faults.add(DELIVERY, "lose")
    create(hooked)
    create(hooked)
    await hooked.webhooks.settled()
    start = f"deliver signing.created -> {receiver.url}"
    assert [message for message in caplog.messages if message.startswith("deliver ")] == [
        f"{start} 307 redirected to /hook/: not followed, retry in 5 s (fault: slow)",
        *(f"{start} 500, retry in {span}" for span in SPANS[1:]),
        f"{start} 500, no more retries",
        f"{start} lost on purpose",
        f"{start} 202",
    ]


async def test_unreachable_endpoint_is_recorded_and_logged_without_its_secrets(
    signing_sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "signing_async.sandbox")
    signing_sandbox.webhooks.register("http://user:s3cret@localhost:1/hook?key=s3cret")
    create(signing_sandbox)
    await signing_sandbox.webhooks.settled()
    [attempt] = signing_sandbox.webhooks.attempts()
    assert (attempt.status, attempt.error) == (None, f"could not connect: {os.strerror(errno.ECONNREFUSED)}")
    assert signing_sandbox.webhooks.deliveries()[0].state == "pending"
    [line] = [message for message in caplog.messages if message.startswith("deliver ")]
    assert line.startswith("deliver signing.created -> http://localhost:1/hook could not connect: ")


async def test_endpoint_that_does_not_speak_http_is_retried(signing_sandbox: Sandbox) -> None:
    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"nonsense\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        signing_sandbox.webhooks.register(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        create(signing_sandbox)
        await signing_sandbox.webhooks.settled()
    [delivery] = signing_sandbox.webhooks.deliveries()
    assert (delivery.state, (delivery.last_error or "")[:21]) == ("pending", "the delivery failed: ")


async def test_endpoint_that_does_not_respond_in_time_is_retried(
    hooked: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signing_async.sandbox.deliveries.TIMEOUT", 0.2)
    hooked.faults.add(DELIVERY, "slow", seconds=30)
    create(hooked)
    await hooked.webhooks.settled()
    assert hooked.webhooks.attempts()[0].error == "no response within 0.2 seconds"


async def test_delivery_in_flight_leaves_no_trace_in_a_restored_sandbox(hooked: Sandbox, receiver: Receiver) -> None:
    snapshot = hooked.snapshot()
    receiver.delay = 0.1
    hooked.faults.add(DELIVERY, "duplicate")
    create(hooked)
    await receiver.got(1)
    hooked.restore(snapshot)
    create(hooked)
    await hooked.webhooks.settled()
    assert len(receiver.bodies) == 2
    assert [delivery.state for delivery in hooked.webhooks.deliveries()] == ["delivered"]
    assert len(hooked.webhooks.attempts()) == 1


# faults


async def test_duplicate_fault_delivers_twice_whatever_the_second_response(hooked: Sandbox, receiver: Receiver) -> None:
    receiver.responses = [202, 500]
    hooked.faults.add(DELIVERY, "duplicate")
    create(hooked)
    await until(lambda: len(hooked.webhooks.attempts()) == 2)
    assert receiver.bodies[0] == receiver.bodies[1]
    [delivery] = hooked.webhooks.deliveries()
    assert (delivery.state, delivery.due_at) == ("delivered", None)
    create(hooked)
    await receiver.got(3)
    await hooked.webhooks.settled()
    assert [attempt.fault for attempt in hooked.webhooks.attempts()] == ["duplicate", "duplicate", None]


@pytest.mark.parametrize("count", [1, 2])
async def test_reorder_fault_delivers_the_next_event_first_if_there_is_one(
    hooked: Sandbox, receiver: Receiver, count: int
) -> None:
    fault = hooked.faults.add(DELIVERY, "reorder")
    create(hooked)
    await until(lambda: fault.hits)
    for _ in range(count - 1):
        create(hooked)
    await receiver.got(count)
    await hooked.webhooks.settled()
    assert [event_id for _, event_id in receiver.events] == [event.id for event in hooked.webhooks.events()][::-1]


async def test_wrong_signature_fault_sends_a_well_formed_invalid_signature(hooked: Sandbox, receiver: Receiver) -> None:
    hooked.faults.add(DELIVERY, "wrong-signature")
    create(hooked)
    await receiver.got(1)
    right = hmac.new(SECRET.encode(), receiver.bodies[0], hashlib.sha256).hexdigest()
    assert len(receiver.signatures[0]) == len(right)
    assert receiver.signatures[0] != right


async def test_drop_fault_breaks_off_and_the_delivery_is_retried(hooked: Sandbox, receiver: Receiver) -> None:
    hooked.faults.add(DELIVERY, "drop")
    create(hooked)
    await hooked.webhooks.settled()
    assert receiver.bodies == []
    assert hooked.webhooks.deliveries()[0].state == "pending"
    hooked.clock.advance(seconds=5)
    await receiver.got(1)


async def test_lose_fault_never_delivers_the_event(hooked: Sandbox, receiver: Receiver) -> None:
    hooked.faults.add(DELIVERY, "lose")
    await hooked.cancel(create(hooked))
    await receiver.got(1)
    await hooked.webhooks.settled()
    assert receiver.types == ["signing.cancelled"]
    assert [delivery.state for delivery in hooked.webhooks.deliveries()] == ["lost", "delivered"]
