"""`list`, `show`, `create` and `send`."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from ..errors import InvalidRequest
from .command_base import FILE, State, command, text_file
from .output import ago, iso, on_one_line
from .records import all_facts, show_signing, signing_facts

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..models import Signing

_SPAN = re.compile(r"(\d{1,6})(min|h|d|w)")
_UNITS = {"min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def duration(text: str) -> timedelta:
    """Parse a duration."""
    span = _SPAN.fullmatch(text)
    if span is None:
        raise click.BadParameter(f"must be a duration such as 90min, 12h, 7d or 2w, got {text!r}")
    return timedelta(**{_UNITS[span[2]]: int(span[1])})


def duration_or_moment(text: str) -> timedelta | datetime:
    """Parse a duration, which stays a `timedelta`, or a date or a time."""
    return duration(text) if _SPAN.fullmatch(text) else moment(text)


def moment(text: str) -> datetime:
    """Parse a date, a time, or a duration before now."""
    try:
        if _SPAN.fullmatch(text):
            return datetime.now(UTC) - duration(text)
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"must be a duration such as 90min, 12h, 7d or 2w, or a date such as 2031-03-31, got {text!r}"
        ) from None


NAME_HELP = "Only signings whose name matches, ignoring case: 'Lease *', '*2031*', ..."


def name_pattern(text: str) -> Callable[[Signing], bool]:
    """Return a function that tells whether a signing's name matches the pattern, ignoring case."""
    found = re.compile(fnmatch.translate(text), re.IGNORECASE)
    return lambda signing: found.match(signing.name) is not None


Cursor = tuple[str | None, int]
"""The service's cursor of a page (None: the first page), and how many items of that page to skip."""


def _cursor(text: str) -> Cursor:
    skip, _, page = text.partition(".")
    if not re.fullmatch("[0-9]{1,9}", skip):
        raise InvalidRequest(f"--cursor: must be a cursor that `list` printed, got {text!r}")
    return page or None, int(skip)


@command("list")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(("draft", "sent", "completed", "cancelled")),
    help="Only signings in this state. May be repeated.",
)
@click.option("--name", metavar="PATTERN", type=name_pattern, help=NAME_HELP)
@click.option(
    "--updated-since", "since", type=moment, help="Only signings updated since this time: 7d, 12h, 2031-03-31, ..."
)
@click.option("--updated-before", "before", type=moment, help="Only signings updated before this time.")
@click.option(
    "--limit", type=click.IntRange(1), help="Stop after this many signings.  [default: 50; with --all: no limit]"
)
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
    shown, stopped = 0, ""
    async with state.client() as client, aclosing(_walk(client, cursor or (None, 0))) as walk:
        async for signing, (page, skip) in walk:
            if shown == limit:
                stopped = f"{skip}.{page}" if page else f"{skip}"
                break
            if not _is_selected(signing, **filters):
                continue
            shown += 1
            if state.json:
                state.out.result(signing_facts(signing))
            else:
                updated = ago(signing.updated_at) if state.out.is_terminal else iso(signing.updated_at)
                rows.append((signing.id, signing.state.value, updated, signing.name))
    if rows:
        state.out.table(("ID", "STATE", "UPDATED", "NAME"), rows, optional=("UPDATED", "STATE"))
    if stopped:
        state.out.say(f"There may be more. Continue with: --cursor {shlex.quote(stopped)}", next_cursor=stopped)
    elif not shown:
        state.out.say("No signings.")


def _is_selected(
    signing: Signing,
    states: tuple[str, ...],
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
    else:
        show_signing(state, found, recipients)


@command(changing=True)
@click.argument("name")
@click.option(
    "--language",
    default="EN",
    show_default=True,
    type=click.Choice(("EN", "SV"), case_sensitive=False),
    metavar="[EN|SV]",
    help="The language in which recipients are addressed.",
)
@click.option(
    "--signing-order",
    type=click.Choice(("sequential", "parallel")),
    help="Whether recipients sign one after the other or at once.",
)
@click.option("--message", metavar="TEXT", help="A message to the recipients, at most 400 characters.")
@click.option("--message-file", type=FILE, metavar="FILE", help="Read the message from a file (- for standard input).")
async def create(state: State, message_file: str | None, **fields: Any) -> None:
    """Create a draft called NAME. Only the draft's id goes to standard output, for use in scripts.

    \b
    Example:
      signing-async create "Lease 2031" --signing-order parallel --message "Please sign by Friday."
    """
    if message_file is not None:
        if fields["message"] is not None:
            raise click.UsageError("use either --message or --message-file, not both")
        fields["message"] = text_file(message_file, "'--message-file'").replace("\r\n", "\n").strip()
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
