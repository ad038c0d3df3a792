"""`demo`: everything on this machine, from a new app to an archive that survives a killed worker."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click
from aiohttp import web
from aiohttp.test_utils import TestServer

from .._sample_pdf import sample_pdf
from ..archive import verify_archive
from ..auth.oauth import OAuth
from ..auth.token_stores import FileTokenStore
from ..client import SigningClient
from ..dispatch.package import SigningPackage
from ..documents.source import PdfSource
from ..errors import InvalidSignature
from ..models import NewRecipient
from ..sandbox import Sandbox
from ..webhooks import Event, Inbox, Receiver, Wakeups, WebhookVerifier, aiohttp_handler
from .command_base import State, command, make_folder
from .output import Output

_SECRET = "whsec-of-the-demo"  # used by the demo only
_FILES = {"lease.pdf": "Lease of the boat house", "inventory.pdf": "Inventory of the boat house"}
_ANNA = NewRecipient("anna@example.com", "Anna", "Berg", "bankid", 1, {"personal_number": "198001011234"})
_BO = NewRecipient("bo@example.com", "Bo", "Ek", "email", 2)
_BERTHS = 20  # more than the archive fetches at once, so that its worker can be killed in the middle
_KILL_AFTER = 10  # downloads
_DOWNLOAD = "documents.download_signed"
_HINTS = {
    "xdg-open {}": "the sealed file, with its signature page",
    "signing-async verify-sealed {}": "its signature and what it covers",
    "pdfsig {}": "the same with another program",
    "signing-async sandbox": "the service in your browser, at http://127.0.0.1:8080/sandbox",
}


@command()
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="For the PDFs; by default temporary.")
async def demo(state: State, folder: Path | None) -> None:
    """Run through everything against a sandbox on this machine, in seconds.

    \b
    Example:
      signing-async demo --folder ./signed
    """
    folder = folder or Path(tempfile.mkdtemp(prefix="signing-demo-"))
    make_folder(folder, "--folder")
    started, out, events, wakeups = time.perf_counter(), state.out, asyncio.Queue[Event](), Wakeups()
    steps = _Steps(out)
    async with AsyncExitStack() as exits:
        private = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        url = await exits.enter_async_context(_webhooks(private / "inbox.db", events, wakeups))
        sandbox = await exits.enter_async_context(Sandbox(webhook_url=url, webhook_secret=_SECRET))
        steps.show("A sandbox of the signing service", sandbox.base_url, "not a legal signing service")
        app = sandbox.register_app(redirect_uri="http://127.0.0.1:8000/callback", name="Demo")
        oauth = OAuth(
            sandbox.base_url,
            client_id=app.client_id,
            client_secret=app.client_secret or "",
            redirect_uri=app.redirect_uri,
            store=FileTokenStore(private / "token.json"),
        )
        steps.show("An app is registered", f"client id {app.client_id}", "its secret is shown once")
        await exits.enter_async_context(oauth)
        client = await exits.enter_async_context(SigningClient(sandbox.base_url, oauth))
        request = oauth.authorization_request()
        callback = urlencode({"code": sandbox.authorize(app), "state": request.state})
        await oauth.exchange(f"{app.redirect_uri}?{callback}", state=request.state)
        user = await client.me()
        who = f"{user.name} <{user.email}>"
        steps.show("The user allows access; the code is exchanged", who, "state checked, token saved")
        facts = await _sign(steps, sandbox, client, folder, events, wakeups)
        facts["archive"] = await _archive(steps, sandbox, client, folder, private / "berths.journal")
    lines = [f"{out.styled(line.format(folder / 'lease.pdf'), 'cyan')}  {hint}" for line, hint in _HINTS.items()]
    out.text("\n  ".join((f"\n{out.styled('What next', bold=True)}", *lines)))
    out.result({**facts, "seconds": round(time.perf_counter() - started, 2)})


class _Steps:
    def __init__(self, out: Output) -> None:
        self._out, self._numbers = out, itertools.count(1)

    def show(self, title: str, *lines: str) -> None:
        number = self._out.styled(str(next(self._numbers)), "green", bold=True)
        self._out.text("\n  ".join((f"{number} {self._out.styled(title, bold=True)}", *lines)))


@asynccontextmanager
async def _webhooks(path: Path, events: asyncio.Queue[Event], wakeups: Wakeups) -> AsyncIterator[str]:
    inbox = Inbox(path, wakeups=wakeups)
    inbox.on("*")(events.put)
    app = web.Application()
    app.router.add_post("/webhooks", aiohttp_handler(Receiver(WebhookVerifier(_SECRET), inbox)))
    async with TestServer(app) as server, inbox, inbox.running():
        yield str(server.make_url("/webhooks"))


async def _sign(
    steps: _Steps, sandbox: Sandbox, client: SigningClient, folder: Path, events: asyncio.Queue[Event], wakeups: Wakeups
) -> dict[str, Any]:
    """Create, send, sign and download a signing, and return the facts about it."""
    signing = await client.signings.create(
        name="Boat house", language="EN", signing_order="sequential", message="Please sign by Friday."
    )
    uploads = (client.documents.upload(signing, sample_pdf(title), name) for name, title in _FILES.items())
    documents = await asyncio.gather(*uploads)
    for recipient in (_ANNA, _BO):
        await client.recipients.add(signing, recipient)
    files = f"{' and '.join(_FILES)}, uploaded concurrently"
    steps.show("A draft with documents and recipients", files, "Anna signs first, then Bo")

    sandbox.clock.advance(days=1)
    await client.me()  # refreshes the token, so that the fault meets the request that sends
    sandbox.faults.add("signings.send", "drop-after-commit")
    await client.signings.send(signing)
    invited = Counter(one.recipient_id for one in sandbox.notifications if one.kind == "invitation")
    steps.show(
        "A day later the draft is sent, and the response is lost",
        f"token refreshed automatically ({len(sandbox.requests_of('oauth.token'))} token requests), "
        "signing read before any retry",
        f"sent once: {len(sandbox.requests_of('signings.send'))} request, "
        f"{max(invited.values())} invitation for the first recipient",
    )

    waiting = asyncio.create_task(client.signings.wait_until_completed(signing, 30, poll=10, wakeups=wakeups))
    async for one in client.recipients.list(signing):
        await sandbox.sign(one.id)
    completed = await waiting
    kinds: list[str] = []
    while "signing.completed" not in kinds:
        kinds.append((await events.get()).type)
    steps.show("Both sign", "completion seen through its webhook, not by polling", ", ".join(kinds))

    forged = "it was accepted: this is a bug"
    try:
        WebhookVerifier(_SECRET).verify(b'{"event": {"id": "1", "type": "signing.completed"}}', "00" * 32)
    except InvalidSignature as error:
        forged = str(error)
    steps.show("A forged webhook is refused", forged)

    roots = await sandbox.certificate_pem()
    sealed = [
        await client.documents.download_signed(completed, document, folder / name, trust=roots)
        for document, name in zip(documents, _FILES, strict=True)
    ]
    lines = [f"{file.path}  {file.size} bytes  sha256 {file.sha256[:16]}…" for file in sealed]
    steps.show("The sealed PDFs are on disk, with valid and trusted signatures", *lines)
    return {
        "signing": {"id": completed.id, "name": completed.name, "state": completed.state.value},
        "sealed": [{"path": str(file.path), "size": file.size, "sha256": file.sha256} for file in sealed],
        "events": kinds,
    }


async def _archive(
    steps: _Steps, sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path
) -> dict[str, Any]:
    """Send packages in bulk, archive everything with a worker that is killed, and return the facts about it."""
    contract, tenant = PdfSource(sample_pdf("Rent of a berth"), "berth.pdf"), NewRecipient("eva@example.com", "Eva")
    keys = [f"berth-{one}" for one in range(1, _BERTHS + 1)]
    async for sent in client.dispatch_many(
        [SigningPackage(k, "EN", [contract], [tenant], key=k) for k in keys], journal
    ):
        assert sent.signing is not None, sent.error
        await sandbox.complete(sent.signing.id)
    steps.show(f"{_BERTHS} more packages are sent in bulk, and signed", "each exactly once, with a journal")

    # A folder that no earlier demo has used.
    names = itertools.chain(["archive"], (f"archive-{number}" for number in itertools.count(2)))
    archive = next(path for name in names if not (path := folder / name).exists())
    before = len(sandbox.requests_of(_DOWNLOAD))
    slow = sandbox.faults.add(_DOWNLOAD, "slow", times=None, seconds=0.2)
    worker = await _start_worker(sandbox, archive)
    while worker.returncode is None and len(sandbox.requests_of(_DOWNLOAD)) < before + _KILL_AFTER:
        await asyncio.sleep(0.01)
    with suppress(ProcessLookupError):
        worker.kill()
    await worker.wait()
    slow.remove()
    kept = (await verify_archive(archive)).documents
    await (worker := await _start_worker(sandbox, archive)).wait()
    report = await verify_archive(archive)
    proof = "the manifest proves it" if report.ok and not worker.returncode else "not true: this is a bug"
    steps.show(
        "A worker archives all sealed PDFs, and is killed in the middle",
        f"killed (SIGKILL) when {kept} documents were archived; another worker resumed",
        f"{report.documents} documents in {archive}, each once: {proof}",
    )
    return {"path": str(archive), "documents": report.documents, "archived_before_the_kill": kept, "ok": report.ok}


async def _start_worker(sandbox: Sandbox, archive: Path) -> asyncio.subprocess.Process:
    """Start `signing-async archive` in a process of its own, without the user's own settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIGNING_")}
    environment |= {"SIGNING_CONFIG": os.devnull, "SIGNING_BASE_URL": sandbox.base_url}
    environment["SIGNING_ACCESS_TOKEN"] = sandbox.access_token()
    command = (sys.executable, "-c", "from signing_async.cli import main; main()", "archive", str(archive))
    null = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*command, env=environment, stdin=null, stdout=null, stderr=null)
