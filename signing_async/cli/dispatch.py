"""`dispatch`: send every package of a manifest once, however often the command is run or killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import attrs
import click

from .._files import resolve_path
from ..errors import ConfigurationError, InvalidRequest
from .command_base import Seconds, State, command, refuse_password
from .exits import INTERRUPTED, code_of, code_of_all
from .manifest import CheckedManifest, Entry, FailureReport, Manifest, check_manifest
from .output import Output, ProgressDisplay, count
from .running import NO_HANDLERS

if TYPE_CHECKING:
    from ..dispatch.journal import Journal
    from ..dispatch.package import SigningPackage
    from ..transport.operation import Attempt
    from .workers import WorkerResult

MAX_SHOWN = 20
"""How many failures, and how many abandoned drafts, are printed without --json."""

REPORTED = ("package %s was not sent", "package %s: draft %s was abandoned")
"""The log messages that the command replaces with its own, which name the line of the manifest."""


@command(changing=True)
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--journal",
    metavar="PATH|URL",
    help="The journal: a file on a local disk, or postgresql://... for many machines. Put a URL with a password into"
    " SIGNING_JOURNAL.  [default: MANIFEST with the suffix .journal]",
)
@click.option(
    "--failures",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="The report of failed packages, itself a manifest.  [default: MANIFEST with .failures before its suffix]",
)
@click.option("--dry-run", is_flag=True, help="Check the manifest and every PDF; send nothing.")
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1, 64), help="Packages sent at once.")
@click.option(
    "--broker",
    metavar="URL|env:NAME",
    help="Let Taskiq workers send the packages, through the Redis at redis://... Put a URL with a password into a"
    " variable, and give its name: env:SIGNING_BROKER.",
)
@click.option("--wait", is_flag=True, help="With --broker: wait for the workers, and report each package's result.")
@click.option(
    "--for",
    "seconds",
    type=Seconds(0, min_open=True),
    help="With --broker: the time limit for an unavailable broker and, with --wait, for the workers.",
)
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
    """Send every package of MANIFEST: create a signing, upload the documents, add the recipients, send it.

    MANIFEST is CSV with one row per package. The columns are name, language, documents (paths relative to the manifest,
    separated by ;) and recipient1_email; the optional ones are key, message, signing_order, recipient1_first_name,
    recipient1_last_name, recipient1_signing_method, recipient1_order, recipient1_extra_NAME, recipient2_email and so
    on. JSON lines with the same names work too; documents and recipients are lists there.

    Everything is checked before anything is sent. Each package is sent once, identified by its key or its content: if
    the command is interrupted or killed, run it again, and it resumes from its journal. Failed packages are written to
    a report, a manifest that can be dispatched in the same way. Ctrl-C finishes the packages under way; a second Ctrl-C
    stops at once.

    With --broker, workers on any number of machines send the packages. Start them with "taskiq worker
    signing_async.taskiq:broker"; their environment holds SIGNING_BROKER, SIGNING_JOURNAL and a client's settings. The
    workers read the documents under the same paths.

    Exit code 0: all packages were sent. 1: some failed, or a PDF temporarily cannot be read. 2: the manifest is
    invalid, nothing was sent. 3: the outcome of some is unknown. 5: --for expired before a worker reported on any
    package.

    \b
    Example:
      signing-async dispatch leases.csv --dry-run
      signing-async dispatch leases.csv
    """
    stem = _stem(manifest)
    if journal == "":
        # Perhaps an unset variable. With the default journal instead, packages might be sent twice.
        raise InvalidRequest("--journal: must not be empty")
    refuse_password("--journal", journal, "put the URL into SIGNING_JOURNAL")
    plan = Plan(
        manifest,
        journal or str(state.settings.journal or manifest.parent / f"{stem}.journal"),
        failures or manifest.parent / f"{stem}.failures{manifest.suffix}",
        concurrency,
        command_line=shlex.join(["signing-async", *state.arguments]),
        by_workers=broker is not None,
        aim="sent" if broker is None or wait else "enqueued",
        timeout=seconds,
    )
    if failures is not None and failures.is_dir():
        raise InvalidRequest(f"--failures: {str(failures)!r} is a folder")
    if failures is not None and failures.resolve() == manifest.resolve():
        raise click.UsageError("--failures: must not be the manifest itself")
    if wait and broker is None:
        raise click.UsageError("--wait: needs --broker; without it the command itself sends the packages")
    if seconds is not None and broker is None:
        raise click.UsageError("--for: needs --broker")
    state.run(_check_only(state, plan) if dry_run else _dispatch(state, plan, _broker_url(broker)))


def _stem(manifest: Path) -> str:
    """Return the name that a manifest and its failure reports share, so that they share a journal."""
    stem = manifest.stem
    while stem.endswith(".failures") and stem != ".failures":
        stem = stem.removesuffix(".failures")
    return stem


def _broker_url(text: str | None) -> str | None:
    """Return the URL of ``--broker``, read from a variable if it names one."""
    refuse_password("--broker", text, "put the URL into SIGNING_BROKER, and use --broker env:SIGNING_BROKER")
    if text is None or not text.startswith("env:"):
        return text
    name = text.removeprefix("env:")
    url = os.environ.get(name)
    if not url:
        raise ConfigurationError(f"--broker: {name or 'the variable'} is not set")
    return url


@attrs.frozen
class Plan:
    """The options of one `dispatch` command."""

    manifest: Path
    journal: str
    failures: Path
    concurrency: int
    command_line: str
    by_workers: bool
    """Whether workers send the packages; they do not report which packages had been sent earlier."""
    aim: str
    """What this command does with the packages: ``sent`` or ``enqueued``."""
    timeout: float | None
    """Seconds to wait for the broker and the workers; None: without limit."""

    @property
    def journal_shown(self) -> str:
        return without_password(self.journal)


def without_password(text: str) -> str:
    """Return a path as it is, and a URL without its password and query."""
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
    """Open the journal at a path or URL."""
    if "://" not in text:
        from ..storage.journal import SqliteJournal

        async with SqliteJournal(text) as journal:
            yield journal
        return
    if not text.startswith(("postgresql://", "postgres://")):
        raise InvalidRequest(f"--journal: must be a path or postgresql://..., got {without_password(text)!r}")
    try:
        from ..postgres import PostgresJournal
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"--journal: {error}") from None
    async with PostgresJournal(text) as shared:
        await shared.create_table()
        yield shared


def _check_journal(plan: Plan, manifest: Manifest) -> None:
    """Raise `InvalidRequest` if a path cannot be that of a journal."""
    text = plan.journal
    if "://" in text:
        return
    path = resolve_path("--journal", text)
    if path.is_dir():
        raise InvalidRequest(f"--journal: {text!r} is a folder")
    if not path.parent.is_dir():
        raise InvalidRequest(f"--journal: the folder {str(path.parent)!r} does not exist")
    if path.exists() and manifest.is_at(path):
        raise InvalidRequest("--journal: must not be the manifest itself")
    if path == plan.failures.resolve():
        # The report would replace the journal, and packages would be sent twice.
        raise InvalidRequest("--journal: must not be the report of failures")


async def _check(state: State, manifest: Manifest) -> CheckedManifest:
    with ProgressDisplay(state.out, "Checking", None) as display:
        return await check_manifest(manifest, state.settings.assumptions.max_pdf_bytes, display.advance)


async def _check_only(state: State, plan: Plan) -> None:
    with Manifest(plan.manifest) as manifest:
        checked = await _check(state, manifest)
    facts = {"packages": len(checked.lines), "documents": checked.documents, "bytes": checked.size, "sent": 0}
    counts = f"{count(len(checked.lines), 'package')} with {count(checked.documents, 'document')}"
    text = f"{plan.manifest}: {counts} ({checked.size} bytes): all valid. Nothing was sent."
    state.out.result({"dry_run": facts}, text)


async def _dispatch(state: State, plan: Plan, broker: str | None) -> None:
    with Manifest(plan.manifest) as manifest:
        report = FailureReport(plan.failures, manifest)
        report.check()
        _check_journal(plan, manifest)
        checked = await _check(state, manifest)
        run = Run(state, plan, manifest, checked, report)
        async with open_journal(plan.journal) as journal, _sender(state, plan, broker) as client:
            shown = plan.journal_shown
            state.out.say(f"Journal: {shown}", journal=shown)
            await run.dispatch(client, journal)
        run.report()


@contextlib.asynccontextmanager
async def _sender(state: State, plan: Plan, broker: str | None) -> AsyncIterator[Any]:
    """Yield a client; with a broker, the workers instead."""
    if broker is not None:
        from .workers import WaitPolicy, workers

        policy = WaitPolicy(plan.timeout, plan.aim == "sent", state.out.warn)
        async with workers(broker, plan.journal, state.settings.assumptions.max_pdf_bytes, policy) as sender:
            yield sender
        return
    async with state.client() as client:
        # A rejected token would fail every package.
        await client.me()
        yield client


class Run:
    """One run over a manifest's packages, and its results."""

    def __init__(
        self, state: State, plan: Plan, manifest: Manifest, checked: CheckedManifest, report: FailureReport
    ) -> None:
        self._state = state
        self._plan = plan
        self._manifest = manifest
        self._checked = checked
        self._report = report
        self._stop = Stop(state.out)
        self._display = ProgressDisplay(state.out, "Sending", len(checked.lines))
        state.on_attempt = self._note_attempt
        self._under_way: dict[str, Entry] = {}
        self._errors: dict[int, BaseException] = {}
        """One error for each exit code."""
        self._sent = self._earlier = self._failed = self._abandoned = 0

    @property
    def left(self) -> int:
        return len(self._checked.lines) - self._sent - self._failed

    async def dispatch(self, client: Any, journal: Journal) -> None:
        """Send all packages. After Ctrl-C, begin no other package."""
        with self._stop, without_log_of(*REPORTED), self._display:
            try:
                async with client.dispatch_many(self._packages(), journal, self._plan.concurrency) as results:
                    async for result in results:
                        self._record_result(result)
                        self._display.advance(failed=result.error is not None)
            except asyncio.CancelledError:
                if not self._stop.at_once:
                    raise

    def _note_attempt(self, attempt: Attempt) -> None:
        # A draft that was perhaps created is not looked for.
        if attempt.ambiguous and attempt.operation != "signings.create":
            self._display.note("settling an unknown outcome")

    def _packages(self) -> Iterator[SigningPackage]:
        for entry, key in zip(self._manifest.entries(), self._checked.lines, strict=False):
            if self._stop.requested:
                return
            # Only what was checked is sent.
            self._manifest.check_unchanged()
            assert entry.package is not None
            self._under_way[key] = entry
            yield attrs.evolve(entry.package, key=key)
        self._manifest.check_unchanged()

    def _record_result(self, result: WorkerResult) -> None:
        key = result.package.key
        assert key is not None
        entry = self._under_way.pop(key)
        facts: dict[str, Any] = {"line": entry.line, "key": key, "name": result.package.name}
        facts["signing"] = None if result.signing is None else result.signing.id
        facts["abandoned"] = result.abandoned
        self._show_abandoned(entry, result.abandoned)
        if result.error is None:
            self._sent += 1
            self._earlier += result.sent_earlier
            self._state.out.result(facts)
            return
        self._failed += 1
        self._errors.setdefault(code_of(result.error), result.error)
        self._report.add(entry.row, key, str(result.error))
        if self._state.json or self._failed <= MAX_SHOWN:
            self._state.out.failed(f"{self._plan.manifest}, line {entry.line}", result.error, facts)

    def _show_abandoned(self, entry: Entry, drafts: Sequence[str]) -> None:
        for draft in drafts:
            self._abandoned += 1
            if not self._state.json and self._abandoned <= MAX_SHOWN:
                self._state.out.say(f"{self._plan.manifest}, line {entry.line}: draft {draft} was abandoned")

    def report(self) -> None:
        """Report the results, and set the exit code."""
        interrupted = self._stop.requested and self.left > 0
        enqueued = self._plan.aim == "enqueued"
        # An earlier report may be the only record of packages that were not tried, or not sent yet.
        kept = (interrupted or enqueued) and self._plan.failures.exists()
        reported = not kept and self._finish_report()
        facts = {
            "packages": len(self._checked.lines),
            self._plan.aim: self._sent,
            "sent_earlier": None if self._plan.by_workers else self._earlier,
            "failed": self._failed,
            "left": self.left,
            "abandoned": self._abandoned,
        }
        places = {"journal": self._plan.journal_shown, "failures": str(self._plan.failures) if reported else None}
        counts = f"{self._sent} {self._plan.aim}"
        if not self._plan.by_workers:
            counts += f": {self._earlier} earlier, {self._sent - self._earlier} now"
        lines = [f"{counts}, {self._failed} failed." if self._failed else f"{counts}."]
        if reported:
            lines.append(f"Failed packages and their errors are in {self._plan.failures}; dispatch it to retry them.")
        if self._abandoned:
            lines.append(f"Abandoned drafts, left unsent at the service: {self._abandoned}.")
        if kept and enqueued:
            lines.append(f"{self._plan.failures} is kept until its packages are sent; dispatch it again with --wait.")
        if kept and self._failed and self._plan.failures.resolve() != self._plan.manifest.resolve():
            again = f"to retry them, dispatch {self._plan.manifest} again"
            lines.append(f"The failed packages are not added to the earlier {self._plan.failures}; {again}.")
        if interrupted:
            lines.append(
                f"Interrupted: {self.left} left. To resume, run the same command:\n  {self._plan.command_line}"
            )
        self._state.out.result({"summary": {**facts, **places, "interrupted": interrupted}}, "\n".join(lines))
        self._state.end(INTERRUPTED if interrupted else code_of_all(self._errors.values(), done=self._sent))

    def _finish_report(self) -> bool:
        """Put the report in place and return whether there is one. If that fails, warn: the journal has all results."""
        try:
            return self._report.write()
        except OSError as error:
            problem = f"--failures: {str(self._plan.failures)!r} cannot be written: {error.strerror}"
            self._state.out.warn(f"{problem}. To retry the failed packages, dispatch {self._plan.manifest} again.")
            return False


@contextlib.contextmanager
def without_log_of(*beginnings: str) -> Iterator[None]:
    """Drop the log records that begin with one of these texts: the command reports these items itself."""

    def is_kept(record: logging.LogRecord) -> bool:
        return not record.msg.startswith(beginnings)

    log = logging.getLogger("signing_async")
    log.addFilter(is_kept)
    try:
        yield
    finally:
        log.removeFilter(is_kept)


class Stop:
    """Ctrl-C: the first finishes the packages under way, the second cancels them."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.requested: bool = False
        self.at_once: bool = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        with contextlib.suppress(*NO_HANDLERS):
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(*NO_HANDLERS):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _interrupt(self) -> None:
        if self.requested:
            self.at_once = True
            self._task.cancel()
            return
        self.requested = True
        self._out.say("Stopping: finishing the packages under way. Press Ctrl-C again to stop at once.")
