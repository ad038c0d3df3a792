"""`upload` PDFs to a draft, and `download` the sealed PDFs of a signing."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .._files import hash_file
from ..errors import InvalidRequest, NotYetSigned, SigningError
from .command_base import State, command, concurrency_option, make_folder
from .exits import code_of_all
from .output import CONTROLS, on_one_line
from .signings import document_facts
from .verify_sealed import load_inspector

if TYPE_CHECKING:
    from ..documents.download import SealedFile
    from ..models import Document

_UNSAFE = re.compile(f'[{CONTROLS}<>:"|?*]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_LONGEST_NAME = 180


@command(changing=True)
@click.argument("signing")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--again", is_flag=True, help="Also upload files that the draft already holds.")
@concurrency_option(default=1, help="Above 1, the order is not kept.")
async def upload(state: State, signing: str, files: tuple[Path, ...], again: bool, concurrency: int) -> int:
    """Upload PDFs to a draft, in the given order. Prints a line with the document's id for each.

    A file that fails does not stop the others. A file that the draft already holds (same name and, if the service
    reports them, same size and hash) is not sent again without --again: the command can be repeated. Exit code 3: it is
    unknown whether a document arrived.

    \b
    Example:
      signing-async upload $SIGNING lease.pdf inventory.pdf
    """
    errors: list[BaseException] = []
    present = 0
    async with state.client() as client:
        held = set() if again else {document.id for document in (await client.signings.get(signing)).documents}
        with state.out.byte_progress("Uploading") as on_progress:
            async with client.documents.upload_many(
                signing, files, concurrency=concurrency, on_progress=on_progress, skip_existing=not again
            ) as results:
                async for result in results:
                    if result.error is not None:
                        errors.append(result.error)
                        state.out.failed(str(result.source), result.error, {"file": str(result.source)})
                        continue
                    is_held = result.document.id in held
                    present += is_held
                    facts = {"file": str(result.source), **document_facts(result.document), "already_there": is_held}
                    text = f"{result.document.id}  {result.source}{'  (already there)' if is_held else ''}"
                    state.out.result(facts, on_one_line(text))
    return _end(state, "uploaded", len(files), present, errors)


def _end(state: State, verb: str, total: int, present: int, errors: list[BaseException]) -> int:
    """Print how many files were handled and how, if not all in the same way, and return the exit code."""
    if present or (errors and total > 1):
        counts = {verb: total - present - len(errors), "already there": present, "failed": len(errors)}
        state.out.say(", ".join(f"{number} {what}" for what, number in counts.items() if number or what == verb) + ".")
    return code_of_all(errors, done=total - len(errors))


@command()
@click.argument("signing")
@click.argument("documents", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All documents of the signing.")
@click.option("-o", "--output", metavar="PATH", help="A file, a folder, or - for standard output.  [default: .]")
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.option("--verify", is_flag=True, help="Keep only files that are sound, as verify-sealed judges them.")
async def download(
    state: State,
    signing: str,
    documents: tuple[str, ...],
    everything: bool,
    output: str | None,
    force: bool,
    verify: bool,
) -> int:
    """Download sealed PDFs: DOCUMENTS by id or name, or the only one, or --all.

    Files are named after their documents, as in lease-signed.pdf, and appear only once they are complete and checked.
    With --all, --output is always a folder. The command can be repeated: a document that the folder holds is kept. If
    another file has its name, the document is saved as lease-signed-2.pdf; with --force, it replaces that file.

    Exit code 7: with --verify, a file is not sound; it was not kept.

    \b
    Example:
      signing-async download $SIGNING --all --output signed/$SIGNING
      signing-async download $SIGNING lease.pdf --output - > sealed.pdf
    """
    if documents and everything:
        raise click.UsageError("use either DOCUMENTS or --all, not both")
    if output == "-" and (verify or sys.stdout.isatty()):
        raise click.UsageError("--output -: not with --verify, nor to a terminal: redirect it to a file or a program")
    if verify:
        load_inspector()  # fails before anything is downloaded
    from ..bulk import ProgressReporter, Results

    errors: list[BaseException] = []
    unsealed: list[str] = []
    present = 0
    async with state.client() as client:
        selected = _select((await client.signings.get(signing)).documents, documents, everything)
        if output == "-":
            if len(selected) > 1:
                raise InvalidRequest(f"--output -: only one document can go to standard output, got {len(selected)}")
            # The PDF is complete and checked before its first byte is written.
            state.out.binary(await client.documents.read_signed(signing, selected[0]))
            return 0
        folder = _folder(selected, output, is_folder=everything)
        if folder is not None:
            make_folder(folder, "--output")

        async def fetch(target: tuple[Document, str, int]) -> tuple[Document, Path, SealedFile | BaseException | None]:
            document, stem, number = target
            path = Path(output or ".") if folder is None else _numbered(folder, stem, number)
            try:
                if folder is not None and not force:
                    save = partial(client.documents.download_signed, signing, document, overwrite=False, verify=verify)
                    return document, *await _save_beside_others(save, folder, stem, number)
                if os.path.lexists(path) and not force:
                    raise InvalidRequest(f"{path} already exists: use --force to replace it")
                sealed = client.documents.download_signed(signing, document, path, overwrite=force, verify=verify)
                return document, path, await sealed
            except (SigningError, OSError) as error:
                if isinstance(error, SigningError) and error.fatal:
                    raise
                return document, path, error

        with state.out.byte_progress("Downloading") as on_progress:
            reporter = ProgressReporter(on_progress, len(selected))
            reporter.add(0, 0)
            results: Results[tuple[Document, Path, SealedFile | BaseException | None]] = Results(
                _file_names(selected), fetch, 4
            )
            async with results:
                async for document, path, result in results:
                    facts: dict[str, object] = {"id": document.id, "name": document.name, "path": str(path)}
                    if isinstance(result, NotYetSigned) and not state.json:
                        errors.append(result)
                        unsealed.append(on_one_line(document.name or document.id))
                    elif isinstance(result, BaseException):
                        errors.append(result)
                        state.out.failed(document.name or document.id, result, facts)
                    elif result is None:
                        present += 1
                        state.out.result({**facts, "already_there": True}, f"{path}  (already there)")
                    else:
                        facts |= {"size": result.size, "sha256": result.sha256, "already_there": False}
                        state.out.result(facts, str(path))
                    reporter.add(1, getattr(result, "size", 0))
    if unsealed:
        state.out.error(f"not sealed yet, since not all recipients have signed: {', '.join(unsealed)}", {})
    return _end(state, "downloaded", len(selected), present, errors)


def _select(documents: Sequence[Document], names: Sequence[str], everything: bool) -> list[Document]:
    if not documents:
        raise InvalidRequest("the signing has no documents")
    if not names:
        if len(documents) > 1 and not everything:
            known = ", ".join(repr(document.name or document.id) for document in documents)
            raise InvalidRequest(f"the signing has {len(documents)} documents: use --all, or name one of {known}")
        return list(documents)
    selected: dict[str, Document] = {}
    for name in names:
        found = [one for one in documents if name == one.id] or [one for one in documents if name == one.name]
        if len(found) != 1:
            how_many = f"{len(found)} documents" if found else "no document"
            raise InvalidRequest(f"{how_many} of the signing with the id or name {name!r}: use an id")
        selected[found[0].id] = found[0]
    return list(selected.values())


def _folder(documents: Sequence[Document], output: str | None, *, is_folder: bool) -> Path | None:
    """Return the folder to download to; None if ``output`` is a file."""
    folder = Path(output or ".")
    is_folder = is_folder or len(documents) > 1 or not output or folder.is_dir() or output.endswith(("/", "\\"))
    return folder if is_folder else None


def _file_names(documents: Sequence[Document]) -> list[tuple[Document, str, int]]:
    """Return the start of each document's file name, safe on every system, and its number among equal ones."""
    numbers: Counter[str] = Counter()
    names = []
    for document in documents:
        stem = _safe_stem(document.name) or _safe_stem(document.id) or "document"
        numbers[stem.casefold()] += 1
        names.append((document, stem, numbers[stem.casefold()]))
    return names


def _numbered(folder: Path, stem: str, number: int) -> Path:
    return folder / f"{stem}-signed{'' if number == 1 else f'-{number}'}.pdf"


async def _save_beside_others(
    save: Callable[[Path], Awaitable[SealedFile]], folder: Path, stem: str, number: int
) -> tuple[Path, SealedFile | None]:
    """Save a document under the first free number; return None if a file that has its name has its content too.

    The name does not tell: documents of two signings may have the same name.
    """
    first = number
    while True:
        path = _numbered(folder, stem, number)
        if not os.path.lexists(path):
            try:
                sealed = await save(path)
                break
            except InvalidRequest:
                if not os.path.lexists(path):  # else another process was first
                    raise
        number += 1
    for taken in range(first, number):
        other = _numbered(folder, stem, taken)
        with suppress(OSError):  # a folder, or removed meanwhile
            if await asyncio.to_thread(hash_file, other) == sealed.sha256:
                path.unlink()
                return other, None
    return path, sealed


def _safe_stem(name: str) -> str:
    """Return a name from the service without folders and .pdf, safe on every system; empty if nothing is left."""
    name = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    name = re.sub(r"\.pdf$", "", _UNSAFE.sub("_", name), flags=re.IGNORECASE).strip(" .").lstrip("-")
    stem = name.encode("utf-8", "replace")[:_LONGEST_NAME].decode("utf-8", "ignore").rstrip(" .")
    return f"_{stem}" if _RESERVED.fullmatch(stem) else stem
