"""`add-recipient` and `remind`: the recipients of a signing."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any

import click

from ..errors import InvalidRequest
from .command_base import FILE, State, command, read_text
from .exits import code_of_all
from .output import Output, on_one_line
from .signings import recipient_facts

if TYPE_CHECKING:
    from ..recipients import RemindResult


def _name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"must have the form NAME=VALUE, got {text!r}")
    return name, value


def _json_object(_: click.Context, __: click.Parameter, file: IO[bytes] | None) -> dict[str, Any]:
    try:
        fields = json.loads("{}" if file is None else read_text(file))
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise click.BadParameter("the file does not contain a JSON object")
    return fields


@command("add-recipient", changing=True)
@click.argument("signing")
@click.argument("email")
@click.option("--first-name", metavar="TEXT")
@click.option("--last-name", metavar="TEXT")
@click.option("--method", "signing_method", default="email", show_default=True, help="email, bankid, approval, ...")
@click.option("--order", type=int, help="Position in a sequential signing, from 1.")
@click.option("--field", "fields", multiple=True, type=_name_and_value, metavar="NAME=VALUE", help="May be repeated.")
@click.option("--fields", "from_file", type=FILE, callback=_json_object, help="Other fields as JSON; - is stdin.")
async def add_recipient(
    state: State, signing: str, fields: tuple[tuple[str, str], ...], from_file: dict[str, Any], **named: Any
) -> None:
    """Add a recipient to a draft. Only the recipient's id goes to standard output.

    \b
    Example:
      signing-async add-recipient $SIGNING anna@example.com --first-name Anna --last-name Berg --order 1
      signing-async add-recipient $SIGNING bo@example.com --method bankid --field personal_number=198001011234
    """
    async with state.client() as client:
        recipient = await client.recipients.add(signing, **named, extra={**from_file, **dict(fields)})
    state.out.say(f"Added {named['email']}.")
    state.out.result(recipient_facts(recipient), on_one_line(recipient.id))


@command(changing=True)
@click.argument("signing")
@click.argument("recipient", required=False)
@click.option("--all-pending", is_flag=True, help="All recipients who have not finished.")
async def remind(state: State, signing: str, recipient: str | None, all_pending: bool) -> int:
    """Remind RECIPIENT (an id or an e-mail address), or all who have not finished.

    A reminder that fails does not stop the others. A reminder whose response was lost is not repeated: exit code 3.

    \b
    Example:
      signing-async remind $SIGNING anna@example.com
      signing-async remind $SIGNING --all-pending
    """
    if (recipient is None) is not all_pending:
        raise click.UsageError("use either RECIPIENT or --all-pending")
    async with state.client() as client:
        if recipient is not None:
            everyone = [one async for one in client.recipients.list(signing)]
            found = [one for one in everyone if one.id == recipient or one.email.casefold() == recipient.casefold()]
            if len(found) != 1:
                how_many = f"{len(found)} recipients" if found else "no recipient"
                raise InvalidRequest(f"{how_many} of the signing with the id or address {recipient!r}: use an id")
            await client.recipients.remind(signing, found[0])
            facts = {"id": found[0].id, "email": found[0].email, "reminded": True}
            state.out.result(facts, on_one_line(f"Reminded {found[0].email}."))
            return 0
        results = await client.recipients.remind_pending(signing)
    for result in results:
        show_reminder(state.out, result, {"id": result.recipient.id})
    if not results:
        state.out.say("No recipient is pending.")
    errors = [result.error for result in results if result.error is not None]
    return code_of_all(errors, done=len(results) - len(errors))


def show_reminder(out: Output, result: RemindResult, facts: dict[str, Any], of: str = "") -> None:
    email = result.recipient.email
    facts = {**facts, "email": email, "reminded": result.error is None}
    if result.error is None:
        out.result(facts, on_one_line(f"Reminded {email}{of}."))
    else:
        out.failed(email, result.error, facts)
