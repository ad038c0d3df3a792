"""What `dispatch` and `archive` use of a client: they are below `client`, and cannot import it."""

from __future__ import annotations

from typing import Protocol

from .documents.resource import Documents
from .recipients import Recipients
from .reconcile import Ledger
from .signings import Signings
from .transport.call import Transport

__all__ = ["Api", "Client"]


class Api:
    """The resources of a client, and what makes and reconciles their calls."""

    def __init__(self, transport: Transport, ledger: Ledger) -> None:
        self.transport = transport
        self.ledger = ledger
        self.signings: Signings = Signings(transport, ledger)
        self.documents: Documents = Documents(transport, ledger)
        self.recipients: Recipients = Recipients(transport, ledger)

    @property
    def origin(self) -> str:
        """The origin of the tenant."""
        return self.transport.shared.origin

    @property
    def telemetry(self) -> bool:
        """Whether spans and metrics are made."""
        return self.transport.options.telemetry


class Client(Protocol):
    """A `SigningClient`."""

    @property
    def _api(self) -> Api: ...
