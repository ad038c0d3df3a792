"""Webhooks out (section 6 of the specification): signed, in order, again until they arrive, and wrong on demand."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from signing_async.sandbox import Profile, Refused, Sandbox
from signing_async.sandbox.courier import BACK_OFF
from signing_async.sandbox.faults import DELIVERY
from signing_async.webhooks import WebhookVerifier
from tests.sandbox.serving import Caller

SECRET = "a shared secret"


@dataclass
class Receiver:
    """An integrator's endpoint: keeps what comes, and answers what it is told to."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    signatures: list[str] = field(default_factory=list)
    broken: int = 0
    answers: list[int] = field(default_factory=list)
    location: str = ""
    delay: float = 0

    async def take(self, request: web.Request) -> web.Response:
        """One delivery."""
        try:
            body = await request.read()
        except Exception:
            self.broken += 1
            raise
        self.bodies.append(body)
        self.signatures.append(request.headers["X-Signature"])
        await asyncio.sleep(self.delay)
        status = self.answers.pop(0) if self.answers else 202
        return web.Response(status=status, headers={"Location": self.location} if self.location else None)

    @property
    def events(self) -> list[tuple[str, str]]:
        """Type and id of what came."""
        return [(e["event"]["type"], e["event"]["id"]) for e in map(json.loads, self.bodies)]

    @property
    def types(self) -> list[str]:
        """The types of what came."""
        return [kind for kind, _ in self.events]

    async def got(self, count: int) -> None:
        """Wait until so many came."""
        async with asyncio.timeout(10):
            while len(self.bodies) < count:
                await asyncio.sleep(0.005)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hook", receiver.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    yield receiver
    await runner.cleanup()


@pytest.fixture
def hooked(signing_sandbox: Sandbox, receiver: Receiver) -> Sandbox:
    """The sandbox, delivering to the receiver."""
    signing_sandbox.webhooks.register(receiver.url, SECRET)
    return signing_sandbox


async def test_every_change_is_an_event(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """Each lifecycle change is one delivery, in order, with event.id, event.type, and what it is about."""
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


async def test_cancelling_and_declining_are_events(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """Cancelled and declined signings are told."""
    _, _, [person] = await call.sent()
    await hooked.decline(person)
    await hooked.cancel(await call.draft())
    await receiver.got(6)
    assert receiver.types[2:] == ["recipient.declined", "signing.cancelled", "signing.created", "signing.cancelled"]


async def test_what_is_refused_is_no_event(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """A send that is refused tells nobody anything."""
    signing_id = await call.draft()
    await call("POST", f"/api/1.0/signings/{signing_id}/send")
    await hooked.webhooks.settled()
    assert receiver.types == ["signing.created"]


def expected_signature(encoding: str, body: bytes, sent: str) -> str:
    """The signature by the standard library alone."""
    digest = hmac.new(SECRET.encode(), body, hashlib.sha256)
    if encoding == "base64":
        return base64.b64encode(digest.digest()).decode()
    if encoding == "timestamped":
        moment = sent.partition(",")[0].removeprefix("t=")
        assert abs(int(moment) - time.time()) < 60
        return f"t={moment},v1={hmac.new(SECRET.encode(), moment.encode() + b'.' + body, hashlib.sha256).hexdigest()}"
    return {"hex": "", "sha256": "sha256="}[encoding] + digest.hexdigest()


@pytest.mark.parametrize("encoding", ["hex", "base64", "sha256", "timestamped"])
async def test_x_signature(receiver: Receiver, encoding: Any) -> None:
    """X-Signature is the HMAC-SHA256 of the raw body under the shared secret, in the profile's encoding."""
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
async def test_event_names(receiver: Receiver, names: Any, expected: str) -> None:
    """Types of events are spelt as the profile wants."""
    async with Sandbox(profile=Profile(event_names=names), webhook_url=receiver.url) as sandbox:
        sandbox.service.create_signing(sandbox.accounts.default_user(), {"name": "A", "language": "EN"})
        await receiver.got(1)
    assert receiver.types == [expected]


async def test_flat_events(receiver: Receiver) -> None:
    """With another profile the members are named `event.id` and `event.type`, and the package's receiver reads them."""
    profile = Profile(event_shape="flat")
    async with Sandbox(profile=profile, webhook_url=receiver.url, webhook_secret=SECRET) as sandbox:
        sandbox.service.create_signing(sandbox.accounts.default_user(), {"name": "A", "language": "EN"})
        await receiver.got(1)
    sent = json.loads(receiver.bodies[0])
    event = WebhookVerifier(SECRET).parse(receiver.bodies[0], receiver.signatures[0])
    assert (event.id, event.type) == (sent["event.id"], sent["event.type"])


# again until it arrives


async def test_retries_keep_the_event_id(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """A delivery that is not answered with a success comes again, with back-off, the very same."""
    receiver.answers = [500, 302, 404]
    await call.draft()
    for step, seconds in enumerate(BACK_OFF[:3], 1):
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


async def test_it_gives_up(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """After the last repetition the delivery has failed."""
    receiver.answers = [500] * 20
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


async def test_nobody_there(signing_sandbox: Sandbox, call: Caller) -> None:
    """An endpoint that cannot be reached is logged with the reason, and tried again."""
    signing_sandbox.webhooks.register("http://localhost:1/hook")
    await call.draft()
    await signing_sandbox.webhooks.settled()
    [attempt] = signing_sandbox.webhooks.attempts()
    assert attempt.status is None
    assert attempt.error
    assert "Connect" in attempt.error
    assert signing_sandbox.webhooks.deliveries()[0].state == "pending"


async def test_a_redirect_is_not_followed(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """A receiver cannot send deliveries elsewhere."""
    receiver.answers, receiver.location = [307], receiver.url
    await call.draft()
    await hooked.webhooks.settled()
    assert len(receiver.bodies) == 1


async def test_a_receiver_that_does_not_answer(
    hooked: Sandbox, receiver: Receiver, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver has its seconds to answer; then the delivery counts as not made."""
    from signing_async.sandbox import courier

    monkeypatch.setattr(courier, "TIMEOUT", 0.2)
    hooked.faults.add(DELIVERY, "slow", seconds=30)
    await call.draft()
    await hooked.webhooks.settled()
    [attempt] = hooked.webhooks.attempts()
    assert attempt.error == "no response within 0.2 seconds"


async def test_two_endpoints(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """Each endpoint gets each event, signed with its own secret."""
    other = hooked.webhooks.register(receiver.url)
    await call.draft()
    await receiver.got(2)
    assert len(set(receiver.bodies)) == 1
    keys = {SECRET.encode(), other.secret.encode()}
    assert {hmac.new(key, receiver.bodies[0], hashlib.sha256).hexdigest() for key in keys} == set(receiver.signatures)


async def test_removing_an_endpoint(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """A removed endpoint gets nothing more, also not what was pending."""
    receiver.answers = [500]
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


async def test_removing_an_endpoint_that_was_never_used(signing_sandbox: Sandbox) -> None:
    """An endpoint can go before anything was delivered."""
    endpoint = signing_sandbox.webhooks.register("http://127.0.0.1:1/")
    signing_sandbox.webhooks.remove(endpoint.id)
    assert signing_sandbox.webhooks.endpoints() == []


async def test_resend(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """A delivery can be sent again by hand: the same event, a new delivery."""
    await call.draft()
    await receiver.got(1)
    again = hooked.webhooks.resend(hooked.webhooks.deliveries()[0].id)
    await receiver.got(2)
    assert receiver.bodies[0] == receiver.bodies[1]
    assert [d.id for d in hooked.webhooks.deliveries(1)] == [again.id]


# wrong on demand


async def test_duplicates(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """duplicate: the same delivery twice."""
    hooked.faults.add(DELIVERY, "duplicate")
    await call.draft()
    await receiver.got(2)
    assert receiver.bodies[0] == receiver.bodies[1]
    await call.draft()
    await receiver.got(3)
    await hooked.webhooks.settled()
    assert [attempt.fault for attempt in hooked.webhooks.attempts()] == ["duplicate", "duplicate", None]


async def test_a_duplicate_that_fails(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """duplicate: what was taken the first time is delivered, whatever is answered to the second."""
    receiver.answers = [202, 500]
    hooked.faults.add(DELIVERY, "duplicate")
    await call.draft()
    async with asyncio.timeout(5):
        while len(hooked.webhooks.attempts()) < 2:
            await asyncio.sleep(0.005)
    [delivery] = hooked.webhooks.deliveries()
    assert (delivery.state, delivery.due_at) == ("delivered", None)


async def test_reordering(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """reorder: the next event first, though it is still to come."""
    fault = hooked.faults.add(DELIVERY, "reorder")
    await call.draft()
    async with asyncio.timeout(5):
        while not fault.hits:
            await asyncio.sleep(0.005)
    await call.draft()
    await receiver.got(2)
    ids = [event.id for event in hooked.webhooks.events()]
    assert [event_id for _, event_id in receiver.events] == ids[::-1]


async def test_reordering_of_what_is_waiting(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """reorder: two deliveries that are due together change places."""
    hooked.faults.add(DELIVERY, "reorder")
    signing_id = hooked.service.create_signing(hooked.accounts.default_user(), {"name": "A", "language": "EN"}).id
    hooked.service.cancel(signing_id)
    await receiver.got(2)
    assert receiver.types == ["signing.cancelled", "signing.created"]


async def test_reordering_of_a_single_one(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """reorder: when no other comes within a second, it is delivered alone."""
    hooked.faults.add(DELIVERY, "reorder")
    await call.draft()
    await receiver.got(1)
    await hooked.webhooks.settled()
    assert hooked.webhooks.deliveries()[0].state == "delivered"


async def test_a_wrong_signature(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """wrong-signature: well-formed and wrong."""
    hooked.faults.add(DELIVERY, "wrong-signature")
    await call.draft()
    await receiver.got(1)
    right = hmac.new(SECRET.encode(), receiver.bodies[0], hashlib.sha256).hexdigest()
    assert len(receiver.signatures[0]) == len(right)
    assert receiver.signatures[0] != right


async def test_a_slow_delivery(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """slow: the body pauses halfway and is whole in the end."""
    hooked.faults.add(DELIVERY, "slow", seconds=0.1)
    started = time.monotonic()
    await call.draft()
    await receiver.got(1)
    assert time.monotonic() - started >= 0.1
    assert json.loads(receiver.bodies[0])


async def test_a_dropped_delivery(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """drop: it breaks off halfway, and comes again whole."""
    hooked.faults.add(DELIVERY, "drop")
    await call.draft()
    await hooked.webhooks.settled()
    assert receiver.bodies == []
    assert hooked.webhooks.deliveries()[0].state == "pending"
    hooked.clock.advance(seconds=BACK_OFF[0])
    await receiver.got(1)
    assert json.loads(receiver.bodies[0])


async def test_a_lost_delivery(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """lose: it never comes; the next one does."""
    hooked.faults.add(DELIVERY, "lose")
    signing_id = await call.draft()
    await hooked.cancel(signing_id)
    await receiver.got(1)
    await hooked.webhooks.settled()
    assert receiver.types == ["signing.cancelled"]
    assert [d.state for d in hooked.webhooks.deliveries()] == ["lost", "delivered"]


# registering


@pytest.mark.parametrize(
    "url",
    ["http://192.0.2.1/hook", "https://example.com/hook", "http://127.0.0.1.example.com/", "ftp://127.0.0.1/", "/hook",
     "", "http://", "http://[::1", "http://127.0.0.1:99999/", "http://127.0.0.1/a b", "http://2130706433/"],
)  # fmt: skip
async def test_addresses_off_this_machine(signing_sandbox: Sandbox, url: str) -> None:
    """Webhooks go to loopback addresses only, unless more is allowed."""
    with pytest.raises(Refused) as caught:
        signing_sandbox.webhooks.register(url, "")
    assert set(caught.value.errors) == {"url", "secret"}
    assert "; " in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://127.8.9.1/", "http://[::1]:1/", "https://LOCALHOST./x"])
async def test_addresses_of_this_machine(signing_sandbox: Sandbox, url: str) -> None:
    """All of loopback is fine."""
    assert signing_sandbox.webhooks.register(url).secret


async def test_the_same_address_at_each_start(tmp_path: Path, receiver: Receiver) -> None:
    """webhook_url is one endpoint however often a kept sandbox starts; another secret takes the first one's place."""
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


async def test_an_address_that_was_allowed_once(tmp_path: Path, receiver: Receiver) -> None:
    """An endpoint off loopback, kept from a run that allowed it, gets nothing in a run that does not."""
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
async def test_remote_addresses_can_be_allowed(signing_sandbox: Sandbox, receiver: Receiver, call: Caller) -> None:
    """With allow_remote_webhooks other hosts are taken, and loopback still works."""
    assert signing_sandbox.webhooks.register(receiver.url)
    await call.draft()
    await receiver.got(1)
    assert signing_sandbox.webhooks.register("https://hooks.example/").url == "https://hooks.example/"


async def test_a_name_of_this_machine_is_not_asked_of_anybody(
    signing_sandbox: Sandbox, receiver: Receiver, call: Caller
) -> None:
    """localhost is this machine, whatever name servers say."""
    signing_sandbox.webhooks.register(receiver.url.replace("127.0.0.1", "hooks.localhost"))
    await call.draft()
    await receiver.got(1)


async def test_restored_meanwhile(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """A delivery under way when the sandbox is restored leaves no trace in what was restored."""
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


async def test_a_repetition_waits_for_its_time(hooked: Sandbox, receiver: Receiver, call: Caller) -> None:
    """A step of the clock that is too short brings no repetition."""
    receiver.answers = [500]
    await call.draft()
    await receiver.got(1)
    await hooked.webhooks.settled()
    for _ in range(2):
        hooked.clock.advance(seconds=1)
        await asyncio.sleep(0.02)
    assert len(receiver.bodies) == 1
    hooked.clock.advance(seconds=BACK_OFF[0] - 2)
    await receiver.got(2)


async def test_what_changes_after_the_couriers_were_stopped(tmp_path: Path, receiver: Receiver) -> None:
    """A request that ends while the sandbox stops sends no courier out any more; the next run delivers its event."""
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
