"""Measure valid deliveries per second with wrk: ``python -m tests.webhooks.throughput [KIND] [seconds]``.

KIND is ``memory`` or ``sqlite``, for deduplication alone, or ``inbox``, for durable storage.

The receiver runs in aiohttp on one core, wrk on another. Each delivery is a different event, signed beforehand.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aiohttp import web

from signing_async.webhooks import Event, Inbox, Receiver, SQLiteSeenEvents, WebhookVerifier, aiohttp_handler
from tests.webhooks.deliveries import SECRET, event_body, hex_of

SCRIPT = """
local deliveries, number = {}, 0
for line in io.lines("%s") do deliveries[#deliveries + 1] = line end
request = function()
  number = number %% #deliveries + 1
  local signature, body = deliveries[number]:match("^(%%S+) (.*)$")
  return wrk.format("POST", "/", {["X-Signature"] = signature, ["Content-Type"] = "application/json"}, body)
end
"""


def serve(kind: str, directory: Path, port: int) -> None:
    """Run the receiver under test; its handler does nothing."""

    async def handler(event: Event) -> None:
        pass

    seen = SQLiteSeenEvents(directory / "seen.db") if kind == "sqlite" else None
    app = web.Application()
    hand_off = Inbox(directory / "inbox.db") if kind == "inbox" else handler
    app.router.add_post("/", aiohttp_handler(Receiver(WebhookVerifier(SECRET), hand_off, seen=seen)))
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def measure(kind: str, seconds: int) -> tuple[float, float]:
    """Return accepted deliveries per second, and per second of the receiver's CPU time (stable on a busy machine)."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as probe:
        directory, port = Path(name), probe.getsockname()[1]
        bodies = (event_body(f"evt_{number}", padding="x" * 220) for number in range(15_000 * seconds))
        (directory / "deliveries").write_text("".join(f"{hex_of(body)} {body.decode()}\n" for body in bodies))
        (directory / "script.lua").write_text(SCRIPT % (directory / "deliveries"))
        probe.close()
        command = [sys.executable, "-m", "tests.webhooks.throughput", "serve", kind, str(directory), str(port)]
        server = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, {0}))
        try:
            _wait_for(port)
            load = [
                "wrk",
                "-t1",
                "-c32",
                f"-d{seconds}s",
                "-s",
                str(directory / "script.lua"),
                f"http://127.0.0.1:{port}/",
            ]
            before = _cpu_seconds(server.pid)
            done = subprocess.run(load, capture_output=True, text=True, check=True)
            used = _cpu_seconds(server.pid) - before
        finally:
            server.terminate()
            server.wait()
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(done.stdout)
    rate = float(re.findall(r"Requests/sec:\s+([0-9.]+)", done.stdout)[0])
    return rate, int(re.findall(r"(\d+) requests in", done.stdout)[0]) / used


def _cpu_seconds(process: int) -> float:
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _wait_for(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return
    kind = sys.argv[1] if len(sys.argv) > 1 else "memory"
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    rate, rate_of_cpu = measure(kind, seconds)
    print(f"deduplication in {kind}: {rate:.0f} valid deliveries per second, {rate_of_cpu:.0f} per second of CPU time")


if __name__ == "__main__":
    main()
