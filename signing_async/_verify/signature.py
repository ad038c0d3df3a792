"""The findings on one signature, and the text helpers for its report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

__all__ = ["Options", "Signature", "byte_count", "entry", "indication", "plain"]

LONGEST = 400
"""The maximum number of characters shown of a text from the file."""

_REFERENCE = re.compile(r"(?:Reference\(idnum=|IndirectObject\()([0-9]+)[^)]*\)")

_SHORT = {"common_name": "CN", "organization_name": "O", "organizational_unit_name": "OU", "country_name": "C"}


@dataclass(frozen=True)
class Options:
    """How to verify a file."""

    roots: Sequence[bytes] | None = None
    """Trusted certificates in DER; None skips the trust checks."""
    fetch: bool = False
    form_filling: bool = True


@dataclass
class Signature:
    """The findings on one signature, filled in step by step."""

    kind: str
    field_name: str
    value: Any
    embedded: Any = None
    status: Any = None
    """pyHanko's verdict without roots; None if the signature cannot be validated."""
    covers: int = 0
    problems: list[str] = field(default_factory=list)
    trust_problems: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    shown: bool | None = None
    level: str | None = None
    time: datetime | None = None
    time_source: str | None = None
    certification: int | None = None
    trusted: bool | None = None
    revocation: str | None = None

    @property
    def is_valid(self) -> bool:
        return self.status is not None and self.status.intact and self.status.valid

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of `sealed.Seal`."""
        return {
            "kind": self.kind,
            "field": plain(self.field_name),
            **self._names(),
            "signed_at": None if self.time is None else self.time.isoformat(),
            "time_source": self.time_source,
            "covers": self.covers,
            "revision": 0 if self.embedded is None else self.embedded.signed_revision + 1,
            "digest_algorithm": None if self.embedded is None else self.embedded.external_md_algorithm,
            "digest_right": None if self.status is None else self.status.intact,
            "key_right": None if self.status is None else self.status.valid,
            "subfilter": plain(str(entry(self.value, "/SubFilter", "")).lstrip("/")),
            "level": self.level,
            "certification": self.certification,
            "changes": self.changes,
            "shown": self.shown,
            "trusted": self.trusted,
            "revocation": self.revocation,
            "problems": self.problems,
            "trust_problems": self.trust_problems,
        }

    def _names(self) -> dict[str, str | None]:
        """Return the names in the signer's certificate if it is known to belong to the signature."""
        if self.status is None:
            return {"signer": None, "subject": None, "issuer": None}
        certificate = self.status.signing_cert
        subject, issuer = map(_parts, (certificate.subject, certificate.issuer))
        whole, issued_by = (", ".join(f"{kind}={text}" for kind, text in name) for name in (subject, issuer))
        common = next((text for kind, text in subject if kind == "CN"), whole)
        return {"signer": plain(common) or None, "subject": plain(whole), "issuer": plain(issued_by)}


def _parts(name: Any) -> list[tuple[str, str]]:
    """Return the parts of a certificate's name as pairs, such as ``("CN", "Anna Berg")``."""
    pairs = [pair for group in name.chosen for pair in group]
    return [(_SHORT.get(pair["type"].native, pair["type"].native), str(pair["value"].native)) for pair in pairs]


def entry(entries: Any, key: str, default: Any = None) -> Any:
    """Return an entry of a dictionary. pyHanko's `get` may return a reference to it instead."""
    try:
        return entries[key]
    except KeyError:
        return default


def indication(status: Any) -> str:
    """Return the ETSI EN 319 102-1 name of the reason why a certificate is not trusted; empty if it is trusted."""
    return "" if status.trust_problem_indic is None else str(status.trust_problem_indic.standard_name)


def plain(text: str) -> str:
    """Return a text from the file as one line of printable characters of limited length."""
    text = _REFERENCE.sub(r"object \1", text[: 4 * LONGEST])
    return "".join(each if each.isprintable() else " " for each in text[:LONGEST])


def byte_count(count: int) -> str:
    """Return a number of bytes as text."""
    return f"{count} byte{'s' * (count != 1)}"
