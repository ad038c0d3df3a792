"""Telemetry is on if the process uses OpenTelemetry and nothing switches it off; what fails there fails no call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from signing_async import ConfigurationError, NewRecipient, SigningClient, SigningPackage
from signing_async.archive import Archive
from signing_async.sandbox import Sandbox
from signing_async.telemetry import (
    names,
    otel,  # private: it logs an error once in a process, and each test forgets what was logged
)
from tests.guides import ROOT
from tests.pdfs import make_pdf
from tests.telemetry.conftest import Recorded

PROGRAM = """
import asyncio, sys
from signing_async import SigningClient
from signing_async.sandbox import Sandbox

async def main():
    async with Sandbox() as sandbox, SigningClient(sandbox.base_url, sandbox.access_token()) as client:
        await client.me()

asyncio.run(main())
assert not [name for name in sys.modules if name.startswith('opentelemetry')]
"""


def test_process_that_does_not_use_opentelemetry_does_not_import_it() -> None:
    """So the client works where it is not installed."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


async def test_client_without_telemetry_records_nothing(sandbox: Sandbox, recorded: Recorded, tmp_path: Path) -> None:
    package = SigningPackage("Lease", "EN", [make_pdf()], [NewRecipient("anna@example.com")], key="1")
    async with SigningClient(sandbox.base_url, sandbox.access_token(), telemetry=False) as client:
        await client.me()
        await client.with_options(timeout=5).me()
        (sent,) = [each async for each in client.dispatch_many([package], tmp_path / "journal")]
        assert sent.signing is not None
        await sandbox.complete(sent.signing.id)
        async with Archive(client, tmp_path / "archive", journal=tmp_path / "journal") as archive:
            assert [result.error async for result in archive.sweep()] == [None]
    assert not recorded.spans
    assert not any(recorded.points(metric) for metric in names.METRICS)


async def test_environment_and_settings_file_switch_a_client_off(
    sandbox: Sandbox, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.touch(0o600)
    monkeypatch.setenv("SIGNING_CONFIG", str(path))
    for variable, line, is_on in (
        ("off", "", False),
        ("", "telemetry = false", False),
        ("ON", "telemetry = false", True),
        ("", 'telemetry = "on"', True),
        ("", "", True),
    ):
        path.write_text(f'base_url = "{sandbox.base_url}"\naccess_token = "{sandbox.access_token()}"\n{line}\n')
        monkeypatch.setenv("SIGNING_TELEMETRY", variable)
        for given, expected in ({}, is_on), ({"telemetry": True}, True):
            recorded.clear()
            async with SigningClient.from_env(**given) as client:
                await client.me()
            assert len(recorded.named("me")) == expected, (variable, line, given)


def test_invalid_switch_is_refused_with_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("telemetry = 1\n")
    monkeypatch.setenv("SIGNING_CONFIG", str(path))
    with pytest.raises(ConfigurationError, match=r"telemetry in .*config\.toml: must be on or off, got 1"):
        SigningClient.from_env()
    with pytest.raises(ConfigurationError, match="telemetry: must be True or False, got 'off'"):
        SigningClient("https://tenant.example.com", "token", telemetry="off")  # type: ignore[arg-type]
    monkeypatch.setenv("SIGNING_TELEMETRY", "maybe")
    for make in (lambda: SigningClient("https://tenant.example.com", "token"), SigningClient.from_env):
        with pytest.raises(ConfigurationError, match="SIGNING_TELEMETRY: must be on or off, got 'maybe'"):
            make()


@pytest.mark.usefixtures("recorded")
async def test_too_old_api_package_is_reported_once(
    client: SigningClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def create_histogram(self: object, name: str, unit: str) -> None: ...

    monkeypatch.setattr("opentelemetry.sdk.metrics.Meter.create_histogram", create_histogram)
    await client.me()
    await client.me()
    (report,) = [record.getMessage() for record in caplog.records if "OpenTelemetry" in record.getMessage()]
    assert report.endswith("install signing-async[otel]")


class BrokenError(Exception):
    """The error of a broken part of the SDK."""


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    "methods",
    [
        ["trace.sampling.ParentBased.should_sample"],
        ["trace.SynchronousMultiSpanProcessor.on_end"],
        ["metrics.Counter.add", "metrics.UpDownCounter.add", "metrics.Histogram.record"],
    ],
)
async def test_broken_part_of_the_sdk_fails_nothing(
    methods: list[str],
    sandbox: Sandbox,
    client: SigningClient,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    otel._report.cache_clear()

    def fail(*_: Any, **__: Any) -> None:
        raise BrokenError

    for method in methods:
        monkeypatch.setattr(f"opentelemetry.sdk.{method}", fail)
    package = SigningPackage("Lease", "EN", [make_pdf()], [NewRecipient("anna@example.com")], key="1")
    await client.dispatch(package, tmp_path / "journal")
    assert len(sandbox.notifications) == 1
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert caplog.text.count("OpenTelemetry failed (BrokenError)") == 1
