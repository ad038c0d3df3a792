"""What a first user does, as one program: packages that are sent, a list, a webhook. Run it in foreign environments.

``python -m tests.first_day HOW`` reads the environment (``SIGNING_BASE_URL``, ...), and prints ``sent``.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from signing_async import NewRecipient, PdfSource, SigningClient, SigningPackage
from signing_async.webhooks import Event, Inbox, Receiver, WebhookVerifier, sign
from tests.pdfs import make_pdf

_BODY = b'{"event": {"id": "e-1", "type": "signing.completed"}}'


async def first_day() -> None:
    """Dispatch two packages with a journal, list them, and handle a webhook from an inbox."""
    handled = asyncio.Event()
    with tempfile.TemporaryDirectory() as folder:
        async with SigningClient.from_env() as client:
            documents, recipients = [PdfSource(make_pdf(), "lease.pdf")], [NewRecipient("anna@example.com")]
            packages = [SigningPackage(f"Lease {number}", "EN", documents, recipients) for number in range(2)]
            async for result in client.dispatch_many(packages, Path(folder) / "leases.journal"):
                if result.error is not None:
                    raise result.error
            names = {signing.name async for signing in client.signings.list() if not signing.is_draft}
        inbox = Inbox(Path(folder) / "inbox.db")

        @inbox.on("signing.completed")
        async def handle(event: Event) -> None:
            handled.set()

        async with inbox, inbox.running():
            receiver = Receiver(WebhookVerifier("secret"), inbox)
            response = await receiver.receive(sign("secret", _BODY), _BODY)
            async with asyncio.timeout(30):
                await handled.wait()
    if not {"Lease 0", "Lease 1"} <= names or response.status != 202:
        raise SystemExit(f"{names}, {response.status}")
    print("sent")


def main(how: str) -> None:
    """Run it in an ordinary loop, on uvloop, in a forked child, or with gevent's patches."""
    if how == "uvloop":
        import uvloop

        uvloop.run(first_day())
    elif how == "fork":
        asyncio.run(first_day())  # the child inherits what its parent has used
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            asyncio.run(first_day())
            sys.stdout.flush()
            os._exit(0)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    elif how == "gevent":
        from gevent import get_hub  # type: ignore[import-untyped]  # the caller has made gevent's patches

        get_hub().threadpool.apply(asyncio.run, (first_day(),))
    else:
        asyncio.run(first_day())


if __name__ == "__main__":
    main(sys.argv[1])
