"""`archive`: archive the sealed PDFs of all signings, verify an archive, list what is stuck."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._toml import did_you_mean
from ..errors import InvalidRequest, NotYetSigned, SigningError
from .command_base import (
    Seconds,
    State,
    command,
    common_options,
    concurrency_option,
    journal_option,
    make_folder,
    moment_option,
    name_option,
    refuse_password,
    since_option,
    span_option,
)
from .dispatch import open_journal
from .exits import FAILED, NOT_SOUND, STUCK, code_of, code_of_all, facts_of
from .output import count, on_one_line
from .recipients import show_reminder
from .signings import recipient_facts, signing_facts

if TYPE_CHECKING:
    from ..archive import ArchiveResult, ArchiveStore
    from ..client import SigningClient
    from ..dispatch.journal import Journal

_SECONDS_BETWEEN_REMINDERS = 3600.0  # with --follow; each run lists all signings
_LOCK = (click.Choice(["COMPLIANCE", "GOVERNANCE"]), click.IntRange(1))
_KINDS = {
    "no_progress": "not signed",
    "not_sealed": "not sealed",
    "not_sent": "not sent",
    "not_examined": "could not be examined",
}
# Words that are more likely a mistyped command than a new folder.
_VERBS = ("check", "fetch", "get", "help", "list", "ls", "pull", "run", "start", "stats", "sync", "update")


class _Group(click.Group):
    """A group whose first argument may be an archive instead of a command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word in self.commands:
            return super().resolve_command(ctx, args)
        hint = did_you_mean(word, self.commands) if word.isidentifier() else ""
        if (hint or word in _VERBS) and not Path(word).exists():
            problem = f"No such command {word!r}{hint or '; the commands are status and verify.'}"
            raise click.UsageError(f"{problem} To archive into a new folder of that name, use {word}/", ctx)
        return "", run, args

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        run.format_usage(ctx, formatter)
        run.format_help_text(ctx, formatter)
        run.format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


# An option that is not a common one belongs to `run`.
@click.group(cls=_Group, params=list(common_options()), context_settings={"ignore_unknown_options": True})
def archive() -> None:
    """Archive the sealed PDFs of all signings."""


@command()
@click.argument("to", metavar="FOLDER|s3://BUCKET/PREFIX")
@journal_option()
@click.option("--follow", is_flag=True, help="Keep archiving until Ctrl-C or SIGTERM.")
@click.option("--every", default=300.0, show_default=True, type=Seconds(1), help="With --follow: the interval.")
@since_option("--since", help="Only signings updated since.")
@name_option("where")
@click.option("--template", metavar="TEXT", help="Template for the names of the files.")
@click.option("--object-lock", type=_LOCK, metavar="MODE DAYS", help="S3 only: COMPLIANCE or GOVERNANCE, and the time.")
@click.option("--verify", is_flag=True, help="Archive only PDFs whose signatures are sound.")
@click.option("--trust", multiple=True, metavar="ROOTS", help='As in verify-sealed: a file, a folder or "system".')
@span_option("--remind-after", help="Remind recipients who have not signed for this long.")
@concurrency_option(default=8, help="Signings at once.")
async def run(
    state: State,
    to: str,
    journal: str | None,
    follow: bool,
    every: float,
    remind_after: timedelta | None,
    template: str | None,
    object_lock: tuple[str, int] | None,
    trust: tuple[str, ...],
    **options: Any,
) -> int:
    """Archive the sealed PDFs of all signings: each document of a completed signing once, in a folder or in S3.

    Whatever ends the command, run it again: nothing is fetched twice, and no partial file is left. The files are listed
    in manifest.jsonl; "archive verify" checks them. Several processes may share an archive and its journal, by default
    the file .journal in the folder; an archive in S3 needs --journal or SIGNING_JOURNAL. With --remind-after 7d,
    recipients are reminded when a signing has had no signature for 7 days, at most every 7 days.

    Exit codes: 0: done; documents that are not yet sealed are fetched by a later run. 1: some documents failed.

    \b
    Example:
      signing-async archive contracts/ --since 30d
      signing-async archive contracts/
    """
    from ..archive import Archive

    if to in archive.commands:  # options came first, or the group would have found the command
        raise click.UsageError(f'put options after "{to}"; for a folder of that name use ./{to}')
    if template is not None:
        options["template"] = template
    if object_lock is not None and "://" not in to:
        raise InvalidRequest(f"--object-lock: only S3 retains objects, and {to!r} is a folder")
    journal = _journal_of(state, journal)
    if journal is None:
        if "://" in to:
            raise InvalidRequest("--journal: an archive in S3 needs one: a path, or postgresql://... for many machines")
        make_folder(Path(to), "FOLDER")
        journal = str(Path(to, ".journal"))  # names that begin with a dot are not part of the archive
    async with contextlib.AsyncExitStack() as exits:
        store = await exits.enter_async_context(_store(to, object_lock))
        opened = await exits.enter_async_context(open_journal(journal))
        client = await exits.enter_async_context(state.client())
        await client.me()  # a rejected token would fail every document
        archived = await exits.enter_async_context(
            Archive(client, store, journal=opened, trust=trust or None, **options)
        )
        work = _Run(state, follow, present=len([entry async for entry in archived.entries()]))
        exits.callback(work.summarize)
        work.advance = exits.enter_context(state.out.item_progress("Archiving"))
        try:
            async with asyncio.TaskGroup() as group:
                if remind_after is not None:
                    group.create_task(work.remind(client, opened, remind_after))
                if follow:
                    await archived.follow(every=every, on_result=work.report)
                async with archived.sweep() as results:
                    async for result in results:
                        work.report(result)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return code_of_all(work.errors.values(), done=work.archived)


class _Run:
    """One run of `archive`, and its results."""

    def __init__(self, state: State, follow: bool, present: int) -> None:
        self._out, self._follow, self._present = state.out, follow, present
        self.archived = self._size = self._reminded = 0
        self.advance: Callable[[bool], object] = bool
        self._open: dict[tuple[str, str | None], Exception] = {}
        """The last errors, by the ids of signing and document: with --follow, each sweep tries again."""
        self.errors: dict[int, Exception] = {}
        """One error for each exit code."""

    def _fail(self, error: Exception) -> None:
        self.errors.setdefault(code_of(error), error)

    def report(self, result: ArchiveResult) -> None:
        signing, document = result.signing, None if result.document is None else result.document.id
        facts: dict[str, Any] = {"signing": signing.id, "name": signing.name, "document": document}
        earlier = self._open.get((signing.id, document))
        for key in ((signing.id, None), (signing.id, document)):
            self._open.pop(key, None)
        if result.error is None:
            self.archived, self._size = self.archived + 1, self._size + result.entry.size
            self._out.result({**facts, **result.entry.as_dict(), "signing": signing.id})
        else:
            self._open[signing.id, document] = result.error
            if isinstance(earlier, NotYetSigned | None) and not isinstance(result.error, NotYetSigned):
                self._fail(result.error)
                self._out.failed(signing.name or signing.id, result.error, facts)
        self.advance(result.error is not None)

    async def remind(self, client: SigningClient, journal: Journal, after: timedelta) -> None:
        """Remind the recipients of signings without progress; with --follow, again and again."""
        from ..archive import archive_status

        while True:
            try:
                found = await archive_status(client, journal, after=after, remind_every=after, kinds=["no_progress"])
            except SigningError as error:
                if not (self._follow and error.transient):
                    raise
                self._out.warn(f"reminders are retried later: {error}")
            else:
                for stuck in found.signings:
                    name, facts = stuck.signing.name or stuck.signing.id, {"signing": stuck.signing.id}
                    if stuck.error is not None:
                        self._out.failed(name, stuck.error, {**facts, "reminded": False})
                    for reminder in stuck.reminders:
                        show_reminder(self._out, reminder, facts, f" of {name}")
                    errors = [stuck.error, *(reminder.error for reminder in stuck.reminders)]
                    for each in filter(None, errors):
                        self._fail(each)
                    self._reminded += errors[1:].count(None)
            if not self._follow:
                return
            await asyncio.sleep(_SECONDS_BETWEEN_REMINDERS)

    def summarize(self) -> None:
        unsealed = sum(isinstance(error, NotYetSigned) for error in self._open.values())
        failed = len(self._open) - unsealed
        facts = {"archived": self.archived, "bytes": self._size, "failed": failed}
        facts |= {"already_there": self._present, "not_yet_sealed": unsealed, "reminded": self._reminded}
        text = f"{count(self.archived, 'document')} archived ({self._size} bytes), {failed} failed."
        text += f" Already there: {self._present}." if self._present else ""
        text += f" Not yet sealed: {unsealed}; a later run fetches them." if unsealed else ""
        self._out.result({"summary": facts}, text)


@command(group=archive)
@click.argument("to", metavar="FOLDER|s3://BUCKET/PREFIX")
async def verify(state: State, to: str) -> int:
    """Verify an archive against its manifest: no file or line is missing, changed or added. The service is not used.

    Exit codes: 0: the archive matches its manifest. 7: it does not. 2: there is no archive.

    \b
    Example:
      signing-async archive verify contracts/
    """
    from ..archive import verify_archive

    async with _store(to) as store:
        with state.out.byte_progress("Verifying") as on_progress:
            found = await verify_archive(store, on_progress)
    if not found.lines and not found.findings:
        raise InvalidRequest(f"{to} is not an archive: it has no manifest.jsonl")
    for finding in found.findings:
        facts = {"finding": finding.kind, "path": finding.path, "line": finding.line, "text": finding.text}
        state.out.result(facts, on_one_line(f"{finding.kind.replace('_', ' ')}: {finding.text}"), "red")
    summary = {"ok": found.ok, "documents": found.documents, "bytes": found.size, "head": found.head}
    verdict = "the archive matches its manifest" if found.ok else count(len(found.findings), "finding")
    text = f"{count(found.documents, 'document')} ({found.size} bytes): {verdict}. Head: {found.head}"
    state.out.result({"summary": {**summary, "lines": found.lines, "findings": len(found.findings)}}, text)
    return 0 if found.ok else NOT_SOUND


@command(group=archive)
@journal_option()
@span_option("--after", default="7d", show_default=True, help="What was not updated for this time.")
@moment_option("--since", help="Only signings and dispatches updated since.")
async def status(state: State, journal: str | None, after: timedelta, since: datetime | None) -> int:
    """List what is stuck.

    Unsent drafts that have documents, sent signings without progress (with the recipients who have not signed),
    completed signings whose documents are not sealed, and dispatches in the journal without an outcome for an hour.

    Exit codes: 0: nothing is stuck. 9: something is. 1: a signing could not be examined, and nothing else is stuck.

    \b
    Example:
      signing-async archive status --after 7d
    """
    from ..archive import archive_status

    journal = _journal_of(state, journal)
    if journal is None:
        state.out.say("dispatches: not checked (no --journal)", dispatches="not checked")
    elif "://" not in journal and not Path(journal).expanduser().exists():
        raise InvalidRequest(f"--journal: the file {journal!r} does not exist")
    async with contextlib.AsyncExitStack() as exits:
        client = await exits.enter_async_context(state.client())
        opened = None if journal is None else await exits.enter_async_context(open_journal(journal))
        found = await archive_status(client, opened, after=after, since=since)
    rows: list[tuple[object, ...]] = []
    for stuck in found.signings:
        signing, error = stuck.signing, stuck.error
        facts: dict[str, Any] = {"stuck": stuck.kind, "signing": signing_facts(signing)}
        facts["pending"] = [recipient_facts(recipient) for recipient in stuck.pending]
        facts["documents"] = [{"id": document.id, "name": document.name} for document in stuck.documents]
        names = [one.email for one in stuck.pending] or [one.name or one.id for one in stuck.documents]
        if error is not None:
            facts["error"], names = facts_of(error), [str(error)]
        state.out.result(facts)
        when = state.out.when(signing.updated_at)
        rows.append((signing.id, signing.name, _KINDS[stuck.kind], when, ", ".join(names)))
    known = {stuck.signing.id: stuck.signing.name for stuck in found.signings}
    for dispatch in found.dispatches:
        state.out.result({"stuck": "dispatch", "dispatch": dispatch})
        name = dispatch.key
        if re.fullmatch("[0-9a-f]{64}", name):  # a hash, which says nothing
            name = known.get(dispatch.signing or "") or f"{name[:12]}…"
        problem = "perhaps sent" if dispatch.may_be_sent else "not dispatched"
        rows.append((dispatch.signing or "", name, problem, state.out.when(dispatch.updated_at), dispatch.error or ""))
    if found.ok:
        state.out.say("Nothing is stuck.")
        return 0
    state.out.table(("ID", "NAME", "PROBLEM", "SINCE", "DETAILS"), rows, optional=("SINCE",))
    return STUCK if found.dispatches or any(stuck.error is None for stuck in found.signings) else FAILED


def _journal_of(state: State, given: str | None) -> str | None:
    refuse_password("--journal", given, "put the URL into SIGNING_JOURNAL")
    return given or (None if state.settings.journal is None else str(state.settings.journal))


@contextlib.asynccontextmanager
async def _store(to: str, object_lock: tuple[str, int] | None = None) -> AsyncIterator[ArchiveStore]:
    if "://" in to:
        from ..archive import S3Store

        async with S3Store(to, object_lock=object_lock) as store:
            yield store
    else:
        from ..archive import FolderStore

        yield FolderStore(to)
