"""The asyncio SDK for the electronic signing service.

All public names are loaded on first use, which keeps the import of this package fast.
"""

from __future__ import annotations

from ._lazy import attach
from ._version import __version__ as __version__

TYPE_CHECKING = False  # type checkers know this name; `typing` would take half of the import's time
if TYPE_CHECKING:
    from .assumptions import Assumptions as Assumptions
    from .auth.oauth import AuthorizationRequest as AuthorizationRequest
    from .auth.oauth import OAuth as OAuth
    from .auth.token_stores import FileTokenStore as FileTokenStore
    from .auth.token_stores import MemoryTokenStore as MemoryTokenStore
    from .auth.token_stores import TokenStore as TokenStore
    from .bulk import Progress as Progress
    from .bulk import Results as Results
    from .client import SigningClient as SigningClient
    from .dispatch.journal import Claim as Claim
    from .dispatch.journal import ClaimLost as ClaimLost
    from .dispatch.journal import Journal as Journal
    from .dispatch.package import SigningPackage as SigningPackage
    from .dispatch.run import DispatchResult as DispatchResult
    from .documents.download import SealedFile as SealedFile
    from .documents.resource import UploadResult as UploadResult
    from .documents.source import PdfSource as PdfSource
    from .documents.source import Source as Source
    from .endpoints import Reader as Reader
    from .endpoints import ResponseStream as ResponseStream
    from .errors import *  # noqa: F403  # every name in its `__all__` is public here, too
    from .models import Document as Document
    from .models import Language as Language
    from .models import NewRecipient as NewRecipient
    from .models import Recipient as Recipient
    from .models import Signing as Signing
    from .models import SigningMethod as SigningMethod
    from .models import SigningOrder as SigningOrder
    from .models import SigningState as SigningState
    from .models import Token as Token
    from .models import User as User
    from .pagination import Page as Page
    from .pagination import Pager as Pager
    from .recipients import RemindResult as RemindResult
    from .storage.journal import SqliteJournal as SqliteJournal
    from .tenants import TenantApp as TenantApp
    from .tenants import Tenants as Tenants
    from .transport.operation import Attempt as Attempt
    from .transport.operation import Timeouts as Timeouts
    from .transport.rate_limit import LocalRateLimiter as LocalRateLimiter
    from .transport.rate_limit import RateLimiter as RateLimiter
    from .transport.response import Response as Response
    from .transport.retry import RetryPolicy as RetryPolicy
else:  # type checkers cannot evaluate a computed `__all__`: they read the imports above
    _EXCEPTIONS = (
        "APIError ArchiveConflict ArchiveError AuthError BadRequest CannotBeSent ClientClosed ConfigurationError "
        "DecodeError DocumentRejected DraftChanged Forbidden InboxError InvalidRequest InvalidSignature JournalError "
        "MalformedEvent NotFound NotSound NotYetSigned OutcomeUnknown OutcomeUnknownTimeout PdfRejected RateLimited "
        "RefreshRejected RequestTimeout ServerError SigningCancelled SigningError StateMismatch StorageError "
        "TokenSuperseded TransportError Unauthorized WaitTimeout WebhookError"
    )
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            ".errors": _EXCEPTIONS.split(),
            ".assumptions": ("Assumptions",),
            ".client": ("SigningClient",),
            ".dispatch.run": ("DispatchResult",),
            ".documents.download": ("SealedFile",),
            ".documents.resource": ("UploadResult",),
            ".dispatch.journal": ("Claim", "ClaimLost", "Journal"),
            ".storage.journal": ("SqliteJournal",),
            ".models": (
                "Document",
                "Language",
                "NewRecipient",
                "Recipient",
                "Signing",
                "SigningMethod",
                "SigningOrder",
                "SigningState",
                "Token",
                "User",
            ),
            ".auth.oauth": ("AuthorizationRequest", "OAuth"),
            ".dispatch.package": ("SigningPackage",),
            ".pagination": ("Page", "Pager"),
            ".documents.source": ("PdfSource", "Source"),
            ".recipients": ("RemindResult",),
            ".transport.retry": ("RetryPolicy",),
            ".tenants": ("TenantApp", "Tenants"),
            ".transport.rate_limit": ("LocalRateLimiter", "RateLimiter"),
            ".auth.token_stores": ("FileTokenStore", "MemoryTokenStore", "TokenStore"),
            ".transport.operation": ("Attempt", "Timeouts"),
            ".endpoints": ("Reader", "ResponseStream"),
            ".transport.response": ("Response",),
            ".bulk": ("Progress", "Results"),
        },
    )
