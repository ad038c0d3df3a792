"""The soak, for a moment; and that it would see a leak."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.soak import ALLOWED, KINDS, Sample, growth

SECONDS = 10
STEADY = [Sample(n / 60, 50.0 + n % 3, 100_000 + 31 * (n % 7), 2 + n % 2, 8 + n % 5, 9, 4) for n in range(60)]


@pytest.mark.timeout(SECONDS + 120)
async def test_mixed_traffic_leaks_nothing() -> None:
    """Traffic of every kind, with faults: no growth of memory, objects, tasks, sockets, files or threads."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.soak",
        "--minutes",
        str(SECONDS / 60),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, said = (data.decode() for data in await child.communicate())
    assert child.returncode == 0, out + said
    assert "Traceback" not in said
    assert "never retrieved" not in said
    assert "unclosed" not in said
    for kind in (*KINDS, "webhook signing.completed"):
        assert int(re.search(rf"\b{kind} (\d+)", out)[1]) > 0, out  # type: ignore[index]  # a miss fails as well


@pytest.mark.parametrize(
    ("name", "each"),
    [("rss_mb", 0.3), ("blocks", 120), ("tasks", 0.1), ("sockets", 1.2), ("files", 0.1), ("threads", 0.1)],
)
def test_slow_leak_is_detected(name: str, each: float) -> None:
    """A little more after every round is more than is allowed in the end, and whatever the warm-up adds is not."""
    leaking = [replace(one, **_more(one, name, each * number)) for number, one in enumerate(STEADY)]
    assert growth(leaking)[name] > ALLOWED[name]
    warming = [replace(one, **_more(one, name, each * min(number, 20))) for number, one in enumerate(STEADY)]
    assert growth(warming)[name] <= ALLOWED[name]


def _more(one: Sample, name: str, more: float) -> dict[str, Any]:
    return {name: getattr(one, name) + more}
