"""Assumptions are checked, and errors name the field and the value."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import attrs
import pytest

from signing_async import Assumptions, ConfigurationError


def test_names_and_statuses_may_be_one_value_or_any_iterable(tmp_path: Path) -> None:
    assert Assumptions(item_paths="rows").item_paths == ("rows",)
    assert Assumptions(next_paths=(name for name in ("a.b",))).next_paths == ("a.b",)
    assert Assumptions(expired_token_statuses=403).expired_token_statuses == {403}
    assert Assumptions(expired_token_statuses=[401, 403]).expired_token_statuses == {401, 403}
    path = tmp_path / "assumptions.toml"
    path.write_text('[error_paths]\ncode = "fault.ref"\n')
    assert Assumptions.from_file(path).error_paths == {"code": "fault.ref"}


def test_assumptions_are_frozen_comparable_hashable_and_picklable() -> None:
    changed = Assumptions(cursor_param="after")
    assert changed == attrs.evolve(Assumptions(), cursor_param="after") != Assumptions()
    assert hash(changed) == hash(Assumptions(cursor_param="after"))
    assert pickle.loads(pickle.dumps(changed)) == changed
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        changed.cursor_param = "x"  # type: ignore[misc]  # that it is frozen is what is tested


_NAME = ("cursor_param", "limit_param", "download_accept")
_NAMES = (
    *("item_paths", "next_paths", "has_more_paths", "record_paths", "recipient_done_fields", "request_id_headers"),
    *("document_size_fields", "document_sha256_fields", "request_id_paths"),
    "refresh_rejected_codes",
)
_NUMBERS = ("expires_in_seconds", "refresh_margin")
_COUNTS = ("max_pdf_bytes", "max_sealed_bytes", "max_answer_bytes")


def test_every_field_is_covered_by_the_lists_above() -> None:
    named = {*_NAME, *_NAMES, *_NUMBERS, *_COUNTS, "expired_token_statuses", "pkce", "error_paths"}
    assert named == {field.name for field in attrs.fields(Assumptions)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in _NAME for value in ("", 5)),
        *((name, value) for name in _NAMES for value in ("", 5, ["a", 5])),
        *((name, value) for name in _NUMBERS for value in (0, True, "1", math.nan)),
        *((name, value) for name in _COUNTS for value in (0, True, 1.5)),
        *(("error_paths", value) for value in ("code", {"text": "a"}, {"code": ""})),
        *(("pkce", value) for value in (1, "true")),
        *(("expired_token_statuses", value) for value in (399, 500, True, ["401"], [[401]])),
    ],
)
def test_invalid_value_is_refused_with_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}: must be .*, got ") as caught:
        Assumptions(**{name: value})
    assert isinstance(caught.value, ValueError)
