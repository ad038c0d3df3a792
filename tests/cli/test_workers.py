"""dispatch with a journal in PostgreSQL, and with Taskiq's workers in the place of the command."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from signing_async import InvalidRequest, SigningPackage, TransportError
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.pdfs import make_pdf
from tests.postgres.server import PASSWORD, PostgresServer
from tests.redis.server import RedisServer, running_redis
from tests.test_taskiq import Worker, sendings

ALL = ["Lease 0", "Lease 1", "Lease 2"]


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """Where the workers find the packages."""
    with running_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def journal(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty one, where the command looks for it."""
    url = asyncio.run(postgres.new_schema())
    monkeypatch.setenv("SIGNING_JOURNAL", url)
    return url


@pytest.fixture(autouse=True)
def leases(run: Run) -> None:
    """A manifest of three packages, in the folder where the command runs."""
    rows = []
    for number in range(3):
        Path(f"{number}.pdf").write_bytes(make_pdf(text=f"lease {number}"))
        rows.append([f"Lease {number}", "EN", f"{number}.pdf", f"anna{number}@example.com", "email"])
    header = ["name", "language", "documents", "recipient1_email", "recipient1_signing_method"]
    with Path("leases.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.fixture
def enqueue_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Return a function that replaces the broker: it is called with each package."""

    def replace(enqueue: Callable[..., Any]) -> None:
        monkeypatch.setattr("signing_async.taskiq.enqueuing", lambda broker, **options: nullcontext(enqueue))

    return replace


def test_workers_send_what_the_command_enqueues_once_and_the_report_is_kept_until_then(
    run: Run, service: Service, redis: RedisServer, journal: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command ends at once, or waits for each result. Enqueued is not sent: the report may be the only record."""
    monkeypatch.setattr("signing_async.cli.workers.QUIET", 0.2)
    broker = ("--broker", redis.url)
    ran = run("dispatch", "leases.csv", *broker, "--wait", "--for", "0.7")
    assert ran.code == 5
    assert ran.out.startswith("0 sent, 3 failed.\n")
    assert "Warning: no worker has reported" in ran.err
    assert "leases.csv, line 2: no worker reported within 0.7 s: the package may still be sent" in ran.err
    report = Path("leases.failures.csv")
    before = report.read_bytes()
    ran = run("dispatch", report.name, *broker)
    assert (ran.code, report.read_bytes()) == (0, before)
    assert ran.out == "3 enqueued.\nleases.failures.csv is kept until a run has sent its packages.\n"
    ran = run("--json", "dispatch", report.name, *broker)
    assert (ran.lines[-1]["summary"]["failures"], report.read_bytes()) == (None, before)

    environment = {**service.environment, "SIGNING_JOURNAL": journal, "SIGNING_BROKER": redis.url}
    with closing(Worker(environment, tmp_path / "worker.log", "tests.taskiq_workers:broker")):
        ran = run("dispatch", report.name, *broker, "--wait", "--for", "60")
        assert (ran.code, ran.out.startswith("3 sent.\n")) == (0, True)
        assert not report.exists()
        ran = run("--json", "dispatch", "leases.csv", *broker, "--wait")
        *packages, last = ran.lines
        assert (ran.code, PASSWORD in ran.out + ran.err) == (0, False)
        found = sorted((package["line"], package["name"], package["signing"]) for package in packages)
        assert [each[:2] for each in found] == list(enumerate(ALL, start=2))
        signings = service.do(lambda: service.sandbox.signings)
        assert {each[2] for each in found} == {signing.id for signing in signings}
        shown = journal.replace(f":{PASSWORD}@", "@").partition("?")[0]
        facts = {"packages": 3, "sent": 3, "sent_earlier": None, "failed": 0, "left": 0, "abandoned": 0}
        assert last["summary"] == {**facts, "interrupted": False, "failures": None, "journal": shown}
        assert service.do(sendings, service.sandbox) == ALL

        # A package that fails is reported, and sent once its row is mended.
        good, bad = "Lease 0,EN,0.pdf,anna0@example.com,email", "Loan,EN,0.pdf,anna0@example.com,fax"
        Path("leases.csv").write_text(Path("leases.csv").read_text().replace(good, bad))
        ran = run("dispatch", "leases.csv", *broker, "--wait")
        assert (ran.code, "2 sent, 1 failed." in ran.out, "leases.csv, line 2: " in ran.err) == (1, True, True)
        report.write_text(report.read_text("utf-8").replace("fax", "email"), "utf-8")
        assert run("dispatch", report.name, *broker, "--wait").out.startswith("1 sent.\n")
        assert service.do(sendings, service.sandbox) == [*ALL, "Loan"]


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("amqp://:geheim@r", 2, "invalid Redis URL: must begin with redis://"),
        ("redis://:geheim@127.0.0.1:1", 1, "the broker is unavailable"),
    ],
)
def test_broker_that_cannot_be_used_is_one_sentence_without_its_password(
    url: str, code: int, words: str, run: Run
) -> None:
    ran = run("dispatch", "leases.csv", "--broker", "env:BROKER", BROKER=url)
    assert (ran.code, words in ran.err, "geheim" in ran.err + ran.out) == (code, True, False)


def test_package_that_cannot_be_enqueued_is_reported_and_the_others_are_enqueued(
    run: Run, enqueue_with: Callable[[Callable[..., Any]], None]
) -> None:
    """As a file that changed after the check."""
    enqueued: list[str] = []

    async def enqueue(package: SigningPackage) -> None:
        if package.name == "Lease 1":
            raise InvalidRequest("documents[0]: cannot open 'lease.pdf': No such file or directory")
        enqueued.append(str(package.name))

    enqueue_with(enqueue)
    ran = run("dispatch", "leases.csv", "--broker", "redis://r")
    assert enqueued == ["Lease 0", "Lease 2"]
    assert "2 enqueued, 1 failed." in ran.out
    assert "leases.csv, line 3: documents[0]: cannot open" in ran.err
    assert Path("leases.failures.csv").exists()


@pytest.mark.parametrize(("failures", "code", "out"), [(1, 0, "3 enqueued.\n"), (10**6, 1, "")])
def test_outage_of_the_broker_is_reported_once_and_waited_out(
    failures: int, code: int, out: str, run: Run, enqueue_with: Callable[[Callable[..., Any]], None]
) -> None:
    left = [TransportError("the broker is down", transient=True, client_wide=True)] * failures

    async def enqueue(package: object) -> None:
        if left:
            raise left.pop()

    enqueue_with(enqueue)
    ran = run("dispatch", "leases.csv", "--broker", "redis://r", "--for", "0.5")
    assert (ran.code, ran.out, ran.err.count("the broker is down; waiting for it")) == (code, out, 1)
