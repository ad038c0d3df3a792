"""`signing-async sandbox`: the service on this machine, for browsers and programs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import click

from .._connections import describe_failure
from ..sandbox import Profile, Refused, Sandbox
from ..sandbox.addresses import is_loopback
from ..sandbox.sealer import LEVELS, Level
from .command_base import State, command, on_signal
from .output import Output

_PROFILES = ("default", "laravel", "rfc9457", "numeric")


@command()
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="0: any free port.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Keep everything in this folder.")
@click.option("--profile", default="default", type=click.Choice(_PROFILES), help="How the service responds.")
@click.option("--seal-level", default="B-B", type=click.Choice(LEVELS), help="PAdES level of the sealed PDFs.")
@click.option("--seed", help="The same seed gives the same ids, tokens and secrets.")
@click.option(
    "--app",
    "apps",
    multiple=True,
    metavar="NAME=REDIRECT_URI",
    help="Register an app for OAuth, and print its settings.",
)
@click.option("--webhook-url", help="Deliver events to this URL, signed with SIGNING_WEBHOOK_SECRET if it is set.")
@click.option("--allow-remote-webhooks", is_flag=True, help="Also deliver events to other machines.")
def sandbox(
    state: State, profile: str, webhook_url: str | None, seal_level: Level, apps: tuple[str, ...], **options: Any
) -> None:
    """Run the service on this machine until Ctrl-C. It is not a legal signing service.

    Every request is logged on standard error. --json prints one object when the sandbox is ready: base_url,
    access_token, and the webhooks with their secrets.

    \b
    Example:
      signing-async sandbox --port 8080 --data ./sandbox
    """
    if len(apps) > 1:
        raise click.UsageError("--app: only one app can be registered here; register others at /developer/my-apps")
    if apps and not all(apps[0].partition("=")):
        raise click.UsageError(f"--app: must have the form NAME=REDIRECT_URI, got {apps[0]!r}")
    log, handler = logging.getLogger("signing_async.sandbox"), _LogHandler(state.out)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        server = Sandbox(
            profile=Profile.preset(profile),
            webhook_url=webhook_url,
            webhook_secret=os.environ.get("SIGNING_WEBHOOK_SECRET") if webhook_url else None,
            keep_requests=2000,
            seal_level=seal_level,
            **options,
        )
        state.run(_run(server, state.out, *apps))
    except Refused as error:
        message = "; ".join(text for texts in error.errors.values() for text in texts) or str(error)
        raise click.UsageError(message.replace("allow_remote_webhooks", "--allow-remote-webhooks")) from error
    except click.exceptions.Exit:  # which is a RuntimeError
        raise
    except OSError as error:
        place = error.filename or "{host}:{port}".format_map(options)
        hint = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
        raise click.ClickException(f"{place}: {describe_failure(error)}{hint}") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    finally:
        log.removeHandler(handler)


async def _run(server: Sandbox, out: Output, app: str | None = None) -> None:
    stop = asyncio.Event()
    on_signal(signal.SIGINT, stop.set)
    on_signal(signal.SIGTERM, stop.set)
    async with server:
        _announce(server, out, app)
        await stop.wait()
    out.text("Stopped.")


class _LogHandler(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__(logging.INFO)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        from aiohttp.http_exceptions import HttpProcessingError

        text = self.format(record)
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            text = f"{record.getMessage()}: malformed HTTP"  # the error quotes the request, which may hold secrets
        if record.levelno >= logging.WARNING:
            self._out.warn(text)
        else:
            self._out.say(text, log=text)


def _announce(server: Sandbox, out: Output, app: str | None = None) -> None:
    url, token = server.base_url, server.access_token(lifetime=86_400)
    endpoints = server.webhooks.endpoints()
    exports = {"SIGNING_BASE_URL": url, "SIGNING_ACCESS_TOKEN": token}
    if app is not None:
        name, _, redirect_uri = app.partition("=")
        registered = server.accounts.keep_app(name, redirect_uri)
        # An access token would take precedence over the app.
        exports = {
            "SIGNING_BASE_URL": url,
            "SIGNING_CLIENT_ID": registered.client_id,
            "SIGNING_CLIENT_SECRET": registered.client_secret or "",
            "SIGNING_REDIRECT_URI": registered.redirect_uri,
        }
    lines = [
        f"Signing sandbox on {url} (for development and tests: not a legal signing service)",
        f"  Dashboard         {url}/sandbox",
        f"  Register an app   {url}/developer/my-apps",
        f"  OpenAPI           {url}/openapi.json",
    ]
    if "SIGNING_WEBHOOK_SECRET" in os.environ:
        lines += [f"  Webhook           {endpoint.url} (signed with SIGNING_WEBHOOK_SECRET)" for endpoint in endpoints]
    else:
        lines += [f"  Webhook secret    {endpoint.secret} (for {endpoint.url})" for endpoint in endpoints]
        if len(endpoints) == 1:
            exports["SIGNING_WEBHOOK_SECRET"] = endpoints[0].secret
    then = " (the access token is valid for a day)" if app is None else ", then run `signing-async login`"
    lines.append(f"To use the sandbox from a shell, paste these lines{then}:")
    lines += [f"  export {name}={shlex.quote(value)}" for name, value in exports.items()]
    if app is not None:
        lines.append(f"Or, without a login (valid for a day): export SIGNING_ACCESS_TOKEN={token}")
    if not is_loopback(server.host):
        lines.append("Everybody who can reach this address has full access: the sandbox asks for no password.")
    lines.append("Press Ctrl-C to stop.")
    webhooks = [{"url": endpoint.url, "secret": endpoint.secret} for endpoint in endpoints]
    facts: dict[str, object] = {"base_url": url, "access_token": token, "webhooks": webhooks}
    if app is not None:
        facts["app"] = {name.removeprefix("SIGNING_").lower(): value for name, value in exports.items()}
    out.result(facts, "\n".join(lines))
