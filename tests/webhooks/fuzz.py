"""Fuzz the verifier with mutated signatures and bodies: ``python -m tests.webhooks.fuzz 1000000 [seed]``.

Exits with 1 and prints the case if one is accepted, or raises anything but InvalidSignature.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from signing_async.webhooks import GITHUB, STANDARD_WEBHOOKS, STRIPE, InvalidSignature, Scheme, WebhookVerifier

KEY = b"the key that the fuzzer does not forge with"
STAMP = "1700000000"
LABELS = ("", "sha256=", "v1=", "v1,")
SEPARATORS = " \t,"
LABEL = re.compile(r"(?<![^ \t,])(?:sha256=|v1[=,])", re.IGNORECASE)
STANDARD = str.maketrans("-_", "+/")


@dataclass(frozen=True)
class Target:
    """A scheme under test, and the form of its genuine deliveries."""

    name: str
    verifier: WebhookVerifier
    prefix: bytes
    labels: tuple[str, ...]
    spellings: Callable[[bytes], tuple[str, ...]]
    before: str = ""


def _hex(mac: bytes) -> tuple[str, ...]:
    return mac.hex(), mac.hex().upper()


def _base64(mac: bytes) -> tuple[str, ...]:
    texts = base64.b64encode(mac).decode(), base64.urlsafe_b64encode(mac).decode()
    return *texts, *(text.rstrip("=") for text in texts)


def _any(mac: bytes) -> tuple[str, ...]:
    return *_hex(mac), *_base64(mac)


def _verifier(scheme: Scheme) -> WebhookVerifier:
    return WebhookVerifier([KEY], replace(scheme, clock=lambda: float(STAMP)))


TARGETS = (
    Target("default", _verifier(Scheme()), b"", LABELS, _any),
    Target("github", _verifier(GITHUB), b"", ("sha256=",), _hex),
    Target("stripe", _verifier(STRIPE), STAMP.encode() + b".", ("v1=",), _hex, f"t={STAMP},"),
    Target("standard webhooks", _verifier(STANDARD_WEBHOOKS), f"msg_1.{STAMP}.".encode(), ("v1,",), _base64),
)
HEADERS = {"webhook-id": "msg_1", "webhook-timestamp": STAMP}

Verify = Callable[[Target, bytes, str], None]


def verify(target: Target, body: bytes, header: str) -> None:
    """Verify with the package's verifier."""
    target.verifier.verify(body, header, headers=HEADERS)


def fuzz(count: int, seed: int, verify: Verify = verify) -> str | None:
    """Try ``count`` mutations. Return None, or a description of the first that got through."""
    chance = random.Random(seed)
    number = 0
    while number < count:
        target = TARGETS[0] if chance.random() < 0.7 else chance.choice(TARGETS)
        body = b'{"event": {"id": "evt_%d", "type": "signing.completed"}}' % number
        mac = hmac.digest(KEY, target.prefix + body, "sha256")
        mutant, kind = body, chance.random()
        if kind < 0.3:
            mutant, header = _other_body(chance, body), _header(chance, target, mac)
        elif kind < 0.6:
            header = _header(chance, target, _other_mac(chance, mac, target.prefix + body))
        else:
            header = _other_text(chance, _header(chance, target, mac))
            if _is_genuine(target, mac, header):
                continue
        number += 1
        try:
            verify(target, mutant, header)
        except InvalidSignature:
            continue
        except Exception as error:
            return f"{error!r} for {target.name}, mutation {number}: body {mutant!r}, header {header!r}"
        return f"accepted for {target.name}, mutation {number}: body {mutant!r}, header {header!r}"
    return None


def _header(chance: random.Random, target: Target, mac: bytes) -> str:
    return target.before + chance.choice(target.labels) + chance.choice(target.spellings(mac))


def _other_mac(chance: random.Random, mac: bytes, content: bytes) -> bytes:
    changed = bytearray(mac)
    changed[chance.randrange(32)] ^= 1 << chance.randrange(8)
    return chance.choice(
        (
            lambda: bytes(changed),
            lambda: mac[::-1],
            lambda: mac[:31],
            lambda: mac + mac[:1],
            lambda: mac[:-1] + b"\0" if mac[-1] else mac[:-1] + b"\1",
            lambda: bytes(32),
            lambda: hashlib.sha256(content).digest(),
            lambda: hashlib.sha256(KEY + content).digest(),
            lambda: hmac.digest(KEY[:-1], content, "sha256"),
            lambda: hmac.digest(KEY, content, "sha512")[:32],
            lambda: chance.randbytes(32),
        )
    )()


def _other_body(chance: random.Random, body: bytes) -> bytes:
    place = chance.randrange(len(body))
    changed = bytearray(body)
    changed[place] ^= 1 << chance.randrange(8)
    return chance.choice(
        (
            lambda: bytes(changed),
            lambda: body[:place] + body[place + 1 :],
            lambda: body[:place] + chance.randbytes(1) + body[place:],
            lambda: body + b"\n",
            lambda: b" " + body,
            lambda: b"\xef\xbb\xbf" + body,
            lambda: body[:place],
            lambda: body + body,
            lambda: b"",
        )
    )()


def _other_text(chance: random.Random, header: str) -> str:
    place = chance.randrange(len(header))
    letter = chr(chance.choice((chance.randrange(32, 127), chance.randrange(0x250), chance.randrange(0xD000))))
    swapped = header[place].swapcase() if header[place].isalpha() else letter
    return chance.choice(
        (
            lambda: header[:place] + letter + header[place + 1 :],
            lambda: header[:place] + letter + header[place:],
            lambda: header[:place] + header[place + 1 :],
            lambda: header[:place] + swapped + header[place + 1 :],
            lambda: header[:place] + chance.choice(SEPARATORS) + header[place:],
            lambda: header[:place],
            lambda: header[place:],
            lambda: header[:place] + header[place:][::-1],
            lambda: header * 2,
            lambda: header + letter,
        )
    )()


def _is_genuine(target: Target, mac: bytes, header: str) -> bool:
    """Return whether the mutated header still contains a valid signature and the signed timestamp."""
    if target.before and re.findall(r"(?<![^ \t,])t=([^ \t,]*)", header) != [STAMP]:
        return False
    header = LABEL.sub(lambda label: label[0].lower(), header)
    signatures = [label + text for text in target.spellings(mac) for label in target.labels]
    forms = header.lower(), header.translate(STANDARD)  # as hex, and as base64
    return any(_stands_alone(signature, form) for form in forms for signature in signatures if signature in form)


def _stands_alone(signature: str, header: str) -> bool:
    around = header.split(signature)
    pairs = pairwise(around)
    return any(before[-1:] in ("", *SEPARATORS) and after[:1] in ("", *SEPARATORS) for before, after in pairs)


def main() -> None:
    """Run from the command line."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    started = time.perf_counter()
    found = fuzz(count, seed)
    if found:
        sys.exit(f"seed {seed}: {found}")
    print(f"{count} mutated signatures and bodies, seed {seed}: none accepted, {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
