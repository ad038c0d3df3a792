"""`dispatch`: send every package of a manifest once, however often the command is run or killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from .._files import resolve_path
from ..errors import ConfigurationError, InvalidRequest
from .command_base import Seconds, State, command, journal_option, on_signal, refuse_password
from .exits import INTERRUPTED, code_of, code_of_all
from .manifest import CheckedManifest, Entry, FailureReport, Manifest, check_manifest
from .output import ProgressDisplay, count

if TYPE_CHECKING:
    from ..dispatch.journal import Journal
    from ..dispatch.package import SigningPackage
    from ..transport.operation import Attempt
    from .workers import WorkerResult

MAX_SHOWN = 20
"""How many failures, and how many abandoned drafts, are printed without --json."""


@command(changing=True)
@click.argument("manifest", type=click.Path(path_type=Path))
@journal_option
@click.option("--failures", type=click.Path(path_type=Path), help="The report of failed packages, itself a manifest.")
@click.option("--dry-run", is_flag=True, help="Check the manifest and every PDF; send nothing.")
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1, 64), help="Packages sent at once.")
@click.option("--broker", metavar="URL|env:NAME", help="Let Taskiq workers send the packages, through this Redis.")
@click.option("--wait", is_flag=True, help="With --broker: wait for the workers, and report each package's result.")
@click.option("--for", "seconds", type=Seconds(0, min_open=True), help="With --broker: the longest wait.")
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
) -> int:
    """Send every package of MANIFEST: create a signing, upload the documents, add the recipients, send it.

    MANIFEST is CSV with one row per package. The columns are name, language, documents (paths relative to the manifest,
    separated by ;) and recipient1_email; the optional ones are key, message, signing_order, recipient1_first_name,
    recipient1_last_name, recipient1_signing_method, recipient1_order, recipient1_extra_NAME, recipient2_email and so
    on. JSON lines with the same names work too; documents and recipients are lists there.

    Everything is checked before anything is sent. Each package is sent once, identified by its key or its content: if
    the command is interrupted or killed, run it again, and it resumes from its journal, by default MANIFEST with the
    suffix .journal. Failed packages are written to a report, a manifest that can be dispatched in the same way. Ctrl-C
    finishes the packages under way; a second Ctrl-C stops at once.

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
    if broker is not None and broker.startswith("env:") and not dry_run:
        variable = broker.removeprefix("env:")
        broker = os.environ.get(variable)
        if not broker:
            raise ConfigurationError(f"--broker: {variable or 'the variable'} is not set")
    stem = manifest.stem
    while stem.endswith(".failures") and stem != ".failures":
        stem = stem.removesuffix(".failures")  # a report of failures shares the journal of its manifest
    place = journal or str(state.settings.journal or manifest.parent / f"{stem}.journal")
    if broker is not None and "://" not in place and not dry_run:
        raise InvalidRequest("--broker: needs a journal that all workers can reach: --journal postgresql://...")
    if failures is not None and failures.is_dir():
        raise InvalidRequest(f"--failures: {str(failures)!r} is a folder")
    if failures is not None and failures.resolve() == manifest.resolve():
        raise click.UsageError("--failures: must not be the manifest itself")
    opened = Manifest(manifest)
    report = FailureReport(failures or manifest.parent / f"{stem}.failures{manifest.suffix}", opened)
    if not dry_run:
        report.check()
        _check_journal(place, manifest, report.path)
    with ProgressDisplay(state.out, "Checking", None) as display:
        checked = await check_manifest(opened, state.settings.assumptions.max_pdf_bytes, display.advance)
    if dry_run:
        packages = len(checked.lines)
        counts = f"{count(packages, 'package')} with {count(checked.documents, 'document')} ({checked.size} bytes)"
        facts = {"packages": packages, "documents": checked.documents, "bytes": checked.size, "sent": 0}
        state.out.result({"dry_run": facts}, f"{manifest}: {counts}: all valid. Nothing was sent.")
        return 0
    work = _Run(
        state, opened, checked, report, place, by_workers=broker is not None, enqueues=bool(broker and not wait)
    )
    async with open_journal(place) as opened_journal, contextlib.AsyncExitStack() as exits:
        if broker is not None:
            from .workers import worker_results

            max_bytes = state.settings.assumptions.max_pdf_bytes
            results: Any = worker_results(broker, work.packages(), max_bytes, seconds, state.out.warn, wait=wait)
        else:
            client = await exits.enter_async_context(state.client(work.note_attempt))
            await client.me()  # a rejected token would fail every package
            results = client.dispatch_many(work.packages(), opened_journal, concurrency)
        await work.report_results(results)
    return work.summarize()


def _check_journal(place: str, manifest: Path, report: Path) -> None:
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


def _without_password(place: str) -> str:
    return re.sub(r"(://[^:/@]*):.*@", r"\1@", place.partition("?")[0]) if "://" in place else place


@contextlib.asynccontextmanager
async def open_journal(place: str) -> AsyncIterator[Journal]:
    if "://" not in place:
        from ..storage.journal import SqliteJournal

        async with SqliteJournal(place) as journal:
            yield journal
        return
    scheme = place.partition("://")[0]
    if scheme not in ("postgresql", "postgres"):
        raise InvalidRequest(f"--journal: must be a path or postgresql://..., got {scheme}://...")
    from ..postgres import PostgresJournal

    async with PostgresJournal(place) as shared:
        await shared.create_table()
        yield shared


@attrs.define
class _Run:
    """One run over a manifest's packages, and its results."""

    state: State
    manifest: Manifest
    checked: CheckedManifest
    failures: FailureReport
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

    def packages(self) -> Iterator[SigningPackage]:
        """Yield the packages with their keys. After Ctrl-C, yield no other package."""
        for entry, key in zip(self.manifest.entries(), self.checked.lines, strict=True):
            if self.interrupts:
                return
            assert entry.package is not None
            self.under_way[key] = entry
            yield attrs.evolve(entry.package, key=key)

    async def report_results(self, results: Any) -> None:
        out, task = self.state.out, asyncio.current_task()
        assert task is not None
        cancel = task.cancel

        def interrupt() -> None:
            self.interrupts += 1
            if self.interrupts == 1:
                out.say("Stopping: finishing the packages under way. Press Ctrl-C again to stop at once.")
            else:
                cancel()

        place = _without_password(self.journal)
        out.say(f"Journal: {place}", journal=place)
        with on_signal(signal.SIGINT, interrupt), ProgressDisplay(out, "Sending", len(self.checked.lines)) as display:
            self.display = display
            try:
                async with results as stream:
                    async for result in stream:
                        self._add(result)
                        display.advance(failed=result.error is not None)
            except asyncio.CancelledError:
                if self.interrupts < 2:
                    raise

    def note_attempt(self, attempt: Attempt) -> None:
        """Say in the progress bar that an unknown outcome is settled. A spare draft has none."""
        if self.display is not None and attempt.ambiguous and attempt.operation != "signings.create":
            self.display.note("settling an unknown outcome")

    def _add(self, result: WorkerResult) -> None:
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
        self.failures.add(entry.row, key, str(result.error))
        if out.json or self.failed <= MAX_SHOWN:
            out.failed(where, result.error, facts)
            if result.signing is not None and not out.json:
                out.say(f"{where}: its signing at the service is {result.signing.id}")

    def summarize(self) -> int:
        """Write the report of failures, print the totals, and return the exit code."""
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
            "journal": _without_password(self.journal),
            "failures": str(self.failures.path) if reported else None,
            "interrupted": interrupted,
        }
        self.state.out.result({"summary": facts}, "\n".join(lines))
        return INTERRUPTED if interrupted else code_of_all(self.errors.values(), done=self.sent)

    def _write_report(self, lines: list[str], *, keep: bool) -> bool:
        """Write the report of failures, add what to say about it, and return whether this run's failures are in it.

        ``keep``: an earlier report may be the only record of packages that were not tried, or not sent yet.
        """
        path, manifest = self.failures.path, self.manifest.path
        again = f"to retry the failed packages, dispatch {manifest} again"
        if keep and path.exists():
            if self.enqueues:
                lines.append(f"{path} is kept until its packages are sent; dispatch it again with --wait.")
            if self.failed and path.resolve() != manifest.resolve():
                lines.append(f"The failed packages are not added to the earlier {path}; {again}.")
            return False
        try:
            reported = self.failures.write()
        except OSError as error:  # the journal has all results
            self.state.out.warn(f"--failures: {str(path)!r} cannot be written: {error.strerror}; {again}")
            return False
        if reported:
            lines.append(f"Failed packages and their errors are in {path}; dispatch it to retry them.")
        return reported
