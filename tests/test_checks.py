"""Argument checks accept what fits, and name the argument, the value and the rule otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from signing_async import ConfigurationError, InvalidRequest, _checks


@pytest.mark.parametrize("value", [0, 1, 2.5, 10**30])
def test_number_within_bounds_is_returned(value: float) -> None:
    assert _checks.number("wait", value, at_least=0) == value
    assert _checks.number("wait", value) == value


@pytest.mark.parametrize("value", [True, None, "1", math.nan, math.inf, -math.inf, [1]])
def test_what_is_not_a_finite_number_is_rejected(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^wait: must be a number, got "):
        _checks.number("wait", value)


@pytest.mark.parametrize(
    ("bounds", "value", "rule"),
    [
        ({"above": 0}, 0, "above 0"),
        ({"at_least": 0.5}, 0.25, "of at least 0.5"),
        ({"at_most": 60}, 61, "of at most 60"),
        ({"above": 0, "at_most": 3600}, 3601, "above 0 and of at most 3600"),
    ],
)
def test_error_of_a_number_names_argument_rule_and_value(bounds: dict[str, float], value: float, rule: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^wait: must be a number {rule}, got {value}$"):
        _checks.number("wait", value, error=InvalidRequest, **bounds)


@pytest.mark.parametrize(
    ("bounds", "value", "rule"),
    [({}, 0, "of at least 1"), ({"at_least": 0, "at_most": 65535}, -1, "from 0 to 65535"), ({}, 1.0, "of at least 1")],
)
def test_error_of_an_integer_names_argument_rule_and_value(bounds: dict[str, int], value: Any, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^port: must be an integer {rule}, got {value}$"):
        _checks.integer("port", value, **bounds)
    assert _checks.integer("port", 7, **bounds) == 7


@pytest.mark.parametrize("check", [_checks.integer, _checks.number, _checks.string])
def test_bool_is_no_number_and_no_string(check: Callable[[str, object], object]) -> None:
    with pytest.raises(ConfigurationError, match=r"got True$"):
        check("flag", True)


@pytest.mark.parametrize("value", ["", None, b"a", 5, "\udc80"])
def test_what_is_not_a_non_empty_string_is_rejected(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^prefix: must be a non-empty string, got "):
        _checks.string("prefix", value)
    assert _checks.string("prefix", "a") == "a"


def test_empty_string_is_accepted_where_allowed() -> None:
    assert _checks.string("prefix", "", may_be_empty=True) == ""
    with pytest.raises(ConfigurationError, match=r"^prefix: must be a string, got None$"):
        _checks.string("prefix", None, may_be_empty=True)
