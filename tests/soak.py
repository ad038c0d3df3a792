"""Mixed traffic with faults for as long as one likes, watched for growth: ``python -m tests.soak --minutes 30``.

The sandbox runs in a process of its own. The traffic comes in rounds; after each the process is quiet, and what it
holds is counted: memory, objects, tasks, sockets, files and threads. Ends with exit code 1 when any of these grows
after the warm-up, or when anything but an error of the package comes out of a call.
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
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from signing_async import FileTokenStore, OAuth, RetryPolicy, Signing, SigningClient, SigningError, Timeouts
from signing_async.documents.source import Source
from signing_async.webhooks import MemorySeenEvents, Receiver, Wakeups, WebhookVerifier, aiohttp_handler
from tests.pdfs import make_pdf

SECRET = "the-soak's-webhook-secret"
REDIRECT = "http://127.0.0.1:1/callback"
WORKERS = 10
QUICK = RetryPolicy(base_delay=0.01, max_delay=0.1, settle=0.1)
TIMES = Timeouts(call=10.0, transfer=10.0, connect=5.0)
FAULTS: tuple[tuple[str, str, float, dict[str, Any]], ...] = (
    ("*", "503", 0.02, {"retry_after": None}),
    ("*", "429", 0.02, {"retry_after": 0}),
    ("*", "500-after-commit", 0.02, {}),
    ("*", "502-html", 0.01, {}),
    ("*", "drop-before-commit", 0.02, {}),
    ("*", "drop-after-commit", 0.02, {}),
    ("*", "truncate", 0.01, {}),
    ("*", "empty", 0.01, {}),
    ("*", "not-json", 0.01, {}),
    ("*", "expired-token", 0.01, {}),
    ("*", "slow", 0.02, {"seconds": 0.1}),
    ("oauth.token", "503", 0.1, {"retry_after": None}),
    ("webhooks.deliver", "duplicate", 0.1, {}),
    ("webhooks.deliver", "wrong-signature", 0.05, {}),
    ("webhooks.deliver", "drop", 0.05, {}),
)


# The sandbox's process


async def run_sandbox(webhook_url: str) -> None:
    """Serve until standard input ends; say first where, and how to get in."""
    from signing_async.sandbox import Profile, Sandbox

    logging.disable()  # it tells of clients that have hung up
    # A refresh whose answer is lost is made again with the same token.
    profile = Profile(access_token_lifetime=5, replay_grace=60)
    async with Sandbox(
        profile=profile, seed=1, webhook_url=webhook_url, webhook_secret=SECRET, keep_requests=100
    ) as sandbox:
        for number, (operation, kind, probability, details) in enumerate(FAULTS):
            sandbox.faults.add(operation, kind, times=None, probability=probability, seed=number, **details)
        app = sandbox.register_app(REDIRECT)
        told = {
            "base_url": sandbox.base_url,
            "access_token": sandbox.access_token(),
            "client_id": app.client_id,
            "client_secret": app.client_secret,
            "code": sandbox.authorize(app),
        }
        print(json.dumps(told), flush=True)
        await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def sandbox_process(webhook_url: str) -> AsyncIterator[dict[str, str]]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.soak",
        "--sandbox",
        webhook_url,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield json.loads(await child.stdout.readline())
    finally:
        child.stdin.close()
        await child.wait()


# What is counted


@dataclass(frozen=True)
class Sample:
    """What the process holds while nothing is under way."""

    minute: float
    rss_mb: float
    blocks: int
    """Python's own count of the pieces of memory in use."""
    tasks: int
    sockets: int
    files: int
    threads: int


def sample(began: float) -> Sample:
    gc.collect()
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    sockets = sum(link.startswith("socket:") for link in links)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return Sample(
        (time.monotonic() - began) / 60,
        resident / 2**20,
        sys.getallocatedblocks(),
        len(asyncio.all_tasks()),
        sockets,
        len(links) - sockets,
        threading.active_count(),
    )


# What may be added over the whole time after the warm-up. A leak of one object a call is thousands of blocks; and of
# sockets there are as many as wait in the pools, which differs from round to round.
ALLOWED = {"rss_mb": 8.0, "blocks": 3_000, "tasks": 3, "sockets": 40, "files": 3, "threads": 3}


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """How much each count has grown since the warm-up, a third of the time, by the line that fits best."""
    since = samples[-1].minute / 3
    settled = [one for one in samples if one.minute >= since]
    times = [one.minute for one in settled]
    middle = sum(times) / len(times)
    spread = sum((moment - middle) ** 2 for moment in times)
    grown = {}
    for name in ALLOWED:
        values = [float(getattr(one, name)) for one in settled]
        level = sum(values) / len(values)
        slope = sum((t - middle) * (v - level) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0
        grown[name] = slope * (times[-1] - times[0])
    return grown


def table(samples: Sequence[Sample]) -> str:
    """A dozen of the samples, and how much was added."""
    names = [field.name for field in fields(Sample)]
    step = max(1, len(samples) // 12)
    lines = ["".join(f"{name:>10}" for name in names)]
    for one in samples[::step]:
        lines.append(
            "".join(f"{value:>10.1f}" if isinstance(value, float) else f"{value:>10}" for value in astuple(one))
        )
    grown = growth(samples)
    lines.append("growth".rjust(10) + "".join(f"{grown[name]:>10.1f}" for name in names[1:]))
    lines.append("allowed".rjust(10) + "".join(f"{ALLOWED[name]:>10}" for name in names[1:]))
    return "\n".join(lines)


# The traffic


KINDS = ("whole_way", "short_lived", "renewing", "cancelled")


class Traffic:
    """Several clients of one sandbox, and what they do."""

    def __init__(self, told: dict[str, str], folder: Path, wakeups: Wakeups, seed: int) -> None:
        self.told = told
        self.folder = folder
        self.wakeups = wakeups
        self.chance = random.Random(seed)
        self.clients: list[SigningClient] = []
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.strange: list[BaseException] = []
        (folder / "large.pdf").write_bytes(make_pdf(400_000))
        self.small = make_pdf(5_000)

    def is_complete(self, received: Counter[str]) -> bool:
        """Return whether each kind of traffic has happened at least once."""
        return all(self.done[kind] for kind in KINDS) and bool(received["signing.completed"])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The clients: with a token, with OAuth and a token file, on a session of the caller, and a view."""
        base_url = self.told["base_url"]
        oauth = OAuth(
            base_url,
            client_id=self.told["client_id"],
            client_secret=self.told["client_secret"],
            redirect_uri=REDIRECT,
            store=FileTokenStore(self.folder / "token.json"),
            retry=QUICK,
        )
        async with AsyncExitStack() as stack:
            self.session = await stack.enter_async_context(aiohttp.ClientSession())
            options: dict[str, Any] = {"retry": QUICK, "timeout": TIMES}
            plain = SigningClient(base_url, self.told["access_token"], **options)
            shared = SigningClient(base_url, self.told["access_token"], session=self.session, **options)
            await stack.enter_async_context(oauth)
            renewing = SigningClient(base_url, oauth, **options)
            await oauth.exchange(self.told["code"])
            for client in (plain, shared, renewing):
                await stack.enter_async_context(client)
                # A full tracker is no leak; a small one is soon full.
                client._ledger._max_signings = 50
            self.oauth = oauth
            self.clients = [plain, shared, renewing, plain.with_options(on_attempt=lambda attempt: None)]
            yield

    async def round(self) -> None:
        """Every worker does one thing, some of them are stopped in the middle."""
        jobs = [self.whole_way, self.whole_way, self.short_lived, self.listing, self.renewing, self.cancelled]
        tasks = [asyncio.create_task(self.guarded(job)) for job in self.chance.choices(jobs, k=WORKERS)]
        if self.chance.random() < 0.3:
            await asyncio.sleep(self.chance.random() * 0.3)
            self.chance.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def guarded(self, job: Callable[[SigningClient], Awaitable[None]]) -> None:
        try:
            await job(self.chance.choice(self.clients))
            self.done[job.__name__] += 1
        except SigningError as error:
            self.errors[type(error).__name__] += 1
        except Exception as error:
            self.strange.append(error)

    async def tell(self, path: str) -> None:
        """Play a person."""
        async with self.session.post(f"{self.told['base_url']}/sandbox/api{path}", json={}) as answer:
            await answer.read()

    async def draft(self, client: SigningClient) -> Signing:
        signing = await client.signings.create(name="Lease", language="EN")
        sources: list[Source] = [self.small, self.folder / "large.pdf", self.chunks()]
        for source in self.chance.sample(sources, 2):
            await client.documents.upload(signing, source, f"{self.chance.random()}.pdf")
        for number in (1, 2):
            await client.recipients.add(signing, email=f"a{number}@example.com", order=number)
        return signing

    async def chunks(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.small), 999):
            yield self.small[start : start + 999]

    async def whole_way(self, client: SigningClient) -> None:
        signing = await self.draft(client)
        await client.signings.send(signing)
        await client.recipients.remind_pending(signing)
        waiting = asyncio.create_task(
            client.signings.wait_until_completed(signing, 10.0, 0.2, 0.5, wakeups=self.wakeups)
        )
        try:
            await self.tell(f"/signings/{signing.id}/{self.chance.choice(('complete', 'complete', 'cancel'))}")
            complete = await waiting
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        documents = client.documents
        for document in complete.documents:
            await documents.download_signed(complete, document, self.folder / f"{self.chance.randrange(9)}.pdf")
            await documents.read_signed(complete, document)
            async with documents.stream_signed(complete, document) as chunks:
                await anext(chunks)

    async def short_lived(self, client: SigningClient) -> None:
        async with SigningClient(self.told["base_url"], self.told["access_token"], retry=QUICK, timeout=TIMES) as own:
            await own.me()
            await own.signings.get(await self.draft(own))
            await own.with_options(timeout=0.01).signings.list()

    async def listing(self, client: SigningClient) -> None:
        pages = 0
        async with contextlib.aclosing(client.signings.list(limit=5).pages()) as listed:
            async for page in listed:
                for signing in page.items[:2]:
                    await client.recipients.list(signing)
                pages += 1
                if pages == 4:
                    break
        await client.signings.get("no-such-signing")

    async def renewing(self, client: SigningClient) -> None:
        await asyncio.gather(*(self.oauth.refresh() for _ in range(5)))
        await asyncio.gather(*(client.me() for _ in range(10)))

    async def cancelled(self, client: SigningClient) -> None:
        for _ in range(5):
            call = asyncio.create_task(self.whole_way(client))
            try:
                await asyncio.sleep(self.chance.random() * 0.2)
            finally:
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)


@asynccontextmanager
async def receiving(receiver: Receiver) -> AsyncIterator[str]:
    """A webhook endpoint, and its address."""
    app = web.Application()
    app.router.add_post("/hooks", aiohttp_handler(receiver))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/hooks"
    finally:
        await runner.cleanup()


async def soak(seconds: float, seed: int) -> tuple[list[Sample], Traffic]:
    """Make rounds of traffic for so long, or until each kind has happened; return what was counted after each."""
    logging.getLogger("signing_async").setLevel(logging.ERROR)  # of forged deliveries there will be many
    wakeups, received = Wakeups(), Counter[str]()

    def hand_off(event: Any) -> None:
        received[event.type] += 1
        wakeups.publish(event)

    receiver = Receiver(WebhookVerifier(SECRET), hand_off, seen=MemorySeenEvents(max_events=100))
    rows = array("d")  # one object, however long it goes on
    with tempfile.TemporaryDirectory() as folder:
        async with receiving(receiver) as url, sandbox_process(url) as told:
            traffic = Traffic(told, Path(folder), wakeups, seed)
            async with traffic.running():
                began = time.monotonic()
                while (passed := time.monotonic() - began) < seconds or (
                    passed < 6 * seconds and not traffic.is_complete(received)
                ):
                    await traffic.round()
                    await asyncio.sleep(0.05)  # what was closed is gone a moment later
                    rows.extend(astuple(sample(began)))
    traffic.done.update({f"webhook {kind}": count for kind, count in received.items()})
    width = len(fields(Sample))
    table = [rows[at : at + width].tolist() for at in range(0, len(rows), width)]
    return [Sample(minute, rss, *map(int, counts)) for minute, rss, *counts in table], traffic


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
    samples, traffic = asyncio.run(soak(given.minutes * 60, given.seed))
    print(table(samples))
    print(f"{len(samples)} rounds;", ", ".join(f"{name} {count}" for name, count in sorted(traffic.done.items())))
    print("errors of the package:", ", ".join(f"{name} {count}" for name, count in sorted(traffic.errors.items())))
    for error in traffic.strange:
        print(f"strange: {error!r}")
    too_much = [name for name, grown in growth(samples).items() if grown > ALLOWED[name]]
    if too_much or traffic.strange:
        sys.exit(f"this grows: {', '.join(too_much)}" if too_much else "strange errors came out of calls")


if __name__ == "__main__":
    main()
