"""The service of the examples, as a process that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from signing_async.archive import verify_archive
from signing_async.sandbox import Sandbox
from tests.guides import ROOT
from tests.pdfs import make_pdf
from tests.redis.server import free_port

CONTRACTS = 8
SECRET = "whsec-of-the-story"


async def test_example_sends_and_archives_each_contract_once_though_it_is_killed(tmp_path: Path) -> None:
    """It is killed with SIGKILL when some contracts were sent or archived, and ends cleanly on SIGINT."""
    script = (ROOT / "tests/examples/service.py").read_text("utf-8")
    assert script.count("\n") < 80
    (tmp_path / "service.py").write_text(script, "utf-8")
    (tmp_path / "contracts").mkdir()
    for number in range(CONTRACTS):
        (tmp_path / "contracts" / f"berth-{number}.pdf").write_bytes(make_pdf(text=f"Berth {number}"))
    port = free_port()
    async with Sandbox(webhook_url=f"http://127.0.0.1:{port}/webhooks", webhook_secret=SECRET) as sandbox:
        for progress in (1, 6, 13):
            await run_until(progress, signal.SIGKILL, sandbox, tmp_path, port)
        assert await run_until(2 * CONTRACTS, signal.SIGINT, sandbox, tmp_path, port) == 0

        report = await verify_archive(tmp_path / "archive")
        assert (report.documents, report.findings) == (CONTRACTS, ())
        sent = [signing for signing in sandbox.signings if not signing.is_draft]
        assert sorted(signing.name for signing in sent) == sorted(f"berth-{number}" for number in range(CONTRACTS))
        invitations = Counter(one.recipient_id for one in sandbox.notifications if one.kind == "invitation")
        assert list(invitations.values()) == [1] * CONTRACTS


async def run_until(progress: int, end: signal.Signals, sandbox: Sandbox, folder: Path, port: int) -> int:
    """Run the service, and sign what it sends, until so many contracts were sent and archived, both counted."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PORT": str(port),
        "SIGNING_BASE_URL": sandbox.base_url,
        "SIGNING_ACCESS_TOKEN": sandbox.access_token(),
        "SIGNING_WEBHOOK_SECRET": SECRET,
    }
    # The process that runs the tests may ignore SIGINT, as in the background of a shell.
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "service.py", cwd=folder, env=environment, stdout=asyncio.subprocess.DEVNULL, preexec_fn=default
    )
    try:
        manifest = folder / "archive" / "manifest.jsonl"
        is_listening, reached = False, 0
        while reached < progress or not (is_listening or end is signal.SIGKILL):
            assert process.returncode is None
            await asyncio.sleep(0.02)
            sent = [signing for signing in sandbox.signings if not signing.is_draft]
            for signing in sent:
                if not signing.is_completed:
                    await sandbox.complete(signing.id)
            reached = len(sent) + (manifest.read_bytes().count(b"\n") if manifest.exists() else 0)
            # Before the service has started, Python itself would end with SIGINT.
            is_listening = is_listening or await accepts(port)
        process.send_signal(end)
    except BaseException:
        process.kill()
        raise
    return await process.wait()


async def accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    return True
