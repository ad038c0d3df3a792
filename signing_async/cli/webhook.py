"""`webhook`: verify a saved delivery, diagnose one that fails, and check an endpoint."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from typing import IO, Any

import click

from ..errors import InvalidSignature, MalformedEvent, TransportError
from ..webhooks import GITHUB, SLACK, STANDARD_WEBHOOKS, STRIPE, SVIX, Scheme, WebhookVerifier, diagnose
from .command_base import FILE, Seconds, State, command, common_options, read_text
from .output import clean, on_one_line

_SECRET_VARIABLE = "SIGNING_WEBHOOK_SECRET"
_SECRET_HELP = f"env:NAME, file:PATH, or - for stdin.  [default: env:{_SECRET_VARIABLE}]"
SCHEMES = {
    "default": Scheme(),
    "github": GITHUB,
    "slack": SLACK,
    "standard-webhooks": STANDARD_WEBHOOKS,
    "stripe": STRIPE,
    "svix": SVIX,
}


def _name_and_value(header: str) -> tuple[str, str]:
    name, colon, value = header.partition(":")
    if not colon or not name.strip():
        raise click.BadParameter(f"must have the form 'NAME: VALUE', got {header!r}")
    return name.strip(), value.strip()


_SENDER: list[click.Parameter] = [
    click.Option(["--secret", "source"], help=_SECRET_HELP),
    click.Option(
        ["--scheme"], type=click.Choice(sorted(SCHEMES)), default="default", callback=lambda _, __, name: SCHEMES[name]
    ),
]
_DELIVERY: list[click.Parameter] = [
    click.Argument(["body"], type=FILE),
    click.Option(["--signature"], metavar="VALUE", help="The value of the signature header."),
    click.Option(["-H", "--header", "headers"], multiple=True, type=_name_and_value, metavar="'NAME: VALUE'"),
    *_SENDER,
]


@click.group(params=list(common_options()))
def webhook() -> None:
    """Verify, diagnose and check webhook deliveries.

    The secret comes from where --secret says (env:NAME, file:PATH, or - for standard input), the variable
    SIGNING_WEBHOOK_SECRET, the settings file (webhook_secret) or a prompt; every process could read it as an argument.

    \b
    Example:
      signing-async webhook verify delivery.json --signature "$SIGNATURE"
    """


@command(group=webhook, params=_DELIVERY)
@click.option("--any-age", is_flag=True, help="Accept a signed timestamp of any age. A saved delivery may be old.")
def verify(state: State, body: IO[bytes], source: str | None, scheme: Scheme, any_age: bool, **delivery: Any) -> int:
    """Verify the delivery saved in the file BODY (- for standard input).

    \b
    Example:
      signing-async webhook verify delivery.json --signature "$SIGNATURE"

    Exit code 0: the signature is valid. 1: it is not. 2: wrong usage.
    """
    given = {name.lower() for name, _ in delivery["headers"]}
    if delivery["signature"] is None and scheme.header.lower() not in given:
        raise click.UsageError(f"no signature: use --signature VALUE, or --header '{scheme.header}: VALUE'")
    secret = _load_secret(state, source, body)
    verifier = WebhookVerifier(secret, replace(scheme, tolerance=math.inf) if any_age else scheme)
    content = body.read()
    try:
        verifier.verify(content, **delivery)
        event = verifier.parse(content, **delivery)
    except InvalidSignature as error:
        facts: dict[str, Any] = {"valid": False, "reason": error.reason, "message": str(error)}
        state.out.result(facts, f"not valid: {error}", "red")
        return 1
    except MalformedEvent as error:
        facts = {"valid": True, "event": None, "message": str(error)}
        state.out.result(facts, f"valid signature, but not an event: {error}", "yellow")
        return 0
    text = f"valid: event {event.id} of type {on_one_line(event.type) or 'unknown'}"
    facts = {"valid": True, "event": {"id": event.id, "type": event.type, "signing_id": event.signing_id}}
    state.out.result(facts, text, "green")
    return 0


@command(group=webhook, params=_DELIVERY)
def doctor(state: State, body: IO[bytes], source: str | None, scheme: Scheme, **delivery: Any) -> int:
    """Explain why the delivery saved in BODY does not verify.

    BODY is a file, or - for standard input. Nothing leaves this machine. A secret from a file is used with its final
    newline, which may be the cause.

    \b
    Example:
      signing-async webhook doctor delivery.json --signature "$SIGNATURE" -H "X-Timestamp: 1700000000"

    Exit code 0: the delivery verifies. 1: it does not, and the cause is shown. 2: wrong usage. 3: no cause was found.
    """
    secret = _load_secret(state, source, body, keep_line_end=True)
    found = diagnose(secret, body.read(), delivery["signature"], headers=delivery["headers"], scheme=scheme)
    facts = {"accepted": found.accepted, "explained": found.explained, "findings": list(found.findings)}
    colour, code = ("green", 0) if found.accepted else ("yellow", 1) if found.explained else ("red", 3)
    state.out.result(facts, str(found), colour)
    return code


@command(group=webhook, params=_SENDER)
@click.argument("url")
@click.option("--event-type", default="webhook.check", show_default=True, help="The type of the events to send.")
@click.option(
    "--slow-limit", default=30.0, show_default=True, type=Seconds(1, 600), help="When to cut off slow bodies."
)
@click.option(
    "--over-long", default=2**24, show_default=True, type=click.IntRange(1, 2**30), help="Bytes of a long body."
)
@click.option("--plain-http", is_flag=True, help="Allow plain http to another machine.")
def check(state: State, url: str, source: str | None, **options: Any) -> int:
    """Check how your endpoint handles valid and invalid deliveries.

    If the URL redirects or is not found, the check says so and stops. The endpoint receives a few valid events of a
    type that it should ignore: use a test system. Nothing is sent elsewhere.

    \b
    Example:
      signing-async webhook check http://localhost:8000/webhooks --secret file:webhook-secret

    Exit code 0: all checks passed. 1: a check failed. 2: wrong usage. 3: the endpoint cannot be reached.
    """
    return state.run(_check(state, url, _load_secret(state, source), options))


async def _check(state: State, url: str, secret: str, options: dict[str, Any]) -> int:
    from ..webhooks.check import check_receiver

    checks: list[dict[str, Any]] = []
    try:
        async for result in check_receiver(url, secret, **options):
            checks.append(result.as_dict())
            verdict, colour = ("ok  ", "green") if result.ok else ("FAIL", "red")
            text = f"{verdict}  {result.name:<20} {result.got} in {result.seconds * 1000:.0f} ms"
            advice = "" if result.ok else f"\n      expected {result.expected}: {on_one_line(result.advice)}"
            state.out.text(clean(text + advice), colour)
    except TransportError as error:
        state.out.failed(url, error, {"url": url, "ok": False, "message": str(error)})
        return 3
    failed = sum(not each["ok"] for each in checks)
    text = f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
    state.out.result({"url": url, "ok": not failed, "checks": checks}, text, "red" if failed else "green")
    return 1 if failed else 0


def _load_secret(
    state: State, source: str | None, body: IO[bytes] | None = None, *, keep_line_end: bool = False
) -> str:
    kind, _, rest = (source or f"env:{_SECRET_VARIABLE}").partition(":")
    if source == "-" and body is sys.stdin.buffer:
        raise click.UsageError("standard input can be either the body or the secret, not both")
    if source == "-" or (kind == "file" and rest):
        text = read_text(FILE.convert(rest or "-", None, None))
        return text if keep_line_end else text.removesuffix("\n").removesuffix("\r")
    if kind != "env" or not rest:
        problem = "every process can read a secret on the command line: use env:NAME, file:PATH, or -"
        raise click.BadParameter(problem, param_hint="--secret")
    secret = os.environ.get(rest)
    if secret is None and rest == _SECRET_VARIABLE:
        secret = state.settings.webhook_secret
        if secret is None and sys.stdin.isatty():
            secret = str(click.prompt("Webhook secret", hide_input=True, err=True))
    if secret is None:
        raise click.UsageError(f"no secret: set {rest}, or use --secret with env:NAME, file:PATH, or -")
    return secret
