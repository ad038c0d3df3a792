"""The save, or the unlock, that a token store repeats in the background."""

from __future__ import annotations

import asyncio

import pytest

from signing_async import AuthError
from signing_async.auth.unfinished import Unfinished  # its failures cannot be provoked from outside


class Engine:
    """An engine that fails until it is back."""

    def __init__(self, transient: bool) -> None:
        self.transient = transient
        self.back = asyncio.Event()
        self.failed = asyncio.Event()

    async def work(self) -> None:
        if not self.back.is_set():
            self.failed.set()
            raise AuthError("the role may not write", transient=self.transient)


@pytest.mark.parametrize(
    ("transient", "unsaved", "words"),
    [
        (True, True, "^store: no response, and a refreshed token is not saved yet$"),
        (True, False, "^store: no response, and the lock is not released yet$"),
        (False, True, "^the role may not write, and a refreshed token is not saved yet$"),
    ],
)
async def test_error_names_what_is_unfinished_until_the_engine_is_back(
    transient: bool, unsaved: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, unfinished = Engine(transient), Unfinished(0.05)
    await unfinished.wait("store")
    unfinished.start(engine.work, unsaved=unsaved)
    await engine.failed.wait()
    with pytest.raises(AuthError, match=words) as caught:
        await unfinished.wait("store")
    assert caught.value.transient is transient
    await unfinished.close("store")
    assert ("its user may have to authorize again" in caplog.text) is unsaved
    unfinished = Unfinished(60)
    unfinished.start(engine.work, unsaved=unsaved)
    engine.back.set()
    await unfinished.wait("store")
    await unfinished.close("store")
