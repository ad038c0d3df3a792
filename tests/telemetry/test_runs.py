"""The spans and metrics of dispatches, journals and archives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from signing_async import (
    JournalError,
    NewRecipient,
    RetryPolicy,
    ServerError,
    SigningClient,
    SigningPackage,
    SqliteJournal,
)
from signing_async.archive import Archive, verify_archive
from signing_async.sandbox import Sandbox
from signing_async.telemetry import names
from tests.archive.tenants import completed, sent
from tests.pdfs import make_pdf
from tests.telemetry.conftest import Recorded, attributes


def _package(number: int = 0) -> SigningPackage:
    return SigningPackage("Lease", "EN", [make_pdf()], [NewRecipient("anna@example.com")], key=f"lease-{number}")


async def test_run_has_a_span_and_each_package_one_under_it(
    client: SigningClient, recorded: Recorded, tmp_path: Path
) -> None:
    with recorded.traces.get_tracer("the application").start_as_current_span("the job"):
        packages = [_package(number) for number in range(3)]
        results = [each async for each in client.dispatch_many(packages, tmp_path / "journal")]
    run = recorded.one("dispatch")
    assert recorded.children(recorded.one("the job")) == [run]
    spans = recorded.named("dispatch.package")
    assert recorded.children(run) == spans
    assert sorted(attributes(span)["signing_async.package.number"] for span in spans) == [0, 1, 2]
    assert {attributes(span)["signing.id"] for span in spans} == {each.signing.id for each in results if each.signing}
    for span in spans:
        assert not span.links
        calls = [child.name for child in recorded.children(span)]
        assert calls == ["signings.create", "documents.upload", "recipients.add", "signings.send", "signings.get"]
    assert recorded.total(names.DISPATCH_DURATION, signing_async__outcome="success") == 3
    assert recorded.total(names.DISPATCH_ACTIVE) == 0
    timed = {point.attributes["signing_async.journal.operation"] for point in recorded.points(names.JOURNAL_DURATION)}
    assert timed == {"claim", "write", "release"}


async def test_failed_package_is_an_error(
    sandbox: Sandbox, client: SigningClient, recorded: Recorded, tmp_path: Path
) -> None:
    fault = sandbox.faults.add("signings.create", "503", times=None)
    with pytest.raises(ServerError):
        await client.with_options(retry=RetryPolicy.none()).dispatch(_package(), tmp_path / "journal")
    fault.remove()
    await client.dispatch(_package(), tmp_path / "journal")
    failed, _ = recorded.named("dispatch.package")
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes(failed)["error.type"] == "ServerError"
    assert [attributes(run).get("error.type") for run in recorded.named("dispatch")] == ["ServerError", None]
    assert attributes(failed)["signing_async.outcome"] == "error"
    assert recorded.total(names.DISPATCH_DURATION, signing_async__outcome="error") == 1


async def test_failure_of_a_journal_has_its_type(client: SigningClient, recorded: Recorded, tmp_path: Path) -> None:
    class Broken(SqliteJournal):
        async def claim(self, *_: Any, **__: Any) -> Any:
            raise OSError("Anna Berg")

    async with Broken(tmp_path / "journal") as journal:
        with pytest.raises(JournalError):
            await client.dispatch(_package(), journal)
    assert recorded.total(names.JOURNAL_DURATION, error__type="JournalError") == 1
    assert "Anna" not in recorded.text()


# Archives


async def test_sweep_has_a_span_and_each_document_one_under_it(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, recorded: Recorded
) -> None:
    folder = tmp_path / "archive of Anna"
    signing = await completed(sandbox, client)
    await sent(client)
    recorded.clear()
    async with Archive(client, folder, journal=tmp_path / "journal") as archive:
        with recorded.traces.get_tracer("application").start_as_current_span("the job"):
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
