"""`webhook`: verify a saved delivery, diagnose one that fails, and check an endpoint."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import ConfigurationError, InvalidSignature, MalformedEvent, TransportError
from ..webhooks import GITHUB, SLACK, STANDARD_WEBHOOKS, STRIPE, SVIX, Scheme, WebhookVerifier, diagnose
from .command_base import Seconds, State, command, common_options, read_bytes, read_text
from .output import on_one_line

if TYPE_CHECKING:
    from ..webhooks.check import CheckResult

SECRET_VARIABLE = "SIGNING_WEBHOOK_SECRET"
SCHEMES = {
    "default": Scheme(),
    "github": GITHUB,
    "slack": SLACK,
    "standard-webhooks": STANDARD_WEBHOOKS,
    "stripe": STRIPE,
    "svix": SVIX,
}

T = TypeVar("T")
Command = Callable[..., None]


@click.group(params=list(common_options()))
def webhook() -> None:
    """Verify, diagnose and check webhook deliveries.

    The secret comes from --secret, the variable SIGNING_WEBHOOK_SECRET, the settings file (webhook_secret) or a prompt.
    It is never an argument, because every process on the machine can read arguments.

    \b
    Example:
      signing-async webhook verify delivery.json --signature "$SIGNATURE"
    """


def _secret_option(command: Command) -> Command:
    return click.option(
        "--secret",
        "source",
        metavar="SOURCE",
        help=f"Source of the secret: env:NAME, file:PATH, or - for standard input. [default: env:{SECRET_VARIABLE}]",
    )(command)


def _scheme_option(command: Command) -> Command:
    return click.option(
        "--scheme",
        type=click.Choice(sorted(SCHEMES)),
        default="default",
        show_default=True,
        help="How the sender signs.",
    )(command)


def _delivery_options(command: Command) -> Command:
    command = click.option(
        "-H",
        "--header",
        "headers",
        multiple=True,
        metavar="'NAME: VALUE'",
        help="A header of the delivery. May be repeated.",
    )(command)
    command = click.option("--signature", metavar="VALUE", help="The value of the signature header.")(command)
    return click.argument("body", type=click.Path(exists=True, dir_okay=False, allow_dash=True))(command)


@command()
@_delivery_options
@_secret_option
@_scheme_option
@click.option("--any-age", is_flag=True, help="Accept a signed timestamp of any age. A saved delivery may be old.")
def verify(
    state: State,
    body: str,
    signature: str | None,
    headers: tuple[str, ...],
    source: str | None,
    scheme: str,
    any_age: bool,
) -> None:
    """Verify the delivery saved in the file BODY (- for standard input).

    \b
    Example:
      signing-async webhook verify delivery.json --signature "$SIGNATURE"

    Exit code 0: the signature is valid. 1: it is not. 2: wrong usage.
    """
    selected = replace(SCHEMES[scheme], tolerance=math.inf) if any_age else SCHEMES[scheme]
    pairs = _parse_headers(headers)
    if signature is None and not any(str(name).lower() == selected.header.lower() for name, _ in pairs):
        raise click.UsageError(f"no signature: use --signature VALUE, or --header '{selected.header}: VALUE'")
    secret = _load_secret(state, source, body)
    verifier = _as_usage_error(lambda: WebhookVerifier(secret, selected))
    content = read_bytes(body, "BODY")
    try:
        verifier.verify(content, signature, headers=pairs)
    except InvalidSignature as error:
        facts = {"valid": False, "reason": error.reason, "message": str(error)}
        state.out.result(facts, f"not valid: {error}", "red")
        state.end(1)
    try:
        event = verifier.parse(content, signature, headers=pairs)
    except MalformedEvent as error:
        facts = {"valid": True, "event": None, "message": str(error)}
        state.out.result(facts, f"valid signature, but not an event: {error}", "yellow")
        return
    text = f"valid: event {event.id} of type {on_one_line(event.type) or 'unknown'}"
    facts = {"valid": True, "event": {"id": event.id, "type": event.type, "signing_id": event.signing_id}}
    state.out.result(facts, text, "green")


@command()
@_delivery_options
@_secret_option
@_scheme_option
def doctor(
    state: State, body: str, signature: str | None, headers: tuple[str, ...], source: str | None, scheme: str
) -> None:
    """Explain why the delivery saved in BODY does not verify.

    BODY is a file, or - for standard input. Nothing leaves this machine. A secret from a file is used with its final
    newline, which may be the cause.

    \b
    Example:
      signing-async webhook doctor delivery.json --signature "$SIGNATURE" -H "X-Timestamp: 1700000000"

    Exit code 0: the delivery verifies. 1: it does not, and the cause is shown. 2: wrong usage. 3: no cause was found.
    """
    secret = _load_secret(state, source, body, keep_line_end=True)
    diagnosis = diagnose(
        secret, read_bytes(body, "BODY"), signature, headers=_parse_headers(headers), scheme=SCHEMES[scheme]
    )
    facts = {
        "accepted": diagnosis.accepted,
        "explained": diagnosis.explained,
        "findings": list(diagnosis.findings),
    }
    colour, code = ("green", 0) if diagnosis.accepted else ("yellow", 1) if diagnosis.explained else ("red", 3)
    state.out.result(facts, str(diagnosis), colour)
    state.end(code)


@command()
@click.argument("url")
@_secret_option
@_scheme_option
@click.option("--event-type", default="webhook.check", show_default=True, help="The type of the events to send.")
@click.option(
    "--slow-limit",
    type=Seconds(1, 600),
    default=30.0,
    show_default=True,
    help="Time in which a slow body must be cut off.",
)
@click.option(
    "--over-long",
    type=click.IntRange(1, 2**30),
    default=16 * 2**20,
    show_default=True,
    help="Size of the over-long body in bytes.",
)
@click.option("--plain-http", is_flag=True, help="Allow plain http to another machine.")
def check(state: State, url: str, source: str | None, scheme: str, **options: Any) -> None:
    """Check how your endpoint handles valid and invalid deliveries.

    If the URL redirects or is not found, the check says so and stops. The endpoint receives a few valid events of a
    type that it should ignore: use a test system. Nothing is sent elsewhere.

    \b
    Example:
      signing-async webhook check http://localhost:8000/webhooks --secret file:webhook-secret

    Exit code 0: all checks passed. 1: a check failed. 2: wrong usage. 3: the endpoint cannot be reached.
    """
    from ..webhooks.check import check_receiver

    async def run() -> list[CheckResult]:
        results = []
        async for result in check_receiver(url, secret, scheme=SCHEMES[scheme], **options):
            results.append(result)
            if not state.json:
                _print_result(state, result)
        return results

    secret = _load_secret(state, source)
    try:
        results = _as_usage_error(lambda: state.run(run()))
    except TransportError as error:
        if state.json:
            state.out.result({"url": url, "ok": False, "message": str(error)})
        else:
            state.out.error(str(error), {})
        state.end(3)
    failed = sum(not result.ok for result in results)
    facts = {"url": url, "ok": not failed, "checks": [result.as_dict() for result in results]}
    text = f"{failed} of {len(results)} checks failed" if failed else f"all {len(results)} checks passed"
    state.out.result(facts, text, "red" if failed else "green")
    state.end(1 if failed else 0)


def _print_result(state: State, result: CheckResult) -> None:
    verdict, colour = ("ok  ", "green") if result.ok else ("FAIL", "red")
    line = f"{verdict}  {result.name:<20} {result.got} in {result.seconds * 1000:.0f} ms"
    state.out.result({}, line, colour)
    if not result.ok:
        state.out.text(f"      expected {result.expected}: {on_one_line(result.advice)}")


def _as_usage_error(call: Callable[[], T]) -> T:
    try:
        return call()
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None


def _parse_headers(headers: tuple[str, ...]) -> list[tuple[str | bytes, str | bytes]]:
    pairs: list[tuple[str | bytes, str | bytes]] = []
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise click.BadParameter(f"must have the form 'NAME: VALUE', got {header!r}", param_hint="--header")
        pairs.append((name.strip(), value.strip()))
    return pairs


def _load_secret(state: State, source: str | None, body: str = "", *, keep_line_end: bool = False) -> str:
    kind, _, rest = (source or f"env:{SECRET_VARIABLE}").partition(":")
    if source == "-" and body == "-":
        raise click.UsageError("standard input can be either the body or the secret, not both")
    if source == "-" or (kind == "file" and rest):
        text = read_text(rest or "-", "--secret")
        return text if keep_line_end else text.removesuffix("\n").removesuffix("\r")
    if kind == "env" and rest:
        return _secret_from_variable(state, rest)
    raise click.BadParameter(
        "every process can read a secret on the command line: use env:NAME, file:PATH, or -",
        param_hint="--secret",
    )


def _secret_from_variable(state: State, name: str) -> str:
    if name in os.environ:
        return os.environ[name]
    configured = state.settings.webhook_secret if name == SECRET_VARIABLE else None
    if configured is not None:
        return configured
    if name == SECRET_VARIABLE and sys.stdin.isatty():
        secret: str = click.prompt("Webhook secret", hide_input=True, err=True)
        return secret
    raise click.UsageError(f"no secret: set {name}, or use --secret with env:NAME, file:PATH, or -")


for _command in (verify, doctor, check):
    webhook.add_command(_command)
