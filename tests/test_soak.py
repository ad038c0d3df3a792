"""The soak, for a moment."""

from __future__ import annotations

import asyncio
import sys

import pytest


@pytest.mark.timeout(300)
async def test_mixed_traffic_leaks_nothing() -> None:
    """Traffic of every kind, with faults: no growth of objects, tasks, files or threads, and no foreign error."""
    arguments, pipe = ("-W", "error", "-m", "tests.soak", "--minutes", "0.05"), asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=pipe)
    out, errors = (data.decode() for data in await child.communicate())
    assert child.returncode == 0, out + errors
    assert not [text for text in ("Traceback", "never retrieved", "unclosed") if text in errors], errors
    assert all(f"'{kind}'" in out for kind in ("whole_way", "short_lived", "listing", "renewing")), out
