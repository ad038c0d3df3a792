"""Verifies one delivery: the floor under any implementation, this package, by hand, gidgethub and stripe."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib
import json
from collections.abc import Callable

from signing_async.webhooks import GITHUB, STRIPE, WebhookVerifier, sign

from .charts import Chart
from .measure import Samples, comparison, in_process, interleaved, panel, quick, ratio
from .report import OURS, draw, judge, show

ROUNDS, SECONDS = 41, 10.0
CALLS = {300: 3000, 64 * 1024: 100}
BY_HAND = "hmac.digest + compare_digest"
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


def own(body: bytes) -> Run:
    """This package."""
    verify, signature = WebhookVerifier(SECRET).verify, sign(SECRET, body)["X-Signature"]
    return lambda: verify(body, signature)


def gidgethub(body: bytes) -> Run:
    """gidgethub.sansio.validate_event."""
    validate = importlib.import_module("gidgethub.sansio").validate_event
    signature = sign(SECRET, body, GITHUB)[GITHUB.header]
    return lambda: validate(body, signature=signature, secret=SECRET)


def stripe(body: bytes) -> Run:
    """stripe.WebhookSignature.verify_header."""
    verify = importlib.import_module("stripe").WebhookSignature.verify_header
    text, header = body.decode(), sign(SECRET, body, STRIPE)[STRIPE.header]
    return lambda: verify(text, header, SECRET, 300)


PEERS = (gidgethub, stripe)


def contestants(body: bytes) -> dict[str, Run | None]:
    """Everything that can run here; None for what is not installed."""
    runs: dict[str, Run | None] = {"floor": floor(body), OURS: own(body), BY_HAND: standard_library(body)}
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
        show(comparison(f"Verifying a body of {size} bytes", samples, "floor", count=calls))
        _judge(size, samples)
        panels.append(panel(f"a body of {size} bytes", samples, "floor"))
    axis = "time relative to the floor: two copies of a SHA-256 state, updated; shorter is better"
    draw(Chart("webhooks", "Verifying a webhook", axis, panels))


def _judge(size: int, samples: Samples) -> None:
    if size == 64 * 1024:
        judge("webhooks, 64 KB: of the floor", ratio(samples, OURS, "floor"), at_most=1.02)
    if size != 300:
        return
    judge("webhooks, 300 B: of the floor", ratio(samples, OURS, "floor"), at_most=1.12)
    judge("webhooks, 300 B: of bare hmac", ratio(samples, OURS, BY_HAND), at_most=0.6)
    for peer, bound in (("gidgethub", 2.0), ("stripe", 4.5)):
        if samples[peer]:
            judge(f"webhooks, 300 B: times as fast as {peer}", ratio(samples, peer, OURS), at_least=bound)


if __name__ == "__main__":
    main()
