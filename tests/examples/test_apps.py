"""Each example of a framework runs as it stands, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest

from signing_async import NewRecipient, PdfSource, SigningClient, SigningPackage
from signing_async.sandbox import Sandbox
from tests import guides
from tests.pdfs import make_pdf
from tests.webhooks.deliveries import SECRET, event_body, signed

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# How each is served, and the program that handles its events, if that is another one.
SERVED = {
    "aiohttp_app": ([f"{FOLDER}/aiohttp_app.py"], None),
    "starlette_app": (["-m", "uvicorn", "starlette_app:app", "--no-access-log", "--port", "{port}"], None),
    "flask_app": (["-m", "flask", "--app", "flask_app", "run", "--port", "{port}"], f"{FOLDER}/flask_app.py"),
    "django_app": (["-m", "gunicorn", "-b", "127.0.0.1:{port}", "django_app:application"], f"{FOLDER}/django_app.py"),
}


@asynccontextmanager
async def running(port: int, folder: Path, *command: str, **environment: str) -> AsyncIterator[asyncio.StreamReader]:
    """Run a program in a folder; yield its output. It shuts down without a traceback."""
    settings = {"PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}", "STATE_FOLDER": str(folder), "PORT": str(port)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(each.format(port=port) for each in command),
        cwd=folder,
        env={**os.environ, **settings, "SIGNING_WEBHOOK_SECRET": SECRET, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.terminate()
        _, log = await process.communicate()
    assert b"Traceback" not in log, log
    assert "uvicorn" not in command or b"Application shutdown complete" in log, log


async def request(
    session: aiohttp.ClientSession, method: str, url: str, **options: object
) -> tuple[int, dict[str, str]]:
    """Send a request, as soon as the server listens."""
    while True:
        try:
            async with session.request(method, url, **options) as response:  # type: ignore[arg-type]  # any options
                return response.status, await response.json()
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("name", SERVED)
async def test_example_stores_an_event_once_and_handles_it(name: str, tmp_path: Path, unused_tcp_port: int) -> None:
    arguments, worker = SERVED[name]
    body = event_body("evt_1", signing={"id": "sig_1"})
    async with (
        asyncio.timeout(60),
        aiohttp.ClientSession() as session,
        running(unused_tcp_port, tmp_path, *arguments) as out,
    ):
        url = f"http://127.0.0.1:{unused_tcp_port}/webhooks"
        for expected in ("accepted", "duplicate"):
            sent = await request(session, "POST", url, data=body, headers=signed(body))
            assert sent == (202, {"message": expected})
        assert (await request(session, "POST", url, data=body))[0] == 401
        if worker is None:
            assert await out.readline() == b"sig_1 is completed\n"
        else:
            async with running(unused_tcp_port, tmp_path, worker) as handled:
                assert await handled.readline() == b"sig_1 is completed\n"


@pytest.mark.parametrize(
    ("guide", "name", "command"),
    [
        ("README.md", "webhooks.py", ("-m", "uvicorn", "webhooks:app", "--no-access-log", "--port", "{port}")),
        ("signing_async/webhooks/README.md", "receiver.py", ("receiver.py",)),
    ],
)
async def test_receiver_that_a_reader_pastes_handles_an_event_of_the_sandbox(
    guide: str, name: str, command: tuple[str, ...], tmp_path: Path, unused_tcp_port: int
) -> None:
    """It runs as printed, but for its port."""
    (tmp_path / name).write_text(guides.files(ROOT / guide)[name].replace("8000", str(unused_tcp_port)))
    url = f"http://127.0.0.1:{unused_tcp_port}/webhooks"
    async with (
        asyncio.timeout(60),
        Sandbox() as sandbox,
        SigningClient(sandbox.base_url, sandbox.access_token()) as client,
        aiohttp.ClientSession() as session,
        running(unused_tcp_port, tmp_path, *command, PYTHONUNBUFFERED="1") as out,
    ):
        assert (await request(session, "POST", url, data=b"{}"))[0] == 401
        sandbox.webhooks.register(url, secret="the shared secret")
        documents, recipients = [PdfSource(make_pdf(), "lease.pdf")], [NewRecipient("anna@example.com")]
        signing = await client.dispatch(SigningPackage("Lease", "EN", documents, recipients))
        await sandbox.complete(signing.id)
        while await out.readline() != f"{signing.id} is completed\n".encode():
            assert not out.at_eof()


async def test_fastapi_example_logs_in_sends_once_and_archives(tmp_path: Path, unused_tcp_port: int) -> None:
    """The webhooks guide shows it whole."""
    guide = guides.ROOT / "signing_async/webhooks/README.md"
    assert guides.files(guide)["fastapi_app.py"] == Path(FOLDER, "fastapi_app.py").read_text("utf-8")
    origin = f"http://127.0.0.1:{unused_tcp_port}"
    command = ("-m", "uvicorn", "fastapi_app:app", "--no-access-log", "--port", "{port}")
    async with Sandbox() as sandbox, aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        app = sandbox.register_app(redirect_uri=f"{origin}/callback")
        environment = {
            "SIGNING_BASE_URL": sandbox.base_url,
            "SIGNING_CLIENT_ID": app.client_id,
            "SIGNING_CLIENT_SECRET": app.client_secret or "",
            "SIGNING_REDIRECT_URI": app.redirect_uri,
        }
        sandbox.webhooks.register(f"{origin}/webhooks", secret=SECRET)
        async with running(unused_tcp_port, tmp_path, *command, **environment):
            await request(browser, "GET", f"{origin}/openapi.json")
            async with browser.get(f"{origin}/login", allow_redirects=False) as response:
                authorize = urlsplit(response.headers["Location"])
            granted = {"code": sandbox.authorize(app), "state": parse_qs(authorize.query)["state"][0]}
            assert (await request(browser, "GET", f"{origin}/callback", params=granted))[0] == 200
            # Loading the page again does not send the code again, which would revoke the token.
            assert (await request(browser, "GET", f"{origin}/callback", params=granted))[0] == 400
            contract = f"{origin}/contracts/lease-2031?email=anna@example.com"
            first, second = [await request(browser, "POST", contract, data=make_pdf()) for _ in range(2)]
            assert first == second
            assert (first[0], first[1]["state"]) == (200, "sent")
            await sandbox.complete(first[1]["signing"])
            while not list(tmp_path.glob("archive/**/*.pdf")):
                await asyncio.sleep(0.02)
            status, answer = await request(browser, "POST", contract, data=b"no PDF")
            assert (status, "not a PDF" in answer["error"]) == (400, True)
