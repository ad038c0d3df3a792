"""`inbox`: list, show, retry and purge the events that a receiver has stored."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigurationError, InboxError
from ..webhooks.event_store import EventFilter, EventStatus, StoredEvent, event_error
from .command_base import State, command, common_options, moment, refuse_password, shared_options
from .output import ago, count, iso, on_one_line

if TYPE_CHECKING:
    from ..webhooks import Inbox


@click.group(params=list(common_options()))
def inbox() -> None:
    """List, retry and purge the events that a receiver has stored.

    The inbox is a file, or a table in PostgreSQL. Name it with --inbox, the variable SIGNING_INBOX, or the setting
    inbox. To show encrypted payloads, set SIGNING_INBOX_KEY.

    \b
    Example:
      signing-async inbox list --status dead
    """


_place_options = shared_options(
    click.option("--inbox", "address", metavar="PATH|URL", help="The inbox: a file, or postgresql://..."),
    click.option("--table", default="signing_events", show_default=True, help="The table in PostgreSQL."),
)
_filter_options = shared_options(
    click.option("--type", metavar="TYPE", help="Only events of this type. A final * matches any ending: recipient.*"),
    click.option("--since", type=moment, help="Only events received since this time: 90min, 7d, 2031-03-31, ..."),
    click.option("--until", type=moment, help="Only events received before this time: 7d, 2031-03-31, ..."),
)


@contextlib.asynccontextmanager
async def _open_inbox(state: State, address: str | None, table: str) -> AsyncIterator[Inbox]:
    """Open the inbox; raise `ConfigurationError` if it does not exist."""
    refuse_password("--inbox", address, "put the URL into SIGNING_INBOX")
    chosen, key = address or state.settings.inbox, state.settings.inbox_key
    if chosen is None:
        raise click.UsageError("no inbox: use --inbox PATH, or set SIGNING_INBOX")
    if "://" in str(chosen):
        from ..postgres import PostgresInbox

        async with PostgresInbox(str(chosen), table=table, key=key) as shared:
            if not await shared.table_exists():
                raise ConfigurationError(f"{shared!r} has no table {table!r}: no receiver has used it yet")
            yield shared
        return
    from ..webhooks import Inbox

    if not Path(chosen).expanduser().exists():
        raise ConfigurationError(f"the inbox {str(chosen)!r} does not exist")
    async with Inbox(chosen, key=key) as opened:
        yield opened


def _facts(stored: StoredEvent) -> dict[str, Any]:
    names = ("id", "status", "type", "signing_id", "received_at", "attempts", "due_at", "settled_at", "error")
    return {name: getattr(stored, name) for name in names}


def _no_event(ids: list[str]) -> InboxError:
    return event_error(f"no such event: {', '.join(on_one_line(name) for name in ids)}")


@command("list")
@_place_options
@click.option("--status", type=click.Choice([status.value for status in EventStatus]), help="Only in this state.")
@_filter_options
@click.option("--limit", type=click.IntRange(1), help="Stop after this many.  [default: 50; with --all: no limit]")
@click.option("--all", "everything", is_flag=True, help="List everything.")
async def list_events(
    state: State,
    address: str | None,
    table: str,
    status: str | None,
    limit: int | None,
    everything: bool,
    **filters: Any,
) -> None:
    """List events in order of arrival.

    --json prints one object per line, without the body.

    \b
    Example:
      signing-async inbox list --status dead
      signing-async inbox list --type "recipient.*" --since 7d --all --json
    """
    limit = limit or (None if everything else 50)
    rows: list[tuple[object, ...]] = []
    shown, has_more = 0, False
    selection = EventFilter(status=EventStatus(status) if status else None, **filters)
    async with _open_inbox(state, address, table) as inbox:
        async for stored in inbox.store.select(selection):  # without the bodies, no key is needed
            if has_more := shown == limit:
                break
            shown += 1
            if state.json:
                state.out.result(_facts(stored))
            else:
                received = ago(stored.received_at) if state.out.is_terminal else iso(stored.received_at)
                row = (stored.id, stored.status.value, stored.type, stored.signing_id or "", received)
                rows.append((*row, stored.attempts, stored.error or ""))
    if rows:
        columns = ("ID", "STATE", "TYPE", "SIGNING", "RECEIVED", "ATTEMPTS", "ERROR")
        state.out.table(columns, rows, optional=("ATTEMPTS", "SIGNING", "RECEIVED", "ERROR"))
    if has_more:
        state.out.say(f"There are more than {limit}: use --all, or a filter such as --since.", more=True)
    elif not shown:
        state.out.say("No events.")


@command()
@_place_options
@click.argument("event")
async def show(state: State, address: str | None, table: str, event: str) -> None:
    """Show the event with the id EVENT and its payload.

    \b
    Example:
      signing-async inbox show $EVENT
    """
    async with _open_inbox(state, address, table) as inbox:
        found = [stored async for stored in inbox.store.select(EventFilter(ids=[event]))]
        if not found:
            raise _no_event([event])
        stored, payload, problem = found[0], None, None if found[0].body else "purged"
        try:
            payload = inbox.decrypt(stored).event.payload if stored.body else None
        except InboxError as error:  # without the key of an encrypted inbox, all but the payload is shown
            problem = f"{error}; set SIGNING_INBOX_KEY"
    if state.json:
        state.out.result({**_facts(stored), "payload": payload, "payload_problem": problem})
        return
    facts = [
        ("state", stored.status.value),
        ("type", stored.type),
        ("signing", stored.signing_id or "none"),
        ("received", iso(stored.received_at)),
        ("attempts", stored.attempts),
        ("next attempt", iso(stored.due_at)),
        ("settled", iso(stored.settled_at)),
        ("error", stored.error),
        ("payload", problem or json.dumps(payload, indent=2, ensure_ascii=False)),
    ]
    state.out.facts(stored.id, [(name, value) for name, value in facts if value not in (None, "")])


@command()
@_place_options
@click.argument("events", nargs=-1, metavar="[EVENT]...")
@click.option("--dead", is_flag=True, help="Only events whose handler failed too often.")
@_filter_options
async def retry(
    state: State, address: str | None, table: str, events: tuple[str, ...], dead: bool, **filters: Any
) -> int:
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
    selection = EventFilter(list(events) or None, status=EventStatus.DEAD if dead else None, **filters)
    async with _open_inbox(state, address, table) as inbox:
        known = {stored.id async for stored in inbox.store.select(selection)} if events else set()
        if missing := set(events) - known:
            raise _no_event(sorted(missing))
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


@command()
@_place_options
@click.option("--older-than", "age", type=_age, required=True, metavar="AGE", help="90d, 2w, 2031-03-31, ...")
async def purge(state: State, address: str | None, table: str, age: float) -> None:
    """Delete the bodies of events that were handled or dropped long ago.

    Their ids stay: a late duplicate is recognized. Pending and dead events are kept.

    \b
    Example:
      signing-async inbox purge --older-than 90d
    """
    async with _open_inbox(state, address, table) as inbox:
        purged = await inbox.purge(older_than=age)
    state.out.result({"purged": purged}, f"Purged {count(purged, 'event')}.")


@command()
@_place_options
async def stats(state: State, address: str | None, table: str) -> None:
    """Count events by state; show the age of the oldest pending event.

    \b
    Example:
      signing-async inbox stats
      signing-async inbox stats --json
    """
    async with _open_inbox(state, address, table) as inbox:
        found = await inbox.stats()
    counts = {status.value: found.counts.get(status, 0) for status in EventStatus}
    oldest = found.oldest_pending
    if state.json:
        waited = None if oldest is None else (datetime.now(UTC) - oldest).total_seconds()
        state.out.result({**counts, "oldest_pending": oldest, "oldest_pending_seconds": waited})
        return
    pending = [] if oldest is None else [("oldest pending", f"{iso(oldest)} ({ago(oldest)})")]
    state.out.facts("Events", [*counts.items(), *pending])


for _command in (list_events, show, retry, purge, stats):
    inbox.add_command(_command)
