"""The error table (section 7) and the limits table (section 8) of the specification, row by row, with real files."""

from __future__ import annotations

from typing import Any

import pytest

from signing_async.sandbox import Sandbox
from tests import pdfs
from tests.sandbox.serving import API, Caller

# errors


@pytest.fixture(scope="module")
def refused_files() -> dict[str, tuple[str, bytes]]:
    """Files that the service does not take, and the codes."""
    report = pdfs.by_reportlab()
    return {
        **{f"encrypted with {m}": ("protected", pdfs.encrypted(report, m)) for m in ("AES-256", "RC4-128", "RC4-40")},
        "password protected": ("protected", pdfs.encrypted(report, "AES-256", user="secret")),
        "signed": ("already_signed", pdfs.signed_by_pyhanko(report)),
        "too large": ("too_large", pdfs.make_pdf(10 * 2**20 + 1)),
        "far too large": ("too_large", pdfs.make_pdf(30 * 2**20)),
        **{f"no PDF: {name}": ("not_pdf", data) for name, data in pdfs.not_pdfs().items()},
    }


async def test_422_for_protected_large_signed_or_invalid_files_keeps_nothing(
    call: Caller, signing_sandbox: Sandbox, refused_files: dict[str, Any]
) -> None:
    signing_id = await call.draft()
    for name, (code, data) in refused_files.items():
        status, body = await call.upload(signing_id, data)
        assert (status, body["code"]) == (422, code), name
        assert body["message"]
    assert signing_sandbox.documents(signing_id) == []
    folder = signing_sandbox.service.incoming().path.parent
    assert list(folder.iterdir()) == []


# limits


async def test_limit_of_400_counts_characters_not_bytes(call: Caller) -> None:
    assert await call.draft(message="ö" * 400)
    body = {"name": "A", "language": "EN", "message": "ö" * 401}
    assert (await call("POST", f"{API}/signings", json=body))[0] == 400


async def test_limit_of_14_days_starts_with_the_invitation(call: Caller, signing_sandbox: Sandbox) -> None:
    _, _, people = await call.sent(recipients=2, signing_order="sequential")
    signing_sandbox.clock.advance(days=10)
    await signing_sandbox.sign(people[0])
    signing_sandbox.clock.advance(days=10)
    assert (await signing_sandbox.sign(people[1])).is_completed
