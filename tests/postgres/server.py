"""A real PostgreSQL for tests: a child process on a free loopback port that can be frozen, killed and restarted."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import asyncpg

from tests.needs import missing
from tests.redis.server import free_port

PASSWORD = "pa55word-of-the-database"
# The machine keeps running when the server is killed here: written data need not be on disk.
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
    """Return the folder of the newest PostgreSQL's programs: Debian keeps them off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if on_path is not None:
        found.append(Path(on_path).resolve())
    if not found:
        missing("the program initdb")
    return found[-1].parent


def _unprivileged() -> dict[str, Any]:
    """Return subprocess settings that drop root, as which PostgreSQL refuses to run."""
    if os.geteuid() != 0:
        return {}
    users = {user.pw_name: user for user in pwd.getpwall()}
    user = users.get("postgres") or users.get("nobody") or missing("a user other than root, to run PostgreSQL as")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


class PostgresServer:
    """A server process; use it as a context manager.

    ``settings`` override those of tests, which do not write to disk.
    """

    def __init__(self, **settings: str) -> None:
        self._settings = {**SETTINGS, **settings}
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

    def dsn(self, *, schema: str = "public", user: str = "signing") -> str:
        """Return the DSN, with the password and the schema for new tables."""
        place = f"127.0.0.1:{self.port}/postgres"
        return f"postgresql://{user}:{PASSWORD}@{place}?search_path={schema}"

    async def execute(self, sql: str) -> list[Any]:
        """Run a statement on a new connection."""
        connection = await asyncpg.connect(self.dsn())
        try:
            return list(await connection.fetch(sql))
        finally:
            await connection.close()

    async def new_schema(self) -> str:
        """Create an empty schema and return its DSN."""
        schema = f"s{secrets.token_hex(6)}"
        await self.execute(f"CREATE SCHEMA {schema}")
        return self.dsn(schema=schema)

    def start(self) -> None:
        """Start the server, and return when it accepts connections."""
        options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
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
        """Return whether its status file says that it is ready: a connection would change the counts of tests."""
        with contextlib.suppress(OSError, IndexError):
            return (self._folder / "data" / "postmaster.pid").read_text().splitlines()[7].strip() == "ready"
        return False

    def kill(self) -> None:
        """SIGKILL all processes of the server."""
        if self._process is not None:
            for each in self._freeze():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            self._process.wait(60)
            self._process = None
            # A leftover status file would stop the next start.
            (self._folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Keep the server killed during the block."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP all processes during the block: connections stay open, and nothing responds."""
        stopped = self._freeze()
        try:
            yield
        finally:
            for each in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGCONT)

    def outage(self, how: str) -> contextlib.AbstractContextManager[None]:
        """Freeze the server, or keep it down."""
        return self.frozen() if how == "frozen" else self.down()

    def _freeze(self) -> list[int]:
        stopped: list[int] = []
        # Repeat until there is no new process: the server may be forking.
        while fresh := [each for each in self._processes() if each not in stopped]:
            for each in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGSTOP)
            stopped += fresh
        return stopped

    def _processes(self) -> list[int]:
        """Return the ids of the server and its children, which share no process group."""
        if self._process is None:
            return []
        found = [self._process.pid]
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == self._process.pid:
                    found.append(int(folder.name))
        return found

    def close(self) -> None:
        """Stop the server and remove its data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(60)
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
