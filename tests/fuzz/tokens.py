"""Token answers and token files: a usable token, or an error of the package without any of the bytes."""

from __future__ import annotations

from contextlib import nullcontext, suppress

from signing_async import Assumptions, Token
from signing_async.auth.token_endpoint import decode_token
from signing_async.auth.token_stores import token_from_json, token_to_json
from signing_async.transport.decode import Unreadable, parse
from tests.fuzz.running import Target


def attack(data: bytes) -> None:
    with suppress(Unreadable):
        _check(decode_token(parse(data), 1.8e9, Assumptions(), "https://tenant.example.com"))
    try:
        kept = token_from_json(data)
    except ValueError as error:
        _check_refusal(error)
        return
    _check(kept)
    again = token_from_json(token_to_json(kept))
    assert again.access_token == kept.access_token
    assert again.refresh_token == kept.refresh_token


def _check_refusal(error: ValueError) -> None:
    assert str(error) == "no token in it"
    assert error.__cause__ is None


def _check(token: Token) -> None:
    header = f"{token.token_type} {token.access_token}"
    assert header.isascii()
    assert header.isprintable()
    assert header.count(" ") == 1
    assert repr(token) == f"Token(expires_at={token.expires_at!r}, token_type={token.token_type!r})"


SEEDS = (
    b'{"access_token": "abc-123", "token_type": "Bearer", "expires_in": 3600, "refresh_token": "def-456"}',
    b'{"access_token": "abc-123", "token_type": "MAC", "expires_in": "3600", "refresh_token": null}',
    b'{"access_token": "abc-123", "refresh_token": "def-456", "expires_at": 1900000000.5, "token_type": "Bearer"}',
    b'{"error": "invalid_grant", "error_description": "no"}',
)
WORDS = (
    b'"access_token":', b'"refresh_token":', b'"expires_in":', b'"expires_at":', b'"token_type":', b"null", b"true",
    b"-1", b"1e308", b"1e999", b"NaN", b"Infinity", b'"nan"', b'"1e400"', b"9" * 30, b"9" * 4400, b"[]", b"{}", b'""',
    b'" "', b"\\n", b"\\r\\n", b"\\u0000", b"\\ud800", b"\xff", b"\xef\xbb\xbf", b"[" * 1100, b'"', b",", b":", b"{",
    b"}", b"253402300800", b"-62135596801", b"\xd9\xa3",
)  # fmt: skip
TARGET = Target("tokens", lambda: nullcontext(attack), SEEDS, WORDS)
