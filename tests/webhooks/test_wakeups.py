"""Wake-ups: an event wakes its waiters, from any thread, and none is missed between two waits."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from signing_async.webhooks import Event, Wakeups


def event(**payload: Any) -> Event:
    """Return an event with these members."""
    return Event("evt_1", "signing.completed", payload, datetime.now(UTC))


async def test_events_from_any_thread_between_two_waits_end_the_next_wait_once() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe() as woken:
        wakeups.publish(event())
        await asyncio.to_thread(wakeups.publish, event())
        assert await woken.wait(30)
        assert not await woken.wait(0.01)


async def test_event_wakes_only_the_subjects_it_mentions_and_otherwise_all() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe("sig_1") as first, wakeups.subscribe("sig_2") as second, wakeups.subscribe() as follower:
        wakeups.publish(event(signing_id="sig_1", signing={"ids": [1, None, "sig_1"]}))
        assert await first.wait(30)
        assert not await second.wait(0.01)
        wakeups.publish(event(signing={"name": "sig_3"}))
        assert await first.wait(30)
        assert await second.wait(30)
        assert await follower.wait(30)
        assert follower.signings == {"sig_1", None}
        wakeups.publish(event(signing_id="sig_2"))
        assert await follower.wait(30)
        assert follower.signings == {"sig_2"}


async def test_wait_without_a_subscription_ends_with_the_next_event_and_when_cancelled() -> None:
    wakeups = Wakeups()
    waiting, cancelled = asyncio.create_task(wakeups.wait()), asyncio.create_task(wakeups.wait())
    await asyncio.sleep(0)
    cancelled.cancel()
    wakeups.publish(event())
    assert await waiting
    assert not await wakeups.wait(0.01)
    await asyncio.wait([cancelled])
