"""A receiver that is killed loses no event, and hands none over again that it acknowledged."""

from __future__ import annotations

from pathlib import Path

from tests.webhooks.crash import run


async def test_kills_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    """SIGKILL in the middle of deliveries, three times, with a sender that repeats."""
    outcome = await run(events=1500, kills=3, seed=11, directory=tmp_path)
    assert outcome.kills == 3
    assert len(outcome.acknowledged) == 1500
    assert outcome.deliveries > 1500 + outcome.repeats > 1550
    assert outcome.lost() == []
    assert outcome.again() == []
    # at most one hand-off for each sender can fall between the hand-off and its record at a kill
    assert outcome.twice() <= 3 * 32
