"""A pytest plugin: the sandbox as fixtures; and suites of tests for implementations of this package's protocols.

Example::

    async def test_a_draft_is_kept(signing_sandbox, signing_client):
        signing = await signing_client.signings.create(name="Lease", language="EN")
        assert signing_sandbox.signing(signing.id).state == "draft"

    @pytest.mark.signing_sandbox(profile=Profile.laravel(), seed=1)
    async def test_with_other_settings(signing_sandbox): ...

A suite is a class to be subclassed where pytest collects tests, with a fixture that makes what is to be tested::

    class TestMyStore(TokenStoreConformance):
        @pytest.fixture
        def open_store(self, tmp_path):
            return lambda: MyStore(tmp_path / "token")
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..sandbox import Sandbox
    from .journals import FencedJournalConformance as FencedJournalConformance
    from .journals import JournalConformance as JournalConformance
    from .seen_events import SeenEventsConformance as SeenEventsConformance
    from .token_stores import FencedTokenStoreConformance as FencedTokenStoreConformance
    from .token_stores import TokenStoreConformance as TokenStoreConformance

try:
    from pytest_asyncio import fixture as async_fixture
except ModuleNotFoundError:  # there are no async fixtures then; pytest says so when one is asked for
    async_fixture = pytest.fixture  # type: ignore[assignment]  # it is used in the one way that both have

_HOME = {
    "FencedJournalConformance": "journals",
    "FencedTokenStoreConformance": "token_stores",
    "JournalConformance": "journals",
    "SeenEventsConformance": "seen_events",
    "TokenStoreConformance": "token_stores",
}


def __getattr__(name: str) -> object:
    # Every run of pytest loads this module, and few want the suites.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "signing_sandbox(**settings): start the signing sandbox with these settings")


@async_fixture
async def signing_sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """A sandbox of this test's own, started; its settings come from the marker `signing_sandbox`."""
    from ..sandbox import Sandbox

    marker = request.node.get_closest_marker("signing_sandbox")
    async with Sandbox(**(marker.kwargs if marker else {})) as sandbox:
        yield sandbox


@async_fixture
async def signing_client(signing_sandbox: Sandbox) -> AsyncIterator[SigningClient]:
    """A client of this test's sandbox, for its default user, that does not wait long between attempts."""
    from ..client import SigningClient
    from ..transport.retry import RetryPolicy

    quick = RetryPolicy(base_delay=0.01)
    async with SigningClient(signing_sandbox.base_url, signing_sandbox.access_token(), retry=quick) as client:
        yield client
