"""`doctor`: check a tenant without changing anything, and write down how it responds."""

from __future__ import annotations

import contextlib
import secrets
import shlex
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .._files import place_new, unusable
from ..errors import InvalidRequest
from ..transport.error_response import one_line
from .command_base import State, command
from .exits import FAILED, UNAUTHORIZED

if TYPE_CHECKING:
    from .findings import Finding, Learned


@command()
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="assumptions.toml",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The file for the learned assumptions.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--check-only", is_flag=True, help="Write no file.")
@click.option(
    "--wrong-token",
    is_flag=True,
    help="Also send one wrong token, to see how it is rejected. Some services lock a user out after a few of these.",
)
def doctor(state: State, output: Path, force: bool, check_only: bool, wrong_token: bool) -> None:
    """Check a tenant, and write a file of assumptions for the client. Nothing at the service is changed.

    The command checks the certificate, the clock, the token, and what the service's documentation leaves open: the
    parameters of lists, where items and cursors are, errors, request ids, timestamps. This takes some twenty GET
    requests, one of them for a signing that does not exist and one without a token.

    The file holds assumptions in TOML, each with its evidence as a comment. SigningClient.from_env and all commands
    use it if the settings name it: assumptions = "assumptions.toml", or SIGNING_ASSUMPTIONS.

    Exit code 0: no check failed. 1: a check failed. 4: the token is not accepted.

    \b
    Example:
      signing-async doctor --output tenant.toml
    """
    if not check_only:
        _check_free(output, force=force)
    state.run(_doctor(state, None if check_only else output, force, wrong_token))


def _check_free(output: Path, *, force: bool) -> None:
    if output.is_dir():
        raise InvalidRequest(f"--output: {str(output)!r} is a folder")
    if output.exists() and not force:
        raise InvalidRequest(f"--output: {output} exists: use --force to replace it")


async def _doctor(state: State, output: Path | None, force: bool, wrong_token: bool) -> None:
    from .probing import Probe

    failed = set()
    async with state.client() as client:
        probe = Probe(client, wrong_token=wrong_token)
        async with aclosing(probe.findings()) as findings:
            async for finding in findings:
                _report(state, finding)
                failed |= {finding.check} if finding.state == "failed" else set()
    if output is not None:
        _write(state, probe.learned, output, force=force)
    state.end(UNAUTHORIZED if "token" in failed else FAILED if failed else 0)


def _report(state: State, finding: Finding) -> None:
    mark = {"ok": "ok", "warning": "WARNING", "failed": "FAILED", "unknown": "unknown"}[finding.state]
    facts = {"check": finding.check, "state": finding.state, "message": finding.message, **finding.facts}
    state.out.result(facts, f"{mark:<8} {finding.check:<12} {one_line(finding.message)}")


def _write(state: State, learned: Learned, output: Path, *, force: bool) -> None:
    text = learned.to_toml(state.settings.origin)
    part = output.with_name(f".{output.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(text, "utf-8")
        if force:
            part.replace(output)
        else:
            place_new(part, output)  # fails if the file exists by now
    except OSError as error:
        raise unusable(f"--output: {str(output)!r} cannot be written: {error.strerror}", error) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    words = f"Written to {output}. To use it: export SIGNING_ASSUMPTIONS={shlex.quote(str(output.absolute()))}"
    state.out.result({"assumptions": learned.values, "file": str(output)}, words)
