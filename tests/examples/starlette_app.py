"""Webhooks in Starlette. Run it: ``uvicorn starlette_app:app``; the path is ``/webhooks``."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Route

from signing_async.webhooks import Event, Inbox, Receiver, WebhookVerifier, asgi_app

inbox = Inbox(Path(os.environ["STATE_FOLDER"]) / "inbox.db")  # an event is on disk before it is acknowledged
receiver = Receiver(WebhookVerifier(os.environ["SIGNING_WEBHOOK_SECRET"]), inbox)


@inbox.on("signing.completed")
async def completed(event: Event) -> None:
    print(event.signing_id, "is completed", flush=True)


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    async with inbox, inbox.running():
        yield
        await receiver.drain()


# This exact path; `Mount` would redirect it to /webhooks/.
app = Starlette(lifespan=lifespan, routes=[Route("/webhooks", asgi_app(receiver))])
