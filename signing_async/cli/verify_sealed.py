"""`verify-sealed`: what the structure and the digests of a sealed PDF tell, without a network and without trust."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import InvalidRequest
from .command import State, command
from .exits import NOT_SOUND, USAGE
from .output import iso, on_one_line

if TYPE_CHECKING:
    from ..sealed import Seal, SealedReport

NOTE = (
    "Sound means: as it was when it was signed. It is no legal opinion, and whether the certificates can be trusted"
    " is not checked."
)


@command("verify-sealed")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def verify_sealed(state: State, files: tuple[Path, ...]) -> None:
    """Say whether a sealed PDF is as it was when it was signed: who signed, what that covers, what came after.

    A file is sound when its last signature covers all of it, and the digest of every signature is right. It is no legal
    opinion: whether the certificates can be trusted, and are in force, is not checked. Nothing leaves this machine.

    Exit code 0: all files are sound. 7: one is not, and it is said why. 2: one cannot be read, or is no PDF.

    \b
    Example:
      signing-async verify-sealed lease-signed.pdf
    """
    codes = {_verify(state, path) for path in files}
    state.out.say(NOTE)
    state.end(NOT_SOUND if NOT_SOUND in codes else USAGE if USAGE in codes else 0)


def _verify(state: State, path: Path) -> int:
    from ..sealed import inspect_sealed

    try:
        report = inspect_sealed(path, max_bytes=state.settings.assumptions.max_sealed_bytes)
    except InvalidRequest as error:
        state.out.failed(str(path), error, {"file": str(path), "sound": None})
        return USAGE
    state.out.result({"file": str(path), **report.as_dict(), "note": NOTE}, _told(path, report))
    return 0 if report.sound else NOT_SOUND


def _told(path: Path, report: SealedReport) -> str:
    lines = [f"{on_one_line(str(path))}: {'sound' if report.sound else 'NOT SOUND'}"]
    lines += [f"  wrong: {problem}" for problem in report.problems]
    for seal in report.seals:
        lines += _lines_of(seal, report)
    return "\n".join(lines)


def _lines_of(seal: Seal, report: SealedReport) -> list[str]:
    moment = f", {iso(seal.signed_at)} by the signer's own clock" if seal.signed_at else ""
    covers = "the whole file" if seal.covers == report.size else f"its first {seal.covers} of {report.size} bytes"
    right = {True: "right", False: "WRONG", None: "not checked"}
    key = {True: "right", False: "WRONG", None: "not checked (that needs the package cryptography)"}
    return [
        f"  {seal.kind} by {seal.signer or 'somebody unknown'}{moment}",
        f"    covers  {covers}, up to revision {seal.revision} of {report.revisions}",
        f"    digest  {right[seal.digest_right]}{f' ({seal.digest_algorithm})' if seal.digest_algorithm else ''}",
        f"    key     {key[seal.key_right]}",
        *([f"    issuer  {seal.issuer}"] if seal.issuer else []),
    ]
