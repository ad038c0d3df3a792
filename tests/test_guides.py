"""The README and the guides beside the code are true: code runs as pasted, tables and links are right."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import pytest

from signing_async import Assumptions, BadRequest, NewRecipient, SigningClient
from signing_async.sandbox import Profile, Sandbox
from tests import guides
from tests.guides import GUIDES, README, ROOT
from tests.pdfs import make_pdf
from tests.postgres.server import PostgresServer
from tests.redis.server import running_redis

PAGES = [README, *GUIDES]
PASTED = [path for path in PAGES if guides.session(path)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def needs_database(path: Path) -> bool:
    code = guides.session(path) + "".join(guides.files(path).values())
    return "DATABASE_URL" in code or "REDIS_URL" in code


async def run_python(folder: Path, *arguments: str, pasted: str = "", **environment: str) -> tuple[str, str]:
    """Run Python with that standard input, and return what it printed and its errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
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
    return shown.decode(), errors.decode()


def tenant(sandbox: Sandbox) -> dict[str, str]:
    return {"SIGNING_BASE_URL": sandbox.base_url, "SIGNING_ACCESS_TOKEN": sandbox.access_token()}


async def test_first_example_of_the_readme_runs_as_a_program(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "lease.pdf").write_bytes(make_pdf())
    ran = await run_python(tmp_path, "-W", "error", "-c", guides.blocks(README)[0], **tenant(sandbox))
    assert ran == ("Lease was sent: ['anna@example.com']\n", "")


async def test_bankid_recipient_of_the_dispatch_guide_is_accepted_if_the_profile_names_its_field() -> None:
    """The example is in a sentence: no session runs it."""
    guide = (ROOT / "signing_async/dispatch/README.md").read_text("utf-8")
    [example], [profile] = (re.findall(rf"`({name}\(.*?\))`", guide) for name in ("NewRecipient", "Profile"))

    async def add(profile: Profile) -> None:
        async with (
            Sandbox(profile=profile) as sandbox,
            SigningClient(sandbox.base_url, sandbox.access_token()) as client,
        ):
            draft = await client.signings.create(name="Lease", language="EN")
            await client.recipients.add(draft, eval(example, {"NewRecipient": NewRecipient}))

    await add(eval(profile, {"Profile": Profile}))
    with pytest.raises(BadRequest, match="ssn"):
        await add(Profile(identification_field="ssn"))


async def check_sessions(paths: list[Path], folder: Path, **environment: str) -> None:
    """Paste the guides into one session; each has what it supposes: a tenant, and a folder with a PDF and its files."""
    session = "import os, sys\nsys.path.insert(0, '')\n"
    async with AsyncExitStack() as stack:
        for number, path in enumerate(paths):
            own = folder / str(number)
            own.mkdir()
            (own / "lease.pdf").write_bytes(make_pdf())
            for name, content in guides.files(path).items():
                (own / name).write_text(content, "utf-8")
            settings = tenant(await stack.enter_async_context(Sandbox()))
            session += f"os.chdir({str(own)!r})\nos.environ.update({settings})\n{guides.session(path)}\n"
            session += f"print({name_of(path)!r}, 'ended')\nprint('after', {name_of(path)!r}, file=sys.stderr)\n"
        shown, errors = await run_python(folder, "-m", "asyncio", pasted=session, **environment)
    assert "Traceback" not in errors, errors
    assert "Error:" not in errors, errors
    assert [path for path in paths if f"{name_of(path)} ended" not in shown] == [], shown


async def test_guides_run_as_pasted_into_a_session(tmp_path: Path) -> None:
    await check_sessions([path for path in PASTED if not needs_database(path)], tmp_path)


async def test_guides_with_a_database_run_as_pasted_into_a_session(tmp_path: Path, postgres: PostgresServer) -> None:
    with running_redis() as redis:
        urls = {"DATABASE_URL": await postgres.new_schema(), "REDIS_URL": redis.url}
        await check_sessions([path for path in PASTED if needs_database(path)], tmp_path, **urls)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_of_the_guide_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text("utf-8"))
    assert not [link for link in links if "://" not in link and not (path.parent / link).exists()]


def test_readme_lists_every_guide() -> None:
    text = README.read_text("utf-8")
    assert not [name for name in map(name_of, GUIDES) if f"({name})" not in text]


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
        elif isinstance(default, dict | bool):
            assert shown == {"{}": "none", "True": "true", "False": "false"}[str(default)]
        else:
            number = float(shown.split()[0])
            assert default == number * (2**20 if "MiB" in shown else 1)
