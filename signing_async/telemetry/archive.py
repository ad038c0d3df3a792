"""Spans and metrics of an archive: its sweeps and its documents."""

from __future__ import annotations

from typing import Self

from ..errors import NotYetSigned
from .names import (
    ARCHIVE_DOCUMENTS,
    ARCHIVE_SIGNINGS,
    ARCHIVE_SIZE,
    DOCUMENT_ID,
    DOCUMENT_SPAN,
    ERROR_TYPE,
    OUTCOME,
    SIGNING_ID,
    SWEEP_DURATION,
    SWEEP_SPAN,
)
from .spans import Span, Telemetry, error_type, outcome_of

__all__ = ["DocumentWork", "SweepWork"]


class SweepWork:
    """One sweep: a context manager around it. Its span links to that of the interrupted sweep that it resumes."""

    def __init__(self, telemetry: Telemetry, earlier: str | None) -> None:
        self._telemetry = telemetry
        self.span: Span = telemetry.span(SWEEP_SPAN, links=[earlier])

    def note_page(self, signings: int) -> None:
        """Count the signings of a page of the list."""
        self._telemetry.record(ARCHIVE_SIGNINGS, signings)

    def __enter__(self) -> Self:
        self.span.enter()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        attributes = {OUTCOME: outcome_of(error)}
        self.span.set(attributes)
        if error is not None:
            attributes[ERROR_TYPE] = error_type(error)
        self._telemetry.record(SWEEP_DURATION, self.span.seconds, attributes)
        self.span.end(error)


class DocumentWork:
    """The work on one document: a context manager around it.

    The span links to that of the earlier run that began to place the document's file.
    """

    def __init__(self, telemetry: Telemetry, signing_id: str, document_id: str, earlier: str | None) -> None:
        self._telemetry = telemetry
        self._outcome: str | None = None
        self._error: Exception | None = None
        self._size = 0
        attributes = {SIGNING_ID: signing_id, DOCUMENT_ID: document_id}
        self.span: Span = telemetry.span(DOCUMENT_SPAN, attributes, links=[earlier])

    def end_with(self, size: int | None, error: Exception | None) -> None:
        """Note the result: the size of the archived file, or the error, or neither if it was in the archive already."""
        if isinstance(error, NotYetSigned):
            self._outcome = "not_yet_signed"
        elif error is not None:
            self._error = error
        elif size is None:
            self._outcome = "present"
        else:
            self._size = size

    def __enter__(self) -> Self:
        self.span.enter()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        error = error or self._error
        attributes = {OUTCOME: self._outcome or outcome_of(error)}
        self.span.set(attributes)
        if error is not None:
            attributes[ERROR_TYPE] = error_type(error)
        self._telemetry.record(ARCHIVE_DOCUMENTS, 1, attributes)
        if self._size:
            self._telemetry.record(ARCHIVE_SIZE, self._size)
        self.span.end(error)
