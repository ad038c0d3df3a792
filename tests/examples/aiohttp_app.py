"""Webhooks in aiohttp. Run it: ``python aiohttp_app.py``; the address is ``http://localhost:$PORT/webhooks``."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from signing_async.webhooks import Event, Inbox, Receiver, WebhookVerifier, aiohttp_handler

inbox = Inbox(Path(os.environ["STATE_FOLDER"]) / "inbox.db")  # an event is on disk before it is acknowledged
receiver = Receiver(WebhookVerifier(os.environ["SIGNING_WEBHOOK_SECRET"]), inbox)


@inbox.on("signing.completed")
async def completed(event: Event) -> None:
    print(event.signing_id, "is completed", flush=True)


async def running(_: web.Application) -> AsyncIterator[None]:
    async with inbox, inbox.running():
        yield
        await receiver.drain()


app = web.Application()
app.router.add_post("/webhooks", aiohttp_handler(receiver))
app.cleanup_ctx.append(running)

if __name__ == "__main__":
    web.run_app(app, port=int(os.environ["PORT"]), print=None)
