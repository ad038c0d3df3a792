"""Mixed traffic with faults for as long as one likes, watched for growth: ``python -m tests.soak --minutes 30``.

The sandbox runs in a process of its own. The traffic comes in rounds; after each the process is quiet, and what it
holds is counted. Ends with exit code 1 if a count grows after the warm-up, or if a call raises anything but an error of
the package.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import random
import sys
import tempfile
import threading
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from signing_async import (
    FileTokenStore,
    OAuth,
    RequestTimeout,
    RetryPolicy,
    Signing,
    SigningClient,
    SigningError,
    Timeouts,
    reconcile,  # private: the size of a ledger
)
from signing_async.sandbox import Profile, Sandbox
from signing_async.webhooks import MemorySeenEvents, Receiver, Wakeups, WebhookVerifier, aiohttp_handler
from tests.pdfs import make_pdf
from tests.servers import serving

SECRET = "the-soak's-webhook-secret"
REDIRECT = "http://127.0.0.1:1/callback"
OPTIONS: dict[str, Any] = {
    "retry": RetryPolicy(base_delay=0.01, max_delay=0.1, settle=0.1),
    "timeout": Timeouts(call=10.0, transfer=10.0, connect=5.0),
}
FAULTS = {
    "*": ("503", "429", "500-after-commit", "502-html", "drop-before-commit", "drop-after-commit", "truncate", "slow"),
    "oauth.token": ("503",),
    "webhooks.deliver": ("duplicate", "wrong-signature", "drop"),
}
ALLOWED = {"blocks": 3_000, "tasks": 3, "files": 43, "threads": 3}
"""By how much the least count of the second half may exceed that of the first: pools differ from round to round."""


async def run_sandbox(webhook_url: str) -> None:
    """Serve until standard input ends; print the address and the credentials first."""
    logging.disable()
    profile = Profile(access_token_lifetime=5, replay_grace=60)
    async with Sandbox(
        profile=profile, seed=1, webhook_url=webhook_url, webhook_secret=SECRET, keep_requests=100
    ) as sandbox:
        for operation, kinds in FAULTS.items():
            for number, kind in enumerate(kinds):
                details = {"seconds": 0.1} if kind == "slow" else {"retry_after": 0} if kind in ("429", "503") else {}
                chance = 0.005 if kind == "429" else 0.02  # after one all requests of a client are slow for a while
                sandbox.faults.add(operation, kind, times=None, probability=chance, seed=number, **details)
        app = sandbox.register_app(REDIRECT)
        facts = {"base_url": sandbox.base_url, "access_token": sandbox.access_token(), "code": sandbox.authorize(app)}
        print(json.dumps({**facts, "id": app.client_id, "secret": app.client_secret}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def sandbox_process(webhook_url: str) -> AsyncIterator[dict[str, str]]:
    command = (sys.executable, "-m", "tests.soak", "--sandbox", webhook_url)
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield json.loads(await child.stdout.readline())
    finally:
        child.stdin.close()
        await child.wait()


def counts() -> dict[str, int]:
    """Return what the process holds while nothing is under way."""
    gc.collect()
    return {
        "blocks": sys.getallocatedblocks(),
        "tasks": len(asyncio.all_tasks()),
        "files": len([*Path("/proc/self/fd").iterdir()]),
        "threads": threading.active_count(),
    }


def growth(rounds: list[dict[str, int]]) -> dict[str, int]:
    """Return by how much each count grew after the warm-up, a third of the rounds."""
    settled = rounds[len(rounds) // 3 :]
    first, second = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    return {name: min(one[name] for one in second) - min(one[name] for one in first) for name in ALLOWED}


class Traffic:
    """Several clients of one sandbox, and what they do."""

    def __init__(self, facts: dict[str, str], folder: Path, wakeups: Wakeups, seed: int) -> None:
        self.facts, self.folder, self.wakeups, self.chance = facts, folder, wakeups, random.Random(seed)
        self.clients: list[SigningClient] = []
        self.done: Counter[str] = Counter()
        self.strange: list[BaseException] = []
        self.pdf = make_pdf(5_000)
        (folder / "large.pdf").write_bytes(make_pdf(400_000))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open clients with a token, with OAuth and a token file, and on a session of the caller; and a view."""
        base_url, token = self.facts["base_url"], self.facts["access_token"]
        store = FileTokenStore(self.folder / "token.json")
        async with AsyncExitStack() as stack:
            self.session = await stack.enter_async_context(aiohttp.ClientSession())
            app = {"client_id": self.facts["id"], "client_secret": self.facts["secret"], "redirect_uri": REDIRECT}
            self.oauth = OAuth(base_url, **app, store=store, retry=OPTIONS["retry"])
            await stack.enter_async_context(self.oauth)
            await self.oauth.exchange(self.facts["code"])
            for client in (
                SigningClient(base_url, token, **OPTIONS),
                SigningClient(base_url, token, session=self.session, **OPTIONS),
                SigningClient(base_url, self.oauth, **OPTIONS),
            ):
                self.clients.append(await stack.enter_async_context(client))
            self.clients.append(self.clients[0].with_options(on_attempt=lambda attempt: None))
            yield

    async def round(self) -> None:
        """Every worker does one thing; some are cancelled in the middle."""
        jobs = [self.whole_way, self.short_lived, self.listing, self.renewing, self.cancelled]
        tasks = [asyncio.create_task(self.guarded(job)) for job in self.chance.choices(jobs, k=8)]
        await asyncio.sleep(self.chance.random() * 0.3)
        self.chance.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def guarded(self, job: Callable[[SigningClient], Awaitable[None]]) -> None:
        try:
            await job(self.chance.choice(self.clients))
            self.done[job.__name__] += 1
        except SigningError as error:
            self.done[type(error).__name__] += 1
        except Exception as error:
            self.strange.append(error)

    async def draft(self, client: SigningClient) -> Signing:
        signing = await client.signings.create(name="Lease", language="EN")
        for source in (self.pdf, self.folder / "large.pdf", self.chunks()):
            await client.documents.upload(signing, source, f"{self.chance.random()}.pdf")
        await client.recipients.add(signing, email="anna@example.com")
        return signing

    async def chunks(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.pdf), 999):
            yield self.pdf[start : start + 999]

    async def whole_way(self, client: SigningClient) -> None:
        signing = await self.draft(client)
        await client.signings.send(signing)
        await client.recipients.remind_pending(signing)
        end = self.chance.choice(("complete", "complete", "cancel"))
        async with self.session.post(f"{self.facts['base_url']}/sandbox/api/signings/{signing.id}/{end}", json={}):
            complete = await client.signings.wait_until_completed(signing, 10.0, 0.05, 0.1, wakeups=self.wakeups)
        for document in complete.documents:
            path = self.folder / f"{self.chance.randrange(9)}.pdf"
            await client.documents.download_signed(complete, document, path)
            async with client.documents.stream_signed(complete, document) as chunks:
                await anext(chunks)

    async def short_lived(self, client: SigningClient) -> None:
        async with SigningClient(self.facts["base_url"], self.facts["access_token"], **OPTIONS) as own:
            await own.signings.get(await self.draft(own))
            with contextlib.suppress(RequestTimeout):
                await own.with_options(timeout=0.01).signings.list()

    async def listing(self, client: SigningClient) -> None:
        async for signing in client.signings.list(limit=5):
            await client.recipients.list(signing)
            if self.chance.random() < 0.2:
                break

    async def renewing(self, client: SigningClient) -> None:
        await asyncio.gather(*(self.oauth.refresh() for _ in range(3)), *(client.me() for _ in range(5)))

    async def cancelled(self, client: SigningClient) -> None:
        call = asyncio.create_task(self.whole_way(client))
        try:
            await asyncio.sleep(self.chance.random() * 0.2)
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)


async def soak(seconds: float, seed: int) -> tuple[list[dict[str, int]], Traffic]:
    """Make rounds of traffic for so long; return the counts after each."""
    logging.getLogger("signing_async").setLevel(logging.ERROR)  # there are many forged deliveries
    reconcile._MAX_SIGNINGS = 50  # a ledger that fills up is no leak
    wakeups, rounds = Wakeups(), list[dict[str, int]]()
    receiver = Receiver(WebhookVerifier(SECRET), wakeups.publish, seen=MemorySeenEvents(max_events=100))
    with tempfile.TemporaryDirectory() as folder:
        async with serving(aiohttp_handler(receiver)) as server, sandbox_process(server.origin) as facts:
            traffic = Traffic(facts, Path(folder), wakeups, seed)
            async with traffic.running():
                until = time.monotonic() + seconds
                while time.monotonic() < until or len(rounds) < 12:
                    await traffic.round()
                    await asyncio.sleep(0.05)  # what was closed is gone a moment later
                    server.requests.clear()
                    rounds.append(counts())
    return rounds, traffic


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sandbox", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sandbox is not None:
        asyncio.run(run_sandbox(given.sandbox))
        return
    rounds, traffic = asyncio.run(soak(given.minutes * 60, given.seed))
    grown = growth(rounds)
    print(f"{len(rounds)} rounds; {dict(traffic.done)}; growth {grown}, allowed {ALLOWED}")
    too_much = [name for name in ALLOWED if grown[name] > ALLOWED[name]]
    if too_much or traffic.strange:
        sys.exit(f"this grows: {too_much}; strange errors of calls: {traffic.strange!r}")


if __name__ == "__main__":
    main()
