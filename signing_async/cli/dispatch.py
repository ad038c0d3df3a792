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
from .running import NO_HANDLERS

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
    broker: str | None,
    seconds: float | None,
    **options: Any,
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
    if journal == "":
        # Perhaps an unset variable. With the default journal instead, packages might be sent twice.
        raise InvalidRequest("--journal: must not be empty")
    refuse_password("--journal", journal, "put the URL into SIGNING_JOURNAL")
    stem = manifest.stem
    while stem.endswith(".failures") and stem != ".failures":
        stem = stem.removesuffix(".failures")  # a report of failures shares the journal of its manifest
    run = Run(
        state,
        manifest,
        journal or str(state.settings.journal or manifest.parent / f"{stem}.journal"),
        failures or manifest.parent / f"{stem}.failures{manifest.suffix}",
        None if dry_run else _broker_url(broker),
        timeout=seconds,
        **options,
    )
    if failures is not None and failures.is_dir():
        raise InvalidRequest(f"--failures: {str(failures)!r} is a folder")
    if failures is not None and failures.resolve() == manifest.resolve():
        raise click.UsageError("--failures: must not be the manifest itself")
    if run.wait and broker is None:
        raise click.UsageError("--wait: needs --broker; without it the command itself sends the packages")
    if run.timeout is not None and broker is None:
        raise click.UsageError("--for: needs --broker")
    with Manifest(manifest) as opened:
        await run.check(opened) if dry_run else await run.dispatch(opened)


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


@attrs.define
class Run:
    """One run over a manifest's packages, and its results."""

    state: State
    path: Path
    journal: str
    failures: Path
    broker: str | None
    concurrency: int
    wait: bool
    timeout: float | None
    """Seconds to wait for the broker and the workers; None: without limit."""
    left: int = 0
    sent: int = 0
    earlier: int = 0
    failed: int = 0
    abandoned: int = 0
    interrupts: int = 0
    """How often Ctrl-C was pressed. The first finishes the packages under way, the second cancels them."""
    errors: dict[int, BaseException] = attrs.field(factory=dict)
    """One error for each exit code."""
    display: ProgressDisplay | None = None

    @property
    def aim(self) -> str:
        """What this command does with the packages."""
        return "sent" if self.broker is None or self.wait else "enqueued"

    async def check(self, manifest: Manifest) -> None:
        """Check the manifest and report its size."""
        checked = await self._check(manifest)
        packages = len(checked.lines)
        counts = f"{count(packages, 'package')} with {count(checked.documents, 'document')} ({checked.size} bytes)"
        facts = {"packages": packages, "documents": checked.documents, "bytes": checked.size, "sent": 0}
        self.state.out.result({"dry_run": facts}, f"{self.path}: {counts}: all valid. Nothing was sent.")

    async def _check(self, manifest: Manifest) -> CheckedManifest:
        with ProgressDisplay(self.state.out, "Checking", None) as display:
            return await check_manifest(manifest, self.state.settings.assumptions.max_pdf_bytes, display.advance)

    async def dispatch(self, manifest: Manifest) -> None:
        """Check the manifest, send all packages, and report the results. After Ctrl-C, begin no other package."""
        report = FailureReport(self.failures, manifest)
        report.check()
        self._check_journal(manifest)
        checked = await self._check(manifest)
        self.left = len(checked.lines)
        self.state.on_attempt = self._note_attempt
        async with open_journal(self.journal) as journal, self._sender() as client:
            shown = without_password(self.journal)
            self.state.out.say(f"Journal: {shown}", journal=shown)
            under_way: dict[str, Entry] = {}
            packages = self._packages(manifest, checked, under_way)
            with (
                self._count_interrupts(),
                without_log_of("package %s was not sent", "package %s: draft %s was abandoned"),
                ProgressDisplay(self.state.out, "Sending", self.left) as display,
            ):
                self.display = display
                try:
                    async with client.dispatch_many(packages, journal, self.concurrency) as results:
                        async for result in results:
                            self._report_package(under_way.pop(result.package.key), result, report)
                            display.advance(failed=result.error is not None)
                except asyncio.CancelledError:
                    if self.interrupts < 2:
                        raise
        self._report(report, len(checked.lines))

    def _check_journal(self, manifest: Manifest) -> None:
        """Raise `InvalidRequest` if a path cannot be that of a journal."""
        if "://" in self.journal:
            return
        path = resolve_path("--journal", self.journal)
        if path.is_dir():
            raise InvalidRequest(f"--journal: {self.journal!r} is a folder")
        if not path.parent.is_dir():
            raise InvalidRequest(f"--journal: the folder {str(path.parent)!r} does not exist")
        if path.exists() and manifest.is_at(path):
            raise InvalidRequest("--journal: must not be the manifest itself")
        if path == self.failures.resolve():
            # The report would replace the journal, and packages would be sent twice.
            raise InvalidRequest("--journal: must not be the report of failures")

    @contextlib.asynccontextmanager
    async def _sender(self) -> AsyncIterator[Any]:
        """Yield a client; with a broker, the workers instead."""
        if self.broker is not None:
            from .workers import workers

            max_bytes = self.state.settings.assumptions.max_pdf_bytes
            warn = self.state.out.warn
            async with workers(self.broker, self.journal, max_bytes, self.timeout, warn, wait=self.wait) as sender:
                yield sender
            return
        async with self.state.client() as client:
            # A rejected token would fail every package.
            await client.me()
            yield client

    def _note_attempt(self, attempt: Attempt) -> None:
        # A draft that was perhaps created is not looked for.
        if self.display is not None and attempt.ambiguous and attempt.operation != "signings.create":
            self.display.note("settling an unknown outcome")

    @contextlib.contextmanager
    def _count_interrupts(self) -> Iterator[None]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        cancel = task.cancel

        def interrupt() -> None:
            self.interrupts += 1
            if self.interrupts == 1:
                text = "Stopping: finishing the packages under way. Press Ctrl-C again to stop at once."
                self.state.out.say(text)
            else:
                cancel()

        with contextlib.suppress(*NO_HANDLERS):
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            with contextlib.suppress(*NO_HANDLERS):
                loop.remove_signal_handler(signal.SIGINT)

    def _packages(
        self, manifest: Manifest, checked: CheckedManifest, under_way: dict[str, Entry]
    ) -> Iterator[SigningPackage]:
        for entry, key in zip(manifest.entries(), checked.lines, strict=False):
            if self.interrupts:
                return
            # Only what was checked is sent.
            manifest.check_unchanged()
            assert entry.package is not None
            under_way[key] = entry
            yield attrs.evolve(entry.package, key=key)
        manifest.check_unchanged()

    def _report_package(self, entry: Entry, result: WorkerResult, report: FailureReport) -> None:
        out, where = self.state.out, f"{self.path}, line {entry.line}"
        key = str(result.package.key)
        facts: dict[str, Any] = {"line": entry.line, "key": key, "name": result.package.name}
        facts["signing"] = None if result.signing is None else result.signing.id
        facts["abandoned"] = result.abandoned
        self.left -= 1
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
        report.add(entry.row, key, str(result.error))
        if out.json or self.failed <= MAX_SHOWN:
            out.failed(where, result.error, facts)

    def _report(self, report: FailureReport, packages: int) -> None:
        """Report the results, and set the exit code."""
        out, by_workers = self.state.out, self.broker is not None
        interrupted = self.interrupts > 0 and self.left > 0
        enqueued = self.aim == "enqueued"
        # An earlier report may be the only record of packages that were not tried, or not sent yet.
        kept = (interrupted or enqueued) and self.failures.exists()
        again = f"to retry the failed packages, dispatch {self.path} again"
        reported = False
        if not kept:
            try:
                reported = report.write()
            except OSError as error:  # the journal has all results
                out.warn(f"--failures: {str(self.failures)!r} cannot be written: {error.strerror}; {again}")
        counts = f"{self.sent} {self.aim}"
        if not by_workers:  # workers do not report what was sent earlier
            counts += f": {self.earlier} earlier, {self.sent - self.earlier} now"
        lines = [f"{counts}, {self.failed} failed." if self.failed else f"{counts}."]
        if reported:
            lines.append(f"Failed packages and their errors are in {self.failures}; dispatch it to retry them.")
        if self.abandoned:
            lines.append(f"Abandoned drafts, left unsent at the service: {self.abandoned}.")
        if kept and enqueued:
            lines.append(f"{self.failures} is kept until its packages are sent; dispatch it again with --wait.")
        if kept and self.failed and self.failures.resolve() != self.path.resolve():
            lines.append(f"The failed packages are not added to the earlier {self.failures}; {again}.")
        if interrupted:
            command = shlex.join(["signing-async", *self.state.arguments])
            lines.append(f"Interrupted: {self.left} left. To resume, run the same command:\n  {command}")
        facts = {
            "packages": packages,
            self.aim: self.sent,
            "sent_earlier": None if by_workers else self.earlier,
            **{name: getattr(self, name) for name in ("failed", "left", "abandoned")},
            "journal": without_password(self.journal),
            "failures": str(self.failures) if reported else None,
            "interrupted": interrupted,
        }
        out.result({"summary": facts}, "\n".join(lines))
        self.state.end(INTERRUPTED if interrupted else code_of_all(self.errors.values(), done=self.sent))


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
