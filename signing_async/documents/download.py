"""Download sealed PDFs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import stat
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from .._files import sync_folder
from ..errors import InvalidRequest, NotSound
from ..transport import wire
from ..transport.decode import Unreadable

if TYPE_CHECKING:
    from ..sealed import Trust

__all__ = ["Part", "SealedFile", "already_exists", "checked", "download_target", "load_verifier", "save"]

_DOWNLOAD = "documents.download_signed"
_HEAD = b"%PDF-"
_END = b"%%EOF"
_END_WITHIN = 1024
_AT_ONCE = 1024 * 1024


@attrs.frozen
class SealedFile:
    """A sealed PDF on disk, checked and complete."""

    path: Path
    size: int
    sha256: str


def download_target(path: str | os.PathLike[str]) -> Path:
    """Where a download may go: a place for a file, or a file. Anything else, say a device, is not to be replaced."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidRequest(f"path: must be a path, not {type(path).__name__}")
    target = Path(path)
    try:
        kind = stat.S_IFMT(target.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        kind = stat.S_IFREG
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"path: {str(target)!r} cannot be written: {why}") from None
    if kind != stat.S_IFREG:
        raise InvalidRequest(f"path: {str(target)!r} is {'a folder' if kind == stat.S_IFDIR else 'not a file'}")
    if not target.parent.is_dir():
        raise InvalidRequest(f"path: {str(target)!r}: there is no folder {str(target.parent)!r}")
    return target


def already_exists(target: Path) -> InvalidRequest:
    return InvalidRequest(f"path: {str(target)!r} exists already, and was not replaced")


async def checked(response: wire.Response, most: int) -> AsyncGenerator[bytes, None]:
    """The chunks of a download; `Unreadable` where it is not a PDF from its beginning to its end."""
    size, head, tail = 0, b"", b""
    async for chunk in response.chunks():
        size += len(chunk)
        if size > most:
            raise Unreadable(f"the sealed file is larger than {most} bytes")
        if len(head) < len(_HEAD):
            head += chunk[: len(_HEAD)]
            if not (head.startswith(_HEAD) or _HEAD.startswith(head)):
                raise Unreadable("what came is not a PDF")
        tail = (tail + chunk[-_END_WITHIN:])[-_END_WITHIN:]
        yield chunk
    if not head.startswith(_HEAD):
        raise Unreadable("what came is not a PDF")
    if _END not in tail:
        raise Unreadable("the sealed file has no end: it was cut short")


def load_verifier(trust: Trust | Iterable[Trust] | None, most: int) -> Callable[[Path], None]:
    """Return a check of a file; that it can be made, and the roots be read, is seen before anything is downloaded."""
    from .._verify.roots import load_roots
    from ..sealed import inspect_by_roots

    roots = None if trust is None else load_roots(trust)

    def check(path: Path) -> None:
        report = inspect_by_roots(path, roots, max_bytes=most)
        problems = report.problems + report.trust_problems
        if problems:
            verdict = "trusted" if report.sound else "sound"
            raise NotSound(f"{_DOWNLOAD}: the sealed file is not {verdict}: {'; '.join(problems)}", problems=problems)

    return check


async def save(response: wire.Response, part: Part, most: int) -> SealedFile:
    """Write a download beside its target, and put it in the target's place when it is complete."""
    chunks: list[bytes] = []
    waiting = 0
    try:
        async for chunk in checked(response, most):
            chunks.append(chunk)
            waiting += len(chunk)
            if waiting >= _AT_ONCE:
                await asyncio.to_thread(part.add, chunks)
                chunks, waiting = [], 0
        return await asyncio.to_thread(part.finish, chunks)
    except BaseException:
        part.remove()
        raise


class Part:
    """A file beside its target, until it is complete. All that may wait for the disk is done in a thread.

    A thread may outlive a download that was cancelled. So the file is open only inside of one call, and a call that
    comes too late cleans up behind itself.
    """

    def __init__(self, target: Path, *, overwrite: bool, check: Callable[[Path], None] | None = None) -> None:
        self._target = target
        self._overwrite = overwrite
        self._check = check
        self._path = target.with_name(f".{secrets.token_hex(8)}.part")
        self._mode = "xb"
        self._digest = hashlib.sha256()
        self._size = 0
        self._given_up = False

    def add(self, chunks: Iterable[bytes], *, last: bool = False) -> None:
        try:
            with self._path.open(self._mode) as file:
                self._mode = "ab"
                for chunk in chunks:
                    self._digest.update(chunk)
                    self._size += file.write(chunk)
                file.flush()
                if last:
                    os.fsync(file.fileno())
        except OSError as error:
            if self._mode == "xb":
                raise InvalidRequest(f"path: {str(self._target)!r} cannot be written: {error.strerror}") from None
            raise OSError(error.errno, error.strerror, str(self._target)) from None
        finally:
            if self._given_up:
                self.remove()

    def finish(self, chunks: Iterable[bytes]) -> SealedFile:
        self.add(chunks, last=True)
        if self._check is not None:
            self._check(self._path)
        if not self._given_up:
            if self._overwrite:
                self._path.replace(self._target)
            else:
                self._link()
            sync_folder(self._target.parent)
        return SealedFile(self._target, self._size, self._digest.hexdigest())

    def _link(self) -> None:
        """Give the file its name, unless that is taken."""
        try:
            try:
                os.link(self._path, self._target)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links: take the name first
                self._target.open("xb").close()
                self._path.replace(self._target)
            else:
                self._path.unlink()
        except FileExistsError:
            raise already_exists(self._target) from None

    def remove(self) -> None:
        self._given_up = True
        self._path.unlink(missing_ok=True)
