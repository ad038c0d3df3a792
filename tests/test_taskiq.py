"""Taskiq: packages and events in real workers, started with its own command, some of them killed or paused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError
from taskiq import AsyncTaskiqTask, InMemoryBroker, TaskiqResult
from taskiq.api import run_receiver_task

from signing_async import (
    ConfigurationError,
    InvalidRequest,
    NewRecipient,
    RetryPolicy,
    SigningClient,
    SigningPackage,
    TransportError,
    Unauthorized,
    WaitTimeout,
)
from signing_async.postgres import PostgresInbox, PostgresJournal
from signing_async.sandbox import Sandbox
from signing_async.taskiq import Enqueued, Outcome, add_dispatch, enqueuing, event_task, redis_streams
from signing_async.taskiq import broker as broker_by_environment
from signing_async.webhooks import (
    Drop,
    Event,
    EventFilter,
    EventStatus,
    HandlerRetryPolicy,
    Inbox,
    RetryLater,
    StoredEvent,
)
from tests.pdfs import make_pdf
from tests.postgres.server import PostgresServer
from tests.redis.server import RedisServer, redis_of_a_module  # noqa: F401  # the fixture `redis`
from tests.storage.event_stores import delivery
from tests.taskiq_workers import events_and_inbox

ROOT = Path(__file__).parents[1]


@pytest.fixture
async def environment(postgres: PostgresServer, redis: RedisServer, sandbox: Sandbox, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a worker; the queues are empty."""
    async with Redis.from_url(redis.url) as direct:
        await direct.flushall()
    dsn = await postgres.new_schema()
    return {
        "SIGNING_BASE_URL": sandbox.base_url,
        "SIGNING_ACCESS_TOKEN": sandbox.access_token(),
        "SIGNING_JOURNAL": dsn,
        "SIGNING_INBOX": dsn,
        "SIGNING_BROKER": f"{redis.url}/0",
        "SIGNING_TEST_FOLDER": str(tmp_path),
    }


class Worker:
    """Taskiq's own command in a process group of its own: one worker with three concurrent tasks."""

    def __init__(self, environment: dict[str, str], log: Path, factory: str) -> None:
        command = [sys.executable, "-m", "taskiq", "worker", "--workers", "1", "--max-async-tasks", "3", factory]
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self._process.pid, number)

    def has(self, process: int) -> bool:
        """Return whether this is one of its processes."""
        return os.getpgid(process) == self._process.pid

    async def ready(self) -> None:
        """Wait until it listens for messages."""
        while "Listening started" not in self.log:
            assert self._process.poll() is None, self.log
            await asyncio.sleep(0.02)

    @property
    def log(self) -> str:
        """Its output."""
        return self._log.read_text()

    def close(self) -> None:
        """Kill its remaining processes."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait()


@contextlib.asynccontextmanager
async def workers(
    number: int, environment: dict[str, str], folder: Path, factory: str = "tests.taskiq_workers:broker"
) -> AsyncIterator[list[Worker]]:
    """Run workers, ready when the block begins."""
    async with contextlib.AsyncExitStack() as running:
        started = [Worker(environment, folder / f"{each}.log", factory) for each in range(number)]
        for each in started:
            running.callback(each.close)
        await asyncio.gather(*(each.ready() for each in started))
        yield started


def packages(folder: Path, number: int) -> list[SigningPackage]:
    """Return packages with two documents and two recipients each."""
    made = []
    for each in range(number):
        paths = [folder / f"lease-{each}.pdf", folder / f"inventory-{each}.pdf"]
        for path in paths:
            path.write_bytes(make_pdf(text=path.stem))
        recipients = [NewRecipient(f"{name}{each}@example.com", name, order=None) for name in ("anna", "bert")]
        made.append(
            SigningPackage(f"Lease {each}", "EN", paths, recipients, "sequential", "Please sign", f"lease-{each}")
        )
    return made


def sendings(sandbox: Sandbox) -> list[str]:
    """Return the names of the signings that were sent."""
    return sorted(signing.name for signing in sandbox.signings if not signing.is_draft)


async def test_each_package_is_sent_once_despite_killed_and_paused_workers(
    environment: dict[str, str], postgres: PostgresServer, sandbox: Sandbox, tmp_path: Path
) -> None:
    """One of two workers is killed, one is paused and resumed, and the service fails and loses responses."""
    (tmp_path / "other").mkdir()
    made = packages(tmp_path, 14)
    for kind, often in (("500-after-commit", 0.05), ("drop-after-commit", 0.05), ("503", 0.05)):
        sandbox.faults.add("*", kind, times=None, probability=often)
    sandbox.faults.add("signings.send", "slow", times=None, seconds=0.4)
    table = f"{environment['SIGNING_JOURNAL'].rpartition('=')[2]}.signing_packages"
    async with (
        workers(2, environment, tmp_path) as (killed, paused),
        enqueuing(redis_streams(environment["SIGNING_BROKER"])) as enqueue,
    ):
        enqueued = [await enqueue(package) for package in made]
        # Enqueue some twice: they are still sent once.
        enqueued += [await enqueue(package) for package in made[:2]]
        while len(sendings(sandbox)) < 2:
            await asyncio.sleep(0.05)
        killed.signal(signal.SIGKILL)
        paused.signal(signal.SIGSTOP)
        async with workers(1, environment, tmp_path / "other"):
            # Another takes over packages before the paused worker resumes.
            while len(await postgres.execute(f"SELECT FROM {table} WHERE fence > 1")) < 2:
                await asyncio.sleep(0.1)
            paused.signal(signal.SIGCONT)
            outcomes = await asyncio.wait_for(asyncio.gather(*(each.wait(0.1) for each in enqueued)), 90)
    assert [(outcome.error, outcome.kind) for outcome in outcomes] == [(None, None)] * 16
    assert sendings(sandbox) == sorted(package.name for package in made)
    states = await postgres.execute(f"SELECT state FROM {table}")
    assert [json.loads(row["state"])["status"] for row in states] == ["sent"] * 14


# A worker in this process


@contextlib.asynccontextmanager
async def working(broker: Any) -> AsyncIterator[None]:
    """Run Taskiq's receiver during the block."""
    receiving = asyncio.create_task(run_receiver_task(broker, run_startup=True, max_async_tasks=3))
    try:
        yield
    finally:
        # Taskiq saves the result once more after the acknowledgement.
        under_way = [task for task in asyncio.all_tasks() if "Receiver.callback" in repr(task)]
        if under_way:
            await asyncio.wait(under_way, timeout=20)
        # redis-py can lose a cancellation.
        while not receiving.done():
            receiving.cancel()
            await asyncio.wait([receiving], timeout=1)
        await broker.shutdown()


class Workplace:
    """The queue of one test, and brokers for it."""

    def __init__(self, redis: RedisServer, dsn: str, sandbox: Sandbox) -> None:
        self.url = f"{redis.url}/0"
        self.queue = dsn.rpartition("=")[2]
        self.dsn = dsn
        self._sandbox = sandbox

    def streams(self) -> Any:
        """Return a broker that soon redelivers."""
        return redis_streams(self.url, queue=self.queue, redeliver_after=0.4)

    def worker(self) -> Any:
        """Return a broker for a worker."""
        return add_dispatch(self.streams(), client=self.client, journal=self.journal)

    def client(self) -> SigningClient:
        """Return a client that does not retry."""
        return SigningClient(self._sandbox.base_url, self._sandbox.access_token(), retry=RetryPolicy.none())

    def journal(self) -> PostgresJournal:
        """Return a journal in PostgreSQL."""
        return PostgresJournal(self.dsn, lease=1.5, timeout=0.5)

    async def emptied(self) -> None:
        """Wait until all messages are acknowledged."""
        async with asyncio.timeout(60):
            while await self.left() != (0, 0):
                await asyncio.sleep(0.02)

    async def left(self) -> tuple[int, int]:
        """Return the number of messages, and how many of them are delivered but not acknowledged."""
        async with Redis.from_url(self.url) as redis:
            pending = await redis.xpending(self.queue, self.queue)
            return await redis.xlen(self.queue), pending["pending"]


@pytest.fixture
async def place(redis: RedisServer, postgres: PostgresServer, sandbox: Sandbox) -> Workplace:
    """An empty queue."""
    return Workplace(redis, await postgres.new_schema(), sandbox)


@pytest.mark.parametrize("how", ["fails", "dies"])
async def test_outcome_that_was_not_saved_is_reported_by_the_next_worker(
    how: str, place: Workplace, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is acknowledged only after its outcome was saved."""
    first, saving = place.worker(), asyncio.Event()

    async def set_result(*_: Any) -> None:
        saving.set()
        # A cancelled task does nothing more, like a worker that died.
        raise asyncio.CancelledError if how == "dies" else ConnectionError

    monkeypatch.setattr(first.result_backend, "set_result", set_result)
    async with enqueuing(place.streams()) as enqueue:
        enqueued = await enqueue(packages(tmp_path, 1)[0])
        async with working(first):
            await asyncio.wait_for(saving.wait(), 60)
            assert await place.left() == (1, 1)
        async with working(place.worker()):
            assert (await asyncio.wait_for(enqueued.wait(0.02), 60)).error is None
            await place.emptied()
    assert sendings(sandbox) == ["Lease 0"]


async def test_long_running_package_occupies_one_task(
    place: Workplace, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker keeps the message, so no other task, here or elsewhere, waits for the same package."""
    long, *others = packages(tmp_path, 3)
    slots, done, dispatch = [], asyncio.Event(), SigningClient.dispatch

    async def wait_for_long(client: SigningClient, package: SigningPackage, journal: Any) -> Any:
        if package.key == long.key:
            slots.append(asyncio.current_task())
            await done.wait()
        return await dispatch(client, package, journal)

    monkeypatch.setattr(SigningClient, "dispatch", wait_for_long)
    async with enqueuing(place.streams()) as enqueue, working(place.worker()), working(place.worker()):
        enqueued = [await enqueue(long)]
        async with asyncio.timeout(60):
            while not slots:
                await asyncio.sleep(0.01)
            await asyncio.sleep(2)  # time for five deliveries, to six slots
            enqueued += [await enqueue(package) for package in others]
            assert [(await each.wait(0.02)).error for each in enqueued[1:]] == [None, None]
            assert len(slots) <= 2  # two only if this machine stood still for a while
            done.set()
            assert (await enqueued[0].wait(0.02)).error is None
            await place.emptied()
    assert sendings(sandbox) == ["Lease 0", "Lease 1", "Lease 2"]


async def test_changed_document_fails_the_package(place: Workplace, sandbox: Sandbox, tmp_path: Path) -> None:
    """The outcome names the document, and the message is not delivered again, nor a foreign entry of the stream."""
    (package,) = packages(tmp_path, 1)
    async with enqueuing(place.streams()) as enqueue, Redis.from_url(place.url) as direct:
        await direct.xadd(place.queue, {"something": "else"})
        enqueued = await enqueue(package)
        (tmp_path / "inventory-0.pdf").write_bytes(make_pdf(text="another"))
        assert await enqueued.outcome() is None
        async with working(place.worker()):
            outcome = await asyncio.wait_for(enqueued.wait(0.02), 60)
            await place.emptied()
    assert "documents[1]" in (outcome.error or "")
    assert attrs.evolve(outcome, error="") == Outcome("lease-0", None, "", "InvalidRequest", exit_code=2)
    assert not sandbox.signings


@pytest.mark.parametrize(("kind", "status"), [("503", 503), ("expired-token", 401)])
async def test_package_is_retried_after_a_transient_failure_and_after_a_rejected_token(
    place: Workplace, sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, status: int
) -> None:
    fault = sandbox.faults.add("signings.create", kind, times=None)
    async with enqueuing(place.streams()) as enqueue, working(place.worker()):
        enqueued = await enqueue(packages(tmp_path, 1)[0])
        while caplog.text.count(f"package 'lease-0' is retried later: HTTP {status}") < 2:
            await asyncio.sleep(0.02)
        assert await place.left() == (1, 1)
        assert await enqueued.outcome() is None
        fault.remove()
        assert (await asyncio.wait_for(enqueued.wait(0.02), 60)).error is None
        await place.emptied()
    assert sendings(sandbox) == ["Lease 0"]


@pytest.mark.parametrize("how", ["killed", "emptied"])
async def test_workers_survive_an_outage_of_redis(
    how: str, redis: RedisServer, place: Workplace, sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With or without its data; they log the outage once."""
    caplog.set_level("INFO", "signing_async")
    first, second = packages(tmp_path, 2)
    async with working(place.worker()):
        async with enqueuing(place.streams()) as enqueue:
            assert (await enqueue(first)).key == "lease-0"
            await place.emptied()
        with redis.down() if how == "killed" else contextlib.nullcontext():
            if how == "emptied":
                async with Redis.from_url(place.url) as direct:
                    await direct.flushall()
            async with asyncio.timeout(60):
                while "the broker is unavailable, retrying: " not in caplog.text:
                    await asyncio.sleep(0.02)
            if how == "killed":
                await asyncio.sleep(1.5)  # another reading fails
        async with enqueuing(place.streams()) as enqueue:
            assert (await (await enqueue(second)).wait(0.02, timeout=60)).error is None
    logged = [record.message for record in caplog.records if record.message.startswith("the broker ")]
    assert [message.partition(",")[0] for message in logged] == [
        "the broker is unavailable",
        "the broker is available again",
    ]
    assert sendings(sandbox) == ["Lease 0", "Lease 1"]


async def test_enqueuing_fails_in_time_while_redis_is_unavailable(
    redis: RedisServer, place: Workplace, tmp_path: Path
) -> None:
    """The error does not show the URL, which may hold a password. Without workers the message is kept."""
    (package,) = packages(tmp_path, 1)
    secret = redis_streams(place.url.replace("//", "//:geheim@"))
    words = r"^no worker reported on package 'lease-0' within 0\.2 s: it may "
    async with enqueuing(place.streams()) as enqueue:
        enqueued = await enqueue(package)
        with pytest.raises(WaitTimeout, match=words) as caught:
            await enqueued.wait(0.02, timeout=0.2)
        assert (caught.value.effect, caught.value.exit_code) == ("unknown", 5)
        with pytest.raises(ConfigurationError, match=r"timeout: must be a number above 0, got 0"):
            await enqueued.wait(timeout=0)
        assert await place.left() == (1, 0)
        with redis.frozen():
            async with asyncio.timeout(10):
                steps = enqueue(package), enqueued.outcome(), enqueuing(secret).__aenter__()
                errors = await asyncio.gather(*steps, return_exceptions=True)
        # Redis reads the requests when it resumes.
        for error, effect in zip(errors, ("unknown", "unknown", "none"), strict=True):
            assert isinstance(error, TransportError)
            assert re.fullmatch(r"the broker is unavailable \(\w+\)", str(error))
            assert (error.transient, error.effect) == (True, effect)
            assert "geheim" not in "".join(traceback.format_exception(error))


async def test_any_taskiq_broker_can_dispatch(place: Workplace, sandbox: Sandbox, tmp_path: Path) -> None:
    """A broker in memory without acknowledgements works too: the journal knows what was sent before.

    A message of another version or form is rejected.
    """
    broker = add_dispatch(InMemoryBroker(), client=place.client, journal=place.journal)
    (package,) = packages(tmp_path, 1)
    old = "message version 2 is not supported; this worker supports version 1"
    async with enqueuing(broker) as enqueue:
        outcomes = [await (await enqueue(package)).wait(0.02) for _ in range(2)]
        for message, outcome in (
            ({"version": 2, "key": "k"}, Outcome("k", None, old, "InvalidRequest", exit_code=2)),
            ({"version": 1, "key": "k"}, Outcome("k", None, "'name'", "KeyError")),
        ):
            task = await broker.find_task("signing_async:dispatch").kiq(message)
            assert await Enqueued("k", task).wait(0.02) == outcome
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].signing == sandbox.signings[0].id
    assert sendings(sandbox) == ["Lease 0"]


async def test_task_that_broke_off_is_an_unknown_outcome_with_its_error(place: Workplace) -> None:
    broker = InMemoryBroker()
    broken: TaskiqResult[Any] = TaskiqResult(
        is_err=True, return_value=None, execution_time=0.1, error=RuntimeError("no connection")
    )
    await broker.result_backend.set_result("1", broken)
    outcome = await Enqueued("k", AsyncTaskiqTask("1", broker.result_backend)).wait()
    assert outcome == Outcome("k", None, "no connection", "RuntimeError", effect="unknown", transient=True, exit_code=3)


async def test_invalid_package_is_not_enqueued(place: Workplace) -> None:
    async with enqueuing(place.streams(), max_pdf_bytes=10_000_000) as enqueue:
        for document, words in (
            (make_pdf(), r"^documents\[0\]: must be a path that the workers can read, got bytes$"),
            ("/no/such/file.pdf", r"documents\[0\]"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await enqueue(SigningPackage("Lease", "EN", [document], [NewRecipient("anna@example.com")]))
        assert await place.left() == (0, 0)


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "redis://:gehe/im@localhost"}, "invalid Redis URL: invalid host or port"),
        ({"queue": ""}, "queue: must be a non-empty string, got ''"),
        ({"redeliver_after": 0}, "redeliver_after: must be a number above 0, got 0"),
    ],
)
def test_invalid_settings_are_rejected_without_showing_the_password(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        redis_streams(**{"url": "redis://localhost", **settings})
    assert words in str(caught.value)
    assert "gehe" not in "".join(traceback.format_exception(caught.value))


def test_missing_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SIGNING_BASE_URL", "SIGNING_ACCESS_TOKEN", "SIGNING_BROKER"):
        monkeypatch.setenv(name, "https://tenant.example.com")
    with pytest.raises(ConfigurationError, match=r"^SIGNING_JOURNAL is not set$"):
        broker_by_environment()


@pytest.mark.parametrize("kind", ["file", "PostgreSQL"])
async def test_settings_select_the_journal(
    kind: str, environment: dict[str, str], sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "file":
        environment["SIGNING_JOURNAL"] = str(tmp_path / "leases.journal")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    async with working(broker_by_environment()), enqueuing(redis_streams(environment["SIGNING_BROKER"])) as enqueue:
        enqueued = await enqueue(packages(tmp_path, 1)[0])
        assert repr(enqueued) == "Enqueued('lease-0')"
        assert (await enqueued.wait(0.02, timeout=60)).signing == sandbox.signings[0].id
    assert (tmp_path / "leases.journal").exists() is (kind == "file")


IMPORTS = """
import sys
for missing, name in (("asyncpg", "signing_async.postgres"), ("taskiq_redis", "signing_async.taskiq")):
    sys.modules[missing] = None
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_missing_package_names_the_extra() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ran.stdout.splitlines() == [
        "signing_async.postgres needs asyncpg: pip install 'signing-async[postgres]'",
        "signing_async.taskiq needs taskiq_redis: pip install 'signing-async[taskiq,postgres]'",
    ]


# Events


async def until_started(folder: Path, number: int) -> list[list[str]]:
    """Wait for this many starts of the handler, and return the event and the process of each."""
    async with asyncio.timeout(60):
        while not (folder / "started").exists() or (folder / "started").read_text().count("\n") < number:
            await asyncio.sleep(0.02)
    return [line.split() for line in (folder / "started").read_text().splitlines()]


async def until_settled(inbox: Inbox, name: str = "a") -> StoredEvent:
    """Wait until the event is no longer pending. After an attempt that did not count, the next one begins at once."""
    async with asyncio.timeout(60):
        while (stored := await inbox.get(name)) is None or stored.status is EventStatus.PENDING:
            if stored is not None and stored.error and not stored.attempts:
                await inbox.retry(EventFilter(ids=[name]))
            await asyncio.sleep(0.02)
    return stored


async def test_task_of_a_killed_worker_is_run_by_another_in_the_same_attempt(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    async with PostgresInbox(environment["SIGNING_INBOX"], timeout=10) as creating:
        await creating.create_table()
    async with workers(2, environment, tmp_path, "tests.taskiq_workers:events") as running:
        broker, inbox = events_and_inbox()
        await broker.startup()
        async with inbox, inbox.running():
            await inbox.add(*delivery("a", "s"))
            ((_, process),) = await until_started(tmp_path, 1)
            (at_work,) = [each for each in running if each.has(int(process))]
            at_work.close()
            await until_started(tmp_path, 2)
            (tmp_path / "a").touch()
            stored = await until_settled(inbox)
        await broker.shutdown()
    assert (stored.status, stored.attempts) == (EventStatus.HANDLED, 1)


@contextlib.asynccontextmanager
async def opened(folder: Path, broker: Any, attempts: int = 2, **settings: Any) -> AsyncIterator[Inbox]:
    """Open an inbox and the broker."""
    policy = HandlerRetryPolicy(max_attempts=attempts, base_delay=0.01, max_delay=0.01)
    async with Inbox(folder / "inbox.db", retry=policy, **settings) as inbox:
        await broker.startup()
        yield inbox
        await broker.shutdown()


async def test_what_the_handler_raises_is_recorded_as_in_the_process_of_the_inbox(tmp_path: Path) -> None:
    """Sync and async handlers; a pattern for each. A rejected token uses up no attempt; what hangs is cancelled."""
    broker = InMemoryBroker()
    async with opened(tmp_path, broker, handler_timeout=1) as inbox:
        calls: list[str] = []

        @event_task(broker, inbox, "drop")
        def drop(event: Event) -> None:
            raise Drop("not mine")

        @event_task(broker, inbox, "fail*")
        async def fail(event: Event) -> None:
            calls.append(event.type)
            raise ValueError("no archive")

        @event_task(broker, inbox, "later")
        def later(event: Event) -> Any:
            async def rest() -> None:
                calls.append(event.type)
                if calls.count("later") < 2:
                    raise RetryLater(0, "not yet")

            return rest()

        @event_task(broker, inbox, "rejected")
        async def rejected(event: Event) -> None:
            calls.append(event.type)
            if calls.count("rejected") < 2:
                raise Unauthorized("the token is rejected", status=401)

        @event_task(broker, inbox, "hang")
        async def hang(event: Event) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                calls.append("cancelled")
                raise

        kinds = ("drop", "fail.now", "later", "rejected", "hang")
        for kind in kinds:
            await inbox.add(*delivery(kind, type=kind))
        async with inbox.running():
            ends = [await until_settled(inbox, kind) for kind in kinds]
        assert [(end.status, end.attempts) for end in ends] == [
            (EventStatus.DROPPED, 1),
            (EventStatus.DEAD, 2),
            (EventStatus.HANDLED, 2),
            (EventStatus.HANDLED, 1),
            (EventStatus.DEAD, 2),
        ]
        assert ends[0].error == "not mine"
        assert (ends[1].error or "").endswith("ValueError: no archive")
        assert "TimeoutError" in (ends[4].error or "")
        assert "cancelled" in calls
        assert (calls.count("fail.now"), calls.count("rejected")) == (2, 2)


async def test_message_of_an_attempt_that_is_over_is_dropped(place: Workplace, tmp_path: Path) -> None:
    """While no worker runs, attempts time out. Their messages do not call the handler later."""
    calls: list[str] = []
    broker = place.streams()
    async with opened(tmp_path, broker, 30, handler_timeout=0.3) as inbox, Redis.from_url(place.url) as direct:
        event_task(broker, inbox, "*")(lambda event: calls.append(event.id))
        await inbox.add(*delivery("a"))
        async with inbox.running():
            while await direct.xlen(place.queue) < 3:
                await asyncio.sleep(0.02)
        async with working(broker):
            await place.emptied()
            assert calls == []
        async with opened(tmp_path, worker := place.streams(), 30) as again:
            event_task(worker, again, "*")(lambda event: calls.append(event.id))
            async with working(worker), again.running():
                await until_settled(again)
        assert calls == ["a"]


@pytest.mark.parametrize(
    ("fault", "uncounted"), [(ConnectionError("the broker restarts"), 0), (AuthenticationError("wrong password"), 1)]
)
async def test_result_is_waited_for_through_an_outage_of_the_broker_and_not_after_a_refusal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
    uncounted: int,
) -> None:
    """An attempt that fails because of the broker is not counted."""
    broker, faults = InMemoryBroker(), [fault]
    is_ready = broker.result_backend.is_result_ready

    async def fail_once(task_id: str) -> bool:
        if faults:
            raise faults.pop()
        return await is_ready(task_id)

    monkeypatch.setattr(broker.result_backend, "is_result_ready", fail_once)
    async with opened(tmp_path, broker, 1) as inbox:
        event_task(broker, inbox, "*")(lambda event: None)
        await inbox.add(*delivery("e1"))
        async with inbox.running():
            stored = await until_settled(inbox, "e1")
    assert (stored.status, stored.attempts) == (EventStatus.HANDLED, 1)
    assert sum("no attempt is counted: TransportError" in record.message for record in caplog.records) == uncounted
