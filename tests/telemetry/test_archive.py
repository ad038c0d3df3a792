"""The archive: spans of sweeps and documents, and what is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from signing_async import SigningClient
from signing_async.archive import Archive, verify_archive
from signing_async.sandbox import Profile, Sandbox
from signing_async.telemetry import names
from tests.archive.tenants import completed, sent
from tests.telemetry.recorded import Recorded, attributes


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A sandbox with pages of two signings."""
    async with Sandbox(seed=7, profile=Profile(page_size=2)) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "archive of Anna"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "the.journal"


async def _sweep(archive: Archive) -> list[Exception | None]:
    return [result.error async for result in archive.sweep()]


async def test_sweep_has_a_span_and_each_document_one_under_it(
    sandbox: Sandbox, client: SigningClient, folder: Path, journal: Path, recorded: Recorded
) -> None:
    signings = [await completed(sandbox, client) for _ in range(2)]
    await sent(client)
    recorded.clear()
    tracer = recorded.traces.get_tracer("application")
    async with Archive(client, folder, journal=journal) as archive:
        with tracer.start_as_current_span("the job"):
            assert await _sweep(archive) == [None] * 4
    sweep = recorded.one("archive.sweep")
    assert recorded.children(recorded.one("the job")) == [sweep]
    assert attributes(sweep) == {"signing_async.outcome": "success"}
    assert not sweep.links
    documents = recorded.named("archive.document")
    assert all(span.parent == sweep.context for span in documents)
    assert {attributes(span)["signing.id"] for span in documents} == {signing.id for signing in signings}
    assert len({attributes(span)["signing.document_id"] for span in documents}) == 4
    for span in documents:
        assert [child.name for child in recorded.children(span)] == ["documents.download_signed"]
    assert {span.name for span in recorded.children(sweep)} >= {"signings.list", "archive.document"}
    size = sum(path.stat().st_size for path in folder.rglob("*.pdf"))
    assert recorded.total(names.ARCHIVE_SIGNINGS) == 3
    assert recorded.total(names.ARCHIVE_DOCUMENTS, signing_async__outcome="success") == 4
    assert recorded.total(names.ARCHIVE_SIZE) == size
    assert recorded.total(names.SWEEP_DURATION, signing_async__outcome="success") == 1


@pytest.mark.parametrize("is_on", [False, True])
async def test_findings_are_counted_by_kind(
    sandbox: Sandbox,
    client: SigningClient,
    folder: Path,
    journal: Path,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    is_on: bool,
) -> None:
    if not is_on:
        monkeypatch.setenv("SIGNING_TELEMETRY", "off")
    await completed(sandbox, client)
    async with Archive(client, folder, journal=journal) as archive:
        await _sweep(archive)
    one, two = folder.rglob("*.pdf")
    one.unlink()
    two.write_bytes(b"%PDF-1.7 changed")
    (folder / "Anna Berg.pdf").write_bytes(b"extra")
    assert len((await verify_archive(folder)).findings) == 3
    counted = {point.attributes["signing_async.archive.finding"] for point in recorded.points(names.ARCHIVE_FINDINGS)}
    assert counted == ({"missing_file", "changed_file", "extra_file"} if is_on else set())
    assert "Anna" not in recorded.text()
