"""`watch`: follow a signing until it is completed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ..errors import SigningCancelled, SigningError, WaitTimeout
from .command_base import Seconds, State, command
from .output import console_of, iso, on_one_line, table_of
from .records import all_facts, is_done, parts_of

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..models import Recipient, Signing

Show = Callable[["Signing", Sequence["Recipient"]], None]


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
    try:
        async with asyncio.timeout(seconds) as deadline, state.client() as client:
            with display(state) as show:
                await _follow(state, client, signing, poll, show)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise WaitTimeout(f"{signing} was not completed within {seconds:g} s") from None


async def _follow(state: State, client: SigningClient, signing_id: str, poll: float, show: Show) -> None:
    was_read = False
    while True:
        try:
            signing = await client.signings.get(signing_id)
            recipients = [recipient async for recipient in client.recipients.list(signing_id)]
        except SigningError as error:
            if not was_read or not error.transient:
                raise
            state.out.warn(f"still watching: {error}")
        else:
            was_read = True
            show(signing, recipients)
            if signing.state.value == "completed":
                return
            if signing.state.value == "cancelled":
                raise SigningCancelled(f"{signing_id} was cancelled", signing=signing)
        await asyncio.sleep(poll)


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
        moment = iso(datetime.now(UTC))
        changes = [f"{moment}  {on_one_line(text)}" for key, text in current.items() if printed.get(key) != text]
        if changes:
            state.out.result(all_facts(state, signing, recipients), "\n".join(changes))
        printed.update(current)

    yield show
