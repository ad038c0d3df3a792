"""Verifies one delivery: the floor under any implementation, this package, the standard library, other verifiers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime

from signing_async.webhooks import GITHUB, STANDARD_WEBHOOKS, STRIPE, WebhookVerifier, sign

from .charts import Chart
from .measure import MISSING, Samples, in_process, interleaved, median, panel, quick, ratio, spread
from .report import OURS, Table, draw, judge, show

ROUNDS, SECONDS = 41, 10.0
CALLS = {300: 3000, 2048: 2000, 64 * 1024: 100}
STANDARD_LIBRARY = "hmac.digest + compare_digest"
SECRET = "a webhook secret of a usual length"

Run = Callable[[], object]


def floor(body: bytes) -> Run:
    """What any implementation has to do: two copies of a SHA-256 state, two updates, two digests."""
    inner, outer = hashlib.sha256(b"i" * 64), hashlib.sha256(b"o" * 64)

    def run() -> bytes:
        first = inner.copy()
        first.update(body)
        second = outer.copy()
        second.update(first.digest())
        return second.digest()

    return run


def standard_library(body: bytes) -> Run:
    """What one writes by hand."""
    key, expected = SECRET.encode(), hmac.digest(SECRET.encode(), body, "sha256").hex()
    return lambda: hmac.compare_digest(hmac.digest(key, body, "sha256").hex(), expected)


def own(body: bytes) -> dict[str, Run]:
    """This package, in the schemes of the others too."""
    verify, bare = WebhookVerifier(SECRET).verify, sign(SECRET, body)["X-Signature"]
    labelled = "sha256=" + bare
    github = WebhookVerifier(SECRET, GITHUB).verify
    stripe, stripe_headers = WebhookVerifier(SECRET, STRIPE).verify, sign(SECRET, body, STRIPE)
    standard = WebhookVerifier(SECRET.encode(), STANDARD_WEBHOOKS).verify
    standard_headers = sign(SECRET.encode(), body, STANDARD_WEBHOOKS, id="msg_1")
    return {
        OURS: lambda: verify(body, bare),
        f"{OURS}, sha256=": lambda: verify(body, labelled),
        f"{OURS}, GITHUB": lambda: github(body, labelled),
        f"{OURS}, STRIPE": lambda: stripe(body, stripe_headers["Stripe-Signature"]),
        f"{OURS}, STANDARD_WEBHOOKS": lambda: standard(body, None, headers=standard_headers),
    }


def gidgethub(body: bytes) -> Run:
    """gidgethub.sansio.validate_event."""
    validate = importlib.import_module("gidgethub.sansio").validate_event
    signature = sign(SECRET, body, GITHUB)[GITHUB.header]
    return lambda: validate(body, signature=signature, secret=SECRET)


def githubkit(body: bytes) -> Run:
    """githubkit.webhooks.verify."""
    verify = importlib.import_module("githubkit.webhooks").verify
    signature = sign(SECRET, body, GITHUB)[GITHUB.header]
    assert verify(SECRET, body, signature)
    return lambda: verify(SECRET, body, signature)


def slack_sdk(body: bytes) -> Run:
    """slack_sdk.signature.SignatureVerifier."""
    verifier = importlib.import_module("slack_sdk.signature").SignatureVerifier(SECRET)
    stamp = str(int(time.time()))
    signature = verifier.generate_signature(timestamp=stamp, body=body)
    assert verifier.is_valid(body, stamp, signature)
    return lambda: verifier.is_valid(body, stamp, signature)


def stripe(body: bytes) -> Run:
    """stripe.WebhookSignature.verify_header."""
    verify = importlib.import_module("stripe").WebhookSignature.verify_header
    text, header = body.decode(), sign(SECRET, body, STRIPE)[STRIPE.header]
    return lambda: verify(text, header, SECRET, 300)


def standardwebhooks(body: bytes, module: str = "standardwebhooks") -> Run:
    """standardwebhooks.Webhook.verify, without parsing."""
    webhook = importlib.import_module(module).Webhook(SECRET.encode())
    moment = datetime.now(UTC)
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(moment.timestamp())),
        "webhook-signature": webhook.sign("msg_1", moment, body.decode()),
    }
    options = {} if module == "svix.webhooks" else {"json_parse": False}
    return lambda: webhook.verify(body, headers, **options)


def svix(body: bytes) -> Run:
    """svix.webhooks.Webhook.verify."""
    return standardwebhooks(body, "svix.webhooks")


PEERS = (gidgethub, githubkit, slack_sdk, stripe, standardwebhooks, svix)


def contestants(body: bytes) -> dict[str, Run | None]:
    """Everything that can run here; None for what is not installed."""
    runs: dict[str, Run | None] = {"floor": floor(body), **own(body), STANDARD_LIBRARY: standard_library(body)}
    for peer in PEERS:
        try:
            runs[peer.__name__] = peer(body)
        except ImportError:
            runs[peer.__name__] = None
    return runs


def body_of(size: int) -> bytes:
    """A delivery of so many bytes."""
    event = {"event": {"id": "evt_1", "type": "signing.completed"}, "padding": ""}
    return json.dumps({**event, "padding": "x" * (size - len(json.dumps(event)))}).encode()


def repeated(run: Run, count: int) -> Run:
    """A run long enough to be timed."""

    def many() -> None:
        for _ in range(count):
            run()

    return many


def main() -> None:
    asyncio.run(_compare())


async def _compare() -> None:
    panels = []
    for size, count in CALLS.items():
        calls = 10 if quick() else count
        runs = {
            name: in_process(repeated(run, calls)) if run else None for name, run in contestants(body_of(size)).items()
        }
        samples = await interleaved(runs, rounds=ROUNDS, seconds=SECONDS)
        rows = [
            [
                name,
                f"{median(taken) / calls * 1e6:.2f}",
                f"{ratio(samples, name, 'floor'):.3f}",
                f"{ratio(samples, name, OURS):.2f}",
                "{:.2f} to {:.2f}".format(*spread(samples, name, OURS)),
            ]
            if taken
            else [name, MISSING, "", "", ""]
            for name, taken in samples.items()
        ]
        columns = ("verifier", "µs", "of the floor", f"of {OURS}", "middle half")
        note = f"Medians of {len(samples[OURS])} rounds of {calls} calls."
        show(Table(f"Verifying a body of {size} bytes", columns, rows, note))
        _judge(size, samples)
        names = ["floor", OURS, STANDARD_LIBRARY, *(peer.__name__ for peer in PEERS)]
        panels.append(panel(f"a body of {size} bytes", samples, "floor", names=names))
    axis = "time relative to the floor: two copies of a SHA-256 state, updated; shorter is better"
    draw(Chart("webhooks", "Verifying a webhook", axis, panels))


def _judge(size: int, samples: Samples) -> None:
    if size == 64 * 1024:
        judge("webhooks, 64 KB: of the floor", ratio(samples, OURS, "floor"), at_most=1.02)
    if size != 300:
        return
    judge("webhooks, 300 B: of the floor", ratio(samples, OURS, "floor"), at_most=1.35)
    judge("webhooks, 300 B: of bare hmac", ratio(samples, OURS, STANDARD_LIBRARY), at_most=0.6)
    for peer, bound in (("gidgethub", 2.0), ("stripe", 4.5)):
        if samples[peer]:
            judge(f"webhooks, 300 B: times as fast as {peer}", ratio(samples, peer, OURS), at_least=bound)


if __name__ == "__main__":
    main()
