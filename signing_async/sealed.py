"""Judge a sealed PDF by pyHanko (extra `verify`): its signatures, what they cover, what came after, and whose they are.

The file is read in a worker process of its own, with limits of time and memory. It is no legal opinion.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from typing import Any, Literal

import attrs

from ._files import open_regular
from ._verify.process import run_worker
from ._verify.roots import Trust, load_roots
from .assumptions import Assumptions
from .errors import InvalidRequest, PdfRejected

if find_spec("pyhanko") is None:
    raise ModuleNotFoundError("signing_async.sealed needs pyHanko: pip install 'signing-async[verify]'", name="pyhanko")

__all__ = ["Report", "Seal", "SealedReport", "Trust", "inspect_sealed"]

HEADER_WINDOW = 1024
TIMEOUT = 60.0


@attrs.frozen
class Seal:
    """One signature of a sealed PDF."""

    kind: Literal["signature", "timestamp"]
    field: str
    """The name of its form field."""
    signer: str | None
    """The common name in the signer's certificate, else the whole name; None where there is no certificate."""
    subject: str | None
    issuer: str | None
    signed_at: datetime | None
    time_source: Literal["timestamp", "signer"] | None
    """Who says so: a timestamp service, or the signer."""
    covers: int
    """How many bytes it covers, from the file's first one on; 0 where that is not a beginning of the file."""
    revision: int
    """The last revision of the file that it covers, from 1; 0 where it cannot be told."""
    digest_algorithm: str | None
    digest_right: bool | None
    """Whether the covered bytes are as they were signed; None where that could not be told."""
    key_right: bool | None
    """Whether the certificate's key made the signature; None where that could not be told."""
    subfilter: str
    """Its format, such as ``ETSI.CAdES.detached``."""
    level: Literal["B-B", "B-T", "B-LT", "B-LTA"] | None
    """The PAdES level that it reaches by what the file carries; None for timestamps and other formats."""
    certification: Literal[1, 2, 3] | None
    """What it permits, where it certifies: 1 nothing, 2 form filling and signatures, 3 annotations too."""
    changes: tuple[str, ...]
    """Sentences on what was added since, as far as that is allowed."""
    shown: bool | None
    """Whether what it covers is what is shown now: nothing visible was added or changed. None where unknown."""
    trusted: bool | None
    """Whether its certificates lead to the given roots; None without roots."""
    revocation: Literal["good", "revoked", "unknown"] | None
    """What revocation data say of its certificates; None without roots."""
    problems: tuple[str, ...]
    trust_problems: tuple[str, ...]


@attrs.frozen
class Report:
    """What `inspect_sealed` found. It is no legal opinion."""

    size: int
    revisions: int
    """How often the file was saved, each time behind what was there (a linearized file counts twice from the start).

    0 where its structure cannot be followed.
    """
    seals: tuple[Seal, ...]
    """Its signatures, by how much they cover."""
    problems: tuple[str, ...]
    """Sentences, each on one thing that is wrong with the file or with one of its signatures."""
    trusted: bool | None
    """Whether the file is sound and all its signatures and timestamps lead to the given roots; None without roots."""
    trust_problems: tuple[str, ...]
    """Sentences, each on one signature or timestamp that is not trusted."""

    @property
    def sound(self) -> bool:
        """Signed, all signatures valid, and nothing after them but what is allowed."""
        return not self.problems

    @property
    def bytes_after(self) -> int:
        """How many bytes come behind what the last signature covers."""
        return self.size - max((seal.covers for seal in self.seals), default=0)

    @property
    def signers(self) -> tuple[str, ...]:
        """The names of those who signed, each once."""
        names = (seal.signer for seal in self.seals if seal.kind == "signature" and seal.signer)
        return tuple(dict.fromkeys(names))

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        told = attrs.asdict(self, value_serializer=lambda _, __, value: _plain(value))
        return {"sound": self.sound, "signers": list(self.signers), "bytes_after": self.bytes_after, **told}


SealedReport = Report
"""The former name of `Report`."""


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def inspect_sealed(
    source: str | os.PathLike[str] | bytes,
    *,
    trust: Trust | Iterable[Trust] | None = None,
    fetch: bool = False,
    form_filling: bool = True,
    timeout: float = TIMEOUT,
    max_bytes: int = Assumptions().max_sealed_bytes,
) -> Report:
    """Judge a sealed PDF: a path, or its bytes.

    With ``trust`` the report also says whether the certificates lead to these roots, and were not revoked by what the
    file carries; with ``fetch`` the services that they name are asked as well. After a signature these may be added:
    data for validation, timestamps, further signatures, document information, and, unless ``form_filling`` is False
    or the document forbids it, values of form fields.

    A file that cannot be read, or has more than ``max_bytes``, is an `InvalidRequest`, one that is no PDF a
    `PdfRejected`. One that takes more than ``timeout`` seconds, or too much memory, is not sound. In a coroutine call
    it as ``await asyncio.to_thread(inspect_sealed, path)``. ::

        report = inspect_sealed("archive/contract.pdf", trust="roots.pem")
        if not (report.sound and report.trusted):
            print(*report.problems, *report.trust_problems, sep="\\n")
    """
    roots = None if trust is None else load_roots(trust)
    return inspect_by_roots(source, roots, fetch=fetch, form_filling=form_filling, timeout=timeout, max_bytes=max_bytes)


def inspect_by_roots(
    source: str | os.PathLike[str] | bytes,
    roots: Sequence[bytes] | None,
    *,
    fetch: bool = False,
    form_filling: bool = True,
    timeout: float = TIMEOUT,
    max_bytes: int,
) -> Report:
    """Do as `inspect_sealed`, with roots that `load_roots` gave."""
    if isinstance(source, bytes):
        content, shown = source, "the file"
    elif isinstance(source, str | os.PathLike):
        content, shown = _read(source, max_bytes), repr(os.fspath(source))
    else:
        raise InvalidRequest(f"source: must be a path or bytes, not {type(source).__name__}")
    if b"%PDF-" not in content[:HEADER_WINDOW]:
        raise PdfRejected(f"{shown}: it is not a PDF", reason="not_pdf", filename=shown)
    settings = {"fetch": fetch, "form_filling": form_filling}
    found = run_worker(content, None if roots is None else [root.hex() for root in roots], settings, timeout)
    return _report(len(content), found, with_trust=roots is not None)


def _report(size: int, found: Mapping[str, Any], *, with_trust: bool) -> Report:
    seals = tuple(_seal(each) for each in found["seals"])
    problems, trust_problems = tuple(found["problems"]), tuple(found["trust_problems"])
    trusted = not (problems or trust_problems) and all(seal.trusted for seal in seals) if with_trust else None
    return Report(size, found["revisions"], seals, problems, trusted, trust_problems)


def _seal(found: Mapping[str, Any]) -> Seal:
    moment = found["signed_at"]
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return Seal(**fields | {"signed_at": None if moment is None else datetime.fromisoformat(moment)})


def _read(path: str | os.PathLike[str], most: int) -> bytes:
    """The file as it is now."""
    shown = repr(os.fspath(path))
    try:
        number = open_regular(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequest(f"source: {shown} cannot be opened: {why}") from None
    if number is None:
        raise InvalidRequest(f"source: {shown} is not a file")
    with os.fdopen(number, "rb") as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise InvalidRequest(f"source: {shown} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise InvalidRequest(f"source: {shown} has more than {most} bytes (max_sealed_bytes)")
    return content
