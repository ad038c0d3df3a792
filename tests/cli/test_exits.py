"""Exit codes, and errors as JSON."""

from __future__ import annotations

import pytest

from signing_async import errors
from signing_async.cli import exits


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ServerError("x", status=500), 1),
        (errors.RequestTimeout("x"), 1),
        (errors.DecodeError("x"), 1),
        (OSError("x"), 1),
        (errors.ConfigurationError("x"), 2),
        (errors.PdfRejected("x", reason="not_pdf", filename="x"), 2),
        (errors.OutcomeUnknown("x"), 3),
        (errors.OutcomeUnknownTimeout("x"), 3),
        (errors.DraftChanged("x"), 1),
        (errors.Unauthorized("x", status=401), 4),
        (errors.Forbidden("x", status=403), 4),
        (errors.RefreshRejected("x"), 4),
        (errors.WaitTimeout("x"), 5),
        (errors.SigningCancelled("x"), 6),
        (errors.NotSound("x"), 7),
    ],
)
def test_each_error_has_its_documented_exit_code(error: Exception, code: int) -> None:
    assert exits.code_of(error) == code
    assert code in exits.CODES
    assert exits.facts_of(error)["exit_code"] == code


def test_several_errors_become_one_exit_code_and_an_unknown_outcome_wins() -> None:
    unknown, usage, failed = errors.OutcomeUnknown("x"), errors.InvalidRequest("x"), errors.DecodeError("x")
    assert exits.code_of_all([], done=2) == 0
    assert exits.code_of_all([usage, usage], done=0) == 2
    assert exits.code_of_all([usage, usage], done=1) == 1
    assert exits.code_of_all([usage, failed], done=0) == 1
    assert exits.code_of_all([usage, unknown, failed], done=1) == 3
