"""`add-recipient` and `remind`: the people of a signing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ..errors import InvalidRequest
from .command import State, command, read_text
from .exits import code_of_all
from .output import on_one_line
from .records import recipient_facts

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..models import Recipient


@command("add-recipient")
@click.argument("signing")
@click.argument("email")
@click.option("--first-name", metavar="TEXT")
@click.option("--last-name", metavar="TEXT")
@click.option("--method", "signing_method", default="email", show_default=True, help="email, bankid, approval, ...")
@click.option("--order", type=int, help="Position in a sequential signing, from 1.")
@click.option("--field", "fields", multiple=True, metavar="NAME=VALUE", help="Another field, say phone; repeatable.")
@click.option(
    "--fields",
    "fields_file",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Other fields as a JSON object in a file (- for standard input), out of sight of other users.",
)
def add_recipient(
    state: State, signing: str, email: str, fields: tuple[str, ...], fields_file: str | None, **named: Any
) -> None:
    """Add somebody who has to sign to a draft. The recipient's id alone goes to standard output.

    \b
    Example:
      signing-async add-recipient $SIGNING anna@example.com --first-name Anna --last-name Berg --order 1
      signing-async add-recipient $SIGNING bo@example.com --method bankid --field personal_number=198001011234
    """
    extra = {**_from_file(fields_file), **_from_options(fields)}
    state.run(_add(state, signing, {"email": email, **named, "extra": extra}))


async def _add(state: State, signing_id: str, fields: dict[str, Any]) -> None:
    async with state.client() as client:
        recipient = await client.recipients.add(signing_id, **fields)
    state.out.say(f"{fields['email']} was added")
    state.out.result(recipient_facts(recipient, ()), on_one_line(recipient.id))


def _from_options(fields: tuple[str, ...]) -> dict[str, str]:
    pairs = [field.partition("=") for field in fields]
    for field, (name, equals, _) in zip(fields, pairs, strict=True):
        if not equals or not name:
            raise click.BadParameter(f"{field!r} is not of the form NAME=VALUE", param_hint="--field")
    return {name: value for name, _, value in pairs}


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        fields = json.loads(read_text(path, "--fields"))
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise click.BadParameter(f"{path} holds no JSON object", param_hint="--fields")
    return fields


@command()
@click.argument("signing")
@click.argument("recipient", required=False)
@click.option("--all-pending", is_flag=True, help="Everyone who has not finished.")
def remind(state: State, signing: str, recipient: str | None, all_pending: bool) -> None:
    """Remind RECIPIENT (an id or an e-mail address) of a signing, or everyone who has not finished.

    One that fails does not stop the others. After a lost answer a reminder is not repeated: exit code 3.

    \b
    Example:
      signing-async remind $SIGNING anna@example.com
      signing-async remind $SIGNING --all-pending
    """
    if (recipient is None) is not all_pending:
        raise click.UsageError("say whom to remind: a recipient, or --all-pending")
    state.run(_remind(state, signing, recipient))


async def _remind(state: State, signing_id: str, whom: str | None) -> None:
    async with state.client() as client:
        if whom is None:
            results = await client.recipients.remind_pending(signing_id)
        else:
            found = await _find(client, signing_id, whom)
            await client.recipients.remind(signing_id, found)
            state.out.result(
                {"id": found.id, "email": found.email, "reminded": True}, on_one_line(f"{found.email} was reminded")
            )
            return
    errors = []
    for result in results:
        facts = {"id": result.recipient.id, "email": result.recipient.email, "reminded": result.error is None}
        if result.error is None:
            state.out.result(facts, on_one_line(f"{result.recipient.email} was reminded"))
        else:
            errors.append(result.error)
            state.out.failed(result.recipient.email, result.error, facts)
    if not results:
        state.out.say("Nobody is pending.")
    state.end(code_of_all(errors, done=len(results) - len(errors)))


async def _find(client: SigningClient, signing_id: str, whom: str) -> Recipient:
    everyone = [recipient async for recipient in client.recipients.list(signing_id)]
    found = [one for one in everyone if one.id == whom or one.email.casefold() == whom.casefold()]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequest(f"{whom!r} is {len(found)} recipients of this signing: name one by its id")
    raise InvalidRequest(f"no recipient of this signing has the id or the address {whom!r}")
