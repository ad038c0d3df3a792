"""What a command's exit code means, and how an error is told: in a sentence, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import (
    AuthError,
    ConfigurationError,
    Forbidden,
    InvalidRequest,
    NotSound,
    SigningCancelled,
    Unauthorized,
    WaitTimeout,
)

__all__ = [
    "CANCELLED",
    "CODES",
    "FAILED",
    "INTERRUPTED",
    "NOT_SOUND",
    "PIPE_CLOSED",
    "TERMINATED",
    "TIMED_OUT",
    "UNAUTHORIZED",
    "UNKNOWN",
    "UNTRUSTED",
    "USAGE",
    "code_of",
    "code_of_all",
    "facts_of",
]

FAILED = 1
USAGE = 2
UNKNOWN = 3
UNAUTHORIZED = 4
TIMED_OUT = 5
CANCELLED = 6
NOT_SOUND = 7
UNTRUSTED = 8
INTERRUPTED = 130
PIPE_CLOSED = 141
TERMINATED = 143

CODES = {
    0: "done",
    FAILED: "the service or the network said no, or a part of the work failed",
    USAGE: "the call, its input or a setting is wrong; nothing was sent",
    UNKNOWN: "it may or may not have taken effect: look before you repeat it",
    UNAUTHORIZED: "not logged in, or not allowed",
    TIMED_OUT: "the time to wait is up",
    CANCELLED: "the signing was cancelled",
    NOT_SOUND: "a sealed PDF is not as it was when it was signed",
    UNTRUSTED: "a sealed PDF is sound, and not of those who are trusted",
    INTERRUPTED: "interrupted by Ctrl-C (143: by SIGTERM)",
}

_FACTS = (
    *("status", "code", "operation", "request_id", "retry_after", "attempts"),
    *("problems", "messages", "reason", "known"),
)


def code_of(error: BaseException) -> int:
    """The exit code for an error."""
    if getattr(error, "effect", "none") == "unknown":
        return UNKNOWN
    if isinstance(error, ConfigurationError | InvalidRequest):
        return USAGE
    if isinstance(error, AuthError | Unauthorized | Forbidden):
        return UNAUTHORIZED
    if isinstance(error, WaitTimeout):
        return TIMED_OUT
    if isinstance(error, NotSound):
        return NOT_SOUND
    return CANCELLED if isinstance(error, SigningCancelled) else FAILED


def code_of_all(errors: Iterable[BaseException], *, done: int) -> int:
    """The exit code for several pieces of work, of which so many were done: 0 without errors.

    3 if the outcome of any is unknown; else an error's own code only where nothing was done and all errors share it.
    """
    codes = {code_of(error) for error in errors}
    if UNKNOWN in codes:
        return UNKNOWN
    if not codes:
        return 0
    return FAILED if done or len(codes) > 1 else codes.pop()


def facts_of(error: BaseException, code: int | None = None) -> dict[str, Any]:
    """An error for machines: its type, sentence and exit code, and what else it knows."""
    facts = {name: getattr(error, name, None) for name in _FACTS}
    return {
        "type": type(error).__name__,
        "message": str(error),
        "exit_code": code_of(error) if code is None else code,
        **{name: value for name, value in facts.items() if value not in (None, (), {}, [])},
    }
