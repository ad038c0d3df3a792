"""Spans and metrics of webhooks: deliveries, and the handlers of an inbox."""

from __future__ import annotations

import re
from typing import Self

from .names import (
    ATTEMPT_NUMBER,
    DELIVERIES,
    DELIVERY_DURATION,
    DELIVERY_SPAN,
    ERROR_TYPE,
    EVENT_ID,
    HANDLER,
    HANDLER_ATTEMPTS,
    HANDLER_DURATION,
    HANDLER_OUTCOME,
    HANDLER_SPAN,
    SIGNING_ID,
    STATUS_CODE,
    WEBHOOK_VERDICT,
)
from .spans import Span, SpanKind, Telemetry, outcome_of

__all__ = ["Delivery", "HandlerAttempt"]

_ID = re.compile(r"[\w-]+", re.ASCII)


class Delivery:
    """One delivery: a context manager that ends its span, and counts its verdict."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._verdict: str | None = None
        self.span: Span = telemetry.span(DELIVERY_SPAN, kind=SpanKind.CONSUMER)

    def note_event(self, event_id: str, signing_id: str | None) -> None:
        """Record the ids of the verified event."""
        self.span.set(_ids(event_id, signing_id))

    def note_response(self, status: int, verdict: str) -> None:
        """Record the response. Only a delivery that has to be repeated is an error."""
        self._verdict = verdict
        self.span.set({STATUS_CODE: status})
        if status >= 500:
            self.span.fail(str(status))

    def __enter__(self) -> Self:
        self.span.enter()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        attributes = {WEBHOOK_VERDICT: self._verdict or outcome_of(error)}
        self.span.set(attributes)
        self._telemetry.record(DELIVERIES, 1, attributes)
        self._telemetry.record(DELIVERY_DURATION, self.span.seconds, attributes)
        self.span.end(error)


class HandlerAttempt:
    """One attempt of an inbox to handle an event: a context manager that ends its span, which links to the delivery."""

    def __init__(
        self,
        telemetry: Telemetry,
        event_id: str,
        signing_id: str | None,
        *,
        handler: str | None,
        number: int,
        context: str | None,
    ) -> None:
        self._telemetry = telemetry
        self._number = number
        self._handler = {} if handler is None else {HANDLER: handler}
        self._outcome: str | None = None
        self._error_type: str | None = None
        attributes: dict[str, str | bool | int | float] = {
            ATTEMPT_NUMBER: number,
            **self._handler,
            **_ids(event_id, signing_id),
        }
        self._span = telemetry.span(HANDLER_SPAN, attributes, kind=SpanKind.CONSUMER, links=[context])

    def end_with(self, outcome: str, error_type: str | None, *, is_settled: bool) -> None:
        """Note how the attempt ended."""
        self._outcome, self._error_type = outcome, error_type
        if is_settled:
            self._telemetry.record(HANDLER_ATTEMPTS, self._number, {HANDLER_OUTCOME: outcome, **self._handler})

    def __enter__(self) -> Self:
        self._span.enter()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        outcome = self._outcome or outcome_of(error)
        self._span.set({HANDLER_OUTCOME: outcome})
        attributes = {HANDLER_OUTCOME: outcome, **self._handler}
        if self._error_type is not None:
            self._span.fail(self._error_type)
            attributes[ERROR_TYPE] = self._error_type
        self._telemetry.record(HANDLER_DURATION, self._span.seconds, attributes)
        self._span.end(error)


def _ids(event_id: str, signing_id: str | None) -> dict[str, str]:
    """Return the ids as attributes. Text that cannot be an id of the service may name a person, and is left out."""
    ids = {EVENT_ID: event_id, SIGNING_ID: signing_id or ""}
    return {name: value for name, value in ids.items() if _ID.fullmatch(value)}
