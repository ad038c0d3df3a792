"""Wake-ups: who waits is woken, from any thread, and an event between two waits is not missed."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import Any

from signing_async.webhooks import (
    Event,
    Wakeups,
)


def event(**payload: Any) -> Event:
    """An event that holds these members."""
    return Event("evt_1", "signing.completed", payload, datetime.now(UTC))


async def test_everybody_who_waits_is_woken() -> None:
    """One event, many waiters."""
    wakeups = Wakeups()
    waiters = [asyncio.create_task(wakeups.wait(30)) for _ in range(50)]
    await asyncio.sleep(0)
    wakeups.publish(event())
    assert await asyncio.gather(*waiters) == [True] * 50


async def test_a_wait_without_an_event_ends_in_time() -> None:
    """False says that the timeout passed."""
    assert await Wakeups().wait(0.01) is False


async def test_an_event_between_two_waits_is_not_missed() -> None:
    """A subscription remembers it, once."""
    wakeups = Wakeups()
    with wakeups.subscribe() as woken:
        wakeups.publish(event())
        wakeups.publish(event())
        assert await woken.wait(30)
        assert not await woken.wait(0.01)


async def test_an_event_that_names_a_subject_wakes_it_alone() -> None:
    """Thousands wait for other signings: they are left to sleep; an event that names nobody's wakes all."""
    wakeups = Wakeups()
    with wakeups.subscribe("sig_1") as first, wakeups.subscribe("sig_2") as second:
        wakeups.publish(event(signing={"ids": [1, None, "sig_1"]}))
        assert await first.wait(30)
        assert not await second.wait(0.01)
        wakeups.publish(event(signing={"id": "sig_3"}))
        assert await first.wait(30)
        assert await second.wait(30)


async def test_a_wake_up_may_come_from_another_thread() -> None:
    """A receiver of a threaded server can wake the event loop."""
    wakeups = Wakeups()
    with wakeups.subscribe() as woken:
        thread = threading.Thread(target=wakeups.publish, args=[event()])
        thread.start()
        assert await woken.wait(30)
        thread.join()


async def test_who_left_is_not_kept() -> None:
    """A subscription ends with its block, also when the wait is cancelled."""
    wakeups = Wakeups()
    task = asyncio.create_task(wakeups.wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with wakeups.subscribe("sig_1") as woken:
        pass
    wakeups.publish(event())
    assert not await woken.wait(0.01)


def test_waiters_of_a_closed_loop_hurt_nobody() -> None:
    """A loop that ended while somebody was subscribed does not break the receiver."""
    wakeups = Wakeups()

    async def subscribe() -> Any:
        subscription = wakeups.subscribe()
        subscription.__enter__()
        return subscription

    left_behind = asyncio.run(subscribe())
    wakeups.publish(event())
    left_behind.__exit__(None, None, None)


async def test_waiting_for_one_subject() -> None:
    """A wake-up for somebody else's signing is none."""
    wakeups = Wakeups()
    with wakeups.subscribe("s2"):
        mine = asyncio.create_task(wakeups.wait(0.2, subject="s1"))
        await asyncio.sleep(0.01)
        wakeups.publish(Event("e", "", {"id": "s2"}, datetime.now(UTC)))
        assert await mine is False
        mine = asyncio.create_task(wakeups.wait(10.0, subject="s1"))
        await asyncio.sleep(0.01)
        wakeups.publish(Event("e", "", {"ids": ["s1", "s2"]}, datetime.now(UTC)))
        assert await mine is True
