"""Which records count as the effect of a call, which calls wait for each other, and what a client remembers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from signing_async import Assumptions
from signing_async.models import Document, Recipient
from signing_async.reconcile import (
    Creation,
    DocumentMatch,
    Found,
    Ledger,
    Listed,
    RecipientMatch,
    Undecidable,
)

PATH = "/api/1.0/signings/s1"
SHA256 = "ab" * 32


async def _nothing() -> Listed:
    return ()


def _document(identity: str, name: str, **extra: Any) -> Document:
    return Document(id=identity, name=name, extra=extra)


def _upload(
    ledger: Ledger,
    name: str = "a.pdf",
    read_first: Callable[[], Awaitable[Listed]] = _nothing,
    *,
    path: str = PATH,
    seconds: float = 60,
) -> Creation[Document]:
    signing = ledger.signing(path)
    match = DocumentMatch(name, 10, lambda: SHA256, Assumptions())
    deadline = asyncio.get_running_loop().time() + seconds
    return Creation("documents.upload", deadline, signing.additions, signing.documents, match, _list, read_first)


def _add(ledger: Ledger, email: str, extra: dict[str, Any] | None = None, **named: Any) -> Creation[Recipient]:
    signing = ledger.signing(PATH)
    match = RecipientMatch({"email": email, **named}, extra or {})
    deadline = asyncio.get_running_loop().time() + 60
    return Creation("recipients.add", deadline, signing.additions, signing.recipients, match, _list)


async def _list(read: Callable[[Any], Awaitable[Any]]) -> Any:
    return await read(None)


def _showing(*records: Any) -> Callable[[Any], Awaitable[Any]]:
    async def read(operation: object) -> Any:
        return records

    return read


def _pending(ledger: Ledger) -> Counter[str]:
    return ledger.signing(PATH).documents.pending


def _new_signing() -> Ledger:
    ledger = Ledger()
    ledger.note_created(PATH)
    return ledger


# Calls with one key


@pytest.mark.parametrize(
    ("add", "names"),
    [(_upload, ["Léa.pdf", "léa", " LE\u0301A.PDF ", "Léa.pdf"]), (_add, ["a@å.se", "A@Å.SE ", "a@xn--5ca.se"])],
    ids=["files", "addresses"],
)
async def test_calls_with_one_key_run_one_after_the_other_and_others_do_not_wait(add: Any, names: list[str]) -> None:
    """In whatever case and normal form, and with or without the suffix."""
    ledger, inside, most = Ledger(), 0, 0
    order: list[str] = []

    async def call(text: str) -> None:
        nonlocal inside, most
        async with add(ledger, text):
            inside += 1
            most = max(most, inside)
            order.append(text)
            await asyncio.sleep(0.001)
            inside -= 1

    names = (
        ["Léa.pdf", "léa", " LE\u0301A.PDF ", "Léa.pdf"] if add is _upload else ["a@å.se", "A@Å.SE ", "a@xn--5ca.se"]
    )
    async with add(ledger, "other"):
        await asyncio.gather(*map(call, names))
    assert (most, order) == (1, names)
    assert not ledger.signing(PATH).is_busy


async def test_documents_are_read_once_before_the_first_uploads() -> None:
    """A reading that fails ends its call, and is repeated by the next one."""
    ledger, reads = Ledger(), 0

    async def read() -> Listed:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.01)
        if reads == 1:
            raise TimeoutError("of the reading")
        return (_document("d1", "1.pdf"),)

    async def upload(name: str) -> None:
        upload = _upload(ledger, name, read)
        async with upload:
            assert await upload.find(_showing(_document("d1", "1.pdf"))) is None

    with pytest.raises(TimeoutError, match="of the reading"):
        await upload("0.pdf")
    assert _pending(ledger) == {}
    await asyncio.gather(*(upload(f"{number}.pdf") for number in range(10)))
    assert reads == 2


async def test_document_of_an_upload_that_began_during_a_reading_is_not_known() -> None:
    ledger = _new_signing()
    note = ledger.observe(PATH)
    async with _upload(ledger):
        note([_document("mine", "a.pdf")])
        assert not ledger.signing(PATH).documents.ids


# Matching documents


MINE = _document("mine", "A", size=10, sha256=SHA256.upper())
OTHER, SIMILAR, SEVERAL = "another name", "differs in its size", "more than one request"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ([], None),
        ([MINE], MINE),
        # Only a whole number and 64 hexadecimal digits are compared.
        *([[document], document] for document in (_document("d", "a.pdf", size=size) for size in ("11", True, None))),
        *([[document], document] for document in (_document("d", "a", sha256=text) for text in ("crc32:1234", None))),
        ([_document("d", "a.pdf", size=11), MINE], MINE),
        ([_document("d", "a.pdf", file_size=11)], SIMILAR),
        ([_document("d", "a.pdf", sha256="cd" * 32)], SIMILAR),
        ([_document("d", "a.pdf", checksum="CD" * 32)], SIMILAR),
        ([_document("d", "a.pdf"), MINE], SEVERAL),
        ([_document("d", "a_(1).pdf")], OTHER),
        ([_document("d", "pending.pdf")], None),
        ([_document("d", "pending.pdf"), MINE], MINE),
        ([_document("d", "pending.pdf"), _document("e", "pending.pdf")], OTHER),
        ([_document("d", "unresolved.pdf")], None),
    ],
)
async def test_document_that_counts_as_the_effect_of_an_upload(shown: list[Document], expected: Any) -> None:
    ledger = _new_signing()
    _upload(ledger, "unresolved.pdf").note_unresolved()
    upload = _upload(ledger)
    async with _upload(ledger, "pending.pdf"), upload:
        if isinstance(expected, str):
            with pytest.raises(Undecidable, match=expected) as caught:
                await upload.find(_showing(*shown))
            assert caught.value.known == tuple(shown)
            assert caught.value.may_clear is (expected != SEVERAL)
        else:
            assert await upload.find(_showing(*shown)) == (None if expected is None else Found(expected))


@pytest.mark.parametrize(
    ("value", "beside", "problem"),
    [
        (MINE, [], None),
        (MINE, [_document("d", "a", size=11)], None),
        (MINE, [_document("d", "a")], "holds 2 such records"),
        # The service rewrites files, or renames them: the other one may be an earlier attempt's.
        (_document("mine", "a", size=11), [_document("d", "a", size=11)], SIMILAR),
        (_document("mine", "a_b.pdf"), [], None),
        (_document("mine", "a_b.pdf"), [_document("d", "a_b.pdf")], OTHER),
    ],
)
async def test_success_is_confirmed_unless_another_record_may_be_an_effect_too(
    value: Document, beside: list[Document], problem: str | None
) -> None:
    upload = _upload(_new_signing())
    async with upload:
        if problem is None:
            assert await upload.confirm(_showing(value, *beside), value) == value
        else:
            with pytest.raises(Undecidable, match=problem):
                await upload.confirm(_showing(value, *beside), value)
        with pytest.raises(Undecidable, match="does not list it"):
            await upload.confirm(_showing(), value)
        upload.note_created(value)
        assert await upload.confirm(_showing(value), value) == value, "the service recognized the repeat"


# Matching recipients


ANNA = {"first_name": "Anna", "last_name": "Ek", "signing_method": "sms", "order": 1}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (Recipient("r", "ANNA@EXAMPLE.COM ", "anna", "EK"), True),
        (Recipient("r", "anna@example.com", None, "", order=1, extra={"phone": "+46-70 123"}), True),
        (Recipient("r", "anna@example.com", "Anna", "Ek", order=2), SIMILAR),
        (Recipient("r", "anna@example.com", extra={"phone": "46 70 124"}), SIMILAR),
        (Recipient("r", "anna@example.com", "Eva"), SIMILAR),
        (Recipient("r", "anna@example.com", extra={"phone": ["46 70 123"]}), SIMILAR),
        (Recipient("r", "bo@example.com", "Bo", "Ek"), False),
        (Recipient("r", "bo@example.com"), False),
        (Recipient("r", "anna+x@example.com", "Anna", "Ek"), "with another address"),
        (Recipient("r", "pending@example.com", "Anna", "Ek"), False),
        (Recipient("r", "", "Anna"), "does not give the recipients' e-mail addresses"),
    ],
)
async def test_recipient_that_counts_as_the_effect_of_an_addition(shown: Recipient, expected: bool | str) -> None:
    ledger = Ledger()
    add = _add(ledger, "Anna@example.com", {"phone": "46 70 123"}, **ANNA)
    async with _add(ledger, "pending@example.com"), add:
        if isinstance(expected, str):
            with pytest.raises(Undecidable, match=expected):
                await add.find(_showing(shown))
        else:
            assert await add.find(_showing(shown)) == (Found(shown) if expected else None)
            add.note_created(shown)
            assert await add.find(_showing(shown)) is None


# The ledger


async def test_ledger_forgets_the_least_recently_used_signing_without_a_pending_call() -> None:
    ledger, reads = Ledger(max_signings=2), 0

    async def read() -> Listed:
        nonlocal reads
        reads += 1
        return ()

    for name in ("a", "b"):
        ledger.note_created(name)
    async with _upload(ledger, "x.pdf", read, path="a"):
        for name in ("c", "d"):
            ledger.note_created(name)
        async with _upload(ledger, "y.pdf", read, path="a"), _upload(ledger, "y.pdf", read, path="d"):
            assert reads == 0
            ledger.note_created("e")
        async with _upload(ledger, "y.pdf", read, path="b"):
            assert reads == 1
