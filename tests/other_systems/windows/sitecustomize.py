"""Make a Python on Linux behave like one on Windows where that concerns files, locks, sockets and signals.

Python imports this module before the program if its folder is in PYTHONPATH, in every child process too.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import types
from typing import Any

os.O_BINARY = 0x40000000  # type: ignore[attr-defined]  # unused by Linux

import asyncio  # these modules need what is removed below
import asyncio.unix_events
import fcntl
import shutil
import signal
import socketserver  # noqa: F401
import struct
import subprocess  # noqa: F401
import tempfile

MISSING = (
    *("pread", "preadv", "pwrite", "pwritev", "readv", "writev", "sendfile", "posix_fadvise", "RWF_NOWAIT"),
    *("fchmod", "fchown", "chown", "lchown", "getuid", "geteuid", "getgid", "getegid", "uname", "mkfifo"),
    *("fork", "forkpty", "register_at_fork"),
    *("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "O_SYNC", "O_DSYNC"),
)
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "uvloop")
ACCESS_DENIED, SHARING_VIOLATION = 5, 32

real_open, real_read, real_write, real_close, real_dup = os.open, os.read, os.write, os.close, os.dup
real_fsync, real_unlink, real_replace, real_rename = os.fsync, os.unlink, os.replace, os.rename
real_fdopen = os.fdopen
# Descriptors of files that were opened without O_BINARY.
text: set[int] = set()


def refused(path: Any, winerror: int) -> PermissionError:
    error = PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
    error.winerror = winerror  # type: ignore[attr-defined]  # only Windows has it
    return error


def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if os.path.isdir(path) and flags & os.O_TMPFILE != os.O_TMPFILE:
        raise refused(path, ACCESS_DENIED)
    descriptor = real_open(path, flags & ~os.O_BINARY, mode, dir_fd=dir_fd)  # type: ignore[attr-defined]
    text.discard(descriptor)
    if not flags & os.O_BINARY and stat.S_ISREG(os.fstat(descriptor).st_mode):  # type: ignore[attr-defined]
        text.add(descriptor)
    return descriptor


def read(descriptor: int, size: int) -> bytes:
    data = real_read(descriptor, size)
    return data.partition(b"\x1a")[0].replace(b"\r\n", b"\n") if descriptor in text else data


def write(descriptor: int, data: Any) -> int:
    if descriptor not in text:
        return real_write(descriptor, data)
    real_write(descriptor, bytes(data).replace(b"\n", b"\r\n"))
    return len(data)


def close(descriptor: int) -> None:
    text.discard(descriptor)
    real_close(descriptor)


def dup(descriptor: int) -> int:
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.EBADF, "Bad file descriptor")  # a socket is not a descriptor
    copy = real_dup(descriptor)
    if descriptor in text:
        text.add(copy)
    return copy


def fdopen(descriptor: int, *arguments: Any, **named: Any) -> Any:
    text.discard(descriptor)  # file objects set the descriptor to binary
    return real_fdopen(descriptor, *arguments, **named)


def fsync(descriptor: int) -> None:
    real_write(descriptor, b"")  # EBADF if it is open for reading only
    real_fsync(descriptor)


def is_open(path: Any) -> bool:
    """Return whether this process has the file open."""
    try:
        wanted = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    for name in os.listdir("/proc/self/fd"):
        try:
            found = os.stat(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if os.path.samestat(found, wanted):
            return True
    return False


def unlink(path: Any, *, dir_fd: int | None = None) -> None:
    if is_open(path):
        raise refused(path, SHARING_VIOLATION)
    real_unlink(path, dir_fd=dir_fd)


def replace(source: Any, target: Any) -> None:
    for path in (source, target):
        if is_open(path):
            raise refused(path, ACCESS_DENIED)
    real_replace(source, target)


def rename(source: Any, target: Any) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "File exists", os.fspath(target))
    replace(source, target)


def locking(descriptor: int, mode: int, size: int) -> None:
    """Lock bytes for this descriptor, also against others of this process."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    assert position > os.fstat(descriptor).st_size, "a locked byte of the content cannot be read by other processes"
    kind = fcntl.F_UNLCK if mode == msvcrt.LK_UNLCK else fcntl.F_WRLCK
    lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, position, size, 0)
    if kind == fcntl.F_UNLCK:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
        return
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
    except OSError:
        raise PermissionError(errno.EACCES, "Permission denied") from None


def no_handler(*_: Any) -> None:
    raise NotImplementedError


msvcrt: Any = types.ModuleType("msvcrt")
msvcrt.locking, msvcrt.LK_UNLCK, msvcrt.LK_LOCK, msvcrt.LK_NBLCK = locking, 0, 1, 2
sys.modules["msvcrt"] = msvcrt
for module in MODULES:
    sys.modules[module] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
for name in MISSING:
    delattr(os, name)
del signal.SIGHUP
vars(os).update(open=open_, read=read, write=write, close=close, dup=dup, fdopen=fdopen, fsync=fsync)
vars(os).update(unlink=unlink, remove=unlink, replace=replace, rename=rename)
shutil._use_fd_functions = False  # type: ignore[attr-defined]  # Windows opens no folders
# There it is a file with a name, which the system removes when it is closed.
temporary_file = tempfile.TemporaryFile
tempfile.TemporaryFile = lambda *arguments, **named: tempfile._TemporaryFileWrapper(  # type: ignore[misc, assignment]
    temporary_file(*arguments, **named), "", delete=False
)
loop: Any = asyncio.unix_events._UnixSelectorEventLoop  # type: ignore[attr-defined]
loop.add_signal_handler = loop.remove_signal_handler = no_handler
