"""A real Redis for tests: a child process on a free loopback port that can be frozen, killed and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from tests.needs import needs
from tests.servers import talking


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
        # Else a restart would lose the last second of acknowledged writes.
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always", "--loglevel", "warning"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*command, *self.settings], stdout=log, stderr=log)
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

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @contextmanager
    def down(self) -> Iterator[None]:
        """Keep the server killed during the block. It keeps its data."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP during the block: the server accepts connections and does not respond."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def outage(self, how: str) -> AbstractContextManager[None]:
        """Freeze the server, or keep it down."""
        return self.frozen() if how == "frozen" else self.down()

    def close(self) -> None:
        """Kill it, and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder)


@contextmanager
def running_redis(*settings: str) -> Iterator[RedisServer]:
    """Run a server for the length of the block."""
    server = RedisServer(*settings)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module", name="redis")
def redis_of_a_module() -> Iterator[RedisServer]:
    """A Redis for all tests of a module, which leave it running."""
    with running_redis() as server:
        yield server


class SlowWay:
    """A slow network path to a server; while it is cut, nothing passes."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.cut = False
        self.port = 0
        self.url = ""


@asynccontextmanager
async def slow_way(port: int, delay: float = 0.0) -> AsyncIterator[SlowWay]:
    """Forward a new port to ``port``, with a delay in each direction."""
    way = SlowWay(delay)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await asyncio.sleep(way.delay)
                if not way.cut:
                    writer.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        ways = [asyncio.create_task(work) for work in (forward(reader, far_writer), forward(far_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            far_writer.close()
            for each in ways:
                each.cancel()

    async with talking(relay) as origin:
        way.port = int(origin.rpartition(":")[2])
        way.url = f"redis://127.0.0.1:{way.port}"
        yield way
