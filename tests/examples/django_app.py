"""Webhooks in Django, in one file. Run it: ``gunicorn django_app:application``; the path is ``/webhooks``.

The server's threads store the events; a process of its own handles them: ``python django_app.py``.
"""

import asyncio
import os
from pathlib import Path

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.urls import path

from signing_async.webhooks import Event, Inbox, Receiver, WebhookVerifier, django_view

inbox = Inbox(Path(os.environ["STATE_FOLDER"]) / "inbox.db")  # an event is on disk before it is acknowledged
receiver = Receiver(WebhookVerifier(os.environ["SIGNING_WEBHOOK_SECRET"]), inbox)
urlpatterns = [path("webhooks", django_view(receiver))]  # exempt from CSRF checks

if not settings.configured:
    settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["127.0.0.1", "localhost"])
application = get_wsgi_application()


@inbox.on("signing.completed")
async def completed(event: Event) -> None:
    print(event.signing_id, "is completed", flush=True)


async def work() -> None:
    async with inbox:
        await inbox.run()


if __name__ == "__main__":
    asyncio.run(work())
