"""Everything that can go wrong, as one tree of exceptions.

::

    SigningError
    ├── ConfigurationError       a setting is missing or unusable (also a ValueError)
    ├── InvalidRequest           refused before anything was sent (also a ValueError)
    │   └── PdfRejected          the file is no PDF, too large, protected, or signed already
    ├── TransportError           no usable answer came
    │   └── RequestTimeout       the call's deadline passed (also a TimeoutError)
    ├── OutcomeUnknown           the request may or may not have taken effect
    │   └── OutcomeUnknownTimeout   the same, at the call's deadline (also a TimeoutError)
    ├── APIError                 the service answered with an error status
    │   ├── BadRequest           400
    │   │   └── CannotBeSent     400 with code cannot_be_sent
    │   ├── Unauthorized         401
    │   ├── Forbidden            403
    │   ├── NotFound             404
    │   │   └── NotYetSigned     404 of a download: the document is not fully signed yet
    │   ├── DocumentRejected     422: protected, too large, or signed already
    │   ├── RateLimited          429
    │   └── ServerError          5xx
    ├── AuthError                no token could be had
    │   ├── StateMismatch        the callback's state is not the one that was sent
    │   ├── RefreshRejected      the refresh token is not valid any more
    │   └── TokenSuperseded      a store did not save a token, since it holds a newer one
    ├── DecodeError              a success status with an answer that cannot be read
    ├── NotSound                 a downloaded PDF is not as it was when it was signed, or not trusted
    ├── ClientClosed             a call after aclose()
    ├── JournalError             the journal of a dispatch cannot be read or written
    ├── SigningCancelled         waited for a signing that was cancelled
    ├── WaitTimeout              waited, and it did not happen in time (also a TimeoutError)
    └── WebhookError             a delivery that must not be acted on
        ├── InvalidSignature     the delivery is not from the holder of the secret
        └── MalformedEvent       the delivery is genuine, and no event can be read from it

Every error knows whether repeating the call may help (``error.transient``), and whether the request may have taken
effect (``error.effect``). Each of them survives ``pickle`` and ``copy``, and none of them keeps a token, a secret or a
code in its text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

__all__ = [
    "APIError",
    "AuthError",
    "BadRequest",
    "CannotBeSent",
    "ClientClosed",
    "ConfigurationError",
    "DecodeError",
    "DocumentRejected",
    "Forbidden",
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


class SigningError(Exception):
    """Base of every exception that this package raises on purpose.

    ``str(error)`` is a sentence for a person; the attributes are for code.
    """

    transient: bool = False
    """Whether the same call may succeed later: after a network failure, a 429, a 5xx, or a failing token endpoint."""
    effect: Literal["none", "unknown"] = "none"
    """``"unknown"`` if the request may have taken effect: repeating the call could do the same thing twice.

    A spare draft that a retried `create` may have left behind does not count: it notifies nobody.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    # Exception's own pickling calls the class with ``args``, which forgets keyword arguments.
    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.args, self._state())

    def _state(self) -> dict[str, Any]:
        return self.__dict__

    # A copy stays in the process, and so keeps also what a pickle leaves out.
    def __copy__(self) -> Self:
        return _revive(type(self), self.args, self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return _revive(type(self), self.args, copy.deepcopy(self.__dict__, memo))


class ConfigurationError(SigningError, ValueError):
    """A setting is missing or cannot work."""


class InvalidRequest(SigningError, ValueError):
    """The arguments break a documented limit; nothing was sent.

    ``problems`` holds one sentence for each thing that is wrong, each naming the field, the limit and the value.
    """

    def __init__(self, message: str, *, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems) or (message,)


class PdfRejected(InvalidRequest):
    """The preflight refused a file; nothing was sent.

    ``reason`` is ``"not_pdf"``, ``"too_large"``, ``"protected"`` or ``"already_signed"``; ``filename`` names the file.
    """

    def __init__(self, message: str, *, reason: str, filename: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.filename = filename


class TransportError(SigningError):
    """No usable answer came: the connection failed, or broke, or what came back was cut short.

    ``attempts`` counts the requests that were tried; ``status`` and ``request_id`` belong to an answer that broke off.
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
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.attempts = attempts
        self.status = status
        self.request_id = request_id


class RequestTimeout(TransportError, TimeoutError):
    """The call's deadline passed, and nothing changed: the request was not sent, or may be repeated without harm."""


class OutcomeUnknown(SigningError):
    """The request may or may not have taken effect, and reading the service could not tell.

    It is not a `TransportError`, so a retry of those sends nothing twice. ``attempts`` counts the requests that were
    made; ``known`` holds the records that were found, for a person to decide by.
    """

    effect: Literal["none", "unknown"] = "unknown"

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        attempts: int = 1,
        known: Iterable[object] = (),
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.attempts = attempts
        self.known: tuple[object, ...] = tuple(known)


class OutcomeUnknownTimeout(OutcomeUnknown, TimeoutError):
    """The call's deadline passed after the request was sent: it may yet take effect."""


class APIError(SigningError):
    """The service answered with an error.

    ``messages`` maps a field's name to what the service says of it (``""`` for what belongs to no field). ``body`` is
    the start of the answer as received; since a server may echo a secret in it, it is shown nowhere, and a pickle holds
    it redacted.
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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.operation = operation
        self.code = code
        self.messages: dict[str, list[str]] = {field: list(texts) for field, texts in (messages or {}).items()}
        self.request_id = request_id
        self.body = body
        self.retry_after = retry_after
        self._redacted_body = body if redacted_body is None else redacted_body

    def __str__(self) -> str:
        where = f" on {self.operation}" if self.operation else ""
        told = {text for texts in self.messages.values() for text in texts}
        said = [self.message] if self.message and self.message not in told else []
        said += [f"{field}: {text}" if field else text for field, texts in self.messages.items() for text in texts]
        facts = []
        if self.code:
            facts.append(f"code {self.code}")
        if self.request_id:
            facts.append(f"request id {self.request_id}")
        if self.retry_after is not None:
            facts.append(f"retry after {self.retry_after:g} s")
        text = f"HTTP {self.status}{where}"
        if said:
            text += ": " + "; ".join(dict.fromkeys(part.rstrip(".") for part in said))
        return f"{text} ({', '.join(facts)})" if facts else text

    def _state(self) -> dict[str, Any]:
        return {**self.__dict__, "body": self._redacted_body}


class BadRequest(APIError):
    """400: the service found the request invalid; see ``messages``."""


class CannotBeSent(BadRequest):
    """400 ``cannot_be_sent``: no document, no recipient, or not editable any more."""


class Unauthorized(APIError):
    """401: the access token is not accepted, and refreshing it did not help or was not possible."""


class Forbidden(APIError):
    """403: the token is good, and does not allow this."""


class NotFound(APIError):
    """404: there is no such record for this token."""


class NotYetSigned(NotFound):
    """404 of a download: the document is not fully signed yet."""


class DocumentRejected(APIError):
    """422: the PDF is password protected, too large, or signed already."""


class RateLimited(APIError):
    """429: too many requests, and waiting longer was not possible within the call's deadline or the policy.

    ``retry_after`` says in how many seconds it makes sense to come back, when the service told.
    """

    transient: bool = True


class ServerError(APIError):
    """5xx: the service failed, and went on failing for as long as the retry policy allowed."""

    transient: bool = True


class AuthError(SigningError):
    """No usable token could be had.

    ``code`` is the OAuth error (``access_denied``, ``invalid_grant``, ...) when the service named one.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retry_after = retry_after
        self.transient: bool = status is not None and (status == 429 or status >= 500)


class StateMismatch(AuthError):
    """The callback's ``state`` is missing or is not the one of the authorization request: drop the callback."""


class RefreshRejected(AuthError):
    """The service refused the refresh token: the user has to authorize again."""


class TokenSuperseded(AuthError):
    """A token store refused to save: its lock was lost, and another worker has saved a newer token, which stays."""


class DecodeError(SigningError):
    """The service answered with success, and the answer cannot be read as what the specification promises.

    ``body`` is the parsed JSON of the response, with secrets redacted; None if it is not JSON. It holds, for example,
    the id of a signing that was created. It is not part of the error's text.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        body: Any = None,
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.status = status
        self.request_id = request_id
        self.body = body


class NotSound(SigningError):
    """A PDF that was downloaded with ``verify=True`` is not sound, or not trusted; it was not kept.

    ``problems`` are sentences, each on one thing that is wrong.
    """

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems)


class ClientClosed(SigningError):
    """The client was used after ``aclose()``."""


class JournalError(SigningError):
    """The journal cannot be read or written. A run stops at it, since nothing may be sent without being written down.

    What the journal holds stays true: the next run goes on from there.
    """

    transient: bool = True


class SigningCancelled(SigningError):
    """The signing was cancelled while it was waited for; ``signing`` is its last state."""

    def __init__(self, message: str, *, signing: Any = None) -> None:
        super().__init__(message)
        self.signing = signing


class WaitTimeout(SigningError, TimeoutError):
    """The time to wait was up; ``signing`` is the last state seen, or None."""

    def __init__(self, message: str, *, signing: Any = None) -> None:
        super().__init__(message)
        self.signing = signing


class WebhookError(SigningError):
    """A webhook delivery that must not be acted on."""


class InvalidSignature(WebhookError):
    """The delivery carries no valid signature; ``reason`` names the kind of fault."""

    def __init__(self, message: str, *, reason: str = "mismatch") -> None:
        super().__init__(message)
        self.reason = reason


class MalformedEvent(WebhookError):
    """The delivery is genuine, and its body is no event."""
