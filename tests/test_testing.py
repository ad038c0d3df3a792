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
