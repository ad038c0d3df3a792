"""Judge a sealed PDF with pyHanko (extra `verify`): its signatures, what they cover, later changes, and the signers.

The file is read in a separate worker process with limits on time and memory. The result is not a legal opinion.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import attrs

from . import _checks
from ._files import unusable
from ._verify.process import run_worker
from ._verify.roots import Trust, load_roots
from .assumptions import Assumptions
from .errors import InvalidRequest, PdfRejected

if find_spec("pyhanko") is None:
    raise ModuleNotFoundError("signing_async.sealed needs pyHanko: pip install 'signing-async[verify]'", name="pyhanko")

__all__ = ["Report", "Seal", "SealedReport", "Trust", "inspect_sealed"]

_HEADER_WINDOW = 1024
_TIMEOUT = 60.0


@attrs.frozen
class Seal:
    """One signature of a sealed PDF. What is None is unknown, or does not apply."""

    kind: Literal["signature", "timestamp"]
    field: str
    """The name of the form field."""
    signer: str | None
    """The common name in the signer's certificate, else the whole name."""
    subject: str | None
    issuer: str | None
    signed_at: datetime | None
    time_source: Literal["timestamp", "signer"] | None
    covers: int
    """The number of bytes it covers from the start of the file; 0 if its byte range is invalid or unknown."""
    revision: int
    """The last revision of the file that it covers, starting at 1; 0 if unknown."""
    digest_algorithm: str | None
    digest_right: bool | None
    """Whether the covered bytes are unchanged."""
    key_right: bool | None
    """Whether the certificate's key made the signature."""
    subfilter: str
    """The format, such as ``ETSI.CAdES.detached``."""
    level: Literal["B-B", "B-T", "B-LT", "B-LTA"] | None
    """The PAdES level that the contents of the file reach."""
    certification: Literal[1, 2, 3] | None
    """What a certification permits: 1 nothing, 2 form filling and signatures, 3 annotations as well."""
    changes: tuple[str, ...]
    """Sentences, each on one allowed change after this signature."""
    shown: bool | None
    """Whether it covers what the document shows now: nothing visible was added or changed."""
    trusted: bool | None
    """Whether the certificates lead to the given roots; None without roots."""
    revocation: Literal["good", "revoked", "unknown"] | None
    """The revocation status of its certificates; None without roots."""
    problems: tuple[str, ...]
    trust_problems: tuple[str, ...]


@attrs.frozen
class Report:
    """The result of `inspect_sealed`. It is not a legal opinion."""

    size: int
    revisions: int
    """The number of revisions: each appended update adds one (a linearized file starts at 2); 0 if unreadable."""
    seals: tuple[Seal, ...]
    """The signatures, sorted by the number of bytes they cover."""
    problems: tuple[str, ...]
    """Sentences, each on one problem of the file or of a signature."""
    trusted: bool | None
    """Whether the file is sound and all its signatures and timestamps lead to the given roots; None without roots."""
    trust_problems: tuple[str, ...]
    """Sentences, each on one signature or timestamp that is not trusted."""

    @property
    def sound(self) -> bool:
        """Whether the file is signed, all signatures are valid, and only allowed changes follow them.

        A document timestamp alone is no signature.
        """
        return not self.problems

    @property
    def bytes_after(self) -> int:
        """The number of bytes after the range that the last signature covers."""
        return self.size - max((seal.covers for seal in self.seals), default=0)

    @property
    def signers(self) -> tuple[str, ...]:
        """The names of the signers, without duplicates."""
        names = (seal.signer for seal in self.seals if seal.kind == "signature" and seal.signer)
        return tuple(dict.fromkeys(names))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible values."""
        fields = attrs.asdict(
            self, value_serializer=lambda _, __, value: value.isoformat() if isinstance(value, datetime) else value
        )
        return {"sound": self.sound, "signers": list(self.signers), "bytes_after": self.bytes_after, **fields}


SealedReport = Report
"""The former name of `Report`."""


def inspect_sealed(
    source: str | os.PathLike[str] | bytes,
    *,
    trust: Trust | Iterable[Trust] | None = None,
    fetch: bool = False,
    form_filling: bool = True,
    timeout: float = _TIMEOUT,
    max_bytes: int = Assumptions().max_sealed_bytes,
) -> Report:
    """Judge a sealed PDF, given as a path or as bytes.

    With ``trust`` the report also says whether the certificates lead to these roots and are not revoked according to
    the revocation data in the file; with ``fetch`` the services that the certificates name are asked, too. A signature
    may be followed by validation data, timestamps, further signatures, document information and, unless
    ``form_filling`` is False or the document forbids it, values of form fields.

    Raises `InvalidRequest` if the file cannot be read or is larger than ``max_bytes``, and `PdfRejected` if it is not
    a PDF. A file that takes more than ``timeout`` seconds, or too much memory, is not sound. If the worker process is
    killed or cannot be started, for example because the machine runs out of memory, a transient `SigningError` is
    raised: nothing is known about the file. A frozen application has no Python to start: `ConfigurationError`. In a
    coroutine, call ``await asyncio.to_thread(inspect_sealed, path)``. ::

        report = inspect_sealed("archive/contract.pdf", trust="roots.pem")
        if not (report.sound and report.trusted):
            print(*report.problems, *report.trust_problems, sep="\\n")
    """
    roots = None if trust is None else load_roots(trust)
    _checks.number("timeout", timeout, above=0, error=InvalidRequest)
    _checks.integer("max_bytes", max_bytes, error=InvalidRequest)
    if isinstance(source, bytes):
        content, shown = source, "the file"
    elif isinstance(source, str | os.PathLike):
        shown = repr(os.fspath(source))
        try:
            if not stat.S_ISREG(Path(source).stat().st_mode):  # opening a pipe would block
                raise ValueError("not a regular file")
            with Path(source).open("rb") as file:
                content = file.read(max_bytes + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise unusable(f"source: cannot open {shown}: {reason}", error) from None
        if len(content) > max_bytes:
            raise InvalidRequest(f"source: {shown} is larger than {max_bytes} bytes (max_sealed_bytes)")
    else:
        raise InvalidRequest(f"source: must be a path or bytes, got {type(source).__name__}")
    if b"%PDF-" not in content[:_HEADER_WINDOW]:
        raise PdfRejected(f"{shown}: not a PDF", reason="not_pdf", filename=shown)
    settings = {"fetch": fetch, "form_filling": form_filling}
    found = run_worker(content, None if roots is None else [root.hex() for root in roots], settings, timeout)
    seals = tuple(_seal(fields) for fields in found["seals"])
    problems, trust_problems = tuple(found["problems"]), tuple(found["trust_problems"])
    trusted = None
    if roots is not None:
        trusted = not (problems or trust_problems) and all(seal.trusted for seal in seals)
    return Report(len(content), found["revisions"], seals, problems, trusted, trust_problems)


def _seal(given: dict[str, Any]) -> Seal:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if fields["signed_at"] is not None:
        fields["signed_at"] = datetime.fromisoformat(fields["signed_at"])
    return Seal(**fields)
