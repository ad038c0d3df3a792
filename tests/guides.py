"""Runs the Python blocks of a guide, in order, in one namespace that holds what guides take for granted."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from signing_async import NewRecipient, OAuth, SigningClient, SigningPackage, SqliteJournal, Token
from signing_async.sandbox import Sandbox
from signing_async.webhooks import sign
from tests.pdfs import make_pdf

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^(?P<skip><!-- not run: .+ -->\n)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[str]:
    """Return the guide's Python blocks, without those marked ``<!-- not run: why -->``."""
    return [found["code"] for found in _BLOCK.finditer(path.read_text("utf-8")) if not found["skip"]]


def is_test(block: str) -> bool:
    """Return whether pytest has to run the block."""
    return re.search(r"^(async )?def test_", block, re.MULTILINE) is not None


@asynccontextmanager
async def namespace(folder: Path, **more: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield the names that guides take for granted, around a running sandbox."""
    (folder / "lease.pdf").write_bytes(make_pdf())
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(Sandbox())
        app = sandbox.register_app(redirect_uri="https://app.example.com/callback")
        client = await stack.enter_async_context(SigningClient(sandbox.base_url, sandbox.access_token()))
        completed = await _sendable(client)
        await client.signings.send(completed)
        await sandbox.complete(completed.id)
        body = json.dumps({"event": {"id": "1", "type": "signing.completed"}}).encode()
        yield {
            "base_url": sandbox.base_url,
            "client_id": app.client_id,
            "client_secret": app.client_secret,
            "redirect_uri": app.redirect_uri,
            "access_token": sandbox.access_token(),
            "sandbox": sandbox,
            "app": app,
            "client": client,
            "signing": await _sendable(client),
            "empty_draft": await client.signings.create(name="empty", language="EN"),
            "completed_id": completed.id,
            "signing_id": completed.id,
            "folder": folder,
            "pdf_bytes": make_pdf(text="inventory"),
            "user_id": "anna",
            "session": {},
            "secret": "new",
            "new_secret": "new",
            "old_secret": "old",
            "body": body,
            "headers": {"X-Signature": sign(b"old", body)},
            "encryption_key": os.urandom(32),
            "packages": [SigningPackage("Lease", "EN", [folder / "lease.pdf"], [NewRecipient("anna@example.com")])],
            "make_client": lambda: SigningClient(sandbox.base_url, sandbox.access_token()),
            "make_journal": lambda: SqliteJournal(folder / "tasks.journal"),
            "OAuth": OAuth,
            "SigningClient": SigningClient,
            "Token": Token,
            **more,
        }


async def run(code: str, name: str, names: dict[str, Any]) -> None:
    """Run one block, which may use ``await`` at its top level."""
    if "callback_url" in code and "state" in names["session"]:
        granted = names["sandbox"].authorize(names["app"])
        names["callback_url"] = f"{names['redirect_uri']}?code={granted}&state={names['session']['state']}"
    compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if compiled.co_flags & inspect.CO_COROUTINE:
        await eval(compiled, names)
    else:
        exec(compiled, names)


async def _sendable(client: SigningClient) -> Any:
    signing = await client.signings.create(name="x", language="EN")
    await client.documents.upload(signing, make_pdf(), "x.pdf")
    await client.recipients.add(signing, email="a@example.com", order=1)
    return signing
