"""Where a token lives between requests: the protocol, one store in memory, and one in a file that processes share."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .._files import sync_folder
from ..errors import AuthError, ConfigurationError
from ..models import Token

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]  # a module's type does not allow None

__all__ = [
    "FileTokenStore",
    "MemoryTokenStore",
    "TokenStore",
    "carried_through",
    "token_from_json",
    "token_to_json",
]

_FIELDS = ("access_token", "refresh_token", "expires_at", "token_type", "origin")
_LEFT_OVER = 600.0


@runtime_checkable
class TokenStore(Protocol):
    """Keeps one token. A refresh takes the lock, loads, and saves before anybody uses the new token."""

    async def load(self) -> Token | None:
        """The token saved last; None when there is none. An `OAuth` takes a token that is gone for a logout."""

    async def save(self, token: Token) -> None:
        """Keep this token; when it returns, a crash must not lose it."""

    def lock(self) -> AbstractAsyncContextManager[None]:
        """Held by one refresh at a time, wherever the others run that share this store."""


async def carried_through(work: Coroutine[Any, Any, None]) -> None:
    """Return when it is done, also where this is cancelled meanwhile: for giving back what others wait for."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def token_to_json(token: Token) -> bytes:
    """A token as the bytes that a store keeps: these hold the secrets."""
    return json.dumps(
        {
            "access_token": token.access_token,
            "refresh_token": token.refresh_token,
            "expires_at": None if token.expires_at is None else token.expires_at.timestamp(),
            "token_type": token.token_type,
            "origin": token.origin,
        }
    ).encode()


def token_from_json(data: bytes) -> Token:
    """The token of bytes made by `token_to_json`, or a ValueError."""
    # What went wrong in here is not kept as a cause: json's error holds the whole text.
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        fields: Any = json.loads(data)
        return Token(**{name: fields[name] for name in _FIELDS if name in fields})
    raise ValueError("no token in it")


class MemoryTokenStore:
    """Keeps the token in this process. What it holds is gone with it: mind that a refresh token may work only once."""

    def __init__(self, token: Token | None = None) -> None:
        self._token = token
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def load(self) -> Token | None:
        return self._token

    async def save(self, token: Token) -> None:
        self._token = token

    def lock(self) -> AbstractAsyncContextManager[None]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # A lock belongs to the loop in which somebody waited for it.
            self._loop, self._lock = loop, asyncio.Lock()
        return self._lock


class FileTokenStore:
    """Keeps the token in a file that only its owner may read, for any number of processes on one machine.

    A save is atomic and on disk when it returns. The lock is a file beside it, held across processes and freed by the
    system should its holder die. A file that cannot be read as a token is an `AuthError`, and is never written over::

        store = FileTokenStore("~/.config/my-app/token.json")
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if fcntl is None:
            raise ConfigurationError("FileTokenStore needs POSIX file locks, which this system does not have")
        try:
            expanded = os.path.expanduser(path)  # noqa: PTH111  # pathlib's raises where there is no such user
            # Through symbolic links, so that all who share the file share its lock, and a save does not replace a link.
            self.path: Path = Path(os.path.realpath(expanded))
        except (TypeError, ValueError):
            raise ConfigurationError(f"FileTokenStore: path must be a path, not {path!r}") from None
        # Where it cannot even look, load and save say so.
        with contextlib.suppress(OSError):
            if self.path.is_dir():
                raise ConfigurationError(f"FileTokenStore: path is a folder: {self.path}")

    def __repr__(self) -> str:
        return f"FileTokenStore({str(self.path)!r})"

    async def load(self) -> Token | None:
        return await asyncio.to_thread(self._load)

    async def save(self, token: Token) -> None:
        await asyncio.to_thread(self._save, token)

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        handle = self._open_lock()
        try:
            # Asked for again and again, since a thread that waits in flock cannot be cancelled.
            while not self._try_lock(handle):
                await asyncio.sleep(random.uniform(0.005, 0.03))
            yield
        finally:
            # Closing alone would leave it locked if a child process had been forked meanwhile.
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _load(self) -> Token | None:
        try:
            return token_from_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except ValueError:
            problem = "holds no token; it was left as it is"
        raise AuthError(f"the token file {self.path} {problem}")

    def _save(self, token: Token) -> None:
        try:
            self._make_folder()
            self._remove_leftovers()
            # mkstemp makes the file with mode 0600.
            handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".new", dir=self.path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(token_to_json(token))
                    file.flush()
                    os.fsync(file.fileno())
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            sync_folder(self.path.parent)
        except OSError as error:
            raise AuthError(f"the token file {self.path} cannot be written: {error.strerror}") from None

    def _make_folder(self) -> None:
        missing = [folder for folder in self.path.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(folder.parent)

    def _remove_leftovers(self) -> None:
        """What a process left that was killed in a save: each holds a token. What cannot go stays."""
        for left in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.new"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _LEFT_OVER:
                    left.unlink()

    def _open_lock(self) -> int:
        try:
            self._make_folder()
            # A file of its own, never replaced: a lock on the token's file would be lost with each save. And flock, not
            # lockf: it also excludes two stores in one process.
            return os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise AuthError(f"the lock beside {self.path} cannot be opened: {error.strerror}") from None

    def _try_lock(self, handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise AuthError(f"the lock beside {self.path} cannot be taken: {error.strerror}") from None
        return True
