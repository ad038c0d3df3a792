"""`dispatch`: send every package of a manifest, each of them once, however often the command is run and killed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shlex
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import attrs
import click

from ..errors import ConfigurationError, InvalidRequest
from .command import Seconds, State, command
from .exits import INTERRUPTED, code_of, code_of_all
from .manifest import Entry, FailureReport, Manifest, Problem
from .running import NO_HANDLERS

if TYPE_CHECKING:
    from ..dispatch.journal import Journal
    from ..dispatch.package import SigningPackage
    from ..dispatch.run import DispatchResult
    from .output import Output

MOST_PROBLEMS = 1000
"""So many are told of, and the others counted."""

MOST_SHOWN = 20
"""So many failures are shown to people as they come; all of them are in the report."""

SECONDS_BETWEEN_LINES = 10.0
"""Where nothing can move, how far it is gets a line so often."""


@command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--journal",
    metavar="PATH|URL",
    help="What was begun and sent: a file on this machine's disk, or postgresql://... for many machines; a URL with a"
    " password goes into SIGNING_JOURNAL.  [default: beside MANIFEST, with .journal for its ending]",
)
@click.option(
    "--failures",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Where what failed is written as a manifest.  [default: beside MANIFEST, with .failures before its ending]",
)
@click.option("--dry-run", is_flag=True, help="Check the manifest and every PDF, and send nothing.")
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1, 64), help="Packages at once.")
@click.option(
    "--broker",
    metavar="URL|env:NAME",
    help="Leave the sending to workers: redis://... of a Redis in which Taskiq's workers find the packages; a URL with"
    " a password is read from a variable, say env:SIGNING_BROKER.",
)
@click.option("--wait", is_flag=True, help="With --broker: wait for the workers, and tell what came of each package.")
@click.option("--for", "seconds", type=Seconds(0, min_open=True), help="With --wait: give up after so long.")
def dispatch(
    state: State,
    manifest: Path,
    journal: str | None,
    failures: Path | None,
    dry_run: bool,
    concurrency: int,
    broker: str | None,
    wait: bool,
    seconds: float | None,
) -> None:
    """Send every package of MANIFEST: create it, upload its documents, add its recipients, send it.

    MANIFEST is CSV, one row for each package, with the columns name, language, documents (paths from the manifest's
    folder, with ; between them), recipient1_email, and if you like key, message, signing_order, recipient1_first_name,
    recipient1_last_name, recipient1_signing_method, recipient1_order, recipient1_extra_NAME, recipient2_email and so
    on; or JSON lines with the same names, documents and recipients as lists.

    All of it is checked before anything is sent. Each package is sent once, by its key or else its content, whatever
    ends the command: run it again, and it goes on from its journal. What failed is written as a manifest that can be
    run in the same way. Ctrl-C finishes what is under way; a second one does not wait for that.

    With --broker the packages are sent by workers on any number of machines, which are started with
    "taskiq worker signing_async.taskiq:broker" and have SIGNING_BROKER, SIGNING_JOURNAL and the settings of a client in
    their environment. They read the documents under the same paths.

    Exit code 0: all are sent. 1: some failed. 2: the manifest is wrong, and nothing was sent. 3: of some it is not
    known whether they were sent. 5: no worker has told of any in the time of --for.

    \b
    Example:
      signing-async dispatch leases.csv --dry-run
      signing-async dispatch leases.csv
    """
    stem = _stem(manifest)
    if journal == "":
        # Of a variable that is not set, say: another journal in its place would let packages be sent twice.
        raise InvalidRequest("--journal: is empty")
    _check_argument("--journal", journal, "put the URL into SIGNING_JOURNAL")
    plan = Plan(
        manifest,
        journal or str(state.settings.journal or manifest.parent / f"{stem}.journal"),
        failures or manifest.parent / f"{stem}.failures{manifest.suffix}",
        concurrency,
        again=shlex.join(["signing-async", *state.arguments]),
        aim="sent" if broker is None or wait else "enqueued",
        patience=seconds,
    )
    if failures is not None and failures.is_dir():
        raise InvalidRequest(f"--failures: {str(failures)!r} is a folder")
    if failures is not None and failures.resolve() == manifest.resolve():
        raise click.UsageError("--failures: that is the manifest itself")
    if wait and broker is None:
        raise click.UsageError("--wait: is for --broker; without it the command sends the packages itself")
    if seconds is not None and not wait:
        raise click.UsageError("--for: is for --wait")
    state.run(_check_only(state, plan) if dry_run else _dispatch(state, plan, _broker_url(broker)))


def _stem(manifest: Path) -> str:
    """What a report of failures shares with its manifest: the same journal has to protect both."""
    stem = manifest.stem
    while stem.endswith(".failures") and stem != ".failures":
        stem = stem.removesuffix(".failures")
    return stem


def _broker_url(text: str | None) -> str | None:
    """The URL that ``--broker`` says, or that stands in the variable it names."""
    _check_argument("--broker", text, "put the URL into SIGNING_BROKER, and say --broker env:SIGNING_BROKER")
    if text is None or not text.startswith("env:"):
        return text
    name = text.removeprefix("env:")
    url = os.environ.get(name)
    if not url:
        raise ConfigurationError(f"--broker: {name or 'the variable'} is not set")
    return url


def _check_argument(option: str, text: str | None, instead: str) -> None:
    from ..settings import holds_password

    if text is not None and holds_password(text):
        words = f"{option}: every process on this machine can read a password there: {instead}"
        raise InvalidRequest(words)


@attrs.frozen
class Plan:
    """What is to be done."""

    manifest: Path
    journal: str
    failures: Path
    concurrency: int
    again: str
    """The command to go on with."""
    aim: str
    """What becomes of the packages: they are sent, or enqueued."""
    patience: float | None
    """Seconds to wait for workers; None: as long as it takes."""

    @property
    def journal_shown(self) -> str:
        return without_password(self.journal)


def without_password(text: str) -> str:
    """A path as it is, a URL as it may be shown."""
    if "://" not in text:
        return text
    try:
        parts = urlsplit(text)
        user = f"{parts.username}@" if parts.username else ""
        return f"{parts.scheme}://{user}{parts.netloc.rpartition('@')[2]}{parts.path}"
    except ValueError:
        return f"{text.partition('://')[0]}://..."


@contextlib.asynccontextmanager
async def open_journal(text: str) -> AsyncIterator[Journal]:
    """The journal that ``--journal`` names."""
    if "://" not in text:
        from ..dispatch.journal import SqliteJournal

        async with SqliteJournal(text) as journal:
            yield journal
        return
    if not text.startswith(("postgresql://", "postgres://")):
        raise InvalidRequest(f"--journal: must be a path or postgresql://..., not {without_password(text)!r}")
    try:
        from ..postgres import PostgresJournal
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"--journal: {error}") from None
    async with PostgresJournal(text) as shared:
        await shared.create_table()
        yield shared


# First everything is checked


@attrs.define
class Checked:
    """What was found when a manifest was checked."""

    packages: int = 0
    documents: int = 0
    size: int = 0
    hashes: bytearray = attrs.field(factory=bytearray)
    """For each package that has no key of its own, the hash that names it; 32 bytes each."""
    problems: list[Problem] = attrs.field(factory=list)
    wrong: int = 0
    lines: dict[bytes, int] = attrs.field(factory=dict)
    """A short hash of each key, and its line."""

    def add(self, problems: tuple[Problem, ...]) -> None:
        self.wrong += len(problems)
        self.problems += problems[: max(0, MOST_PROBLEMS - len(self.problems))]

    def name(self, entry: Entry, key: str | None, content: str) -> None:
        """Keep what the package is to be called; no two have the same."""
        if key is None:
            self.hashes += bytes.fromhex(content)
        short = hashlib.blake2b((key or content).encode(), digest_size=12).digest()
        first = self.lines.setdefault(short, entry.line)
        if first != entry.line and key is not None:
            self.add((Problem(entry.line, "key", f"{key!r} is the key of line {first} as well"),))
        elif first != entry.line:
            words = f"is the same package as line {first}: if both are meant, give them keys of their own"
            self.add((Problem(entry.line, "", words),))


async def _check(state: State, manifest: Manifest) -> Checked:
    """Find all that is wrong with a manifest and its PDFs; it ends with an error if anything is."""
    checked = Checked()
    most = state.settings.assumptions.max_pdf_bytes
    with ProgressDisplay(state.out, "Checking", None) as display:
        for entry in manifest.entries():
            await _check_entry(entry, checked, most)
            display.advance()
            # Many small files are read without a pause, and Ctrl-C has to be heard.
            await asyncio.sleep(0)
    if not checked.packages and not checked.wrong:
        checked.add((Problem(1, "", "there are no packages in it"),))
    if checked.wrong:
        raise _refused(manifest.path, checked)
    checked.lines.clear()  # of no more use, and there may be many
    return checked


async def _check_entry(entry: Entry, checked: Checked, most: int) -> None:
    from ..dispatch.package import prepare

    if entry.package is None:
        checked.add(entry.problems)
        return
    checked.packages += 1
    try:
        prepared = await prepare(entry.package, most)
    except InvalidRequest as error:
        checked.add(entry.with_problems(error.problems))
        return
    prepared.close()
    checked.add(entry.problems)
    checked.documents += len(prepared.documents)
    checked.size += sum(document.size for document in prepared.documents)
    checked.name(entry, entry.package.key, prepared.content)


def _refused(path: Path, checked: Checked) -> InvalidRequest:
    """All problems, one a line; and for machines one by one."""
    lines = [f"{path}, {problem}" for problem in checked.problems]
    more = checked.wrong - len(lines)
    lines += [f"and {more} more"] if more else []
    count = "1 thing is" if checked.wrong == 1 else f"{checked.wrong} things are"
    words = f"{count} wrong with {path}, and nothing was sent:"
    return InvalidRequest("\n  ".join([words, *lines]), problems=lines)


async def _check_only(state: State, plan: Plan) -> None:
    with Manifest(plan.manifest) as manifest:
        checked = await _check(state, manifest)
    facts = {"packages": checked.packages, "documents": checked.documents, "bytes": checked.size, "sent": 0}
    words = f"{_count(checked.packages, 'package')} with {_count(checked.documents, 'document')}"
    text = f"{plan.manifest}: {words} ({checked.size} bytes): all in order. Nothing was sent."
    state.out.result({"dry_run": facts}, text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# Then it is sent


async def _dispatch(state: State, plan: Plan, broker: str | None) -> None:
    with Manifest(plan.manifest) as manifest:
        report = FailureReport(plan.failures, manifest)
        report.check()
        checked = await _check(state, manifest)
        run = Run(state, plan, manifest, checked, report)
        with contextlib.ExitStack() as exits:
            exits.callback(report.discard)
            async with open_journal(plan.journal) as journal, _sender(state, plan, broker) as client:
                shown = plan.journal_shown
                state.out.say(f"The journal is {shown}: a second run goes on from there.", journal=shown)
                await run.carry_out(client, journal)
            run.tell()


@contextlib.asynccontextmanager
async def _sender(state: State, plan: Plan, broker: str | None) -> AsyncIterator[Any]:
    """A client, or workers in its place."""
    if broker is not None:
        from .workers import Patience, workers

        patience = Patience(plan.patience, state.out.warn) if plan.aim == "sent" else None
        async with workers(broker, plan.journal, state.settings.assumptions.max_pdf_bytes, patience) as sender:
            yield sender
        return
    async with state.client() as client:
        # A token that does not work would fail every package.
        await client.me()
        yield client


class Run:
    """The packages of a manifest on their way, and what came of them."""

    def __init__(self, state: State, plan: Plan, manifest: Manifest, checked: Checked, report: FailureReport) -> None:
        self._state = state
        self._plan = plan
        self._manifest = manifest
        self._checked = checked
        self._report = report
        self._stop = Stop(state.out)
        self._under_way: dict[str, Entry] = {}
        self._errors: dict[int, BaseException] = {}
        """One for each exit code."""
        self._sent = self._failed = 0

    @property
    def left(self) -> int:
        return self._checked.packages - self._sent - self._failed

    async def carry_out(self, client: Any, journal: Journal) -> None:
        """Send them all, or as many as there are before Ctrl-C."""
        display = ProgressDisplay(self._state.out, "Sending", self._checked.packages)
        with self._stop, told_once(), display:
            try:
                async with client.dispatch_many(self._packages(), journal, self._plan.concurrency) as results:
                    async for result in results:
                        self._take(result)
                        display.advance(failed=result.error is not None)
            except asyncio.CancelledError:
                if not self._stop.at_once:
                    raise

    def _packages(self) -> Iterator[SigningPackage]:
        unnamed = 0
        for entry in self._manifest.entries():
            if self._stop.asked:
                return
            # What was checked is what is sent.
            self._manifest.check_unchanged()
            assert entry.package is not None
            key = entry.package.key
            if key is None:
                key = self._checked.hashes[32 * unnamed : 32 * unnamed + 32].hex()
                unnamed += 1
            self._under_way[key] = entry
            yield attrs.evolve(entry.package, key=key)

    def _take(self, result: DispatchResult) -> None:
        key = result.package.key
        assert key is not None
        entry = self._under_way.pop(key)
        facts = {"line": entry.line, "key": key, "name": result.package.name}
        facts["signing"] = None if result.signing is None else result.signing.id
        if result.error is None:
            self._sent += 1
            self._state.out.result(facts)
            return
        self._failed += 1
        self._errors.setdefault(code_of(result.error), result.error)
        self._report.add(entry.row, key, str(result.error))
        if self._state.json or self._failed <= MOST_SHOWN:
            self._state.out.failed(f"{self._plan.manifest}, line {entry.line}", result.error, facts)

    def tell(self) -> None:
        """Say what came of it, and end with its exit code."""
        interrupted = self._stop.asked and self.left > 0
        enqueued = self._plan.aim == "enqueued"
        # Of a report that is run itself nothing is to be lost: what was not tried, or not sent yet, may stand in it
        # alone.
        is_own = self._plan.failures.resolve() == self._plan.manifest.resolve()
        kept = is_own and (interrupted or enqueued)
        reported = not kept and self._report.finish(remove_old=not enqueued)
        facts = {
            "packages": self._checked.packages,
            self._plan.aim: self._sent,
            "failed": self._failed,
            "left": self.left,
        }
        places = {"journal": self._plan.journal_shown, "failures": str(self._plan.failures) if reported else None}
        of_all = f"{self._sent} of {_count(self._checked.packages, 'package')} {'is' if self._sent == 1 else 'are'}"
        lines = [f"{of_all} {self._plan.aim}, {self._failed} failed."]
        if reported:
            lines.append(f"What failed is in {self._plan.failures}, with the reasons: it can be run as it is.")
        if kept and enqueued:
            words = "is kept until they are sent: to wait for that, run it again with --wait."
            lines.append(f"{self._plan.failures} {words}")
        if interrupted:
            lines.append(f"Interrupted: {self.left} left. To go on, run the same command:\n  {self._plan.again}")
        self._state.out.result({"summary": {**facts, **places, "interrupted": interrupted}}, "\n".join(lines))
        self._state.end(INTERRUPTED if interrupted else code_of_all(self._errors.values(), done=self._sent))


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Keep the package's own remark on each failure out of the output, which tells of it with its line."""

    def others(record: logging.LogRecord) -> bool:
        return not record.msg.startswith("package %s was not sent")

    log = logging.getLogger("signing_async")
    log.addFilter(others)
    try:
        yield
    finally:
        log.removeFilter(others)


class Stop:
    """Ctrl-C: after the first nothing more is begun, the second ends what is under way."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.asked: bool = False
        self.at_once: bool = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        with contextlib.suppress(*NO_HANDLERS):
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(*NO_HANDLERS):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _hear(self) -> None:
        if self.asked:
            self.at_once = True
            self._task.cancel()
            return
        self.asked = True
        self._out.say("Stopping: what is under way is finished first. Ctrl-C again does not wait for it.")


class ProgressDisplay:
    """The number of packages done: a bar with rate and remaining time on a terminal, an occasional line elsewhere."""

    def __init__(self, out: Output, what: str, total: int | None) -> None:
        self._out = out
        self._what = what
        self._total = total
        self._done = self._failed = 0
        self._began = self._last_line = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._out.live:
            self._bar = _bar(self._out)
            self._task = self._bar.add_task(self._what, total=self._total, rate="", failed="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, *, failed: bool = False) -> None:
        """Count one package as done."""
        self._done += 1
        self._failed += failed
        now = time.monotonic()
        rate = self._done / max(now - self._began, 0.001)
        if self._bar is not None:
            words = f"{self._failed} failed" if self._failed else ""
            self._bar.update(self._task, completed=self._done, rate=f"{rate:.1f}/s", failed=words)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print_line(rate)

    def _print_line(self, rate: float) -> None:
        facts: dict[str, Any] = {"done": self._done, "total": self._total, "failed": self._failed, "rate": rate}
        words = f"{self._what}: {self._done}"
        if self._total is not None:
            facts["seconds_left"] = (self._total - self._done) / rate
            words += f" of {self._total}, {self._failed} failed"
        words += f", {rate:.1f} a second"
        if "seconds_left" in facts:
            words += f", about {_duration(facts['seconds_left'])} left"
        self._out.say(words, progress=facts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _bar(out: Output) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[failed]}", style="red"),
        TimeRemainingColumn(),
        console=out.errors,
        transient=True,
    )
