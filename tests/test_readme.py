"""The README is true: its code runs, its commands are one line each, its table names every assumption."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

import signing_async
from signing_async import Assumptions, NewRecipient, SigningClient, SigningPackage, SqliteJournal, errors
from signing_async.sandbox import Sandbox
from signing_async.webhooks import sign
from tests.pdfs import make_pdf
from tests.postgres.server import PostgresServer
from tests.redis.server import running_redis

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
ENGINES = ("redis_url", "postgres_dsn", "enqueuing")


def test_the_first_screen_is_ten_lines_that_work(tmp_path: Path) -> None:
    """The first example runs as it stands, as a program of its own."""
    (tmp_path / "lease.pdf").write_bytes(make_pdf())
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKS[0]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "Lease was sent: ['anna@example.com']\n"


async def test_the_guides_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every other block runs, in order, with the names that it takes for granted."""
    (tmp_path / "lease.pdf").write_bytes(make_pdf())
    async with Sandbox() as sandbox:
        app = sandbox.register_app(redirect_uri="https://app.example.com/callback")
        async with SigningClient(sandbox.base_url, sandbox.access_token()) as client:
            completed = await _sendable(client)
            await client.signings.send(completed)
            await sandbox.complete(completed.id)
            body = json.dumps({"event": {"id": "1", "type": "signing.completed"}}).encode()
            names: dict[str, Any] = {
                "base_url": sandbox.base_url,
                "client_id": app.client_id,
                "client_secret": app.client_secret,
                "access_token": sandbox.access_token(),
                "folder": tmp_path,
                "user_id": "anna",
                "session": {},
                "pdf_bytes": make_pdf(text="inventory"),
                "completed_id": completed.id,
                "signing_id": completed.id,
                "new_secret": "new",
                "old_secret": "old",
                "body": body,
                "headers": {"X-Signature": sign(b"old", body)},
                "empty_draft": await client.signings.create(name="empty", language="EN"),
            }
            for number, block in enumerate(BLOCKS[1:], start=2):
                if "signing_sandbox" in block or any(name in block for name in ENGINES):
                    continue
                if "session[" in block and "callback_url" in block:
                    code = sandbox.authorize(app)
                    names["callback_url"] = f"{app.redirect_uri}?code={code}&state={names['session']['state']}"
                if "from signing_async import DocumentRejected" in block or "RateLimited" in block:
                    names["client"] = client
                    names["signing"] = await _sendable(client)
                await _run(block, f"README.md, block {number}", names)
    said = capsys.readouterr().out
    assert "redirect to http" in said
    assert "not_pdf" in said
    assert "code cannot_be_sent" in said


async def test_the_guides_to_engines_run(
    tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks about Redis, PostgreSQL and Taskiq run too, beside real ones; the tasks in this process."""
    from taskiq import InMemoryBroker

    from signing_async.taskiq import add_dispatch

    (tmp_path / "lease.pdf").write_bytes(make_pdf())
    people = [NewRecipient("anna@example.com")]
    with running_redis() as redis:
        async with Sandbox() as sandbox:
            app = sandbox.register_app(redirect_uri="https://app.example.com/callback")
            names: dict[str, Any] = {
                "base_url": sandbox.base_url,
                "client_id": app.client_id,
                "client_secret": app.client_secret,
                "redirect_uri": app.redirect_uri,
                "access_token": sandbox.access_token(),
                "encryption_key": os.urandom(32),
                "redis_url": redis.url,
                "postgres_dsn": await postgres.new_schema(),
                "packages": [SigningPackage("Lease", "EN", [tmp_path / "lease.pdf"], people)],
                "make_client": lambda: SigningClient(sandbox.base_url, sandbox.access_token()),
                "make_journal": lambda: SqliteJournal(tmp_path / "tasks.journal"),
                **{name: getattr(signing_async, name) for name in ("OAuth", "SigningClient", "Token")},
            }
            for number, block in enumerate(BLOCKS, start=1):
                if any(name in block for name in ENGINES):
                    if "enqueuing" in block:
                        names["broker"] = add_dispatch(
                            InMemoryBroker(), client=names["make_client"], journal=names["make_journal"]
                        )
                    await _run(block, f"README.md, block {number}", names)
            assert sum(signing.state == "sent" for signing in sandbox.signings) == 2
            assert sandbox.signings[0].id in capsys.readouterr().out


def test_the_testing_guide_runs(pytester: pytest.Pytester) -> None:
    """Its test is collected, finds the plugin's fixtures, and passes."""
    (block,) = (block for block in BLOCKS if "signing_sandbox" in block)
    pytester.makepyfile(f"from tests.pdfs import make_pdf\npdf_bytes = make_pdf()\n\n{block}")
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    pytester.syspathinsert(ROOT)
    pytester.runpytest_subprocess("-q", "-p", "no:randomly").assert_outcomes(passed=1)


def test_every_assumption_is_documented() -> None:
    """The table has a row for each field, with its default."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", README[README.index("## Assumptions") :], re.MULTILINE))
    assert list(rows) == [field.name for field in attrs.fields(Assumptions)]
    for field in attrs.fields(Assumptions):
        default = getattr(Assumptions(), field.name)
        shown = rows[field.name]
        if isinstance(default, tuple):
            assert shown == ", ".join(f"`{name}`" for name in default)
        elif isinstance(default, str):
            assert shown == f"`{default}`"
        elif isinstance(default, frozenset):
            assert shown == ", ".join(map(str, default))
        elif isinstance(default, bool):
            assert shown == str(default).lower()
        else:
            number = float(shown.split()[0])
            assert default == number * (2**20 if "MiB" in shown else 1)


def test_the_commands_are_one_line_each() -> None:
    """Two lines to paste: one runs the demo, one runs the tests."""
    lines = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert all(line.count("\n") == 1 and line.startswith("python3 -m venv .venv && ") for line in lines)
    assert [line.split(" && ")[-1].split()[0].rsplit("/")[-1] for line in lines] == ["signing-async", "python"]


def test_every_error_is_in_the_tree() -> None:
    """The drawing at the top of errors.py names every class, under its parent."""
    for name in errors.__all__:
        assert name in (errors.__doc__ or "")


async def _sendable(client: SigningClient) -> Any:
    signing = await client.signings.create(name="x", language="EN")
    await client.documents.upload(signing, make_pdf(), "x.pdf")
    await client.recipients.add(signing, email="a@example.com", order=1)
    return signing


async def _run(block: str, name: str, names: dict[str, Any]) -> None:
    code = compile(block, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        await eval(code, names)
    else:
        exec(code, names)
