"""What the stores need of a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Engine"]


class Engine(Protocol):
    """Runs statements on one database. Parameters are ``$1``, ``$2``, and so on, for SQLite and PostgreSQL alike."""

    async def run(self, statement: str, *parameters: object, durable: bool = True) -> Sequence[Any]:
        """Run a statement in a transaction of its own, and return its rows once they are durable.

        If ``durable`` is false, a power cut may undo it.
        """
        ...

    async def aclose(self) -> None:
        """Finish the submitted work, and close the connections."""
        ...

    def warn_if_open(self, owner: object) -> None:
        """Warn that ``owner`` was not closed; for its ``__del__``."""
        ...
