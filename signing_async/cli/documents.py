"""`upload` PDFs to a draft, and `download` the sealed PDFs of a signing."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import InvalidRequest, SigningError
from .command_base import State, command, make_folder
from .exits import code_of_all
from .output import CONTROLS, on_one_line
from .records import document_facts
from .verify_sealed import load_inspector

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..documents.resource import SealedFile
    from ..models import Document

_UNSAFE = re.compile(f'[{CONTROLS}<>:"|?*]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_LONGEST_NAME = 180


@command(changing=True)
@click.argument("signing")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--again", is_flag=True, help="Also upload files that the draft already holds.")
@click.option(
    "--concurrency",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Upload several files at once. With more than 1, their order in the signing is not kept.",
)
def upload(state: State, signing: str, files: tuple[Path, ...], again: bool, concurrency: int) -> None:
    """Upload PDFs to a draft, in the given order. Prints a line with the document's id for each.

    A file that fails does not stop the others. A file that the draft already holds (same name and, if the service
    reports them, same size and hash) is refused without --again, so that a command that was interrupted can be
    repeated. Exit code 3: it is unknown whether a document arrived.

    \b
    Example:
      signing-async upload $SIGNING lease.pdf inventory.pdf
    """
    state.run(_upload(state, signing, files, again, concurrency))


async def _upload(state: State, signing_id: str, files: Sequence[Path], again: bool, concurrency: int) -> None:
    errors: list[BaseException] = []

    def fail(file: Path, error: BaseException) -> None:
        errors.append(error)
        state.out.failed(str(file), error, {"file": str(file)})

    async with state.client() as client:
        held = {} if again else await _find_held(state, client, signing_id, files)
        for file in filter(held.__contains__, files):
            fail(file, InvalidRequest(f"the draft already holds this file ({held[file].id}): use --again to upload it"))
        remaining = [file for file in files if file not in held]
        with state.out.progress("Uploading") as on_progress:
            async with client.documents.upload_many(
                signing_id, remaining, concurrency=concurrency, on_progress=on_progress
            ) as results:
                async for result in results:
                    if result.document is None:
                        assert result.error is not None
                        fail(result.source, result.error)
                    else:
                        facts = {"file": str(result.source), **document_facts(result.document)}
                        state.out.result(facts, on_one_line(f"{result.document.id}  {result.source}"))
    if errors and len(files) > 1:
        state.out.say(f"{len(errors)} of {len(files)} files were not uploaded.")
    state.end(code_of_all(errors, done=len(files) - len(errors)))


async def _find_held(
    state: State, client: SigningClient, signing_id: str, files: Sequence[Path]
) -> dict[Path, Document]:
    """Return the files that the draft already holds, each with its document."""
    from ..documents.source import PdfSource
    from ..record_matching import DocumentMatch

    documents = (await client.signings.get(signing_id)).documents
    assumptions = state.settings.assumptions
    held = {}
    for file in filter(Path.is_file, files):
        match = DocumentMatch(PdfSource(file).filename, file.stat().st_size, partial(_sha256, file), assumptions)
        document = await match.find(documents)
        if document is not None:
            held[file] = document
    return held


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@command()
@click.argument("signing")
@click.argument("documents", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All documents of the signing.")
@click.option(
    "-o", "--output", metavar="PATH", help="A file, a folder, or - for standard output.  [default: current folder]"
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.option(
    "--verify", is_flag=True, help="Keep a file only if its signatures are sound, as verify-sealed judges them."
)
def download(
    state: State,
    signing: str,
    documents: tuple[str, ...],
    everything: bool,
    output: str | None,
    force: bool,
    verify: bool,
) -> None:
    """Download sealed PDFs: DOCUMENTS by id or name, or the only one, or --all.

    Files are named after their documents, as in lease-signed.pdf, and appear only once they are complete and checked.
    With --all, --output is always a folder. Existing files are kept, unless --force is given.

    Exit code 7: with --verify, a file is not sound; it was not kept.

    \b
    Example:
      signing-async download $SIGNING --all --output signed
      signing-async download $SIGNING lease.pdf --output - > sealed.pdf
    """
    if documents and everything:
        raise click.UsageError("use either DOCUMENTS or --all, not both")
    if output == "-" and sys.stdout.isatty():
        raise click.UsageError("--output -: refusing to write a PDF to a terminal; redirect it to a file or a program")
    if output == "-" and verify:
        raise click.UsageError("--output -: cannot be used with --verify, which needs a file")
    if verify:
        load_inspector()
    state.run(_download(state, signing, _Selection(documents, everything), output, force=force, verify=verify))


class _Selection:
    """The documents of a signing that the arguments select."""

    def __init__(self, named: Sequence[str], everything: bool) -> None:
        self._named = named
        self.everything = everything

    def of(self, documents: Sequence[Document]) -> list[Document]:
        if not documents:
            raise InvalidRequest("the signing has no documents")
        if self.everything:
            return list(documents)
        if self._named:
            return list({found.id: found for name in self._named for found in [_find(name, documents)]}.values())
        if len(documents) > 1:
            names = ", ".join(repr(document.name or document.id) for document in documents)
            raise InvalidRequest(f"the signing has {len(documents)} documents: use --all, or name one of {names}")
        return list(documents)


def _find(name: str, documents: Sequence[Document]) -> Document:
    found = [one for one in documents if name == one.id] or [one for one in documents if name == one.name]
    if not found:
        raise InvalidRequest(f"no document of the signing has the id or name {name!r}")
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} documents of the signing are named {name!r}: use an id")
    return found[0]


async def _download(
    state: State, signing_id: str, selection: _Selection, output: str | None, *, force: bool, verify: bool
) -> None:
    from ..worker_pool import ProgressReporter, Results

    errors: list[BaseException] = []
    async with state.client() as client:
        selected = selection.of((await client.signings.get(signing_id)).documents)
        if output == "-":
            await _write_to_stdout(state, client, signing_id, selected)
            return
        paths = _target_paths(selected, output, is_folder=selection.everything)
        targets = list(zip(selected, paths, strict=True))

        async def fetch(target: tuple[Document, Path]) -> tuple[Document, Path, SealedFile | BaseException]:
            try:
                return *target, await _fetch(client, signing_id, *target, force=force, verify=verify)
            except (SigningError, OSError) as error:
                if isinstance(error, SigningError) and error.fatal:
                    raise
                return *target, error

        with state.out.progress("Downloading") as on_progress:
            reporter = ProgressReporter(on_progress, len(targets))
            reporter.add(0, 0)
            async with Results(targets, fetch, 4) as results:
                async for document, path, result in results:
                    facts = {"id": document.id, "name": document.name, "path": str(path)}
                    if isinstance(result, BaseException):
                        errors.append(result)
                        state.out.failed(document.name or document.id, result, facts)
                        reporter.add(1, 0)
                    else:
                        state.out.result({**facts, "size": result.size, "sha256": result.sha256}, str(path))
                        reporter.add(1, result.size)
    state.end(code_of_all(errors, done=len(targets) - len(errors)))


async def _fetch(
    client: SigningClient, signing_id: str, document: Document, path: Path, *, force: bool, verify: bool
) -> SealedFile:
    if os.path.lexists(path) and not force:
        raise InvalidRequest(f"{path} already exists: use --force to replace it")
    return await client.documents.download_signed(signing_id, document, path, overwrite=force, verify=verify)


async def _write_to_stdout(state: State, client: SigningClient, signing_id: str, documents: Sequence[Document]) -> None:
    if len(documents) > 1:
        raise InvalidRequest(f"--output -: only one document can go to standard output, got {len(documents)}")
    # The PDF is complete and checked before its first byte is written.
    state.out.binary(await client.documents.read_signed(signing_id, documents[0]))


def _target_paths(documents: Sequence[Document], output: str | None, *, is_folder: bool) -> list[Path]:
    """Return the path to save each document to; create the folder."""
    folder = Path(output or ".")
    is_folder = is_folder or len(documents) > 1 or not output or folder.is_dir() or output.endswith(("/", "\\"))
    if not is_folder:
        return [folder]
    if folder.is_file():
        raise InvalidRequest(f"--output: must be a folder for these documents, but {output!r} is a file")
    make_folder(folder, "--output")
    return [folder / name for name in _file_names(documents)]


def _file_names(documents: Sequence[Document]) -> Iterator[str]:
    """Yield a different file name for each document."""
    taken: set[str] = set()
    for document in documents:
        stem = safe_stem(document.name) or safe_stem(document.id) or "document"
        name, count = f"{stem}-signed.pdf", 1
        while name.casefold() in taken:
            count += 1
            name = f"{stem}-signed-{count}.pdf"
        taken.add(name.casefold())
        yield name


def safe_stem(name: str) -> str:
    """Return a safe file name, without .pdf, made of a name from the server; empty if nothing is left."""
    name = name.encode("utf-8", "replace").decode().replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    name = _UNSAFE.sub("_", name).strip(" .").lstrip("-")
    stem = name[:-4].rstrip(" .") if name.lower().endswith(".pdf") else name
    stem = stem.encode()[:_LONGEST_NAME].decode("utf-8", "ignore").rstrip(" .")
    return f"_{stem}" if _RESERVED.fullmatch(stem) else stem
