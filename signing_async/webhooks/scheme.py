"""What a webhook signature covers and how it is written: a setting, since senders differ."""

from __future__ import annotations

import math
import re
import time
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64, hexlify, unhexlify
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from hmac import digest
from typing import Literal

from ..errors import ConfigurationError

Secret = str | bytes
KeyEncoding = Literal["utf-8", "hex", "base64"]
Encoding = Literal["hex", "base64"]

KEY_ENCODINGS = ("utf-8", "hex", "base64")
ENCODINGS = ("hex", "base64")
FIELDS = ("body", "id", "timestamp")
HEX_LENGTH = 64  # of a SHA-256
STANDARD = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a sender signs: HMAC-SHA256 over ``signed``, written into ``header``.

    The default accepts every honest way to sign the raw body. A variant is made with :func:`dataclasses.replace`::

        Scheme(signed="{timestamp}.{body}", timestamp_header="X-Timestamp", encodings=("hex",))
    """

    header: str = "X-Signature"
    """The header that carries the signature, or several (separated by commas or spaces)."""
    signed: str = "{body}"
    """What the signature covers: ``{body}`` once, and ``{id}`` or ``{timestamp}`` where they belong."""
    id_header: str = ""
    """The header whose value is ``{id}``."""
    timestamp_header: str = ""
    """The header whose value is ``{timestamp}``, in Unix seconds."""
    timestamp_label: str = ""
    """Where the timestamp stands in the signature's own header, what it is marked with: ``t=``."""
    key_encoding: KeyEncoding = "utf-8"
    """How a secret given as ``str`` becomes the key. A secret given as ``bytes`` is the key itself."""
    key_prefix: str = ""
    """What a secret given as ``str`` may start with that is no part of the key: ``whsec_``."""
    encodings: tuple[Encoding, ...] = ("hex", "base64")
    """Accepted encodings: hex in any case; base64, standard or URL-safe, padded or not."""
    labels: tuple[str, ...] = ("", "sha256=", "v1=", "v1,")
    """What may stand before a signature, in any case; ``""`` is for a signature that stands alone."""
    tolerance: float = 300.0
    """How many seconds a signed timestamp may lie in the past, and in the future."""
    clock: Callable[[], float] = field(default=time.time, repr=False)
    """Unix time; also what an event's ``received_at`` is taken from."""

    def __post_init__(self) -> None:
        _check_names(self)
        _check_choices(self)
        _check_template(self)

    @property
    def signs_body_alone(self) -> bool:
        """Whether nothing but the body is signed."""
        return self.signed == "{body}"

    def key(self, secret: Secret) -> bytes:
        """The bytes that key the HMAC; what cannot be one is a :class:`ConfigurationError` without its text."""
        if not isinstance(secret, str | bytes):
            raise ConfigurationError(f"a webhook secret must be str or bytes, not {type(secret).__name__}")
        key = secret if isinstance(secret, bytes) else self._decode(secret)
        # bytes.strip() would also take the 0x0b of which a random (or RFC 4231's) key may be made
        if not key.strip(b" \t\r\n"):
            raise ConfigurationError("the webhook secret is empty")
        return key

    def _decode(self, secret: str) -> bytes:
        text = secret.removeprefix(self.key_prefix)
        try:
            if self.key_encoding == "utf-8":
                return text.encode()
            if self.key_encoding == "hex":
                return unhexlify(text.strip())
            return decode_base64(text.strip())
        except ValueError:
            raise ConfigurationError(f"the webhook secret is not valid {self.key_encoding}") from None


def around(template: str, identifier: str, timestamp: str) -> tuple[bytes, bytes]:
    """What a template puts before the body, and after it."""
    before, after = template.split("{body}")
    return _fill(before, identifier, timestamp), _fill(after, identifier, timestamp)


def _fill(template: str, identifier: str, timestamp: str) -> bytes:
    # the id comes last: it may hold braces, a timestamp may not
    return template.replace("{timestamp}", timestamp).replace("{id}", identifier).encode()


def _check_names(scheme: Scheme) -> None:
    for name in ("header", "id_header", "timestamp_header"):
        value = getattr(scheme, name)
        if not isinstance(value, str) or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]*", value):
            raise ConfigurationError(f"Scheme.{name} is not a header's name: {value!r}")
    if not scheme.header:
        raise ConfigurationError("Scheme.header is empty")


def _check_choices(scheme: Scheme) -> None:
    if scheme.key_encoding not in KEY_ENCODINGS:
        raise ConfigurationError(f"Scheme.key_encoding must be one of {KEY_ENCODINGS}, not {scheme.key_encoding!r}")
    for name in ("encodings", "labels"):
        value = getattr(scheme, name)
        if isinstance(value, str) or not value:
            raise ConfigurationError(f"Scheme.{name} must be a tuple with at least one member, not {value!r}")
        object.__setattr__(scheme, name, tuple(value))
    for encoding in scheme.encodings:
        if encoding not in ENCODINGS:
            raise ConfigurationError(f"Scheme.encodings may hold {ENCODINGS}, not {encoding!r}")
    for label in (*scheme.labels, scheme.timestamp_label):
        if not isinstance(label, str) or not re.fullmatch(r"[!-~]*", label):
            raise ConfigurationError(f"Scheme.labels must be printable ASCII without spaces, not {label!r}")
    if not (isinstance(scheme.tolerance, int | float) and scheme.tolerance > 0) or math.isnan(scheme.tolerance):
        raise ConfigurationError(f"Scheme.tolerance must be more than 0 seconds, not {scheme.tolerance!r}")


def _check_template(scheme: Scheme) -> None:
    names = re.findall(r"\{(\w*)\}", scheme.signed) if isinstance(scheme.signed, str) else []
    if names.count("body") != 1 or not set(names) <= set(FIELDS):
        raise ConfigurationError(
            f"Scheme.signed must hold {{body}} once, and else only {FIELDS}, not {scheme.signed!r}"
        )
    if "id" in names and not scheme.id_header:
        raise ConfigurationError("Scheme.signed has {id}, and Scheme.id_header does not name its header")
    if "timestamp" in names and bool(scheme.timestamp_header) == bool(scheme.timestamp_label):
        raise ConfigurationError(
            "Scheme.signed has {timestamp}: set either Scheme.timestamp_header or Scheme.timestamp_label"
        )


def decode_base64(text: str) -> bytes:
    """Standard or URL-safe base64, padded or not; ``ValueError`` for anything else."""
    data = text.encode("ascii").rstrip(b"=").translate(STANDARD)
    try:
        return a2b_base64(data + b"=" * (-len(data) % 4), strict_mode=True)
    except Base64Error:
        raise ValueError("not base64") from None


def write(mac: bytes, encoding: Encoding) -> bytes:
    """A MAC as most senders write it."""
    return hexlify(mac) if encoding == "hex" else b2a_base64(mac, newline=False)


def plain(signature: bytes) -> bytes:
    """Hex in lower case, or standard base64 without padding: whatever spells the same MAC becomes the same bytes.

    Nothing is decoded: decoders take more than one base64 text for the same bytes, and no sender writes those.
    """
    if len(signature) == HEX_LENGTH:
        return signature.lower()
    return signature.removesuffix(b"=").translate(STANDARD)


def sign(
    secret: Secret, body: bytes, scheme: Scheme | None = None, *, id: str = "", timestamp: int | None = None
) -> dict[str, str]:
    """The headers that a sender of this scheme puts on a delivery: for tests, and for the sending side.

    The scheme's first label and first encoding are used, and its clock when no ``timestamp`` is given.
    """
    scheme = scheme or Scheme()
    stamp = str(int(scheme.clock()) if timestamp is None else timestamp)
    before, after = around(scheme.signed, id, stamp)
    mac = digest(scheme.key(secret), before + body + after, sha256)
    signature = scheme.labels[0] + write(mac, scheme.encodings[0]).decode()
    if scheme.timestamp_label:
        signature = f"{scheme.timestamp_label}{stamp},{signature}"
    headers = {scheme.header: signature}
    if scheme.id_header:
        headers[scheme.id_header] = id
    if scheme.timestamp_header:
        headers[scheme.timestamp_header] = stamp
    return headers


GITHUB = Scheme(header="X-Hub-Signature-256", labels=("sha256=",), encodings=("hex",))
"""``X-Hub-Signature-256: sha256=<hex>`` over the body."""

STANDARD_WEBHOOKS = Scheme(
    header="webhook-signature",
    signed="{id}.{timestamp}.{body}",
    id_header="webhook-id",
    timestamp_header="webhook-timestamp",
    key_encoding="base64",
    key_prefix="whsec_",
    labels=("v1,",),
    encodings=("base64",),
)
"""The Standard Webhooks specification: ``webhook-signature: v1,<base64> v1,<base64>``."""

SVIX = replace(STANDARD_WEBHOOKS, header="svix-signature", id_header="svix-id", timestamp_header="svix-timestamp")
"""Standard Webhooks under the header names of its first implementation."""

STRIPE = Scheme(
    header="Stripe-Signature",
    signed="{timestamp}.{body}",
    timestamp_label="t=",
    labels=("v1=",),
    encodings=("hex",),
)
"""``Stripe-Signature: t=<seconds>,v1=<hex>`` over the timestamp and the body."""

SLACK = Scheme(
    header="X-Slack-Signature",
    signed="v0:{timestamp}:{body}",
    timestamp_header="X-Slack-Request-Timestamp",
    labels=("v0=",),
    encodings=("hex",),
)
"""``X-Slack-Signature: v0=<hex>`` over a version, the timestamp and the body."""
