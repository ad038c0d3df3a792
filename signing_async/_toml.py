"""TOML files of settings. Errors name the file, and quote none of its values."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ._files import is_transient
from .errors import ConfigurationError

__all__ = ["did_you_mean", "read_toml"]


def read_toml(
    path: str | os.PathLike[str], *, secrets_in: Callable[[dict[str, Any]], Iterable[str]] = lambda content: ()
) -> dict[str, Any]:
    """Return the file's table. Refuse a file that holds secrets and that everybody on this machine may read.

    The owner's group may read it: services get their secrets that way. ``secrets_in`` returns the names of the secrets
    in the table.
    """
    import tomllib

    path = Path(path)
    content: dict[str, Any] = {}
    transient = False
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = tomllib.loads(file.read().decode())
        problem = None
    except OSError as error:
        problem, transient = f"cannot be read: {error.strerror}", is_transient(error)
    except UnicodeDecodeError:
        problem = "is not UTF-8"
    except tomllib.TOMLDecodeError as error:
        problem = f"is not TOML: {error}"
    except ValueError as error:  # an impossible path
        problem = f"cannot be read: {error}"
    # Not in a handler: the parser's error, which would become the context, holds the text of the file.
    if problem is not None:
        raise ConfigurationError(f"{path} {problem}", transient=transient)
    secrets = sorted(secrets_in(content))
    if secrets and sys.platform != "win32" and mode & stat.S_IROTH:
        raise ConfigurationError(
            f"{path} holds {' and '.join(secrets)}, and everybody on this machine may read it"
            f" (mode {stat.S_IMODE(mode):04o}): run chmod 600 {path}"
        )
    return content


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known name that is closest to this one; "" if none is close."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
