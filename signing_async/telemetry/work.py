"""Spans and metrics of token refreshes, journals and dispatches."""

from __future__ import annotations

from typing import Self

from ..errors import RefreshRejected
from .kept import find_context
from .names import (
    DISPATCH_ACTIVE,
    DISPATCH_DURATION,
    ERROR_TYPE,
    JOURNAL_DURATION,
    JOURNAL_OPERATION,
    OUTCOME,
    PACKAGE_NUMBER,
    PACKAGE_SPAN,
    REFRESH_RESULT,
    REFRESH_SPAN,
    REFRESHES,
    SIGNING_ID,
)
from .spans import Span, Telemetry, error_type, outcome_of

__all__ = ["Package", "Refresh", "record_journal"]


def record_journal(telemetry: Telemetry, operation: str, seconds: float, error: BaseException | None) -> None:
    """Record one operation of a journal: claim, write or release."""
    attributes = {JOURNAL_OPERATION: operation}
    if error is not None:
        attributes[ERROR_TYPE] = error_type(error)
    telemetry.record(JOURNAL_DURATION, seconds, attributes)


class Refresh:
    """One token refresh, however many calls wait for it: a context manager around it."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._span = telemetry.span(REFRESH_SPAN)
        self.result: str = "refreshed"

    def __enter__(self) -> Self:
        self._span.enter()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        result = self.result
        if error is not None:
            result = "rejected" if isinstance(error, RefreshRejected) else "failed"
        self._span.set({REFRESH_RESULT: result})
        self._telemetry.record(REFRESHES, 1, {REFRESH_RESULT: result})
        self._span.end(error)


class Package:
    """The work on one claimed package: a context manager around it.

    The span links to that of the run that worked on the package before, whose context is in the journal's ``text``.
    """

    def __init__(self, telemetry: Telemetry, number: int, text: str | None) -> None:
        self._telemetry = telemetry
        self.span: Span = telemetry.span(PACKAGE_SPAN, {PACKAGE_NUMBER: number}, links=[find_context(text)])
        self._error: BaseException | None = None
        self._outcome: str | None = None

    def end_with(self, signing_id: str | None, error: Exception | None) -> None:
        """Note the result of the package."""
        self._error = error
        if signing_id is not None:
            self.span.set({SIGNING_ID: signing_id})

    def defer(self) -> None:
        """Note that another run has claimed the package."""
        self._outcome = "deferred"

    def __enter__(self) -> Self:
        self._telemetry.record(DISPATCH_ACTIVE, 1)
        self.span.enter()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        error = error or self._error
        attributes = {OUTCOME: self._outcome or outcome_of(error)}
        self.span.set(attributes)
        self._telemetry.record(DISPATCH_ACTIVE, -1)
        self._telemetry.record(DISPATCH_DURATION, self.span.seconds, attributes)
        self.span.end(error)
