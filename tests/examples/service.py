"""Send every PDF of a folder as a contract, receive the events, archive the sealed PDFs; safe to kill at any moment.

It needs a folder `contracts/`, and SIGNING_BASE_URL, SIGNING_ACCESS_TOKEN, SIGNING_WEBHOOK_SECRET and PORT.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from aiohttp import web

from signing_async import NewRecipient, SigningClient, SigningPackage
from signing_async.archive import Archive, ArchiveResult
from signing_async.webhooks import Event, Inbox, Receiver, WebhookVerifier, aiohttp_handler

STATE = Path("state")  # on a local disk; on several machines use PostgresJournal and PostgresInbox


def packages() -> Iterator[SigningPackage]:
    for pdf in sorted(Path("contracts").glob("*.pdf")):
        yield SigningPackage(pdf.stem, "EN", [pdf], [NewRecipient(f"{pdf.stem}@example.com")], key=pdf.name)


@contextlib.asynccontextmanager
async def receiving(receiver: Receiver) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_post("/webhooks", aiohttp_handler(receiver))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(os.environ["PORT"])).start()
    try:
        yield
    finally:
        await receiver.drain()
        await runner.cleanup()


async def main() -> None:
    STATE.mkdir(exist_ok=True)
    inbox = Inbox(STATE / "inbox.db")
    receiver = Receiver(WebhookVerifier(os.environ["SIGNING_WEBHOOK_SECRET"]), inbox)
    async with (
        SigningClient.from_env() as client,
        Archive(client, "archive", journal=STATE / "packages.journal") as archive,
        inbox,
        receiving(receiver),
    ):

        @inbox.on("signing.completed")
        async def collect(event: Event) -> None:
            if event.signing_id is not None:
                await archive.collect(event.signing_id)

        async with inbox.running():
            async for sent in client.dispatch_many(packages(), STATE / "packages.journal"):
                print(sent.package.name, sent.error or "sent", flush=True)
            await archive.follow(every=300, on_result=report)  # signings whose events never arrived


def report(result: ArchiveResult) -> None:
    print(result.signing.name, result.error or "archived by a sweep", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
