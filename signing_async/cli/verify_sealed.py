"""`verify-sealed`: whether a sealed PDF is unchanged since it was signed, and who signed it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import SigningError
from .command_base import Seconds, State, command
from .exits import FAILED, NOT_SOUND, UNTRUSTED, USAGE, code_of
from .output import clean, iso, on_one_line

if TYPE_CHECKING:
    from ..sealed import Report

_SOUND = "Sound means: every signature is valid, and only permitted changes followed. This is not a legal opinion."
_NOT_TRUSTED = "The certificates were not checked: names are what the certificates claim (use --trust to check them)."
_TRUSTED = "Trusted means: the certificates lead to the given roots, and are not revoked according to {}."
_REVOKED = {"good": "no", "revoked": "YES", "unknown": "unknown: no revocation data"}
_REVOCATION = {False: "the data in the file", True: "the data in the file and the services that they name"}
_VALID = {True: "valid", False: "INVALID", None: "not checked"}
_SHOWN = {True: "what it covers", False: "NOT only what it covers", None: "unknown"}


@command("verify-sealed")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--trust", multiple=True, metavar="ROOTS", help='A PEM or DER file, a folder of them, or "system".')
@click.option("--fetch", is_flag=True, help="With --trust: ask the revocation services that the certificates name.")
@click.option("--no-form-filling", is_flag=True, help="Do not permit form fields to be filled in after a signature.")
@click.option("--limit", default=60.0, show_default=True, type=Seconds(min=1), help="Time limit for each file.")
def verify_sealed(
    state: State, files: tuple[Path, ...], trust: tuple[str, ...], fetch: bool, no_form_filling: bool, limit: float
) -> int:
    """Check whether a sealed PDF is unchanged since it was signed: who signed, what is covered, what came after.

    A file is sound if every signature is valid, and only validation data, timestamps, further signatures, document
    information and, where the document permits it, form field values were added afterwards. It is trusted if the
    certificates also lead to the roots of --trust, and no revocation is known. This is not a legal opinion. Without
    --fetch nothing leaves this machine.

    Exit code 0: all files are sound and, with --trust, trusted. 7: a file is not sound. 8: with --trust, a file is
    sound but not trusted. 2: a file cannot be read or is not a PDF. 1: a file could not be verified for now; run the
    command again.

    \b
    Example:
      signing-async verify-sealed lease-signed.pdf
    """
    if fetch and not trust:
        raise click.UsageError("--fetch requires --trust")
    inspect, max_bytes = load_inspector(), state.settings.assumptions.max_sealed_bytes
    how = {"trust": trust or None, "fetch": fetch, "form_filling": not no_form_filling, "timeout": limit}
    note = f"{_SOUND} {_TRUSTED.format(_REVOCATION[fetch]) if trust else _NOT_TRUSTED}"
    codes = []
    for path in files:
        try:
            report = inspect(path, max_bytes=max_bytes, **how)
        except SigningError as error:
            state.out.failed(str(path), error, {"file": str(path), "sound": None})
            codes.append(code_of(error))
            continue
        codes.append(NOT_SOUND if not report.sound else UNTRUSTED if report.trusted is False else 0)
        state.out.result({"file": str(path), **report.as_dict(), "note": note})
        verdict, *lines = map(clean, _describe(path, report))
        colour = {NOT_SOUND: "red", UNTRUSTED: "yellow", 0: "green"}[codes[-1]]
        end = "\n" if len(files) > 1 else ""
        state.out.text("\n".join([state.out.styled(verdict, colour, bold=True), *lines]) + end)
    if len(files) > 1:
        sound = sum(code in (0, UNTRUSTED) for code in codes)
        state.out.text(f"{sound} of {len(files)} sound", "green" if sound == len(files) else "red")
    if not {0, NOT_SOUND, UNTRUSTED}.isdisjoint(codes):
        state.out.say(note)
    return next((code for code in (NOT_SOUND, UNTRUSTED, USAGE, FAILED) if code in codes), 0)


def load_inspector() -> Callable[..., Report]:
    """Return `inspect_sealed`. Without its extra, raise an error that names the extra."""
    try:
        from ..sealed import inspect_sealed
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from None
    return inspect_sealed


def _describe(path: Path, report: Report) -> list[str]:
    verdict = "sound" if report.sound else "NOT SOUND"
    if report.sound and report.trusted is not None:
        verdict += ", trusted" if report.trusted else ", NOT TRUSTED"
    lines = [f"{on_one_line(str(path))}: {verdict}"]
    lines += [f"  problem: {problem}" for problem in report.problems]
    lines += [f"  not trusted: {problem}" for problem in report.trust_problems]
    for seal in report.seals:
        source = "a timestamp" if seal.time_source == "timestamp" else "the signer's own clock"
        time = f", {iso(seal.signed_at)} by {source}" if seal.signed_at else ""
        covers = "the whole file" if seal.covers == report.size else f"its first {seal.covers} of {report.size} bytes"
        facts = {
            "covers": f"{covers}, up to revision {seal.revision} of {report.revisions}",
            "digest": f"{_VALID[seal.digest_right]} ({seal.digest_algorithm or 'unknown'})",
            "key": _VALID[seal.key_right],
            "level": seal.level,
            "issuer": seal.issuer,
            "revoked": seal.revocation and _REVOKED[seal.revocation],
            "shown": _SHOWN[seal.shown],
        }
        lines.append(f"  {seal.kind} by {seal.signer or 'an unknown signer'}{time}")
        lines += [f"    {name:<7} {value}" for name, value in facts.items() if value]
        lines += [f"    since   {change}" for change in seal.changes]
    return lines
