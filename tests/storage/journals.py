"""Claims for the tests of journals."""

from __future__ import annotations

import asyncio

from signing_async import Claim, Journal


async def claimed(journal: Journal, key: str) -> Claim:
    """Claim a package that must be free."""
    claim = await journal.claim(key)
    assert claim is not None
    return claim


async def soon_claimed(journal: Journal, key: str) -> Claim:
    """Claim a package that must become free."""
    async with asyncio.timeout(60):
        while (claim := await journal.claim(key)) is None:
            await asyncio.sleep(0.01)
    return claim
