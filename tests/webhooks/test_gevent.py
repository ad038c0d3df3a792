"""Receivers in a gevent worker of gunicorn, where all requests share one thread of the operating system."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from signing_async.webhooks import Event, Inbox, Receiver, SQLiteSeenEvents, WebhookVerifier, wsgi_app
from tests.guides import ROOT
from tests.needs import needs_module
from tests.webhooks.deliveries import SECRET, event_body, request, signed


def make_app() -> Callable[[dict[str, Any], Any], Any]:
    """Return an application with a receiver for each kind of handler, at a path of its own."""

    async def wait(event: Event) -> None:
        await asyncio.sleep(0.01)

    folder = Path(os.environ["SIGNING_TEST_FOLDER"])
    verifier = WebhookVerifier(SECRET)
    receivers = {
        "/async": Receiver(verifier, wait),
        "/plain": Receiver(verifier, lambda event: time.sleep(0.01), seen=SQLiteSeenEvents(folder / "seen.db")),
        "/inbox": Receiver(verifier, Inbox(folder / "inbox.db")),
    }
    return lambda environ, start: wsgi_app(receivers[environ["PATH_INFO"]])(environ, start)


def test_concurrent_deliveries_are_accepted_by_a_gevent_worker(tmp_path: Path, unused_tcp_port: int) -> None:
    needs_module("gevent")
    needs_module("gunicorn")

    def deliver(path: str) -> int:
        body = event_body()
        return request(unused_tcp_port, path, body, signed(body))[0]

    command = ["gunicorn", "-k", "gevent", "-b", f"127.0.0.1:{unused_tcp_port}", f"{__name__}:make_app()"]
    environment = {**os.environ, "SIGNING_TEST_FOLDER": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, stderr=subprocess.PIPE
    ) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if b"Booting worker" in line:
                    break
            with ThreadPoolExecutor(20) as pool:
                statuses = list(pool.map(deliver, ["/async", "/plain", "/inbox"] * 10))
        finally:
            server.send_signal(signal.SIGQUIT)  # it stops at once: all have responded
            server.communicate(timeout=30)
    assert statuses == [202] * 30
