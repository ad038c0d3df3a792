"""`list`, `show`, `create`, `send` and `watch`."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any

import click

from ..errors import InvalidRequest, SigningCancelled, SigningError
from .command_base import FILE, Seconds, State, command, limit_option, moment_option, name_option, read_text, time_limit
from .output import iso, on_one_line

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..models import Document, Recipient, Signing

Cursor = tuple[str | None, int]
"""The service's cursor of a page (None: the first page), and how many items of that page to skip."""

_STATES = ("draft", "sent", "completed", "cancelled")


def _cursor(text: str) -> Cursor:
    skip, _, page = text.partition(".")
    if not re.fullmatch("[0-9]{1,9}", skip):
        raise InvalidRequest(f"--cursor: must be a cursor that `list` printed, got {text!r}")
    return page or None, int(skip)


def _text(_: click.Context, __: click.Parameter, file: IO[bytes] | None) -> str | None:
    return None if file is None else read_text(file)


@command("list")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(_STATES), help="Only in this state. May be repeated."
)
@name_option("name")
@moment_option("--updated-since", "since", help="Only updated since this time.")
@moment_option("--updated-before", "before", help="Only updated before this time.")
@limit_option()
@click.option("--all", "everything", is_flag=True, help="List everything.")
@click.option("--cursor", metavar="TEXT", type=_cursor, help="Continue at the cursor that an earlier list printed.")
async def list_signings(
    state: State, limit: int | None, everything: bool, cursor: Cursor | None, **filters: Any
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
    stopped = ""
    async with state.client() as client, aclosing(_walk(client, cursor or (None, 0))) as walk:
        async for signing, position in walk:
            if len(rows) == limit:
                stopped = position
                break
            if _matches(signing, **filters):
                state.out.result(signing_facts(signing))
                rows.append((signing.id, signing.state.value, state.out.when(signing.updated_at), signing.name))
    if rows:
        state.out.table(("ID", "STATE", "UPDATED", "NAME"), rows, optional=("UPDATED", "STATE"))
    if stopped:
        state.out.say(f"There may be more. Continue with: --cursor {shlex.quote(stopped)}", next_cursor=stopped)
    elif not rows:
        state.out.say("No signings.")


def _matches(
    signing: Signing,
    states: Sequence[str],
    name: Callable[[Signing], bool] | None,
    since: datetime | None,
    before: datetime | None,
) -> bool:
    updated = signing.updated_at
    return (
        (not states or signing.state.value in states)
        and (name is None or name(signing))
        and (since is None or (updated is not None and updated >= since))
        and (before is None or (updated is not None and updated < before))
    )


async def _walk(client: SigningClient, start: Cursor) -> AsyncGenerator[tuple[Signing, str], None]:
    """Yield the signings from ``start``, each with the cursor that starts a list at that signing."""
    page_cursor, skipped = start
    async with aclosing(client.signings.list(cursor=page_cursor).pages()) as pages:
        async for page in pages:
            for number, signing in enumerate(page.items[skipped:], skipped):
                yield signing, f"{number}.{page_cursor}" if page_cursor else f"{number}"
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
        found, recipients = await _read(client, signing)
    if state.json:
        state.out.result(_all_facts(found, recipients))
        return
    names = ("id", "state", "language", "signing_order", "updated_at", "cancelled_at", "message")
    state.out.facts(found.name or "(unnamed)", {name: getattr(found, name) for name in names})
    documents = [
        (one.name, f"signed {state.out.when(one.completed_at)}" if one.completed_at else "pending", one.id)
        for one in found.documents
    ]
    people = []
    for one in sorted(recipients, key=lambda one: one.order or 0):
        progress = "signed" if one.completed_at else "pending"
        name = " ".join(filter(None, (one.first_name, one.last_name)))
        people.append((one.email, progress, name, one.order or "", one.signing_method or "", one.id))
    state.out.text("")
    state.out.table(("DOCUMENT", "STATE", "ID"), documents, "No documents yet.")
    state.out.text("")
    columns = ("RECIPIENT", "STATE", "NAME", "ORDER", "METHOD", "ID")
    state.out.table(columns, people, "No recipients yet.", optional=("METHOD", "ORDER", "NAME"))


async def _read(client: SigningClient, signing: str) -> tuple[Signing, list[Recipient]]:
    found = await client.signings.get(signing)
    return found, [recipient async for recipient in client.recipients.list(signing)]


@command(changing=True)
@click.argument("name")
@click.option("--language", default="EN", show_default=True, type=click.Choice(("EN", "SV"), case_sensitive=False))
@click.option("--signing-order", type=click.Choice(("sequential", "parallel")), help="One after the other, or at once.")
@click.option("--message", metavar="TEXT", help="A message to the recipients, at most 400 characters.")
@click.option("--message-file", "text", type=FILE, callback=_text, help="A file with the message; - is stdin.")
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

    Each change is a line, or an object with --json.

    Exit code 0: the signing is completed. 5: timed out. 6: the signing was cancelled.

    \b
    Example:
      signing-async watch $SIGNING --for 3600
    """
    printed: dict[str, str] = {}
    was_read = False
    async with time_limit(seconds, f"{signing} was not completed"), state.client() as client:
        while True:
            try:
                found, recipients = await _read(client, signing)
            except SigningError as error:
                if not was_read or not error.transient:
                    raise
                state.out.warn(f"still watching: {error}")
            else:
                was_read = True
                _print_changes(state, found, recipients, printed)
                if found.state.value == "completed":
                    return
                if found.state.value == "cancelled":
                    raise SigningCancelled(f"{signing} was cancelled", signing=found)
            await asyncio.sleep(poll)


def _print_changes(state: State, signing: Signing, recipients: Sequence[Recipient], printed: dict[str, str]) -> None:
    """Print a line, or a JSON object, for each change since what was printed; add what is printed now."""
    current = {f"document {one.id}": f"{one.name} is signed" for one in signing.documents if one.completed_at}
    current |= {f"recipient {one.id}": f"{one.email} has signed" for one in recipients if one.completed_at}
    current["state"] = f"{signing.name or signing.id} is {signing.state.value}"
    now = iso(datetime.now(UTC))
    changes = [f"{now}  {on_one_line(text)}" for key, text in current.items() if printed.get(key) != text]
    if changes:
        state.out.result(_all_facts(signing, recipients), "\n".join(changes))
    printed.update(current)


# Records as JSON facts


def _facts(record: Signing | Document | Recipient, *names: str) -> dict[str, Any]:
    return {**record.extra, **{name: getattr(record, name) for name in names}}


def signing_facts(signing: Signing) -> dict[str, Any]:
    names = ("language", "signing_order", "message", "is_draft", "is_completed", "cancelled_at", "updated_at")
    return {**_facts(signing, "id", "name", *names), "state": signing.state.value}


def document_facts(document: Document) -> dict[str, Any]:
    return _facts(document, "id", "name", "completed_at", "signed_file_path")


def recipient_facts(recipient: Recipient) -> dict[str, Any]:
    facts = _facts(recipient, "id", "email", "first_name", "last_name", "signing_method", "order")
    return {**facts, "finished": recipient.completed_at is not None}


def _all_facts(signing: Signing, recipients: Sequence[Recipient]) -> dict[str, Any]:
    documents = [document_facts(document) for document in signing.documents]
    people = [recipient_facts(recipient) for recipient in recipients]
    return {**signing_facts(signing), "documents": documents, "recipients": people}
