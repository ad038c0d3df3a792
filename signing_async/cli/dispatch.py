"""`dispatch`: send every package of a manifest once, however often the command is run or killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
import click

from .._files import resolve_path
from ..errors import ConfigurationError, InvalidRequest
from .command_base import Seconds, State, command, refuse_password
from .exits import INTERRUPTED, code_of, code_of_all
from .manifest import CheckedManifest, Entry, FailureReport, Manifest, check_manifest
from .output import ProgressDisplay, count
from .running import on_signal

if TYPE_CHECKING:
    from ..dispatch.journal import Journal
    from ..dispatch.package import SigningPackage
    from ..transport.operation import Attempt
    from .workers import WorkerResult

MAX_SHOWN = 20
"""How many failures, and how many abandoned drafts, are printed without --json."""


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
    "seconds",  # not the name of the common option --timeout
    type=Seconds(0, min_open=True),
    help="With --broker: the time limit for an unavailable broker and, with --wait, for the workers.",
)
async def dispatch(
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
    refuse_password("--journal", journal, "put the URL into SIGNING_JOURNAL")
    refuse_password("--broker", broker, "put the URL into SIGNING_BROKER, and use --broker env:SIGNING_BROKER")
    for option, given in (("--wait", wait), ("--for", seconds is not None)):
        if given and broker is None:
            raise click.UsageError(f"{option}: needs --broker; without it the command itself sends the packages")
    stem = manifest.stem
    while stem.endswith(".failures") and stem != ".failures":
        stem = stem.removesuffix(".failures")  # a report of failures shares the journal of its manifest
    place = journal or str(state.settings.journal or manifest.parent / f"{stem}.journal")
    report_path = failures or manifest.parent / f"{stem}.failures{manifest.suffix}"
    url = None if dry_run or broker is None else _broker_url(broker)
    if failures is not None and failures.is_dir():
        raise InvalidRequest(f"--failures: {str(failures)!r} is a folder")
    if failures is not None and failures.resolve() == manifest.resolve():
        raise click.UsageError("--failures: must not be the manifest itself")
    opened = Manifest(manifest)
    report = FailureReport(report_path, opened)
    if not dry_run:
        report.check()
        _check_journal(place, manifest, report_path)
    with ProgressDisplay(state.out, "Checking", None) as display:
        checked = await check_manifest(opened, state.settings.assumptions.max_pdf_bytes, display.advance)
    if dry_run:
        packages = len(checked.lines)
        counts = f"{count(packages, 'package')} with {count(checked.documents, 'document')} ({checked.size} bytes)"
        facts = {"packages": packages, "documents": checked.documents, "bytes": checked.size, "sent": 0}
        state.out.result({"dry_run": facts}, f"{manifest}: {counts}: all valid. Nothing was sent.")
        return
    run = _Run(state, opened, checked, report, place, by_workers=url is not None, enqueues=url is not None and not wait)
    state.on_attempt = run.note_attempt
    async with open_journal(place) as opened_journal, _sender(state, url, place, seconds, wait) as sender:
        await run.send(sender, opened_journal, concurrency)
    run.end()


def _broker_url(text: str) -> str:
    """Return the URL of ``--broker``, read from a variable if it names one."""
    if not text.startswith("env:"):
        return text
    name = text.removeprefix("env:")
    url = os.environ.get(name)
    if not url:
        raise ConfigurationError(f"--broker: {name or 'the variable'} is not set")
    return url


def _check_journal(place: str, manifest: Path, report: Path) -> None:
    """Raise `InvalidRequest` if a path cannot be that of a journal."""
    if "://" in place:
        return
    path = resolve_path("--journal", place)
    if path.is_dir():
        raise InvalidRequest(f"--journal: {place!r} is a folder")
    if not path.parent.is_dir():
        raise InvalidRequest(f"--journal: the folder {str(path.parent)!r} does not exist")
    if path == manifest.resolve():
        raise InvalidRequest("--journal: must not be the manifest itself")
    if path == report.resolve():
        # The report would replace the journal, and packages would be sent twice.
        raise InvalidRequest("--journal: must not be the report of failures")


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


@contextlib.asynccontextmanager
async def _sender(
    state: State, broker: str | None, journal: str, timeout: float | None, wait: bool
) -> AsyncIterator[Any]:
    """Yield a client; with a broker, the workers instead."""
    if broker is None:
        async with state.client() as client:
            await client.me()  # a rejected token would fail every package
            yield client
        return
    from .workers import workers

    max_bytes = state.settings.assumptions.max_pdf_bytes
    async with workers(broker, journal, max_bytes, timeout, state.out.warn, wait=wait) as sender:
        yield sender


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


@attrs.define
class _Run:
    """One run over a manifest's packages, and its results."""

    state: State
    manifest: Manifest
    checked: CheckedManifest
    report: FailureReport
    journal: str
    by_workers: bool = attrs.field(kw_only=True)
    enqueues: bool = attrs.field(kw_only=True)
    """Whether a package is done when workers will send it."""
    under_way: dict[str, Entry] = attrs.field(factory=dict)
    sent: int = 0
    earlier: int = 0
    failed: int = 0
    abandoned: int = 0
    interrupts: int = 0
    """How often Ctrl-C was pressed. The first finishes the packages under way, the second cancels them."""
    errors: dict[int, BaseException] = attrs.field(factory=dict)
    """One error for each exit code."""
    display: ProgressDisplay | None = None

    async def send(self, sender: Any, journal: Journal, concurrency: int) -> None:
        """Send all packages and print their results. After Ctrl-C, begin no other package."""
        out, task = self.state.out, asyncio.current_task()
        assert task is not None
        cancel = task.cancel

        def interrupt() -> None:
            self.interrupts += 1
            if self.interrupts == 1:
                out.say("Stopping: finishing the packages under way. Press Ctrl-C again to stop at once.")
            else:
                cancel()

        out.say(f"Journal: {without_password(self.journal)}", journal=without_password(self.journal))
        with (
            on_signal(signal.SIGINT, interrupt),
            without_log_of("package %s was not sent", "package %s: draft %s was abandoned"),
            ProgressDisplay(out, "Sending", len(self.checked.lines)) as display,
        ):
            self.display = display
            try:
                async with sender.dispatch_many(self._packages(), journal, concurrency) as results:
                    async for result in results:
                        self._add(result)
                        display.advance(failed=result.error is not None)
            except asyncio.CancelledError:
                if self.interrupts < 2:
                    raise

    def note_attempt(self, attempt: Attempt) -> None:
        # A draft that was perhaps created is not looked for.
        if self.display is not None and attempt.ambiguous and attempt.operation != "signings.create":
            self.display.note("settling an unknown outcome")

    def _packages(self) -> Iterator[SigningPackage]:
        for entry, key in zip(self.manifest.entries(), self.checked.lines, strict=True):
            if self.interrupts:
                return
            assert entry.package is not None
            self.under_way[key] = entry
            yield attrs.evolve(entry.package, key=key)

    def _add(self, result: WorkerResult) -> None:
        """Count and print the result of a package."""
        key = str(result.package.key)
        entry = self.under_way.pop(key)
        out, where = self.state.out, f"{self.manifest.path}, line {entry.line}"
        facts: dict[str, Any] = {"line": entry.line, "key": key, "name": result.package.name}
        facts["signing"] = None if result.signing is None else result.signing.id
        facts["abandoned"] = result.abandoned
        for draft in result.abandoned:
            self.abandoned += 1
            if not out.json and self.abandoned <= MAX_SHOWN:
                out.say(f"{where}: draft {draft} was abandoned")
        if result.error is None:
            self.sent += 1
            self.earlier += result.sent_earlier
            out.result(facts)
            return
        self.failed += 1
        self.errors.setdefault(code_of(result.error), result.error)
        self.report.add(entry.row, key, str(result.error))
        if out.json or self.failed <= MAX_SHOWN:
            out.failed(where, result.error, facts)

    def end(self) -> None:
        """Write the report of failures, print the totals, and set the exit code."""
        packages, verb = len(self.checked.lines), "enqueued" if self.enqueues else "sent"
        left = packages - self.sent - self.failed
        interrupted = self.interrupts > 0 and left > 0
        counts = f"{self.sent} {verb}"
        if not self.by_workers:  # workers do not report what was sent earlier
            counts += f": {self.earlier} earlier, {self.sent - self.earlier} now"
        lines = [f"{counts}, {self.failed} failed." if self.failed else f"{counts}."]
        reported = self._write_report(lines, keep=interrupted or self.enqueues)
        if self.abandoned:
            lines.append(f"Abandoned drafts, left unsent at the service: {self.abandoned}.")
        if interrupted:
            command = shlex.join(["signing-async", *self.state.arguments])
            lines.append(f"Interrupted: {left} left. To resume, run the same command:\n  {command}")
        facts = {
            "packages": packages,
            verb: self.sent,
            "sent_earlier": None if self.by_workers else self.earlier,
            "failed": self.failed,
            "left": left,
            "abandoned": self.abandoned,
            "journal": without_password(self.journal),
            "failures": str(self.report.path) if reported else None,
            "interrupted": interrupted,
        }
        self.state.out.result({"summary": facts}, "\n".join(lines))
        self.state.end(INTERRUPTED if interrupted else code_of_all(self.errors.values(), done=self.sent))

    def _write_report(self, lines: list[str], *, keep: bool) -> bool:
        """Write the report of failures, add what to say about it, and return whether this run's failures are in it.

        ``keep``: an earlier report may be the only record of packages that were not tried, or not sent yet.
        """
        path, manifest = self.report.path, self.manifest.path
        again = f"to retry the failed packages, dispatch {manifest} again"
        if keep and path.exists():
            if self.enqueues:
                lines.append(f"{path} is kept until its packages are sent; dispatch it again with --wait.")
            if self.failed and path.resolve() != manifest.resolve():
                lines.append(f"The failed packages are not added to the earlier {path}; {again}.")
            return False
        try:
            reported = self.report.write()
        except OSError as error:  # the journal has all results
            self.state.out.warn(f"--failures: {str(path)!r} cannot be written: {error.strerror}; {again}")
            return False
        if reported:
            lines.append(f"Failed packages and their errors are in {path}; dispatch it to retry them.")
        return reported
