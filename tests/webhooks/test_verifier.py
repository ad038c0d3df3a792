"""The verifier: what it accepts, what it refuses, and that no header can do anything else to it."""

from __future__ import annotations

import base64
import contextlib
import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from signing_async.errors import ConfigurationError
from signing_async.webhooks import (
    GITHUB,
    STANDARD_WEBHOOKS,
    STRIPE,
    InvalidSignature,
    Scheme,
    WebhookVerifier,
    sign,
)
from signing_async.webhooks.verifier import MAX_HEADER, as_bytes
from tests.webhooks.deliveries import SECRET, base64_of, event_body, hex_of, mac

BODY = event_body("evt_1")
HEX = hex_of(BODY)
URL_SAFE = base64.urlsafe_b64encode(mac(BODY)).decode()


def special_body() -> bytes:
    """A body whose signature has both characters in which the two base64 alphabets differ."""
    return next(
        body for body in (event_body(f"evt_{number}") for number in range(1000)) if {"+", "/"} <= set(base64_of(body))
    )


def accepts(body: bytes, signature: Any, scheme: Scheme | None = None, secret: Any = SECRET, **options: Any) -> bool:
    """Whether the verifier accepts; anything but InvalidSignature goes through."""
    try:
        WebhookVerifier(secret, scheme or Scheme()).verify(body, signature, **options)
    except InvalidSignature:
        return False
    return True


@pytest.mark.parametrize("label", ["", "sha256=", "v1=", "v1,", "SHA256=", "Sha256=", "V1=", "V1,"])
@pytest.mark.parametrize(
    "value",
    [
        HEX,
        HEX.upper(),
        HEX[:32] + HEX[32:].upper(),
        base64_of(BODY),
        base64_of(BODY).rstrip("="),
        URL_SAFE,
        URL_SAFE.rstrip("="),
    ],
)
def test_every_honest_encoding_is_accepted(label: str, value: str) -> None:
    """Hex in any case and base64 of either alphabet, padded or not, with and without a label, as text and bytes."""
    assert accepts(BODY, label + value)
    assert accepts(BODY, (label + value).encode())
    assert accepts(BODY, f"  {label}{value} ")


def test_url_safe_base64_is_accepted_where_it_differs() -> None:
    """The two base64 alphabets are both understood, and so is a mixture: it is the same signature."""
    body = special_body()
    standard = base64_of(body)
    assert accepts(body, standard)
    assert accepts(body, standard.translate(str.maketrans("+/", "-_")))
    assert accepts(body, standard.replace("+", "-"))


@pytest.mark.parametrize("separator", [",", ", ", " ", "\t", ",,  ,"])
@pytest.mark.parametrize("label", ["", "v1=", "v1,", "sha256="])
def test_one_of_several_signatures_is_enough(separator: str, label: str) -> None:
    """A header may carry several signatures, and the good one may stand anywhere."""
    wrong, right = label + hex_of(BODY, "another"), label + HEX
    assert accepts(BODY, separator.join([wrong, right]))
    assert accepts(BODY, separator.join([right, wrong]))
    assert accepts(BODY, separator.join(["v0=zzz", "t=12", wrong, label + base64_of(BODY)]))
    assert not accepts(BODY, separator.join([wrong, wrong]))


@pytest.mark.parametrize("secrets", [["new", "old"], ("old", "new"), {"old"}, b"old", ["x", b"old"]])
@pytest.mark.parametrize(
    "collection", [lambda given: given, lambda given: iter([given] if isinstance(given, bytes) else given)]
)
def test_any_of_several_secrets_is_enough(secrets: Any, collection: Callable[[Any], Any]) -> None:
    """While a secret is rotated, both the new and the old one are valid, in any collection."""
    assert accepts(BODY, hex_of(BODY, "old"), secret=collection(secrets))
    assert not accepts(BODY, hex_of(BODY, "oldest"), secret=["new", "old"])


@pytest.mark.parametrize("body", [b"", BODY, bytearray(BODY), memoryview(BODY), memoryview(BODY * 2)[::2]])
def test_every_bytes_like_body_is_taken(body: Any) -> None:
    """bytes, bytearray and memoryview, also one that is not contiguous."""
    assert accepts(body, hex_of(bytes(body)))
    assert accepts(body, base64_of(bytes(body)))
    assert not accepts(body, hex_of(bytes(body) + b"x"))


@pytest.mark.parametrize("signature", [HEX, "sha256=" + HEX, None, "", "é", b"\xff", 5])
@pytest.mark.parametrize("body", [BODY.decode(), {"event": {"id": "evt_1"}}, ["x"], None, 7])
def test_a_body_that_is_not_bytes_is_a_type_error_that_explains(body: Any, signature: Any) -> None:
    """A str or parsed JSON is the programmer's mistake, whatever the header: the error says why."""
    with pytest.raises(TypeError, match=r"bytes as they were received, not \w+: the signature covers those") as caught:
        WebhookVerifier(SECRET).verify(body, signature)
    assert type(body).__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, "missing"),
        ("", "missing"),
        (b"", "missing"),
        (" \t", "missing"),
        ("é" * 64, "malformed"),
        ("\ud800" * 64, "malformed"),
        (HEX[:-1] + "é", "malformed"),
        (HEX[:-1] + "\N{FULLWIDTH DIGIT ONE}", "malformed"),
        (HEX[:-1] + "\0", "mismatch"),
        (b"\xff\xfe\x00" * 30, "malformed"),
        ("x" * 1_000_000, "malformed"),
        (("v1," * 400_000) + HEX, "malformed"),
        (HEX[:-1], "malformed"),
        (HEX + "0", "malformed"),
        (HEX[:-2], "malformed"),
        ("sha256=", "malformed"),
        ("sha256" + HEX, "malformed"),
        ("md5=" + HEX, "malformed"),
        ("=" + HEX, "malformed"),
        (HEX[:32] + " " + HEX[32:], "malformed"),
        ("z" * 64, "mismatch"),
        (base64_of(BODY)[:-2] + "A=", "mismatch"),
        (base64_of(BODY) + "=", "malformed"),
        (base64_of(BODY)[:-1] + "A", "mismatch"),
        (base64_of(BODY)[1:], "mismatch"),
        (hex_of(BODY, "another"), "mismatch"),
        (HEX[::-1], "mismatch"),
        (5, "malformed"),
        ([HEX], "malformed"),
        (bytearray(HEX.encode()), "malformed"),
        (object(), "malformed"),
    ],
)
def test_a_bad_header_is_an_invalid_signature_of_its_kind(header: Any, reason: str) -> None:
    """Whatever the header is, the error is InvalidSignature, names the kind of fault and never the right signature."""
    with pytest.raises(InvalidSignature) as caught:
        WebhookVerifier(SECRET).verify(BODY, header)
    assert caught.value.reason == reason
    text = (
        str(caught.value)
        + repr(caught.value)
        + repr(caught.value.__context__)
        + repr(pickle.loads(pickle.dumps(caught.value)))
    )
    for expected in (HEX, HEX.upper(), base64_of(BODY), URL_SAFE, SECRET):
        assert expected not in text


class Counting:
    """The state of a SHA-256 that counts how often the body goes through any copy of it."""

    def __init__(self, state: Any, hashed: list[bytes]) -> None:
        self._state = state
        self._hashed = hashed

    def copy(self) -> Counting:
        return Counting(self._state.copy(), self._hashed)

    def update(self, data: bytes) -> None:
        self._state.update(data)
        if data == BODY:
            self._hashed.append(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


@pytest.mark.parametrize("write", [hex_of, base64_of])
@pytest.mark.parametrize(("right", "times"), [("new", 1), ("old", 2), ("oldest", 3), ("none of them", 3)])
def test_the_body_is_hashed_once_for_each_secret_until_one_matches(
    write: Callable[..., str], right: str, times: int
) -> None:
    """No secret is tried twice, whatever the encoding of the signature."""
    verifier, hashed = WebhookVerifier(["new", "old", "oldest"]), []
    verifier._states = [(Counting(inner, hashed), outer) for inner, outer in verifier._states]  # type: ignore[misc]  # it acts as a hash
    verifier._inner = verifier._states[0][0]
    with contextlib.suppress(InvalidSignature):
        verifier.verify(BODY, write(BODY, right))
    assert len(hashed) == times


@pytest.mark.parametrize("secrets", [SECRET, ["another", SECRET]])
@pytest.mark.parametrize("scheme", [Scheme(), Scheme(encodings=("base64",))])
def test_no_frame_of_an_error_holds_the_right_signature(secrets: Any, scheme: Scheme) -> None:
    """Error reporters show the locals of every frame: a forger who sees such a report learns nothing from it."""
    with pytest.raises(InvalidSignature) as caught:
        WebhookVerifier(secrets, scheme).verify(BODY, hex_of(BODY, "a third"))
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    shown = [repr(value) for local in frames[1:] for value in local.values()]
    assert len(frames) > 2
    for expected in (HEX, base64_of(BODY)[:-1], repr(mac(BODY)), SECRET):
        assert not any(expected in text for text in shown)


@given(
    body=st.binary(max_size=400),
    header=st.one_of(
        st.none(),
        st.text(),
        st.binary(),
        st.text(alphabet="0123456789abcdefABCDEF=,v1sha256 +/-_", max_size=140),
        st.text(alphabet=st.characters(codec=None), max_size=80),
    ),
)
@example(body=BODY, header="sha256=" * 20)
def test_no_header_does_anything_but_fail(body: bytes, header: Any) -> None:
    """Made-up headers of every kind raise InvalidSignature and nothing else, for every kind of scheme."""
    for scheme in (Scheme(), STRIPE, STANDARD_WEBHOOKS):
        verifier = WebhookVerifier(b"property", scheme)
        with pytest.raises(InvalidSignature):
            verifier.verify(body, header)
        with pytest.raises(InvalidSignature):
            verifier.verify(body, header, headers={"webhook-id": header or "", "webhook-timestamp": header or ""})


@given(
    body=st.binary(max_size=2000),
    secret=st.one_of(st.binary(min_size=1, max_size=200), st.text(min_size=1, max_size=99)),
)
@example(body=b"x", secret=b"k" * 63)
@example(body=b"x", secret=b"k" * 64)
@example(body=b"x", secret=b"k" * 65)
@example(body=b"x", secret=b"\0")
def test_it_agrees_with_the_standard_library(body: bytes, secret: Any) -> None:
    """For every body and key, of any length, the standard library's HMAC is accepted; for another body it is not."""
    key = secret if isinstance(secret, bytes) else secret.encode("utf-8", "surrogatepass")
    if not key.strip(b" \t\r\n"):
        return
    try:
        verifier = WebhookVerifier(secret)
    except ConfigurationError:
        assert any("\ud800" <= letter <= "\udfff" for letter in secret)
        return
    verifier.verify(body, hex_of(body, key))
    verifier.verify(body, base64_of(body, key))
    with pytest.raises(InvalidSignature):
        verifier.verify(body + b"\n", hex_of(body, key))


@pytest.mark.parametrize("secret", ["", b"", " ", "\n", [], (), ["good", ""], None, 5, [None], ["good", 5], object()])
def test_an_unusable_secret_is_a_configuration_error(secret: Any) -> None:
    """An empty or missing secret is found when the verifier is made, not when the first forgery is accepted."""
    with pytest.raises(ConfigurationError, match="webhook secret"):
        WebhookVerifier(secret)


def test_the_secret_is_in_no_text_of_the_verifier() -> None:
    """repr shows how many secrets there are, and none of them."""
    text = repr(WebhookVerifier([SECRET, "other-secret"]))
    assert "2 secrets" in text
    assert SECRET not in text
    assert "other-secret" not in text


class Clock:
    """A clock that stands where it is put."""

    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


STAMPED = Scheme(signed="{timestamp}.{body}", timestamp_header="X-Timestamp", clock=Clock(), tolerance=300)


@pytest.mark.parametrize(
    ("age", "reason"), [(0, None), (300, None), (-300, None), (301, "too_old"), (-301, "too_new"), (10**9, "too_old")]
)
def test_a_timestamp_is_tolerated_both_ways(age: int, reason: str | None) -> None:
    """A signed timestamp may lie so far in the past and in the future, and no further."""
    stamp = str(1_700_000_000 - age)
    signature = hex_of(stamp.encode() + b"." + BODY)
    verifier = WebhookVerifier(SECRET, STAMPED)
    if reason is None:
        verifier.verify(BODY, signature, headers={"x-timestamp": stamp})
        return
    with pytest.raises(InvalidSignature) as caught:
        verifier.verify(BODY, signature, headers={"X-TIMESTAMP": stamp})
    assert caught.value.reason == reason


def test_age_is_told_of_genuine_deliveries_only() -> None:
    """What is forged and old is forged."""
    with pytest.raises(InvalidSignature) as caught:
        WebhookVerifier(SECRET, STAMPED).verify(BODY, HEX, headers={"X-Timestamp": "1"})
    assert caught.value.reason == "mismatch"


@pytest.mark.parametrize("stamp", ["", "now", "-1", "1e3", "1.5", " ", "9" * 16, "１２", "0x10"])
def test_an_unusable_timestamp_is_told_as_such(stamp: str) -> None:
    """Only a plain number of seconds is a timestamp."""
    with pytest.raises(InvalidSignature, match="X-Timestamp") as caught:
        WebhookVerifier(SECRET, STAMPED).verify(BODY, HEX, headers={"X-Timestamp": stamp})
    assert caught.value.reason == "header"


@pytest.mark.parametrize(
    "headers", [None, {}, {"other": "1"}, [("X-Timestamp", "1700000000"), ("x-timestamp", "1700000000")]]
)
def test_a_signed_header_must_be_there_once(headers: Any) -> None:
    """A signed header that is missing, or there twice, leaves open what was signed."""
    with pytest.raises(InvalidSignature, match="X-Timestamp") as caught:
        WebhookVerifier(SECRET, STAMPED).verify(BODY, HEX, headers=headers)
    assert caught.value.reason == "header"


def test_headers_may_be_pairs_of_bytes_and_carry_the_signature() -> None:
    """As ASGI gives them; the signature is found in them when none is passed."""
    signature = hex_of(b"1700000000." + BODY)
    headers = [(b"x-timestamp", b"1700000000"), (b"x-signature", signature.encode()), (b"x-other", b"\xff")]
    WebhookVerifier(SECRET, STAMPED).verify(BODY, None, headers=headers)
    with pytest.raises(InvalidSignature):
        WebhookVerifier(SECRET, STAMPED).verify(BODY + b" ", None, headers=headers)


def test_several_signature_headers_count_as_one_list() -> None:
    """HTTP allows a header to come several times; each of its values counts."""
    headers = [("X-Signature", hex_of(BODY, "another")), ("x-signature", HEX)]
    WebhookVerifier(SECRET).verify(BODY, None, headers=headers)


def test_the_timestamp_may_stand_in_the_signature_header() -> None:
    """t=...,v1=... as the sender wrote it; two timestamps are one too many."""
    scheme = replace(STRIPE, clock=Clock())
    good = hex_of(b"1700000000." + BODY)
    assert accepts(BODY, f"t=1700000000,v1={good}", scheme)
    assert accepts(BODY, f"v1={HEX},v1={good}, t=1700000000", scheme)
    assert not accepts(BODY, f"t=1700000000,t=1700000001,v1={good}", scheme)
    assert not accepts(BODY, f"t=1700000000,v0={good}", scheme)
    assert not accepts(BODY, f"v1={good}", scheme)


def test_an_id_that_could_be_cut_elsewhere_is_refused() -> None:
    """With {id}.{timestamp}.{body} an id with a full stop would give one signature to two messages."""
    scheme = replace(STANDARD_WEBHOOKS, clock=Clock())
    headers = {"webhook-id": "a.1700000000", "webhook-timestamp": "1700000000"}
    content = b"a.1700000000.1700000000." + BODY
    signature = "v1," + base64_of(content, b"key")
    with pytest.raises(InvalidSignature) as caught:
        WebhookVerifier(b"key", scheme).verify(BODY, signature, headers=headers)
    assert caught.value.reason == "header"
    assert accepts(
        BODY, "v1," + base64_of(b"a.1700000000." + BODY, b"key"), scheme, b"key", headers={**headers, "webhook-id": "a"}
    )
    last = Scheme(signed="{body}.{id}", id_header="X-Id")
    assert accepts(BODY, hex_of(BODY + b".a.b"), last, headers={"X-Id": "a.b"})


def test_signed_content_may_come_after_the_body() -> None:
    """A template may put the body anywhere."""
    scheme = Scheme(signed="<{body}|{id}>", id_header="X-Id")
    assert accepts(BODY, hex_of(b"<" + BODY + b"|7>"), scheme, headers={"X-Id": "7"})
    assert not accepts(BODY, hex_of(b"<" + BODY + b"|7>"), scheme, headers={"X-Id": "8"})


@pytest.mark.parametrize("options", [{"scheme": "github"}, {"scheme": Scheme(), "max_body": 0}])
def test_a_verifier_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    """A scheme by name, or a limit of nothing, is found at once."""
    with pytest.raises(ConfigurationError):
        WebhookVerifier(SECRET, **options)


@pytest.mark.parametrize("scheme", [Scheme(), GITHUB, Scheme(labels=("sha256=", ""), encodings=("hex",))])
def test_nearly_every_delivery_takes_the_quick_way(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right signature in hex, with or without its label, is not searched for in the header."""

    def slow(self: WebhookVerifier, *given: object) -> None:
        raise AssertionError("the slow way")

    monkeypatch.setattr(WebhookVerifier, "_verify", slow)
    verifier = WebhookVerifier(SECRET, scheme)
    for label in scheme.labels:
        verifier.verify(b"{}", label + hex_of(b"{}"))
        with pytest.raises(AssertionError, match="slow"):
            verifier.verify(b"{}", label + hex_of(b"{ }"))
    if "" not in scheme.labels:
        with pytest.raises(AssertionError, match="slow"):
            verifier.verify(b"{}", hex_of(b"{}"))


def _refusal(header: Any, *, scheme: Scheme | None = None, headers: Any = None, at: float = 1000.0) -> InvalidSignature:
    scheme = replace(scheme or Scheme(), clock=lambda: at)
    with pytest.raises(InvalidSignature) as caught:
        WebhookVerifier(SECRET.encode(), scheme).verify(b"{}", header, headers=headers)
    return caught.value


WEBHOOK = {"webhook-id": "m1", "webhook-timestamp": "1000"}


RIGHT = sign(SECRET.encode(), b"{}", STANDARD_WEBHOOKS, id="m1", timestamp=1000)["webhook-signature"]


STRIPED = sign(SECRET.encode(), b"{}", STRIPE, timestamp=1000)["Stripe-Signature"]


@pytest.mark.parametrize(
    ("given", "reason", "words"),
    [
        ((5,), "malformed", "X-Signature is no text but int"),
        (("é",), "malformed", "X-Signature has characters outside ASCII"),
        ((" ",), "missing", "X-Signature is missing or empty"),
        (("a" * (MAX_HEADER + 1),), "malformed", "X-Signature has 16385 characters: no signature is as long"),
        (
            ("a" * MAX_HEADER,),
            "malformed",
            "X-Signature holds no SHA-256 signature in hex or base64 with one of the labels"
            " ('', 'sha256=', 'v1=', 'v1,')",
        ),
        (("0" * 64,), "mismatch", "no secret matches the signature"),
    ],
)
def test_the_words_of_a_refusal(given: tuple[Any], reason: str, words: str) -> None:
    """Each kind of fault has its reason for code, and its words for people."""
    error = _refusal(*given)
    assert (error.reason, str(error)) == (reason, words)


@pytest.mark.parametrize(
    ("more", "at", "reason", "words"),
    [
        ({}, 1301.0, "too_old", "signed 301 s ago, which is too long: a replay, or a slow clock"),
        ({}, 699.0, "too_new", "signed 301 s in the future: the clocks disagree"),
        (
            {"webhook-id": None},
            1000.0,
            "header",
            "what is signed includes webhook-id, which is missing (pass headers=)",
        ),
        ({"webhook-id": "a.b"}, 1000.0, "header", "the id in webhook-id has characters that no id may have"),
        ({"webhook-id": "a b"}, 1000.0, "header", "the id in webhook-id has characters that no id may have"),
        (
            {"webhook-timestamp": "1e3"},
            1000.0,
            "header",
            "the timestamp in webhook-timestamp is not a number of seconds",
        ),
    ],
)
def test_the_words_about_what_else_is_signed(more: dict[str, Any], at: float, reason: str, words: str) -> None:
    """Ids and timestamps are named by their headers."""
    headers = {name: value for name, value in (WEBHOOK | more).items() if value is not None}
    error = _refusal(RIGHT, scheme=STANDARD_WEBHOOKS, headers=headers, at=at)
    assert (error.reason, str(error)) == (reason, words)


def test_a_header_that_is_there_twice() -> None:
    """Which of two timestamps was signed cannot be told."""
    pairs = [*WEBHOOK.items(), ("Webhook-Timestamp", "1000")]
    error = _refusal(RIGHT, scheme=STANDARD_WEBHOOKS, headers=pairs)
    assert str(error) == "what is signed includes webhook-timestamp, which is there 2 times"


def test_values_of_headers_may_be_of_any_kind() -> None:
    """Frameworks give text, bytes, or objects that show themselves as text."""
    clock = replace(STANDARD_WEBHOOKS, clock=lambda: 1000.0)
    verifier = WebhookVerifier(SECRET.encode(), clock)
    for stamp in ("1000", b"1000", 1000):
        verifier.verify(b"{}", RIGHT, headers=[("webhook-id", "m1"), ("webhook-timestamp", stamp)])  # type: ignore[list-item]  # as some frameworks do


def test_tabs_separate_too() -> None:
    """Where the timestamp stands in the signature's header, white space of any kind may follow it."""
    verifier = WebhookVerifier(SECRET.encode(), replace(STRIPE, clock=lambda: 1000.0))
    for separator in (",", " ", "\t", ",\t ", "\t,"):
        verifier.verify(b"{}", STRIPED.replace(",", separator))


def test_settings_of_the_verifier() -> None:
    """The least is allowed, and less is refused by name and value."""
    assert WebhookVerifier(SECRET, max_body=1).max_body == 1
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_body": 0}, "max_body must be at least 1 byte, not 0"),
        ({"scheme": 5}, "scheme must be a Scheme, not int"),
        ({"secrets": []}, "no webhook secret is given"),
        ({"secrets": 5}, "a webhook secret must be str or bytes, or several, not int"),
        ({"secrets": [5]}, "a webhook secret must be str or bytes, not int"),
        ({"secrets": " \t\r\n"}, "the webhook secret is empty"),
    ]
    for settings, words in wrong:
        with pytest.raises(ConfigurationError) as caught:
            WebhookVerifier(**({"secrets": SECRET} | settings))
        assert str(caught.value) == words
    WebhookVerifier(b"XX")


def test_the_words_about_a_body_that_is_no_bytes() -> None:
    """They say what to do."""
    with pytest.raises(TypeError) as caught:
        as_bytes({"a": 1})
    assert str(caught.value) == (
        "body must be the bytes as they were received, not dict: the signature covers those bytes, and decoding or"
        " parsing and writing them again gives others"
    )
