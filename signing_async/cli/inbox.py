"""`inbox`: list, show, retry and purge the events that a receiver has stored."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigurationError, InboxError
from ..webhooks.event_store import EventFilter, EventStatus, StoredEvent, event_error
from .command_base import MOMENT, State, command, common_options, limit_option, moment, refuse_password, state_option
from .output import count, on_one_line

if TYPE_CHECKING:
    from ..webhooks import Inbox

_PLACE: list[click.Parameter] = [
    state_option("--inbox", metavar="PATH|URL", help="The inbox: a file, or postgresql://..."),
    state_option("--table", metavar="NAME", help="The table in PostgreSQL.  [default: signing_events]"),
]
_FILTERS: list[click.Parameter] = [
    click.Option(
        ["--type"], metavar="TYPE", help="Only events of this type. A final * matches any ending: recipient.*"
    ),
    click.Option(["--since"], metavar=MOMENT, type=moment, help="Only events received since this time."),
    click.Option(["--until"], metavar=MOMENT, type=moment, help="Only events received before this time."),
]


@click.group(params=list(common_options()))
def inbox() -> None:
    """List, retry and purge the events that a receiver has stored.

    The inbox is a file, or a table in PostgreSQL. Name it with --inbox after the subcommand, the variable
    SIGNING_INBOX, or the setting inbox. To show encrypted payloads, set SIGNING_INBOX_KEY.

    \b
    Example:
      signing-async inbox list --status dead
    """


@contextlib.asynccontextmanager
async def _open_inbox(state: State) -> AsyncIterator[Inbox]:
    """Open the inbox; raise `ConfigurationError` if it does not exist."""
    refuse_password("--inbox", state.inbox, "put the URL into SIGNING_INBOX")
    place, key = state.inbox or state.settings.inbox, state.settings.inbox_key
    if place is None:
        raise click.UsageError("no inbox: use --inbox PATH, or set SIGNING_INBOX")
    if "://" in str(place):
        from ..postgres import PostgresInbox

        async with PostgresInbox(str(place), table=state.table, key=key) as shared:
            if not await shared.table_exists():
                raise ConfigurationError(f"{shared!r} has no table {state.table!r}: no receiver has used it yet")
            yield shared
        return
    from ..webhooks import Inbox

    if not Path(place).expanduser().exists():
        raise ConfigurationError(f"the inbox {str(place)!r} does not exist")
    async with Inbox(place, key=key) as opened:
        yield opened


def _facts(stored: StoredEvent) -> dict[str, Any]:
    names = ("id", "status", "type", "signing_id", "received_at", "attempts", "due_at", "settled_at", "error")
    return {name: getattr(stored, name) for name in names}


async def _find(inbox: Inbox, ids: tuple[str, ...]) -> list[StoredEvent]:
    found = [stored async for stored in inbox.store.select(EventFilter(ids=ids))]
    if missing := set(ids) - {stored.id for stored in found}:
        raise event_error(f"no such event: {', '.join(map(on_one_line, sorted(missing)))}")
    return found


@command("list", inbox, params=[*_FILTERS, *_PLACE])
@click.option("--status", type=click.Choice([status.value for status in EventStatus]), help="Only with this status.")
@limit_option()
@click.option("--all", "everything", is_flag=True, help="List everything.")
async def list_events(state: State, status: str | None, limit: int | None, everything: bool, **filters: Any) -> None:
    """List events in order of arrival. --json prints one object per line, without the body.

    \b
    Example:
      signing-async inbox list --status dead
      signing-async inbox list --type "recipient.*" --since 7d --all --json
    """
    limit = limit or (None if everything else 50)
    rows: list[tuple[object, ...]] = []
    has_more = False
    selection = EventFilter(status=EventStatus(status) if status else None, **filters)
    async with _open_inbox(state) as inbox:
        async for stored in inbox.store.select(selection):  # without the bodies, no key is needed
            if has_more := len(rows) == limit:
                break
            state.out.result(_facts(stored))
            row = (stored.id, stored.status.value, stored.type, stored.signing_id or "")
            rows.append((*row, state.out.when(stored.received_at), stored.attempts, stored.error or ""))
    if rows:
        state.out.table(
            ("ID", "STATUS", "TYPE", "SIGNING", "RECEIVED", "ATTEMPTS", "REMARK"),
            rows,
            optional=("ATTEMPTS", "SIGNING", "RECEIVED", "REMARK"),
        )
    if has_more:
        state.out.say(f"There are more than {limit}: use --all, or a filter such as --since.", more=True)
    elif not rows:
        state.out.say("No events.")


@command(group=inbox, params=_PLACE)
@click.argument("event")
async def show(state: State, event: str) -> None:
    """Show the event with the id EVENT and its payload.

    \b
    Example:
      signing-async inbox show $EVENT
    """
    async with _open_inbox(state) as inbox:
        (stored,) = await _find(inbox, (event,))
        payload, problem = None, None if stored.body else "purged"
        try:
            payload = inbox.decrypt(stored).event.payload if stored.body else None
        except InboxError as error:  # without the key of an encrypted inbox, all but the payload is shown
            problem = f"{error}; set SIGNING_INBOX_KEY"
    state.out.facts(stored.id, {**_facts(stored), "payload": payload, "payload_problem": problem})


@command(group=inbox, params=[*_FILTERS, *_PLACE])
@click.argument("events", nargs=-1, metavar="[EVENT]...")
@click.option("--dead", is_flag=True, help="Only events whose handler failed too often.")
async def retry(state: State, events: tuple[str, ...], dead: bool, **filters: Any) -> int:
    """Make events due at once, as if they had just arrived.

    Give either the ids of the events, or options that select them. Without --dead, events that were handled before are
    handled again too. Events that are being handled now, and events whose body was purged, are left as they are.

    \b
    Example:
      signing-async inbox retry $EVENT
      signing-async inbox retry --dead
      signing-async inbox retry --since 2031-03-30 --until 2031-03-31 --type "signing.*"
    """
    if bool(events) == (dead or any(value is not None for value in filters.values())):
        raise click.UsageError("give either ids of events or at least one of --dead, --type, --since and --until")
    selection = EventFilter(events or None, status=EventStatus.DEAD if dead else None, **filters)
    async with _open_inbox(state) as inbox:
        known = await _find(inbox, events)
        retried = await inbox.retry(selection)
    left = len(known) - retried if events else 0
    text = f"{count(retried, 'event')} will be handled again."
    text += f" Left as they are, because they are being handled now or were purged: {left}." if left else ""
    state.out.result({"retried": retried, "left": left}, text)
    return 1 if left else 0


def _age(text: str) -> float:
    before = moment(text)
    age = (datetime.now(UTC) - before).total_seconds()
    if age < 0:
        raise click.BadParameter(f"{text} is in the future")
    return age


@command(group=inbox, params=_PLACE)
@click.option("--older-than", "age", metavar=MOMENT, type=_age, required=True)
async def purge(state: State, age: float) -> None:
    """Delete the bodies of events that were handled or dropped long ago.

    Their ids stay: a late duplicate is recognized. Pending and dead events are kept.

    \b
    Example:
      signing-async inbox purge --older-than 90d
    """
    async with _open_inbox(state) as inbox:
        purged = await inbox.purge(older_than=age)
    state.out.result({"purged": purged}, f"Purged {count(purged, 'event')}.")


@command(group=inbox, params=_PLACE)
async def stats(state: State) -> None:
    """Count events by status; show the age of the oldest pending event.

    \b
    Example:
      signing-async inbox stats
      signing-async inbox stats --json
    """
    async with _open_inbox(state) as inbox:
        found = await inbox.stats()
    counts = {status.value: found.counts.get(status, 0) for status in EventStatus}
    oldest = found.oldest_pending
    waited = None if oldest is None else round((datetime.now(UTC) - oldest).total_seconds(), 1)
    state.out.facts("Events", {**counts, "oldest_pending": oldest, "oldest_pending_seconds": waited})
