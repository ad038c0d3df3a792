"""The asyncio SDK for the electronic signing service.

The public names are loaded when they are first used: importing this package imports nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .assumptions import Assumptions as Assumptions
    from .client import SigningClient as SigningClient
    from .documents import Progress as Progress
    from .documents import SealedFile as SealedFile
    from .errors import APIError as APIError
    from .errors import AuthError as AuthError
    from .errors import BadRequest as BadRequest
    from .errors import CannotBeSent as CannotBeSent
    from .errors import ClientClosed as ClientClosed
    from .errors import ConfigurationError as ConfigurationError
    from .errors import DecodeError as DecodeError
    from .errors import DocumentRejected as DocumentRejected
    from .errors import Forbidden as Forbidden
    from .errors import InvalidRequest as InvalidRequest
    from .errors import InvalidSignature as InvalidSignature
    from .errors import MalformedEvent as MalformedEvent
    from .errors import NotFound as NotFound
    from .errors import NotYetSigned as NotYetSigned
    from .errors import OutcomeUnknown as OutcomeUnknown
    from .errors import OutcomeUnknownTimeout as OutcomeUnknownTimeout
    from .errors import PdfRejected as PdfRejected
    from .errors import RateLimited as RateLimited
    from .errors import RefreshRejected as RefreshRejected
    from .errors import RequestTimeout as RequestTimeout
    from .errors import ServerError as ServerError
    from .errors import SigningCancelled as SigningCancelled
    from .errors import SigningError as SigningError
    from .errors import StateMismatch as StateMismatch
    from .errors import TransportError as TransportError
    from .errors import Unauthorized as Unauthorized
    from .errors import WaitTimeout as WaitTimeout
    from .errors import WebhookError as WebhookError
    from .models import Document as Document
    from .models import Language as Language
    from .models import Recipient as Recipient
    from .models import Signing as Signing
    from .models import SigningMethod as SigningMethod
    from .models import SigningOrder as SigningOrder
    from .models import SigningState as SigningState
    from .models import Token as Token
    from .models import User as User
    from .oauth import AuthorizationRequest as AuthorizationRequest
    from .oauth import OAuth as OAuth
    from .pagination import Page as Page
    from .pagination import Pager as Pager
    from .pdf import PdfSource as PdfSource
    from .recipients import RemindResult as RemindResult
    from .retry import RetryPolicy as RetryPolicy
    from .token_stores import FileTokenStore as FileTokenStore
    from .token_stores import MemoryTokenStore as MemoryTokenStore
    from .token_stores import TokenStore as TokenStore
    from .transport import Attempt as Attempt
    from .transport import Timeouts as Timeouts

_NAMES = {
    "assumptions": ("Assumptions",),
    "client": ("SigningClient",),
    "documents": ("Progress", "SealedFile"),
    "models": (
        "Document",
        "Language",
        "Recipient",
        "Signing",
        "SigningMethod",
        "SigningOrder",
        "SigningState",
        "Token",
        "User",
    ),
    "oauth": ("AuthorizationRequest", "OAuth"),
    "pagination": ("Page", "Pager"),
    "pdf": ("PdfSource",),
    "recipients": ("RemindResult",),
    "retry": ("RetryPolicy",),
    "token_stores": ("FileTokenStore", "MemoryTokenStore", "TokenStore"),
    "transport": ("Attempt", "Timeouts"),
    "errors": (
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
        "MalformedEvent",
        "NotFound",
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
        "TransportError",
        "Unauthorized",
        "WaitTimeout",
        "WebhookError",
    ),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

globals()["__all__"] = sorted(_HOME)  # checkers read the imports above: no list that is computed says more to them


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
