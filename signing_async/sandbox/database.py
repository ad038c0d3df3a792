"""The sandbox's SQLite database: fast if it is temporary, durable if it is kept.

All calls are short and made on the event loop. No transaction spans an await, so no two overlap.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from .refused import not_found

Record = TypeVar("Record")

VERSION = 4

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE counters (kind TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE users (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, email TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE apps (
    client_id TEXT PRIMARY KEY, secret TEXT NOT NULL, name TEXT NOT NULL, redirect_uri TEXT NOT NULL,
    user_id TEXT NOT NULL, created_at INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE grants (
    id TEXT PRIMARY KEY, client_id TEXT, user_id TEXT NOT NULL, created_at INTEGER NOT NULL, revoked_at INTEGER)
    WITHOUT ROWID;
CREATE TABLE codes (
    hash TEXT PRIMARY KEY, grant_id TEXT NOT NULL, redirect_uri TEXT NOT NULL, expires_at INTEGER NOT NULL,
    used_at INTEGER, challenge TEXT) WITHOUT ROWID;
CREATE TABLE tokens (
    hash TEXT PRIMARY KEY, kind TEXT NOT NULL, grant_id TEXT NOT NULL, expires_at INTEGER, replaced_at INTEGER)
    WITHOUT ROWID;
CREATE INDEX tokens_by_grant ON tokens (grant_id);
CREATE TABLE signings (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, user_id TEXT NOT NULL,
    name TEXT NOT NULL, language TEXT NOT NULL, signing_order TEXT NOT NULL, message TEXT,
    created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL, sent_at INTEGER, times_sent INTEGER NOT NULL DEFAULT 0,
    completed_at INTEGER, cancelled_at INTEGER);
CREATE INDEX signings_by_tenant ON signings (tenant, seq);
CREATE TABLE documents (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, signing_id TEXT NOT NULL, name TEXT NOT NULL,
    size INTEGER NOT NULL, sha256 TEXT NOT NULL, file TEXT NOT NULL, created_at INTEGER NOT NULL,
    completed_at INTEGER, sealed_file TEXT);
CREATE INDEX documents_by_signing ON documents (signing_id, seq);
CREATE TABLE recipients (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, signing_id TEXT NOT NULL, first_name TEXT,
    last_name TEXT, email TEXT NOT NULL, signing_method TEXT NOT NULL, "order" INTEGER, phone TEXT,
    identification TEXT, created_at INTEGER NOT NULL, invited_at INTEGER, expires_at INTEGER,
    reminders INTEGER NOT NULL DEFAULT 0, completed_at INTEGER, declined_at INTEGER);
CREATE INDEX recipients_by_signing ON recipients (signing_id, seq);
CREATE TABLE notifications (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, signing_id TEXT NOT NULL, recipient_id TEXT NOT NULL,
    email TEXT NOT NULL, sent_at INTEGER NOT NULL);
CREATE INDEX notifications_by_recipient ON notifications (recipient_id, seq);
CREATE TABLE endpoints (
    id TEXT PRIMARY KEY, url TEXT NOT NULL, secret TEXT NOT NULL, created_at INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, type TEXT NOT NULL, signing_id TEXT NOT NULL,
    body BLOB NOT NULL, created_at INTEGER NOT NULL);
CREATE TABLE deliveries (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, event_id TEXT NOT NULL, event_type TEXT NOT NULL,
    endpoint_id TEXT NOT NULL, url TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'pending',
    attempts INTEGER NOT NULL DEFAULT 0, due_at INTEGER, last_status INTEGER, last_error TEXT);
CREATE INDEX deliveries_due ON deliveries (endpoint_id, due_at) WHERE due_at IS NOT NULL;
CREATE TABLE attempts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, delivery_id TEXT NOT NULL, event_id TEXT NOT NULL, at INTEGER NOT NULL,
    status INTEGER, error TEXT, fault TEXT, seconds REAL, signature TEXT, response_headers TEXT, response_body BLOB);
"""


class Database:
    """One connection, used by the thread of the event loop."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        try:
            with ExitStack() as on_error:
                connection = sqlite3.connect(path, isolation_level=None, cached_statements=256, timeout=0)
                on_error.enter_context(closing(connection))
                self._connection = connection
                self._open(durable=durable)
                on_error.pop_all()
        except sqlite3.DatabaseError as error:
            if "locked" in str(error):
                raise RuntimeError(f"another sandbox is using {path.parent}") from None
            raise RuntimeError(f"could not open the database {path}: {error}") from None

    def _open(self, *, durable: bool) -> None:
        version = self.value("PRAGMA user_version")
        is_new = version == 0 and self.value("SELECT 1 FROM sqlite_master") is None
        if version != VERSION and not is_new:  # checked before a setting changes another program's file
            raise ValueError(f"the sandbox's database has version {version}; expected {VERSION}; it was not changed")
        # WAL with a synced commit: a committed transaction survives a kill and a power cut.
        settings = ("journal_mode=WAL", "synchronous=FULL") if durable else ("journal_mode=MEMORY", "synchronous=OFF")
        self._connection.create_function("folded", 1, _folded, deterministic=True)
        for setting in ("locking_mode=EXCLUSIVE", *settings, "temp_store=MEMORY"):
            self.run(f"PRAGMA {setting}")
        self.run("BEGIN EXCLUSIVE")  # locked until `close`: one process per folder
        self.run("COMMIT")
        if is_new:
            self._connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version={VERSION}; COMMIT;")

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block in a transaction, or as part of the enclosing transaction."""
        if self._connection.in_transaction:
            yield
            return
        with self._connection:
            self.run("BEGIN IMMEDIATE")
            yield

    def run(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return self._connection.execute(sql, values)

    def value(self, sql: str, *values: Any) -> Any:
        """Return the first column of the first row, or None."""
        row = self.run(sql, *values).fetchone()
        return row and row[0]

    def insert(self, table: str, **values: Any) -> None:
        names = ", ".join(f'"{name}"' for name in values)
        self.run(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(values))})", *values.values())

    def update(self, table: str, row_id: str, **values: Any) -> None:
        """Update the row with this id."""
        names = ", ".join(f"{name} = ?" for name in values)
        self.run(f"UPDATE {table} SET {names} WHERE id = ?", *values.values(), row_id)

    def get(self, record: type[Record], table: str, where: str, *values: Any) -> Record | None:
        """Return the first record that matches, or None."""
        found = self.select(record, table, f"{where} LIMIT 1", *values)
        return found[0] if found else None

    def find(self, record: type[Record], table: str, where: str, *values: Any) -> Record:
        """Return the first record that matches; refuse with 404 if none does."""
        found = self.get(record, table, where, *values)
        if found is None:
            raise not_found(record.__name__.lower())
        return found

    def select(self, record: type[Record], table: str, where: str, *values: Any) -> list[Record]:
        """Return the records that match; `where` may end in ORDER BY and LIMIT."""
        return [record(*row) for row in self.run(f"SELECT * FROM {table} WHERE {where}", *values)]

    def page(
        self, record: type[Record], table: str, where: str, values: Mapping[str, Any], offset: int, limit: int
    ) -> tuple[list[Record], int]:
        """Return a page of the matching records, newest first, and the number of all matching records."""
        rows = self._connection.execute(
            f"SELECT * FROM {table} WHERE {where} ORDER BY seq DESC LIMIT :limit OFFSET :offset",
            {**values, "limit": limit, "offset": offset},
        )
        found = [record(*row) for row in rows]
        count: int = self._connection.execute(f"SELECT count(*) FROM {table} WHERE {where}", values).fetchone()[0]
        return found, count

    def count(self, table: str, where: str, *values: Any) -> int:
        count: int = self.value(f"SELECT count(*) FROM {table} WHERE {where}", *values)
        return count

    def dump(self) -> bytes:
        return self._connection.serialize()

    def load(self, dump: bytes) -> None:
        """Replace the contents with those of a dump."""
        with closing(sqlite3.connect(":memory:")) as source:
            # Bytes 18 and 19 announce a write-ahead log, which a database in memory cannot have.
            source.deserialize(dump[:18] + b"\x01\x01" + dump[20:])
            source.backup(self._connection)


def _folded(text: str | None) -> str | None:
    """Return the text for a case-insensitive comparison; SQLite's `lower` handles ASCII only."""
    return text and text.casefold()
