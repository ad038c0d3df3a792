"""The README and the guides beside the code are true: code runs as pasted, tables and links are right."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import attrs
import pytest

from signing_async import Assumptions, errors
from signing_async.sandbox import Sandbox
from tests import guides
from tests.guides import GUIDES, README, ROOT
from tests.pdfs import make_pdf
from tests.postgres.server import PostgresServer
from tests.redis.server import running_redis

PAGES = [README, *GUIDES]
PASTED = [path for path in PAGES if guides.session(path)]
TESTED = [path for path in PAGES if any(name.startswith("test_") for name in guides.files(path))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
async def environment(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """What every guide supposes: a tenant in the environment, and a PDF in the current folder."""
    (tmp_path / "lease.pdf").write_bytes(make_pdf())
    async with Sandbox() as sandbox:
        yield {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path))),
            "XDG_CONFIG_HOME": str(tmp_path),
            "SIGNING_BASE_URL": sandbox.base_url,
            "SIGNING_ACCESS_TOKEN": sandbox.access_token(),
        }


@pytest.fixture
def redis_url() -> Iterator[str]:
    with running_redis() as redis:
        yield redis.url


async def test_first_example_of_the_readme_runs_as_a_program(tmp_path: Path, environment: dict[str, str]) -> None:
    ran = await _run(environment, tmp_path, "-W", "error", "-c", guides.blocks(README)[0])
    assert ran == (0, "Lease was sent: ['anna@example.com']\n", "")


@pytest.mark.parametrize("path", PASTED, ids=name_of)
async def test_guide_runs_as_pasted_into_a_session(
    path: Path, tmp_path: Path, environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    code = guides.session(path) + "".join(guides.files(path).values())
    if "DATABASE_URL" in code:
        postgres: PostgresServer = request.getfixturevalue("postgres")
        environment["DATABASE_URL"] = await postgres.new_schema()
    if "REDIS_URL" in code:
        environment["REDIS_URL"] = request.getfixturevalue("redis_url")
    for name, content in guides.files(path).items():
        (tmp_path / name).write_text(content, "utf-8")
    pasted = guides.session(path) + "\nprint('the session', 'ended')\n"
    _, shown, errors = await _run(environment, tmp_path, "-m", "asyncio", pasted=pasted)
    assert "Traceback" not in errors, errors
    assert "Error:" not in errors, errors
    assert "the session ended" in shown, shown


@pytest.mark.parametrize("path", TESTED, ids=name_of)
async def test_tests_in_the_guide_pass(path: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    for name, content in guides.files(path).items():
        (tmp_path / name).write_text(content, "utf-8")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    plain = ("-p", "no:randomly", "-p", "no:cacheprovider")
    code, shown, _ = await _run(environment, tmp_path, "-m", "pytest", "-q", *plain)
    assert code == 0, shown


async def _run(
    environment: dict[str, str], folder: Path, *arguments: str, pasted: str = ""
) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(90):
            shown, errors = await process.communicate(pasted.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, shown.decode(), errors.decode()


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_of_the_guide_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text("utf-8"))
    assert not [link for link in links if "://" not in link and not (path.parent / link).exists()]


def test_readme_lists_every_guide() -> None:
    text = README.read_text("utf-8")
    assert not [name for name in map(name_of, GUIDES) if f"({name})" not in text]


def test_readme_is_short() -> None:
    assert README.read_text("utf-8").count("\n") < 170


def test_every_assumption_is_documented_with_its_default() -> None:
    guide = (ROOT / "signing_async/settings.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", guide[guide.index("## Assumptions") :], re.MULTILINE))
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
        elif isinstance(default, dict):
            assert shown == "none"
        elif isinstance(default, bool):
            assert shown == str(default).lower()
        else:
            number = float(shown.split()[0])
            assert default == number * (2**20 if "MiB" in shown else 1)


def test_commands_of_the_readme_are_one_line_each() -> None:
    lines = re.findall(r"^```sh\n(.*?)^```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert all(line.count("\n") == 1 and line.startswith("python3 -m venv .venv && ") for line in lines)
    assert [line.split(" && ")[-1].split()[0].rsplit("/")[-1] for line in lines] == ["signing-async", "python"]


def test_every_error_is_in_the_tree_of_errors_py() -> None:
    for name in errors.__all__:
        assert name in (errors.__doc__ or "")
