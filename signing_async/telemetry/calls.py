"""Spans and metrics of the calls of a client and their attempts."""

from __future__ import annotations

import re
from typing import Any, Self
from urllib.parse import urlsplit

from .names import (
    ACTIVE_REQUESTS,
    ERROR_TYPE,
    OPERATION,
    OPERATION_ATTEMPTS,
    OPERATION_DURATION,
    OUTCOME,
    READING_EVENT,
    REFRESH_EVENT,
    REFRESH_RESULT,
    REQUEST_DURATION,
    REQUEST_ID,
    RETRY_DELAY,
    RETRY_EVENT,
    SIGNING_ID,
    STATUS_CODE,
    TRANSFERRED,
    UNKNOWN_OUTCOMES,
    URL_TEMPLATE,
    VERDICT,
    VERDICT_EVENT,
    WAIT,
    WAIT_DURATION,
    WAIT_EVENT,
    WAIT_PASSED,
)
from .spans import SpanKind, Telemetry, error_type, outcome_of

__all__ = ["Attempt", "Call", "record_transfer"]

_SIGNING = re.compile(r"/signings/([\w-]+)(?=/|$)", re.ASCII)
_IDS = {"signings": "{id}", "documents": "{document_id}", "recipients": "{recipient_id}"}
_ID = re.compile(rf"/({'|'.join(_IDS)})/(?!\{{\w+\}}(?:/|$))[^/]+")
# Segments that are not redacted: a word of an endpoint, a version or a placeholder; in a URL also an id of the service.
_FIXED = r"[a-z][A-Za-z_-]*|\d{1,2}\.\d{1,2}|v\d{1,2}|\{\w+\}"
_KNOWN_ID = "|".join(rf"(?<=/{collection}/)[\w-]+" for collection in _IDS)
_NOT_FIXED = re.compile(rf"(?<=/)(?!(?:{_FIXED})(?:/|$))[^/]+", re.ASCII)
_NOT_FIXED_OR_ID = re.compile(rf"(?<=/)(?!(?:{_FIXED}|{_KNOWN_ID})(?:/|$))[^/]+", re.ASCII)
_PLACEHOLDER = re.compile(r"\{\w+\}")
_REDACTED = "REDACTED"
_SHORTEST_WAIT = 0.001  # acquiring without a wait takes microseconds


def record_transfer(telemetry: Telemetry, direction: str, size: int) -> None:
    """Record how many bytes of a body were transmitted or received."""
    if size:
        telemetry.record(TRANSFERRED, size, {"network.io.direction": direction})


class Call:
    """One call: a context manager that ends its span, and records its outcome."""

    def __init__(self, telemetry: Telemetry, name: str, path: str) -> None:
        name = _without_values(name)
        self._telemetry = telemetry
        self._name = name
        self._attempts = 0
        attributes = {OPERATION: name}
        if (signing := _SIGNING.search(path)) is not None:
            attributes[SIGNING_ID] = signing[1]
        self._span = telemetry.span(name, attributes)

    def __enter__(self) -> Self:
        self._span.enter()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        outcome = outcome_of(error)
        attributes = {OPERATION: self._name, OUTCOME: outcome}
        self._span.set(attributes)
        if error is not None:
            attributes[ERROR_TYPE] = error_type(error)
        self._telemetry.record(OPERATION_DURATION, self._span.seconds, attributes)
        if self._attempts:
            self._telemetry.record(OPERATION_ATTEMPTS, self._attempts, {OPERATION: self._name})
        if outcome == "unknown":
            self._telemetry.record(UNKNOWN_OUTCOMES, 1, {OPERATION: self._name})
        self._span.end(error)

    def note_created(self, signing_id: str) -> None:
        """Record the id of the signing that the call created."""
        self._span.set({SIGNING_ID: signing_id})

    def note_wait(self, seconds: float, *, passed: bool) -> None:
        """Record a wait for the rate limiter; ``passed`` is False if the deadline would pass first."""
        if seconds >= _SHORTEST_WAIT or not passed:
            self._span.event(WAIT_EVENT, {WAIT: seconds, WAIT_PASSED: passed})
            self._telemetry.record(WAIT_DURATION, seconds, {WAIT_PASSED: passed})

    def note_refresh(self, result: str, seconds: float) -> None:
        """Record that the call waited for a token refresh, which other calls may share."""
        self._span.event(REFRESH_EVENT, {REFRESH_RESULT: result, WAIT: seconds})

    def note_retry(self, delay: float, error: BaseException) -> None:
        """Record that another attempt follows after ``delay`` seconds."""
        self._span.event(RETRY_EVENT, {RETRY_DELAY: delay, ERROR_TYPE: error_type(error)})

    def note_reading(self, operation: str) -> None:
        """Record that the service is read to reconcile the call."""
        self._span.event(READING_EVENT, {OPERATION: operation})

    def note_verdict(self, verdict: str) -> None:
        """Record what the readings show: effect, no_effect, verified or unknown."""
        self._span.event(VERDICT_EVENT, {VERDICT: verdict})

    def attempt(self, name: str, method: str, origin: str, path: str, number: int) -> Attempt:
        """Begin an attempt of this call, or of a reading that is a part of it, under the name of its operation."""
        name = _without_values(name)
        if name == self._name:
            self._attempts = number
        return Attempt(self._telemetry, name, method, origin, path, number)


class Attempt:
    """One attempt: the current span from its start to its end, in the same task."""

    def __init__(self, telemetry: Telemetry, name: str, method: str, origin: str, path: str, number: int) -> None:
        parts = urlsplit(origin)
        template, shown = _describe(name, method, path)
        self._telemetry = telemetry
        self._where: dict[str, str | int] = {
            "http.request.method": method,
            "server.address": parts.hostname or "",
            "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        }
        self._template = template
        attributes = {**self._where, "url.full": origin + shown, URL_TEMPLATE: template, OPERATION: name}
        if number > 1:
            attributes["http.request.resend_count"] = number - 1
        if (signing := _SIGNING.search(path)) is not None:
            attributes[SIGNING_ID] = signing[1]
        telemetry.record(ACTIVE_REQUESTS, 1, self._where)
        self._span = telemetry.span(f"{method} {template}", attributes, kind=SpanKind.CLIENT)
        self._span.enter()

    def end(
        self,
        status: int | None,
        request_id: str | None,
        error: BaseException | None,
        *,
        transmitted: int,
        received: int,
    ) -> None:
        """End the attempt with the status of its response, if there was one."""
        attributes: dict[str, Any] = {**self._where, URL_TEMPLATE: self._template}
        if status is not None:
            self._span.set({STATUS_CODE: status})
            attributes[STATUS_CODE] = status
        if request_id is not None:
            self._span.set({REQUEST_ID: request_id})
        if error is not None:
            kind = str(status) if status is not None and status >= 400 else error_type(error)
            attributes[ERROR_TYPE] = kind
            self._span.fail(kind)
        self._telemetry.record(REQUEST_DURATION, self._span.seconds, attributes)
        self._telemetry.record(ACTIVE_REQUESTS, -1, self._where)
        record_transfer(self._telemetry, "transmit", transmitted)
        record_transfer(self._telemetry, "receive", received)
        self._span.end()


def _without_values(text: str) -> str:
    """Return a path with placeholders for ids, and without anything else that may be a value.

    The text may also be the name of an operation: that of a request to any other endpoint holds a path or a template.
    """
    return _NOT_FIXED.sub(_REDACTED, _ID.sub(lambda found: f"/{found[1]}/{_IDS[found[1]]}", text))


def _describe(name: str, method: str, path: str) -> tuple[str, str]:
    """Return the template of a path, and the path and query without anything that may name a person or a file."""
    path, _, query = path.partition("?")
    template = name.removeprefix(f"{method} ")
    if template == name:
        template, shown = _without_values(path), _NOT_FIXED_OR_ID.sub(_REDACTED, path)
    else:
        # The values of the caller's template may be anything.
        shown = _PLACEHOLDER.sub(_REDACTED, template)
    return template, f"{shown}?{_REDACTED}" if query else shown
