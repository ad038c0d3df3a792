"""A whole signing package in one call, and thousands of them, resumable: however often one is tried, it is sent once."""

from __future__ import annotations

import attrs

from .models import Signing
from .packages import NewRecipient, SigningPackage

__all__ = ["DispatchResult", "NewRecipient", "SigningPackage"]


@attrs.frozen
class DispatchResult:
    """What came of one package: ``error`` is None when it was sent, now or by an earlier run.

    ``signing`` is the signing as sent; with an error, the draft as far as one is known.
    """

    package: SigningPackage
    signing: Signing | None = None
    error: Exception | None = None
