"""`list`, `show`, `create`, `send` and `watch`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ..errors import InvalidRequest, SigningCancelled, SigningError, WaitTimeout
from .command_base import FILE, NAME_HELP, Seconds, State, command, moment, name_pattern, read_text
from .output import ago, console_of, iso, on_one_line, table_of

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..models import Document, Recipient, Signing

Cursor = tuple[str | None, int]
"""The service's cursor of a page (None: the first page), and how many items of that page to skip."""

_STATES = ("draft", "sent", "completed", "cancelled")

Show = Callable[["Signing", Sequence["Recipient"]], None]


def _cursor(text: str) -> Cursor:
    skip, _, page = text.partition(".")
    if not re.fullmatch("[0-9]{1,9}", skip):
        raise InvalidRequest(f"--cursor: must be a cursor that `list` printed, got {text!r}")
    return page or None, int(skip)


@command("list")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(_STATES), help="Only in this state. May be repeated."
)
@click.option("--name", metavar="PATTERN", type=name_pattern, help=NAME_HELP)
@click.option("--updated-since", "since", type=moment, help="Only updated since this time: 7d, 12h, 2031-03-31, ...")
@click.option("--updated-before", "before", type=moment, help="Only updated before this time.")
@click.option("--limit", type=click.IntRange(1), help="Stop after this many.  [default: 50; with --all: no limit]")
@click.option("--all", "everything", is_flag=True, help="List everything.")
@click.option("--cursor", metavar="TEXT", type=_cursor, help="Continue at the cursor that an earlier list printed.")
async def list_signings(
    state: State,
    states: tuple[str, ...],
    name: Callable[[Signing], bool] | None,
    since: datetime | None,
    before: datetime | None,
    limit: int | None,
    everything: bool,
    cursor: Cursor | None,
) -> None:
    """List signings, in the service's own order.

    The service documents no filters, so this command filters on this machine. If the list stops at its limit, standard
    error says how to continue. --json prints one object per line.

    \b
    Example:
      signing-async list --state sent --updated-since 7d
      signing-async list --all --json
    """
    limit = limit or (None if everything else 50)
    rows: list[tuple[object, ...]] = []
    shown, stopped = 0, ""
    async with state.client() as client, aclosing(_walk(client, cursor or (None, 0))) as walk:
        async for signing, (page, skip) in walk:
            if shown == limit:
                stopped = f"{skip}.{page}" if page else f"{skip}"
                break
            updated = signing.updated_at
            if (
                (states and signing.state.value not in states)
                or (name is not None and not name(signing))
                or (since is not None and (updated is None or updated < since))
                or (before is not None and (updated is None or updated >= before))
            ):
                continue
            shown += 1
            if state.json:
                state.out.result(signing_facts(signing))
            else:
                when = ago(updated) if state.out.is_terminal else iso(updated)
                rows.append((signing.id, signing.state.value, when, signing.name))
    if rows:
        state.out.table(("ID", "STATE", "UPDATED", "NAME"), rows, optional=("UPDATED", "STATE"))
    if stopped:
        state.out.say(f"There may be more. Continue with: --cursor {shlex.quote(stopped)}", next_cursor=stopped)
    elif not shown:
        state.out.say("No signings.")


async def _walk(client: SigningClient, start: Cursor) -> AsyncGenerator[tuple[Signing, Cursor], None]:
    """Yield the signings from ``start``, each with the cursor that starts a list at that signing."""
    page_cursor, skipped = start
    async with aclosing(client.signings.list(cursor=page_cursor).pages()) as pages:
        async for page in pages:
            for number, signing in enumerate(page.items[skipped:], skipped):
                yield signing, (page_cursor, number)
            page_cursor, skipped = page.next_cursor, 0


@command()
@click.argument("signing")
async def show(state: State, signing: str) -> None:
    """Show a signing with its documents and recipients.

    \b
    Example:
      signing-async show $SIGNING
    """
    async with state.client() as client:
        found = await client.signings.get(signing)
        recipients = [recipient async for recipient in client.recipients.list(signing)]
    if state.json:
        state.out.result(all_facts(state, found, recipients))
        return
    facts = [
        ("id", found.id),
        ("state", found.state.value),
        ("language", found.language),
        ("order", found.signing_order),
        ("updated", f"{iso(found.updated_at)} ({ago(found.updated_at)})" if found.updated_at else ""),
        ("cancelled", iso(found.cancelled_at)),
        ("message", found.message),
    ]
    state.out.facts(found.name or "(unnamed)", [(name, value) for name, value in facts if value])
    for columns, rows, placeholder in parts_of(state, found, recipients):
        state.out.text("")
        if rows:
            state.out.table(columns, rows, optional=("METHOD", "ORDER", "NAME"))
        else:
            state.out.text(placeholder)


@command(changing=True)
@click.argument("name")
@click.option("--language", default="EN", show_default=True, type=click.Choice(("EN", "SV"), case_sensitive=False))
@click.option("--signing-order", type=click.Choice(("sequential", "parallel")), help="One after the other, or at once.")
@click.option("--message", metavar="TEXT", help="A message to the recipients, at most 400 characters.")
@click.option("--message-file", "text", type=FILE, callback=read_text, help="A file with the message; - is stdin.")
async def create(state: State, text: str | None, **fields: Any) -> None:
    """Create a draft called NAME. Only the draft's id goes to standard output, for use in scripts.

    \b
    Example:
      signing-async create "Lease 2031" --signing-order parallel --message "Please sign by Friday."
    """
    if text is not None:
        if fields["message"] is not None:
            raise click.UsageError("use either --message or --message-file, not both")
        fields["message"] = text.replace("\r\n", "\n").strip()
    async with state.client() as client:
        signing = await client.signings.create(**fields)
    state.out.say(on_one_line(f"Created the draft {signing.name or fields['name']}."))
    state.out.result(signing_facts(signing), on_one_line(signing.id))


@command(changing=True)
@click.argument("signing")
async def send(state: State, signing: str) -> None:
    """Send a draft: its recipients are notified, and it can no longer be edited.

    A draft is never sent twice: after a 5xx or a lost response, the command reads the signing before it retries. Exit
    code 3: it is unknown whether the draft was sent.

    \b
    Example:
      signing-async send $SIGNING
    """
    async with state.client() as client:
        await client.signings.send(signing)
    state.out.result({"id": signing, "sent": True}, f"Sent {signing}.")


@command()
@click.argument("signing")
@click.option("--for", "seconds", type=Seconds(0, min_open=True), help="Give up after this time.")
@click.option("--poll", default=5.0, show_default=True, type=Seconds(0.05, 3600), help="Polling interval.")
async def watch(state: State, signing: str, seconds: float | None, poll: float) -> None:
    """Follow a signing until everyone has signed. Once the signing has been read, outages are waited out.

    A terminal shows the current state of documents and recipients. Elsewhere each change is a line, or an object with
    --json.

    Exit code 0: the signing is completed. 5: timed out. 6: the signing was cancelled.

    \b
    Example:
      signing-async watch $SIGNING --for 3600
    """
    display = _update_in_place if state.out.live and state.out.is_terminal else _print_changes
    was_read = False
    try:
        async with asyncio.timeout(seconds) as deadline, state.client() as client:
            with display(state) as show_state:
                while True:
                    try:
                        found = await client.signings.get(signing)
                        recipients = [recipient async for recipient in client.recipients.list(signing)]
                    except SigningError as error:
                        if not was_read or not error.transient:
                            raise
                        state.out.warn(f"still watching: {error}")
                    else:
                        was_read = True
                        show_state(found, recipients)
                        if found.state.value == "completed":
                            return
                        if found.state.value == "cancelled":
                            raise SigningCancelled(f"{signing} was cancelled", signing=found)
                    await asyncio.sleep(poll)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise WaitTimeout(f"{signing} was not completed within {seconds:g} s") from None


@contextlib.contextmanager
def _update_in_place(state: State) -> Iterator[Show]:
    """Yield a function that shows the current state of a signing on a terminal."""
    from rich.console import Group
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("dots", Text("watching; Ctrl-C stops watching and does not change the signing", "dim"))
    with Live(spinner, console=console_of(sys.stdout), refresh_per_second=8) as live:

        def show(signing: Signing, recipients: Sequence[Recipient]) -> None:
            shown: list[Any] = [table_of(("SIGNING", "STATE"), [(signing.name or signing.id, signing.state.value)])]
            for columns, rows, placeholder in parts_of(state, signing, recipients):
                shown += ["", table_of(columns, rows) if rows else placeholder]
            if signing.state.value not in ("completed", "cancelled"):
                shown += ["", spinner]
            live.update(Group(*shown), refresh=True)

        yield show


@contextlib.contextmanager
def _print_changes(state: State) -> Iterator[Show]:
    """Yield a function that prints a line, or a JSON object, for each change."""
    printed: dict[str, str] = {}

    def show(signing: Signing, recipients: Sequence[Recipient]) -> None:
        done = [one for one in recipients if is_done(state, one)]
        current = {
            **{f"document {one.id}": f"{one.name} is signed" for one in signing.documents if one.completed_at},
            **{f"recipient {one.id}": f"{one.email} has signed" for one in done},
            "state": f"{signing.name or signing.id} is {signing.state.value}",
        }
        now = iso(datetime.now(UTC))
        changes = [f"{now}  {on_one_line(text)}" for key, text in current.items() if printed.get(key) != text]
        if changes:
            state.out.result(all_facts(state, signing, recipients), "\n".join(changes))
        printed.update(current)

    yield show


# Records as JSON facts, and as tables


def _facts(record: Signing | Document | Recipient, *names: str) -> dict[str, Any]:
    return {**record.extra, **{name: getattr(record, name) for name in names}}


def signing_facts(signing: Signing) -> dict[str, Any]:
    names = ("language", "signing_order", "message", "is_draft", "is_completed", "cancelled_at", "updated_at")
    return {**_facts(signing, "id", "name", *names), "state": signing.state.value}


def document_facts(document: Document) -> dict[str, Any]:
    return _facts(document, "id", "name", "completed_at", "signed_file_path")


def recipient_facts(state: State, recipient: Recipient) -> dict[str, Any]:
    facts = _facts(recipient, "id", "email", "first_name", "last_name", "signing_method", "order")
    return {**facts, "finished": is_done(state, recipient)}


def all_facts(state: State, signing: Signing, recipients: Sequence[Recipient]) -> dict[str, Any]:
    documents = [document_facts(document) for document in signing.documents]
    people = [recipient_facts(state, recipient) for recipient in recipients]
    return {**signing_facts(signing), "documents": documents, "recipients": people}


def is_done(state: State, recipient: Recipient) -> bool:
    return any(recipient.extra.get(field) for field in state.settings.assumptions.recipient_done_fields)


def parts_of(
    state: State, signing: Signing, recipients: Sequence[Recipient]
) -> list[tuple[Sequence[str], list[tuple[object, ...]], str]]:
    """Return the tables of documents and recipients: columns, rows, and the text for an empty table."""
    documents: list[tuple[object, ...]] = [
        (document.name, f"signed {iso(document.completed_at)}" if document.completed_at else "pending", document.id)
        for document in signing.documents
    ]
    people: list[tuple[object, ...]] = [
        (
            recipient.email,
            "signed" if is_done(state, recipient) else "pending",
            " ".join(part for part in (recipient.first_name, recipient.last_name) if part),
            "" if recipient.order is None else recipient.order,
            recipient.signing_method or "",
            recipient.id,
        )
        for recipient in sorted(recipients, key=lambda one: one.order or 0)
    ]
    return [
        (("DOCUMENT", "STATE", "ID"), documents, "No documents yet."),
        (("RECIPIENT", "STATE", "NAME", "ORDER", "METHOD", "ID"), people, "No recipients yet."),
    ]
