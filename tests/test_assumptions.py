"""What the specification leaves open can be set, and a setting that cannot work is refused with its name."""

from __future__ import annotations

import math
import pickle
from typing import Any

import attrs
import pytest

from signing_async import Assumptions, ConfigurationError


def test_one_name_stands_for_several() -> None:
    """Where several names are possible one may be given alone, or any iterable of them."""
    assert Assumptions(item_paths="rows").item_paths == ("rows",)
    assert Assumptions(item_paths=["rows", "list"]).item_paths == ("rows", "list")
    assert Assumptions(next_paths=(name for name in ("a.b",))).next_paths == ("a.b",)
    assert Assumptions(has_more_paths=()).has_more_paths == ()
    assert Assumptions(expired_token_statuses=403).expired_token_statuses == {403}
    assert Assumptions(expired_token_statuses=[401, 403]).expired_token_statuses == {401, 403}


def test_they_are_a_value() -> None:
    """Frozen, equal by content, usable as a key, and picklable."""
    changed = Assumptions(cursor_param="after")
    assert changed == attrs.evolve(Assumptions(), cursor_param="after") != Assumptions()
    assert hash(changed) == hash(Assumptions(cursor_param="after"))
    assert pickle.loads(pickle.dumps(changed)) == changed
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        changed.cursor_param = "x"  # type: ignore[misc]  # that it is frozen is what is tested


_NAME = ("cursor_param", "limit_param", "download_accept")
_NAMES = (
    *("item_paths", "next_paths", "has_more_paths", "record_paths", "recipient_done_fields", "request_id_headers"),
    *("document_size_fields", "document_sha256_fields"),
)
_NUMBERS = ("expires_in_seconds", "refresh_margin")
_COUNTS = ("max_pdf_bytes", "max_sealed_bytes", "max_answer_bytes")


def test_every_assumption_is_covered_here() -> None:
    """The lists above name every field."""
    named = {*_NAME, *_NAMES, *_NUMBERS, *_COUNTS, "expired_token_statuses", "pkce"}
    assert named == {field.name for field in attrs.fields(Assumptions)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in _NAME for value in ("", None, 5, ("cursor",))),
        *((name, value) for name in _NAMES for value in ("", None, 5, [""], ["a", 5], [["a"]])),
        *((name, value) for name in _NUMBERS for value in (0, -1, True, "1", None, math.nan, math.inf)),
        *((name, value) for name in _COUNTS for value in (0, -1, True, "1", None, 1.5)),
        *(("pkce", value) for value in (1, 0, "true", None)),
        *(("expired_token_statuses", value) for value in (399, 500, True, "401", ["401"], None, [[401]], [401, 200])),
    ],
)
def test_what_cannot_work_is_refused(name: str, value: Any) -> None:
    """The error names the setting and the value."""
    with pytest.raises(ConfigurationError, match=rf"^Assumptions\.{name} must .*, not ") as caught:
        Assumptions(**{name: value})
    assert isinstance(caught.value, ValueError)


def test_a_misspelled_setting_is_refused() -> None:
    """No setting is silently ignored."""
    with pytest.raises(TypeError, match="cursor_parm"):
        Assumptions(cursor_parm="after")  # type: ignore[call-arg]  # that it is refused is what is tested
