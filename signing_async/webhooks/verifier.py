"""The verifier: checks that a delivery was signed by a holder of the secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

from .. import _checks
from ..errors import ConfigurationError, InvalidSignature
from .event import MAX_BODY, Event, parse_event
from .scheme import HEX_LENGTH, Scheme, WebhookSecret, as_bytes, encode_mac, normalize, prefix_and_suffix

if TYPE_CHECKING:
    from hashlib import _Hash as HASH

Headers = Mapping[str, str] | Iterable[tuple[str | bytes, str | bytes]]

MAX_HEADER = 16 * 1024
BLOCK_SIZE = 64
SIGNATURE_LENGTHS = (43, 44, HEX_LENGTH)  # of a SHA-256 digest in unpadded base64, padded base64, and hex
_DEFAULT = Scheme()


class WebhookVerifier:
    """Verifies deliveries with one shared secret, or with several during a rotation.

    ``verify`` returns None or raises `InvalidSignature`, whatever the header contains; ``parse`` verifies first::

        verifier = WebhookVerifier([new_secret, old_secret])
        event = verifier.parse(body, request.headers.get("X-Signature"))

    Give it the body as received: bytes, never a string or parsed JSON. If a scheme signs other headers too, pass
    ``headers=`` (a mapping or pairs); the signature is then taken from them if ``signature`` is None.
    """

    __slots__ = ("_accepts_bare_hex", "_copy_inner", "_copy_outer", "_entry", "_states", "max_body", "scheme")

    def __init__(
        self, secrets: WebhookSecret | Iterable[WebhookSecret], scheme: Scheme = _DEFAULT, *, max_body: int = MAX_BODY
    ) -> None:
        if not isinstance(scheme, Scheme):
            raise ConfigurationError(f"scheme: must be a Scheme, got {type(scheme).__name__}")
        self.scheme: Scheme = scheme
        self.max_body: int = _checks.integer("max_body", max_body)
        is_one = isinstance(secrets, str | bytes) or not isinstance(secrets, Iterable)
        listed: list[Any] = [secrets] if is_one else list(secrets)
        if not listed:
            raise ConfigurationError("webhook secret: must be at least one, got none")
        self._states = [_key_states(scheme.key(secret)) for secret in listed]
        self._copy_inner, self._copy_outer = (state.copy for state in self._states[0])
        self._accepts_bare_hex = scheme.signs_body_alone and "hex" in scheme.encodings and "" in scheme.labels
        labels = "|".join(re.escape(label) for label in sorted(scheme.labels, key=len, reverse=True))
        self._entry = re.compile(rf"(?:\A|(?<=[ \t,]))(?:{labels})([^ \t,]+)".encode(), re.IGNORECASE)

    def __repr__(self) -> str:
        return f"WebhookVerifier(<{len(self._states)} secrets>, {self.scheme!r})"

    def verify(self, body: bytes, signature: str | bytes | None, *, headers: Headers | None = None) -> None:
        """Raise `InvalidSignature` unless a signature matches a secret.

        The error's ``reason`` is ``missing``, ``malformed`` or ``mismatch``. If the scheme signs a timestamp or an id,
        it may also be ``header`` (missing or unusable), ``too_old`` or ``too_new``.
        """
        if signature is None:
            signature = ", ".join(header_values(headers, self.scheme.header))
        if self._accepts_bare_hex:  # the usual case, a hex signature over the body alone, costs little beyond SHA-256
            try:
                inner = self._copy_inner()
                inner.update(body)
                outer = self._copy_outer()
                outer.update(inner.digest())
                if compare_digest(outer.hexdigest(), signature):  # type: ignore[type-var]  # TypeError if it is bytes
                    return
            except (TypeError, BufferError):
                pass  # the general path below reports the cause
        self._verify(as_bytes(body), signature, headers)

    def parse(self, body: bytes, signature: str | bytes | None = None, *, headers: Headers | None = None) -> Event:
        """Verify and return the event. Raise `MalformedEvent` for a genuine body that is not an event."""
        self.verify(body, signature, headers=headers)
        received_at = datetime.fromtimestamp(self.scheme.clock(), UTC)
        return parse_event(bytes(body), received_at, max_body=self.max_body)

    def _verify(self, body: bytes, signature: str | bytes, headers: Headers | None) -> None:
        scheme, name = self.scheme, self.scheme.header
        if not isinstance(signature, str | bytes):
            raise InvalidSignature(f"{name}: must be text, got {type(signature).__name__}", reason="malformed")
        if len(signature) > MAX_HEADER:
            message = f"{name} has {len(signature)} characters; the limit is {MAX_HEADER}"
            raise InvalidSignature(message, reason="malformed")
        if not signature.isascii():
            raise InvalidSignature(f"{name} contains non-ASCII characters", reason="malformed")
        if not signature.strip():
            raise InvalidSignature(f"{name} is missing or empty", reason="missing")
        text = signature.encode() if isinstance(signature, str) else signature
        values = [normalize(value) for value in self._entry.findall(text) if len(value) in SIGNATURE_LENGTHS]
        if not values:
            raise InvalidSignature(
                f"{name} contains no SHA-256 signature in {' or '.join(scheme.encodings)}"
                f" with one of the labels {scheme.labels}",
                reason="malformed",
            )
        timestamp = _signed_timestamp(scheme, text.decode(), headers) if "{timestamp}" in scheme.signed else ""
        identifier = _signed_id(scheme, headers) if "{id}" in scheme.signed else ""
        prefix, suffix = prefix_and_suffix(scheme.signed, identifier, timestamp)
        if not self._matches(values, prefix, body, suffix):
            raise InvalidSignature("no secret matches the signature", reason="mismatch")
        age = scheme.clock() - int(timestamp) if timestamp else 0.0
        if abs(age) > scheme.tolerance:
            reason, relation = ("too_old", "ago: older than") if age > 0 else ("too_new", "ahead: beyond")
            message = f"signed {abs(age):.0f} s {relation} the tolerance of {scheme.tolerance:g} s; check the clock"
            raise InvalidSignature(message, reason=reason)

    def _matches(self, values: list[bytes], *content: bytes) -> bool:
        for first, second in self._states:
            inner, outer = first.copy(), second.copy()
            for part in content:
                inner.update(part)
            outer.update(inner.digest())
            for encoding in self.scheme.encodings:
                expected = normalize(encode_mac(outer.digest(), encoding))
                if any(compare_digest(expected, value) for value in values):
                    return True
        return False


def _signed_timestamp(scheme: Scheme, signature: str, headers: Headers | None) -> str:
    where, label = scheme.timestamp_header, scheme.timestamp_label
    if label:
        where = f"{scheme.header} ({label})"
        entries = re.split("[ \t,]", signature)
        found = [entry.removeprefix(label) for entry in entries if entry.startswith(label)]
    else:
        found = header_values(headers, where)
    value = _single_value(found, where)
    if not re.fullmatch("[0-9]{1,15}", value):
        raise InvalidSignature(f"{where}: must be a timestamp in seconds, got {value[:40]!a}", reason="header")
    return value


def _signed_id(scheme: Scheme, headers: Headers | None) -> str:
    value = _single_value(header_values(headers, scheme.id_header), scheme.id_header)
    # If the id contained the separator, a different id and body could have the same signature.
    separator = scheme.signed.partition("{id}")[2].partition("{")[0]
    if not re.fullmatch("[!-~]+", value) or (separator and separator in value):
        raise InvalidSignature(f"{scheme.id_header}: contains characters that no id may have", reason="header")
    return value


def _single_value(values: list[str], where: str) -> str:
    if len(values) != 1:
        problem = f"is present {len(values)} times" if values else "is missing (pass headers=)"
        raise InvalidSignature(f"the signature covers {where}, which {problem}", reason="header")
    return values[0]


def _key_states(key: bytes) -> tuple[HASH, HASH]:
    key = (sha256(key).digest() if len(key) > BLOCK_SIZE else key).ljust(BLOCK_SIZE, b"\0")
    return sha256(bytes(byte ^ 0x36 for byte in key)), sha256(bytes(byte ^ 0x5C for byte in key))


def header_values(headers: Headers | None, name: str) -> list[str]:
    """Return all values of a header."""
    return [value for found, value in header_pairs(headers) if found == name.lower()]


def header_pairs(headers: Headers | None) -> list[tuple[str, str]]:
    """Return headers of any form as pairs of a lower-case name and a value."""
    items: Any = getattr(headers, "items", (headers or ()).__iter__)()  # not only a Mapping has items()
    return [(_text(name).lower(), _text(value).strip()) for name, value in items]


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
