"""No secret stays in a text, however it is spelled there, and nothing else is taken out."""

from __future__ import annotations

import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signing_async.transport.redaction import redact, redact_bytes

TOKEN = "tok/en+with=odd~chars.1234"


@pytest.mark.parametrize(
    "spelling",
    [
        TOKEN,
        TOKEN.replace("/", "\\/"),
        quote(TOKEN, safe=""),
        quote_plus(TOKEN),
        quote(TOKEN, safe="").replace("%2F", "%2f").replace("%2B", "%2b").replace("%3D", "%3d"),
    ],
)
def test_every_spelling_of_a_secret_is_hidden(spelling: str) -> None:
    """As it is, escaped as in JSON, and encoded as in a URL, in texts and in bytes."""
    assert redact(f"a {spelling} b {spelling}", [TOKEN]) == "a [redacted] b [redacted]"
    assert redact_bytes(f"a {spelling} b".encode(), [TOKEN]) == b"a [redacted] b"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16-le", "utf-16-be", "utf-16"])
def test_bytes_of_any_encoding(encoding: str) -> None:
    """A body is searched as bytes: what encoding it claims does not matter, and all other bytes stay."""
    body = f"å {TOKEN} ö".encode(encoding)
    assert redact_bytes(body, [TOKEN]) == "å [redacted] ö".encode(encoding)
    assert redact_bytes(bytes(range(256)), [TOKEN]) == bytes(range(256))


def test_a_secret_within_another_does_not_uncover_it() -> None:
    """The longer one is taken out first, and what stands for it is not searched again."""
    assert redact("abcdef abc", ["abc", "abcdef"]) == "[redacted] [redacted]"
    assert redact("abcdef red", ["abcdef", "red", "e"]) == "[redacted] [redacted]"


@pytest.mark.parametrize("secret", ["", "lösenord å", "\ud800x", "%2F"])
def test_odd_secrets(secret: str) -> None:
    """An empty secret is in no text; any other is taken out, whatever it holds."""
    assert redact(f"<{secret}>", [secret]) == ("<[redacted]>" if secret else "<>")
    redact_bytes(b"<x>", [secret])


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer [redacted]"),
        ("BEARER abcdefghijklmnopqrstuvwx, and more", "BEARER [redacted], and more"),
        ("a=Bearer+abc123def456", "a=Bearer+[redacted]"),
        ("Bearer authentication is required", "Bearer authentication is required"),
        ("the bearer must sign", "the bearer must sign"),
        ("Bearer x1", "Bearer x1"),
    ],
)
def test_bearer_tokens_of_others(text: str, hidden: str) -> None:
    """What follows "Bearer" and looks like a token is hidden, also one that is not this client's."""
    assert redact(text, []) == hidden
    assert redact_bytes(text.encode(), []) == hidden.encode()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "text", ["bearer+" * 30_000, "bearer " * 30_000, "bearer+b," * 30_000, "bearer " + "a" * 300_000]
)
def test_hostile_texts_take_no_time(text: str) -> None:
    """The search is linear."""
    assert len(redact(text, [TOKEN])) <= len(text)


@settings(deadline=None)
@given(st.text(), st.text(min_size=8, alphabet=st.characters(min_codepoint=33, max_codepoint=126)), st.text())
def test_no_secret_stays(before: str, secret: str, after: str) -> None:
    """Wherever it stands, and in JSON as well; and the result can be printed anywhere."""
    found = redact(before + secret + after, [secret])
    assert secret not in found.replace("[redacted]", "")
    assert found.encode()
    assert json.dumps(secret)[1:-1] not in redact(json.dumps(secret)[1:-1], [secret]) or "\\" in json.dumps(secret)


@pytest.mark.parametrize("size", range(12))
def test_a_secret_that_is_cut_off(size: int) -> None:
    """A body that ends in the middle of a secret loses the part, unless that is too short to tell anything."""
    part = b"s3cret-token"[:size]
    assert redact_bytes(b'{"token": "' + part, ["s3cret-token"]) == b'{"token": "' + (part if size < 5 else b"")


def test_a_secret_with_a_space() -> None:
    """A form spells it with a plus."""
    assert redact("client_secret=my+long+secret&x=1", ["my long secret"]) == "client_secret=[redacted]&x=1"


@pytest.mark.parametrize(
    "spelling", ["a&quot;b/1234567", r"a\"b\/1234567", r"a\"b/1234567", "a%22b%2F1234567", "a%22b/1234567"]
)
def test_spellings_of_html_json_and_urls(spelling: str) -> None:
    """However a server escapes a secret, it is found."""
    assert redact(f"<{spelling}>", ['a"b/1234567']) == "<[redacted]>"
