"""A pytest plugin with the sandbox as fixtures, and a sample PDF.

Example::

    from signing_async.testing import sample_pdf

    async def test_draft_keeps_its_document(signing_sandbox, signing_client):
        signing = await signing_client.signings.create(name="Lease", language="EN")
        await signing_client.documents.upload(signing, sample_pdf(), "lease.pdf")
        assert signing_sandbox.signing(signing.id).state == "draft"

    @pytest.mark.signing_sandbox(profile=Profile.laravel(), seed=1)
    async def test_other_settings(signing_sandbox): ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from .._lazy import attach

if TYPE_CHECKING:
    from .._sample_pdf import sample_pdf as sample_pdf
    from ..client import SigningClient
    from ..sandbox import Sandbox
else:
    # No `__dir__`: pytest reads every name that a plugin's `__dir__` lists, and few tests need them.
    __getattr__ = attach(
        __name__,
        {
            ".._sample_pdf": ("sample_pdf",),
        },
    )[0]

try:
    from pytest_asyncio import fixture as async_fixture
except ModuleNotFoundError:  # another plugin must run the fixtures; pytest reports them if there is none
    async_fixture = pytest.fixture  # type: ignore[assignment]  # both can be used as plain decorators


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "signing_sandbox(**settings): start the signing sandbox with these settings")


def _check_loop_scopes(request: pytest.FixtureRequest) -> None:
    """Fail the test if pytest-asyncio runs it in another loop than its fixtures: the sandbox would never respond."""
    marker = request.node.get_closest_marker("asyncio")
    name, scopes = "asyncio_default_fixture_loop_scope", ["function", "function"]
    for place, setting in enumerate((name, "asyncio_default_test_loop_scope")):
        with suppress(ValueError):  # pytest-asyncio is not used, or does not have the setting yet
            scopes[place] = request.config.getini(setting) or "function"
    fixtures, tests = scopes
    if marker is not None and fixtures != (tests := marker.kwargs.get("loop_scope", tests)):
        pytest.fail(
            f"signing_sandbox runs in the event loop of the {fixtures}, but this test in that of the {tests}: set"
            f' {name} = "{tests}" in pytest\'s configuration, or @pytest.mark.asyncio(loop_scope="{fixtures}")',
            pytrace=False,
        )


@async_fixture
async def signing_sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """A running sandbox for one test, with the settings of the marker `signing_sandbox`."""
    from ..sandbox import Sandbox

    _check_loop_scopes(request)
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
