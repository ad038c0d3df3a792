"""Records are frozen values, and enumerations accept unknown values."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signing_async import (
    ConfigurationError,
    Document,
    Language,
    Recipient,
    Signing,
    SigningMethod,
    SigningOrder,
    SigningState,
    Token,
    User,
)

_NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
_RECORDS: list[Any] = [
    Document("d", "a.pdf", _NOON, "/f", {"size": [1]}),
    Signing(
        "s", "Lease", Language.SV, SigningOrder("random"), "Hej", True, False, None, _NOON, (Document("d"),), {"x": 1}
    ),
    Recipient("r", "a@example.com", "A", "B", SigningMethod("sms"), 1, {"phone": "+46"}),
    User("u", "a@example.com", "A", {"tenant": {"id": "t"}}),
]


# Enumerations


@given(cls=st.sampled_from([Language, SigningOrder, SigningMethod]), value=st.text())
def test_unknown_value_is_equal_to_its_string_hashable_printable_and_picklable(cls: Any, value: str) -> None:
    found = cls(value)
    assert isinstance(found, cls)
    assert found == value == found.value == f"{found}" == cls(value)
    assert {found, value, cls(value)} == {value}
    assert json.dumps(found) == json.dumps(value)
    assert found.name == value or cls(value) in list(cls)
    for other in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert type(other) is cls
        assert other == value
    assert repr(value) in repr(found)


@pytest.mark.parametrize("value", [None, b"EN", ["EN"]])
def test_value_that_is_not_a_string_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a valid"):
        Language(value)


# Records


@pytest.mark.parametrize("record", _RECORDS, ids=lambda record: type(record).__name__)
def test_records_are_frozen_comparable_hashable_and_picklable(record: Any) -> None:
    for name in type(record).__annotations__:
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(record, name, None)
        assert f"{name}=" in repr(record)
    for other in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
        assert type(other) is type(record)
        assert other == record
        assert hash(other) == hash(record)
    assert attrs.evolve(record, id="other") != record
    assert attrs.evolve(record, extra={}) != record
    assert copy.deepcopy(record).extra is not record.extra


def test_state_of_a_signing() -> None:
    """Cancelled takes precedence over completed, and completed over draft and sent."""
    for draft, completed, cancelled in itertools.product([None, False, True], [None, False, True], [None, _NOON]):
        expected = {None: SigningState.UNKNOWN, True: SigningState.DRAFT, False: SigningState.SENT}[draft]
        if completed:
            expected = SigningState.COMPLETED
        if cancelled:
            expected = SigningState.CANCELLED
        signing = Signing("s", is_draft=draft, is_completed=completed, cancelled_at=cancelled)
        assert signing.state is expected
        assert signing.state == expected.value


# Tokens


def test_token_shows_no_secret_and_cannot_be_pickled() -> None:
    token = Token("access-secret", "refresh-secret", _NOON)
    for shown in (repr(token), str(token), f"{token}", f"{[token]}", repr({"token": token})):
        assert "secret" not in shown
    assert "expires_at" in repr(token)
    with pytest.raises(TypeError, match="TokenStore") as caught:
        pickle.dumps({"token": token})
    assert "access-secret" not in str(caught.value)
    assert copy.copy(token) is copy.deepcopy(token) is token


def test_expiry_of_a_token_is_an_aware_datetime_or_none() -> None:
    assert Token("a").expires_at is None
    assert Token("a", expires_at=1769860800).expires_at == Token("a", expires_at=_NOON).expires_at == _NOON
    assert Token("a", expires_at=1769860800.5).expires_at == _NOON + timedelta(seconds=0.5)
    moment: Any
    for moment in (datetime(2026, 1, 1), "2026-01-31T12:00:00Z", True, float("nan"), 10**400):
        with pytest.raises(ConfigurationError, match=r"^expires_at: .*, got "):
            Token("a", expires_at=moment)


@pytest.mark.parametrize("name", ["access_token", "refresh_token", "token_type"])
def test_token_that_no_header_can_carry_is_refused_without_showing_it(name: str) -> None:
    value: Any
    for value in ("", "a b", "a\r\nX-Evil: 1", "å", b"a"):
        with pytest.raises(ConfigurationError, match=rf"^{name}: must be a string of printable ASCII") as caught:
            Token(**{"access_token": "a", name: value})
        assert "X-Evil" not in str(caught.value)
