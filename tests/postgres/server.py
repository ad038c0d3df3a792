"""A real PostgreSQL on a free loopback port, as a child process with a data folder of its own, and ways to hurt it."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import asyncpg  # type: ignore[import-untyped]  # it is typed, and carries no marker that says so

from tests.needs import missing

PASSWORD = "pa55word-of-the-database"
# A server that is killed here leaves the machine running: what it has written need not be on the disk.
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "80",
    "max_wal_senders": "0",
    "wal_level": "minimal",
    "autovacuum": "off",
    "log_min_messages": "fatal",
}


def programs() -> Path:
    """Where the newest PostgreSQL's programs are: Debian keeps them off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if on_path is not None:
        found.append(Path(on_path).resolve())
    if not found:
        missing("the program initdb")
    return found[-1].parent


def _unprivileged() -> dict[str, Any]:
    """Settings of a subprocess: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    users = {user.pw_name: user for user in pwd.getpwall()}
    user = users.get("postgres") or users.get("nobody") or missing("a user other than root, to run PostgreSQL as")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class PostgresServer:
    """Use it as a context manager; between `start` and `stop` it may be frozen, killed and started again."""

    def __init__(self) -> None:
        self._programs = programs()
        self._as = _unprivileged()
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def __enter__(self) -> Self:
        try:
            self._create()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def dsn(self, *, schema: str = "public", port: int | None = None, user: str = "signing") -> str:
        """Where it is, with the password; what is created goes into the schema."""
        place = f"127.0.0.1:{port or self.port}/postgres"
        return f"postgresql://{user}:{PASSWORD}@{place}?search_path={schema}"

    async def execute(self, sql: str) -> list[Any]:
        """Run a statement over a connection of its own."""
        connection = await asyncpg.connect(self.dsn())
        try:
            return list(await connection.fetch(sql))
        finally:
            await connection.close()

    async def new_schema(self) -> str:
        """The DSN of a schema that is empty."""
        schema = f"s{secrets.token_hex(6)}"
        await self.execute(f"CREATE SCHEMA {schema}")
        return self.dsn(schema=schema)

    def start(self) -> None:
        """Start it on its port, and return when it takes connections."""
        options = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data", "-p", str(self.port), *options],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={"LC_ALL": "C", "TZ": "UTC"},
                **self._as,
            )
        until = time.monotonic() + 60
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def _ready(self) -> bool:
        """Whether its status file says so: asking over the network would be another connection in a test's count."""
        with contextlib.suppress(OSError, IndexError):
            return (self._folder / "data" / "postmaster.pid").read_text().splitlines()[7].strip() == "ready"
        return False

    def stop(self) -> None:
        """Stop it at once, as a crash would be for whoever is connected; the data stays."""
        if self._process is not None:
            self.thaw()
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(60)
            self._process = None

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self._process is not None:
            for each in self._freeze():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            self._process.wait(60)
            self._process = None
            # The orphans go at once too; what they leave in the data folder would stop the next start.
            (self._folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def restart(self) -> None:
        """Stop it and start it again on the same port."""
        self.stop()
        self.start()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Killed for as long as the block runs."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP to all of its processes for as long as the block runs: connections stay, and nothing answers."""
        self._freeze()
        try:
            yield
        finally:
            self.thaw()

    def _freeze(self) -> list[int]:
        stopped: list[int] = []
        # Again until there is no new one: it may be forking.
        while fresh := [each for each in self._processes() if each not in stopped]:
            for each in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGSTOP)
            stopped += fresh
        return stopped

    def thaw(self) -> None:
        """Let it go on."""
        for each in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)

    def _processes(self) -> list[int]:
        """The server and its children; each of those leads a session of its own, so no group holds them."""
        if self._process is None:
            return []
        found = [self._process.pid]
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == self._process.pid:
                    found.append(int(folder.name))
        return found

    def close(self) -> None:
        """Stop it and remove its data."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _create(self) -> None:
        password = self._folder / "password"
        password.write_text(PASSWORD)
        for each in (self._folder, password):
            if self._as:
                os.chown(each, self._as["user"], self._as["group"])
        made = subprocess.run(
            [
                self._programs / "initdb",
                *("-D", self._folder / "data", "-U", "signing", f"--pwfile={password}", "--auth=scram-sha-256"),
                *("--no-sync", "--no-locale", "--encoding=UTF8"),
            ],
            capture_output=True,
            text=True,
            cwd=self._folder,
            check=False,
            **self._as,
        )
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr}")
