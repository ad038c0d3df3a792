"""Records as JSON facts, and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .output import ago, iso

if TYPE_CHECKING:
    from ..models import Document, Recipient, Signing
    from .command_base import State


def signing_facts(signing: Signing) -> dict[str, Any]:
    """Return a signing's fields, without its documents."""
    names = ("language", "signing_order", "message", "is_draft", "is_completed", "cancelled_at", "updated_at")
    return {**_facts(signing, "id", "name", *names), "state": signing.state.value}


def document_facts(document: Document) -> dict[str, Any]:
    """Return a document's fields."""
    return _facts(document, "id", "name", "completed_at", "signed_file_path")


def recipient_facts(state: State, recipient: Recipient) -> dict[str, Any]:
    """Return a recipient's fields, and whether they have finished."""
    facts = _facts(recipient, "id", "email", "first_name", "last_name", "signing_method", "order")
    return {**facts, "finished": is_done(state, recipient)}


def _facts(record: Signing | Document | Recipient, *names: str) -> dict[str, Any]:
    return {**record.extra, **{name: getattr(record, name) for name in names}}


def all_facts(state: State, signing: Signing, recipients: Sequence[Recipient]) -> dict[str, Any]:
    """Return a signing's fields with its documents and recipients."""
    documents = [document_facts(document) for document in signing.documents]
    people = [recipient_facts(state, recipient) for recipient in recipients]
    return {**signing_facts(signing), "documents": documents, "recipients": people}


def is_done(state: State, recipient: Recipient) -> bool:
    """Return whether the recipient has finished."""
    return any(recipient.extra.get(field) for field in state.settings.assumptions.recipient_done_fields)


def show_signing(state: State, signing: Signing, recipients: Sequence[Recipient]) -> None:
    """Print a signing with its documents and recipients."""
    facts = [
        ("id", signing.id),
        ("state", signing.state.value),
        ("language", signing.language or ""),
        ("order", signing.signing_order or ""),
        ("updated", f"{iso(signing.updated_at)} ({ago(signing.updated_at)})" if signing.updated_at else ""),
        ("cancelled", iso(signing.cancelled_at)),
        ("message", signing.message or ""),
    ]
    state.out.facts(signing.name or "(unnamed)", [(name, value) for name, value in facts if value])
    for columns, rows, placeholder in parts_of(state, signing, recipients):
        state.out.text("")
        if rows:
            state.out.table(columns, rows)
        else:
            state.out.text(placeholder)


def parts_of(
    state: State, signing: Signing, recipients: Sequence[Recipient]
) -> list[tuple[Sequence[str], list[tuple[object, ...]], str]]:
    """Return the tables of documents and recipients: columns, rows, and the text for an empty table."""
    documents: list[tuple[object, ...]] = [
        (document.name, f"signed {iso(document.completed_at)}" if document.completed_at else "pending", document.id)
        for document in signing.documents
    ]
    people: list[tuple[object, ...]] = [
        (
            recipient.email,
            "signed" if is_done(state, recipient) else "pending",
            " ".join(part for part in (recipient.first_name, recipient.last_name) if part),
            "" if recipient.order is None else recipient.order,
            recipient.signing_method or "",
            recipient.id,
        )
        for recipient in sorted(recipients, key=lambda one: one.order or 0)
    ]
    return [
        (("DOCUMENT", "STATE", "ID"), documents, "No documents yet."),
        (("RECIPIENT", "STATE", "NAME", "ORDER", "METHOD", "ID"), people, "No recipients yet."),
    ]
