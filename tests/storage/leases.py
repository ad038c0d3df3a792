"""Storage with leases, in SQLite and in PostgreSQL, and claims on packages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from signing_async import Claim, Journal


@contextlib.asynccontextmanager
async def leased_storage(
    request: pytest.FixtureRequest,
    folder: Path,
    sqlite: Callable[[Path], Any],
    postgres: Callable[..., Any],
    table: str,
) -> AsyncIterator[SimpleNamespace]:
    """Make the storage: ``open`` opens it as another process would, ``lapse`` ends the leases of all claims.

    ``table`` is the name of its table in PostgreSQL, with the schema.
    """
    is_postgres, schema = request.param == "postgres", ""
    async with contextlib.AsyncExitStack() as opened:
        if is_postgres:
            server = request.getfixturevalue("postgres")
            dsn = await server.new_schema()
            schema = dsn.rpartition("=")[2]
            # However long a busy machine takes.
            async with postgres(dsn, timeout=60, lease=180) as creating:
                await creating.create_table()

        def open_storage() -> Any:
            storage = postgres(dsn, timeout=10) if is_postgres else sqlite(folder / "storage.db")
            opened.push_async_callback(storage.aclose)
            return storage

        async def lapse() -> None:
            if is_postgres:
                await server.execute(f"UPDATE {schema}.{table} SET leased_until = now() - interval '1 s'")
            for lock in folder.glob("*.lock"):
                lock.unlink()

        yield SimpleNamespace(open=open_storage, lapse=lapse, table=f"{schema}.{table}")


async def claimed(journal: Journal, key: str) -> Claim:
    """Claim a package that must be free."""
    claim = await journal.claim(key)
    assert claim is not None
    return claim


async def soon_claimed(journal: Journal, key: str) -> Claim:
    """Claim a package that must become free."""
    async with asyncio.timeout(60):
        while (claim := await journal.claim(key)) is None:
            await asyncio.sleep(0.01)
    return claim
