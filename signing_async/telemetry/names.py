"""The names of the spans, the metrics and their attributes: by the semantic conventions where these have one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

__all__ = [
    "ACTIVE_REQUESTS",
    "ARCHIVE_DOCUMENTS",
    "ARCHIVE_FINDINGS",
    "ARCHIVE_SIGNINGS",
    "ARCHIVE_SIZE",
    "ATTEMPT_NUMBER",
    "ATTRIBUTES",
    "DEAD_LETTERS",
    "DELIVERIES",
    "DELIVERY_DURATION",
    "DELIVERY_SPAN",
    "DISPATCH_ACTIVE",
    "DISPATCH_DURATION",
    "DISPATCH_SPAN",
    "DOCUMENT_ID",
    "DOCUMENT_SPAN",
    "ERROR_TYPE",
    "EVENTS",
    "EVENT_ID",
    "FINDING",
    "HANDLER",
    "HANDLER_ATTEMPTS",
    "HANDLER_DURATION",
    "HANDLER_OUTCOME",
    "HANDLER_SPAN",
    "JOURNAL_DURATION",
    "JOURNAL_OPERATION",
    "METRICS",
    "OLDEST_PENDING",
    "OPERATION",
    "OPERATION_ATTEMPTS",
    "OPERATION_DURATION",
    "OUTCOME",
    "PACKAGE_NUMBER",
    "PACKAGE_SPAN",
    "PENDING_EVENTS",
    "READING_EVENT",
    "REFRESHES",
    "REFRESH_EVENT",
    "REFRESH_RESULT",
    "REFRESH_SPAN",
    "REQUEST_DURATION",
    "REQUEST_ID",
    "RETRY_DELAY",
    "RETRY_EVENT",
    "SCHEMA_URL",
    "SECONDS",
    "SIGNING_ID",
    "SPANS",
    "STATUS_CODE",
    "SWEEP_DURATION",
    "SWEEP_SPAN",
    "TRANSFERRED",
    "UNKNOWN_OUTCOMES",
    "URL_TEMPLATE",
    "VERDICT",
    "VERDICT_EVENT",
    "WAIT",
    "WAIT_DURATION",
    "WAIT_EVENT",
    "WAIT_PASSED",
    "WEBHOOK_VERDICT",
    "Metric",
]

SCHEMA_URL = "https://opentelemetry.io/schemas/1.38.0"
"""The version of the semantic conventions that the names follow."""

# This package's own attributes.
SIGNING_ID = "signing.id"
REQUEST_ID = "signing.request_id"
OPERATION = "signing_async.operation"
OUTCOME = "signing_async.outcome"
WAIT = "signing_async.wait.duration"
WAIT_PASSED = "signing_async.wait.passed"
RETRY_DELAY = "signing_async.retry.delay"
VERDICT = "signing_async.reconcile.verdict"
REFRESH_RESULT = "signing_async.refresh.result"
JOURNAL_OPERATION = "signing_async.journal.operation"
PACKAGE_NUMBER = "signing_async.package.number"
DOCUMENT_ID = "signing.document_id"
EVENT_ID = "signing.event_id"
WEBHOOK_VERDICT = "signing_async.webhook.verdict"
HANDLER = "signing_async.inbox.handler"
HANDLER_OUTCOME = "signing_async.inbox.outcome"
ATTEMPT_NUMBER = "signing_async.inbox.attempt"
FINDING = "signing_async.archive.finding"
ATTRIBUTES = (
    SIGNING_ID,
    REQUEST_ID,
    OPERATION,
    OUTCOME,
    WAIT,
    WAIT_PASSED,
    RETRY_DELAY,
    VERDICT,
    REFRESH_RESULT,
    JOURNAL_OPERATION,
    PACKAGE_NUMBER,
    DOCUMENT_ID,
    EVENT_ID,
    WEBHOOK_VERDICT,
    HANDLER,
    HANDLER_OUTCOME,
    ATTEMPT_NUMBER,
    FINDING,
)

ERROR_TYPE = "error.type"
STATUS_CODE = "http.response.status_code"
URL_TEMPLATE = "url.template"

# The span of an operation has the operation's name, that of an attempt its method and URL template.
REFRESH_SPAN = "token.refresh"
DISPATCH_SPAN = "dispatch"
PACKAGE_SPAN = "dispatch.package"
DELIVERY_SPAN = "webhook.delivery"
HANDLER_SPAN = "inbox.handler"
SWEEP_SPAN = "archive.sweep"
DOCUMENT_SPAN = "archive.document"
SPANS = (REFRESH_SPAN, DISPATCH_SPAN, PACKAGE_SPAN, DELIVERY_SPAN, HANDLER_SPAN, SWEEP_SPAN, DOCUMENT_SPAN)

# The events of an operation's span.
WAIT_EVENT = "rate_limiter.wait"
REFRESH_EVENT = "token.refresh"
RETRY_EVENT = "retry"
READING_EVENT = "reconcile.read"
VERDICT_EVENT = "reconcile.verdict"
EVENTS = (WAIT_EVENT, REFRESH_EVENT, RETRY_EVENT, READING_EVENT, VERDICT_EVENT)

# The boundaries of the semantic conventions, and longer ones for what may take minutes or hours.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_MINUTES = (*SECONDS, 25, 50, 100, 250, 500)
_HOURS = (*_MINUTES, 1000, 2500, 5000, 10000)
_COUNTS = (1, 2, 3, 4, 5, 7, 10)


class Metric(NamedTuple):
    """A metric: its kind of instrument, its unit, and what it counts or measures."""

    name: str
    kind: Literal["counter", "up_down_counter", "histogram", "gauge"]
    unit: str
    description: str
    boundaries: tuple[float, ...] | None = None
    """The bucket boundaries of a histogram."""
    combine: Callable[[Iterable[float]], float] = sum
    """How to combine the values that several parts of a process measure for a gauge."""


REQUEST_DURATION = Metric(
    "http.client.request.duration", "histogram", "s", "Duration of HTTP client requests.", SECONDS
)
ACTIVE_REQUESTS = Metric(
    "http.client.active_requests", "up_down_counter", "{request}", "Requests that use or await a pooled connection."
)
OPERATION_DURATION = Metric(
    "signing_async.operation.duration",
    "histogram",
    "s",
    "Duration of operations, with their waits, attempts and readings.",
    _MINUTES,
)
OPERATION_ATTEMPTS = Metric(
    "signing_async.operation.attempts", "histogram", "{attempt}", "Attempts of an operation.", _COUNTS
)
UNKNOWN_OUTCOMES = Metric(
    "signing_async.operation.unknown_outcomes", "counter", "{operation}", "Operations that may have taken effect."
)
WAIT_DURATION = Metric(
    "signing_async.rate_limiter.wait.duration", "histogram", "s", "Waits for the rate limiter.", _MINUTES
)
REFRESHES = Metric("signing_async.token.refreshes", "counter", "{refresh}", "Token refreshes, by result.")
TRANSFERRED = Metric("signing_async.transferred", "counter", "By", "Bytes of request and response bodies.")
JOURNAL_DURATION = Metric(
    "signing_async.journal.duration", "histogram", "s", "Duration of a journal's operations.", SECONDS
)
DISPATCH_DURATION = Metric(
    "signing_async.dispatch.package.duration",
    "histogram",
    "s",
    "Duration of the work on a package, by outcome.",
    _MINUTES,
)
DISPATCH_ACTIVE = Metric(
    "signing_async.dispatch.active_packages", "up_down_counter", "{package}", "Packages being dispatched."
)
DELIVERIES = Metric("signing_async.webhook.deliveries", "counter", "{delivery}", "Webhook deliveries, by verdict.")
DELIVERY_DURATION = Metric(
    "signing_async.webhook.delivery.duration",
    "histogram",
    "s",
    "Duration of webhook deliveries, from their head to the response.",
    SECONDS,
)
HANDLER_DURATION = Metric(
    "signing_async.inbox.handler.duration", "histogram", "s", "Duration of an inbox's attempts, by outcome.", _MINUTES
)
HANDLER_ATTEMPTS = Metric(
    "signing_async.inbox.attempts", "histogram", "{attempt}", "Attempts of an event that is settled.", _COUNTS
)
PENDING_EVENTS = Metric("signing_async.inbox.pending", "gauge", "{event}", "Events that are not handled yet.")
OLDEST_PENDING = Metric(
    "signing_async.inbox.oldest_pending.age", "gauge", "s", "Age of the oldest event that is not handled.", combine=max
)
DEAD_LETTERS = Metric("signing_async.inbox.dead_letters", "gauge", "{event}", "Events whose handler failed too often.")
SWEEP_DURATION = Metric(
    "signing_async.archive.sweep.duration", "histogram", "s", "Duration of an archive's sweeps, by outcome.", _HOURS
)
ARCHIVE_SIGNINGS = Metric(
    "signing_async.archive.signings", "counter", "{signing}", "Signings that sweeps have read in the list."
)
ARCHIVE_DOCUMENTS = Metric(
    "signing_async.archive.documents", "counter", "{document}", "Documents to archive, by outcome."
)
ARCHIVE_SIZE = Metric("signing_async.archive.size", "counter", "By", "Bytes of archived documents.")
ARCHIVE_FINDINGS = Metric(
    "signing_async.archive.findings",
    "counter",
    "{finding}",
    "Differences between archives and their manifests, by kind.",
)

METRICS = (
    REQUEST_DURATION,
    ACTIVE_REQUESTS,
    OPERATION_DURATION,
    OPERATION_ATTEMPTS,
    UNKNOWN_OUTCOMES,
    WAIT_DURATION,
    REFRESHES,
    TRANSFERRED,
    JOURNAL_DURATION,
    DISPATCH_DURATION,
    DISPATCH_ACTIVE,
    DELIVERIES,
    DELIVERY_DURATION,
    HANDLER_DURATION,
    HANDLER_ATTEMPTS,
    PENDING_EVENTS,
    OLDEST_PENDING,
    DEAD_LETTERS,
    SWEEP_DURATION,
    ARCHIVE_SIGNINGS,
    ARCHIVE_DOCUMENTS,
    ARCHIVE_SIZE,
    ARCHIVE_FINDINGS,
)
"""All metrics: the guide, its dashboard and its alert rules are checked against them."""
