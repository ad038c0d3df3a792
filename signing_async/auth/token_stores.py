"""Token stores: the protocol, a store in memory, and one in a file that processes share.

The store in PostgreSQL is in `storage.tokens`, the one in Redis in `redis.tokens`.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import attrs

from .._files import check_locks, is_transient, resolve_path, retry_while_open, sync_folder, try_lock, unlock
from .._secret import Secret
from ..errors import AuthError
from ..models import Token

__all__ = ["FileTokenStore", "MemoryTokenStore", "TokenStore", "adjust_expiry", "token_from_json", "token_to_json"]

_FIELDS = ("access_token", "refresh_token", "expires_at", "token_type", "origin")
# The two clocks are not read at the same moment: a smaller difference is ignored.
_CLOCK_TOLERANCE = 5.0
_LEFTOVER_AGE = 600.0
_PAUSE = (0.005, 0.03)
"""Seconds between two attempts to acquire a lock."""


@runtime_checkable
class TokenStore(Protocol):
    """A store for one token. A refresh acquires the lock, loads, and saves before the new token is used.

    An exception of a store is raised as an `AuthError` that names only its type. The `AuthError` is transient, unless a
    retry cannot help, for example after an `OSError` for a missing permission. Raise an `AuthError` to say more.
    """

    async def load(self) -> Token | None:
        """Return the saved token, or None if no token is saved: an `OAuth` treats that as a logout."""

    async def save(self, token: Token) -> None:
        """Save the token durably: once this returns, a crash must not lose it."""

    def lock(self) -> AbstractAsyncContextManager[None]:
        """Return a lock that one refresh holds at a time, across all processes that share the store."""


def token_to_json(token: Token) -> bytes:
    """Return the token, with its secrets, as bytes for a store."""
    expires_at = None if token.expires_at is None else token.expires_at.timestamp()
    return json.dumps({**{name: getattr(token, name) for name in _FIELDS}, "expires_at": expires_at}).encode()


def token_from_json(data: bytes) -> Token:
    """Return the token from the bytes of `token_to_json`; raise `ValueError` if they hold no token."""
    # json's error must not become the context: it holds the whole text.
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        fields: Any = json.loads(data)
        return Token(**{name: fields[name] for name in _FIELDS if name in fields})
    raise ValueError("no token in it")


def adjust_expiry(token: Token, ahead: float) -> Token:
    """Return the token with its expiry by the reader's clock, which is ``ahead`` seconds ahead of the saver's."""
    if token.expires_at is None or abs(ahead) < _CLOCK_TOLERANCE:
        return token
    return attrs.evolve(token, expires_at=token.expires_at + timedelta(seconds=ahead))


class MemoryTokenStore:
    """A store in memory, for any number of threads and event loops.

    Its token is lost with the process; a refresh token may work only once.
    """

    def __init__(self, token: Token | None = None) -> None:
        self._token = token
        self._lock = threading.Lock()

    async def load(self) -> Token | None:
        return self._token

    async def save(self, token: Token) -> None:
        self._token = token

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        # Poll: an asyncio.Lock belongs to one event loop.
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(random.uniform(*_PAUSE))
        try:
            yield
        finally:
            self._lock.release()


class FileTokenStore:
    """A store in a file with mode 0600, shared by any number of processes on one machine.

    Saves are atomic and durable. The lock is on a file beside it; the operating system releases it if its holder
    dies. If the file holds anything but a token, `load` raises an `AuthError`; only a login overwrites such a file. ::

        store = FileTokenStore("~/.config/my-app/token.json")
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_locks("FileTokenStore")
        # Without symbolic links: a save would otherwise replace the link.
        self.path: Path = resolve_path("FileTokenStore: path", path)

    def __repr__(self) -> str:
        # Some tracebacks show an object whose constructor raised.
        return f"FileTokenStore({str(getattr(self, 'path', '?'))!r})"

    async def load(self) -> Token | None:
        return await asyncio.to_thread(self._load)

    async def save(self, token: Token) -> None:
        await asyncio.to_thread(self._save, token)

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        with _explaining(f"the lock beside {self.path} cannot be opened"):
            self._make_folder()
            self._remove_leftovers()
            # A file of its own: a lock on the token file would be lost with each save, which replaces it.
            handle = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with _explaining(f"the lock beside {self.path} cannot be acquired"):
                # Poll: a thread that waits in flock cannot be cancelled.
                while not try_lock(handle):
                    await asyncio.sleep(random.uniform(*_PAUSE))
            try:
                yield
            finally:
                # Closing alone would not release it if a child process has inherited the file.
                unlock(handle)
        finally:
            os.close(handle)

    def _load(self) -> Token | None:
        with _explaining(f"the token file {self.path} cannot be read"):
            try:
                data = Secret(retry_while_open(self.path.read_bytes))
            except FileNotFoundError:
                return None
        with contextlib.suppress(ValueError):
            return token_from_json(data.reveal())
        raise AuthError(f"the token file {self.path} holds no token; it was not changed")

    def _save(self, token: Token) -> None:
        with _explaining(f"the token file {self.path} cannot be written"):
            self._make_folder()
            self._remove_leftovers()
            # mkstemp makes the file with mode 0600.
            handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".new", dir=self.path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(token_to_json(token))
                    file.flush()
                    os.fsync(file.fileno())
                retry_while_open(partial(Path(name).replace, self.path))
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            sync_folder(self.path.parent)

    def _make_folder(self) -> None:
        missing = [folder for folder in self.path.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(folder.parent)

    def _remove_leftovers(self) -> None:
        """Remove the temporary files of killed processes, which hold tokens."""
        for left in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.new"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _LEFTOVER_AGE:
                    left.unlink()


@contextlib.contextmanager
def _explaining(problem: str) -> Iterator[None]:
    """Raise an `OSError` of the block as an `AuthError`."""
    try:
        yield
    except OSError as error:
        raise AuthError(f"{problem}: {error.strerror}", transient=is_transient(error)) from None
