"""What the stores need of a database. The statements are in `journal`, `events` and `tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Engine"]


class Engine(Protocol):
    """Runs statements on the database of one table.

    A statement is written once: parameters are ``$1``, ``$2``, and so on, and what differs between SQLite and
    PostgreSQL is a ``{name}`` of the engine's ``DIALECT``. ``{table}`` is the table, ``{name}`` its name without the
    schema, and ``{owner}`` names the store object that claims rows. ``{dead}`` is whether the owner of the row ``held``
    is dead.
    """

    address: str
    """Where the database is, for messages."""

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
