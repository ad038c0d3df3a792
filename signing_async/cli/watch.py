"""`watch`: follow a signing until it is completed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from ..errors import SigningCancelled, SigningError, WaitTimeout
from .command_base import Seconds, State, command
from .output import iso, on_one_line
from .records import document_facts, is_done, parts_of, recipient_facts, signing_facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..client import SigningClient
    from ..models import Recipient, Signing

Show = Callable[["Signing", Sequence["Recipient"]], None]


@command()
@click.argument("signing")
@click.option("--for", "seconds", type=Seconds(0, min_open=True), help="Give up after this time.")
@click.option("--poll", default=5.0, show_default=True, type=Seconds(0.05, 3600), help="Polling interval.")
def watch(state: State, signing: str, seconds: float | None, poll: float) -> None:
    """Follow a signing until everyone has signed. Once the signing has been read, outages are waited out.

    A terminal shows the current state of documents and recipients. Elsewhere each change is a line, or an object with
    --json.

    Exit code 0: the signing is completed. 5: timed out. 6: the signing was cancelled.

    \b
    Example:
      signing-async watch $SIGNING --for 3600
    """
    state.run(_watch(state, signing, seconds, poll))


async def _watch(state: State, signing_id: str, seconds: float | None, poll: float) -> None:
    try:
        async with asyncio.timeout(seconds) as deadline, state.client() as client:
            with _display(state) as show:
                await _follow(state, client, signing_id, poll, show)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise WaitTimeout(f"{signing_id} was not completed within {seconds:g} s") from None


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
def _display(state: State) -> Iterator[Show]:
    """Yield a function that shows the current state of a signing."""
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
    spinner = Spinner("dots", Text("watching; Ctrl-C stops watching and does not change the signing", "dim"))
    with Live(spinner, console=state.out.console, refresh_per_second=8) as live:

        def show(signing: Signing, recipients: Sequence[Recipient]) -> None:
            ended = signing.state.value in ("completed", "cancelled")
            head = state.out.table_of(("SIGNING", "STATE"), [(signing.name or signing.id, signing.state.value)])
            shown: list[RenderableType] = [head]
            for columns, rows, placeholder in parts_of(signing, recipients, done_fields):
                shown += ["", state.out.table_of(columns, rows) if rows else placeholder]
            live.update(Group(*shown, *(() if ended else ("", spinner))), refresh=True)

        yield show


class _Changes:
    """Prints a line, or a JSON object, for each change."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._done_fields = state.settings.assumptions.recipient_done_fields
        self._printed: dict[str, str] = {}

    def __call__(self, signing: Signing, recipients: Sequence[Recipient]) -> None:
        current = {
            **{f"document {one.id}": f"{one.name} is signed" for one in signing.documents if one.completed_at},
            **{f"recipient {one.id}": f"{one.email} has signed" for one in recipients if self._is_done(one)},
            "state": f"{signing.name or signing.id} is {signing.state.value}",
        }
        changes = [text for key, text in current.items() if self._printed.get(key) != text]
        if changes and self._state.json:
            self._state.out.result(self._facts(signing, recipients))
        elif changes:
            moment = iso(datetime.now(UTC))
            self._state.out.result({}, "\n".join(f"{moment}  {on_one_line(text)}" for text in changes))
        self._printed.update(current)

    def _is_done(self, recipient: Recipient) -> bool:
        return is_done(recipient, self._done_fields)

    def _facts(self, signing: Signing, recipients: Sequence[Recipient]) -> dict[str, object]:
        documents = [document_facts(one) for one in signing.documents]
        people = [recipient_facts(one, self._done_fields) for one in recipients]
        return {**signing_facts(signing), "documents": documents, "recipients": people}
