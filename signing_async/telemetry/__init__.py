"""OpenTelemetry spans and metrics. Imports nothing of OpenTelemetry until the process itself uses it."""
