"""Callback URLs: a code whose state was checked, or an error of the package that shows neither."""

from __future__ import annotations

from contextlib import nullcontext

from signing_async import AuthError, InvalidRequest, SigningError
from tests.auth.oauth_servers import code_of
from tests.fuzz.promises import TOKEN, check_error
from tests.fuzz.running import Target

STATE = TOKEN


def attack(data: bytes) -> None:
    given = data.decode("utf-8", "surrogateescape")
    found = code_of(given, STATE)
    if isinstance(found, SigningError):
        assert isinstance(found, AuthError | InvalidRequest)
        check_error(found, data)
        return
    assert found
    bare = "?" not in given and "://" not in given
    assert bare or STATE.encode() in data or "%" in given


CALLBACK = b"https://app.example.com/callback?"
SEEDS = (
    CALLBACK + b"code=abc%2Fdef&state=" + STATE.encode(),
    CALLBACK + b"error=access_denied&error_description=The+user+said+no&state=" + STATE.encode(),
    b"code=abc&state=" + STATE.encode(),
    CALLBACK + b"code=a&code=b&state=" + STATE.encode(),
    b"a-bare-code",
)
WORDS = (
    b"?", b"&", b"=", b"#", b"%", b"%0a", b"%1b[31m", b"%ff", b"%00", b"%e2%80%ae", b"+", b";", b"code=", b"state=",
    b"[", b"error=", b"error_description=", STATE.encode(), b"://", b"//", b"@", b"\xff", b"\xc3\xa9", b" ", b"\n",
    b"&a=" * 101, b"]", b":", b"%f0%9f%98%80", b"\xe2\x84\x80",
)  # fmt: skip
TARGET = Target("callbacks", lambda: nullcontext(attack), SEEDS, WORDS)
