"""A first run over many signings, at a size that fits; `first_run` has the long one."""

from __future__ import annotations

import pytest

from tests.archive.first_run import run


@pytest.mark.timeout(600)
async def test_killed_first_run_is_resumed_in_constant_memory_without_fetching_a_document_again() -> None:
    outcome = await run(120)
    assert (outcome.documents, outcome.findings) == (240, ())
    killed, resumed, again = outcome.fetched
    assert 90 < killed < 240
    # What the killed run was downloading, eight signings at a time, is fetched again.
    assert 240 <= resumed <= 240 + 8
    assert again == resumed
    for memory in outcome.memory:
        assert max(memory) < 80
        # Kept documents would take 12 KB each.
        assert memory[-1] - memory[0] < 2
