"""SIGKILL of receivers and workers at any moment loses no event of an inbox, and skips none."""

from __future__ import annotations

from pathlib import Path

import pytest

from signing_async.webhooks import EventStatus
from tests.webhooks.inbox_kill import run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("store", "events", "kills"), [("sqlite", 1200, 6), ("postgres", 300, 3)])
async def test_sigkill_of_receivers_and_workers_loses_no_event_and_skips_none(
    store: str, events: int, kills: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every repeated handling is explained by a kill, and the events of a signing are handled in order of arrival."""
    if store == "postgres":
        (tmp_path / "dsn").write_text(await request.getfixturevalue("postgres").new_schema())
    outcome = await run(events, kills, seed=5, directory=tmp_path)
    assert (outcome.kills, len(outcome.acknowledged)) == (kills, events)
    assert outcome.deliveries > events + outcome.repeats > events
    assert {stored.status for stored in outcome.stored} == {EventStatus.HANDLED}
    assert outcome.lost() == outcome.skipped() == set()
    assert outcome.unexplained() == outcome.out_of_order() == []
