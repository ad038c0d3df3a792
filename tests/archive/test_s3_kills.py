"""Processes that archive into a bucket are killed, while it and the service fail: nothing is lost or doubled."""

from __future__ import annotations

import pytest

from tests.archive import kill_s3


@pytest.mark.timeout(300)
async def test_killed_runs_leave_each_document_once_in_the_bucket() -> None:
    outcome = await kill_s3.run(signings=8, kills=3, seed=1, processes=2)
    assert outcome.verdict.wrong == []
    assert (outcome.verdict.documents, outcome.failures) == (16, [])
