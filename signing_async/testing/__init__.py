"""A pytest plugin with the sandbox as fixtures, a sample PDF, and conformance suites for this package's protocols.

Example::

    from signing_async.testing import sample_pdf

    async def test_draft_keeps_its_document(signing_sandbox, signing_client):
        signing = await signing_client.signings.create(name="Lease", language="EN")
        await signing_client.documents.upload(signing, sample_pdf(), "lease.pdf")
        assert signing_sandbox.signing(signing.id).state == "draft"

    @pytest.mark.signing_sandbox(profile=Profile.laravel(), seed=1)
    async def test_other_settings(signing_sandbox): ...

A conformance suite is a class. Subclass it where pytest collects tests, with a fixture that opens your implementation::

    class TestMyStore(TokenStoreConformance):
        @pytest.fixture
        def open_store(self, tmp_path):
            return lambda: MyStore(tmp_path / "token")
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from .._lazy import attach

if TYPE_CHECKING:
    from .._sample_pdf import sample_pdf as sample_pdf
    from ..client import SigningClient
    from ..sandbox import Sandbox
    from .archive_stores import ArchiveStoreConformance as ArchiveStoreConformance
    from .archive_stores import ListedStoreConformance as ListedStoreConformance
    from .event_stores import EventStoreConformance as EventStoreConformance
    from .event_stores import FencedEventStoreConformance as FencedEventStoreConformance
    from .journals import FencedJournalConformance as FencedJournalConformance
    from .journals import JournalConformance as JournalConformance
    from .journals import ListedJournalConformance as ListedJournalConformance
    from .seen_events import SeenEventsConformance as SeenEventsConformance
    from .token_stores import FencedTokenStoreConformance as FencedTokenStoreConformance
    from .token_stores import TokenStoreConformance as TokenStoreConformance
else:
    # No `__dir__`: pytest reads every name that a plugin's `__dir__` lists, and few tests use the suites.
    __getattr__ = attach(
        __name__,
        {
            ".._sample_pdf": ("sample_pdf",),
            ".archive_stores": ("ArchiveStoreConformance", "ListedStoreConformance"),
            ".event_stores": ("EventStoreConformance", "FencedEventStoreConformance"),
            ".journals": ("FencedJournalConformance", "JournalConformance", "ListedJournalConformance"),
            ".seen_events": ("SeenEventsConformance",),
            ".token_stores": ("FencedTokenStoreConformance", "TokenStoreConformance"),
        },
    )[0]

try:
    from pytest_asyncio import fixture as async_fixture
except ModuleNotFoundError:  # another plugin must run the fixtures; pytest reports them if there is none
    async_fixture = pytest.fixture  # type: ignore[assignment]  # both can be used as plain decorators


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "signing_sandbox(**settings): start the signing sandbox with these settings")


@async_fixture
async def signing_sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """A running sandbox for one test, with the settings of the marker `signing_sandbox`."""
    from ..sandbox import Sandbox

    marker = request.node.get_closest_marker("signing_sandbox")
    async with Sandbox(**(marker.kwargs if marker else {})) as sandbox:
        yield sandbox


@async_fixture
async def signing_client(signing_sandbox: Sandbox) -> AsyncIterator[SigningClient]:
    """A client for the sandbox's default user; it retries without long delays."""
    from ..client import SigningClient
    from ..transport.retry import RetryPolicy

    quick = RetryPolicy(base_delay=0.01)
    async with SigningClient(signing_sandbox.base_url, signing_sandbox.access_token(), retry=quick) as client:
        yield client
