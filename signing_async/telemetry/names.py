"""The names of spans, events, attributes and metrics: by the semantic conventions where these have one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

SCHEMA_URL = "https://opentelemetry.io/schemas/1.38.0"
"""The version of the semantic conventions that the names follow."""

# Attributes of the semantic conventions.
ERROR_TYPE = "error.type"
METHOD = "http.request.method"
RESEND_COUNT = "http.request.resend_count"
STATUS_CODE = "http.response.status_code"
ADDRESS = "server.address"
PORT = "server.port"
URL = "url.full"
URL_TEMPLATE = "url.template"
DIRECTION = "network.io.direction"

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

# The events of an operation's span.
WAIT_EVENT = "rate_limiter.wait"
REFRESH_EVENT = "token.refresh"
RETRY_EVENT = "retry"
READING_EVENT = "reconcile.read"
VERDICT_EVENT = "reconcile.verdict"

# The buckets of the semantic conventions, and longer ones for what may take minutes or hours.
_SHORT = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_LONG = (*_SHORT, 25, 50, 100, 250, 500)
_LONGEST = (*_LONG, 1000, 2500, 5000, 10000)
_COUNTS = (1, 2, 3, 4, 5, 7, 10)


class Metric(NamedTuple):
    """A metric. ``combine`` makes one value of a gauge from the values of several parts of a process."""

    name: str
    kind: Literal["counter", "up_down_counter", "histogram", "gauge"]
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()
    combine: Callable[[Iterable[float]], float] = sum


def _duration(name: str, of: str, boundaries: tuple[float, ...], *attributes: str) -> Metric:
    return Metric(f"signing_async.{name}.duration", "histogram", "s", f"Duration of {of}.", attributes, boundaries)


def _attempts(name: str, of: str, *attributes: str) -> Metric:
    return Metric(f"signing_async.{name}.attempts", "histogram", "{attempt}", f"Attempts of {of}.", attributes, _COUNTS)


def _counter(name: str, unit: str, of: str, *attributes: str) -> Metric:
    return Metric(f"signing_async.{name}", "counter", unit, of, attributes)


def _gauge(name: str, unit: str, of: str, combine: Callable[[Iterable[float]], float] = sum) -> Metric:
    return Metric(f"signing_async.inbox.{name}", "gauge", unit, of, combine=combine)


def _active(name: str, unit: str, of: str, *attributes: str) -> Metric:
    return Metric(name, "up_down_counter", unit, of, attributes)


_SERVER = METHOD, ADDRESS, PORT
_REQUEST = *_SERVER, URL_TEMPLATE, STATUS_CODE, ERROR_TYPE
_RESULT = OUTCOME, ERROR_TYPE
_HANDLED = HANDLER, HANDLER_OUTCOME
_REQUESTS, _POOLED = "Duration of HTTP client requests.", "Requests that use or await a pooled connection."
_UNKNOWN = "Operations that may have taken effect."

REQUEST_DURATION = Metric("http.client.request.duration", "histogram", "s", _REQUESTS, _REQUEST, _SHORT)
ACTIVE_REQUESTS = _active("http.client.active_requests", "{request}", _POOLED, *_SERVER)
OPERATION_DURATION = _duration("operation", "operations, with their waits", _LONG, OPERATION, *_RESULT)
OPERATION_ATTEMPTS = _attempts("operation", "an operation", OPERATION)
UNKNOWN_OUTCOMES = _counter("operation.unknown_outcomes", "{operation}", _UNKNOWN, OPERATION)
WAIT_DURATION = _duration("rate_limiter.wait", "waits for the rate limiter", _LONG, WAIT_PASSED)
REFRESHES = _counter("token.refreshes", "{refresh}", "Token refreshes, by result.", REFRESH_RESULT)
TRANSFERRED = _counter("transferred", "By", "Bytes of request and response bodies.", DIRECTION)
JOURNAL_DURATION = _duration("journal", "a journal's operations", _SHORT, JOURNAL_OPERATION, ERROR_TYPE)
DISPATCH_DURATION = _duration("dispatch.package", "the work on a package", _LONG, OUTCOME)
DISPATCH_ACTIVE = _active("signing_async.dispatch.active_packages", "{package}", "Packages being dispatched.")
DELIVERIES = _counter("webhook.deliveries", "{delivery}", "Webhook deliveries, by verdict.", WEBHOOK_VERDICT)
DELIVERY_DURATION = _duration("webhook.delivery", "webhook deliveries", _SHORT, WEBHOOK_VERDICT)
HANDLER_DURATION = _duration("inbox.handler", "attempts to handle an event", _LONG, *_HANDLED, ERROR_TYPE)
HANDLER_ATTEMPTS = _attempts("inbox", "an event that is settled", *_HANDLED)
PENDING_EVENTS = _gauge("pending", "{event}", "Events that are not handled yet.")
OLDEST_PENDING = _gauge("oldest_pending.age", "s", "Age of the oldest event that is not handled.", max)
DEAD_LETTERS = _gauge("dead_letters", "{event}", "Events whose handler failed too often.")
SWEEP_DURATION = _duration("archive.sweep", "an archive's sweeps", _LONGEST, *_RESULT)
ARCHIVE_SIGNINGS = _counter("archive.signings", "{signing}", "Signings that sweeps have read in the list.")
ARCHIVE_DOCUMENTS = _counter("archive.documents", "{document}", "Documents to archive, by outcome.", *_RESULT)
ARCHIVE_SIZE = _counter("archive.size", "By", "Bytes of archived documents.")
ARCHIVE_FINDINGS = _counter("archive.findings", "{finding}", "Findings in archives, by kind.", FINDING)
METRICS = tuple(each for each in tuple(globals().values()) if isinstance(each, Metric))


class SpanType(NamedTuple):
    """What a span records at its end: its outcome, under this attribute, and metrics.

    A histogram gets the seconds, a counter is increased by one, and an up-down counter is one higher during the span.
    """

    outcome: str | None = None
    metrics: tuple[Metric, ...] = ()
    kind: Literal["internal", "consumer", "client"] = "internal"


# The span of an operation has the operation's name, that of an attempt its method and URL template.
REFRESH_SPAN = "token.refresh"
DISPATCH_SPAN = "dispatch"
PACKAGE_SPAN = "dispatch.package"
DELIVERY_SPAN = "webhook.delivery"
HANDLER_SPAN = "inbox.handler"
SWEEP_SPAN = "archive.sweep"
DOCUMENT_SPAN = "archive.document"

SPANS: dict[str, SpanType] = {
    REFRESH_SPAN: SpanType(REFRESH_RESULT, (REFRESHES,)),
    DISPATCH_SPAN: SpanType(),
    PACKAGE_SPAN: SpanType(OUTCOME, (DISPATCH_DURATION, DISPATCH_ACTIVE)),
    DELIVERY_SPAN: SpanType(WEBHOOK_VERDICT, (DELIVERIES, DELIVERY_DURATION), "consumer"),
    HANDLER_SPAN: SpanType(HANDLER_OUTCOME, (HANDLER_DURATION,), "consumer"),
    SWEEP_SPAN: SpanType(OUTCOME, (SWEEP_DURATION,)),
    DOCUMENT_SPAN: SpanType(OUTCOME, (ARCHIVE_DOCUMENTS,)),
}
