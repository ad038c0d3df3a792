"""The spans and metrics of dispatches and of journals."""

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
from signing_async.sandbox import Sandbox
from signing_async.telemetry import names
from tests.pdfs import make_pdf
from tests.telemetry.recorded import Recorded, attributes


def _package(number: int = 0) -> SigningPackage:
    return SigningPackage("Lease", "EN", [make_pdf()], [NewRecipient("anna@example.com")], key=f"lease-{number}")


async def test_run_has_a_span_and_each_package_one_under_it(
    client: SigningClient, recorded: Recorded, tmp_path: Path
) -> None:
    tracer = recorded.traces.get_tracer("the application")
    with tracer.start_as_current_span("the job"):
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
