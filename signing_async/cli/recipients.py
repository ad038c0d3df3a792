"""`add-recipient` and `remind`: the recipients of a signing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ..errors import InvalidRequest
from .command_base import State, command, read_text
from .exits import code_of_all
from .output import on_one_line
from .records import recipient_facts

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..models import Recipient


@command("add-recipient", changing=True)
@click.argument("signing")
@click.argument("email")
@click.option("--first-name", metavar="TEXT")
@click.option("--last-name", metavar="TEXT")
@click.option("--method", "signing_method", default="email", show_default=True, help="email, bankid, approval, ...")
@click.option("--order", type=int, help="Position in a sequential signing, from 1.")
@click.option(
    "--field", "fields", multiple=True, metavar="NAME=VALUE", help="Another field, such as phone. May be repeated."
)
@click.option(
    "--fields",
    "fields_file",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Other fields as a JSON object in a file (- for standard input), hidden from other users of the machine.",
)
def add_recipient(
    state: State, signing: str, email: str, fields: tuple[str, ...], fields_file: str | None, **named: Any
) -> None:
    """Add a recipient to a draft. Only the recipient's id goes to standard output.

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
    state.out.say(f"Added {fields['email']}.")
    state.out.result(recipient_facts(recipient, ()), on_one_line(recipient.id))


def _from_options(fields: tuple[str, ...]) -> dict[str, str]:
    pairs = [field.partition("=") for field in fields]
    for field, (name, equals, _) in zip(fields, pairs, strict=True):
        if not equals or not name:
            raise click.BadParameter(f"must have the form NAME=VALUE, got {field!r}", param_hint="--field")
    return {name: value for name, _, value in pairs}


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        fields = json.loads(read_text(path, "--fields"))
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise click.BadParameter(f"{path} does not contain a JSON object", param_hint="--fields")
    return fields


@command(changing=True)
@click.argument("signing")
@click.argument("recipient", required=False)
@click.option("--all-pending", is_flag=True, help="All recipients who have not finished.")
def remind(state: State, signing: str, recipient: str | None, all_pending: bool) -> None:
    """Remind RECIPIENT (an id or an e-mail address), or all who have not finished.

    A reminder that fails does not stop the others. A reminder whose response was lost is not repeated: exit code 3.

    \b
    Example:
      signing-async remind $SIGNING anna@example.com
      signing-async remind $SIGNING --all-pending
    """
    if (recipient is None) is not all_pending:
        raise click.UsageError("use either RECIPIENT or --all-pending")
    state.run(_remind(state, signing, recipient))


async def _remind(state: State, signing_id: str, wanted: str | None) -> None:
    async with state.client() as client:
        if wanted is None:
            results = await client.recipients.remind_pending(signing_id)
        else:
            recipient = await _find(client, signing_id, wanted)
            await client.recipients.remind(signing_id, recipient)
            facts = {"id": recipient.id, "email": recipient.email, "reminded": True}
            state.out.result(facts, on_one_line(f"Reminded {recipient.email}."))
            return
    errors = []
    for result in results:
        facts = {"id": result.recipient.id, "email": result.recipient.email, "reminded": result.error is None}
        if result.error is None:
            state.out.result(facts, on_one_line(f"Reminded {result.recipient.email}."))
        else:
            errors.append(result.error)
            state.out.failed(result.recipient.email, result.error, facts)
    if not results:
        state.out.say("No recipient is pending.")
    state.end(code_of_all(errors, done=len(results) - len(errors)))


async def _find(client: SigningClient, signing_id: str, wanted: str) -> Recipient:
    everyone = [recipient async for recipient in client.recipients.list(signing_id)]
    found = [one for one in everyone if one.id == wanted or one.email.casefold() == wanted.casefold()]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequest(f"{len(found)} recipients of the signing have the address {wanted!r}: use an id")
    raise InvalidRequest(f"no recipient of the signing has the id or address {wanted!r}")
