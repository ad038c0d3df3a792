"""`demo`, from a new app to sealed PDFs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from signing_async.testing import sample_pdf
from tests.cli.terminal import piped


def test_demo_prints_each_step_and_leaves_sealed_pdfs(tmp_path: Path) -> None:
    """A second run, here as JSON, keeps the archive of the first one; neither uses the user's journal."""
    folder, journal = tmp_path / "signed", tmp_path / "own.journal"
    environment = {"SIGNING_JOURNAL": str(journal)}
    ran = piped("demo", "--folder", str(folder), environment=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
    for text in (
        "not a legal signing service",
        "sent once: 1 invitation",
        "signing.completed",
        "refused",
        "killed (SIGKILL)",
        "the manifest proves it",
        "What next",
    ):
        assert text in ran.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["archive", "inventory.pdf", "lease.pdf"]
    assert (folder / "lease.pdf").read_bytes().startswith(sample_pdf("Lease of the boat house"))

    again = piped("demo", "--folder", str(folder), "--json", environment=environment)
    facts = json.loads(again.stdout)
    assert facts["signing"]["state"] == "completed"
    assert facts["events"][-1] == "signing.completed"
    archive = facts["archive"]
    assert archive["ok"]
    assert archive["path"].endswith("archive-2")
    assert archive["archived_before_the_kill"] < archive["documents"] == 22
    assert len(list(Path(archive["path"]).rglob("*.pdf"))) == 22
    for file in facts["sealed"]:
        data = Path(file["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"])
    assert not journal.exists()
