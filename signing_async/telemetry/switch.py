"""Whether this process has telemetry: loads nothing of OpenTelemetry until the process itself uses it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from .spans import Telemetry

__all__ = ["active", "is_enabled", "parse"]

VARIABLE = "SIGNING_TELEMETRY"
_API = "opentelemetry.trace"
_METRICS_API = "opentelemetry.metrics._internal"
_MISSING = object()
_IS_NAMED = not os.environ.keys().isdisjoint({"OTEL_PYTHON_TRACER_PROVIDER", "OTEL_PYTHON_METER_PROVIDER"})
"""Whether the environment names a provider, which the API loads when it is first asked for one."""
_telemetry: Telemetry | None = None
_is_unusable = False
_loading = threading.Lock()

log: logging.Logger = logging.getLogger("signing_async")


def is_enabled() -> bool:
    """Return whether the environment leaves telemetry on; raise a `ConfigurationError` for an invalid value."""
    value = os.environ.get(VARIABLE)
    return parse(value, VARIABLE) if value else True


def parse(value: object, source: str) -> bool:
    """Return whether a setting, ``on`` or ``off`` or a boolean, is on."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("on", "off"):
        return value.lower() == "on"
    raise ConfigurationError(f"{source}: must be on or off, got {value!r}")


def active() -> Telemetry | None:
    """Return the telemetry of this process; None unless an OpenTelemetry SDK is configured."""
    if _telemetry is not None:
        return _telemetry
    # The process cannot have configured an SDK before it imported the API.
    return None if _API not in sys.modules or _is_unusable or _is_unset() else _load()


def _is_unset() -> bool:
    """Return whether no provider is set. The API's own functions take 2 % of a call to search the environment."""
    if _IS_NAMED:
        return False
    meters = sys.modules.get(_METRICS_API)
    # If a later release stores its providers elsewhere, `_load` asks the API.
    is_unset = getattr(sys.modules[_API], "_TRACER_PROVIDER", _MISSING) is None
    return is_unset and (meters is None or getattr(meters, "_METER_PROVIDER", _MISSING) is None)


def _load() -> Telemetry | None:
    global _telemetry, _is_unusable
    try:
        from opentelemetry import metrics, trace

        if _is_of_api(trace.get_tracer_provider()) and _is_of_api(metrics.get_meter_provider()):
            return None
        from .spans import Telemetry

        # Threads that handle webhooks come here too.
        with _loading:
            _telemetry = _telemetry or Telemetry()
    except (ImportError, TypeError) as error:
        # An API package that is older than what the extra requires lacks modules, classes or arguments.
        _is_unusable = True
        log.warning("OpenTelemetry is not used (%s): install signing-async[otel]", error)
    except Exception as error:
        _is_unusable = True
        log.warning("OpenTelemetry is not used: its SDK failed (%s)", type(error).__name__)
    return _telemetry


def _is_of_api(provider: Any) -> bool:
    """Return whether a provider is one of the API package, which records nothing."""
    return type(provider).__module__.startswith((_API, "opentelemetry.metrics"))
