"""What has to hold of everything that comes of foreign bytes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from signing_async import SigningError

TOKEN = "tok-S3CR3T-0123456789"
HIDDEN = TOKEN[:12]


def check_error(error: SigningError, data: bytes = b"") -> None:
    """It can be shown in a line, copied and pickled, and of the secrets in ``data`` it holds none."""
    # Half of a secret in the input is not known for one.
    hidden = TOKEN if HIDDEN.encode() in data.replace(TOKEN.encode(), b"") else HIDDEN
    for one in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        text = str(one)
        assert text.isprintable(), text
        assert repr(one).isprintable()
        assert hidden not in text
        assert len(text) < 60_000
    shown = {name: value for name, value in vars(error).items() if name not in ("body", "known")}
    assert hidden not in repr(shown)
    for name in ("code", "request_id"):
        assert (getattr(error, name, None) or "").isprintable(), name
    assert "aiohttp" not in type(error.__cause__ or error.__context__).__module__


def check_text(text: str) -> None:
    """It can be shown in a line of a log."""
    assert text.isprintable(), text
    assert len(text) < 2_000


def check_record(found: Any) -> None:
    """It can be shown, compared, copied and pickled."""
    assert repr(found)
    assert copy.deepcopy(found) == found
    assert pickle.loads(pickle.dumps(found)) == found


def parted(data: bytes) -> tuple[list[tuple[str, str]], bytes]:
    """Lines of headers, as aiohttp decodes them, and a body behind an empty line."""
    head, _, body = data.partition(b"\n\n")
    lines = (line.decode("utf-8", "surrogateescape").partition(":") for line in head.split(b"\n"))
    return [(name, value.strip(" \t\r")) for name, _, value in lines if name], body
