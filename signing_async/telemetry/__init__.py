"""OpenTelemetry spans and metrics. Imports nothing of OpenTelemetry until the process itself uses it."""

from __future__ import annotations

import logging
import os
import sys

from ..errors import ConfigurationError
from .null import Span, Telemetry

__all__ = ["Span", "Telemetry", "active", "is_enabled", "parse"]

_VARIABLE = "SIGNING_TELEMETRY"
_API = "opentelemetry.trace"

log: logging.Logger = logging.getLogger("signing_async")

_NULL = Telemetry()
_loaded: Telemetry | None = None


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
    global _loaded
    # The process cannot have configured an SDK before it imported the API.
    if not enabled or _API not in sys.modules:
        return _NULL
    if _loaded is None:
        traces, meters = sys.modules[_API], sys.modules.get("opentelemetry.metrics._internal")
        # Asking the API for its providers takes 6 µs, 5 % of a small call.
        if (getattr(traces, "_TRACER_PROVIDER", traces), getattr(meters, "_METER_PROVIDER", meters)) == (None, None):
            return _NULL
        try:
            from .otel import OpenTelemetry

            _loaded = OpenTelemetry()
        except Exception as error:
            # An API package that is older than what the extra requires lacks modules, classes or arguments.
            _loaded = _NULL
            name = type(error).__name__
            log.warning("OpenTelemetry is not used (%s): its SDK failed, or install signing-async[otel]", name)
    return _loaded
