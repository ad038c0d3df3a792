"""The README and the guides beside the code are true: code runs, tables are complete, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import pytest
from taskiq import InMemoryBroker

from signing_async import Assumptions, Signing, SigningClient, errors
from signing_async.taskiq import add_dispatch
from tests import guides
from tests.guides import ROOT
from tests.postgres.server import PostgresServer
from tests.redis.server import running_redis
from tests.telemetry.recorded import configurable
from tests.template_service import template_service

README = ROOT / "README.md"
# These run with files of their own, in `tests/sealed` and in `tests/test_testing.py`.
ELSEWHERE = {ROOT / "signing_async/sealed.md", ROOT / "signing_async/testing/README.md"}
GUIDES = sorted((ROOT / "signing_async").rglob("*.md"))
WITH_TESTS = [path for path in GUIDES if path not in ELSEWHERE and any(map(guides.is_test, guides.blocks(path)))]
NAMES = [str(path.relative_to(ROOT)) for path in GUIDES]


def test_first_example_of_the_readme_runs_as_a_program(tmp_path: Path) -> None:
    first = guides.blocks(README)[0]
    (tmp_path / "lease.pdf").write_bytes(guides.make_pdf())
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", first],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "Lease was sent: ['anna@example.com']\n"


async def test_other_examples_of_the_readme_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guides.namespace(tmp_path) as names:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        monkeypatch.setenv("SIGNING_BASE_URL", names["base_url"])
        monkeypatch.setenv("SIGNING_ACCESS_TOKEN", names["access_token"])
        for block in guides.blocks(README)[1:]:
            await guides.run(block, "README.md", names)
    shown = capsys.readouterr().out
    assert {"x draft", "empty draft", "x completed"} <= set(shown.splitlines())


@pytest.mark.parametrize("path", [path for path in GUIDES if path not in ELSEWHERE], ids=str)
async def test_code_of_the_guide_runs(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = [block for block in guides.blocks(path) if not guides.is_test(block)]
    more: dict[str, object] = {}
    if any("postgres_dsn" in block for block in code):
        postgres: PostgresServer = request.getfixturevalue("postgres")
        more["postgres_dsn"] = await postgres.new_schema()
    if any("redis_url" in block for block in code):
        redis = request.getfixturevalue("redis_server")
        more["redis_url"] = redis.url
    async with AsyncExitStack() as stack:
        if any("opentelemetry" in block for block in code):
            stack.enter_context(configurable(monkeypatch))
        if any("/api/1.0/templates" in block for block in code):
            server = await stack.enter_async_context(template_service())
            more["client"] = await stack.enter_async_context(SigningClient(server.origin, "token"))
            more["signing"] = Signing("s-1")
        names = await stack.enter_async_context(guides.namespace(tmp_path, **more))
        if any("(broker)" in block for block in code):
            names["broker"] = add_dispatch(InMemoryBroker(), client=names["make_client"], journal=names["make_journal"])
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        monkeypatch.setenv("SIGNING_BASE_URL", names["base_url"])
        monkeypatch.setenv("SIGNING_ACCESS_TOKEN", names["access_token"])
        for number, block in enumerate(code, start=1):
            await guides.run(block, f"{path.relative_to(ROOT)}, block {number}", names)


@pytest.fixture
def redis_server() -> object:
    with running_redis() as redis:
        yield redis


@pytest.mark.parametrize("path", WITH_TESTS, ids=str)
def test_tests_in_the_guide_pass(path: Path, pytester: pytest.Pytester) -> None:
    for number, block in enumerate(filter(guides.is_test, guides.blocks(path))):
        pytester.makepyfile(**{f"test_block_{number}": block})
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    pytester.syspathinsert(ROOT)
    outcomes = pytester.runpytest_subprocess("-q", "-p", "no:randomly").parseoutcomes()
    assert outcomes.keys() == {"passed"}


@pytest.mark.parametrize("path", [README, *GUIDES], ids=["README.md", *NAMES])
def test_links_of_the_guide_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text("utf-8"))
    assert not [link for link in links if "://" not in link and not (path.parent / link).exists()]


def test_readme_lists_every_guide() -> None:
    text = README.read_text("utf-8")
    assert not [name for name in NAMES if f"({name})" not in text]


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
