"""`demo`, from a new app to sealed PDFs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from signing_async import cli
from signing_async.cli.demo import contract_pdf


def _run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from signing_async.cli import main; main()", *arguments],
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(Path(cli.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_demo_tells_the_whole_story(tmp_path: Path) -> None:
    """Step by step, to two sealed PDFs on disk and the commands to look further."""
    ran = _run("demo", "--folder", str(tmp_path / "signed"))
    assert (ran.returncode, ran.stderr) == (0, "")
    for said in ("no legal signing service", "sent once: 1 invitation", "signing.completed", "refused", "Look further"):
        assert said in ran.stdout
    assert sorted(path.name for path in (tmp_path / "signed").iterdir()) == ["inventory.pdf", "lease.pdf"]
    assert (tmp_path / "signed/lease.pdf").read_bytes().startswith(contract_pdf("Lease of the boat house"))


def test_the_demo_for_machines() -> None:
    """--json prints what came out, and nothing else; the sealed files are where it says, as it says."""
    ran = _run("demo", "--json")
    told = json.loads(ran.stdout)
    assert told["signing"]["state"] == "completed"
    assert told["events"][-1] == "signing.completed"
    for file in told["sealed"]:
        data = Path(file["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"])


def test_the_demo_in_a_folder_that_cannot_be() -> None:
    """The error names the option, the reason and the path."""
    ran = _run("demo", "--folder", "/dev/null/x")
    assert (ran.returncode, ran.stderr) == (2, "Error: --folder: Not a directory: '/dev/null/x'\n")
