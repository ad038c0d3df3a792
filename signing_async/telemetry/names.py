"""The names of spans, attributes and metrics: by the semantic conventions where these have one."""

from __future__ import annotations

from typing import Literal, NamedTuple

SCHEMA_URL = "https://opentelemetry.io/schemas/1.38.0"
"""The version of the semantic conventions that the names follow."""

# Attributes of the semantic conventions.
ERROR_TYPE = "error.type"
METHOD = "http.request.method"
STATUS_CODE = "http.response.status_code"
ADDRESS = "server.address"
PORT = "server.port"
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

Instrument = Literal["counter", "up_down_counter", "histogram", "gauge"]

# The buckets of the semantic conventions, and longer ones for what may take minutes or hours.
_SHORT = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_LONG = (*_SHORT, 25, 50, 100, 250, 500)
_LONGEST = (*_LONG, 1000, 2500, 5000, 10000)
_COUNTS = (1, 2, 3, 4, 5, 7, 10)


class Metric(NamedTuple):
    """A metric, with the attributes that it keeps and the buckets of a histogram."""

    name: str
    kind: Instrument
    unit: str
    attributes: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


def _own(name: str, kind: Instrument, unit: str, *attributes: str, boundaries: tuple[float, ...] = ()) -> Metric:
    return Metric(f"signing_async.{name}", kind, unit, attributes, boundaries)


def _duration(name: str, *attributes: str, boundaries: tuple[float, ...] = _LONG) -> Metric:
    return _own(f"{name}.duration", "histogram", "s", *attributes, boundaries=boundaries)


def _attempts(name: str, *attributes: str) -> Metric:
    return _own(f"{name}.attempts", "histogram", "{attempt}", *attributes, boundaries=_COUNTS)


_SERVER = METHOD, ADDRESS, PORT
_REQUEST = *_SERVER, URL_TEMPLATE, STATUS_CODE, ERROR_TYPE

REQUEST_DURATION = Metric("http.client.request.duration", "histogram", "s", _REQUEST, _SHORT)
ACTIVE_REQUESTS = Metric("http.client.active_requests", "up_down_counter", "{request}", _SERVER)
OPERATION_DURATION = _duration("operation", OPERATION, OUTCOME, ERROR_TYPE)
OPERATION_ATTEMPTS = _attempts("operation", OPERATION)
UNKNOWN_OUTCOMES = _own("operation.unknown_outcomes", "counter", "{operation}", OPERATION)
WAIT_DURATION = _duration("rate_limiter.wait", WAIT_PASSED)
REFRESHES = _own("token.refreshes", "counter", "{refresh}", REFRESH_RESULT)
TRANSFERRED = _own("transferred", "counter", "By", DIRECTION)
JOURNAL_DURATION = _duration("journal", JOURNAL_OPERATION, ERROR_TYPE, boundaries=_SHORT)
DISPATCH_DURATION = _duration("dispatch.package", OUTCOME)
DISPATCH_ACTIVE = _own("dispatch.active_packages", "up_down_counter", "{package}")
DELIVERIES = _own("webhook.deliveries", "counter", "{delivery}", WEBHOOK_VERDICT)
DELIVERY_DURATION = _duration("webhook.delivery", WEBHOOK_VERDICT, boundaries=_SHORT)
HANDLER_DURATION = _duration("inbox.handler", HANDLER, HANDLER_OUTCOME, ERROR_TYPE)
HANDLER_ATTEMPTS = _attempts("inbox", HANDLER, HANDLER_OUTCOME)
PENDING_EVENTS = _own("inbox.pending", "gauge", "{event}")
OLDEST_PENDING = _own("inbox.oldest_pending.age", "gauge", "s")
DEAD_LETTERS = _own("inbox.dead_letters", "gauge", "{event}")
SWEEP_DURATION = _duration("archive.sweep", OUTCOME, ERROR_TYPE, boundaries=_LONGEST)
ARCHIVE_SIGNINGS = _own("archive.signings", "counter", "{signing}")
ARCHIVE_DOCUMENTS = _own("archive.documents", "counter", "{document}", OUTCOME, ERROR_TYPE)
ARCHIVE_SIZE = _own("archive.size", "counter", "By")
ARCHIVE_FINDINGS = _own("archive.findings", "counter", "{finding}", FINDING)
METRICS = tuple(each for each in tuple(globals().values()) if isinstance(each, Metric))


class SpanType(NamedTuple):
    """A span's name, and what it records at its end: its outcome, under this attribute, and metrics.

    A histogram gets the seconds, a counter is increased by one, and an up-down counter is one higher during the span.
    """

    name: str
    outcome: str | None = None
    metrics: tuple[Metric, ...] = ()
    kind: Literal["internal", "consumer", "client"] = "internal"


# The span of an operation has the operation's name, that of an attempt its method and URL template.
REFRESH_SPAN = SpanType("token.refresh", REFRESH_RESULT, (REFRESHES,))
DISPATCH_SPAN = SpanType("dispatch")
PACKAGE_SPAN = SpanType("dispatch.package", OUTCOME, (DISPATCH_DURATION, DISPATCH_ACTIVE))
DELIVERY_SPAN = SpanType("webhook.delivery", WEBHOOK_VERDICT, (DELIVERIES, DELIVERY_DURATION), "consumer")
HANDLER_SPAN = SpanType("inbox.handler", HANDLER_OUTCOME, (HANDLER_DURATION,), "consumer")
SWEEP_SPAN = SpanType("archive.sweep", OUTCOME, (SWEEP_DURATION,))
DOCUMENT_SPAN = SpanType("archive.document", OUTCOME, (ARCHIVE_DOCUMENTS,))
