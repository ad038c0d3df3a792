"""Packages to dispatch, and a check of the sandbox's records against them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from signing_async import NewRecipient, PdfSource, SigningPackage
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf


@dataclass(frozen=True)
class Parcel:
    """A package, and what the service must hold once it is sent. Its name is unique."""

    package: SigningPackage
    documents: tuple[tuple[str, bytes], ...]
    recipients: tuple[tuple[str, int | None], ...]


def make_parcel(number: int, folder: Path, seed: int = 0) -> Parcel:
    """Return a package of one to three documents and recipients, the same in every process for the same numbers."""
    chance = random.Random(f"{seed} {number}")
    documents = []
    for index in range(chance.randint(1, 3)):
        size = chance.choice([1200, 5000, 70_000]) if index else 1200
        documents.append((f"part {index % 2}.pdf", make_pdf(size, text=f"{seed} {number} {index}", seed=number)))
    sources = []
    for index, (name, data) in enumerate(documents):
        path = folder / f"{seed}-{number}-{index}.pdf"
        if not path.exists():
            path.write_bytes(data)
        sources.append(PdfSource(path if chance.random() < 0.7 else data, name))
    order = chance.choice(["sequential", "parallel"])
    count = chance.randint(1, 3)
    emails = [f"{chance.choice(['anna', f'r{index}'])}@example.com" for index in range(count)]
    recipients = [NewRecipient(email, "Anna", f"Berg {number}") for email in emails]
    package = SigningPackage(
        f"Lease {seed}/{number}",
        chance.choice(["EN", "SV"]),
        sources,
        recipients,
        signing_order=order,
        key=f"lease {number}" if chance.random() < 0.5 else None,
    )
    orders = range(1, count + 1) if order == "sequential" else [None] * count
    return Parcel(package, tuple(documents), tuple(zip(emails, orders, strict=True)))


@dataclass
class Verdict:
    """What the sandbox holds of the packages."""

    sent: int = 0
    spare: int = 0
    """Drafts that were not sent."""
    wrong: list[str] = field(default_factory=list)


def judge(sandbox: Sandbox, parcels: Sequence[Parcel]) -> Verdict:
    """Check that each package was sent once, with exactly its documents and recipients, who were invited once."""
    verdict = Verdict()
    invitations = Counter(n.recipient_id for n in sandbox.notifications)
    by_name: dict[str, list[str]] = {}
    for signing in sandbox.signings:
        by_name.setdefault(signing.name, []).append(signing.id)
        verdict.wrong += [f"{signing.name}: sent {signing.times_sent} times"] if signing.times_sent > 1 else []
    for parcel in parcels:
        name = parcel.package.name
        signings = [sandbox.signing(one) for one in by_name.get(name, [])]
        sent = [signing for signing in signings if signing.state == "sent"]
        verdict.sent += bool(sent)
        verdict.spare += len(signings) - len(sent)
        if len(sent) > 1:
            verdict.wrong.append(f"{name}: sent as {len(sent)} signings")
        for signing in sent:
            held = sorted((one.name, sandbox.document_bytes(one.id)) for one in sandbox.documents(signing.id))
            if held != sorted(parcel.documents):
                verdict.wrong.append(f"{name}: sent with other documents: {[name for name, _ in held]}")
            people = sandbox.recipients(signing.id)
            if [(one.email, one.order) for one in people] != list(parcel.recipients):
                verdict.wrong.append(f"{name}: sent to others: {[(one.email, one.order) for one in people]}")
            if any(invitations[one.id] > 1 for one in people):
                verdict.wrong.append(f"{name}: a recipient was invited twice")
    return verdict
