"""What the stores need of a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Engine"]


class Engine(Protocol):
    """Runs statements on one database. Parameters are ``$1``, ``$2``, and so on, for SQLite and PostgreSQL alike."""

    async def run(self, statement: str, *parameters: object) -> Sequence[Any]:
        """Run a statement in a transaction of its own, and return its rows once they are durable."""
        ...

    async def aclose(self) -> None:
        """Finish the submitted work, and close the connections."""
        ...
