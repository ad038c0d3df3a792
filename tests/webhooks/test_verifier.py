"""The verifier: accepts genuine deliveries and raises InvalidSignature for everything else."""

from __future__ import annotations

import base64
import math
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
    STANDARD_WEBHOOKS,
    STRIPE,
    InvalidSignature,
    Scheme,
    WebhookVerifier,
    sign,
)
from signing_async.webhooks.verifier import MAX_HEADER
from tests.webhooks.deliveries import SECRET, base64_of, event_body, hex_of, mac

BODY = event_body("evt_1")
HEX = hex_of(BODY)
URL_SAFE = base64.urlsafe_b64encode(mac(BODY)).decode()


def accepts(body: bytes, signature: Any, scheme: Scheme | None = None, secret: Any = SECRET, **options: Any) -> bool:
    """Return whether the verifier accepts; any error but InvalidSignature propagates."""
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
def test_hex_and_base64_in_any_case_alphabet_padding_and_label_are_accepted(label: str, value: str) -> None:
    assert accepts(BODY, label + value)
    assert accepts(BODY, (label + value).encode())
    assert accepts(BODY, f"  {label}{value} ")


@pytest.mark.parametrize("separator", [",", ", ", " ", "\t", ",,  ,"])
@pytest.mark.parametrize("label", ["", "v1=", "v1,", "sha256="])
def test_one_valid_signature_of_several_in_the_header_is_enough(separator: str, label: str) -> None:
    wrong, right = label + hex_of(BODY, "another"), label + HEX
    assert accepts(BODY, separator.join([wrong, right]))
    assert accepts(BODY, separator.join([right, wrong]))
    assert accepts(BODY, separator.join(["v0=zzz", "t=12", wrong, label + base64_of(BODY)]))
    assert not accepts(BODY, separator.join([wrong, wrong]))


@pytest.mark.parametrize("secrets", [["new", "old"], ("old", "new"), {"old"}, b"old", ["x", b"old"]])
@pytest.mark.parametrize(
    "collection", [lambda given: given, lambda given: iter([given] if isinstance(given, bytes) else given)]
)
def test_any_of_several_secrets_is_accepted_during_a_rotation(secrets: Any, collection: Callable[[Any], Any]) -> None:
    assert accepts(BODY, hex_of(BODY, "old"), secret=collection(secrets))
    assert not accepts(BODY, hex_of(BODY, "oldest"), secret=["new", "old"])


@pytest.mark.parametrize("signature", [HEX, "sha256=" + HEX, None, "", "é", b"\xff", 5])
@pytest.mark.parametrize("body", [BODY.decode(), {"event": {"id": "evt_1"}}, ["x"], None, 7])
def test_decoded_or_parsed_body_is_a_type_error_whatever_the_header(body: Any, signature: Any) -> None:
    with pytest.raises(TypeError, match=r"bytes as received, got \w+: the signature covers those") as caught:
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
def test_bad_header_is_an_invalid_signature_with_its_reason_and_never_shows_the_expected_one(
    header: Any, reason: str
) -> None:
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


@pytest.mark.parametrize("secrets", [SECRET, ["another", SECRET]])
@pytest.mark.parametrize("scheme", [Scheme(), Scheme(encodings=("base64",))])
def test_no_traceback_frame_holds_the_expected_signature(secrets: Any, scheme: Scheme) -> None:
    """Error reporters show the locals of every frame."""
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
def test_any_made_up_header_raises_invalid_signature_and_nothing_else(body: bytes, header: Any) -> None:
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
def test_verifier_agrees_with_the_hmac_module_for_any_key_and_body(body: bytes, secret: Any) -> None:
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
def test_unusable_secret_is_a_configuration_error_at_construction(secret: Any) -> None:
    with pytest.raises(ConfigurationError, match="webhook secret"):
        WebhookVerifier(secret)


class Clock:
    """A clock that returns ``now``."""

    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


STAMPED = Scheme(signed="{timestamp}.{body}", timestamp_header="X-Timestamp", clock=Clock(), tolerance=300)


@pytest.mark.parametrize(
    ("age", "reason"), [(0, None), (300, None), (-300, None), (301, "too_old"), (-301, "too_new"), (10**9, "too_old")]
)
def test_signed_timestamp_is_tolerated_in_the_past_and_in_the_future(age: int, reason: str | None) -> None:
    stamp = str(1_700_000_000 - age)
    signature = hex_of(stamp.encode() + b"." + BODY)
    verifier = WebhookVerifier(SECRET, STAMPED)
    if reason is None:
        verifier.verify(BODY, signature, headers={"x-timestamp": stamp})
        return
    with pytest.raises(InvalidSignature) as caught:
        verifier.verify(BODY, signature, headers={"X-TIMESTAMP": stamp})
    assert caught.value.reason == reason


def test_infinite_tolerance_accepts_any_timestamp() -> None:
    verifier = WebhookVerifier(SECRET, replace(STAMPED, tolerance=math.inf))
    verifier.verify(BODY, hex_of(b"1." + BODY), headers={"X-Timestamp": "1"})


def test_forged_delivery_with_an_old_timestamp_is_a_mismatch() -> None:
    with pytest.raises(InvalidSignature) as caught:
        WebhookVerifier(SECRET, STAMPED).verify(BODY, HEX, headers={"X-Timestamp": "1"})
    assert caught.value.reason == "mismatch"


@pytest.mark.parametrize("stamp", ["", "now", "-1", "1e3", "1.5", " ", "9" * 16, "１２", "0x10"])
def test_timestamp_that_is_not_a_plain_number_of_seconds_is_a_header_error(stamp: str) -> None:
    with pytest.raises(InvalidSignature, match="X-Timestamp") as caught:
        WebhookVerifier(SECRET, STAMPED).verify(BODY, HEX, headers={"X-Timestamp": stamp})
    assert caught.value.reason == "header"


@pytest.mark.parametrize(
    "headers", [None, {}, {"other": "1"}, [("X-Timestamp", "1700000000"), ("x-timestamp", "1700000000")]]
)
def test_signed_header_must_be_present_exactly_once(headers: Any) -> None:
    with pytest.raises(InvalidSignature, match="X-Timestamp") as caught:
        WebhookVerifier(SECRET, STAMPED).verify(BODY, HEX, headers=headers)
    assert caught.value.reason == "header"


def test_repeated_signature_headers_count_as_one_list() -> None:
    headers = [("X-Signature", hex_of(BODY, "another")), ("x-signature", HEX)]
    WebhookVerifier(SECRET).verify(BODY, None, headers=headers)


def test_timestamp_label_in_the_signature_header_must_occur_once() -> None:
    scheme = replace(STRIPE, clock=Clock())
    good = hex_of(b"1700000000." + BODY)
    assert accepts(BODY, f"t=1700000000,v1={good}", scheme)
    assert accepts(BODY, f"v1={HEX},v1={good}, t=1700000000", scheme)
    assert not accepts(BODY, f"t=1700000000,t=1700000001,v1={good}", scheme)
    assert not accepts(BODY, f"t=1700000000,v0={good}", scheme)
    assert not accepts(BODY, f"v1={good}", scheme)


def test_id_containing_the_separator_is_refused() -> None:
    """With {id}.{timestamp}.{body}, a dot in the id would give two messages the same signature."""
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


def _refusal(header: Any, *, scheme: Scheme | None = None, headers: Any = None, at: float = 1000.0) -> InvalidSignature:
    scheme = replace(scheme or Scheme(), clock=lambda: at)
    with pytest.raises(InvalidSignature) as caught:
        WebhookVerifier(SECRET.encode(), scheme).verify(b"{}", header, headers=headers)
    return caught.value


WEBHOOK = {"webhook-id": "m1", "webhook-timestamp": "1000"}


VALID = sign(SECRET.encode(), b"{}", STANDARD_WEBHOOKS, id="m1", timestamp=1000)["webhook-signature"]


@pytest.mark.parametrize(
    ("given", "reason", "message"),
    [
        ((5,), "malformed", "X-Signature: must be text, got int"),
        (("é",), "malformed", "X-Signature contains non-ASCII characters"),
        ((" ",), "missing", "X-Signature is missing or empty"),
        (("a" * (MAX_HEADER + 1),), "malformed", "X-Signature has 16385 characters; the limit is 16384"),
        (
            ("a" * MAX_HEADER,),
            "malformed",
            "X-Signature contains no SHA-256 signature in hex or base64 with one of the labels"
            " ('', 'sha256=', 'v1=', 'v1,')",
        ),
        (("0" * 64,), "mismatch", "no secret matches the signature"),
    ],
)
def test_each_refusal_has_a_reason_and_a_message(given: tuple[Any], reason: str, message: str) -> None:
    error = _refusal(*given)
    assert (error.reason, str(error)) == (reason, message)


@pytest.mark.parametrize(
    ("changed", "at", "reason", "message"),
    [
        ({}, 1301.0, "too_old", "signed 301 s ago: older than the tolerance of 300 s; check the clock"),
        ({}, 699.0, "too_new", "signed 301 s ahead: beyond the tolerance of 300 s; check the clock"),
        (
            {"webhook-id": None},
            1000.0,
            "header",
            "the signature covers webhook-id, which is missing (pass headers=)",
        ),
        ({"webhook-id": "a.b"}, 1000.0, "header", "webhook-id: contains characters that no id may have"),
        ({"webhook-id": "a b"}, 1000.0, "header", "webhook-id: contains characters that no id may have"),
        (
            {"webhook-timestamp": "1e3"},
            1000.0,
            "header",
            "webhook-timestamp: must be a timestamp in seconds, got '1e3'",
        ),
    ],
)
def test_refusal_names_the_signed_header_that_is_wrong(
    changed: dict[str, Any], at: float, reason: str, message: str
) -> None:
    headers = {name: value for name, value in (WEBHOOK | changed).items() if value is not None}
    error = _refusal(VALID, scheme=STANDARD_WEBHOOKS, headers=headers, at=at)
    assert (error.reason, str(error)) == (reason, message)


def test_bad_argument_is_refused_by_name_and_value() -> None:
    assert WebhookVerifier(SECRET, max_body=1).max_body == 1
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_body": 0}, "max_body: must be an integer of at least 1, got 0"),
        ({"scheme": 5}, "scheme: must be a Scheme, got int"),
        ({"secrets": []}, "webhook secret: must be at least one, got none"),
        ({"secrets": 5}, "webhook secret: must be str or bytes, got int"),
        ({"secrets": [5]}, "webhook secret: must be str or bytes, got int"),
        ({"secrets": " \t\r\n"}, "webhook secret: must not be empty"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigurationError) as caught:
            WebhookVerifier(**({"secrets": SECRET} | settings))
        assert str(caught.value) == message
    WebhookVerifier(b"XX")
