"""A real Redis of a test's own: started on a free port, stopped, woken, killed, and started again empty."""

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
    """A port that nobody listens on at this moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class RedisServer:
    """A server process; ``url`` leads to it, also after it was started again."""

    def __init__(self, *settings: str) -> None:
        self.program = needs("redis-server")
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.port: int = free_port()
        self.settings = settings
        self.url = f"redis://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, with what it kept, and wait until it answers."""
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "yes", "--loglevel", "warning", *self.settings]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + 20
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until, "redis-server does not start"
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(100)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False

    def stop(self) -> None:
        """Stop it in its tracks: it takes connections, and answers nothing."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, without a chance to write anything."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def restart(self, *settings: str) -> None:
        """Kill it, and start it with further settings."""
        self.kill()
        self.settings += settings
        self.start()

    def empty(self) -> None:
        """Take away what it kept, for the next start."""
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
    """A server for as long as this lasts."""
    server = RedisServer(*settings)
    try:
        yield server
    finally:
        server.close()


class SlowWay:
    """A way to a server that takes its time; it can be cut, so that what goes by it hears no more of the server."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.cut = False
        self.url = ""


@asynccontextmanager
async def slow_way(port: int, delay: float = 0.0) -> AsyncIterator[SlowWay]:
    """A port that leads to another one, with a delay for whatever passes, in each direction."""
    way = SlowWay()
    way.delay = delay
    tasks: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        ways = [asyncio.create_task(work) for work in (pass_on(reader, far_writer), pass_on(far_reader, writer))]
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
