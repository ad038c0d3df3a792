"""A pytest plugin: the sandbox as fixtures.

Example::

    async def test_it_is_sent(signing_sandbox):
        token = signing_sandbox.access_token()
        ...  # use the service at signing_sandbox.base_url
        assert signing_sandbox.signings[0].state == "sent"

    @pytest.mark.signing_sandbox(profile=Profile.laravel(), seed=1)
    async def test_with_other_settings(signing_sandbox): ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .sandbox import Sandbox

try:
    from pytest_asyncio import fixture as async_fixture
except ModuleNotFoundError:  # there are no async fixtures then; pytest says so when one is asked for
    async_fixture = pytest.fixture  # type: ignore[assignment]  # it is used in the one way that both have


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "signing_sandbox(**settings): start the signing sandbox with these settings")


@async_fixture
async def signing_sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """A sandbox of this test's own, started; its settings come from the marker `signing_sandbox`."""
    from .sandbox import Sandbox

    marker = request.node.get_closest_marker("signing_sandbox")
    async with Sandbox(**(marker.kwargs if marker else {})) as sandbox:
        yield sandbox
