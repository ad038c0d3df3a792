"""A first run over many signings, at a size that fits; `first_run` has the long one."""

from __future__ import annotations

import pytest

from tests.archive.first_run import run


@pytest.mark.timeout(600)
async def test_killed_first_run_is_resumed_in_constant_memory_without_fetching_a_document_again() -> None:
    outcome = await run(250)
    assert (outcome.documents, outcome.findings) == (500, ())
    killed, resumed, again = outcome.fetched
    assert 200 < killed < 500
    # What the killed run was downloading, eight signings at a time, is fetched again.
    assert 500 <= resumed <= 500 + 8
    assert again == resumed
    for memory in outcome.memory:
        assert max(memory) < 80
        # 200 documents between the first report and the last: 2.3 MB if they were kept.
        assert memory[-1] - memory[0] < 2
