"""Check, stream and save sealed PDFs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from .. import telemetry
from .._files import is_transient, place_new, sync_folder, unusable
from ..errors import DecodeError, InvalidRequest, NotSound, TransportError
from ..telemetry.names import DIRECTION, TRANSFERRED
from ..transport import wire
from ..transport.attempt import response_of, timeout_error, transport_error
from ..transport.call import Transport
from ..transport.decode import Unreadable
from ..transport.operation import Operation

if TYPE_CHECKING:
    from ..sealed import Trust

__all__ = [
    "DOWNLOAD",
    "SealedFile",
    "check_target",
    "checked_chunks",
    "load_verifier",
    "save",
    "stream",
    "target_exists",
]

DOWNLOAD = "documents.download_signed"
_HEADER = b"%PDF-"
_END = b"%%EOF"
_END_WINDOW = 1024
_WRITE_SIZE = 1024 * 1024


@attrs.frozen
class SealedFile:
    """A sealed PDF on disk, checked and complete."""

    path: Path
    size: int
    sha256: str


async def checked_chunks(response: wire.Response, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a PDF. Raise `Unreadable` if it is not a PDF, is truncated, or exceeds ``max_bytes``."""
    size, head, tail = 0, b"", b""
    async for chunk in response.chunks():
        size += len(chunk)
        if size > max_bytes:
            raise Unreadable(f"the sealed file is larger than {max_bytes} bytes (max_sealed_bytes)")
        if len(head) < len(_HEADER):
            head += chunk[: len(_HEADER)]
            if not (head.startswith(_HEADER) or _HEADER.startswith(head)):
                raise Unreadable("the response is not a PDF")
        tail = (tail + chunk[-_END_WINDOW:])[-_END_WINDOW:]
        yield chunk
    if not head.startswith(_HEADER):
        raise Unreadable("the response is not a PDF")
    if _END not in tail:
        raise Unreadable("the sealed file is truncated: no %%EOF at its end")


async def stream(
    operation: Operation[wire.Response],
    response: wire.Response,
    transport: Transport,
    received: AsyncGenerator[bytes, None],
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks received. Raise a `SigningError` if one cannot be read or does not arrive in time."""
    options = transport.options
    head = response_of(operation, transport.shared, options, response)
    error: TransportError | DecodeError
    time_left = options.timeouts.transfer
    loop = asyncio.get_running_loop()
    try:
        async with aclosing(received) as chunks:
            while True:
                began = loop.time()
                async with asyncio.timeout(time_left):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                time_left -= loop.time() - began
                yield chunk
                del chunk  # a traceback shows variables, and a server may echo a secret
    except wire.BrokenResponse as broken:
        error = transport_error(operation, broken, head)
    except Unreadable as unreadable:
        error = head.decode_error(str(unreadable))
    except TimeoutError:
        error = timeout_error(operation, options, head)
    finally:
        telemetry.active(options.telemetry).record(TRANSFERRED, response.received, {DIRECTION: "receive"})
    raise error


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return the path of a download. Raise `InvalidRequest` unless it is a regular file or a free name in a folder."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidRequest(f"path: must be a path, got {type(path).__name__}")
    target = Path(path)
    problem = f"path: cannot write {str(target)!r}"
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if target.parent.is_dir():
            return target
        raise InvalidRequest(f"{problem}: folder {str(target.parent)!r} does not exist") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise unusable(f"{problem}: {reason}", error) from None
    if not stat.S_ISREG(mode):
        raise InvalidRequest(f"path: {str(target)!r} is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}")
    return target


def target_exists(target: Path) -> InvalidRequest:
    return InvalidRequest(f"path: {str(target)!r} already exists and was not replaced")


def load_verifier(trust: Trust | Iterable[Trust] | None) -> Callable[[Path], None]:
    """Return a function that raises `NotSound` for a bad file. Loads the extra and the roots, which may raise."""
    from .._verify.roots import load_roots
    from ..sealed import inspect_sealed

    roots = None if trust is None else load_roots(trust)

    def verify(path: Path) -> None:
        # As bytes: the path is not an argument of the user, so a failure to read it is an `OSError`.
        report = inspect_sealed(path.read_bytes(), trust=roots)
        problems = report.problems + report.trust_problems
        if problems:
            verdict = "trusted" if report.sound else "sound"
            raise NotSound(f"{DOWNLOAD}: the sealed file is not {verdict}: {'; '.join(problems)}", problems=problems)

    return verify


async def save(
    chunks: AsyncIterator[bytes],
    target: Path,
    *,
    overwrite: bool,
    verify: Callable[[Path], None] | None,
    is_argument: bool,
) -> SealedFile:
    """Write the chunks to a temporary file beside ``target``, verify it, and move it there.

    If the target is an argument of the user, and its folder permanently refuses the file, `InvalidRequest` is raised.
    Every other failure of the disk is an `OSError`. A disk may stall: a thread that outlives the call removes its file.
    """
    # The file that a link leads to is replaced, not the link.
    place = Path(os.path.realpath(target)) if overwrite else target
    part = place.with_name(f".{secrets.token_hex(8)}.part")
    size, digest = 0, hashlib.sha256()
    mode: int | None = None
    pending: list[bytes] = []
    is_created = is_over = False

    def write() -> None:
        nonlocal is_created, mode, size
        if not is_created:
            mode = stat.S_IMODE(place.stat().st_mode) if overwrite and place.exists() else None
            # A file that replaces another is private until it has the other's mode.
            part.touch(0o666 if mode is None else 0o600, exist_ok=False)
            is_created = True
        with part.open("r+b") as file:
            file.seek(size)
            for chunk in pending:
                digest.update(chunk)
                size += file.write(chunk)
            pending.clear()

    def complete() -> None:
        write()
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        if verify is not None:
            verify(part)
        if is_over:
            return
        if mode is not None:
            part.chmod(mode)
        if overwrite:
            part.replace(place)
        else:
            place_new(part, target)
        sync_folder(place.parent)

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except FileExistsError:
            raise target_exists(target) from None
        except OSError as error:
            if is_argument and not is_created and not is_transient(error):
                raise InvalidRequest(f"path: cannot write {str(target)!r}: {error.strerror}") from None
            raise OSError(error.errno, error.strerror, str(target)) from None
        finally:
            if is_over:
                part.unlink(missing_ok=True)

    try:
        received = 0
        async for chunk in chunks:
            pending.append(chunk)
            received += len(chunk)
            if received >= _WRITE_SIZE:
                received = 0
                await asyncio.to_thread(run, write)
        await asyncio.to_thread(run, complete)
    except BaseException:
        is_over = True
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    return SealedFile(target, size, digest.hexdigest())
