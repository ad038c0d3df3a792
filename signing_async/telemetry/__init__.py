"""OpenTelemetry spans and metrics. Imports nothing of OpenTelemetry until the process itself uses it."""

from __future__ import annotations

import logging
import os
import sys

from ..errors import ConfigurationError
from .null import Span, Telemetry

__all__ = ["Span", "Telemetry", "active", "is_enabled", "parse"]

_VARIABLE = "SIGNING_TELEMETRY"

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
    """Return the telemetry of this process. It does nothing unless enabled and the process uses OpenTelemetry."""
    global _loaded
    if not enabled or "opentelemetry.trace" not in sys.modules:
        return _NULL
    if _loaded is None:
        try:
            from .otel import OpenTelemetry

            _loaded = OpenTelemetry()
        except Exception as error:  # an API package that is older than what the extra requires
            _loaded = _NULL
            log.warning("OpenTelemetry is not used (%s): install signing-async[otel]", type(error).__name__)
    return _loaded
