"""Make a Python on Linux lack what macOS lacks: reads that do not wait for a disk, files without a name, `/proc`."""

from __future__ import annotations

import builtins
import errno
import os
from typing import Any

for name in [name for name in vars(os) if name.startswith(("RWF_", "posix_fadvise", "O_TMPFILE", "pidfd_", "memfd_"))]:
    delattr(os, name)


def hide(function: Any) -> Any:
    def call(path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return function(path, *arguments, **named)

    return call


builtins.open, os.open, os.stat, os.listdir = map(hide, (open, os.open, os.stat, os.listdir))  # type: ignore[assignment]
