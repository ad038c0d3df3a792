"""The pytest plugin where pytest-asyncio is missing."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from signing_async import testing


def test_without_pytest_asyncio_the_plugin_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fixtures are there, for whatever runs coroutines instead."""
    monkeypatch.setitem(sys.modules, "pytest_asyncio", None)
    assert testing.__file__ is not None
    spec = importlib.util.spec_from_file_location("signing_async.testing", testing.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert type(module.signing_client) is type(pytest.fixture(lambda: None))


def test_the_fixtures_in_a_project_of_its_own(pytester: pytest.Pytester) -> None:
    """A sandbox and a client of it, with the marker's settings, for whoever has this package installed."""
    pytester.makepyfile(
        """
        import pytest
        from signing_async.sandbox import Profile

        async def test_a_draft_is_kept(signing_sandbox, signing_client):
            signing = await signing_client.signings.create(name="Lease", language="EN")
            assert signing_sandbox.signing(signing.id).state == "draft"

        async def test_it_is_the_tests_own(signing_sandbox, signing_client):
            assert [signing async for signing in signing_client.signings.list()] == []

        @pytest.mark.signing_sandbox(profile=Profile(ids="integer"))
        async def test_with_other_settings(signing_sandbox, signing_client):
            assert (await signing_client.signings.create(name="Lease", language="EN")).id.isdigit()

        async def test_a_failure_passes_soon(signing_sandbox, signing_client):
            signing_sandbox.faults.add("signings.create", "503", times=3)
            await signing_client.signings.create(name="Lease", language="EN")
        """
    )
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    result = pytester.runpytest_inprocess("-q", "--strict-markers", "-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=4)
