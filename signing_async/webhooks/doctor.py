"""The doctor: explains why a signature does not match. For people, offline; never accept a delivery because of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from binascii import unhexlify
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..errors import ConfigurationError, InvalidSignature
from .scheme import Scheme, Secret, decode_base64, prefix_and_suffix
from .verifier import Headers, WebhookVerifier, as_bytes, header_pairs

MAX_DEVIATIONS = 2
MAX_FOUND = 8  # of timestamps, and of ids; every pair is tried
BOM = b"\xef\xbb\xbf"
TEMPLATES = (
    "{timestamp}.{body}",
    "{timestamp}{body}",
    "{timestamp}:{body}",
    "v0:{timestamp}:{body}",
    "{timestamp}\n{body}",
    "{body}.{timestamp}",
    "{body}{timestamp}",
    "{id}.{timestamp}.{body}",
    "{timestamp}.{id}.{body}",
    "{id}{timestamp}{body}",
    "{id}.{body}",
    "{id}{body}",
)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"separators": (",", ":")},
    {"separators": (", ", ": ")},
    {"indent": 2},
    {"indent": 4},
    {"indent": "\t"},
)


def _hmac(name: str) -> Callable[[bytes, bytes], bytes]:
    return lambda key, text: hmac.digest(key, text, name)


def _sha256(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


# Each candidate for a part of the signature has a meaning, which is empty for what the scheme expects.
METHODS: dict[Callable[[bytes, bytes], bytes], str] = {
    _hmac("sha256"): "",
    _hmac("sha1"): "signed with HMAC-SHA1 instead of HMAC-SHA256",
    _hmac("sha512"): "signed with HMAC-SHA512 instead of HMAC-SHA256",
    _hmac("sha384"): "signed with HMAC-SHA384 instead of HMAC-SHA256",
    _hmac("md5"): "signed with HMAC-MD5 instead of HMAC-SHA256",
    lambda key, text: _sha256(key + text): "signed with SHA-256 of secret and body, which is not an HMAC",
    lambda key, text: _sha256(text + key): "signed with SHA-256 of body and secret, which is not an HMAC",
    lambda key, text: _sha256(text): "a SHA-256 without any secret, which proves nothing",
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
    secret: Secret,
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
        findings = [cause] if cause else ["nothing matches", *_hints(body, digests)]
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
    decoders: dict[str, Callable[[str], bytes]] = {
        "base64": decode_base64,
        "hex": unhexlify,
        "base64 of the hex": lambda word: unhexlify(decode_base64(word)),
    }
    found: dict[bytes, str] = {}
    for word, (encoding, decode) in product(re.findall(r"[0-9A-Za-z+/_-]{22,}={0,2}", header), decoders.items()):
        with suppress(ValueError):
            found[decode(word)] = encoding
    return found


def _keys(secret: Secret, scheme: Scheme) -> dict[bytes, str]:
    charset = "utf-8" if isinstance(secret, str) else "latin-1"
    text = secret if isinstance(secret, str) else secret.decode(charset)
    texts = {text: ""}
    texts.setdefault(text.rstrip("\r\n"), "the secret has a trailing newline")
    texts.setdefault(text.strip(), "the secret has whitespace around it")
    texts.setdefault(text.strip().strip("'\""), "the secret has quotes around it")
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
    bodies.setdefault(body.removeprefix(BOM), "the body gained a byte order mark in transit")
    bodies.setdefault(BOM + body, "the body lost its byte order mark in transit")
    recoded = body.decode("utf-8", "replace").encode("latin-1", "replace")
    bodies.setdefault(recoded, "the body was decoded with the wrong charset")
    with suppress(ValueError, RecursionError):
        value = json.loads(body)
        for layout, ascii_only, sort in product(LAYOUTS, (True, False), (False, True)):
            encoded = json.dumps(value, ensure_ascii=ascii_only, sort_keys=sort, **layout)
            meaning = "matches after re-encoding the JSON: your framework changed the body"
            bodies.setdefault(encoded.encode("utf-8", "surrogatepass"), meaning)
    return bodies


def _contents(header: str, pairs: list[tuple[str, str]], scheme: Scheme) -> dict[tuple[bytes, bytes], str]:
    """Return what may be signed before and after the body."""
    id_name, timestamp_name = scheme.id_header.lower(), scheme.timestamp_header.lower()
    # Each timestamp and id with the setting that selects it.
    timestamps = [
        (value, f'timestamp_label="{label}"')
        for label in dict.fromkeys((scheme.timestamp_label or "t=", "t="))
        for value in re.findall(rf"(?<!\w){re.escape(label)}([0-9.]+)", header)
    ]
    timestamps += [
        (value, f'timestamp_header="{name}"') for name, value in pairs if re.fullmatch(r"[0-9]{9,13}", value)
    ]
    ids = [
        (value, f'id_header="{name}"')
        for name, value in pairs
        if (name == id_name or re.search(r"(^|[_-])(id|delivery)$", name)) and value.isascii()
    ]
    label = scheme.timestamp_label
    own_timestamp = f'timestamp_label="{label}"' if label else f'timestamp_header="{timestamp_name}"'
    own_id = f'id_header="{id_name}"'
    # The headers that the scheme names come first, so that MAX_FOUND does not exclude them.
    timestamps.sort(key=lambda found: found[1] != own_timestamp)
    ids.sort(key=lambda found: found[1] != own_id)
    contents: dict[tuple[bytes, bytes], str] = {}
    for template, (timestamp, of_timestamp), (identifier, of_id) in product(
        (scheme.signed, "{body}", *TEMPLATES), timestamps[:MAX_FOUND] or [("", "")], ids[:MAX_FOUND] or [("", "")]
    ):
        settings = _settings(template, of_timestamp, of_id)
        if all(settings):
            stamped, named = "{timestamp}" in template, "{id}" in template
            covers = "with timestamp" if stamped else "with an id" if named else "without a timestamp"
            meaning = f"signed {covers}: Scheme({', '.join(settings)})"
            is_expected = settings == _settings(scheme.signed, own_timestamp, own_id)
            contents.setdefault(prefix_and_suffix(template, identifier, timestamp), "" if is_expected else meaning)
    return contents


def _settings(template: str, of_timestamp: str, of_id: str) -> list[str]:
    settings = [f"signed={template!r}"]
    settings += [of_timestamp] if "{timestamp}" in template else []
    settings += [of_id] if "{id}" in template else []
    return settings


def _hints(body: bytes, digests: dict[bytes, str]) -> Iterator[str]:
    sizes = {16: "MD5", 20: "SHA-1", 48: "SHA-384", 64: "SHA-512"}
    lengths = sorted({len(digest) for digest in digests})
    if not lengths:
        yield "the header contains nothing that could be a signature in hex or base64"
    elif 32 not in lengths:
        found = (f"{size} bytes ({sizes.get(size, 'not a known digest')})" for size in lengths)
        yield f"the header contains {', '.join(found)}"
    if not body:
        yield "the body is empty: was it consumed before it was saved?"
    yield f"tried with a body of {len(body)} bytes: is this the secret of this endpoint?"
