"""Exit codes, and errors as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FAILED, USAGE, UNKNOWN, UNAUTHORIZED = 1, 2, 3, 4
NOT_SOUND, UNTRUSTED, STUCK = 7, 8, 9
INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143

CODES = {
    0: "done",
    FAILED: "the service or the network refused or failed, or part of the work failed",
    USAGE: "wrong usage, input or settings; nothing was sent",
    UNKNOWN: "outcome unknown: check before you repeat the command",
    UNAUTHORIZED: "not logged in, or not permitted",
    5: "timed out while waiting",
    6: "the signing was cancelled",
    NOT_SOUND: "a sealed PDF is not sound, or an archive does not match its manifest: something was changed",
    UNTRUSTED: "a sealed PDF is sound but not trusted",
    STUCK: "a signing or a dispatch is stuck",
    INTERRUPTED: "interrupted by Ctrl-C (143: terminated by SIGTERM; 141: the reader closed the pipe)",
}

_FACTS = (
    *("status", "code", "operation", "request_id", "retry_after", "attempts"),
    *("problems", "messages", "reason", "known"),
)


def code_of(error: BaseException) -> int:
    code: int = getattr(error, "exit_code", FAILED)
    return code


def code_of_all(errors: Iterable[BaseException], *, done: int) -> int:
    """Return the exit code for several items, ``done`` of which succeeded: 0 without errors.

    3 if any outcome is unknown. Otherwise the errors' own code if nothing succeeded and all share it, else 1.
    """
    codes = {code_of(error) for error in errors}
    if UNKNOWN in codes:
        return UNKNOWN
    if not codes:
        return 0
    return FAILED if done or len(codes) > 1 else codes.pop()


def facts_of(error: BaseException, code: int | None = None) -> dict[str, Any]:
    """Return an error as JSON facts: type, message, exit code, and its other attributes."""
    facts = {name: getattr(error, name, None) for name in _FACTS}
    return {
        "type": getattr(error, "kind", type(error).__name__),
        "message": str(error),
        "exit_code": code_of(error) if code is None else code,
        **{name: value for name, value in facts.items() if value not in (None, (), {}, [])},
    }
