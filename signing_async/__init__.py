"""The asyncio SDK for the electronic signing service.

All public names but the exceptions are loaded when they are first used: importing this package is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from . import errors
from .errors import *  # noqa: F403  # the whole tree is public, and needs the standard library only

if TYPE_CHECKING:
    from .assumptions import Assumptions as Assumptions
    from .client import SigningClient as SigningClient
    from .dispatch import DispatchResult as DispatchResult
    from .documents import Progress as Progress
    from .documents import SealedFile as SealedFile
    from .documents import UploadResult as UploadResult
    from .journal import Journal as Journal
    from .journal import SqliteJournal as SqliteJournal
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
    from .packages import NewRecipient as NewRecipient
    from .packages import SigningPackage as SigningPackage
    from .pagination import Page as Page
    from .pagination import Pager as Pager
    from .pdf import PdfSource as PdfSource
    from .recipients import RemindResult as RemindResult
    from .retry import RetryPolicy as RetryPolicy
    from .tenants import TenantApp as TenantApp
    from .tenants import Tenants as Tenants
    from .throttle import Gate as Gate
    from .throttle import LocalGate as LocalGate
    from .token_stores import FileTokenStore as FileTokenStore
    from .token_stores import MemoryTokenStore as MemoryTokenStore
    from .token_stores import TokenStore as TokenStore
    from .transport import Attempt as Attempt
    from .transport import Timeouts as Timeouts

_NAMES = {
    "assumptions": ("Assumptions",),
    "client": ("SigningClient",),
    "dispatch": ("DispatchResult",),
    "documents": ("Progress", "SealedFile", "UploadResult"),
    "journal": ("Journal", "SqliteJournal"),
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
    "packages": ("NewRecipient", "SigningPackage"),
    "pagination": ("Page", "Pager"),
    "pdf": ("PdfSource",),
    "recipients": ("RemindResult",),
    "retry": ("RetryPolicy",),
    "tenants": ("TenantApp", "Tenants"),
    "throttle": ("Gate", "LocalGate"),
    "token_stores": ("FileTokenStore", "MemoryTokenStore", "TokenStore"),
    "transport": ("Attempt", "Timeouts"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__version__ = "0.1.0"

# Checkers read the imports above: a list that is computed says no more to them.
globals()["__all__"] = sorted([*_HOME, *errors.__all__])


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
