"""No span, event or metric shows a name of a person or a file, an address, a token or another secret."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from urllib.parse import quote

import pytest
from aiohttp import web

from signing_async import (
    DecodeError,
    NewRecipient,
    OutcomeUnknown,
    Reader,
    RetryPolicy,
    SigningClient,
    SigningError,
    SigningPackage,
)
from signing_async.archive import Archive, verify_archive
from signing_async.sandbox import Sandbox
from signing_async.telemetry import names
from signing_async.webhooks import Drop, Event, Inbox, Receiver, WebhookVerifier
from tests.auth.oauth_servers import sandbox_oauth, secret_of
from tests.pdfs import make_pdf
from tests.servers import serving
from tests.telemetry.conftest import Recorded
from tests.webhooks.deliveries import event_body, signed
from tests.webhooks.inboxes import AT_ONCE, settled

# Everything that a caller names holds this.
MARK = "Xanthippe"
EMAIL = f"{MARK}@example.com"
QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


def _check(recorded: Recorded, *secrets: str) -> None:
    text = recorded.text().lower()
    for secret in (MARK, EMAIL, quote(EMAIL, safe=""), "example.com", "lease.pdf", *secrets):
        assert secret.lower() not in text, secret


async def test_nothing_personal_or_secret_is_recorded(sandbox: Sandbox, recorded: Recorded, tmp_path: Path) -> None:
    path = tmp_path / f"{MARK} lease.pdf"
    path.write_bytes(make_pdf())
    oauth, authorize = sandbox_oauth(sandbox)
    secrets: list[str] = [secret_of(oauth)]
    async with oauth, SigningClient(sandbox.base_url, oauth, retry=QUICK) as client:
        for _ in range(2):
            code = authorize()
            token = await oauth.exchange(code)
            assert token.refresh_token is not None
            secrets += [code, token.access_token, token.refresh_token]
        signing = await client.signings.create(name=f"Lease of {MARK}", language="EN", message=f"Dear {MARK}")
        for kind in ("503", "drop-after-commit", "truncate", "not-json"):
            for operation in ("documents.upload", "recipients.add"):
                sandbox.faults.add(operation, kind)
            with contextlib.suppress(SigningError):
                await client.documents.upload(signing, path)
            with contextlib.suppress(SigningError):
                await client.recipients.add(signing, email=EMAIL, first_name=MARK, last_name=MARK, order=None)
        async for result in client.documents.upload_many(signing, [path, tmp_path / f"{MARK}.missing"]):
            assert result.source
        with pytest.raises(SigningError):
            await client.documents.upload(signing, b"%PDF-1.4 damaged", f"{MARK}.pdf", preflight=False)
        for wrong in (MARK, EMAIL):
            with contextlib.suppress(SigningError):
                await client.signings.get(f"{wrong} lease.pdf")
        sandbox.clock.advance(hours=2)
        assert [each async for each in client.signings.list()]
        package = SigningPackage(f"Lease {MARK}", "EN", [path], [NewRecipient(EMAIL, MARK, MARK)], key=f"{MARK}-1")
        for kind in ("500-after-commit", "drop-after-commit"):
            sandbox.faults.add("signings.send", kind)
        sent = await client.dispatch(package, journal=tmp_path / f"{MARK}.journal")
        other = SigningPackage(f"Other {MARK}", "EN", [path], [NewRecipient(EMAIL)], key=f"{MARK}-1")
        with pytest.raises(SigningError, match=MARK):
            await client.dispatch(other, journal=tmp_path / f"{MARK}.journal")
        await sandbox.complete(sent.id)
        document = (await client.signings.get(sent)).documents[0]
        await client.documents.download_signed(sent, document, tmp_path / f"{MARK}-sealed.pdf")
        final = oauth.current.secrets()
    _check(recorded, *secrets, *final)
    assert {"signings.create", "documents.upload", "recipients.add", "signings.send", "signings.list", "dispatch"} <= {
        span.name for span in recorded.spans
    }
    assert recorded.total(names.REFRESHES) == 1


async def test_arguments_of_any_endpoint_and_texts_of_errors_are_not_recorded(recorded: Recorded) -> None:
    async def respond(request: web.Request) -> web.Response:
        if request.path.endswith("/list"):
            return web.json_response({"data": [{"id": "1"}], "next": f"/api/1.0/list?cursor={MARK}"})
        return web.json_response({"error": f"no {MARK}"}, status=500, headers={"X-Request-Id": "1"})

    async def reconcile(read: Reader) -> None:
        with contextlib.suppress(SigningError):
            await read(f"/api/1.0/people/{MARK}")
        raise RuntimeError(MARK)

    async with serving(respond) as server, SigningClient(server.origin, f"token-{MARK}", retry=QUICK) as client:
        with pytest.raises(OutcomeUnknown):
            await client.request(
                "POST",
                "/api/1.0/people/{email}/{name}",
                path={"email": EMAIL, "name": MARK},
                params={"who": MARK},
                headers={"X-Who": MARK},
                json={"who": MARK},
                reconcile=reconcile,
            )
        with pytest.raises(SigningError):
            await client.request("GET", f"/api/1.0/people/{EMAIL}")
        pages = client.paginate("/api/1.0/list", dict, params={"who": MARK}).pages()
        async with contextlib.aclosing(pages):
            await anext(pages)
            with pytest.raises(DecodeError):  # it repeats its cursor
                await anext(pages)
        stream = client.stream("GET", "/api/1.0/people/{name}/file", path={"name": MARK})
        with pytest.raises(SigningError):
            async with stream:
                pass
        await asyncio.sleep(0)
    _check(recorded)
    assert recorded.spans


async def test_webhooks_inbox_and_archive_record_nothing_personal_or_secret(
    sandbox: Sandbox, client: SigningClient, recorded: Recorded, tmp_path: Path
) -> None:
    path = tmp_path / f"{MARK} lease.pdf"
    path.write_bytes(make_pdf())
    package = SigningPackage(f"Lease {MARK}", "EN", [path], [NewRecipient(EMAIL, MARK, MARK)])
    sent = await client.dispatch(package)
    await sandbox.complete(sent.id)
    folder, secret = tmp_path / f"{MARK} archive", f"the secret of {MARK}"
    archive = Archive(
        client, folder, journal=tmp_path / f"{MARK}.journal", template=f"{MARK}/{{signing.name}}-{{document.id}}.pdf"
    )
    inbox = Inbox(tmp_path / f"{MARK}.db", key=(MARK * 4).encode()[:32], retry=AT_ONCE)

    @inbox.on("recipient.*")
    def fail(event: Event) -> None:
        raise Drop(f"{MARK} again") if event.id == "dropped" else ValueError(f"no {EMAIL}")

    @inbox.on("signing.completed")
    async def collect(_: Event) -> None:
        await archive.collect(sent)

    async with archive, inbox:
        receiver = Receiver(WebhookVerifier(secret), inbox)
        for name, kind in (("done", "signing.completed"), ("dropped", "recipient.x"), (EMAIL, f"recipient.{MARK}")):
            body = event_body(name, signing={"id": f"{name} lease.pdf"}, recipient={"email": EMAIL, "name": MARK})
            body = body.replace(b"signing.completed", kind.encode())
            for headers in (signed(body, secret), signed(body, secret), signed(body, "wrong"), {"X-Signature": MARK}):
                await receiver.receive({**headers, "X-Who": EMAIL, "traceparent": MARK}, body)
        broken = f'{{"{MARK}": "{EMAIL}"'.encode()
        await receiver.receive(signed(broken, secret), broken)
        async with inbox.running():
            await settled(inbox)
        assert [entry async for entry in archive.entries()]
        async for _ in archive.sweep():
            pass
    (folder / f"{MARK}.pdf").write_bytes(b"extra")
    assert (await verify_archive(folder)).findings
    _check(recorded, secret)
    assert {"webhook.delivery", "inbox.handler", "archive.sweep", "archive.document"} <= {
        span.name for span in recorded.spans
    }
