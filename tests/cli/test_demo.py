"""`demo`, from a new app to sealed PDFs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from signing_async.testing import sample_pdf
from tests.cli.terminal import piped


def test_demo_prints_each_step_and_leaves_two_sealed_pdfs(tmp_path: Path) -> None:
    ran = piped("demo", "--folder", str(tmp_path / "signed"))
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
    assert sorted(path.name for path in (tmp_path / "signed").iterdir()) == ["archive", "inventory.pdf", "lease.pdf"]
    assert (tmp_path / "signed/lease.pdf").read_bytes().startswith(sample_pdf("Lease of the boat house"))


def test_demo_uses_no_journal_of_the_user_and_no_archive_of_an_earlier_demo(tmp_path: Path) -> None:
    journal = tmp_path / "own.journal"
    for number in (1, 2):
        ran = piped(
            "demo", "--folder", str(tmp_path / "signed"), "--json", environment={"SIGNING_JOURNAL": str(journal)}
        )
        archive = json.loads(ran.stdout)["archive"]
        assert (archive["ok"], archive["documents"]) == (True, 22), number
    assert not journal.exists()
    assert archive["path"].endswith("archive-2")


def test_demo_as_json_prints_one_object_with_the_sealed_files() -> None:
    ran = piped("demo", "--json")
    facts = json.loads(ran.stdout)
    assert facts["signing"]["state"] == "completed"
    assert facts["events"][-1] == "signing.completed"
    archive = facts["archive"]
    assert archive["ok"]
    assert archive["archived_before_the_kill"] < archive["documents"] == 22
    assert len(list(Path(archive["path"]).rglob("*.pdf"))) == 22
    for file in facts["sealed"]:
        data = Path(file["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"])


def test_demo_folder_that_cannot_be_created_is_refused() -> None:
    ran = piped("demo", "--folder", "/dev/null/x")
    message = "Error: --folder: could not create the folder '/dev/null/x': Not a directory\n"
    assert (ran.returncode, ran.stderr) == (2, message)
