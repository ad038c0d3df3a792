"""What a webhook signature covers and how it is encoded: a setting, because senders differ.

The presets are at the end. `webhooks/__init__.py` exports them, and `SCHEMES` in ``cli/webhook.py`` names them.
"""

from __future__ import annotations

import math
import re
import time
from binascii import a2b_base64, b2a_base64, hexlify, unhexlify
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from hmac import digest
from typing import Literal, get_args

from .. import _checks
from ..errors import ConfigurationError

WebhookSecret = str | bytes
KeyEncoding = Literal["utf-8", "hex", "base64"]
Encoding = Literal["hex", "base64"]

HEX_LENGTH = 64  # of a SHA-256 digest
URL_SAFE_TO_STANDARD = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a sender signs: HMAC-SHA256 over ``signed``, sent in ``header``.

    The default accepts every common way to sign the raw body. Make a variant with :func:`dataclasses.replace`::

        Scheme(signed="{timestamp}.{body}", timestamp_header="X-Timestamp", encodings=("hex",))
    """

    header: str = "X-Signature"
    """The header that carries the signature, or several signatures separated by commas or spaces."""
    signed: str = "{body}"
    """What the signature covers: ``{body}`` once, and optionally ``{id}`` and ``{timestamp}``."""
    id_header: str = ""
    """The header whose value is ``{id}``."""
    timestamp_header: str = ""
    """The header whose value is ``{timestamp}``, in Unix seconds."""
    timestamp_label: str = ""
    """The label of a timestamp inside the signature's own header, such as ``t=``."""
    key_encoding: KeyEncoding = "utf-8"
    """How to decode a secret given as ``str`` into the key. A secret given as ``bytes`` is the key itself."""
    key_prefix: str = ""
    """A prefix of a secret given as ``str`` that is not part of the key, such as ``whsec_``."""
    encodings: tuple[Encoding, ...] = ("hex", "base64")
    """Accepted encodings: hex in any case; base64, standard or URL-safe, padded or not."""
    labels: tuple[str, ...] = ("", "sha256=", "v1=", "v1,")
    """Accepted labels before a signature, in any case; ``""`` accepts a signature without a label."""
    tolerance: float = 300.0
    """How many seconds a signed timestamp may lie in the past or in the future."""
    clock: Callable[[], float] = field(default=time.time, repr=False)
    """The current Unix time; also the source of an event's ``received_at``."""

    def __post_init__(self) -> None:
        def require(name: str, rule: str, is_met: object) -> None:
            if not is_met:
                raise ConfigurationError(f"Scheme.{name}: {rule}, got {getattr(self, name)!r}")

        def matches(pattern: str, *values: object) -> bool:
            return all(isinstance(value, str) and re.fullmatch(pattern, value) for value in values)

        require("header", "must not be empty", self.header)
        for name in ("header", "id_header", "timestamp_header"):
            require(name, "must be a header name", matches("[!#$%&'*+.^_`|~0-9A-Za-z-]*", getattr(self, name)))
        for name in ("encodings", "labels"):
            values = getattr(self, name)
            require(name, "must be a tuple of strings", values and not isinstance(values, str))
            object.__setattr__(self, name, tuple(values))
        require("encodings", "must be among hex and base64", {*self.encodings} <= {*get_args(Encoding)})
        require("labels", "must be printable ASCII without spaces", matches("[!-~]*", *self.labels))
        require("timestamp_label", "must be printable ASCII without spaces", matches("[!-~]*", self.timestamp_label))
        require("key_encoding", f"must be among {get_args(KeyEncoding)}", self.key_encoding in get_args(KeyEncoding))
        if self.tolerance != math.inf:
            _checks.number("Scheme.tolerance", self.tolerance, above=0)
        names = re.findall(r"\{(\w*)\}", str(self.signed))
        is_template = names.count("body") == 1 and {*names} <= {"body", "id", "timestamp"}
        require("signed", "must contain {body} once, and otherwise only {id} and {timestamp}", is_template)
        require("signed", "contains {id}, so set Scheme.id_header", "id" not in names or self.id_header)
        has_one_source = "timestamp" not in names or bool(self.timestamp_header) != bool(self.timestamp_label)
        require("signed", "contains {timestamp}, so set either timestamp_header or timestamp_label", has_one_source)

    @property
    def signs_body_alone(self) -> bool:
        """Whether the signature covers only the body."""
        return self.signed == "{body}"

    def key(self, secret: WebhookSecret) -> bytes:
        """Return the HMAC key. Raise `ConfigurationError`, whose text lacks the secret, if the secret is unusable."""
        if not isinstance(secret, str | bytes):
            raise ConfigurationError(f"webhook secret: must be str or bytes, got {type(secret).__name__}")
        key = secret if isinstance(secret, bytes) else b""
        if isinstance(secret, str):
            text = secret.removeprefix(self.key_prefix)
            try:
                if self.key_encoding == "utf-8":
                    key = text.encode()
                else:
                    key = (unhexlify if self.key_encoding == "hex" else decode_base64)(text.strip())
            except ValueError:
                raise ConfigurationError(
                    f"webhook secret: cannot be decoded as {self.key_encoding}; check Scheme.key_encoding"
                ) from None
        # bytes.strip() alone would also strip 0x0b, which a random key may consist of.
        if not key.strip(b" \t\r\n"):
            raise ConfigurationError("webhook secret: must not be empty")
        return key


def prefix_and_suffix(template: str, identifier: str, timestamp: str) -> tuple[bytes, bytes]:
    """Return the signed bytes before and after the body."""
    before, after = template.replace("{timestamp}", timestamp).split("{body}")
    # The id last: it may contain braces, a timestamp may not.
    return before.replace("{id}", identifier).encode(), after.replace("{id}", identifier).encode()


def as_bytes(body: object) -> bytes:
    """Return the body as bytes. Raise ``TypeError`` if it was already decoded or parsed."""
    try:
        return bytes(memoryview(body))  # type: ignore[arg-type]  # anything but a buffer raises
    except TypeError:
        raise TypeError(
            f"body: must be the bytes as received, got {type(body).__name__}: the signature covers those bytes,"
            " which decoded text or parsed JSON cannot restore"
        ) from None


def decode_base64(text: str) -> bytes:
    """Decode standard or URL-safe base64, padded or not. Raise ``ValueError`` for anything else."""
    data = text.encode("ascii").rstrip(b"=").translate(URL_SAFE_TO_STANDARD)
    return a2b_base64(data + b"=" * (-len(data) % 4), strict_mode=True)


def encode_mac(mac: bytes, encoding: Encoding) -> bytes:
    return hexlify(mac) if encoding == "hex" else b2a_base64(mac, newline=False)


def normalize(signature: bytes) -> bytes:
    """Convert to lower-case hex or unpadded standard base64, so that equal MACs compare equal.

    Does not decode: a decoder accepts several base64 texts for the same bytes, but senders write only one of them.
    """
    if len(signature) == HEX_LENGTH:
        return signature.lower()
    return signature.removesuffix(b"=").translate(URL_SAFE_TO_STANDARD)


def sign(
    secret: WebhookSecret, body: bytes, scheme: Scheme | None = None, *, id: str = "", timestamp: int | None = None
) -> dict[str, str]:
    """Return the headers that a sender of this scheme adds to a delivery, for tests and for the sending side.

    Uses the scheme's first label and first encoding, and its clock if no ``timestamp`` is given.
    """
    scheme = scheme or Scheme()
    stamp = str(int(scheme.clock()) if timestamp is None else timestamp)
    before, after = prefix_and_suffix(scheme.signed, id, stamp)
    mac = digest(scheme.key(secret), before + as_bytes(body) + after, sha256)
    signature = scheme.labels[0] + encode_mac(mac, scheme.encodings[0]).decode()
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
"""Standard Webhooks with the header names of its first implementation."""

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
"""``X-Slack-Signature: v0=<hex>`` over version, timestamp and body."""
