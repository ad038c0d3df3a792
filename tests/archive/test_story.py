"""The service of the examples, as a process that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

from signing_async.archive import verify_archive
from signing_async.sandbox import Sandbox
from tests.guides import ROOT
from tests.pdfs import make_pdf
from tests.redis.server import free_port

CONTRACTS = 12
SECRET = "whsec-of-the-story"


async def test_example_sends_and_archives_each_contract_once_though_it_is_killed(tmp_path: Path) -> None:
    """It is killed with SIGKILL whenever another contract was sent or archived, and ends cleanly on SIGINT."""
    script = (ROOT / "tests/examples/service.py").read_text("utf-8")
    assert script.count("\n") < 80
    (tmp_path / "service.py").write_text(script, "utf-8")
    (tmp_path / "contracts").mkdir()
    for number in range(CONTRACTS):
        (tmp_path / "contracts" / f"berth-{number}.pdf").write_bytes(make_pdf(text=f"Berth {number}"))
    port = free_port()
    async with Sandbox(webhook_url=f"http://127.0.0.1:{port}/webhooks", webhook_secret=SECRET) as sandbox:
        story = Story(tmp_path, sandbox, port)
        try:
            for progress in (1, 4, 9, 14, 20):
                await story.start()
                await story.reach(progress)
                await story.end(signal.SIGKILL)
            await story.start()
            await story.reach(2 * CONTRACTS)
            await story.listening()
            assert await story.end(signal.SIGINT) == 0
        finally:
            await story.end(signal.SIGKILL)

        report = await verify_archive(tmp_path / "archive")
        assert (report.documents, report.findings) == (CONTRACTS, ())
        sent = [signing for signing in sandbox.signings if not signing.is_draft]
        assert sorted(signing.name for signing in sent) == sorted(f"berth-{number}" for number in range(CONTRACTS))
        invitations = Counter(one.recipient_id for one in sandbox.notifications if one.kind == "invitation")
        assert set(invitations.values()) == {1}
        assert len(invitations) == CONTRACTS


class Story:
    """The service's process, and the people who sign what it sends."""

    def __init__(self, folder: Path, sandbox: Sandbox, port: int) -> None:
        self._folder = folder
        self._sandbox = sandbox
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PORT": str(port),
            "SIGNING_BASE_URL": sandbox.base_url,
            "SIGNING_ACCESS_TOKEN": sandbox.access_token(),
            "SIGNING_WEBHOOK_SECRET": SECRET,
        }

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "service.py",
            cwd=self._folder,
            env=self._environment,
            stdout=asyncio.subprocess.DEVNULL,
            # The process that runs the tests may ignore it, as in the background of a shell.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    async def reach(self, progress: int) -> None:
        """Sign what was sent until so many contracts were sent and archived, both counted."""
        while await self._progress() < progress:
            assert self._process.returncode is None
            await asyncio.sleep(0.02)

    async def listening(self) -> None:
        """Wait until the service has started: before, Python itself would end with SIGINT."""
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self._environment["PORT"])
            except ConnectionError:
                await asyncio.sleep(0.02)
            else:
                return writer.close()

    async def end(self, number: signal.Signals) -> int:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
        return await self._process.wait()

    async def _progress(self) -> int:
        sent = [signing for signing in self._sandbox.signings if not signing.is_draft]
        for signing in sent:
            if not signing.is_completed:
                await self._sandbox.complete(signing.id)
        manifest = self._folder / "archive" / "manifest.jsonl"
        return len(sent) + (manifest.read_bytes().count(b"\n") if manifest.exists() else 0)
