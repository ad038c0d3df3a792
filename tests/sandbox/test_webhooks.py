"""Webhooks (section 6 of the specification): endpoints, events, signatures, retries, and faults on demand."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from signing_async.sandbox import Profile, Refused, Sandbox
from signing_async.webhooks import Scheme, WebhookVerifier
from tests.sandbox.receiving import SECRET, Receiver, until
from tests.sandbox.serving import Caller

DELIVERY = "webhooks.deliver"
SPANS = ["5 s", "30 s", "2 min", "10 min", "1 h", "6 h", "24 h"]


def sign(body: bytes, secret: str = SECRET) -> str:
    """Return the X-Signature of a body."""
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


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


@pytest.mark.parametrize(
    ("encoding", "settings", "form", "kind"),
    [
        ("hex", {"event_shape": "flat"}, "[0-9a-f]{64}", "signing.created"),
        ("base64", {"event_names": "snake"}, "[A-Za-z0-9+/]{43}=", "signing_created"),
        ("sha256", {"event_names": "upper"}, "sha256=[0-9a-f]{64}", "SIGNING_CREATED"),
        ("timestamped", {}, r"t=\d+,v1=[0-9a-f]{64}", "signing.created"),
    ],
)
async def test_signature_and_payload_follow_the_profile_and_are_accepted_by_the_webhooks_package(
    receiver: Receiver, encoding: Any, settings: dict[str, Any], form: str, kind: str
) -> None:
    profile = Profile(signature=encoding, **settings)
    async with Sandbox(profile=profile, webhook_url=receiver.url, webhook_secret=SECRET) as sandbox:
        create(sandbox, "åäö 🖋")
        await receiver.got(1)
    [body], [signature] = receiver.bodies, receiver.signatures
    assert re.fullmatch(form, signature)
    stamped = {"signed": "{timestamp}.{body}", "timestamp_label": "t="} if encoding == "timestamped" else {}
    assert WebhookVerifier(SECRET, Scheme(**stamped)).parse(body, signature).type == kind
    payload = json.loads(body)
    assert (payload["event.type"] if "event_shape" in settings else payload["event"]["type"]) == kind


# endpoints


async def test_each_endpoint_gets_each_event_and_a_second_registration_is_warned_of(
    hooked: Sandbox, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    other = hooked.webhooks.register(receiver.url)
    assert "registered twice" in caplog.text
    create(hooked)
    await receiver.got(2)
    assert len(set(receiver.bodies)) == 1
    assert {sign(receiver.bodies[0]), sign(receiver.bodies[0], other.secret)} == set(receiver.signatures)


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


async def test_only_loopback_urls_are_accepted_and_resolved_without_a_name_server(
    signing_sandbox: Sandbox, receiver: Receiver
) -> None:
    for url in (
        *("http://192.0.2.1/hook", "https://example.com/hook", "http://127.0.0.1.example.com/", "ftp://127.0.0.1/"),
        *("/hook", "", "http://", "http://[::1", "http://127.0.0.1:99999/", "http://127.0.0.1/a b"),
        "http://2130706433/",
    ):
        with pytest.raises(Refused, match="; ") as caught:
            signing_sandbox.webhooks.register(url, "")
        assert set(caught.value.errors) == {"url", "secret"}
    for url in ("http://127.8.9.1/", "http://[::1]:1/", "https://LOCALHOST./x"):
        assert signing_sandbox.webhooks.register(url).secret
    signing_sandbox.webhooks.register(receiver.url.replace("127.0.0.1", "hooks.localhost"))
    create(signing_sandbox)
    await receiver.got(1)


async def test_webhook_url_is_registered_once_and_what_the_last_run_left_is_delivered(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with Sandbox(data=tmp_path, webhook_url=receiver.url) as sandbox:
        made = sandbox.webhooks.endpoints()
        create(sandbox, "A")
        await sandbox.webhooks.settled()
        await sandbox.webhooks.close()
        create(sandbox, "B")  # by a request that ends while the sandbox stops
        assert len(receiver.bodies) == 1
    async with Sandbox(data=tmp_path, webhook_url=receiver.url) as sandbox:
        assert sandbox.webhooks.endpoints() == made
        await receiver.got(2)
    assert [json.loads(body)["signing"]["name"] for body in receiver.bodies] == ["A", "B"]
    async with Sandbox(data=tmp_path, webhook_url=receiver.url, webhook_secret=SECRET) as sandbox:
        create(sandbox)
        await sandbox.webhooks.settled()
    assert receiver.signatures[-1] == sign(receiver.bodies[-1])
    with pytest.raises(Refused, match="secret"):
        await Sandbox(data=tmp_path, webhook_url=receiver.url, webhook_secret="").start()


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


async def test_unreachable_endpoint_or_one_without_http_is_retried_and_logged_without_its_secrets(
    signing_sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"nonsense\r\n\r\n")
        writer.close()

    caplog.set_level(logging.INFO, "signing_async.sandbox")
    webhooks = signing_sandbox.webhooks
    webhooks.register("http://user:s3cret@localhost:1/hook?key=s3cret")
    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        webhooks.register(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        create(signing_sandbox)
        await webhooks.settled()
    attempts = {attempt.delivery_id: attempt for attempt in webhooks.attempts()}
    unreachable, other = webhooks.deliveries()
    assert (unreachable.state, other.state) == ("pending", "pending")
    reason = f"could not connect: {os.strerror(errno.ECONNREFUSED)}"
    assert (attempts[unreachable.id].status, attempts[unreachable.id].error) == (None, reason)
    assert (attempts[other.id].error or "").startswith("the delivery failed: ")
    logged = [record.getMessage() for record in caplog.records if record.name == "signing_async.sandbox"]
    start = "deliver signing.created -> http://localhost:1/hook could not connect: "
    assert len([message for message in logged if message.startswith(start)]) == 1
    assert "s3cret" not in str(logged)


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


async def test_wrong_signature_drop_and_lose_faults_do_what_their_names_say(
    hooked: Sandbox, receiver: Receiver
) -> None:
    hooked.faults.add(DELIVERY, "wrong-signature")
    create(hooked)
    await receiver.got(1)
    right = sign(receiver.bodies[0])
    assert len(receiver.signatures[0]) == len(right)
    assert receiver.signatures[0] != right
    await hooked.webhooks.settled()
    hooked.faults.add(DELIVERY, "drop")
    create(hooked)
    await hooked.webhooks.settled()
    assert (len(receiver.bodies), hooked.webhooks.deliveries(1)[0].state) == (1, "pending")
    hooked.clock.advance(seconds=5)
    await receiver.got(2)
    await hooked.webhooks.settled()
    hooked.faults.add(DELIVERY, "lose")
    await hooked.cancel(create(hooked))
    await receiver.got(3)
    await hooked.webhooks.settled()
    assert receiver.types == ["signing.created", "signing.created", "signing.cancelled"]
    assert [delivery.state for delivery in hooked.webhooks.deliveries(2)] == ["lost", "delivered"]
