"""dispatch with a journal in PostgreSQL, and with Taskiq's workers in the place of the command."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from redis import Redis

from signing_async import InvalidRequest, SigningPackage, TransportError
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.pdfs import make_pdf
from tests.postgres.server import PASSWORD, PostgresServer
from tests.redis.server import RedisServer, running_redis
from tests.test_taskiq import Worker, sendings


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """Where the workers find the packages."""
    with running_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_waits(redis: RedisServer) -> None:
    """Remove what another test has enqueued and no worker has sent."""
    with Redis.from_url(redis.url) as direct:
        direct.flushall()


@pytest.fixture(autouse=True)
def journal(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty one, where the command looks for it."""
    url = asyncio.run(postgres.new_schema())
    monkeypatch.setenv("SIGNING_JOURNAL", url)
    return url


@pytest.fixture
def worker(journal: str, redis: RedisServer, service: Service, tmp_path: Path) -> Iterator[Worker]:
    """One with its settings in the environment."""
    environment = {**service.environment, "SIGNING_JOURNAL": journal, "SIGNING_BROKER": redis.url}
    started = Worker(environment, tmp_path / "worker.log", "tests.taskiq_workers:broker")
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(autouse=True)
def leases(run: Run) -> None:
    """A manifest of three packages, in the folder where the command runs."""
    rows = []
    for number in range(3):
        Path(f"{number}.pdf").write_bytes(make_pdf(text=f"lease {number}"))
        rows.append([f"Lease {number}", "EN", f"{number}.pdf", f"anna{number}@example.com"])
    with Path("leases.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["name", "language", "documents", "recipient1_email"], *rows])


def sent(service: Service) -> list[str]:
    """Each as often as it was sent."""
    return service.do(lambda: sendings(service.sandbox))


def shown(journal: str) -> str:
    """The URL without its password and query."""
    return journal.replace(f":{PASSWORD}@", "@").partition("?")[0]


ALL = ["Lease 0", "Lease 1", "Lease 2"]


def test_workers_send_what_the_command_enqueues(
    run: Run, service: Service, redis: RedisServer, worker: Worker, journal: str
) -> None:
    """The command ends at once, or waits for each result. Packages that are enqueued twice are sent once."""
    ran = run("dispatch", "leases.csv", "--broker", redis.url)
    assert (ran.code, ran.out) == (0, "3 enqueued.\n")
    ran = run("--json", "dispatch", "leases.csv", "--broker", redis.url, "--wait")
    assert ran.code == 0
    *packages, last = ran.lines
    assert [(one["name"], one["line"]) for one in sorted(packages, key=lambda one: one["line"])] == [
        (name, line) for line, name in enumerate(ALL, start=2)
    ]
    assert {one["signing"] for one in packages} == {
        signing.id for signing in service.do(lambda: service.sandbox.signings)
    }
    facts = {"packages": 3, "sent": 3, "sent_earlier": None, "failed": 0, "left": 0, "abandoned": 0}
    assert last["summary"] == {**facts, "interrupted": False, "failures": None, "journal": shown(journal)}
    assert PASSWORD not in ran.out + ran.err
    assert sent(service) == ALL


def test_package_that_fails_at_a_worker_is_reported_and_can_be_run_again(
    run: Run, service: Service, redis: RedisServer, worker: Worker
) -> None:
    header, first, *others = Path("leases.csv").read_text().splitlines()
    rows = [f"{header},recipient1_signing_method", f"{first},fax", *(f"{row},email" for row in others)]
    Path("leases.csv").write_text("\n".join(rows))
    ran = run("dispatch", "leases.csv", "--broker", redis.url, "--wait")
    assert ran.code == 1
    assert "2 sent, 1 failed." in ran.out
    assert "leases.csv, line " in ran.err
    failures = Path("leases.failures.csv")
    failures.write_text(failures.read_text("utf-8").replace("fax", "email"), "utf-8")
    ran = run("dispatch", "leases.failures.csv", "--broker", redis.url, "--wait")
    assert (ran.code, ran.out.startswith("1 sent.\n")) == (0, True)
    assert sent(service) == ALL


def test_report_is_kept_until_its_packages_are_sent_however_late_workers_start(
    run: Run, service: Service, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Enqueued is not sent: until the workers say so, the report may be all that tells of the packages."""
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
    request.getfixturevalue("worker")
    ran = run("dispatch", report.name, *broker, "--wait", "--for", "60")
    assert (ran.code, ran.out.startswith("3 sent.\n")) == (0, True)
    assert not report.exists()
    assert sent(service) == ALL


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--broker", "env:OTHER"], 2, "invalid Redis URL: must begin with redis://"),
        (["--broker", "env:SIGNING_BROKER"], 1, "the broker is unavailable"),
        (["--journal", "postgresql://app@127.0.0.1:1/x"], 1, "PostgreSQL at 127.0.0.1:1/x: "),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: list[str], code: int, words: str, run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence without a password, and nothing is sent."""
    monkeypatch.setenv("OTHER", "amqp://:geheim@r")
    monkeypatch.setenv("SIGNING_BROKER", "redis://:geheim@127.0.0.1:1")
    ran = run("dispatch", "leases.csv", *arguments)
    assert ran.code == code
    assert words in ran.err
    assert "geheim" not in ran.err + ran.out
    assert not sent(service)


def test_package_that_cannot_be_enqueued_is_reported_and_the_others_are_enqueued(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file that changed after the check."""
    enqueued: list[str] = []

    async def enqueue(package: SigningPackage) -> None:
        if package.name == "Lease 1":
            raise InvalidRequest("documents[0]: cannot open 'lease.pdf': No such file or directory")
        enqueued.append(str(package.name))

    monkeypatch.setattr("signing_async.taskiq.enqueuing", lambda broker, **options: nullcontext(enqueue))
    ran = run("dispatch", "leases.csv", "--broker", "redis://r")
    assert enqueued == ["Lease 0", "Lease 2"]
    assert "2 enqueued, 1 failed." in ran.out
    assert "leases.csv, line 3: documents[0]: cannot open" in ran.err
    assert Path("leases.failures.csv").exists()


@pytest.mark.parametrize(("failures", "code", "out"), [(1, 0, "3 enqueued.\n"), (10**6, 1, "")])
def test_outage_of_the_broker_is_reported_once_and_waited_out(
    failures: int, code: int, out: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [TransportError("the broker is down", transient=True, client_wide=True)] * failures

    async def enqueue(package: object) -> None:
        if left:
            raise left.pop()

    monkeypatch.setattr("signing_async.taskiq.enqueuing", lambda broker, **options: nullcontext(enqueue))
    ran = run("dispatch", "leases.csv", "--broker", "redis://r", "--for", "0.5")
    assert (ran.code, ran.out, ran.err.count("the broker is down; waiting for it")) == (code, out, 1)
