"""Claims of events in a PostgreSQL table that was never analyzed: the planner knows nothing of its rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from signing_async.storage.events import CLAIM, TOGETHER  # the plan of this statement is asserted
from signing_async.webhooks import EventStore
from tests.postgres.server import PostgresServer


@pytest.mark.parametrize("mode", ["custom", "generic"])
async def test_claim_on_a_table_that_was_never_analyzed_reads_events_in_the_order_of_an_index(
    mode: str,
    postgres: PostgresServer,
    dsn: str,
    table: str,
    open_store: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of 20,000 pending events; in both kinds of plans that PostgreSQL makes for a statement with parameters."""
    await postgres.execute(
        f"INSERT INTO {table} (id, signing_id, type, body, received_at)"
        " SELECT gen_random_uuid(), gen_random_uuid(), 't', 'x', now() FROM generate_series(1, 20000)"
    )
    store = open_store(lease=60, timeout=20)
    plan = await _explain(dsn, store._engine.render(CLAIM.replace("{kind}", TOGETHER)), mode)
    assert "Index Scan using signing_events_due on signing_events event" in plan
    assert "Seq Scan" not in plan
    assert "Sort" not in plan
    median = await _median_seconds(store)
    with capsys.disabled():
        print(f"\na claim of 8 among 20,000 events, never analyzed: {1000 * median:.1f} ms (median of 10)")


async def _explain(dsn: str, claim: str, mode: str) -> str:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(f"SET plan_cache_mode = force_{mode}_plan")
        await connection.execute(f"PREPARE claim AS {claim}")
        return "\n".join(line for (line,) in await connection.fetch("EXPLAIN EXECUTE claim (8, 60)"))
    finally:
        await connection.close()


async def _median_seconds(store: EventStore) -> float:
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        assert len(await store.claim(8)) == 8
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
