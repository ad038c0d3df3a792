"""`demo`, from a new app to sealed PDFs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from signing_async.testing import sample_pdf
from tests.cli.conftest import Run


def test_demo_prints_each_step_and_leaves_sealed_pdfs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the archive of an earlier demo, and uses neither the user's journal nor the user's settings."""
    monkeypatch.setenv("SIGNING_JOURNAL", str(tmp_path / "own.journal"))
    monkeypatch.setenv("SIGNING_BASE_URL", "https://tenant.example.com")
    (tmp_path / "signed" / "archive").mkdir(parents=True)
    ran = run("demo", "--folder", "./signed")
    assert (ran.code, ran.err) == (0, "")
    for text in (
        "not a legal signing service",
        "sent once: 1 request, 1 invitation",
        "signing.completed",
        "refused",
        "22 documents in signed/archive-2, each once: the manifest proves it",
        "What next",
    ):
        assert text in ran.out
    killed = re.search(r"killed \(SIGKILL\) when (\d+) documents were archived", ran.out)
    assert killed
    assert int(killed[1]) < 22
    assert sorted(path.name for path in Path("signed").iterdir()) == [
        "archive",
        "archive-2",
        "inventory.pdf",
        "lease.pdf",
    ]
    assert Path("signed/lease.pdf").read_bytes().startswith(sample_pdf("Lease of the boat house"))
    assert len(list(Path("signed/archive-2").rglob("*.pdf"))) == 22
    assert not (tmp_path / "own.journal").exists()
