"""The verifier: accepts genuine deliveries and raises InvalidSignature for everything else."""

from __future__ import annotations

import base64
import math
import pickle
import subprocess
import sys
import traceback
from dataclasses import replace
from typing import Any

import pytest

from signing_async import ConfigurationError
from signing_async.webhooks import STANDARD_WEBHOOKS, STRIPE, InvalidSignature, Scheme, WebhookVerifier, sign
from tests.fuzz import webhooks as fuzzed
from tests.fuzz.running import Found, by_mutation
from tests.guides import ROOT
from tests.webhooks.deliveries import SECRET, base64_of, event_body, hex_of, mac

BODY = event_body("evt_1")
HEX = hex_of(BODY)
URL_SAFE = base64.urlsafe_b64encode(mac(BODY)).decode()
NOW = 1_700_000_000
STAMPED = Scheme(signed="{timestamp}.{body}", timestamp_header="X-Timestamp", clock=lambda: NOW)
IDENTIFIED = replace(STANDARD_WEBHOOKS, clock=lambda: NOW)


def reason(body: bytes, signature: Any, scheme: Scheme | None = None, secret: Any = SECRET, **options: Any) -> str:
    """Return why the verifier refuses; an empty string if it accepts."""
    try:
        WebhookVerifier(secret, scheme or Scheme()).verify(body, signature, **options)
    except InvalidSignature as error:
        return error.reason
    return ""


@pytest.mark.parametrize("label", ["", "sha256=", "v1=", "v1,", "SHA256=", "V1,"])
def test_hex_and_base64_in_any_case_alphabet_padding_and_label_are_accepted(label: str) -> None:
    upper, padded = HEX[:32] + HEX[32:].upper(), base64_of(BODY)
    for value in (HEX, upper, padded, padded.rstrip("="), URL_SAFE, URL_SAFE.rstrip("=")):
        for signature in (label + value, (label + value).encode(), f"  {label}{value} "):
            assert reason(BODY, signature) == ""


def test_other_encodings_and_labels_than_those_of_the_scheme_are_refused() -> None:
    assert reason(BODY, HEX, Scheme(encodings=("base64",))) == "mismatch"
    assert reason(BODY, base64_of(BODY), Scheme(encodings=("hex",))) == "mismatch"
    assert reason(BODY, HEX, Scheme(labels=("v1=",))) == "malformed"


@pytest.mark.parametrize("separator", [",", ", ", " ", "\t", ",,  ,"])
def test_one_valid_signature_of_several_in_the_header_is_enough(separator: str) -> None:
    for label in ("", "v1,", "sha256="):
        wrong, right = label + hex_of(BODY, "another"), label + HEX
        assert reason(BODY, separator.join([wrong, right])) == reason(BODY, separator.join([right, wrong])) == ""
        assert reason(BODY, separator.join(["v0=zzz", "t=12", wrong, label + base64_of(BODY)])) == ""
        assert reason(BODY, separator.join([wrong, wrong])) == "mismatch"


@pytest.mark.parametrize("secrets", [["new", "old"], {"old"}, b"old", iter(["x", b"old"])])
def test_any_of_several_secrets_is_accepted_during_a_rotation(secrets: Any) -> None:
    verifier = WebhookVerifier(secrets)
    verifier.verify(BODY, hex_of(BODY, "old"))
    verifier.verify(BODY, None, headers=[("X-Signature", hex_of(BODY, "x")), ("x-signature", hex_of(BODY, "old"))])
    with pytest.raises(InvalidSignature):
        verifier.verify(BODY, hex_of(BODY, "oldest"))


def test_fuzzing_finds_a_verifier_that_accepts_every_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """From genuine deliveries alone, by mutation."""
    monkeypatch.setattr("signing_async.webhooks.verifier.compare_digest", lambda *_: True)
    with pytest.raises(Found, match="a forged delivery was accepted"):
        by_mutation(replace(fuzzed.TARGET, seeds=fuzzed.GENUINE), seconds=1.0, seed=7)


@pytest.mark.parametrize("body", [BODY.decode(), {"event": {"id": "evt_1"}}, None])
def test_decoded_or_parsed_body_is_a_type_error_whatever_the_header(body: Any) -> None:
    words = f"bytes as received, got {type(body).__name__}: the signature covers those"
    for signature in (HEX, None, b"\xff"):
        with pytest.raises(TypeError, match=words):
            WebhookVerifier(SECRET).verify(body, signature)
    with pytest.raises(TypeError, match=words):
        sign(SECRET, body)


@pytest.mark.parametrize(
    ("header", "expected", "message"),
    [
        (None, "missing", "X-Signature is missing or empty"),
        (" \t", "missing", "X-Signature is missing or empty"),
        (HEX[:-1] + "\N{FULLWIDTH DIGIT ONE}", "malformed", "X-Signature contains non-ASCII characters"),
        ("x" * 16_385, "malformed", "X-Signature has 16385 characters; the limit is 16384"),
        (
            "a" * 16_384,
            "malformed",
            "X-Signature contains no SHA-256 signature in hex or base64 with one of the labels"
            " ('', 'sha256=', 'v1=', 'v1,')",
        ),
        (HEX[:-1], "malformed", "contains no SHA-256 signature"),
        ("md5=" + HEX, "malformed", "contains no SHA-256 signature"),
        (HEX[:32] + " " + HEX[32:], "malformed", "contains no SHA-256 signature"),
        (HEX[:-1] + "\0", "mismatch", "no secret matches the signature"),
        (base64_of(BODY)[:-2] + "A=", "mismatch", "no secret matches the signature"),
        (hex_of(BODY, "another"), "mismatch", "no secret matches the signature"),
        (hex_of(b""), "mismatch", "no secret matches the signature"),
        (5, "malformed", "X-Signature: must be text, got int"),
    ],
)
def test_bad_header_is_an_invalid_signature_with_its_reason_and_never_shows_the_expected_one(
    header: Any, expected: str, message: str
) -> None:
    with pytest.raises(InvalidSignature) as caught:
        WebhookVerifier(SECRET).verify(BODY, header)
    assert caught.value.reason == expected
    assert message in str(caught.value)
    text = repr(caught.value) + repr(caught.value.__context__) + repr(pickle.loads(pickle.dumps(caught.value)))
    assert not any(hidden in str(caught.value) + text for hidden in (HEX, base64_of(BODY), URL_SAFE, SECRET))


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"secrets": []}, "webhook secret: must be at least one, got none"),
        ({"secrets": None}, "webhook secret: must be str or bytes, got NoneType"),
        ({"secrets": ["good", " \t\r\n"]}, "webhook secret: must not be empty"),
        ({"secrets": "new", "scheme": "old"}, "scheme: must be a Scheme, got str"),
        ({"secrets": "k", "max_body": 0}, "max_body: must be an integer of at least 1, got 0"),
    ],
)
def test_unusable_setting_is_a_configuration_error_at_construction(settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        WebhookVerifier(**settings)


# Signed timestamps and ids


@pytest.mark.parametrize(
    ("age", "expected"), [(0, ""), (300, ""), (-300, ""), (301, "too_old"), (-301, "too_new"), (10**9, "too_old")]
)
def test_signed_timestamp_is_tolerated_in_the_past_and_in_the_future(age: int, expected: str) -> None:
    stamp = str(NOW - age)
    signature = hex_of(stamp.encode() + b"." + BODY)
    assert reason(BODY, signature, STAMPED, headers={"x-timestamp": stamp}) == expected
    assert reason(BODY, signature, replace(STAMPED, tolerance=math.inf), headers={"X-TIMESTAMP": stamp}) == ""
    assert reason(BODY, HEX, STAMPED, headers={"X-Timestamp": stamp}) == "mismatch"


def test_signed_header_must_be_present_exactly_once_and_a_plain_number_of_seconds() -> None:
    unusable = [{"X-Timestamp": stamp} for stamp in ("", "now", "-1", "1e3", "9" * 16, "１２")]
    for headers in (None, {"other": "1"}, [("X-Timestamp", str(NOW)), ("x-timestamp", str(NOW))], *unusable):
        assert reason(BODY, HEX, STAMPED, headers=headers) == "header"


def test_timestamp_label_in_the_signature_header_must_occur_once() -> None:
    scheme = replace(STRIPE, clock=lambda: NOW)
    good = hex_of(b"1700000000." + BODY)
    assert reason(BODY, f"v1={HEX},v1={good}, t=1700000000", scheme) == ""
    assert reason(BODY, f"t=1700000000,t=1700000001,v1={good}", scheme) == "header"
    assert reason(BODY, f"v1={good}", scheme) == "header"
    assert reason(BODY, f"t=1700000000,v0={good}", scheme) == "malformed"


@pytest.mark.parametrize(("identifier", "expected"), [("a", ""), ("a.1700000000", "header"), ("a b", "header")])
def test_id_containing_the_separator_or_a_space_is_refused(identifier: str, expected: str) -> None:
    """With {id}.{timestamp}.{body}, a dot in the id would give two messages the same signature."""
    headers = {"webhook-id": identifier, "webhook-timestamp": str(NOW)}
    signature = "v1," + base64_of(f"{identifier}.{NOW}.".encode() + BODY, b"key")
    assert reason(BODY, signature, IDENTIFIED, b"key", headers=headers) == expected


def test_verifier_loads_the_standard_library_only_and_no_asyncio() -> None:
    code = (
        "import sys; before = set(sys.modules); import signing_async.webhooks as w;"
        "w.WebhookVerifier('k'); new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'signing_async'}), 'asyncio' in new)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip() == "[] False", done.stderr
