"""Fixtures of the webhook tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from signing_async.webhooks import Inbox
from tests.webhooks.inboxes import AT_ONCE


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    """An inbox that retries at once."""
    async with Inbox(tmp_path / "inbox.db", retry=AT_ONCE) as opened:
        yield opened
