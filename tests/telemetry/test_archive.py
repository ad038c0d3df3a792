"""The archive: spans of sweeps and documents, and what is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from signing_async import SigningClient
from signing_async.archive import Archive, verify_archive
from signing_async.sandbox import Sandbox
from signing_async.telemetry import names
from tests.archive.tenants import completed, sent
from tests.telemetry.recorded import Recorded, attributes


async def test_sweep_has_a_span_and_each_document_one_under_it(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, recorded: Recorded
) -> None:
    folder = tmp_path / "archive of Anna"
    signing = await completed(sandbox, client)
    await sent(client)
    recorded.clear()
    tracer = recorded.traces.get_tracer("application")
    async with Archive(client, folder, journal=tmp_path / "journal") as archive:
        with tracer.start_as_current_span("the job"):
            assert [result.error async for result in archive.sweep()] == [None] * 2
    sweep = recorded.one("archive.sweep")
    assert recorded.children(recorded.one("the job")) == [sweep]
    assert attributes(sweep) == {"signing_async.outcome": "success"}
    assert not sweep.links
    documents = recorded.named("archive.document")
    assert all(span.parent == sweep.context for span in documents)
    assert {attributes(span)["signing.id"] for span in documents} == {signing.id}
    assert len({attributes(span)["signing.document_id"] for span in documents}) == 2
    for span in documents:
        assert [child.name for child in recorded.children(span)] == ["documents.download_signed"]
    assert {span.name for span in recorded.children(sweep)} >= {"signings.list", "archive.document"}
    size = sum(path.stat().st_size for path in folder.rglob("*.pdf"))
    assert recorded.total(names.ARCHIVE_SIGNINGS) == 2
    assert recorded.total(names.ARCHIVE_DOCUMENTS, signing_async__outcome="success") == 2
    assert recorded.total(names.ARCHIVE_SIZE) == size
    assert recorded.total(names.SWEEP_DURATION, signing_async__outcome="success") == 1


async def test_findings_are_counted_by_kind_unless_telemetry_is_off(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "archive of Anna"
    await completed(sandbox, client)
    async with Archive(client, folder, journal=tmp_path / "journal") as archive:
        assert [result.error async for result in archive.sweep()] == [None] * 2
    one, two = folder.rglob("*.pdf")
    one.unlink()
    two.write_bytes(b"%PDF-1.7 changed")
    (folder / "Anna Berg.pdf").write_bytes(b"extra")
    expected: set[str] = set()
    for switch in ("off", "on"):
        monkeypatch.setenv("SIGNING_TELEMETRY", switch)
        assert len((await verify_archive(folder)).findings) == 3
        points = recorded.points(names.ARCHIVE_FINDINGS)
        assert {point.attributes["signing_async.archive.finding"] for point in points} == expected
        expected = {"missing_file", "changed_file", "extra_file"}
    assert "Anna" not in recorded.text()
