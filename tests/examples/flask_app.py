"""Webhooks in Flask. Run it: ``flask --app flask_app run``; the path is ``/webhooks``.

The server's threads store the events; a process of its own handles them: ``python flask_app.py``.
"""

import asyncio
import os
from pathlib import Path

from flask import Flask
from werkzeug.wrappers import Response

from signing_async.webhooks import Event, Inbox, Receiver, WebhookVerifier, wsgi_app

inbox = Inbox(Path(os.environ["STATE_FOLDER"]) / "inbox.db")  # an event is on disk before it is acknowledged
app = Flask("webhooks")
handle = wsgi_app(Receiver(WebhookVerifier(os.environ["SIGNING_WEBHOOK_SECRET"]), inbox))


@app.post("/webhooks")
def webhooks() -> Response:
    return handle  # type: ignore[return-value]  # Flask calls it as a WSGI application


@inbox.on("signing.completed")
async def completed(event: Event) -> None:
    print(event.signing_id, "is completed", flush=True)


async def work() -> None:
    async with inbox:
        await inbox.run()


if __name__ == "__main__":
    asyncio.run(work())
