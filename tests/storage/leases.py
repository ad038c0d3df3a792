"""Storage with leases, in SQLite and in PostgreSQL."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@contextlib.asynccontextmanager
async def leased_storage(
    request: pytest.FixtureRequest, folder: Path, *, sqlite: Callable[[], Any], postgres: Callable[..., Any], table: str
) -> AsyncIterator[SimpleNamespace]:
    """Make the storage: ``open`` opens it as another process would, ``lapse`` ends the leases of all claims."""
    is_postgres = request.param == "postgres"
    async with contextlib.AsyncExitStack() as opened:
        if is_postgres:
            server = request.getfixturevalue("postgres")
            dsn = await server.new_schema()
            schema = dsn.rpartition("=")[2]
            # However long a busy machine takes.
            async with postgres(dsn, timeout=60, lease=180) as creating:
                await creating.create_table()

        def open_storage() -> Any:
            storage = postgres(dsn, timeout=10) if is_postgres else sqlite()
            opened.push_async_callback(storage.aclose)
            return storage

        async def lapse() -> None:
            if is_postgres:
                await server.execute(f"UPDATE {schema}.{table} SET leased_until = now() - interval '1 s'")
            for lock in folder.glob("*.lock"):
                lock.unlink()

        yield SimpleNamespace(open=open_storage, lapse=lapse)
