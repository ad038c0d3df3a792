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
from .command_base import Seconds, State, command, concurrency_option, journal_option, on_signal, refuse_password
from .exits import INTERRUPTED, code_of_all
from .manifest import CheckedManifest, Entry, FailureReport, Manifest, check_manifest
from .output import ItemProgress, count

if TYPE_CHECKING:
    from ..dispatch.journal import Journal
    from ..dispatch.package import SigningPackage
    from ..transport.operation import Attempt

MAX_SHOWN = 20
"""How many failures, and how many abandoned drafts, are printed without --json."""


@command(changing=True)
@click.argument("manifest", type=click.Path(path_type=Path))
@journal_option()
@click.option("--failures", type=click.Path(path_type=Path), help="The report of failed packages, itself a manifest.")
@click.option("--dry-run", is_flag=True, help="Check the manifest and every PDF; send nothing.")
@concurrency_option(default=8, help="Packages sent at once.")
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

    Exit code 0: all packages were sent. 1: some failed. 2: the manifest is invalid, nothing was sent. 3: the outcome of
    some is unknown. 5: --for expired before a worker reported on any package.

    \b
    Example:
      signing-async dispatch leases.csv --dry-run
      signing-async dispatch leases.csv
    """
    refuse_password("--journal", journal, "put the URL into SIGNING_JOURNAL")
    refuse_password("--broker", broker, "put the URL into SIGNING_BROKER, and use --broker env:SIGNING_BROKER")
    if broker is None and (wait or seconds is not None):
        raise click.UsageError("--wait and --for need --broker; without it the command itself sends the packages")
    if broker is not None and broker.startswith("env:"):
        variable = broker.removeprefix("env:")
        broker = os.environ.get(variable)
        if not broker:
            raise ConfigurationError(f"--broker: {variable or 'the variable'} is not set")
    stem = re.sub(r"(\.failures)+$", "", manifest.stem)  # a report of failures shares the journal of its manifest
    place = journal or str(state.settings.journal or manifest.parent / f"{stem}.journal")
    if broker is not None and "://" not in place:
        raise InvalidRequest("--broker: needs a journal that all workers can reach: --journal postgresql://...")
    opened = Manifest(manifest)
    report = FailureReport(failures or manifest.parent / f"{stem}.failures{manifest.suffix}", opened)
    if failures is not None and failures.resolve() == manifest.resolve():
        raise click.UsageError("--failures: must not be the manifest itself")
    # The report would replace the journal, and packages would be sent twice.
    if "://" not in place and resolve_path("--journal", place) in (manifest.resolve(), report.path.resolve()):
        raise InvalidRequest("--journal: must not be the manifest, nor the report of failures")
    if not dry_run:
        report.check()
    with state.out.item_progress("Checking") as advance:
        checked = await check_manifest(opened, state.settings.assumptions.max_pdf_bytes, advance)
    if dry_run:
        packages = len(checked.lines)
        counts = f"{count(packages, 'package')} with {count(checked.documents, 'document')} ({checked.size} bytes)"
        facts = {"packages": packages, "documents": checked.documents, "bytes": checked.size, "sent": 0}
        state.out.result({"dry_run": facts}, f"{manifest}: {counts}: all valid. Nothing was sent.")
        return 0
    shown = re.sub(r"(://[^:/@]*):.*@", r"\1@", place).partition("?")[0] if "://" in place else place
    work = _Run(state, opened, checked, report, shown, broker is not None, broker is not None and not wait)
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


@contextlib.asynccontextmanager
async def open_journal(place: str) -> AsyncIterator[Journal]:
    if "://" not in place:
        from ..storage.journal import SqliteJournal

        path = resolve_path("--journal", place)
        if path.is_dir():
            raise InvalidRequest(f"--journal: {place!r} is a folder")
        if not path.parent.is_dir():
            raise InvalidRequest(f"--journal: the folder of {place!r} does not exist")
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
    """The journal's place, without a password."""
    by_workers: bool
    enqueues: bool
    """Whether a package is done when workers will send it."""
    under_way: dict[str, Entry] = attrs.field(factory=dict)
    sent: int = 0
    earlier: int = 0
    abandoned: int = 0
    interrupts: int = 0
    """How often Ctrl-C was pressed. The first finishes the packages under way, the second cancels them."""
    errors: list[Exception] = attrs.field(factory=list)
    progress: ItemProgress | None = None

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

        out.say(f"Journal: {self.journal}", journal=self.journal)
        on_signal(signal.SIGINT, interrupt)
        try:
            with out.item_progress("Sending", len(self.checked.lines)) as progress:
                self.progress = progress
                async with results as stream:
                    async for result in stream:
                        self._add(result)
                        progress(result.error is not None)
        except asyncio.CancelledError:
            if self.interrupts < 2:
                raise

    def note_attempt(self, attempt: Attempt) -> None:
        """Say in the progress bar that an unknown outcome is settled. A spare draft has none."""
        if self.progress is not None and attempt.ambiguous and attempt.operation != "signings.create":
            self.progress.note("settling an unknown outcome")

    def _add(self, result: Any) -> None:
        key = str(result.package.key)
        entry = self.under_way.pop(key)
        out, where = self.state.out, f"{self.manifest.path}, line {entry.line}"
        signing = None if result.signing is None else result.signing.id
        facts: dict[str, Any] = {"line": entry.line, "key": key, "name": result.package.name, "signing": signing}
        facts["abandoned"] = result.abandoned
        for draft in result.abandoned:
            self.abandoned += 1
            # What an earlier run reported is only counted.
            if not out.json and not (result.error is None and result.sent_earlier) and self.abandoned <= MAX_SHOWN:
                out.say(f"{where}: draft {draft} was abandoned")
        if result.error is None:
            self.sent += 1
            self.earlier += result.sent_earlier
            # Workers do not report what was sent earlier.
            out.result(facts if self.by_workers else {**facts, "sent_earlier": result.sent_earlier})
            return
        self.errors.append(result.error)
        self.failures.add(entry.row, key, str(result.error))
        if out.json or len(self.errors) <= MAX_SHOWN:
            out.failed(where, result.error, facts)
            if signing is not None and not out.json:
                out.say(f"{where}: its signing at the service is {signing}")

    def summarize(self) -> int:
        """Write the report of failures, print the totals, and return the exit code."""
        failed, verb = len(self.errors), "enqueued" if self.enqueues else "sent"
        left = len(self.checked.lines) - self.sent - failed
        interrupted = self.interrupts > 0 and left > 0
        counts = f"{self.sent} {verb}"
        if not self.by_workers:
            counts += f": {self.earlier} earlier, {self.sent - self.earlier} now"
        lines = [f"{counts}, {failed} failed." if failed else f"{counts}."]
        reported = self._write_report(lines, is_partial=interrupted or self.enqueues)
        if self.abandoned:
            lines.append(f"Abandoned drafts, left unsent at the service: {self.abandoned}.")
        if interrupted:
            command = shlex.join(["signing-async", *self.state.arguments])
            lines.append(f"Interrupted: {left} left. To resume, run the same command:\n  {command}")
        facts = {
            "packages": len(self.checked.lines),
            verb: self.sent,
            "sent_earlier": None if self.by_workers else self.earlier,
            "failed": failed,
            "left": left,
            "abandoned": self.abandoned,
            "journal": self.journal,
            "failures": str(self.failures.path) if reported else None,
            "interrupted": interrupted,
        }
        self.state.out.result({"summary": facts}, "\n".join(lines))
        return INTERRUPTED if interrupted else code_of_all(self.errors, done=self.sent)

    def _write_report(self, lines: list[str], *, is_partial: bool) -> bool:
        """Write the report of failures, add what to say about it, and return whether this run's failures are in it."""
        path, manifest = self.failures.path, self.manifest.path
        try:
            had_report = path.exists()
            if is_partial and had_report:
                # The earlier report may be the only record of packages that were not tried, or not sent yet.
                lines.append(f"{path} is kept until a run has sent its packages.")
                return False
            reported = self.failures.write()
        except OSError as error:  # the journal has all results
            problem = f"--failures: {str(path)!r} cannot be written: {error.strerror}"
            self.state.out.warn(f"{problem}; to retry the failed packages, dispatch {manifest} again")
            return False
        if reported:
            lines.append(f"Failed packages and their errors are in {path}; dispatch it to retry them.")
        elif had_report:
            lines.append(f"{path} was removed: no package of this run failed.")
        return reported
