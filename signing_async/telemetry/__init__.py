"""OpenTelemetry spans and metrics. Imports nothing of OpenTelemetry until the process itself uses it."""

from __future__ import annotations

import logging
import os
import sys
import threading

from ..errors import ConfigurationError
from .null import AttemptSpan, CallSpan, Span, Telemetry

__all__ = ["AttemptSpan", "CallSpan", "Span", "Telemetry", "active", "is_enabled", "parse"]

_VARIABLE = "SIGNING_TELEMETRY"
_API = "opentelemetry.trace"
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
    traces, meters = sys.modules[_API], sys.modules.get("opentelemetry.metrics._internal")
    return (getattr(traces, "_TRACER_PROVIDER", traces), getattr(meters, "_METER_PROVIDER", meters)) == (None, None)


def _load() -> Telemetry:
    global _loaded
    try:
        from .otel import OpenTelemetry

        with _loading:
            _loaded = _loaded or OpenTelemetry()
    except Exception as error:
        # An API package that is older than what the extra requires lacks modules, classes or arguments.
        _loaded = _NULL
        name = type(error).__name__
        log.warning("OpenTelemetry is not used (%s): its SDK failed, or install signing-async[otel]", name)
    return _loaded
