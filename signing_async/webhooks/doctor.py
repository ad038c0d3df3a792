"""The doctor: explains why a signature does not match. For people, offline; never accept a delivery because of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from binascii import unhexlify
from codecs import BOM_UTF8
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..errors import ConfigurationError, InvalidSignature
from .scheme import Scheme, WebhookSecret, as_bytes, decode_base64, prefix_and_suffix
from .verifier import Headers, WebhookVerifier, header_pairs

MAX_DEVIATIONS = 2
MAX_FOUND = 8  # of timestamps, and of ids; every pair is tried
TEMPLATES = (
    *("{body}", "{timestamp}.{body}", "{timestamp}{body}", "{timestamp}:{body}", "v0:{timestamp}:{body}"),
    *("{body}{timestamp}", "{id}.{timestamp}.{body}", "{id}{timestamp}{body}", "{id}.{body}"),
)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"separators": (",", ":")},
    {"separators": (", ", ": ")},
    {"indent": 2},
    {"indent": 4},
)
# Each candidate for a part of the signature has a meaning, which is empty for what the scheme expects.
METHODS: dict[Callable[[bytes, bytes], bytes], str] = {
    lambda key, text: hmac.digest(key, text, "sha256"): "",
    lambda key, text: hmac.digest(key, text, "sha1"): "signed with HMAC-SHA1 instead of HMAC-SHA256",
    lambda key, text: hmac.digest(key, text, "sha512"): "signed with HMAC-SHA512 instead of HMAC-SHA256",
    lambda key, text: hashlib.sha256(key + text).digest(): "signed with SHA-256 of secret and body, which is no HMAC",
    lambda key, text: hashlib.sha256(text).digest(): "a SHA-256 without any secret, which proves nothing",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `diagnose`; ``str`` joins the findings. It contains neither a secret nor an expected signature."""

    accepted: bool
    """Whether the given scheme accepts the delivery."""
    explained: bool
    """Whether the doctor found out how the delivery was signed."""
    findings: tuple[str, ...]
    """One sentence each, the most important first."""

    def __str__(self) -> str:
        return "\n".join(self.findings)


def diagnose(
    secret: WebhookSecret,
    body: bytes,
    header: str | bytes | None,
    *,
    headers: Headers | None = None,
    scheme: Scheme | None = None,
) -> Diagnosis:
    """Find out how a saved delivery was signed, and thus what is wrong with the secret, the body or the scheme.

    ``headers`` are the delivery's other headers; they are searched for a timestamp and an id.
    """
    scheme, body, pairs = scheme or Scheme(), as_bytes(body), header_pairs(headers)
    if header is None:
        header = ", ".join(value for name, value in pairs if name == scheme.header.lower())
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    digests = _digests(text)
    cause = _search(_keys(secret, scheme), _bodies(body), _contents(text, pairs, scheme), digests)
    try:
        WebhookVerifier(secret, scheme).verify(body, header, headers=pairs)
    except (ConfigurationError, InvalidSignature) as error:
        hint = f"tried with a body of {len(body)} bytes: is this the secret of this endpoint?"
        if not body:
            hint = "the body is empty: was it consumed before it was saved?"
        elif not digests:
            hint = "the header contains nothing that could be a signature in hex or base64"
        findings = (cause,) if cause else ("nothing matches", hint)
        return Diagnosis(False, cause is not None, (*findings, f"the verifier says: {error}"))
    return Diagnosis(True, True, (f"valid: {cause or 'signed as the scheme says'}",))


def _search(
    keys: dict[bytes, str],
    bodies: dict[bytes, str],
    contents: dict[tuple[bytes, bytes], str],
    digests: dict[bytes, str],
) -> str | None:
    """Return the explanation that deviates least from what the scheme expects."""

    def deviations(attempt: tuple[tuple[object, str], ...]) -> int:
        return sum(bool(meaning) for _, meaning in attempt)

    attempts = product(keys.items(), bodies.items(), contents.items(), METHODS.items())
    likely = [attempt for attempt in attempts if deviations(attempt) <= MAX_DEVIATIONS]
    for (key, of_key), (body, of_body), ((prefix, suffix), of_content), (method, of_method) in sorted(
        likely, key=deviations
    ):
        encoding = digests.get(method(key, prefix + body + suffix))
        if encoding is not None:
            what = f"{encoding} of {'a changed body' if of_body else 'the raw body'}"
            return "; ".join(filter(None, (what, of_body, of_content, of_key, of_method)))
    return None


def _digests(header: str) -> dict[bytes, str]:
    """Return every digest that the header may contain, with its encoding."""
    decoders: dict[str, Callable[[str], bytes]] = {"base64": decode_base64, "hex": unhexlify}
    found: dict[bytes, str] = {}
    for word, (encoding, decode) in product(re.findall(r"[0-9A-Za-z+/_-]{22,}={0,2}", header), decoders.items()):
        with suppress(ValueError):
            found[decode(word)] = encoding
    return found


def _keys(secret: WebhookSecret, scheme: Scheme) -> dict[bytes, str]:
    charset = "utf-8" if isinstance(secret, str) else "latin-1"
    text = secret if isinstance(secret, str) else secret.decode(charset)
    texts = {text: ""}
    texts.setdefault(text.rstrip("\r\n"), "the secret has a trailing newline")
    texts.setdefault(text.strip(" \t\r\n'\""), "the secret has whitespace or quotes around it")
    texts.setdefault(text + "\n", "the sender's secret has a trailing newline that yours lacks")
    texts.setdefault(text.partition("_")[2], "the secret's prefix is not part of the key")
    decoders: dict[str, Callable[[str], bytes]] = {
        "": lambda plain: scheme.key(plain if isinstance(secret, str) else plain.encode(charset)),
        "the secret must be used as it is, without decoding": lambda plain: plain.encode(charset),
        "the secret must be base64-decoded": decode_base64,
        "the secret must be hex-decoded": unhexlify,
    }
    keys: dict[bytes, str] = {}
    for (plain, meaning), (how, decode) in product(texts.items(), decoders.items()):
        with suppress(ValueError):
            keys.setdefault(decode(plain), "; ".join(filter(None, (meaning, how))))
    keys.pop(b"", None)
    return keys


def _bodies(body: bytes) -> dict[bytes, str]:
    bodies = {body: ""}
    for newline in (b"\n", b"\r\n"):
        bodies.setdefault(body + newline, "the body lost its final newline in transit")
        bodies.setdefault(body.removesuffix(newline), "the body gained a final newline in transit")
    for changed in (body.replace(b"\r\n", b"\n"), body.replace(b"\n", b"\r\n")):
        bodies.setdefault(changed, "the body's newlines were changed in transit")
    bodies.setdefault(body.removeprefix(BOM_UTF8), "the body gained a byte order mark in transit")
    with suppress(ValueError, RecursionError):
        value = json.loads(body)
        for layout, ascii_only, sort in product(LAYOUTS, (True, False), (False, True)):
            encoded = json.dumps(value, ensure_ascii=ascii_only, sort_keys=sort, **layout)
            meaning = "matches after re-encoding the JSON: your framework changed the body"
            bodies.setdefault(encoded.encode("utf-8", "surrogatepass"), meaning)
    return bodies


def _contents(header: str, pairs: list[tuple[str, str]], scheme: Scheme) -> dict[tuple[bytes, bytes], str]:
    """Return what may be signed before and after the body."""
    label = scheme.timestamp_label or "t="
    stamps = {f'timestamp_label="{label}"': stamp for stamp in re.findall(rf"(?<!\w){re.escape(label)}(\d+)", header)}
    stamps |= {f'timestamp_header="{name}"': value for name, value in pairs if re.fullmatch(r"[0-9]{9,13}", value)}
    is_id = re.compile(rf"{re.escape(scheme.id_header.lower())}|.*[_-](id|delivery)|id")
    ids = {f'id_header="{name}"': value for name, value in pairs if is_id.fullmatch(name) and value.isascii()}
    own = (
        f'timestamp_label="{scheme.timestamp_label}"',
        f'timestamp_header="{scheme.timestamp_header.lower()}"',
        f'id_header="{scheme.id_header.lower()}"',
    )
    contents: dict[tuple[bytes, bytes], str] = {}
    for template, (of_stamp, stamp), (of_id, identifier) in product(
        (scheme.signed, *TEMPLATES),
        list(stamps.items())[:MAX_FOUND] or [("", "")],
        list(ids.items())[:MAX_FOUND] or [("", "")],
    ):
        is_stamped, has_id = "{timestamp}" in template, "{id}" in template
        if (is_stamped and not stamp) or (has_id and not identifier):
            continue
        covers = "with timestamp" if is_stamped else "with an id" if has_id else "without a timestamp"
        settings = [f"signed={template!r}", *[of_stamp] * is_stamped, *[of_id] * has_id]
        is_expected = template == scheme.signed and (not is_stamped or of_stamp in own) and (not has_id or of_id in own)
        contents.setdefault(
            prefix_and_suffix(template, identifier, stamp),
            "" if is_expected else f"signed {covers}: Scheme({', '.join(settings)})",
        )
    return contents
