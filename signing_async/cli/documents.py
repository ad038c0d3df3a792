"""`upload` and `download`: PDFs to a signing, and sealed PDFs from it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InvalidRequest, SigningError
from .command import State, command
from .exits import code_of_all
from .output import CONTROLS, on_one_line
from .records import document_facts

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..documents.resource import Progress, SealedFile
    from ..models import Document

_UNSAFE = re.compile(f'[{CONTROLS}<>:"|?*]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_LONGEST_NAME = 180


@command()
@click.argument("signing")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1, 64), help="So many at once.")
def upload(state: State, signing: str, files: tuple[Path, ...], concurrency: int) -> None:
    """Upload PDFs to a draft, several at once. A line for each that arrived, with its document's id.

    One that fails does not stop the others; the exit code tells. None is uploaded twice: after a lost answer the
    service is read first, and exit code 3 says that it cannot be told whether a document arrived.

    \b
    Example:
      signing-async upload $SIGNING lease.pdf inventory.pdf
    """
    state.run(_upload(state, signing, files, concurrency))


async def _upload(state: State, signing_id: str, files: Sequence[Path], concurrency: int) -> None:
    errors: list[BaseException] = []
    async with state.client() as client:
        with state.out.progress("Uploading") as tell:

            def on_progress(progress: Progress) -> None:
                total = len(files) if progress.files_total is None else progress.files_total
                tell(progress.files_done, total, progress.bytes_done, progress.bytes_total)

            async with client.documents.upload_many(
                signing_id, files, concurrency=concurrency, on_progress=on_progress
            ) as results:
                async for result in results:
                    facts = {"file": str(result.source)}
                    if result.document is None:
                        assert result.error is not None
                        errors.append(result.error)
                        state.out.failed(str(result.source), result.error, facts)
                    else:
                        state.out.result({**facts, **document_facts(result.document)}, _line(result))
    if errors and len(files) > 1:
        state.out.say(f"{len(errors)} of {len(files)} files were not uploaded.")
    state.end(code_of_all(errors, done=len(files) - len(errors)))


def _line(result: Any) -> str:
    return on_one_line(f"{result.document.id}  {result.source}")


@command()
@click.argument("signing")
@click.argument("documents", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every document of the signing.")
@click.option(
    "-o", "--output", metavar="PATH", help="A file, a folder, or - for standard output.  [default: this folder]"
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
def download(
    state: State, signing: str, documents: tuple[str, ...], everything: bool, output: str | None, force: bool
) -> None:
    """Download sealed PDFs: DOCUMENTS by id or name, or the only one, or --all.

    A file gets the document's name with "-signed" behind it, made safe, and appears only when it is complete and
    checked. A file that is there already is left alone without --force.

    \b
    Example:
      signing-async download $SIGNING --all --output signed
      signing-async download $SIGNING lease.pdf --output - > sealed.pdf
    """
    if documents and everything:
        raise click.UsageError("name documents, or say --all")
    if output == "-" and sys.stdout.isatty():
        raise click.UsageError("--output -: a PDF is nothing for a terminal: send it on to a file or a program")
    state.run(_download(state, signing, _Choice(documents, everything), output, force))


class _Choice:
    """Which documents of a signing are meant."""

    def __init__(self, named: Sequence[str], everything: bool) -> None:
        self._named = named
        self._everything = everything

    def of(self, documents: Sequence[Document]) -> list[Document]:
        if not documents:
            raise InvalidRequest("this signing has no documents")
        if self._everything:
            return list(documents)
        if self._named:
            return list({found.id: found for name in self._named for found in [_find(name, documents)]}.values())
        if len(documents) > 1:
            names = ", ".join(repr(document.name or document.id) for document in documents)
            raise InvalidRequest(f"this signing has {len(documents)} documents: say --all, or which: {names}")
        return list(documents)


def _find(name: str, documents: Sequence[Document]) -> Document:
    found = [one for one in documents if name == one.id] or [one for one in documents if name == one.name]
    if not found:
        raise InvalidRequest(f"no document of this signing has the id or the name {name!r}")
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} documents of this signing are named {name!r}: say which by its id")
    return found[0]


async def _download(state: State, signing_id: str, choice: _Choice, output: str | None, force: bool) -> None:
    from ..worker_pool import Results

    errors: list[BaseException] = []
    async with state.client() as client:
        chosen = choice.of((await client.signings.get(signing_id)).documents)
        if output == "-":
            await _to_stdout(state, client, signing_id, chosen)
            return
        targets = list(zip(chosen, _targets(chosen, output), strict=True))

        async def fetch(target: tuple[Document, Path]) -> tuple[Document, Path, SealedFile | BaseException]:
            try:
                return *target, await _fetch(client, signing_id, *target, force=force)
            except (SigningError, OSError) as error:
                return *target, error

        with state.out.progress("Downloading") as tell:
            size, done = 0, 0
            tell(0, len(targets), 0, None)
            async with Results(targets, fetch, 4) as results:
                async for document, path, result in results:
                    facts = {"id": document.id, "name": document.name, "path": str(path)}
                    done += 1
                    if isinstance(result, BaseException):
                        errors.append(result)
                        state.out.failed(document.name or document.id, result, facts)
                    else:
                        size += result.size
                        state.out.result({**facts, "size": result.size, "sha256": result.sha256}, str(path))
                    tell(done, len(targets), size, None)
    state.end(code_of_all(errors, done=len(targets) - len(errors)))


async def _fetch(client: SigningClient, signing_id: str, document: Document, path: Path, *, force: bool) -> SealedFile:
    if os.path.lexists(path) and not force:
        raise InvalidRequest(f"{path} is there already: --force replaces it")
    return await client.documents.download_signed(signing_id, document, path, overwrite=force)


async def _to_stdout(state: State, client: SigningClient, signing_id: str, documents: Sequence[Document]) -> None:
    if len(documents) > 1:
        raise InvalidRequest(f"--output -: only one document can go to standard output, not {len(documents)}")
    # Whole and checked before any of it is passed on.
    state.out.binary(await client.documents.read_signed(signing_id, documents[0]))


def _targets(documents: Sequence[Document], output: str | None) -> list[Path]:
    """Where each goes."""
    folder = Path(output or ".")
    if output and len(documents) == 1 and not folder.is_dir() and not output.endswith(("/", "\\")):
        return [folder]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"--output: {error.strerror}: {output!r}") from None
    return [folder / name for name in _names(documents)]


def _names(documents: Sequence[Document]) -> Iterator[str]:
    """A name of its own for each."""
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
    """What of a name from the server may be a file's name, without .pdf; empty where nothing is left."""
    name = name.encode("utf-8", "replace").decode().replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    name = _UNSAFE.sub("_", name).strip(" .").lstrip("-")
    stem = name[:-4].rstrip(" .") if name.lower().endswith(".pdf") else name
    stem = stem.encode()[:_LONGEST_NAME].decode("utf-8", "ignore").rstrip(" .")
    return f"_{stem}" if _RESERVED.fullmatch(stem) else stem
