"""The doctor: explains why a signature does not match. For people, offline; never accept a delivery because of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from binascii import unhexlify
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from ..errors import ConfigurationError, InvalidSignature
from .scheme import Scheme, Secret, decode_base64, prefix_and_suffix
from .verifier import Headers, Pairs, WebhookVerifier, as_bytes, header_pairs, header_values

MAX_DEVIATIONS = 2
MAX_FOUND = 8  # of timestamps, and of ids; every pair is tried
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


class Variant(NamedTuple):
    """A key or body to try. ``meaning`` explains a match; it is empty for what the scheme expects."""

    meaning: str
    value: bytes


class Content(NamedTuple):
    """The bytes that may be signed before and after the body."""

    meaning: str
    prefix: bytes
    suffix: bytes


class Method(NamedTuple):
    """A way to compute a MAC, or something mistaken for one, from key and content."""

    meaning: str
    compute: Callable[[bytes, bytes], bytes]


def _hmac(name: str) -> Callable[[bytes, bytes], bytes]:
    return lambda key, text: hmac.digest(key, text, name)


def _hash(*parts: int) -> Callable[[bytes, bytes], bytes]:
    return lambda *texts: hashlib.sha256(b"".join(texts[part] for part in parts)).digest()


METHODS = (
    Method("", _hmac("sha256")),
    Method("signed with HMAC-SHA1 instead of HMAC-SHA256", _hmac("sha1")),
    Method("signed with HMAC-SHA512 instead of HMAC-SHA256", _hmac("sha512")),
    Method("signed with HMAC-SHA384 instead of HMAC-SHA256", _hmac("sha384")),
    Method("signed with HMAC-MD5 instead of HMAC-SHA256", _hmac("md5")),
    Method("signed with SHA-256 of secret and body, which is not an HMAC", _hash(0, 1)),
    Method("signed with SHA-256 of body and secret, which is not an HMAC", _hash(1, 0)),
    Method("a SHA-256 without any secret, which proves nothing", _hash(1)),
)


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
    scheme = scheme or Scheme()
    body = as_bytes(body)
    pairs = [(name.lower(), value.strip()) for name, value in header_pairs(headers)]
    if header is None:
        header = ", ".join(header_values(pairs, scheme.header)[0])
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    digests = _digests(text)
    cause = _search(_keys(secret, scheme), _bodies(body), _contents(text, pairs, scheme), digests)
    refusal = _refusal(secret, body, header, pairs, scheme)
    if refusal is None:
        return Diagnosis(True, True, (f"valid: {cause}" if cause else "valid: signed as the scheme says",))
    if cause is None:
        return Diagnosis(False, False, ("nothing matches", *_hints(body, digests), f"the verifier says: {refusal}"))
    return Diagnosis(False, True, (cause, f"the verifier says: {refusal}"))


def _refusal(secret: Secret, body: bytes, header: str | bytes, pairs: Pairs, scheme: Scheme) -> str | None:
    try:
        WebhookVerifier(secret, scheme).verify(body, header, headers=pairs)
    except (ConfigurationError, InvalidSignature) as error:
        return str(error)
    return None


def _search(
    keys: list[Variant], bodies: list[Variant], contents: list[Content], digests: dict[bytes, str]
) -> str | None:
    """Return the explanation that deviates least from what the scheme expects."""
    attempts = product(keys, bodies, contents, METHODS)
    likely = [attempt for attempt in attempts if _deviations(attempt) <= MAX_DEVIATIONS]
    for key, body, content, method in sorted(likely, key=_deviations):
        mac = method.compute(key.value, content.prefix + body.value + content.suffix)
        if mac in digests:
            what = f"{digests[mac]} of {'a changed body' if body.meaning else 'the raw body'}"
            return "; ".join(filter(None, (what, body.meaning, content.meaning, key.meaning, method.meaning)))
    return None


def _deviations(attempt: tuple[Variant, Variant, Content, Method]) -> int:
    return sum(bool(part.meaning) for part in attempt)


def _digests(header: str) -> dict[bytes, str]:
    """Return every digest that the header may contain, with its encoding."""
    found: dict[bytes, str] = {}
    for word in re.findall(r"[0-9A-Za-z+/_-]{22,}={0,2}", header):
        for encoding, decode in (("base64", decode_base64), ("hex", unhexlify), ("base64 of the hex", _decode_twice)):
            try:
                found[decode(word)] = encoding
            except ValueError:
                continue
    return found


def _decode_twice(word: str) -> bytes:
    return unhexlify(decode_base64(word))


def _keys(secret: Secret, scheme: Scheme) -> list[Variant]:
    text = secret if isinstance(secret, str) else secret.decode("latin-1")

    def raw(plain: str) -> bytes:
        return plain.encode("utf-8" if isinstance(secret, str) else "latin-1")

    def expected(plain: str) -> bytes:
        return scheme.key(plain if isinstance(secret, str) else raw(plain))

    texts = {text: ""}
    texts.setdefault(text.rstrip("\r\n"), "the secret has a trailing newline")
    texts.setdefault(text.strip(), "the secret has whitespace around it")
    texts.setdefault(text.strip().strip("'\""), "the secret has quotes around it")
    texts.setdefault(text + "\n", "the sender's secret has a trailing newline that yours lacks")
    texts.setdefault(text.partition("_")[2], "the secret's prefix is not part of the key")
    keys: dict[bytes, str] = {}
    for plain, meaning in texts.items():
        for how, decode in (
            ("", expected),
            ("the secret must be used as it is, without decoding", raw),
            ("the secret must be base64-decoded", decode_base64),
            ("the secret must be hex-decoded", unhexlify),
        ):
            try:
                keys.setdefault(decode(plain), "; ".join(filter(None, (meaning, how))))
            except ValueError:
                continue
    return [Variant(meaning, key) for key, meaning in keys.items() if key]


def _bodies(body: bytes) -> list[Variant]:
    bodies = {body: ""}
    for newline in (b"\n", b"\r\n"):
        bodies.setdefault(body + newline, "the body lost its final newline in transit")
        bodies.setdefault(body.removesuffix(newline), "the body gained a final newline in transit")
    bodies.setdefault(body.replace(b"\r\n", b"\n"), "the body's newlines were changed in transit")
    bodies.setdefault(body.replace(b"\n", b"\r\n"), "the body's newlines were changed in transit")
    bodies.setdefault(body.removeprefix(b"\xef\xbb\xbf"), "the body gained a byte order mark in transit")
    bodies.setdefault(b"\xef\xbb\xbf" + body, "the body lost its byte order mark in transit")
    bodies.setdefault(
        body.decode("utf-8", "replace").encode("latin-1", "replace"), "the body was decoded with the wrong charset"
    )
    for encoded in _reencoded(body):
        bodies.setdefault(encoded, "matches after re-encoding the JSON: your framework changed the body")
    return [Variant(meaning, value) for value, meaning in bodies.items()]


def _reencoded(body: bytes) -> Iterator[bytes]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return
    layouts: tuple[dict[str, Any], ...] = (
        {"separators": (",", ":")},
        {"separators": (", ", ": ")},
        {"indent": 2},
        {"indent": 4},
        {"indent": "\t"},
    )
    for layout, ascii_only, sort in product(layouts, (True, False), (False, True)):
        yield json.dumps(value, ensure_ascii=ascii_only, sort_keys=sort, **layout).encode("utf-8", "surrogatepass")


def _contents(header: str, pairs: Pairs, scheme: Scheme) -> list[Content]:
    own_timestamp = _timestamp_setting(scheme.timestamp_label, scheme.timestamp_header.lower())
    own_id = _id_setting(scheme.id_header.lower())
    # The headers that the scheme names come first, so that MAX_FOUND does not exclude them.
    timestamps = sorted(_timestamps(header, pairs, scheme), key=lambda found: found[1] != own_timestamp)[:MAX_FOUND]
    ids = sorted(_ids(pairs, scheme), key=lambda found: found[1] != own_id)[:MAX_FOUND]
    expected = _settings(scheme.signed, own_timestamp, own_id)
    contents: dict[tuple[bytes, bytes], str] = {}
    for template, (timestamp, timestamp_setting), (identifier, id_setting) in product(
        (scheme.signed, "{body}", *TEMPLATES), timestamps or [("", "")], ids or [("", "")]
    ):
        settings = _settings(template, timestamp_setting, id_setting)
        if all(settings):
            meaning = "" if settings == expected else f"{_coverage(template)}: Scheme({', '.join(settings)})"
            contents.setdefault(prefix_and_suffix(template, identifier, timestamp), meaning)
    return [Content(meaning, *parts) for parts, meaning in contents.items()]


def _timestamps(header: str, pairs: Pairs, scheme: Scheme) -> Iterator[tuple[str, str]]:
    """Yield every possible timestamp, with the setting that selects it."""
    for label in dict.fromkeys((scheme.timestamp_label or "t=", "t=")):
        for value in re.findall(rf"(?<!\w){re.escape(label)}([0-9.]+)", header):
            yield value, _timestamp_setting(label, "")
    for name, value in pairs:
        if re.fullmatch(r"[0-9]{9,13}", value):
            yield value, _timestamp_setting("", name)


def _ids(pairs: Pairs, scheme: Scheme) -> Iterator[tuple[str, str]]:
    """Yield every possible id, with the setting that selects it."""
    for name, value in pairs:
        if (name == scheme.id_header.lower() or re.search(r"(^|[_-])(id|delivery)$", name)) and value.isascii():
            yield value, _id_setting(name)


def _timestamp_setting(label: str, name: str) -> str:
    return f'timestamp_label="{label}"' if label else f'timestamp_header="{name}"'


def _id_setting(name: str) -> str:
    return f'id_header="{name}"'


def _settings(template: str, timestamp_setting: str, id_setting: str) -> list[str]:
    settings = [f"signed={template!r}"]
    settings += [timestamp_setting] if "{timestamp}" in template else []
    settings += [id_setting] if "{id}" in template else []
    return settings


def _coverage(template: str) -> str:
    if "{timestamp}" in template:
        return "signed with timestamp"
    return "signed with an id" if "{id}" in template else "signed without a timestamp"


def _hints(body: bytes, digests: dict[bytes, str]) -> Iterator[str]:
    lengths = sorted({len(digest) for digest in digests})
    sizes = {16: "MD5", 20: "SHA-1", 48: "SHA-384", 64: "SHA-512"}
    if not lengths:
        yield "the header contains nothing that could be a signature in hex or base64"
    elif 32 not in lengths:
        yield "the header contains " + ", ".join(
            f"{size} bytes ({sizes.get(size, 'not a known digest')})" for size in lengths
        )
    if not body:
        yield "the body is empty: was it consumed before it was saved?"
    yield f"tried with a body of {len(body)} bytes: is this the secret of this endpoint?"
