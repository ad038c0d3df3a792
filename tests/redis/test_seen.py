"""Seen events in Redis: receivers that share it, in event loops and in threads, and Redis at fault."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from signing_async import ConfigurationError, WebhookError
from signing_async.redis import RedisSeenEvents
from signing_async.webhooks import Claim, Decision, Event, Receiver, WebhookVerifier
from tests.redis.server import RedisServer, running_redis, slow_way
from tests.webhooks.deliveries import SECRET, event_body, signed

PASSWORD = "pass-word-4711"


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    """A Redis for all tests that do it no harm."""
    with running_redis() as server:
        yield server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis of the test's own, to be harmed."""
    with running_redis() as server:
        yield server


def receiver(seen: RedisSeenEvents, taken: list[str], hand_off_timeout: float = 10.0) -> Receiver:
    """It takes down the events that are handed over."""

    def take(event: Event) -> None:
        taken.append(event.id)

    return Receiver(WebhookVerifier(SECRET), take, seen=seen, hand_off_timeout=hand_off_timeout)


async def test_receivers_share_what_was_seen(shared: RedisServer) -> None:
    """An event that one of them took is a duplicate for the other; after the claim of another it is 503."""
    taken: list[str] = []
    async with RedisSeenEvents(shared.url) as one, RedisSeenEvents(shared.url) as other:
        body = event_body("evt-shared")
        answers = [await receiver(seen, taken).receive(signed(body), body) for seen in (one, other)]
        assert [answer.message for answer in answers] == ["accepted", "duplicate"]
        await claimed(one, "evt-pending")
        body = event_body("evt-pending")
        assert (await receiver(other, taken).receive(signed(body), body)).status == 503
    assert taken == ["evt-shared"]


async def claimed(seen: RedisSeenEvents, event_id: str) -> Claim:
    """A claim, in an event loop."""
    claim: Any = seen.claim(event_id)
    found: Claim = await claim
    return found


async def test_a_claim_is_given_back_by_its_claimer_alone(shared: RedisServer) -> None:
    """A late receiver does not free what is another's by now."""
    async with RedisSeenEvents(shared.url, lease=0.05) as late, RedisSeenEvents(shared.url) as other:
        assert await claimed(late, "evt-late") is Claim.NEW
        async with asyncio.timeout(20):
            while await claimed(other, "evt-late") is not Claim.NEW:
                await asyncio.sleep(0.01)
        await late.release("evt-late")  # type: ignore[misc]  # in an event loop it is awaited
        assert await claimed(late, "evt-late") is Claim.PENDING


async def test_half_a_character_is_an_id(shared: RedisServer) -> None:
    """JSON can hold half a surrogate pair, and so can an event's id."""
    async with RedisSeenEvents(shared.url) as seen:
        assert await claimed(seen, "evt-\ud800") is Claim.NEW
        assert await claimed(seen, "evt-\ud800") is Claim.PENDING


def test_receivers_in_threads(shared: RedisServer) -> None:
    """Where threads serve and no event loop runs, eight of them hand each event over once, and share it with a loop."""
    taken: list[str] = []
    seen = RedisSeenEvents(shared.url)
    one = receiver(seen, taken)
    bodies = [event_body(f"evt-thread-{number}") for number in range(20)]

    def serve() -> None:
        for body in bodies:
            assert one.receive_blocking(signed(body), body).status in (202, 503)

    threads = [threading.Thread(target=serve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(f"evt-thread-{number}" for number in range(20))
    assert seen.claim("evt-thread-0") is Claim.CONFIRMED
    assert seen.claim("evt-given-back") is Claim.NEW
    assert seen.release("evt-given-back") is None
    assert seen.claim("evt-given-back") is Claim.NEW
    seen.close()

    async def in_a_loop() -> Claim:
        async with seen:
            return await claimed(seen, "evt-thread-0")

    assert asyncio.run(in_a_loop()) is Claim.CONFIRMED


@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize("served", ["async", "threads"])
def test_while_redis_is_away_the_sender_is_asked_to_come_again(
    redis: RedisServer, fault: str, served: str, caplog: pytest.LogCaptureFixture
) -> None:
    """503 in two seconds, and nothing is handed over; when Redis is back the event is taken. No password is logged."""
    taken: list[str] = []
    seen = RedisSeenEvents(redis.url.replace("://", f"://:{PASSWORD}@"), timeout=0.5)
    redis.restart("--requirepass", PASSWORD)
    one = receiver(seen, taken)
    body = event_body("evt-away")

    def deliver() -> int:
        if served == "threads":
            return one.receive_blocking(signed(body), body).status

        async def receive() -> int:
            async with seen:
                return (await one.receive(signed(body), body)).status

        return asyncio.run(receive())

    redis.stop() if fault == "stopped" else redis.kill()
    began = time.monotonic()
    assert deliver() == 503
    assert time.monotonic() - began < 2
    redis.wake() if fault == "stopped" else redis.start()
    # What was sent to a Redis that is stopped may be done when it wakes: a claim, until its lease is over.
    redis.kill()
    redis.empty()
    redis.start()
    assert deliver() == 202
    assert taken == ["evt-away"]
    assert "evt-away" in caplog.text
    assert PASSWORD not in caplog.text
    seen.close()


async def delivered(one: Receiver, event_id: str, served: str) -> Decision:
    """What it answers, in an event loop or in a thread."""
    body = event_body(event_id)
    if served == "threads":
        return await asyncio.to_thread(one.receive_blocking, signed(body), body)
    return await one.receive(signed(body), body)


@pytest.mark.parametrize("served", ["async", "threads"])
async def test_a_slow_redis_is_only_slow(shared: RedisServer, served: str) -> None:
    """Twenty milliseconds each way change nothing but the time it takes: of two receivers one takes each event."""
    taken: list[str] = []
    names = [f"evt-slow-{served}-{number}" for number in range(10)]
    async with (
        slow_way(shared.port, 0.02) as way,
        RedisSeenEvents(way.url, timeout=5) as seen,
        RedisSeenEvents(way.url, timeout=5) as other,
    ):
        receivers = [receiver(each, taken) for each in (seen, other)]
        answers = await asyncio.gather(*(delivered(one, name, served) for name in names for one in receivers))
        assert {answer.status for answer in answers} <= {202, 503}
        assert sorted(taken) == sorted(names)
        assert [(await delivered(one, names[0], served)).message for one in receivers] == ["duplicate"] * 2


@pytest.mark.parametrize("served", ["async", "threads"])
async def test_a_redis_that_is_too_slow_holds_up_nobody(shared: RedisServer, served: str) -> None:
    """However many answers a step needs, the time for all of them is one; the event is taken when it comes again."""
    taken: list[str] = []
    name = f"evt-too-slow-{served}"
    async with (
        Redis.from_url(shared.url) as direct,
        slow_way(shared.port, 0.2) as way,
        RedisSeenEvents(way.url, timeout=0.5, lease=0.3) as seen,
    ):
        # No answer takes that long by itself; to name the script, and then to send it, take longer together.
        await direct.script_flush()
        one = receiver(seen, taken, hand_off_timeout=0.25)
        assert (await delivered(one, name, served)).status == 503
        way.delay = 0.0
        async with asyncio.timeout(20):
            while (await delivered(one, name, served)).status != 202:
                await asyncio.sleep(0.02)
        assert (await delivered(one, name, served)).message == "duplicate"
    assert taken == [name]


@pytest.mark.parametrize("served", ["async", "threads"])
async def test_an_answer_that_comes_late_is_nobody_elses(shared: RedisServer, served: str) -> None:
    """That one event was seen, told too late, must not pass for what is told of the next, which would be lost."""
    taken: list[str] = []
    names = [f"evt-late-{served}-{number}" for number in range(9)]
    async with slow_way(shared.port) as way, RedisSeenEvents(way.url, timeout=0.4) as seen:
        one = receiver(seen, taken)
        assert (await delivered(one, names[0], served)).status == 202
        way.delay = 0.3
        assert (await delivered(one, names[0], served)).status == 503
        way.delay = 0.0
        for name in names[1:]:
            assert (await delivered(one, name, served)).message == "accepted"
            await asyncio.sleep(0.05)
    assert taken == names


async def test_redis_fails_between_hand_off_and_confirmation(redis: RedisServer) -> None:
    """No 202 is said for what is not recorded: the sender comes again."""
    async with RedisSeenEvents(redis.url, timeout=0.3) as seen:
        one = Receiver(WebhookVerifier(SECRET), lambda event: redis.kill(), seen=seen)
        body = event_body("evt-between")
        assert (await one.receive(signed(body), body)).status == 503


async def test_a_client_that_was_given(shared: RedisServer) -> None:
    """It is used, whether or not it decodes answers, and left open; where no event loop runs it cannot be."""
    for decode in (True, False):
        async with Redis.from_url(shared.url, decode_responses=decode) as client:
            async with RedisSeenEvents(client, prefix=f"given-{decode}:") as seen:
                assert await claimed(seen, "a") is Claim.NEW
                assert await claimed(seen, "a") is Claim.PENDING
            assert await client.ping()
            with pytest.raises(ConfigurationError, match="needs a URL, not a client"):
                await asyncio.to_thread(seen.claim, "a")
            assert repr(seen) == "RedisSeenEvents('the client that was given')"


async def test_an_error_of_redis_is_told(shared: RedisServer) -> None:
    """What Redis says against a step is in the error, in a loop and in a thread."""
    async with Redis.from_url(shared.url) as client, RedisSeenEvents(shared.url) as seen:
        await client.lpush("signing:seen:evt-list", "x")
        with pytest.raises(WebhookError, match=r"cannot be used: redis://127.0.0.1:\d+: ResponseError: .*WRONGTYPE"):
            await claimed(seen, "evt-list")
        with pytest.raises(WebhookError, match="WRONGTYPE"):
            await asyncio.to_thread(seen.claim, "evt-list")


@pytest.mark.parametrize(
    "settings",
    [{"ttl": 0}, {"ttl": float("nan")}, {"ttl": "60"}, {"lease": -1}, {"lease": True}, {"timeout": 0}],
)
def test_times_are_checked(settings: dict[str, Any]) -> None:
    """The error names the setting and the value."""
    ((name, value),) = settings.items()
    with pytest.raises(ConfigurationError, match=f"RedisSeenEvents: {name} must be seconds above 0, not {value!r}"):
        RedisSeenEvents("redis://127.0.0.1", **settings)


def test_a_prefix_is_checked() -> None:
    """What cannot begin a key is told at once."""
    with pytest.raises(ConfigurationError, match="RedisSeenEvents: prefix must be a text, in whole characters, not 5"):
        RedisSeenEvents("redis://127.0.0.1", prefix=5)  # type: ignore[arg-type]  # what is no text


async def test_one_in_use_warns_when_it_is_dropped(shared: RedisServer) -> None:
    """Collected while it is open it warns, and does nothing else."""
    async with RedisSeenEvents(shared.url) as seen:
        seen.__del__()
        await claimed(seen, "evt-dropped")
        with pytest.warns(ResourceWarning, match="RedisSeenEvents"):
            seen.__del__()


def test_forgotten_it_warns(shared: RedisServer) -> None:
    """It says so when the program ends, in threads too."""
    script = f"from signing_async.redis import RedisSeenEvents; RedisSeenEvents({shared.url!r}).claim('x')"
    command = [sys.executable, "-W", "always", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"ResourceWarning: RedisSeenEvents({shared.url!r}) was not closed" in done.stderr
