"""The verifier: checks that a delivery was signed by a holder of the secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

from .. import _checks
from ..errors import ConfigurationError, InvalidSignature
from .event import MAX_BODY, Event, parse_event
from .scheme import HEX_LENGTH, Scheme, Secret, encode_mac, normalize, prefix_and_suffix

if TYPE_CHECKING:
    from hashlib import _Hash as HASH

Headers = Mapping[str, str] | Iterable[tuple[str | bytes, str | bytes]]
Pairs = list[tuple[str, str]]

MAX_HEADER = 16 * 1024
BLOCK_SIZE = 64
SIGNATURE_LENGTHS = (43, 44, HEX_LENGTH)  # of a SHA-256 digest in unpadded base64, padded base64, and hex
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))
_TIMESTAMP = re.compile("[0-9]{1,15}")
_ID = re.compile("[!-~]+")
_DEFAULT = Scheme()


class WebhookVerifier:
    """Verifies deliveries with one shared secret, or with several during a rotation.

    ``verify`` returns None or raises `InvalidSignature`, whatever the header contains; ``parse`` verifies first::

        verifier = WebhookVerifier([new_secret, old_secret])
        event = verifier.parse(body, request.headers.get("X-Signature"))

    Give it the body as received: bytes, never a string or parsed JSON. If a scheme signs other headers too, pass
    ``headers=`` (a mapping or pairs); the signature is then taken from them if ``signature`` is None.
    """

    __slots__ = ("_entry", "_fast_labels", "_inner", "_names", "_outer", "_states", "max_body", "scheme")

    def __init__(
        self, secrets: Secret | Iterable[Secret], scheme: Scheme = _DEFAULT, *, max_body: int = MAX_BODY
    ) -> None:
        if not isinstance(scheme, Scheme):
            raise ConfigurationError(f"scheme: must be a Scheme, got {type(scheme).__name__}")
        self.scheme: Scheme = scheme
        self.max_body: int = _checks.integer("max_body", max_body)
        self._states = [_key_states(scheme.key(secret)) for secret in _secret_list(secrets)]
        self._inner, self._outer = self._states[0]
        fast = scheme.signs_body_alone and "hex" in scheme.encodings
        self._fast_labels = frozenset(scheme.labels if fast else ())
        self._names = (scheme.header, scheme.timestamp_header, scheme.id_header)
        labels = "|".join(re.escape(label) for label in sorted(scheme.labels, key=len, reverse=True))
        self._entry = re.compile(rf"(?:\A|(?<=[ \t,]))(?:{labels})([^ \t,]+)".encode(), re.IGNORECASE)

    def __repr__(self) -> str:
        return f"WebhookVerifier(<{len(self._states)} secrets>, {self.scheme!r})"

    def verify(self, body: bytes, signature: str | bytes | None, *, headers: Headers | None = None) -> None:
        """Raise `InvalidSignature` unless a signature matches a secret.

        The error's ``reason`` is ``missing``, ``malformed`` or ``mismatch``. If the scheme signs a timestamp or an id,
        it may also be ``header`` (missing or unusable), ``too_old`` or ``too_new``.
        """
        first: HASH | None = None
        if self._fast_labels:  # the usual case, a hex signature over the body alone, costs little more than one hash
            if signature is None:
                signature = ", ".join(header_values(headers, self.scheme.header)[0])
            try:
                inner = self._inner.copy()
                inner.update(body)
                outer = self._outer.copy()
                outer.update(inner.digest())
                first = outer
                expected = outer.hexdigest()
                if (
                    isinstance(signature, str)
                    and signature[:-HEX_LENGTH] in self._fast_labels
                    and compare_digest(expected, signature[-HEX_LENGTH:])  # raises TypeError for non-ASCII text
                ):
                    return
            except (TypeError, BufferError):
                pass  # the general path below reports the cause
            expected = ""  # error reporters show the locals of a frame
        self._verify(body, signature, headers, first)

    def parse(self, body: bytes, signature: str | bytes | None = None, *, headers: Headers | None = None) -> Event:
        """Verify and return the event. Raise `MalformedEvent` for a genuine body that is not an event."""
        self.verify(body, signature, headers=headers)
        received_at = datetime.fromtimestamp(self.scheme.clock(), UTC)
        return parse_event(bytes(body), received_at, max_body=self.max_body)

    def _verify(self, body: bytes, signature: str | bytes | None, headers: Headers | None, first: HASH | None) -> None:
        body = as_bytes(body)
        found = header_values(headers, *self._names)
        text = _signature_text(signature, found[0], self.scheme.header)
        values = [normalize(value) for value in self._entry.findall(text) if len(value) in SIGNATURE_LENGTHS]
        if not values:
            raise InvalidSignature(
                f"{self.scheme.header} contains no SHA-256 signature in {' or '.join(self.scheme.encodings)}"
                f" with one of the labels {self.scheme.labels}",
                reason="malformed",
            )
        timestamp = self._signed_timestamp(text, found[1])
        prefix, suffix = prefix_and_suffix(self.scheme.signed, self._signed_id(found[2]), timestamp)
        if not any(self._matches(mac, values) for mac in self._macs(prefix, body, suffix, first)):
            raise InvalidSignature("no secret matches the signature", reason="mismatch")
        if timestamp:
            self._check_age(int(timestamp))

    def _matches(self, mac: bytes, values: list[bytes]) -> bool:
        expected = [normalize(encode_mac(mac, encoding)) for encoding in self.scheme.encodings]
        return any(compare_digest(one, value) for value in values for one in expected)

    def _macs(self, prefix: bytes, body: bytes, suffix: bytes, first: HASH | None) -> Iterator[bytes]:
        """Yield the MAC of each secret; ``first`` holds that of the first secret if it was computed already."""
        if first is not None:
            yield first.digest()
        for inner_state, outer_state in self._states[first is not None :]:
            inner, outer = inner_state.copy(), outer_state.copy()
            inner.update(prefix)
            inner.update(body)
            inner.update(suffix)
            outer.update(inner.digest())
            yield outer.digest()

    def _signed_timestamp(self, text: bytes, found: list[str]) -> str:
        scheme = self.scheme
        if "{timestamp}" not in scheme.signed:
            return ""
        if scheme.timestamp_label:
            label = scheme.timestamp_label.encode()
            entries = text.replace(b" ", b",").replace(b"\t", b",").split(b",")
            found = [entry.removeprefix(label).decode() for entry in entries if entry.startswith(label)]
        where = scheme.timestamp_header or f"{scheme.header} ({scheme.timestamp_label})"
        value = _single_value(found, where)
        if not _TIMESTAMP.fullmatch(value):
            raise InvalidSignature(f"{where}: must be a timestamp in seconds, got {value[:40]!a}", reason="header")
        return value

    def _signed_id(self, found: list[str]) -> str:
        scheme = self.scheme
        if "{id}" not in scheme.signed:
            return ""
        value = _single_value(found, scheme.id_header)
        # If the id contained the separator, a different id and body could have the same signature.
        separator = scheme.signed.partition("{id}")[2].partition("{")[0]
        if not _ID.fullmatch(value) or (separator and separator in value):
            raise InvalidSignature(f"{scheme.id_header}: contains characters that no id may have", reason="header")
        return value

    def _check_age(self, timestamp: int) -> None:
        age = self.scheme.clock() - timestamp
        if age > self.scheme.tolerance:
            raise InvalidSignature(
                f"signed {age:.0f} s ago: older than the tolerance of {self.scheme.tolerance:g} s; check the clock",
                reason="too_old",
            )
        if -age > self.scheme.tolerance:
            raise InvalidSignature(
                f"signed {-age:.0f} s ahead: beyond the tolerance of {self.scheme.tolerance:g} s; check the clock",
                reason="too_new",
            )


def _secret_list(secrets: Secret | Iterable[Secret]) -> list[Secret]:
    if isinstance(secrets, str | bytes):
        return [secrets]
    if secrets is None or not isinstance(secrets, Iterable):
        raise ConfigurationError(f"webhook secret: must be str or bytes, or several, got {type(secrets).__name__}")
    listed = list(secrets)
    if not listed:
        raise ConfigurationError("webhook secret: must be at least one, got none")
    return listed


def _key_states(key: bytes) -> tuple[HASH, HASH]:
    if len(key) > BLOCK_SIZE:
        key = sha256(key).digest()
    key = key.ljust(BLOCK_SIZE, b"\0")
    return sha256(key.translate(_INNER)), sha256(key.translate(_OUTER))


def as_bytes(body: object) -> bytes:
    """Return the body as bytes. Raise ``TypeError`` if it was already decoded or parsed."""
    if isinstance(body, bytes):
        return body
    try:
        return bytes(memoryview(body))  # type: ignore[arg-type]  # anything but a buffer raises
    except TypeError:
        raise TypeError(
            f"body: must be the bytes as received, got {type(body).__name__}: the signature covers those bytes,"
            " which decoded text or parsed JSON cannot restore"
        ) from None


def header_values(headers: Headers | None, *names: str) -> list[list[str]]:
    """Return all values of each named header; names are case-insensitive."""
    if headers is None:
        return [[] for _ in names]
    found: dict[str, list[str]] = {name.lower(): [] for name in names}
    for name, value in header_pairs(headers):
        values = found.get(name.lower())
        if values is not None:
            values.append(value.strip())
    return [found[name.lower()] for name in names]


def header_pairs(headers: Headers | None) -> Pairs:
    """Return headers of any form as pairs of strings."""
    if headers is None:
        return []
    items: Any = getattr(headers, "items", headers.__iter__)  # not only a Mapping has items()
    return [(_text(name), _text(value)) for name, value in items()]


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _single_value(values: list[str], where: str) -> str:
    if len(values) != 1:
        problem = f"is present {len(values)} times" if values else "is missing (pass headers=)"
        raise InvalidSignature(f"the signature covers {where}, which {problem}", reason="header")
    return values[0]


def _signature_text(signature: object, found: list[str], name: str) -> bytes:
    if signature is None:
        signature = ", ".join(found)
    if not isinstance(signature, str | bytes):
        raise InvalidSignature(f"{name}: must be text, got {type(signature).__name__}", reason="malformed")
    if len(signature) > MAX_HEADER:
        raise InvalidSignature(f"{name} has {len(signature)} characters; the limit is {MAX_HEADER}", reason="malformed")
    if not signature.isascii():
        raise InvalidSignature(f"{name} contains non-ASCII characters", reason="malformed")
    text = signature.encode() if isinstance(signature, str) else signature
    if not text.strip():
        raise InvalidSignature(f"{name} is missing or empty", reason="missing")
    return text
