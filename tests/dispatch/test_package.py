"""A package is checked as a whole before anything is sent, is named by its content, and stays what it was."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from signing_async import (
    InvalidRequest,
    NewRecipient,
    PdfSource,
    SigningOrder,
    SigningPackage,
)
from signing_async.dispatch.package import Prepared, prepare
from signing_async.transport import wire
from tests.documents.test_source import open_files
from tests.pdfs import make_pdf

MOST = 10 * 2**20
LARGE = 1_200_000
ANNA = NewRecipient("anna@example.com", "Anna", "Berg")


GOOD = (PdfSource(make_pdf(), "a.pdf"),)


def package(documents: Any = GOOD, recipients: Any = (ANNA,), **fields: Any) -> SigningPackage:
    """A good package, but for what is given."""
    named = {"name": "Lease", "language": "EN", **fields}
    return SigningPackage(documents=documents, recipients=recipients, **named)


async def problems_of(wrong: object) -> tuple[str, ...]:
    """What is said of a package that is no good."""
    with pytest.raises(InvalidRequest) as caught:
        await prepare(wrong, MOST)
    assert str(caught.value) == "; ".join(caught.value.problems)
    return caught.value.problems


async def key_of(good: SigningPackage) -> str:
    """The name that a package gets."""
    prepared = await prepare(good, MOST)
    prepared.close()
    return prepared.key


# What is wrong


async def test_all_problems_are_reported_at_once_each_with_its_field(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "single", ["lease.pdf", b"%PDF-", bytearray(b"%PDF-"), Path("lease.pdf"), io.BytesIO(b""), 5, None]
)
async def test_single_document_is_no_list_of_documents(single: Any) -> None:
    assert await problems_of(package(single)) == (f"documents: must be a list, got {type(single).__name__}",)


async def test_package_without_documents_or_recipients_is_refused() -> None:
    assert await problems_of(package([], [])) == (
        "recipients: must not be empty",
        "documents: must not be empty",
    )
    assert await problems_of(package(recipients=ANNA)) == ("recipients: must be a list, got NewRecipient",)


async def test_object_that_is_no_package_is_refused() -> None:
    assert await problems_of({"name": "Lease"}) == ("package: must be a SigningPackage, got dict",)


@pytest.mark.parametrize("key", ["k" * 1001, "Å" * 501, "😀" * 251], ids=["one byte", "two bytes", "four bytes"])
async def test_key_of_more_than_1000_bytes_is_refused(key: str) -> None:
    (problem,) = await problems_of(package(key=key))
    assert problem == f"key: must be at most 1,000 bytes in UTF-8, got {len(key.encode()):,}: {key[:40]!r}..."
    (await prepare(package(key=key[:-1]), MOST)).close()


async def test_sequential_recipients_without_orders_are_numbered_and_partial_or_repeated_orders_are_refused() -> None:
    people = [NewRecipient(f"{name}@example.com") for name in "abc"]
    prepared = await prepare(package(recipients=people, signing_order=SigningOrder.SEQUENTIAL), MOST)
    assert [recipient["order"] for recipient in prepared.recipients] == [1, 2, 3]
    prepared = await prepare(package(recipients=people), MOST)
    assert [recipient["order"] for recipient in prepared.recipients] == [None] * 3
    orders = [NewRecipient("a@b.c", order=order) for order in (2, 1, 2)]
    assert await problems_of(package(recipients=orders, signing_order="sequential")) == (
        "recipients[2].order: 2 is the order of recipients[0]",
    )
    assert (await prepare(package(recipients=orders, signing_order="parallel"), MOST)).recipients[2]["order"] == 2
    some = [NewRecipient("a@b.c", order=1), NewRecipient("d@e.f")]
    assert await problems_of(package(recipients=some, signing_order="sequential")) == (
        "recipients[1].order: missing, though other recipients have one",
    )


def deep(levels: int) -> list[Any]:
    """A list in a list, and so on."""
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize("extra", [{"phone": object()}, {"phone": float("nan")}, {"phone": deep(100_000)}])
async def test_extra_fields_that_are_not_json_are_refused(extra: Any) -> None:
    (problem,) = await problems_of(package(recipients=[NewRecipient("a@b.c", extra=extra)]))
    assert problem.startswith("recipients[0].extra: cannot be sent as JSON")


async def test_extra_fields_changed_after_the_check_are_sent_as_checked() -> None:
    extra = {"phones": ["+46 1"]}
    prepared = await prepare(package(recipients=[NewRecipient("a@b.c", extra=extra)]), MOST)
    extra["phones"].append("+46 2")
    assert prepared.recipients[0]["extra"] == {"phones": ["+46 1"]}


@pytest.mark.parametrize("other", ["good", "bad"])
async def test_package_is_transient_if_only_the_system_prevents_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
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
        await prepare(package([path, make_pdf() if other == "good" else b"no PDF"]), 10**6)
    assert f"documents[0]: cannot open {str(path)!r}: Too many open files" in caught.value.problems
    assert len(caught.value.problems) == (1 if other == "good" else 2)
    assert caught.value.transient is (other == "good")


# Its name


async def test_same_content_has_the_same_key_whatever_its_source_and_any_change_another(tmp_path: Path) -> None:
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
        package([PdfSource(bytearray(data), "a.pdf")]),
        package([PdfSource(io.BytesIO(data), "a.pdf")]),
        package([PdfSource(stream(), "a.pdf")]),
        package((source for source in [PdfSource(data, "a.pdf")]), recipients=iter([ANNA])),
    ]
    assert len({await key_of(one) for one in same}) == 1
    changed = [
        package([PdfSource(data, "b.pdf")]),
        package([PdfSource(make_pdf(LARGE, seed=1), "a.pdf")]),
        package([PdfSource(data, "a.pdf"), PdfSource(data, "a.pdf")]),
        package([PdfSource(data, "a.pdf")], name="Lease 2"),
        package([PdfSource(data, "a.pdf")], language="SV"),
        package([PdfSource(data, "a.pdf")], message=""),
        package([PdfSource(data, "a.pdf")], signing_order="parallel"),
        package([PdfSource(data, "a.pdf")], [ANNA, ANNA]),
        package([PdfSource(data, "a.pdf")], [NewRecipient("anna@example.com", "Anna", "Berg", extra={"phone": "1"})]),
    ]
    assert len({await key_of(one) for one in [same[0], *changed]}) == 1 + len(changed)


TINY = (
    b"%PDF-1.4 1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj 2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj"
    b" 3 0 obj<</Type/Page/Parent 2 0 R>>endobj trailer<</Root 1 0 R/Size 4>>"
)
KNOWN_NAME = "0ff14c1cfc103c9a14c658eef3322a08eec226d38c9f9a0e7b52aa7c44d4d03e"


async def test_content_key_is_the_same_in_every_process_and_version() -> None:
    script = (
        "import asyncio; from tests.dispatch.test_package import *; "
        "p = package([PdfSource(TINY, 'r\\u00e9sum\\u00e9.pdf')], signing_order='sequential'); "
        "print(asyncio.run(key_of(p)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "99"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == KNOWN_NAME + "\n", done.stderr


async def test_content_key_ignores_the_normal_form_of_file_names() -> None:
    names = "re\u0301sume\u0301.pdf", "r\u00e9sum\u00e9.pdf"
    keys = {await key_of(package([PdfSource(make_pdf(), name)])) for name in names}
    assert len(keys) == 1


# It stays what it was


async def read_again(prepared: Prepared, index: int = 0) -> bytes:
    """A document's bytes as they would be uploaded."""
    out = bytearray()

    async def write(chunk: wire.Chunk) -> None:
        out.extend(chunk)

    with await prepared.documents[index].source.open() as pdf:
        await pdf.write(write, 2**20, lambda size: None)
    return bytes(out)


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_single_use_sources_are_kept_until_the_package_is_closed(size: int) -> None:
    """Also if a document is invalid."""
    first, second = (make_pdf(size, seed=seed) for seed in range(2))

    async def stream(data: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(data), 7000):
            yield data[at : at + 7000]

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    before = open_files()
    prepared = await prepare(package([stream(first), PdfSource(Pipe(second), "p.pdf")]), MOST)
    for _ in range(2):
        assert [await read_again(prepared, index) for index in range(2)] == [first, second]
    prepared.close()
    assert open_files() == before
    with pytest.raises(InvalidRequest):
        await prepare(package([stream(first), b"text"]), MOST)
    assert open_files() == before


@pytest.mark.parametrize("size", [1500, LARGE])
@pytest.mark.parametrize("kind", ["path", "bytearray", "file"])
async def test_document_that_changed_after_the_check_is_not_uploaded(tmp_path: Path, size: int, kind: str) -> None:
    path, data = tmp_path / "a.pdf", bytearray(make_pdf(size))
    path.write_bytes(data)
    with path.open("rb") as file:
        source: Any = {"path": path, "bytearray": data, "file": file}[kind]
        prepared = await prepare(package([PdfSource(source, "a.pdf")]), MOST)
        path.write_bytes(make_pdf(size))
        assert await read_again(prepared) == make_pdf(size)
        data[-20] ^= 1
        path.write_bytes(data)
        with pytest.raises(InvalidRequest, match=r"^source: a\.pdf changed after it was checked \(sha256 mismatch\)$"):
            await read_again(prepared)


# A hash of the caller's own


@pytest.mark.parametrize("size", [1500, LARGE])
async def test_document_with_another_sha256_is_found_before_anything_is_sent(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf(size))
    source = PdfSource(tmp_path / "a.pdf", sha256="0" * 64)
    digest = hashlib.sha256(make_pdf(size)).hexdigest()
    assert await problems_of(package([source])) == (
        f"documents[0]: a.pdf: sha256 mismatch: expected {source.sha256}, found {digest}",
    )


def test_repr_of_a_package_does_not_contain_documents_bytes() -> None:
    shown = repr(SigningPackage("Lease", "EN", [b"secret", "lease.pdf", PdfSource(b"secret", "a.pdf")], [ANNA]))
    assert "documents=[<6 bytes>, 'lease.pdf', PdfSource('a.pdf')]" in shown
    assert "documents=5" in repr(SigningPackage("Lease", "EN", 5, [ANNA]))  # type: ignore[arg-type]  # wrong on purpose
