"""The package in other people's processes: flags of Python, other event loops, forks, gevent, anyio, a proxy."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from signing_async.sandbox import Sandbox
from tests.needs import needs_module
from tests.transport.test_proxy import proxying

ROOT = Path(__file__).parent.parent
IMPORT = "from tests.first_day import main"


async def _run(sandbox: Sandbox, *command: str, **environment: str) -> tuple[int | None, str]:
    """Run Python with a client's settings; return its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SIGNING_BASE_URL": sandbox.base_url,
            "SIGNING_ACCESS_TOKEN": sandbox.access_token(),
            **environment,
        },
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


@pytest.mark.parametrize(
    ("needed", "command", "expected"),
    [
        ("", ("-X", "dev", "-W", "error", "-m", "tests.first_day", "plain"), "sent\n"),
        ("uvloop", ("-m", "tests.first_day", "uvloop"), "sent\n"),
        ("", ("-W", "ignore::DeprecationWarning", "-m", "tests.first_day", "fork"), "sent\nsent\n"),
        ("gevent", ("-c", f"from gevent import monkey; monkey.patch_all(); {IMPORT}; main('gevent')"), "sent\n"),
    ],
    ids=["dev", "uvloop", "fork", "gevent"],
)
async def test_first_day_works(needed: str, command: tuple[str, ...], expected: str, sandbox: Sandbox) -> None:
    if needed:
        needs_module(needed)
    assert await _run(sandbox, *command) == (0, expected)


async def test_first_day_works_optimized_and_behind_a_proxy_with_a_password(sandbox: Sandbox) -> None:
    async with proxying() as proxy:
        ran = await _run(sandbox, "-OO", "-m", "tests.first_day", "plain", SIGNING_PROXY=proxy.url)
    assert ran == (0, "sent\n")
    assert (len(proxy.accepted) > 10, proxy.refused) == (True, 0)


async def test_first_day_works_under_the_pytest_plugin_of_anyio(sandbox: Sandbox, tmp_path: Path) -> None:
    needs_module("anyio")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "from tests.first_day import first_day\n\n"
        "@pytest.fixture\n"
        "def anyio_backend():\n"
        "    return 'asyncio'\n\n"
        "@pytest.mark.anyio\n"
        "async def test_first_day():\n"
        "    await first_day()\n"
    )
    options = ("-q", "-W", "error", "-p", "anyio", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}")
    only = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    code, output = await _run(sandbox, "-m", "pytest", *options, str(tmp_path / "test_it.py"), **only)
    assert (code, "1 passed" in output) == (0, True), output
