"""A package is checked as a whole before anything is sent, is named by its content, and stays what it was."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from signing_async import (
    Claim,
    InvalidRequest,
    NewRecipient,
    PdfSource,
    SigningClient,
    SigningOrder,
    SigningPackage,
    SqliteJournal,
)
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import MemoryJournal
from tests.documents.test_source import open_files
from tests.pdfs import make_pdf

LARGE = 1_200_000
ANNA = NewRecipient("anna@example.com", "Anna", "Berg")
GOOD = (PdfSource(make_pdf(), "a.pdf"),)


def package(documents: Any = GOOD, recipients: Any = (ANNA,), **fields: Any) -> SigningPackage:
    """A good package, but for what is given."""
    named = {"name": "Lease", "language": "EN", **fields}
    return SigningPackage(documents=documents, recipients=recipients, **named)


@pytest.fixture
def problems_of(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> Any:
    """Dispatches an invalid package, and returns its problems; nothing is sent or written."""

    async def problems_of(wrong: Any) -> tuple[str, ...]:
        with pytest.raises(InvalidRequest) as caught:
            await client.dispatch(wrong, tmp_path / "the.journal")
        assert str(caught.value) == "; ".join(caught.value.problems)
        assert sandbox.requests == []
        assert not (tmp_path / "the.journal").exists()
        return caught.value.problems

    return problems_of


class Keys(MemoryJournal):
    """A journal that notes the keys, and sends nothing."""

    async def claim(self, key: str) -> Claim | None:
        self.states[key] = ""
        raise InvalidRequest("enough")


async def key_of(client: SigningClient, good: SigningPackage) -> str:
    """Return the key that a package gets."""
    journal = Keys()
    with pytest.raises(InvalidRequest, match="enough"):
        await client.dispatch(good, journal)
    (key,) = journal.states
    return key


async def test_all_problems_are_reported_at_once_each_with_its_field(problems_of: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.pdf"
    text.write_text("Dear Sir or Madam")
    wrong = SigningPackage(
        " ",
        "DE",
        [PdfSource(make_pdf(), "good.pdf"), text, 5, tmp_path / "missing.pdf"],  # type: ignore[list-item]  # wrong
        [NewRecipient("anna", order=0), ANNA, NewRecipient("b@example.com", extra={"order": 1}), "c@example.com"],  # type: ignore[list-item]  # wrong
        message="m" * 401,
        signing_order="both",
        key="",
    )
    problems = await problems_of(wrong)
    expected = [
        "name: must be a non-empty string",
        "language: must be EN or SV, got 'DE'",
        "signing_order: must be sequential or parallel, got 'both'",
        "message: must be at most 400 characters",
        "key: must be a non-empty string",
        "recipients[0].email: must be an e-mail address, got 'anna'",
        "recipients[0].order: must be an integer of at least 1, got 0",
        "recipients[2].extra: pass order as a separate argument",
        "recipients[3]: must be a NewRecipient, got str",
        "documents[1]: text.pdf: not a PDF",
        "documents[2]: must be a path, bytes, a binary file or an async iterable, got int",
        f"documents[3]: cannot open {str(tmp_path / 'missing.pdf')!r}",
    ]
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(start)


_SEQUENTIAL = {"signing_order": "sequential"}


@pytest.mark.parametrize(
    ("wrong", "problems"),
    [
        ({"name": "Lease"}, ["package: must be a SigningPackage, got dict"]),
        (package("lease.pdf"), ["documents: must be a list, got str"]),
        (package(recipients=None, signing_order="sequential"), ["recipients: must be a list, got NoneType"]),
        (
            package([], [ANNA, NewRecipient("d@e.f", order=2)], **_SEQUENTIAL),
            ["recipients[0].order: missing, though other recipients have one", "documents: must not be empty"],
        ),
        (package(key="Å" * 501), ["key: must be at most 1,000 bytes in UTF-8, got 1,002"]),
        (
            package(recipients=[NewRecipient("a@b.c", extra={"phone": float("nan")})]),
            ["recipients[0].extra: cannot be sent as JSON"],
        ),
        (
            package(recipients=[NewRecipient("a@b.c", order=order) for order in (2, 1, 2)], **_SEQUENTIAL),
            ["recipients[2].order: 2 is the order of recipients[0]"],
        ),
    ],
)
async def test_invalid_package_is_refused(problems_of: Any, wrong: Any, problems: list[str]) -> None:
    found = await problems_of(wrong)
    assert [one[: len(start)] for one, start in zip(found, problems, strict=True)] == problems


async def test_large_file_with_another_hash_is_refused(problems_of: Any, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf(LARGE))
    (problem,) = await problems_of(package([PdfSource(tmp_path / "a.pdf", sha256="0" * 64)]))
    assert problem.startswith(f"documents[0]: a.pdf: sha256 mismatch: expected {'0' * 64}, found ")


@pytest.mark.parametrize("given", [[None] * 3, [3, 1, 2]])
async def test_sequential_recipients_without_orders_are_numbered(
    sandbox: Sandbox, client: SigningClient, given: list[int | None]
) -> None:
    people = [NewRecipient(f"{name}@example.com", order=one) for name, one in zip("abc", given, strict=True)]
    for order, numbers in ((SigningOrder.SEQUENTIAL, given if given[0] else [1, 2, 3]), (None, given)):
        signing = await client.dispatch(package(recipients=people, signing_order=order))
        assert [one.order for one in sandbox.recipients(signing.id)] == numbers


@pytest.mark.parametrize("other", ["good", "bad"])
async def test_package_is_transient_if_only_the_system_prevents_its_check(
    client: SigningClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf())
    real = os.open

    def no_descriptor_left(target: Any, *arguments: Any, **named: Any) -> int:
        if target == path:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(target, *arguments, **named)

    monkeypatch.setattr(os, "open", no_descriptor_left)
    with pytest.raises(InvalidRequest) as caught:
        await client.dispatch(package([path, make_pdf() if other == "good" else b"no PDF"]))
    assert f"documents[0]: cannot open {str(path)!r}: Too many open files" in caught.value.problems
    assert caught.value.transient is (other == "good")


async def test_same_content_has_the_same_key_whatever_its_source_and_any_change_another(
    client: SigningClient, tmp_path: Path
) -> None:
    data = make_pdf(LARGE)
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.pdf").write_bytes(data)

    async def stream() -> AsyncIterator[bytes]:
        yield data

    same = [
        package([tmp_path / "here" / "a.pdf"]),
        package([str(tmp_path / "there" / "a.pdf")]),
        package([PdfSource(data, "a.pdf")]),
        package([PdfSource(stream(), "a.pdf")]),
        package((source for source in [PdfSource(data, "a.pdf")]), recipients=iter([ANNA])),
    ]
    assert len({await key_of(client, one) for one in same}) == 1
    changed = [
        package([PdfSource(data, "b.pdf")]),
        package([PdfSource(make_pdf(LARGE, seed=1), "a.pdf")]),
        package([PdfSource(data, "a.pdf"), PdfSource(data, "a.pdf")]),
        package([PdfSource(data, "a.pdf")], name="Lease 2"),
        package([PdfSource(data, "a.pdf")], message=""),
        package([PdfSource(data, "a.pdf")], signing_order="parallel"),
        package([PdfSource(data, "a.pdf")], [ANNA, ANNA]),
        package([PdfSource(data, "a.pdf")], [NewRecipient("anna@example.com", "Anna", "Berg", extra={"phone": "1"})]),
    ]
    assert len({await key_of(client, one) for one in [same[2], *changed]}) == 1 + len(changed)


TINY = (
    b"%PDF-1.4 1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj 2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj"
    b" 3 0 obj<</Type/Page/Parent 2 0 R>>endobj trailer<</Root 1 0 R/Size 4>>"
)


async def test_content_key_is_the_same_in_every_version_and_for_every_normal_form_of_a_name(
    client: SigningClient,
) -> None:
    for name in ("re\u0301sume\u0301.pdf", "r\u00e9sum\u00e9.pdf"):
        key = await key_of(client, package([PdfSource(TINY, name)], signing_order="sequential"))
        assert key == "0ff14c1cfc103c9a14c658eef3322a08eec226d38c9f9a0e7b52aa7c44d4d03e"


async def test_single_use_sources_are_kept_until_the_package_ends(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """Their documents are uploaded again to a second draft. Also if a document is invalid, nothing stays open."""
    data = [make_pdf(LARGE, seed=0), make_pdf(seed=1)]

    async def stream() -> AsyncIterator[bytes]:
        for at in range(0, LARGE, 7000):
            yield data[0][at : at + 7000]

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    def buffers() -> list[str]:
        return [name for name in open_files() if "(deleted)" in name]

    before = buffers()
    sandbox.faults.add("documents.upload", "drop-before-commit", skip=1)
    sandbox.faults.add("signings.get", "503", times=5)
    sources = [PdfSource(stream(), "s.pdf"), PdfSource(Pipe(data[1]), "p.pdf")]
    async with SqliteJournal(tmp_path / "journal") as journal:
        signing = await client.dispatch(package(sources), journal)
    assert [sandbox.document_bytes(one.id) for one in sandbox.documents(signing.id)] == data
    assert len(sandbox.signings) == 2
    with pytest.raises(InvalidRequest):
        await client.dispatch(package([stream(), b"text"]))
    assert buffers() == before


@pytest.mark.parametrize(("kind", "size"), [("path", 1500), ("path", LARGE), ("bytearray", 1500), ("file", 1500)])
async def test_what_changed_after_the_check_is_not_sent(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, kind: str, size: int
) -> None:
    path, data, extra = tmp_path / "a.pdf", bytearray(make_pdf(size)), {"phone": "+46 1"}
    path.write_bytes(data)

    class Changing(MemoryJournal):
        async def claim(self, key: str) -> Claim | None:
            extra["phone"] += "2"
            data[-20] ^= 1
            path.write_bytes(data)
            return await super().claim(key)

    with path.open("rb") as file:
        source: Any = {"path": path, "bytearray": data, "file": file}[kind]
        with pytest.raises(InvalidRequest, match=r"a\.pdf changed after it was checked \(sha256 mismatch\)"):
            await client.dispatch(package([PdfSource(source, "a.pdf")]), Changing())
    assert sandbox.documents() == []
    signing = await client.dispatch(package(recipients=[NewRecipient("a@b.c", extra=extra)]), Changing())
    assert sandbox.recipients(signing.id)[0].phone == "+46 12"


def test_repr_of_a_package_does_not_contain_documents() -> None:
    assert "secret" not in repr(SigningPackage("Lease", "EN", [b"secret", PdfSource(b"secret", "a.pdf")], [ANNA]))
