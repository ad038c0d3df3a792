"""The FastAPI example works as a user would run it: uvicorn in a process, the sandbox as the service."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import aiohttp

from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def serving(tmp_path: Path, sandbox: Sandbox, secret: str) -> AsyncIterator[str]:
    """Run the example with uvicorn; yield its origin."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        origin = f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.listen()
        app = sandbox.register_app(redirect_uri=f"{origin}/callback")
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "STATE_FOLDER": str(tmp_path),
            "SIGNING_BASE_URL": sandbox.base_url,
            "SIGNING_CLIENT_ID": app.client_id,
            "SIGNING_CLIENT_SECRET": app.client_secret or "",
            "SIGNING_REDIRECT_URI": app.redirect_uri,
            "SIGNING_WEBHOOK_SECRET": secret,
        }
        fd = listening.fileno()
        command = f"{sys.executable} -m uvicorn tests.examples.fastapi_app:app --no-access-log --fd {fd}".split()
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, cwd=tmp_path, pass_fds=[fd], stderr=subprocess.PIPE
        )
    try:
        yield origin
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
    assert b"Application shutdown complete" in log
    assert b"Traceback" not in log


async def test_fastapi_example_logs_in_sends_once_and_archives(tmp_path: Path) -> None:
    async with (
        Sandbox() as sandbox,
        serving(tmp_path, sandbox, "whsec") as origin,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser,
    ):
        sandbox.webhooks.register(f"{origin}/webhooks", secret="whsec")
        async with browser.get(f"{origin}/login", allow_redirects=False) as response:
            authorize = urlsplit(response.headers["Location"])
        state = parse_qs(authorize.query)["state"][0]
        granted = {"code": sandbox.authorize(sandbox.apps[0]), "state": state}
        async with browser.get(f"{origin}/callback", params=granted) as response:
            assert "@" in (await response.json())["user"]
        first, second = [await _send(browser, origin, "lease-2031", make_pdf()) for _ in range(2)]
        assert first == second
        assert (first[0], first[1]["state"]) == (200, "sent")
        await sandbox.complete(first[1]["signing"])
        while not list(tmp_path.glob("archive/**/*.pdf")):
            await asyncio.sleep(0.02)
        status, answer = await _send(browser, origin, "x", b"no PDF")
        assert (status, "not a PDF" in answer["error"]) == (400, True)


async def _send(browser: aiohttp.ClientSession, origin: str, key: str, pdf: bytes) -> tuple[int, dict[str, str]]:
    async with browser.post(f"{origin}/contracts/{key}?email=anna@example.com", data=pdf) as response:
        return response.status, await response.json()
