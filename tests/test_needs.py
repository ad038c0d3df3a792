"""Tests that need a program or module: skipped without it, but failed in CI."""

from __future__ import annotations

import pytest

from tests import needs as needs_of_tests


def test_missing_program_is_skipped_but_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    assert needs_of_tests.needs("sh").endswith("/sh")
    needs_of_tests.needs_module("json")
    for ask in (needs_of_tests.needs, needs_of_tests.needs_module):
        monkeypatch.setenv("CI", "true")
        with pytest.raises(pytest.fail.Exception, match="no-such-thing is missing here, and in CI"):
            ask("no-such-thing")
        monkeypatch.delenv("CI")
        with pytest.raises(pytest.skip.Exception, match="no-such-thing is missing here"):
            ask("no-such-thing")
