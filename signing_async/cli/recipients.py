"""`add-recipient` and `remind`: the recipients of a signing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ..errors import InvalidRequest
from .command_base import FILE, State, command, text_file
from .exits import code_of_all
from .output import Output, on_one_line
from .records import recipient_facts

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..models import Recipient
    from ..recipients import RemindResult


def _name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"must have the form NAME=VALUE, got {text!r}")
    return name, value


def _json_object(path: str) -> dict[str, Any]:
    try:
        fields = json.loads(text_file(path, "'--fields'"))
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise click.BadParameter(f"{path} does not contain a JSON object", param_hint="'--fields'")
    return fields


@command("add-recipient", changing=True)
@click.argument("signing")
@click.argument("email")
@click.option("--first-name", metavar="TEXT")
@click.option("--last-name", metavar="TEXT")
@click.option("--method", "signing_method", default="email", show_default=True, help="email, bankid, approval, ...")
@click.option("--order", type=int, help="Position in a sequential signing, from 1.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    type=_name_and_value,
    metavar="NAME=VALUE",
    help="Another field, such as phone. May be repeated.",
)
@click.option(
    "--fields",
    "from_file",
    type=FILE,
    metavar="FILE",
    help="Other fields as a JSON object in a file (- for standard input), hidden from other users of the machine.",
)
async def add_recipient(
    state: State, signing: str, fields: tuple[tuple[str, str], ...], from_file: str | None, **named: Any
) -> None:
    """Add a recipient to a draft. Only the recipient's id goes to standard output.

    \b
    Example:
      signing-async add-recipient $SIGNING anna@example.com --first-name Anna --last-name Berg --order 1
      signing-async add-recipient $SIGNING bo@example.com --method bankid --field personal_number=198001011234
    """
    extra = {} if from_file is None else _json_object(from_file)
    async with state.client() as client:
        recipient = await client.recipients.add(signing, **named, extra={**extra, **dict(fields)})
    state.out.say(f"Added {named['email']}.")
    state.out.result(recipient_facts(state, recipient), on_one_line(recipient.id))


@command(changing=True)
@click.argument("signing")
@click.argument("recipient", required=False)
@click.option("--all-pending", is_flag=True, help="All recipients who have not finished.")
async def remind(state: State, signing: str, recipient: str | None, all_pending: bool) -> None:
    """Remind RECIPIENT (an id or an e-mail address), or all who have not finished.

    A reminder that fails does not stop the others. A reminder whose response was lost is not repeated: exit code 3.

    \b
    Example:
      signing-async remind $SIGNING anna@example.com
      signing-async remind $SIGNING --all-pending
    """
    if (recipient is None) is not all_pending:
        raise click.UsageError("use either RECIPIENT or --all-pending")
    from ..recipients import RemindResult

    async with state.client() as client:
        if recipient is None:
            results = await client.recipients.remind_pending(signing)
        else:
            found = await _find(client, signing, recipient)
            await client.recipients.remind(signing, found)
            results = [RemindResult(found)]
    for result in results:
        show_reminder(state.out, result, {"id": result.recipient.id})
    if not results:
        state.out.say("No recipient is pending.")
    errors = [result.error for result in results if result.error is not None]
    state.end(code_of_all(errors, done=len(results) - len(errors)))


def show_reminder(out: Output, result: RemindResult, facts: dict[str, Any], of: str = "") -> None:
    """Print the outcome of a reminder."""
    email = result.recipient.email
    facts = {**facts, "email": email, "reminded": result.error is None}
    if result.error is None:
        out.result(facts, on_one_line(f"Reminded {email}{of}."))
    else:
        out.failed(email, result.error, facts)


async def _find(client: SigningClient, signing_id: str, wanted: str) -> Recipient:
    everyone = [recipient async for recipient in client.recipients.list(signing_id)]
    found = [one for one in everyone if one.id == wanted or one.email.casefold() == wanted.casefold()]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequest(f"{len(found)} recipients of the signing have the address {wanted!r}: use an id")
    raise InvalidRequest(f"no recipient of the signing has the id or address {wanted!r}")
