"""`signing-async sandbox`: the whole service on this machine, for a browser and for programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import click

from ..sandbox import Profile, Refused, Sandbox
from ..sandbox.accounts import is_loopback
from .command import State, command
from .running import NO_HANDLERS

PROFILES = ("default", "laravel", "rfc9457", "numeric")


@command()
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep everything in this folder; without it all is gone at the end.",
)
@click.option("--profile", default="default", show_default=True, type=click.Choice(PROFILES), help="How it answers.")
@click.option("--seed", help="The same seed gives the same ids, tokens and secrets.")
@click.option(
    "--webhook-url", help="Deliver events to this address; their secret is taken from SIGNING_WEBHOOK_SECRET."
)
@click.option("--allow-remote-webhooks", is_flag=True, help="Also deliver events to other machines.")
def sandbox(
    state: State,
    port: int,
    host: str,
    data: Path | None,
    profile: str,
    seed: str | None,
    webhook_url: str | None,
    allow_remote_webhooks: bool,
) -> None:
    """Run the whole service on this machine, until Ctrl-C. It is no legal signing service.

    --json prints one object when it is ready: base_url, access_token, and the webhooks with their secrets.

    \b
    Example:
      signing-async sandbox --port 8080 --data ./sandbox
    """
    try:
        server = Sandbox(
            port=port,
            host=host,
            data=data,
            profile=Profile.preset(profile),
            seed=seed,
            webhook_url=webhook_url,
            webhook_secret=os.environ.get("SIGNING_WEBHOOK_SECRET") if webhook_url else None,
            allow_remote_webhooks=allow_remote_webhooks,
            keep_requests=2000,
        )
        state.run(_run(server, as_json=state.json))
    except Refused as error:
        said = "; ".join(message for messages in error.errors.values() for message in messages) or str(error)
        raise click.UsageError(said.replace("allow_remote_webhooks", "--allow-remote-webhooks")) from error
    except OSError as error:
        # Asyncio's words for an address repeat its number.
        number = error.errno or 0
        words = os.strerror(number) if number > 0 else error.strerror
        raise click.ClickException(f"{error.filename or f'{host}:{port}'}: {words}") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error


async def _run(server: Sandbox, *, as_json: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(*NO_HANDLERS):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with server:
        _tell(server, as_json=as_json)
        await stop.wait()
    if not as_json:
        click.echo("Stopped.")


def _tell(server: Sandbox, *, as_json: bool = False) -> None:
    token = server.access_token(lifetime=86_400)
    if as_json:
        endpoints = [{"url": endpoint.url, "secret": endpoint.secret} for endpoint in server.webhooks.endpoints()]
        click.echo(json.dumps({"base_url": server.base_url, "access_token": token, "webhooks": endpoints}))
        return
    click.echo(f"Signing sandbox on {server.base_url} (for trying and testing: no legal signing service)")
    click.echo(f"  In a browser      {server.base_url}/")
    click.echo(f"  Register an app   {server.base_url}/developer/my-apps")
    click.echo(f"  API description   {server.base_url}/openapi.json")
    click.echo(f"  An access token   {token} (a day)")
    if "SIGNING_WEBHOOK_SECRET" not in os.environ:
        for endpoint in server.webhooks.endpoints():
            click.echo(f"  Webhook secret    {endpoint.secret} (for {endpoint.url})")
    if not is_loopback(server.host):
        click.echo("  Anyone who reaches this address can use all of it: it knows no passwords of its own.")
    click.echo("Ctrl-C stops it.")
