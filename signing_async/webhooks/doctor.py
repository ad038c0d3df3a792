"""The doctor: says in words why a signature does not match. Offline, for people; never to accept a delivery by."""

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
from .scheme import Scheme, Secret, around, decode_base64
from .verifier import Headers, Pairs, WebhookVerifier, as_bytes, header_pairs, header_values

MAX_DEVIATIONS = 2
MAX_FOUND = 8  # timestamps and ids to try: every pair of them is
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
    """What was found; ``str`` of it is all of it in words. It holds neither a secret nor an expected signature."""

    accepted: bool
    """Whether the scheme as given accepts the delivery."""
    explained: bool
    """Whether it is known how the delivery was signed."""
    findings: tuple[str, ...]
    """One sentence each, the most important first."""

    def __str__(self) -> str:
        return "\n".join(self.findings)


class Variant(NamedTuple):
    """A key or a body to try; the words say what a match would mean, and are empty for what the scheme expects."""

    words: str
    value: bytes


class Content(NamedTuple):
    """What may be signed around the body."""

    words: str
    before: bytes
    after: bytes


class Method(NamedTuple):
    """How a MAC, or what is taken for one, may be made of a key and a text."""

    words: str
    make: Callable[[bytes, bytes], bytes]


def _hmac(name: str) -> Callable[[bytes, bytes], bytes]:
    return lambda key, text: hmac.digest(key, text, name)


def _hash(*parts: int) -> Callable[[bytes, bytes], bytes]:
    return lambda *texts: hashlib.sha256(b"".join(texts[part] for part in parts)).digest()


METHODS = (
    Method("", _hmac("sha256")),
    Method("signed with HMAC-SHA1 and not with HMAC-SHA256", _hmac("sha1")),
    Method("signed with HMAC-SHA512 and not with HMAC-SHA256", _hmac("sha512")),
    Method("signed with HMAC-SHA384 and not with HMAC-SHA256", _hmac("sha384")),
    Method("signed with HMAC-MD5 and not with HMAC-SHA256", _hmac("md5")),
    Method("signed with SHA-256 of secret and body, which is no HMAC", _hash(0, 1)),
    Method("signed with SHA-256 of body and secret, which is no HMAC", _hash(1, 0)),
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
    """Find out how a saved delivery was signed, and so what is wrong with the secret, the body or the scheme.

    ``headers`` are the delivery's other headers, where a timestamp and an id are looked for.
    """
    scheme = scheme or Scheme()
    body = as_bytes(body)
    pairs = [(name.lower(), value.strip()) for name, value in header_pairs(headers)]
    if header is None:
        header = ", ".join(header_values(pairs, scheme.header)[0])
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    written = _written(text)
    found = _search(_keys(secret, scheme), _bodies(body), _contents(text, pairs, scheme), written)
    refusal = _refusal(secret, body, header, pairs, scheme)
    if refusal is None:
        return Diagnosis(True, True, (f"valid: {found}" if found else "valid: signed as the scheme says",))
    if found is None:
        return Diagnosis(False, False, ("nothing matches", *_facts(body, written), f"the verifier says: {refusal}"))
    return Diagnosis(False, True, (found, f"the verifier says: {refusal}"))


def _refusal(secret: Secret, body: bytes, header: str | bytes, pairs: Pairs, scheme: Scheme) -> str | None:
    try:
        WebhookVerifier(secret, scheme).verify(body, header, headers=pairs)
    except (ConfigurationError, InvalidSignature) as error:
        return str(error)
    return None


def _search(
    keys: list[Variant], bodies: list[Variant], contents: list[Content], written: dict[bytes, str]
) -> str | None:
    """The explanation that deviates least from what the scheme expects."""
    attempts = product(keys, bodies, contents, METHODS)
    likely = [attempt for attempt in attempts if _deviations(attempt) <= MAX_DEVIATIONS]
    for key, body, content, method in sorted(likely, key=_deviations):
        mac = method.make(key.value, content.before + body.value + content.after)
        if mac in written:
            what = f"{written[mac]} of {'a changed body' if body.words else 'the raw body'}"
            return "; ".join(filter(None, (what, body.words, content.words, key.words, method.words)))
    return None


def _deviations(attempt: tuple[Variant, Variant, Content, Method]) -> int:
    return sum(bool(one.words) for one in attempt)


def _written(header: str) -> dict[bytes, str]:
    """Every digest that the header may hold, and how it is written there."""
    found: dict[bytes, str] = {}
    for word in re.findall(r"[0-9A-Za-z+/_-]{22,}={0,2}", header):
        for words, decode in (("base64", decode_base64), ("hex", unhexlify), ("base64 of the hex", _decode_twice)):
            try:
                found[decode(word)] = words
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
    texts.setdefault(text.strip(), "the secret has white space around it")
    texts.setdefault(text.strip().strip("'\""), "the secret has quotes around it")
    texts.setdefault(text + "\n", "the sender's secret has a trailing newline that this one lacks")
    texts.setdefault(text.partition("_")[2], "the secret's prefix is no part of the key")
    keys: dict[bytes, str] = {}
    for plain, words in texts.items():
        for how, decode in (
            ("", expected),
            ("the secret must be taken as it is, without decoding", raw),
            ("the secret must be base64-decoded", decode_base64),
            ("the secret must be hex-decoded", unhexlify),
        ):
            try:
                keys.setdefault(decode(plain), "; ".join(filter(None, (words, how))))
            except ValueError:
                continue
    return [Variant(words, key) for key, words in keys.items() if key]


def _bodies(body: bytes) -> list[Variant]:
    bodies = {body: ""}
    for newline in (b"\n", b"\r\n"):
        bodies.setdefault(body + newline, "the body lost its last line end on the way")
        bodies.setdefault(body.removesuffix(newline), "the body gained a line end on the way")
    bodies.setdefault(body.replace(b"\r\n", b"\n"), "the body's line ends were changed on the way")
    bodies.setdefault(body.replace(b"\n", b"\r\n"), "the body's line ends were changed on the way")
    bodies.setdefault(body.removeprefix(b"\xef\xbb\xbf"), "the body gained a byte order mark on the way")
    bodies.setdefault(b"\xef\xbb\xbf" + body, "the body lost its byte order mark on the way")
    bodies.setdefault(
        body.decode("utf-8", "replace").encode("latin-1", "replace"), "the body was decoded with a wrong charset"
    )
    for again in _encoded_again(body):
        bodies.setdefault(again, "matches after re-encoding the JSON: your framework changed the body")
    return [Variant(words, value) for value, words in bodies.items()]


def _encoded_again(body: bytes) -> Iterator[bytes]:
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
    own_stamp = _stamp_setting(scheme.timestamp_label, scheme.timestamp_header.lower())
    own_id = _id_setting(scheme.id_header.lower())
    # What the scheme names comes first, so that it is not left out where there are many.
    stamps = sorted(_stamps(header, pairs, scheme), key=lambda found: found[1] != own_stamp)[:MAX_FOUND]
    ids = sorted(_ids(pairs, scheme), key=lambda found: found[1] != own_id)[:MAX_FOUND]
    expected = _settings(scheme.signed, own_stamp, own_id)
    contents: dict[tuple[bytes, bytes], str] = {}
    for template, (stamp, stamp_from), (identifier, id_from) in product(
        (scheme.signed, "{body}", *TEMPLATES), stamps or [("", "")], ids or [("", "")]
    ):
        settings = _settings(template, stamp_from, id_from)
        if all(settings):
            words = "" if settings == expected else f"{_covers(template)}: Scheme({', '.join(settings)})"
            contents.setdefault(around(template, identifier, stamp), words)
    return [Content(words, *parts) for parts, words in contents.items()]


def _stamps(header: str, pairs: Pairs, scheme: Scheme) -> Iterator[tuple[str, str]]:
    """Every timestamp that may be meant, and the setting that takes it."""
    for label in dict.fromkeys((scheme.timestamp_label or "t=", "t=")):
        for value in re.findall(rf"(?<!\w){re.escape(label)}([0-9.]+)", header):
            yield value, _stamp_setting(label, "")
    for name, value in pairs:
        if re.fullmatch(r"[0-9]{9,13}", value):
            yield value, _stamp_setting("", name)


def _ids(pairs: Pairs, scheme: Scheme) -> Iterator[tuple[str, str]]:
    """Every id that may be meant, and the setting that takes it."""
    for name, value in pairs:
        if (name == scheme.id_header.lower() or re.search(r"(^|[_-])(id|delivery)$", name)) and value.isascii():
            yield value, _id_setting(name)


def _stamp_setting(label: str, name: str) -> str:
    return f'timestamp_label="{label}"' if label else f'timestamp_header="{name}"'


def _id_setting(name: str) -> str:
    return f'id_header="{name}"'


def _settings(template: str, stamp_from: str, id_from: str) -> list[str]:
    settings = [f"signed={template!r}"]
    settings += [stamp_from] if "{timestamp}" in template else []
    settings += [id_from] if "{id}" in template else []
    return settings


def _covers(template: str) -> str:
    if "{timestamp}" in template:
        return "signed with timestamp"
    return "signed with an id" if "{id}" in template else "signed without a timestamp"


def _facts(body: bytes, written: dict[bytes, str]) -> Iterator[str]:
    lengths = sorted({len(digest) for digest in written})
    sizes = {16: "MD5", 20: "SHA-1", 48: "SHA-384", 64: "SHA-512"}
    if not lengths:
        yield "the header holds nothing that could be a signature in hex or base64"
    elif 32 not in lengths:
        yield "the header holds " + ", ".join(
            f"{size} bytes ({sizes.get(size, 'no known digest')})" for size in lengths
        )
    if not body:
        yield "the body is empty: was it read before, or not saved?"
    yield f"tried with a body of {len(body)} bytes: is the secret the one of this endpoint?"
