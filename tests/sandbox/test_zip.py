"""The sandbox in an application that is packed into one zip file."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.guides import ROOT
from tests.pdfs import make_pdf

_PROGRAM = """
import asyncio
import sys

import aiohttp

from signing_async import SigningClient
from signing_async.sandbox import Sandbox


async def main() -> None:
    async with Sandbox() as sandbox, SigningClient(sandbox.base_url, sandbox.access_token()) as client:
        signing = await client.signings.create(name="Lease", language="EN")
        document = await client.documents.upload(signing, sys.argv[1])
        await client.recipients.add(signing, email="anna@example.com")
        await client.signings.send(signing)
        await sandbox.complete(signing.id)
        print((await client.documents.read_signed(signing, document))[:5])
        async with aiohttp.ClientSession(sandbox.base_url) as session:
            for page in ("/sandbox", "/sandbox/faults", "/openapi.json"):
                print(page, (await session.get(page)).status)


asyncio.run(main())
"""


def test_sandbox_seals_and_shows_its_pages_from_a_zip(tmp_path: Path) -> None:
    packed = tmp_path / "app.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in (ROOT / "signing_async").rglob("*"):
            if path.is_file() and path.parent.name != "__pycache__":
                archive.write(path, path.relative_to(ROOT))
        archive.writestr("__main__.py", _PROGRAM)
    (tmp_path / "lease.pdf").write_bytes(make_pdf())
    ran = subprocess.run(
        [sys.executable, packed, "lease.pdf"],
        cwd=tmp_path,
        # No coverage of the packed copy: its source is gone when the report is made.
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COVERAGE_PROCESS_START")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.stderr, ran.returncode) == ("", 0)
    assert ran.stdout == "b'%PDF-'\n/sandbox 200\n/sandbox/faults 200\n/openapi.json 200\n"
