"""Webhooks (section 6 of the specification): events, endpoints, signatures."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import pytest

from signing_async.sandbox import Profile, Refused, Sandbox
from signing_async.webhooks import WebhookVerifier
from tests.sandbox.receiving import SECRET, Receiver
from tests.sandbox.serving import Caller


async def test_every_change_of_a_signing_is_delivered_in_order(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    signing_id, _, people = await call.sent(recipients=2)
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


async def test_refused_send_emits_no_event(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    signing_id = await call.draft()
    await call("POST", f"/api/1.0/signings/{signing_id}/send")
    await hooked.webhooks.settled()
    assert receiver.types == ["signing.created"]


def expected_signature(encoding: str, body: bytes, sent: str) -> str:
    """Return the signature, computed with the standard library."""
    digest = hmac.new(SECRET.encode(), body, hashlib.sha256)
    if encoding == "base64":
        return base64.b64encode(digest.digest()).decode()
    if encoding == "timestamped":
        moment = sent.partition(",")[0].removeprefix("t=")
        assert abs(int(moment) - time.time()) < 60
        return f"t={moment},v1={hmac.new(SECRET.encode(), moment.encode() + b'.' + body, hashlib.sha256).hexdigest()}"
    return {"hex": "", "sha256": "sha256="}[encoding] + digest.hexdigest()


@pytest.mark.parametrize("encoding", ["hex", "base64", "sha256", "timestamped"])
async def test_x_signature_is_the_hmac_of_the_raw_body_in_the_profiles_encoding(
    receiver: Receiver, encoding: Any
) -> None:
    async with Sandbox(profile=Profile(signature=encoding), webhook_url=receiver.url, webhook_secret=SECRET) as sandbox:
        user = sandbox.accounts.default_user()
        sandbox.service.create_signing(user, {"name": "åäö 🖋", "language": "EN"})
        await receiver.got(1)
    [body], [sent] = receiver.bodies, receiver.signatures
    assert sent == expected_signature(encoding, body, sent)


@pytest.mark.parametrize(
    ("names", "expected"),
    [("dotted", "signing.created"), ("snake", "signing_created"), ("upper", "SIGNING_CREATED")],
)
async def test_event_names_follow_the_profile(receiver: Receiver, names: Any, expected: str) -> None:
    async with Sandbox(profile=Profile(event_names=names), webhook_url=receiver.url) as sandbox:
        sandbox.service.create_signing(sandbox.accounts.default_user(), {"name": "A", "language": "EN"})
        await receiver.got(1)
    assert receiver.types == [expected]


async def test_flat_payload_is_read_by_the_webhooks_package(receiver: Receiver) -> None:
    profile = Profile(event_shape="flat")
    async with Sandbox(profile=profile, webhook_url=receiver.url, webhook_secret=SECRET) as sandbox:
        sandbox.service.create_signing(sandbox.accounts.default_user(), {"name": "A", "language": "EN"})
        await receiver.got(1)
    sent = json.loads(receiver.bodies[0])
    event = WebhookVerifier(SECRET).parse(receiver.bodies[0], receiver.signatures[0])
    assert (event.id, event.type) == (sent["event.id"], sent["event.type"])


async def test_each_endpoint_gets_each_event_signed_with_its_own_secret(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    other = hooked.webhooks.register(receiver.url)
    await call.draft()
    await receiver.got(2)
    assert len(set(receiver.bodies)) == 1
    keys = {SECRET.encode(), other.secret.encode()}
    assert {hmac.new(key, receiver.bodies[0], hashlib.sha256).hexdigest() for key in keys} == set(receiver.signatures)


async def test_removed_endpoint_gets_nothing_more_not_even_pending_deliveries(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    receiver.responses = [500]
    await call.draft()
    await receiver.got(1)
    await hooked.webhooks.settled()
    [endpoint] = hooked.webhooks.endpoints()
    hooked.webhooks.remove(endpoint.id)
    hooked.clock.advance(days=1)
    await call.draft()
    await hooked.webhooks.settled()
    assert len(receiver.bodies) == 1
    [delivery] = hooked.webhooks.deliveries()
    assert (delivery.state, delivery.last_error) == ("failed", "the endpoint was removed")
    for action in (hooked.webhooks.remove, hooked.webhooks.resend, hooked.webhooks.event, hooked.webhooks.delivery):
        with pytest.raises(Refused, match="no such"):
            action("nope")
    with pytest.raises(Refused, match="no such"):
        hooked.webhooks.resend(delivery.id)


async def test_resend_delivers_the_same_event_as_a_new_delivery(
    hooked: Sandbox, receiver: Receiver, call: Caller
) -> None:
    await call.draft()
    await receiver.got(1)
    again = hooked.webhooks.resend(hooked.webhooks.deliveries()[0].id)
    await receiver.got(2)
    assert receiver.bodies[0] == receiver.bodies[1]
    assert [d.id for d in hooked.webhooks.deliveries(1)] == [again.id]


@pytest.mark.parametrize(
    "url",
    ["http://192.0.2.1/hook", "https://example.com/hook", "http://127.0.0.1.example.com/", "ftp://127.0.0.1/", "/hook",
     "", "http://", "http://[::1", "http://127.0.0.1:99999/", "http://127.0.0.1/a b", "http://2130706433/"],
)  # fmt: skip
async def test_webhook_url_off_this_machine_is_refused(signing_sandbox: Sandbox, url: str) -> None:
    with pytest.raises(Refused) as caught:
        signing_sandbox.webhooks.register(url, "")
    assert set(caught.value.errors) == {"url", "secret"}
    assert "; " in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://127.8.9.1/", "http://[::1]:1/", "https://LOCALHOST./x"])
async def test_every_loopback_url_is_accepted(signing_sandbox: Sandbox, url: str) -> None:
    assert signing_sandbox.webhooks.register(url).secret


async def test_webhook_url_is_registered_once_however_often_the_sandbox_starts(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with Sandbox(data=tmp_path, webhook_url=receiver.url) as sandbox:
        made = sandbox.webhooks.endpoints()
    async with Sandbox(data=tmp_path, webhook_url=receiver.url) as sandbox:
        assert sandbox.webhooks.endpoints() == made
    async with Sandbox(data=tmp_path, webhook_url=receiver.url, webhook_secret=SECRET) as sandbox:
        sandbox.service.create_signing(sandbox.accounts.default_user(), {"name": "A", "language": "EN"})
        await sandbox.webhooks.settled()
    [body], [told] = receiver.bodies, receiver.signatures
    assert told == hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    with pytest.raises(Refused, match="secret"):
        async with Sandbox(data=tmp_path, webhook_url=receiver.url, webhook_secret=""):
            pass


async def test_remote_endpoint_of_an_earlier_run_gets_nothing_if_no_longer_allowed(
    tmp_path: Path, receiver: Receiver
) -> None:
    elsewhere = receiver.url.replace("127.0.0.1", "0.0.0.0")  # no loopback address, and yet this machine
    async with Sandbox(data=tmp_path, allow_remote_webhooks=True) as sandbox:
        sandbox.webhooks.register(elsewhere)
    async with Sandbox(data=tmp_path) as sandbox:
        sandbox.service.create_signing(sandbox.accounts.default_user(), {"name": "A", "language": "EN"})
        await sandbox.webhooks.settled()
        [delivery] = sandbox.webhooks.deliveries()
        assert receiver.bodies == []
        assert delivery.state == "pending"
        assert "not on this machine" in (delivery.last_error or "")


@pytest.mark.signing_sandbox(allow_remote_webhooks=True)
async def test_remote_urls_are_accepted_with_allow_remote_webhooks(
    signing_sandbox: Sandbox, receiver: Receiver, call: Caller
) -> None:
    assert signing_sandbox.webhooks.register(receiver.url)
    await call.draft()
    await receiver.got(1)
    assert signing_sandbox.webhooks.register("https://hooks.example/").url == "https://hooks.example/"


async def test_event_of_a_request_that_ends_while_stopping_is_delivered_by_the_next_run(
    tmp_path: Path, receiver: Receiver
) -> None:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    async with Sandbox(data=tmp_path) as sandbox:
        sandbox.webhooks.register(receiver.url, SECRET)
        user = sandbox.accounts.default_user()
        sandbox.service.create_signing(user, {"name": "A", "language": "EN"})
        await sandbox.webhooks.settled()
        await sandbox.webhooks.close()
        sandbox.service.create_signing(user, {"name": "B", "language": "EN"})
        sandbox.webhooks.register(f"{receiver.url}?second", SECRET)
        sandbox.service.create_signing(user, {"name": "C", "language": "EN"})
        await asyncio.sleep(0.02)
    gc.collect()
    assert (problems, len(receiver.bodies)) == ([], 1)
    async with Sandbox(data=tmp_path):
        await receiver.got(4)
    assert sorted(json.loads(body)["signing"]["name"] for body in receiver.bodies) == ["A", "B", "C", "C"]


async def test_unused_endpoint_can_be_removed(signing_sandbox: Sandbox) -> None:
    endpoint = signing_sandbox.webhooks.register("http://127.0.0.1:1/")
    signing_sandbox.webhooks.remove(endpoint.id)
    assert signing_sandbox.webhooks.endpoints() == []
