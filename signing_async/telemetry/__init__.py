"""OpenTelemetry spans and metrics. Imports nothing of OpenTelemetry until the process itself uses it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

from ..errors import ConfigurationError
from .null import AttemptSpan, CallSpan, Span, Telemetry

__all__ = ["AttemptSpan", "CallSpan", "Span", "Telemetry", "active", "is_enabled", "parse"]

_VARIABLE = "SIGNING_TELEMETRY"
_API = "opentelemetry.trace"
_METRICS_API = "opentelemetry.metrics"
_IS_NAMED = not os.environ.keys().isdisjoint({"OTEL_PYTHON_TRACER_PROVIDER", "OTEL_PYTHON_METER_PROVIDER"})
"""Whether the environment names a provider, which the API loads when it is first asked for one."""
_NULL = Telemetry()
_loaded: Telemetry | None = None
_loading = threading.Lock()  # receivers may run in threads

log: logging.Logger = logging.getLogger("signing_async")


def is_enabled() -> bool:
    """Return whether the environment leaves telemetry on; raise a `ConfigurationError` for an invalid value."""
    value = os.environ.get(_VARIABLE)
    return parse(value, _VARIABLE) if value else True


def parse(value: object, source: str) -> bool:
    """Return whether a setting, ``on`` or ``off`` or a boolean, is on."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("on", "off"):
        return value.lower() == "on"
    raise ConfigurationError(f"{source}: must be on or off, got {value!r}")


def active(enabled: bool = True) -> Telemetry:
    """Return the telemetry of this process. It does nothing unless enabled and an OpenTelemetry SDK is configured."""
    # The process cannot have configured an SDK before it imported the API.
    if not enabled or _API not in sys.modules:
        return _NULL
    if _loaded is not None:
        return _loaded
    return _NULL if _is_unset() else _load()


def _is_unset() -> bool:
    """Return whether no provider is set. Asking the API takes 6 µs, 5 % of a small call."""
    traces, meters = sys.modules[_API], sys.modules.get(f"{_METRICS_API}._internal")
    # If a later release keeps its providers elsewhere, the API is asked.
    found = getattr(traces, "_TRACER_PROVIDER", traces), getattr(meters, "_METER_PROVIDER", meters)
    return found == (None, None) and not _IS_NAMED


def _load() -> Telemetry:
    global _loaded
    try:
        from opentelemetry import metrics, trace

        if _records_nothing(trace.get_tracer_provider()) and _records_nothing(metrics.get_meter_provider()):
            return _NULL
        from .otel import OpenTelemetry

        with _loading:
            _loaded = _loaded or OpenTelemetry()
    except Exception as error:
        # An API package that is older than what the extra requires lacks modules, classes or arguments.
        _loaded = _NULL
        name = type(error).__name__
        log.warning("OpenTelemetry is not used (%s): its SDK failed, or install signing-async[otel]", name)
    return _loaded


def _records_nothing(provider: Any) -> bool:
    """Return whether a provider is one of the API package."""
    return type(provider).__module__.startswith((_API, _METRICS_API))
