"""Each example of a framework runs as it stands."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.webhooks.deliveries import SECRET, event_body, signed

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# How each is served, and the program that handles its events, if that is another one.
SERVED = {
    "aiohttp_app": (["aiohttp_app.py"], None),
    "starlette_app": (["-m", "uvicorn", "starlette_app:app", "--port", "{port}"], None),
    "flask_app": (["-m", "flask", "--app", "flask_app", "run", "--port", "{port}"], "flask_app.py"),
    "django_app": (["-m", "gunicorn", "-b", "127.0.0.1:{port}", "django_app:application"], "django_app.py"),
}


@pytest.mark.parametrize("name", SERVED)
async def test_example_stores_an_event_once_and_handles_it(name: str, tmp_path: Path, unused_tcp_port: int) -> None:
    arguments, worker = SERVED[name]
    body = event_body("evt_1", signing={"id": "sig_1"})
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}",
        "STATE_FOLDER": str(tmp_path),
        "SIGNING_WEBHOOK_SECRET": SECRET,
        "PORT": str(unused_tcp_port),
    }

    async def start(*command: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=FOLDER, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    server = await start(*(each.format(port=unused_tcp_port) for each in arguments))
    handling = server if worker is None else await start(worker)
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            url = f"http://127.0.0.1:{unused_tcp_port}/webhooks"
            for expected in ("accepted", "duplicate"):
                assert await _post(session, url, body, signed(body)) == (202, {"message": expected})
            assert (await _post(session, url, body, {}))[0] == 401
            assert handling.stdout is not None
            while await handling.stdout.readline() != b"sig_1 is completed\n":
                assert not handling.stdout.at_eof(), "the event was not handled"
    finally:
        for process in {server, handling}:
            process.terminate()
            await process.communicate()


async def _post(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]
) -> tuple[int, dict[str, str]]:
    while True:
        try:
            async with session.post(url, data=body, headers=headers) as response:
                return response.status, await response.json()
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.05)  # the server starts
