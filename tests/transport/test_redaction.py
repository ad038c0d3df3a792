"""No secret stays in a text, however it is spelled there, and nothing else is taken out."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signing_async.transport.redaction import redact, redact_bytes  # any text, by hypothesis

TOKEN = "tok/en+with=odd~chars.1234"


@pytest.mark.parametrize(
    ("secret", "spellings"),
    [
        (TOKEN, [TOKEN, TOKEN.replace("/", "\\/"), quote(TOKEN, safe=""), "tok%2fen%2bwith%3dodd~chars.1234"]),
        ("my long secret", ["my+long+secret"]),
        ('a"b/1234567', ["a&quot;b/1234567", r"a\"b\/1234567", r"a\"b/1234567", "a%22b%2F1234567", "a%22b/1234567"]),
    ],
)
def test_every_spelling_of_a_secret_is_redacted(secret: str, spellings: list[str]) -> None:
    """As it is, and escaped for JSON, HTML and URLs, in texts and in bytes."""
    for spelling in spellings:
        assert redact(f"a {spelling} b {spelling}", [secret]) == "a [redacted] b [redacted]"
        assert redact_bytes(f"a {spelling} b".encode(), [secret]) == b"a [redacted] b"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16-le", "utf-16"])
def test_secret_is_redacted_in_bytes_of_any_encoding(encoding: str) -> None:
    """All other bytes stay."""
    body = f"å {TOKEN} ö".encode(encoding)
    assert redact_bytes(body, [TOKEN]) == "å [redacted] ö".encode(encoding)
    assert redact_bytes(bytes(range(256)), [TOKEN]) == bytes(range(256))


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer [redacted]"),
        ("BEARER abcdefghijklmnopqrstuvwx, and more", "BEARER [redacted], and more"),
        ("a=Bearer+abc123def456", "a=Bearer+[redacted]"),
        ("Bearer authentication is required", "Bearer authentication is required"),
        ("Bearer x1", "Bearer x1"),
    ],
)
def test_value_after_bearer_is_redacted_if_it_looks_like_a_token(text: str, hidden: str) -> None:
    """Also a token that is not this client's."""
    assert redact(text, []) == hidden
    assert redact_bytes(text.encode(), []) == hidden.encode()


@settings(max_examples=40)
@given(st.text(), st.text(min_size=8, alphabet=st.characters(min_codepoint=33, max_codepoint=126)), st.text())
def test_no_secret_remains_in_any_text(before: str, secret: str, after: str) -> None:
    found = redact(before + secret + after, [secret])
    assert secret not in found.replace("[redacted]", "")
    assert found.encode()
    assert json.dumps(secret)[1:-1] not in redact(json.dumps(secret)[1:-1], [secret]) or "\\" in json.dumps(secret)


@pytest.mark.parametrize("size", [4, 5, 11])
def test_secret_that_is_cut_off_at_the_end_is_removed(size: int) -> None:
    """Unless the part is too short to reveal anything."""
    part = b"s3cret-token"[:size]
    assert redact_bytes(b'{"token": "' + part, ["s3cret-token"]) == b'{"token": "' + (part if size < 5 else b"")
