"""The verifier: is this delivery from a holder of the secret?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, InvalidSignature
from .event import MAX_BODY, Event, parse_event
from .scheme import HEX_LENGTH, Scheme, Secret, around, plain, write

if TYPE_CHECKING:
    from hashlib import _Hash as HASH

Headers = Mapping[str, str] | Iterable[tuple[str | bytes, str | bytes]]
Pairs = list[tuple[str, str]]

MAX_HEADER = 16 * 1024
BLOCK = 64
LENGTHS = (43, 44, HEX_LENGTH)  # of a SHA-256 in base64 without and with padding, and in hex
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))
_TIMESTAMP = re.compile("[0-9]{1,15}")
_ID = re.compile("[!-~]+")
_DEFAULT = Scheme()


class WebhookVerifier:
    """Verifies deliveries with one shared secret, or with several while they are rotated.

    ``verify`` returns None or raises :class:`InvalidSignature`, whatever the header holds; ``parse`` verifies first::

        verifier = WebhookVerifier([new_secret, old_secret])
        event = verifier.parse(body, request.headers.get("X-Signature"))

    Give it the body as received: bytes, never a string or parsed JSON. Where a scheme signs other headers too, pass
    ``headers=`` (any mapping, or pairs); the signature itself is then found in them when ``signature`` is None.
    """

    __slots__ = ("_bare", "_entry", "_inner", "_labels", "_names", "_outer", "_states", "max_body", "scheme")

    def __init__(
        self, secrets: Secret | Iterable[Secret], scheme: Scheme = _DEFAULT, *, max_body: int = MAX_BODY
    ) -> None:
        if not isinstance(scheme, Scheme):
            raise ConfigurationError(f"scheme must be a Scheme, not {type(scheme).__name__}")
        if max_body < 1:
            raise ConfigurationError(f"max_body must be at least 1 byte, not {max_body!r}")
        self.scheme: Scheme = scheme
        self.max_body: int = max_body
        self._states = [_key_states(scheme.key(secret)) for secret in _each(secrets)]
        self._inner, self._outer = self._states[0]
        quick = scheme.signs_body_alone and "hex" in scheme.encodings
        self._labels = frozenset(scheme.labels if quick else ())
        self._bare = "" in self._labels
        self._names = (scheme.header, scheme.timestamp_header, scheme.id_header)
        labels = "|".join(re.escape(label) for label in sorted(scheme.labels, key=len, reverse=True))
        self._entry = re.compile(rf"(?:\A|(?<=[ \t,]))(?:{labels})([^ \t,]+)".encode(), re.IGNORECASE)

    def __repr__(self) -> str:
        return f"WebhookVerifier(<{len(self._states)} secrets>, {self.scheme!r})"

    def verify(self, body: bytes, signature: str | bytes | None, *, headers: Headers | None = None) -> None:
        """Return when a secret matches a signature; else raise :class:`InvalidSignature`.

        ``reason`` is ``missing``, ``malformed`` or ``mismatch``; where a timestamp or an id is signed also ``header``
        (it is missing or unusable), ``too_old`` or ``too_new``.
        """
        first: HASH | None = None
        if self._labels:  # the body alone in hex: nearly every delivery ends here, at the price of the hashing
            if signature is None:
                signature = _joined(header_values(headers, self.scheme.header)[0])
            try:
                inner = self._inner.copy()
                inner.update(body)
                outer = self._outer.copy()
                outer.update(inner.digest())
                first = outer
                expected = outer.hexdigest()
                # Of two ASCII strings compare_digest compares the bytes; any other header is a TypeError.
                if self._bare and compare_digest(expected, signature):  # type: ignore[type-var]  # as said above
                    return
                text = str(signature)
                if text[:-HEX_LENGTH] in self._labels and compare_digest(expected, text[-HEX_LENGTH:]):
                    return
            except (TypeError, BufferError):
                pass  # said in words below
            expected = ""  # error reporters show the locals of a frame
        self._verify(body, signature, headers, first)

    def parse(self, body: bytes, signature: str | bytes | None = None, *, headers: Headers | None = None) -> Event:
        """Verify, and then read the event; :class:`MalformedEvent` when the body is genuine and holds none."""
        self.verify(body, signature, headers=headers)
        received_at = datetime.fromtimestamp(self.scheme.clock(), UTC)
        return parse_event(bytes(body), received_at, max_body=self.max_body)

    def _verify(self, body: bytes, signature: str | bytes | None, headers: Headers | None, first: HASH | None) -> None:
        body = as_bytes(body)
        found = header_values(headers, *self._names)
        text = _signature_text(signature, found[0], self.scheme.header)
        values = [plain(value) for value in self._entry.findall(text) if len(value) in LENGTHS]
        if not values:
            raise InvalidSignature(
                f"{self.scheme.header} holds no SHA-256 signature in {' or '.join(self.scheme.encodings)}"
                f" with one of the labels {self.scheme.labels}",
                reason="malformed",
            )
        timestamp = self._signed_timestamp(text, found[1])
        before, after = around(self.scheme.signed, self._signed_id(found[2]), timestamp)
        if not any(self._matches(mac, values) for mac in self._macs(before, body, after, first)):
            raise InvalidSignature("no secret matches the signature", reason="mismatch")
        if timestamp:
            self._check_age(int(timestamp))

    def _matches(self, mac: bytes, values: list[bytes]) -> bool:
        expected = [plain(write(mac, encoding)) for encoding in self.scheme.encodings]
        return any(compare_digest(one, value) for value in values for one in expected)

    def _macs(self, before: bytes, body: bytes, after: bytes, first: HASH | None) -> Iterator[bytes]:
        """Yield each secret's MAC; ``first`` is the first one's, if it is known already."""
        if first is not None:
            yield first.digest()
        for inner_state, outer_state in self._states[first is not None :]:
            inner, outer = inner_state.copy(), outer_state.copy()
            inner.update(before)
            inner.update(body)
            inner.update(after)
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
        value = _only(found, where)
        if not _TIMESTAMP.fullmatch(value):
            raise InvalidSignature(f"the timestamp in {where} is not a number of seconds", reason="header")
        return value

    def _signed_id(self, found: list[str]) -> str:
        scheme = self.scheme
        if "{id}" not in scheme.signed:
            return ""
        value = _only(found, scheme.id_header)
        # an id that holds the separator could be cut elsewhere, and another id and body would have the same signature
        separator = scheme.signed.partition("{id}")[2].partition("{")[0]
        if not _ID.fullmatch(value) or (separator and separator in value):
            raise InvalidSignature(f"the id in {scheme.id_header} has characters that no id may have", reason="header")
        return value

    def _check_age(self, timestamp: int) -> None:
        age = self.scheme.clock() - timestamp
        if age > self.scheme.tolerance:
            raise InvalidSignature(
                f"signed {age:.0f} s ago, which is too long: a replay, or a slow clock", reason="too_old"
            )
        if -age > self.scheme.tolerance:
            raise InvalidSignature(f"signed {-age:.0f} s in the future: the clocks disagree", reason="too_new")


def _each(secrets: Secret | Iterable[Secret]) -> list[Secret]:
    if isinstance(secrets, str | bytes):
        return [secrets]
    if secrets is None or not isinstance(secrets, Iterable):
        raise ConfigurationError(f"a webhook secret must be str or bytes, or several, not {type(secrets).__name__}")
    several = list(secrets)
    if not several:
        raise ConfigurationError("no webhook secret is given")
    return several


def _key_states(key: bytes) -> tuple[HASH, HASH]:
    if len(key) > BLOCK:
        key = sha256(key).digest()
    key = key.ljust(BLOCK, b"\0")
    return sha256(key.translate(_INNER)), sha256(key.translate(_OUTER))


def as_bytes(body: object) -> bytes:
    """A body as received; ``TypeError`` for what was decoded or parsed already."""
    if isinstance(body, bytes):
        return body
    try:
        return bytes(memoryview(body))  # type: ignore[arg-type]  # what is no buffer raises
    except TypeError:
        raise TypeError(
            f"body must be the bytes as they were received, not {type(body).__name__}: the signature covers those"
            " bytes, and decoding or parsing and writing them again gives others"
        ) from None


def header_values(headers: Headers | None, *names: str) -> list[list[str]]:
    """Every value of each of the headers named, looked up without regard to case."""
    if headers is None:
        return [[] for _ in names]
    found: dict[str, list[str]] = {name.lower(): [] for name in names}
    for name, value in header_pairs(headers):
        values = found.get(name.lower())
        if values is not None:
            values.append(value.strip())
    return [found[name.lower()] for name in names]


def header_pairs(headers: Headers | None) -> Pairs:
    """Headers of any form as pairs of text."""
    if headers is None:
        return []
    items: Any = getattr(headers, "items", headers.__iter__)  # not only a Mapping has them
    return [(_text(name), _text(value)) for name, value in items()]


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _only(values: list[str], where: str) -> str:
    if len(values) != 1:
        found = "is missing (pass headers=)" if not values else f"is there {len(values)} times"
        raise InvalidSignature(f"what is signed includes {where}, which {found}", reason="header")
    return values[0]


def _joined(values: list[str]) -> str:
    return ", ".join(values)


def _signature_text(signature: object, found: list[str], name: str) -> bytes:
    if signature is None:
        signature = _joined(found)
    if not isinstance(signature, str | bytes):
        raise InvalidSignature(f"{name} is no text but {type(signature).__name__}", reason="malformed")
    if len(signature) > MAX_HEADER:
        raise InvalidSignature(f"{name} has {len(signature)} characters: no signature is as long", reason="malformed")
    if not signature.isascii():
        raise InvalidSignature(f"{name} has characters outside ASCII", reason="malformed")
    text = signature.encode() if isinstance(signature, str) else signature
    if not text.strip():
        raise InvalidSignature(f"{name} is missing or empty", reason="missing")
    return text
