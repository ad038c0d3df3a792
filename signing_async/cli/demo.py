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
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click
from aiohttp import web

from .._sample_pdf import sample_pdf
from ..archive import verify_archive
from ..auth.oauth import OAuth
from ..auth.token_stores import FileTokenStore
from ..client import SigningClient
from ..dispatch.package import SigningPackage
from ..documents.source import PdfSource
from ..errors import InvalidSignature
from ..models import Document, NewRecipient, Signing
from ..sandbox import Sandbox
from ..webhooks import Event, Inbox, Receiver, Wakeups, WebhookVerifier, aiohttp_handler
from .command_base import State, command, make_folder
from .output import Output

_SECRET = "whsec-of-the-demo"  # used by the demo only
_PEOPLE = (("Anna", "Berg", "bankid"), ("Bo", "Ek", "email"))
_FILES = (("lease.pdf", "Lease of the boat house"), ("inventory.pdf", "Inventory of the boat house"))
_BERTHS = 20  # more than the archive fetches at once, so that its worker can be killed in the middle
_KILL_AFTER = 10  # downloads
_DOWNLOAD = "documents.download_signed"
_COMMAND = (sys.executable, "-c", "from signing_async.cli import main; main()")


@command()
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the sealed PDFs; by default a new temporary folder.",
)
async def demo(state: State, folder: Path | None) -> None:
    """Run through everything against a sandbox on this machine, in seconds.

    \b
    Example:
      signing-async demo --folder ./signed
    """
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="signing-demo-"))
    make_folder(folder, "--folder")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as private:
        facts = await _Demo(state.out, folder).run(Path(private))
    state.out.result({**facts, "seconds": round(time.perf_counter() - started, 2)})


class _Demo:
    """The steps of the demo, and what it prints about them."""

    def __init__(self, out: Output, folder: Path) -> None:
        self._out = out
        self._folder = folder
        self._events: list[Event] = []
        self._wakeups = Wakeups()
        self._documents: list[Document] = []
        self._steps = 0

    async def run(self, state: Path) -> dict[str, Any]:
        async with (
            self._serve_webhooks(state / "inbox.db") as url,
            Sandbox(webhook_url=url, webhook_secret=_SECRET) as sandbox,
        ):
            self._step("A sandbox of the signing service", sandbox.base_url, "not a legal signing service")
            app = sandbox.register_app(redirect_uri="http://127.0.0.1:8000/callback", name="Demo")
            oauth = OAuth(
                sandbox.base_url,
                client_id=app.client_id,
                client_secret=app.client_secret or "",
                redirect_uri=app.redirect_uri,
                store=FileTokenStore(state / "token.json"),
            )
            self._step("An app is registered", f"client id {app.client_id}", "its secret is shown once")
            async with oauth, SigningClient(sandbox.base_url, oauth) as client:
                facts = await self._run_signing(sandbox, client, oauth, app)
                facts["archive"] = await self._archive(sandbox, client, state / "berths.journal")
                self._print_hints(self._folder / _FILES[0][0])
                return facts

    async def _run_signing(self, sandbox: Sandbox, client: SigningClient, oauth: OAuth, app: Any) -> dict[str, Any]:
        request = oauth.authorization_request()
        callback = urlencode({"code": sandbox.authorize(app), "state": request.state})
        await oauth.exchange(f"{app.redirect_uri}?{callback}", state=request.state)
        user = await client.me()
        self._step(
            "The user allows access; the code is exchanged", f"{user.name} <{user.email}>", "state checked, token saved"
        )
        signing = await self._prepare(client)
        sandbox.clock.advance(days=1)
        sandbox.faults.add("signings.send", "drop-after-commit")
        await client.signings.send(signing)
        invited = Counter(one.recipient_id for one in sandbox.notifications if one.kind == "invitation")
        requests = len(sandbox.requests_of("oauth.token"))
        self._step(
            "A day later the draft is sent, and the response is lost",
            f"token refreshed automatically ({requests} token requests), signing read before any retry",
            f"sent once: {max(invited.values())} invitation for the first recipient",
        )
        return await self._finish(sandbox, client, signing)

    async def _prepare(self, client: SigningClient) -> Signing:
        signing = await client.signings.create(
            name="Boat house", language="EN", signing_order="sequential", message="Please sign by Friday."
        )
        sources = [(name, sample_pdf(title)) for name, title in _FILES]
        uploads = (client.documents.upload(signing, data, name) for name, data in sources)
        self._documents = await asyncio.gather(*uploads)
        for order, (first, last, method) in enumerate(_PEOPLE, start=1):
            await client.recipients.add(
                signing,
                email=f"{first.lower()}@example.com",
                first_name=first,
                last_name=last,
                signing_method=method,
                order=order,
                extra={"personal_number": "198001011234"} if method == "bankid" else {},
            )
        files = " and ".join(name for name, _ in sources)
        self._step(
            "A draft with documents and recipients", f"{files}, uploaded concurrently", "Anna signs first, then Bo"
        )
        return signing

    async def _finish(self, sandbox: Sandbox, client: SigningClient, signing: Signing) -> dict[str, Any]:
        wait = client.signings.wait_until_completed(signing, 30, poll=10, wakeups=self._wakeups)
        waiting = asyncio.create_task(wait)
        async for recipient in client.recipients.list(signing):
            await sandbox.sign(recipient.id)
        completed = await waiting
        while not any(event.type == "signing.completed" for event in self._events):
            await self._wakeups.wait(0.1)
        kinds = [event.type for event in self._events]
        self._step("Both sign", "completion seen through its webhook, not by polling", ", ".join(kinds))
        self._step("A forged webhook is refused", _verify_forged_webhook())
        roots = await sandbox.certificate_pem()
        sealed = [
            await client.documents.download_signed(completed, document, self._folder / name, trust=roots)
            for document, (name, _) in zip(self._documents, _FILES, strict=True)
        ]
        lines = [f"{file.path}  {file.size} bytes  sha256 {file.sha256[:16]}…" for file in sealed]
        self._step("The sealed PDFs are on disk, with valid and trusted signatures", *lines)
        return {
            "signing": {"id": completed.id, "name": completed.name, "state": completed.state.value},
            "sealed": [{"path": str(file.path), "size": file.size, "sha256": file.sha256} for file in sealed],
            "events": kinds,
        }

    async def _archive(self, sandbox: Sandbox, client: SigningClient, journal: Path) -> dict[str, Any]:
        contract = PdfSource(sample_pdf("Rent of a berth"), "berth.pdf")
        tenant = NewRecipient("eva@example.com", "Eva", "Dahl")
        berths = range(1, _BERTHS + 1)
        packages = [SigningPackage(f"Berth {one}", "EN", [contract], [tenant], key=f"berth-{one}") for one in berths]
        async for sent in client.dispatch_many(packages, journal):
            assert sent.signing is not None, sent.error
            await sandbox.complete(sent.signing.id)
        self._step(f"{_BERTHS} more packages are sent in bulk, and signed", "each exactly once, with a journal")

        # A folder that no earlier demo has used.
        names = itertools.chain(["archive"], (f"archive-{number}" for number in itertools.count(2)))
        archive = next(path for name in names if not (path := self._folder / name).exists())
        before = len(sandbox.requests_of(_DOWNLOAD))
        slow = sandbox.faults.add(_DOWNLOAD, "slow", times=None, seconds=0.2)
        worker = await self._start_worker(sandbox, archive)
        try:
            while worker.returncode is None and len(sandbox.requests_of(_DOWNLOAD)) < before + _KILL_AFTER:
                await asyncio.sleep(0.01)
        finally:
            with suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()
        slow.remove()
        kept = (await verify_archive(archive)).documents
        await (worker := await self._start_worker(sandbox, archive)).wait()
        report = await verify_archive(archive)
        self._step(
            "A worker archives all sealed PDFs, and is killed in the middle",
            f"killed (SIGKILL) when {kept} documents were archived; another worker resumed",
            f"{report.documents} documents in {archive}, each once: "
            + ("the manifest proves it" if report.ok and not worker.returncode else "not true: this is a bug"),
        )
        return {"path": str(archive), "documents": report.documents, "archived_before_the_kill": kept, "ok": report.ok}

    async def _start_worker(self, sandbox: Sandbox, archive: Path) -> asyncio.subprocess.Process:
        """Start `signing-async archive` in a process of its own, without the user's own settings."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SIGNING_")}
        environment["SIGNING_CONFIG"] = os.devnull
        environment["SIGNING_BASE_URL"] = sandbox.base_url
        environment["SIGNING_ACCESS_TOKEN"] = sandbox.access_token()
        null = asyncio.subprocess.DEVNULL
        command = (*_COMMAND, "archive", str(archive))
        return await asyncio.create_subprocess_exec(*command, env=environment, stdin=null, stdout=null, stderr=null)

    @asynccontextmanager
    async def _serve_webhooks(self, path: Path) -> AsyncIterator[str]:
        """Serve a webhook endpoint with an inbox, as an integrator would."""
        inbox = Inbox(path)
        inbox.on("*")(self._record_event)
        app = web.Application()
        app.router.add_post("/webhooks", aiohttp_handler(Receiver(WebhookVerifier(_SECRET), inbox)))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            async with inbox, inbox.running():
                yield f"http://127.0.0.1:{runner.addresses[0][1]}/webhooks"
        finally:
            await runner.cleanup()

    def _record_event(self, event: Event) -> None:
        self._events.append(event)
        self._wakeups.publish(event)

    def _step(self, title: str, *lines: str) -> None:
        self._steps += 1
        number = self._out.styled(str(self._steps), "green", bold=True)
        self._print(f"{number} {self._out.styled(title, bold=True)}", *lines)

    def _print_hints(self, path: Path) -> None:
        lines = (
            (f"xdg-open {path}", "the sealed file, with its signature page"),
            (f"signing-async verify-sealed {path}", "its signature and what it covers"),
            (f"pdfsig {path}", "the same with another program"),
            ("signing-async sandbox", "the service in your browser, at http://127.0.0.1:8080/sandbox"),
        )
        title = self._out.styled("What next", bold=True)
        self._print(f"\n{title}", *(f"{self._out.styled(line, 'cyan')}  {hint}" for line, hint in lines))

    def _print(self, title: str, *lines: str) -> None:
        if not self._out.json:
            self._out.text("\n  ".join((title, *lines)))


def _verify_forged_webhook() -> str:
    """Return the message of the error that a forged webhook raises."""
    message = "it was accepted: this is a bug"
    try:
        WebhookVerifier(_SECRET).verify(b'{"event": {"id": "1", "type": "signing.completed"}}', "00" * 32)
    except InvalidSignature as error:
        message = str(error)
    return message
