"""The exception for requests that break the service's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Refused(Exception):
    """Raised for a request that the service refuses; over HTTP it becomes an error response."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        errors: Mapping[str, Sequence[str]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, code, message, errors, headers)
        self.status = status
        self.code = code
        self.message = message
        self.errors: dict[str, list[str]] = {field: list(messages) for field, messages in (errors or {}).items()}
        self.headers: dict[str, str] = dict(headers or {})

    def __str__(self) -> str:
        details = "; ".join(text for texts in self.errors.values() for text in texts)
        return f"{self.message} ({self.code}) {details}".rstrip()


def invalid(errors: Mapping[str, Sequence[str]]) -> Refused:
    """Return the refusal with status 400 and the problems of each field."""
    return Refused(400, "validation_failed", "The given data was invalid.", errors)


def not_found(what: str) -> Refused:
    """Return the refusal with status 404: `what` does not exist, or belongs to another tenant."""
    return Refused(404, "not_found", f"There is no such {what}.")
