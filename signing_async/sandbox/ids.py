"""Identifiers and secrets: random, or the same in every run if there is a seed."""

from __future__ import annotations

import base64
import hashlib
import secrets
import uuid
from typing import Literal

from .database import Database

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class Ids:
    """Generates ids and secrets. With the same seed, the n-th of a kind is the same, independent of other kinds."""

    def __init__(self, database: Database, seed: int | str | None, style: Literal["uuid", "ulid", "integer"]) -> None:
        self._database = database
        self._seed = seed
        self._style = style

    def new(self, kind: str) -> str:
        """Return an id in the profile's style."""
        if self._style == "uuid":
            return str(uuid.UUID(bytes=self._bytes(kind)[:16], version=4))
        count = self._count(kind)
        if self._style == "integer":
            return str(1000 + count)
        number = count << 80 | int.from_bytes(self._bytes(kind)[:10], "big")
        return "01" + "".join(_CROCKFORD[number >> shift & 31] for shift in range(115, -1, -5))

    def secret(self, kind: str, prefix: str) -> str:
        """Return a long random string; with a seed, it can be guessed."""
        return prefix + base64.urlsafe_b64encode(self._bytes(kind)[:30]).decode()

    def _count(self, kind: str) -> int:
        sql = "INSERT INTO counters VALUES (?, 1) ON CONFLICT DO UPDATE SET value = value + 1 RETURNING value"
        count: int = self._database.run(sql, kind).fetchall()[0][0]
        return count

    def _bytes(self, kind: str) -> bytes:
        if self._seed is None:
            return secrets.token_bytes(32)
        return hashlib.sha256(f"{self._seed}:{kind}:{self._count(f'random {kind}')}".encode()).digest()
