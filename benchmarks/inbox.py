"""Deliveries under wrk: with deduplication in memory, which is the limit, and stored durably in an inbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web

from signing_async.postgres import PostgresInbox
from signing_async.webhooks import (
    Event,
    Inbox,
    MemorySeenEvents,
    Receiver,
    WebhookVerifier,
    aiohttp_handler,
    sign,
)
from signing_async.webhooks.event import parse_event
from tests.postgres.server import PostgresServer

from .measure import MISSING, on_both_cores, process_cpu, quick
from .report import Table, judge, show

SECRET = "a webhook secret of a usual length"
KINDS = {
    "memory": "MemorySeenEvents, a handler that does nothing",
    "inbox": "Inbox in SQLite, durable",
    "postgres": "PostgresInbox on the same machine, durable",
}
_TARGETS = {
    "inbox": ("inbox: durable 202s a second, under wrk on the same cores", 3000),
    "postgres": ("inbox in PostgreSQL: durable 202s a second, with wrk and the server on the same cores", 1500),
}
_SECONDS, _EVENTS = (1, 200) if quick() else (5, 20_000)
_CONNECTIONS = 8 if quick() else 64
_SCRIPT = """
local deliveries, number = {}, 0
for line in io.lines("%s") do deliveries[#deliveries + 1] = line end
request = function()
  number = number %% #deliveries + 1
  local signature, body = deliveries[number]:match("^(%%S+) (.*)$")
  return wrk.format("POST", "/", {["X-Signature"] = signature, ["Content-Type"] = "application/json"}, body)
end
"""
_PAUSE = "delay = function() return 50 end\n"  # milliseconds


def body_of(number: int) -> bytes:
    """A delivery of 300 bytes; 20 events have the same signing."""
    event = {"id": f"evt_{number}", "type": "signing.completed"}
    return json.dumps({"event": event, "signing": {"id": f"sig_{number // 20}"}, "padding": "x" * 190}).encode()


def serve(kind: str, folder: Path, port: int) -> None:
    """Run the receiver under test."""

    async def handler(event: Event) -> None:
        pass

    verifier = WebhookVerifier(SECRET)
    if kind in _TARGETS:
        receiver = Receiver(verifier, opened(kind, folder))
    else:
        receiver = Receiver(verifier, handler, seen=MemorySeenEvents(max_events=10**7))
    app = web.Application()
    app.router.add_post("/", aiohttp_handler(receiver))
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def opened(kind: str, folder: Path) -> Inbox:
    """The inbox that `running` has made ready."""
    return PostgresInbox((folder / "dsn").read_text()) if kind == "postgres" else Inbox(folder / "inbox.db")


@contextlib.contextmanager
def running(kind: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Start the receiver, and its database, in processes of their own; the receiver's port and process id."""
    with contextlib.ExitStack() as database:
        if kind == "postgres":
            server = database.enter_context(PostgresServer(fsync="on", full_page_writes="on"))
            (folder / "dsn").write_text(server.dsn())
        with receiving(kind, folder) as receiver:
            yield receiver


@contextlib.contextmanager
def receiving(kind: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Start the receiver in a process of its own; its port and process id."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.inbox", kind, str(folder), str(port)])
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except OSError:
                assert process.poll() is None, "the receiver did not start"
                time.sleep(0.05)
            else:
                break
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def deliveries(kind: str) -> tuple[float, float]:
    """Accepted deliveries per second, and per second of the receiver's CPU time, which a busy machine changes less."""
    with tempfile.TemporaryDirectory() as name, running(kind, Path(name)) as (port, process):
        folder = Path(name)
        bodies = [body_of(number) for number in range(1_000 if quick() else 15_000 * _SECONDS)]
        lines = (f"{sign(SECRET, body)['X-Signature']} {body.decode()}\n" for body in bodies)
        (folder / "deliveries").write_text("".join(lines))
        (folder / "script.lua").write_text((_SCRIPT + (_PAUSE if quick() else "")) % (folder / "deliveries"))
        script, url = str(folder / "script.lua"), f"http://127.0.0.1:{port}/"
        before = process_cpu(process)
        load = ["wrk", "-t1", f"-c{_CONNECTIONS}", f"-d{_SECONDS}s", "-s", script, url]
        done = subprocess.run(load, capture_output=True, text=True, check=True)
        used = process_cpu(process) - before
        assert "Non-2xx" not in done.stdout, done.stdout
        assert "Socket errors" not in done.stdout, done.stdout
        if kind in _TARGETS:
            asyncio.run(check_stored(opened(kind, folder), int(re.findall(r"(\d+) requests in", done.stdout)[0])))
    rate = float(re.findall(r"Requests/sec:\s+([0-9.]+)", done.stdout)[0])
    return rate, int(re.findall(r"(\d+) requests in", done.stdout)[0]) / used


async def check_stored(inbox: Inbox, acknowledged: int) -> None:
    """Fail if the inbox holds fewer events than were acknowledged."""
    async with inbox:
        stored = sum((await inbox.stats()).counts.values())
    assert stored >= acknowledged, f"{acknowledged} events were acknowledged, {stored} are stored"


async def handled(folder: Path) -> float:
    """Microseconds an event, from the start of the work to the last event's end."""
    done, end = 0, asyncio.Event()

    async def handler(event: Event) -> None:
        nonlocal done
        done += 1
        if done == _EVENTS:
            end.set()

    async with Inbox(folder / "handled.db") as inbox:
        inbox.on("*")(handler)
        for start in range(0, _EVENTS, 500):
            bodies = [body_of(number) for number in range(start, min(start + 500, _EVENTS))]
            await asyncio.gather(*(inbox.add(parse_event(body, datetime.now(UTC)), body) for body in bodies))
        began = time.perf_counter()
        async with inbox.running():
            await end.wait()
        return (time.perf_counter() - began) / _EVENTS * 1e6


def flush() -> float:
    """Milliseconds to write 4 KB to the disk durably."""
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        for _ in range(20):
            os.write(file.fileno(), b"x" * 4096)
            os.fdatasync(file.fileno())
        return (time.perf_counter() - began) / 20 * 1000


def has_postgres() -> bool:
    return shutil.which("initdb") is not None or any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def main() -> None:
    # The receiver and wrk share both cores, as on a small server.
    with on_both_cores():
        _compare()


def _compare() -> None:
    kinds = {"inbox": KINDS["inbox"]} if quick() else KINDS
    rows = []
    for kind, name in kinds.items():
        if shutil.which("wrk") is None or (kind == "postgres" and not has_postgres()):
            rows.append([name, MISSING, ""])
            continue
        rate, of_cpu = deliveries(kind)
        rows.append([name, f"{rate:.0f}", f"{of_cpu:.0f}"])
        if kind in _TARGETS:
            target, at_least = _TARGETS[kind]
            judge(target, rate, at_least=at_least)
    note = (
        f"{_SECONDS} s of wrk with {_CONNECTIONS} connections; each delivery is a new event of 300 bytes."
        f" A flush to this disk took {flush():.1f} ms, the load was {os.getloadavg()[0]:.1f}."
    )
    show(Table("Receiver: deliveries", ("store", "a second", "a second of its CPU time"), rows, note))
    with tempfile.TemporaryDirectory() as name:
        judge("inbox: an async handler's overhead", asyncio.run(handled(Path(name))), at_most=300, unit="µs")


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
