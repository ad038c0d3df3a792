"""`list`, `show`, `create` and `send`."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from ..errors import InvalidRequest
from .command_base import State, command, read_text
from .output import on_one_line
from .records import document_facts, recipient_facts, show_signing, signing_facts

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..models import Signing

_STATES = ("draft", "sent", "completed", "cancelled")
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
NamePattern = Callable[["Signing"], bool]


def name_pattern(text: str) -> NamePattern:
    """Return a function that tells whether a signing's name matches the pattern, ignoring case."""
    found = re.compile(fnmatch.translate(text), re.IGNORECASE)
    return lambda signing: found.match(signing.name) is not None


@command("list")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(_STATES), help="Only signings in this state. May be repeated."
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
@click.option("--cursor", help="Continue at the cursor that an earlier list printed.")
def list_signings(state: State, limit: int | None, everything: bool, cursor: str | None, **filters: Any) -> None:
    """List signings, in the service's own order.

    The service documents no filters, so this command filters on this machine. If the list stops at its limit, standard
    error says how to continue. --json prints one object per line.

    \b
    Example:
      signing-async list --state sent --updated-since 7d
      signing-async list --all --json
    """
    limit = limit or (None if everything else 50)
    state.run(_list(state, _Filter(**filters), limit, _Cursor.parse(cursor)))


class _Filter:
    """The filters of `list`; ``signing in filter`` tells whether a signing passes them."""

    def __init__(
        self, states: tuple[str, ...], name: NamePattern | None, since: datetime | None, before: datetime | None
    ) -> None:
        self._states = states
        self._name = name
        self._since = since
        self._before = before

    def __contains__(self, signing: Signing) -> bool:
        if self._states and signing.state.value not in self._states:
            return False
        if self._name is not None and not self._name(signing):
            return False
        return self._is_updated_in_time(signing.updated_at)

    def _is_updated_in_time(self, updated: datetime | None) -> bool:
        if self._since is None and self._before is None:
            return True
        if updated is None:
            return False
        return (self._since is None or updated >= self._since) and (self._before is None or updated < self._before)


class _Cursor:
    """A position in the list: the service's cursor of a page, and how many items of that page to skip."""

    def __init__(self, page: str | None = None, skip: int = 0) -> None:
        self.page = page
        self.skip = skip

    @classmethod
    def parse(cls, text: str | None) -> _Cursor:
        if text is None:
            return cls()
        skip, _, page = text.partition(".")
        if not (skip.isascii() and skip.isdigit()) or len(skip) > 9:
            raise InvalidRequest(f"--cursor: must be a cursor that `list` printed, got {text!r}")
        return cls(page or None, int(skip))

    def __str__(self) -> str:
        return f"{self.skip}.{self.page}" if self.page else f"{self.skip}"


async def _list(state: State, selected: _Filter, limit: int | None, start: _Cursor) -> None:
    rows: list[tuple[object, ...]] = []
    shown, stopped = 0, None
    async with state.client() as client, aclosing(_walk(client, start)) as walk:
        async for signing, cursor in walk:
            if shown == limit:
                stopped = cursor
                break
            if signing not in selected:
                continue
            shown += 1
            if state.json:
                state.out.result(signing_facts(signing))
            else:
                rows.append((signing.id, signing.state.value, state.out.time(signing.updated_at), signing.name))
    if not state.json and rows:
        state.out.table(("ID", "STATE", "UPDATED", "NAME"), rows, optional=("UPDATED", "STATE"))
    if stopped is not None:
        state.out.say(
            f"There may be more. Continue with: --cursor {shlex.quote(str(stopped))}", next_cursor=str(stopped)
        )
    elif not shown:
        state.out.say("No signings.")


async def _walk(client: SigningClient, start: _Cursor) -> AsyncGenerator[tuple[Signing, _Cursor], None]:
    """Yield the signings from ``start``, each with the cursor that starts a list at that signing."""
    position = _Cursor(start.page)
    async with aclosing(client.signings.list(cursor=start.page).pages()) as pages:
        async for page in pages:
            for signing in page.items:
                if position.page != start.page or position.skip >= start.skip:
                    yield signing, _Cursor(position.page, position.skip)
                position.skip += 1
            position = _Cursor(page.next_cursor)


@command()
@click.argument("signing")
def show(state: State, signing: str) -> None:
    """Show a signing with its documents and recipients.

    \b
    Example:
      signing-async show $SIGNING
    """
    state.run(_show(state, signing))


async def _show(state: State, signing_id: str) -> None:
    async with state.client() as client:
        signing = await client.signings.get(signing_id)
        recipients = [recipient async for recipient in client.recipients.list(signing_id)]
    done_fields = state.settings.assumptions.recipient_done_fields
    if state.json:
        people = [recipient_facts(recipient, done_fields) for recipient in recipients]
        documents = [document_facts(document) for document in signing.documents]
        state.out.result({**signing_facts(signing), "documents": documents, "recipients": people})
    else:
        show_signing(state.out, signing, recipients, done_fields)


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
    "order",
    type=click.Choice(("sequential", "parallel")),
    help="Whether recipients sign one after the other or at once.",
)
@click.option("--message", metavar="TEXT", help="A message to the recipients, at most 400 characters.")
@click.option(
    "--message-file",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Read the message from a file (- for standard input).",
)
def create(
    state: State, name: str, language: str, order: str | None, message: str | None, message_file: str | None
) -> None:
    """Create a draft called NAME. Only the draft's id goes to standard output, for use in scripts.

    \b
    Example:
      signing-async create "Lease 2031" --signing-order parallel --message "Please sign by Friday."
    """
    if message is not None and message_file is not None:
        raise click.UsageError("use either --message or --message-file, not both")
    if message_file is not None:
        message = read_text(message_file, "--message-file").replace("\r\n", "\n").strip()
    state.run(_create(state, {"name": name, "language": language, "signing_order": order, "message": message}))


async def _create(state: State, fields: Mapping[str, Any]) -> None:
    async with state.client() as client:
        signing = await client.signings.create(**fields)
    state.out.say(on_one_line(f"Created the draft {signing.name or fields['name']}."))
    state.out.result(signing_facts(signing), on_one_line(signing.id))


@command(changing=True)
@click.argument("signing")
def send(state: State, signing: str) -> None:
    """Send a draft: its recipients are notified, and it can no longer be edited.

    A draft is never sent twice: after a 5xx or a lost response, the command reads the signing before it retries. Exit
    code 3: it is unknown whether the draft was sent.

    \b
    Example:
      signing-async send $SIGNING
    """
    state.run(_send(state, signing))


async def _send(state: State, signing_id: str) -> None:
    async with state.client() as client:
        await client.signings.send(signing_id)
    state.out.result({"id": signing_id, "sent": True}, f"Sent {signing_id}.")
