"""The exceptions of the package, as one tree.

::

    SigningError
    ├── ConfigurationError       a setting is missing or unusable (also a ValueError)
    ├── InvalidRequest           refused before anything was sent (also a ValueError)
    │   └── PdfRejected          the file is not a PDF, too large, protected, or signed already
    ├── TransportError           no usable response
    │   └── RequestTimeout       the call's deadline passed (also a TimeoutError)
    ├── OutcomeUnknown           the request may or may not have taken effect
    │   └── OutcomeUnknownTimeout   the same, at the call's deadline (also a TimeoutError)
    ├── APIError                 a response with an error status
    │   ├── BadRequest           400
    │   │   └── CannotBeSent     400 with code cannot_be_sent
    │   ├── Unauthorized         401
    │   ├── Forbidden            403
    │   ├── NotFound             404
    │   │   └── NotYetSigned     404 of a download: the document is not fully signed yet
    │   ├── DocumentRejected     422: protected, too large, or signed already
    │   ├── RateLimited          429
    │   └── ServerError          5xx
    ├── AuthError                could not obtain a token
    │   ├── StateMismatch        the callback's state is not that of the authorization request
    │   ├── RefreshRejected      the refresh token is no longer valid
    │   └── TokenSuperseded      a store refused a token, because it holds a newer one
    ├── DecodeError              a successful response that cannot be decoded
    ├── NotSound                 a downloaded PDF was changed after it was signed, or is not trusted
    ├── ClientClosed             a call after aclose()
    ├── StorageError             a store of this package's own state cannot be read or written
    │   ├── JournalError         the journal of a dispatch or an archive
    │   ├── InboxError           the inbox
    │   └── ArchiveError         the archive
    │       └── ArchiveConflict  another writer was first, or a name holds another file
    ├── DraftChanged             a dispatch's draft was changed by another client; this run did not send it
    ├── SigningCancelled         waited for a signing that was cancelled
    ├── WaitTimeout              a signing was not completed in time (also a TimeoutError)
    └── WebhookError             a delivery that must not be acted on
        ├── InvalidSignature     the delivery has no valid signature
        └── MalformedEvent       the delivery is genuine, but its body is not an event

``error.transient`` says whether repeating the call may help, ``error.effect`` whether it may have taken effect.
Every error survives ``pickle`` and ``copy``, and no error's text contains a token, a secret or an authorization code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

__all__ = [
    "APIError",
    "ArchiveConflict",
    "ArchiveError",
    "AuthError",
    "BadRequest",
    "CannotBeSent",
    "ClientClosed",
    "ConfigurationError",
    "DecodeError",
    "DocumentRejected",
    "DraftChanged",
    "Forbidden",
    "InboxError",
    "InvalidRequest",
    "InvalidSignature",
    "JournalError",
    "MalformedEvent",
    "NotFound",
    "NotSound",
    "NotYetSigned",
    "OutcomeUnknown",
    "OutcomeUnknownTimeout",
    "PdfRejected",
    "RateLimited",
    "RefreshRejected",
    "RequestTimeout",
    "ServerError",
    "SigningCancelled",
    "SigningError",
    "StateMismatch",
    "StorageError",
    "TokenSuperseded",
    "TransportError",
    "Unauthorized",
    "WaitTimeout",
    "WebhookError",
]

E = TypeVar("E", bound="SigningError")


def _revive(cls: type[E], args: tuple[object, ...], state: dict[str, Any]) -> E:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class Flags(TypedDict, total=False):
    """What code needs to know of an error, where it differs from the class."""

    transient: bool
    effect: Literal["none", "unknown"]
    client_wide: bool


class SigningError(Exception):
    """Base class of the package's exceptions. ``str(error)`` is for people, the attributes are for code."""

    transient: bool = False
    """Whether the same call may succeed later: after a network failure, 408, 429, 5xx, or a failing token endpoint."""
    effect: Literal["none", "unknown"] = "none"
    """``"unknown"`` if the request may have taken effect, so that repeating the call could do the same thing twice.

    A spare draft of a retried `create` does not count: it sends no notifications.
    """
    client_wide: bool = False
    """Whether other calls fail too: closed client, bad setting or certificate, no token, failing store or broker."""
    _exit_code: int = 1

    def __init__(self, message: str, **flags: Unpack[Flags]) -> None:
        super().__init__(message)
        self.message = message
        self.__dict__.update(flags)

    @property
    def fatal(self) -> bool:
        """Whether no call of the client can succeed any more: a bulk operation sends nothing after such an error."""
        return self.client_wide and not self.transient

    @property
    def exit_code(self) -> int:
        """The exit code of a command that fails with this error; the guide to the command line lists all codes."""
        if self.effect == "unknown":
            return 3
        return 1 if self.transient else self._exit_code

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    # Exception's own pickling calls the class with ``args``, without keyword arguments.
    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.args, self._state())

    def _state(self) -> dict[str, Any]:
        return self.__dict__

    # A copy stays in the process, so it keeps what a pickle leaves out.
    def __copy__(self) -> Self:
        return _revive(type(self), self.args, self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return _revive(type(self), self.args, copy.deepcopy(self.__dict__, memo))


def amended(error: E, *, reason: str = "", attempts: int | None = None, **flags: Unpack[Flags]) -> E:
    """Return a copy of the error with what only its call knows; the reason why no attempt follows is appended."""
    amended = copy.copy(error)
    if hasattr(error, "__notes__"):
        amended.__notes__ = [*error.__notes__]
    amended.__cause__ = error.__cause__
    amended.__dict__.update(flags)
    if attempts is not None and isinstance(amended, TransportError):
        amended.attempts = attempts
    if reason and isinstance(amended, APIError | TransportError):
        amended.message = f"{error.message} ({reason})" if error.message else reason
        amended.args = (amended.message,)
    return amended


class ConfigurationError(SigningError, ValueError):
    """A setting is missing or invalid."""

    client_wide: bool = True
    _exit_code: int = 2


class InvalidRequest(SigningError, ValueError):
    """The arguments violate a documented limit; nothing was sent.

    ``problems`` holds a sentence for each problem, which names the field, the limit and the value.
    """

    _exit_code: int = 2

    def __init__(self, message: str, *, problems: Iterable[str] = (), **flags: Unpack[Flags]) -> None:
        super().__init__(message, **flags)
        self.problems: tuple[str, ...] = tuple(problems) or (message,)


class PdfRejected(InvalidRequest):
    """The preflight refused a file; nothing was sent.

    ``reason`` is ``"not_pdf"``, ``"too_large"``, ``"protected"`` or ``"already_signed"``; ``filename`` names the file.
    """

    def __init__(self, message: str, *, reason: str, filename: str, **flags: Unpack[Flags]) -> None:
        super().__init__(message, **flags)
        self.reason = reason
        self.filename = filename


class TransportError(SigningError):
    """There is no usable response: the connection failed, or the response was cut off.

    ``attempts`` counts the requests that were made; ``status`` and ``request_id`` are those of a truncated response.
    """

    transient: bool = True

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        attempts: int = 1,
        status: int | None = None,
        request_id: str | None = None,
        **flags: Unpack[Flags],
    ) -> None:
        super().__init__(message, **flags)
        self.operation = operation
        self.attempts = attempts
        self.status = status
        self.request_id = request_id


class RequestTimeout(TransportError, TimeoutError):
    """The call's deadline passed. The request was not sent, or can be repeated without harm."""


class OutcomeUnknown(SigningError):
    """The request may or may not have taken effect.

    It is not a `TransportError`: code that retries on those sends nothing twice. ``attempts`` counts the requests that
    were made; ``known`` holds the records that were found, to help a person decide. ``may_clear`` is true if no reading
    succeeded in time, but a later one may. Only a dispatch with a journal, which reads before it repeats anything, is
    then ``transient``. ``client_wide`` is that of the error with which the reading ended. ``after_transient`` is false
    if the request itself failed permanently, for example because its response cannot be decoded.
    """

    effect: Literal["none", "unknown"] = "unknown"

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        attempts: int = 1,
        known: Iterable[object] = (),
        may_clear: bool = False,
        after_transient: bool = True,
        **flags: Unpack[Flags],
    ) -> None:
        super().__init__(message, **flags)
        self.operation = operation
        self.attempts = attempts
        self.known: tuple[object, ...] = tuple(known)
        self.may_clear = may_clear
        self.after_transient = after_transient

    @property
    def fatal(self) -> bool:
        return self.client_wide and not self.may_clear


class OutcomeUnknownTimeout(OutcomeUnknown, TimeoutError):
    """The call's deadline passed after the request was sent, which may have taken effect or may still do so."""


class APIError(SigningError):
    """A response with an error status. ``transport/problems.py`` picks the class.

    ``messages`` maps the name of a field to the service's messages about it; those under ``""`` concern no field.
    ``body`` is the start of the response as received. A server may echo a secret in it, so no text shows it, and a
    pickle holds it redacted.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        operation: str | None = None,
        code: str | None = None,
        messages: Mapping[str, Sequence[str]] | None = None,
        request_id: str | None = None,
        body: bytes = b"",
        redacted_body: bytes | None = None,
        retry_after: float | None = None,
        **flags: Unpack[Flags],
    ) -> None:
        flags.setdefault("transient", self.transient or status == 408)
        super().__init__(message, **flags)
        self.status = status
        self.operation = operation
        self.code = code
        self.messages: dict[str, list[str]] = {field: list(texts) for field, texts in (messages or {}).items()}
        self.request_id = request_id
        self.body = body
        self.retry_after = retry_after
        self._redacted_body = body if redacted_body is None else redacted_body

    def __str__(self) -> str:
        details = {text for texts in self.messages.values() for text in texts}
        parts = [self.message] if self.message and self.message not in details else []
        parts += [f"{field}: {text}" if field else text for field, texts in self.messages.items() for text in texts]
        facts = [f"code {self.code}"] if self.code else []
        facts += [f"request id {self.request_id}"] if self.request_id else []
        facts += [f"retry after {self.retry_after:g} s"] if self.retry_after is not None else []
        text = f"HTTP {self.status} on {self.operation}" if self.operation else f"HTTP {self.status}"
        text += ": " + "; ".join(dict.fromkeys(part.rstrip(".") for part in parts)) if parts else ""
        return f"{text} ({', '.join(facts)})" if facts else text

    def _state(self) -> dict[str, Any]:
        return {**self.__dict__, "body": self._redacted_body}


class BadRequest(APIError):
    """400: the request is invalid; see ``messages``."""


class CannotBeSent(BadRequest):
    """400 ``cannot_be_sent``: the signing has no document, no recipient, or is no longer a draft."""


class Unauthorized(APIError):
    """401: the access token was rejected, and refreshing it did not help or was not possible."""

    client_wide: bool = True
    _exit_code: int = 4


class Forbidden(APIError):
    """403: the token is valid, but does not allow this."""

    _exit_code: int = 4


class NotFound(APIError):
    """404: no such record exists for this token."""


class NotYetSigned(NotFound):
    """404 of a download: the document is not fully signed yet."""


class DocumentRejected(APIError):
    """422: the PDF is password protected, too large, or signed already."""


class RateLimited(APIError):
    """429: too many requests, and the call's deadline or the policy did not allow a longer wait.

    ``retry_after`` is the number of seconds after which to try again, if it is known.
    """

    transient: bool = True


class ServerError(APIError):
    """5xx: the service failed, and no further attempt was allowed."""

    transient: bool = True


class AuthError(SigningError):
    """Could not obtain a token.

    ``code`` is the OAuth error code (``access_denied``, ``invalid_grant``, ...), if the service named one.
    """

    client_wide: bool = True
    _exit_code: int = 4

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        **flags: Unpack[Flags],
    ) -> None:
        super().__init__(message, **flags)
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retry_after = retry_after


class StateMismatch(AuthError):
    """The callback's ``state`` is missing or not that of the authorization request: ignore the callback."""


class RefreshRejected(AuthError):
    """The service refused the refresh token: the user must authorize again."""


class TokenSuperseded(AuthError):
    """A token store refused to save a token: the lock was lost, and another worker saved a newer token.

    It is transient: the next call uses the newer token.
    """

    transient: bool = True


class DecodeError(SigningError):
    """A successful response does not have the shape that the specification promises.

    ``body`` is the parsed JSON of the response, with secrets redacted; None if it is not JSON. It contains, for
    example, the id of a signing that was created. The error's text does not show it.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        body: Any = None,
        **flags: Unpack[Flags],
    ) -> None:
        super().__init__(message, **flags)
        self.operation = operation
        self.status = status
        self.request_id = request_id
        self.body = body


class NotSound(SigningError):
    """A PDF that was downloaded with ``verify=True`` is not sound or not trusted, and was not kept.

    ``problems`` holds a sentence for each problem.
    """

    _exit_code: int = 7

    def __init__(self, message: str, *, problems: Sequence[str] = (), **flags: Unpack[Flags]) -> None:
        super().__init__(message, **flags)
        self.problems: tuple[str, ...] = tuple(problems)


class ClientClosed(SigningError):
    """The client was used after ``aclose()``."""

    client_wide: bool = True


class StorageError(SigningError):
    """A journal, an inbox or an archive cannot be read or written."""

    transient: bool = True
    client_wide: bool = True


class JournalError(StorageError):
    """The journal cannot be read or written. The run stops; the entries remain valid for the next run."""


class InboxError(StorageError):
    """The inbox cannot be read or written. No delivery is acknowledged that is not stored."""


class ArchiveError(StorageError):
    """The archive cannot be read or written. What it holds remains valid: the next run continues from it."""


class ArchiveConflict(ArchiveError):
    """Another writer was first, or the name cannot hold the file. Nothing was written."""

    transient: bool = False
    client_wide: bool = False


class DraftChanged(SigningError):
    """A draft does not hold exactly its package; this run did not send it. An earlier run may have: see ``effect``.

    ``signing`` is the draft; None if it was abandoned, and the next run begins with a new one.
    """

    def __init__(self, message: str, *, signing: Any = None, **flags: Unpack[Flags]) -> None:
        super().__init__(message, **flags)
        self.signing: Any = signing


class SigningCancelled(SigningError):
    """The signing was cancelled during a wait for its completion; ``signing`` is its last state."""

    _exit_code: int = 6

    def __init__(self, message: str, *, signing: Any = None, **flags: Unpack[Flags]) -> None:
        super().__init__(message, **flags)
        self.signing = signing


class WaitTimeout(SigningError, TimeoutError):
    """The signing was not completed within the timeout; ``signing`` is its last known state, or None."""

    transient: bool = True
    exit_code: int = 5  # also if a worker may still send the package: waiting again is safe

    def __init__(self, message: str, *, signing: Any = None, **flags: Unpack[Flags]) -> None:
        super().__init__(message, **flags)
        self.signing = signing


class WebhookError(SigningError):
    """A webhook delivery that must not be acted on."""


class InvalidSignature(WebhookError):
    """The delivery has no valid signature; ``reason`` is a code for the cause."""

    def __init__(self, message: str, *, reason: str = "mismatch", **flags: Unpack[Flags]) -> None:
        super().__init__(message, **flags)
        self.reason = reason


class MalformedEvent(WebhookError):
    """The delivery is genuine, but its body is not an event."""
