"""Receivers in a gevent worker of gunicorn, where all requests share one thread of the operating system."""

from __future__ import annotations

import asyncio
import http.client
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from signing_async.webhooks import Event, Inbox, Receiver, SQLiteSeenEvents, WebhookVerifier, wsgi_app
from tests.needs import needs_module
from tests.redis.server import free_port
from tests.webhooks.deliveries import SECRET, event_body, signed


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


def deliver(port: int, path: str, number: int) -> int:
    """Return the status of one delivery."""
    body = event_body(f"evt-{number}")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", path, body, signed(body))
        return connection.getresponse().status
    finally:
        connection.close()


def test_concurrent_deliveries_are_accepted_by_a_gevent_worker(tmp_path: Path) -> None:
    needs_module("gevent")
    needs_module("gunicorn")
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "-k", "gevent", "-b", f"127.0.0.1:{port}", f"{__name__}:make_app()"]
    environment = {**os.environ, "SIGNING_TEST_FOLDER": str(tmp_path)}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if b"Booting worker" in line:
                    break
            statuses: Counter[tuple[str, int]] = Counter()
            with ThreadPoolExecutor(20) as pool:
                paths = [path for _ in range(40) for path in ("/async", "/plain", "/inbox")]
                jobs = {pool.submit(deliver, port, path, number): path for number, path in enumerate(paths)}
                statuses.update((path, job.result()) for job, path in jobs.items())
        finally:
            server.terminate()
            server.communicate(timeout=30)
    assert statuses == {("/async", 202): 40, ("/plain", 202): 40, ("/inbox", 202): 40}
