"""`watch`: follow a signing until it is completed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from ..errors import SigningCancelled, SigningError, WaitTimeout
from .command import Seconds, State, command
from .output import iso, on_one_line
from .records import document_facts, is_done, parts_of, recipient_facts, signing_facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..client import SigningClient
    from ..models import Recipient, Signing

Show = Callable[["Signing", Sequence["Recipient"]], None]


@command()
@click.argument("signing")
@click.option("--for", "seconds", type=Seconds(0, min_open=True), help="Give up after so long.")
@click.option("--poll", default=5.0, show_default=True, type=Seconds(0.05, 3600), help="Between two looks.")
def watch(state: State, signing: str, seconds: float | None, poll: float) -> None:
    """Follow a signing until everyone has signed. An outage on the way is waited out.

    On a terminal its documents and recipients are shown as they stand; anywhere else each change is a line, with
    --json an object.

    Exit code 0: it is completed. 5: the time is up. 6: it was cancelled.

    \b
    Example:
      signing-async watch $SIGNING --for 3600
    """
    state.run(_watch(state, signing, seconds, poll))


async def _watch(state: State, signing_id: str, seconds: float | None, poll: float) -> None:
    try:
        async with asyncio.timeout(seconds) as bound, state.client() as client:
            with _shown(state) as show:
                await _follow(state, client, signing_id, poll, show)
    except TimeoutError:
        if not bound.expired():
            raise
        raise WaitTimeout(f"{signing_id} was not completed within {seconds:g} s") from None


async def _follow(state: State, client: SigningClient, signing_id: str, poll: float, show: Show) -> None:
    seen = False
    while True:
        try:
            signing = await client.signings.get(signing_id)
            recipients = [recipient async for recipient in client.recipients.list(signing_id)]
        except SigningError as error:
            if not seen or not error.transient:
                raise
            state.out.warn(f"watching goes on: {error}")
        else:
            seen = True
            show(signing, recipients)
            if signing.state.value == "completed":
                return
            if signing.state.value == "cancelled":
                raise SigningCancelled(f"{signing_id} was cancelled", signing=signing)
        await asyncio.sleep(poll)


@contextlib.contextmanager
def _shown(state: State) -> Iterator[Show]:
    """Something that shows a signing as it stands now."""
    if state.out.live and state.out.is_terminal:
        with _live(state) as show:
            yield show
    else:
        yield _Changes(state)


@contextlib.contextmanager
def _live(state: State) -> Iterator[Show]:
    from rich.console import Group
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    done_fields = state.settings.assumptions.recipient_done_fields
    spinner = Spinner("dots", Text("watching; Ctrl-C stops that, and leaves the signing as it is", "dim"))
    with Live(spinner, console=state.out.console, refresh_per_second=8) as live:

        def show(signing: Signing, recipients: Sequence[Recipient]) -> None:
            over = signing.state.value in ("completed", "cancelled")
            head = state.out.table_of(("SIGNING", "STATE"), [(signing.name or signing.id, signing.state.value)])
            shown: list[RenderableType] = [head]
            for columns, rows, none in parts_of(signing, recipients, done_fields):
                shown += ["", state.out.table_of(columns, rows) if rows else none]
            live.update(Group(*shown, *(() if over else ("", spinner))), refresh=True)

        yield show


class _Changes:
    """Tells a line of each change."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._done_fields = state.settings.assumptions.recipient_done_fields
        self._told: dict[str, str] = {}

    def __call__(self, signing: Signing, recipients: Sequence[Recipient]) -> None:
        now = {
            **{f"document {one.id}": f"{one.name} is signed" for one in signing.documents if one.completed_at},
            **{f"recipient {one.id}": f"{one.email} has signed" for one in recipients if self._is_done(one)},
            "state": f"{signing.name or signing.id} is {signing.state.value}",
        }
        changes = [words for what, words in now.items() if self._told.get(what) != words]
        if changes and self._state.json:
            self._state.out.result(self._facts(signing, recipients))
        elif changes:
            moment = iso(datetime.now(UTC))
            self._state.out.result({}, "\n".join(f"{moment}  {on_one_line(words)}" for words in changes))
        self._told.update(now)

    def _is_done(self, recipient: Recipient) -> bool:
        return is_done(recipient, self._done_fields)

    def _facts(self, signing: Signing, recipients: Sequence[Recipient]) -> dict[str, object]:
        documents = [document_facts(one) for one in signing.documents]
        people = [recipient_facts(one, self._done_fields) for one in recipients]
        return {**signing_facts(signing), "documents": documents, "recipients": people}
