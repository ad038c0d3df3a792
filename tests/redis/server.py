"""A real Redis for tests: started on a free port, stopped, resumed, killed, and started again without its data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from tests.needs import needs


def free_port() -> int:
    """Return a port that nobody listens on at this moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class RedisServer:
    """A server process at ``url``, which a restart does not change."""

    def __init__(self, *settings: str) -> None:
        self.program = needs("redis-server")
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.port: int = free_port()
        self.settings = settings
        self.url = f"redis://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it with its data, and wait until it responds."""
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "yes", "--loglevel", "warning", *self.settings]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + 20
        while not self._responds():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until, "redis-server does not start"
            time.sleep(0.01)

    def _responds(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(100)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False

    def stop(self) -> None:
        """SIGSTOP: it accepts connections and does not respond."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def restart(self, *settings: str) -> None:
        """Kill it, and start it with further settings."""
        self.kill()
        self.settings += settings
        self.start()

    def empty(self) -> None:
        """Delete its data; for the next start."""
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)

    def close(self) -> None:
        """Kill it, and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


@contextmanager
def running_redis(*settings: str) -> Iterator[RedisServer]:
    """Run a server for the length of the block."""
    server = RedisServer(*settings)
    try:
        yield server
    finally:
        server.close()


class SlowWay:
    """A slow network path to a server; while it is cut, nothing passes."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.cut = False
        self.url = ""


@asynccontextmanager
async def slow_way(port: int, delay: float = 0.0) -> AsyncIterator[SlowWay]:
    """Forward a new port to ``port``, with a delay in each direction."""
    way = SlowWay()
    way.delay = delay
    tasks: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await asyncio.sleep(way.delay)
                if not way.cut:
                    writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        ways = [asyncio.create_task(work) for work in (forward(reader, far_writer), forward(far_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()
            far_writer.close()
            for each in ways:
                each.cancel()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    way.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield way
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
