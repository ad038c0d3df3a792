"""Deduplication in Redis: receivers that share it, in event loops and in threads, and outages of Redis."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest
from redis.asyncio import Redis

from signing_async import ConfigurationError
from signing_async.redis import RedisSeenEvents
from signing_async.webhooks import Claim, Event, Receiver, WebhookVerifier
from tests.redis.server import RedisServer, running_redis, slow_way
from tests.webhooks.deliveries import SECRET, event_body, signed

PASSWORD = "pass-word-4711"


def receiver(seen: RedisSeenEvents, taken: list[str]) -> Receiver:
    """Return a receiver that appends the ids of handled events to ``taken``."""

    def take(event: Event) -> None:
        taken.append(event.id)

    return Receiver(WebhookVerifier(SECRET), take, seen=seen, hand_off_timeout=0.5)


async def claimed(seen: RedisSeenEvents, event_id: str) -> Claim:
    """Claim in an event loop."""
    claim: Any = seen.claim(event_id)
    found: Claim = await claim
    return found


async def test_only_the_claimer_can_release_a_claim(redis: RedisServer) -> None:
    async with RedisSeenEvents(redis.url, lease=0.05) as late, RedisSeenEvents(redis.url) as other:
        assert await claimed(late, "evt-late") is Claim.NEW
        async with asyncio.timeout(20):
            while await claimed(other, "evt-late") is not Claim.NEW:
                await asyncio.sleep(0.01)
        await late.release("evt-late")  # type: ignore[misc]  # in an event loop it is awaited
        assert await claimed(late, "evt-late") is Claim.PENDING


async def test_namespaces_do_not_share_events(redis: RedisServer) -> None:
    """Nor does an id that looks like another namespace's key; receivers of one namespace share them."""
    spaces = [None, "tenant-1", "tenant-1:x", "tenant-2", "tenant-2"]
    async with contextlib.AsyncExitStack() as opened:
        stores = [await opened.enter_async_context(RedisSeenEvents(redis.url, namespace=space)) for space in spaces]
        assert [await claimed(seen, "x:evt") for seen in stores] == [Claim.NEW] * 4 + [Claim.PENDING]
        assert await claimed(stores[1], "evt") is Claim.NEW
        assert await claimed(stores[0], "tenant-1:evt") is Claim.NEW
        await stores[1].confirm("x:evt")  # type: ignore[misc]  # in an event loop it is awaited
        assert [await claimed(seen, "x:evt") for seen in stores[:3]] == [Claim.PENDING, Claim.CONFIRMED, Claim.PENDING]


def test_threads_without_an_event_loop_handle_each_event_once(redis: RedisServer) -> None:
    """The threads share the store with an event loop. An event that another receiver has claimed is a 503."""
    taken: list[str] = []
    seen = RedisSeenEvents(redis.url)
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

    async def in_a_loop() -> list[tuple[int, str]]:
        async with seen:
            assert await claimed(seen, "evt-pending") is Claim.NEW
            bodies = [event_body(name) for name in ("evt-thread-0", "evt-pending")]
            decisions = [await one.receive(signed(body), body) for body in bodies]
            return [(decision.status, decision.message) for decision in decisions]

    handled, pending = asyncio.run(in_a_loop())
    assert (handled, pending[0]) == ((202, "duplicate"), 503)


@pytest.mark.parametrize(("how", "served"), [("frozen", "threads"), ("down", "async")])
def test_receiver_responds_503_while_redis_is_unavailable(
    how: str, served: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is handled, and no password is logged; when Redis is back, the event is accepted."""
    taken: list[str] = []
    body = event_body("evt-away")

    async def receive() -> int:
        async with seen:
            return (await one.receive(signed(body), body)).status

    def deliver() -> int:
        return one.receive_blocking(signed(body), body).status if served == "threads" else asyncio.run(receive())

    with running_redis("--requirepass", PASSWORD) as server:
        seen = RedisSeenEvents(server.url.replace("://", f"://:{PASSWORD}@"), timeout=0.5, lease=1)
        one = receiver(seen, taken)
        with server.outage(how):
            began = time.monotonic()
            assert deliver() == 503
            assert time.monotonic() - began < 10
        assert taken == []
        # Redis may execute the abandoned claim when it resumes, which holds for the lease.
        until = time.monotonic() + 20
        while deliver() == 503:
            assert time.monotonic() < until
        seen.close()
    assert taken == ["evt-away"]
    assert "evt-away" in caplog.text
    assert PASSWORD not in caplog.text


async def test_late_response_is_not_taken_for_the_next_event(redis: RedisServer) -> None:
    """Otherwise the next event would pass for a duplicate and be lost."""
    taken: list[str] = []
    names = [f"evt-late-{number}" for number in range(9)]
    bodies = [event_body(name) for name in names]
    async with slow_way(redis.port) as way, RedisSeenEvents(way.url, timeout=1) as seen:
        one = receiver(seen, taken)
        assert (await one.receive(signed(bodies[0]), bodies[0])).status == 202
        way.delay = 0.8
        assert (await one.receive(signed(bodies[0]), bodies[0])).status == 503
        way.delay = 0.0
        for body in bodies[1:]:
            assert (await one.receive(signed(body), body)).message == "accepted"
            await asyncio.sleep(0.1)
    assert taken == names


async def test_given_client_is_used_and_stays_open(redis: RedisServer) -> None:
    """It may decode responses or not; it cannot serve threads without an event loop."""
    for decode in (True, False):
        async with Redis.from_url(redis.url, decode_responses=decode) as client:
            async with RedisSeenEvents(client, prefix=f"given-{decode}:") as seen:
                assert await claimed(seen, "a") is Claim.NEW
                assert await claimed(seen, "a") is Claim.PENDING
            assert await client.ping()
            with pytest.raises(ConfigurationError, match="redis: must be a URL where no event loop runs"):
                await asyncio.to_thread(seen.claim, "a")
            assert repr(seen) == "RedisSeenEvents('the given client')"
