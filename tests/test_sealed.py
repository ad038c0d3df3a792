"""What is said of sealed PDFs: of sound ones, of every way to change one, and of files made to mislead or to cost."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asn1crypto.core import OctetString  # type: ignore[import-untyped]  # asn1crypto has no type hints

from signing_async import InvalidRequest, PdfRejected, sealed
from signing_async.sealed import inspect_sealed
from signing_async.sealed_cms import MalformedCms, read_cms, read_time
from tests import pdfs
from tests.needs import needs
from tests.sealed_pdfs import WHEN, as_ber, cms, elements, sealed_by_sandbox, signed_pdf, timestamp


def test_a_sealed_pdf_is_sound() -> None:
    """Who sealed it, when, how often the file was saved, and that nothing came after."""
    report = inspect_sealed(sealed_by_sandbox())
    assert report.sound
    assert report.problems == ()
    assert report.signers == ("Signing Sandbox Seal (no legal value)",)
    assert (report.revisions, report.bytes_after, report.size) == (2, 0, len(sealed_by_sandbox()))
    (seal,) = report.seals
    assert (seal.kind, seal.signed_at, seal.revision, seal.covers) == ("signature", WHEN, 2, report.size)
    assert (seal.digest_algorithm, seal.digest_right, seal.key_right) == ("sha256", True, True)
    assert seal.issuer == "CN=Signing Sandbox CA (no legal value)"


def test_a_path_is_read_as_bytes_are(tmp_path: Path) -> None:
    """And everything found can be written as JSON."""
    (tmp_path / "sealed.pdf").write_bytes(sealed_by_sandbox())
    report = inspect_sealed(tmp_path / "sealed.pdf")
    assert report == inspect_sealed(str(tmp_path / "sealed.pdf")) == inspect_sealed(sealed_by_sandbox())
    told = json.loads(json.dumps(report.as_dict()))
    assert (told["sound"], told["seals"][0]["signed_at"]) == (True, WHEN.isoformat())


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


CHANGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a byte of the original": (lambda data: _flipped(data, 400), "its digest is wrong"),
    "a byte behind the signature": (lambda data: _flipped(data, data.index(b"/Reason") + 12), "its digest is wrong"),
    "one byte appended": (lambda data: data + b"\n", "it was changed after the last signature: 1 byte behind"),
    "an update appended": (
        lambda data: pdfs.update(data, {5: pdfs.stream_object(b"BT (You owe more) Tj ET")}),
        "behind what it covers, in 1 later revision",
    ),
    "two updates appended": (
        lambda data: pdfs.update(pdfs.update(data, {5: pdfs.stream_object(b"")}), {5: pdfs.stream_object(b"x")}),
        "in 2 later revisions",
    ),
    "the end cut off": (lambda data: data[:-40], "its structure cannot be followed"),
    "half cut off": (lambda data: data[: len(data) // 2], "its structure cannot be followed"),
    "something in the unused room": (
        lambda data: data.replace(b"0" * 64 + b">", b"0" * 60 + b"abcd>", 1),
        "something else stands behind it in its place",
    ),
    "its own revision taken away": (lambda data: data[: data.index(b"%%EOF") + 6], "it is not signed"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_changed_file_is_not_sound(change: Callable[[bytes], bytes], words: str) -> None:
    """And it is said how it was changed."""
    changed = change(sealed_by_sandbox())
    assert changed != sealed_by_sandbox()
    report = inspect_sealed(changed)
    assert not report.sound
    assert words in " / ".join(report.problems)


def test_no_single_changed_byte_goes_unseen() -> None:
    """Wherever it is in what the signature covers."""
    data = sealed_by_sandbox()
    start = data.rindex(b"0" * 64 + b">")
    chance = random.Random(3)
    for at in chance.sample([at for at in range(len(data)) if not start - 8000 < at < start + 65], 150):
        changed = bytearray(data)
        changed[at] = chance.choice([byte for byte in range(256) if byte != data[at]])
        try:
            assert not inspect_sealed(bytes(changed)).sound, at
        except PdfRejected:
            assert at < 5


RANGES: dict[str, tuple[Callable[[int, int, int], tuple[object, ...]], str]] = {
    "a hole too large": (lambda start, end, size: (0, start - 20, end, size - end), "leaves out bytes"),
    "a hole too large behind": (lambda start, end, size: (0, start, end + 9, size - end - 9), "leaves out bytes"),
    "no hole": (lambda start, end, size: (0, start, start, size - start), "leaves out bytes"),
    "its end past the file's": (lambda start, end, size: (0, start, end, size - end + 7), "ends 7 bytes past"),
    "an end that no number holds": (lambda start, end, size: (0, start, end, 10**17), "past the file's end"),
    "not from the first byte": (lambda start, end, size: (1, start - 1, end, size - end), "the file's first 1 byte"),
    "backwards": (lambda start, end, size: (0, end, start, size - start), "makes no sense"),
    "negative": (lambda start, end, size: (0, start, end, -1), "makes no sense"),
    "six numbers": (lambda start, end, size: (0, 9, 12, start - 12, end, size - end), "has 6 numbers, not 4"),
    "two numbers": (lambda start, end, size: (0, size), "is no list of 4 numbers"),
    "words": (lambda start, end, size: ("true", start, end, size), "has 4 numbers, not 4"),
    "its end before the file's": (lambda start, end, size: (0, start, end, size - end - 5), "5 bytes behind"),
}


@pytest.mark.parametrize(("ranged", "words"), RANGES.values(), ids=RANGES)
def test_a_byte_range_has_to_be_everything_but_the_signature(
    ranged: Callable[[int, int, int], tuple[object, ...]], words: str
) -> None:
    """However well the digest matches what the range does cover."""
    report = inspect_sealed(signed_pdf(cms, ranged=ranged))
    assert not report.sound
    assert words in " / ".join(report.problems)


KINDS: dict[str, Callable[[bytes], bytes]] = {
    "ECDSA": cms,
    "RSA": partial(cms, kind="rsa"),
    "RSA-PSS": partial(cms, kind="rsa", pss=True),
    "Ed25519": partial(cms, kind="ed25519", algorithm="sha512"),
    "SHA-384": partial(cms, algorithm="sha384"),
    "named by its key": partial(cms, by_key=True),
    "without attributes": partial(cms, attributes=False),
    "BER": lambda data: as_ber(cms(data)),
}


@pytest.mark.parametrize("sign", KINDS.values(), ids=KINDS)
def test_signatures_of_every_kind(sign: Callable[[bytes], bytes]) -> None:
    """Are sound where they are right, and not where a byte of what they cover is changed."""
    data = signed_pdf(sign)
    report = inspect_sealed(data)
    assert report.problems == ()
    assert report.signers == ("Björn Åkesson",)
    assert report.seals[0].subject == "C=SE, O=Åkesson AB, CN=Björn Åkesson"
    assert (report.seals[0].key_right, report.seals[0].signed_at) == (True, WHEN)
    assert not inspect_sealed(_flipped(data, 300)).sound


def test_a_timestamp_is_told_apart() -> None:
    """It vouches for a moment, and nobody signs by it."""
    data = signed_pdf(timestamp, entries=b"")
    report = inspect_sealed(data)
    assert (report.problems, report.signers, report.seals[0].kind) == ((), (), "timestamp")
    assert report.seals[0].signed_at == WHEN
    assert "its timestamp: what it covers is not what was signed" in inspect_sealed(_flipped(data, 300)).problems[0]


@pytest.mark.parametrize("write", [bytes, as_ber], ids=["DER", "BER"])
def test_an_old_signature_that_wraps_a_sha1(write: Callable[[bytes], bytes]) -> None:
    """Its digest is compared, and it is not relied on."""
    import hashlib

    def sign(data: bytes) -> bytes:
        return write(cms(data, content=hashlib.sha1(data).digest()))

    report = inspect_sealed(signed_pdf(sign))
    assert report.problems == ("its signature: its digest is made with sha1, which can be forged",)
    assert report.seals[0].digest_right
    wrong = inspect_sealed(signed_pdf(lambda data: cms(data, content=b"x" * 20)))
    assert wrong.seals[0].digest_right is False


def _with_attribute(signed: Any, name: str, value: Any) -> None:
    attributes = signed["signer_infos"][0]["signed_attrs"]
    attributes.append({"type": name, "values": [value]})


def _wrap(signed: Any) -> None:
    signed["encap_content_info"]["content"] = b"something else"


SIGNATURES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "of something else": (lambda data: cms(b"something else"), "its digest is wrong"),
    "with another wrapped": (lambda data: cms(data, edit=_wrap), "the digest of what it wraps is wrong"),
    "without its certificate": (partial(cms, certificates=False), "the certificate of its signer did not come with it"),
    "with another's certificate": (
        lambda data: cms(data, edit=lambda signed: signed["certificates"].__delitem__(1)),
        "the certificate of its signer did not come with it",
    ),
    "with SHA-1": (partial(cms, algorithm="sha1"), "its digest is made with sha1"),
    "with MD5": (partial(cms, kind="rsa", algorithm="md5"), "its digest is made with md5"),
    "without a digest": (
        lambda data: cms(data, edit=lambda signed: signed["signer_infos"][0].__setitem__("signed_attrs", [])),
        "it does not say which digest it signs",
    ),
    "with two digests": (
        lambda data: cms(data, edit=lambda signed: _with_attribute(signed, "message_digest", b"x" * 32)),
        "an attribute stands in it twice",
    ),
    "of two signers": (
        lambda data: cms(data, edit=lambda signed: signed["signer_infos"].append(signed["signer_infos"][0])),
        "it has to have one signer, not several",
    ),
    "of nobody": (
        lambda data: cms(data, edit=lambda signed: signed.__setitem__("signer_infos", [])),
        "it has to have one signer, not none",
    ),
    "that is other data": (
        lambda data: cms(data).replace(
            b"\x2a\x86\x48\x86\xf7\x0d\x01\x07\x02", b"\x2a\x86\x48\x86\xf7\x0d\x01\x07\x01", 1
        ),
        "it is no signed data",
    ),
    "with an unknown digest": (
        lambda data: cms(
            data,
            edit=lambda signed: signed["signer_infos"][0].__setitem__("digest_algorithm", {"algorithm": "1.2.3.4"}),
        ),
        "its digest's algorithm is not known here (1.2.3.4)",
    ),
    "that is no DER": (lambda data: b"\x04\x02hi", "it holds an element of kind 4 where one of kind 48 belongs"),
    "that is nothing": (lambda data: b"\x30\x00", "an element is missing in it"),
    "that is cut off": (lambda data: cms(data)[:3] + b"\x7f" + cms(data)[4:500], "it breaks off"),
    "that has an endless length": (lambda data: b"\x30\xff" + b"\xff" * 127, "it breaks off"),
    "that has a primitive without length": (lambda data: b"\x04\x80\0\0", "it breaks off"),
    "that has a strange tag": (lambda data: b"\x30\x03\x1f\x01\x00", "it holds an element of an unknown kind"),
    "that never ends": (lambda data: b"\x30\x80" * 1400, "it breaks off"),
    "with an empty element": (lambda data: b"\x30\x04\x06\x00\x30\x00", "an identifier in it is empty"),
    "with an empty wrapper": (
        lambda data: b"\x30\x0d\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x07\x02\xa0\x00",
        "an element of it is empty",
    ),
    "of a signer that is none": (
        lambda data: (
            b"\x30\x2c\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x07\x02\xa0\x1f\x30\x1d\x02\x01\x01\x31\x00"
            b"\x30\x0b\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x07\x01\x31\x09\x30\x07\x02\x01\x01\x02\x02\x01\x01"
        ),
        "it holds an element of kind 2 where one of kind 48 belongs",
    ),
    "whose attributes were changed": (
        lambda data: cms(data, edit=lambda signed: _with_attribute(signed, "1.2.3.5", OctetString(b"x"))),
        "the key of its certificate did not make it",
    ),
}


@pytest.mark.parametrize(("sign", "words"), SIGNATURES.values(), ids=SIGNATURES)
def test_a_signature_has_to_be_right(sign: Callable[[bytes], bytes], words: str) -> None:
    """What is wrong with it is said, whatever it is."""
    report = inspect_sealed(signed_pdf(sign))
    assert not report.sound
    assert words in " / ".join(report.problems)


def test_a_signature_that_cannot_be_checked_is_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it names no digest, only `cryptography` can tell; the digest of others is compared without."""
    plain, bare = signed_pdf(cms), signed_pdf(partial(cms, attributes=False))
    for name in [name for name in sys.modules if name.startswith("cryptography.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    report = inspect_sealed(plain)
    assert (report.sound, report.seals[0].digest_right, report.seals[0].key_right) == (True, True, None)
    assert "it cannot be checked here" in inspect_sealed(bare).problems[0]


def test_several_signatures() -> None:
    """The last one has to cover everything; the earlier ones cover the revisions that they were made in."""
    once = pdfs.signed_by_pyhanko(pdfs.make_pdf())
    twice = pdfs.signed_by_pyhanko(once, field="Second", certify=False)
    report = inspect_sealed(twice)
    assert report.sound
    assert [(seal.revision, seal.covers) for seal in report.seals] == [(2, len(once)), (3, len(twice))]
    assert (report.revisions, report.signers) == (3, ("Somebody Else",))
    changed = inspect_sealed(_flipped(twice, 400))
    assert [text.split(":")[0] for text in changed.problems] == ["signature 1", "signature 2"]


def test_data_for_long_term_validation_is_named() -> None:
    """It is added after signing, as forgeries are: the file is not called sound, and it is said why that may be."""
    signed = pdfs.signed_by_pyhanko(pdfs.make_pdf())
    objects = {1: b"<</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[<</FT/Sig/T(a)/V 99 0 R>>]>>/DSS<</Certs[]>>>>"}
    number = re.search(rb"/V (\d+) 0 R", signed)
    assert number is not None
    later = pdfs.update(signed, {1: objects[1].replace(b"99", number[1])}, size=20)
    report = inspect_sealed(later)
    assert not report.sound
    assert report.problems[0].endswith("in 1 later revision, with data for long-term validation among it")


@pytest.mark.parametrize("size", range(8))
def test_a_linearized_file_was_saved_once(size: int) -> None:
    """Although it has two cross-reference sections from the start; an update counts as one more, wherever it lies."""
    linearized = pdfs.rewritten(pdfs.by_reportlab(), linearize=True)
    catalog = re.search(rb"/Root (\d+) 0 R", linearized)
    assert catalog is not None
    updated = pdfs.update(linearized, {90: pdfs.stream_object(b"x" * size)}, root=int(catalog[1]))
    assert (inspect_sealed(linearized).revisions, inspect_sealed(updated).revisions) == (1, 2)


def test_a_certified_document_has_one_signature() -> None:
    """Although the form and the catalog both lead to it."""
    report = inspect_sealed(pdfs.signed_by_pyhanko(pdfs.make_pdf(), certify=True))
    assert (report.sound, len(report.seals)) == (True, 1)


def test_signatures_that_overlap_are_not_sound() -> None:
    """Two that each cover the other: an honest second one is appended to what the first covers."""
    room = cms(b"x").hex().encode()
    value = b"<</Type/Sig/ByteRange" + b"[0 %010d %010d %010d]/Contents<" + room + b">>>"
    objects = {7: value % (0, 0, 0), 8: value % (0, 0, 0), 6: pdfs.FIELD + b"/V 7 0 R>>", 9: pdfs.FIELD + b"/V 8 0 R>>"}
    blank = pdfs.with_catalog(b"/AcroForm<</Fields[6 0 R 9 0 R]>>", objects)
    holes = [(found.start() + 9, found.end()) for found in re.finditer(rb"/Contents<[0-9a-f]+>", blank)]
    for number, (start, end) in zip((7, 8), holes, strict=True):
        objects[number] = value % (start, end, len(blank) - end)
    report = inspect_sealed(pdfs.with_catalog(b"/AcroForm<</Fields[6 0 R 9 0 R]>>", objects))
    assert "stands inside of what another signature covers" in " / ".join(report.problems)


NOT_SIGNED = {
    "no form": pdfs.make_pdf,
    "an empty signature field": pdfs.with_signature_field,
    "a linearized file": lambda: pdfs.rewritten(pdfs.by_reportlab(), linearize=True),
    **{name: lambda name=name: pdfs.decoys()[name] for name in pdfs.decoys() if name != "words after the end"},
}


@pytest.mark.parametrize("make", NOT_SIGNED.values(), ids=NOT_SIGNED)
def test_a_file_without_a_signature(make: Callable[[], bytes]) -> None:
    """Is called that, whatever words are in it."""
    report = inspect_sealed(make())
    assert (report.sound, report.problems, report.revisions) == (False, ("it is not signed",), 1)
    assert report.bytes_after == report.size


@pytest.mark.parametrize("in_field", [False, True])
def test_usage_rights_are_no_signature(in_field: bool) -> None:
    """Adobe's, which let its reader save a form."""
    report = inspect_sealed(pdfs.with_usage_rights(in_field=in_field))
    assert report.problems == ("it carries usage rights, and no signature",)


def _with_value(value: bytes) -> bytes:
    return pdfs.with_signature_field(b"/V 7 0 R", more={7: value})


STRUCTURES = {
    "in an object stream": (
        lambda: pdfs.rewritten(_with_value(b"<</Type/Sig>>"), object_streams=True),
        "it is no object of its own",
    ),
    "inside of its field": (
        lambda: pdfs.with_signature_field(b"/V<</ByteRange[0 1 2 3]/Contents<3000>>>"),
        "it is no object of its own",
    ),
    "without contents": (lambda: _with_value(b"<</ByteRange[0 1 2 3]>>"), "/Contents stands in it 0 times"),
    "without a byte range": (lambda: _with_value(b"<</Contents<3000>>>"), "/ByteRange stands in it 0 times"),
    "with two contents": (
        lambda: _with_value(b"<</ByteRange[0 1 2 3]/Contents<30>/Cont#65nts<3000>>>"),
        "/Contents stands in it 2 times",
    ),
    "with contents in a text": (
        lambda: _with_value(b"<</ByteRange[0 1 2 3]/Contents(0)>>"),
        "its /Contents is no hexadecimal string",
    ),
    "with contents without end": (
        lambda: _with_value(b"<</ByteRange[0 1 2 3]/Contents<" + b"0" * 5 * 2**20 + b">>>"),
        "its /Contents is no hexadecimal string of at most",
    ),
    "with odd digits and a moment that is none": (
        lambda: _with_value(b"<</ByteRange[0 1 2 3]/M(soon)/M 9 0 R/Contents<300>>>"),
        "it cannot be read",
    ),
    "with a comment in a reference": (
        lambda: _with_value(b"<</Prop_Build 4 %c\n 0 R/ByteRange[0 1 2 3]/Contents<3000>>>"),
        "its structure cannot be followed",
    ),
    "a hundred and one": (
        lambda: pdfs.with_catalog(
            b"/AcroForm<</Fields[" + b"".join(b"<</FT/Sig/V<</A %d>>>>" % n for n in range(101)) + b"]>>"
        ),
        "its structure cannot be followed",
    ),
}


@pytest.mark.parametrize(("make", "words"), STRUCTURES.values(), ids=STRUCTURES)
def test_odd_structures_are_not_sound(make: Callable[[], bytes], words: str) -> None:
    """However the signature's dictionary is written."""
    report = inspect_sealed(make())
    assert not report.sound
    assert words in " / ".join(report.problems)


def test_a_signature_may_refer_to_other_objects() -> None:
    """As some programs note in one how it was made."""
    data = signed_pdf(cms, entries=b"/Prop_Build 4 0 R/M(D\\07220260304050607Z)/Reference[5 0 R]")
    report = inspect_sealed(data)
    assert (report.problems, report.seals[0].signed_at) == ((), WHEN)


@pytest.mark.parametrize("absolute", [False, True])
def test_junk_before_the_header(absolute: bool) -> None:
    """Wherever its offsets count from, byte ranges count from the file's first byte."""
    assert inspect_sealed(pdfs.prefixed(b"junk\n", absolute=absolute)).problems == ("it is not signed",)


def test_hostile_files_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends in a verdict when the budget is spent: files made to loop, nest and swell for ever."""
    monkeypatch.setattr(sealed, "BUDGET", 2 * 2**20)
    for name, data in pdfs.hostile().items():
        assert not inspect_sealed(data).sound, name


@pytest.mark.parametrize("name", pdfs.not_pdfs())
def test_what_is_no_pdf(name: str) -> None:
    """Is refused, or found damaged or unsigned; it is never sound."""
    reasons = []
    try:
        assert not inspect_sealed(pdfs.not_pdfs()[name]).sound
    except PdfRejected as error:
        reasons.append(error.reason)
    assert reasons in ([], ["not_pdf"])
    assert reasons or name.startswith(("a header and", "only", "truncated", "no "))


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    """The error names the path and the reason."""
    (tmp_path / "empty.pdf").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    for path, kind, words in (
        (tmp_path / "none.pdf", InvalidRequest, "none.pdf' cannot be opened: No such file"),
        (tmp_path, InvalidRequest, "is not a file"),
        (tmp_path / "pipe", InvalidRequest, "is not a file"),
        (tmp_path / "empty.pdf", PdfRejected, "it is not a PDF"),
        ("a\0b", InvalidRequest, "embedded null byte"),
        (7, InvalidRequest, "must be a path or bytes, not int"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            inspect_sealed(path)  # type: ignore[arg-type]  # one of them is wrong on purpose


def test_a_file_that_is_cut_short_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read is what is judged; the process lives on."""
    path = tmp_path / "sealed.pdf"
    path.write_bytes(sealed_by_sandbox())
    inspect = sealed._inspect

    def cut(data: memoryview, header: int) -> sealed.SealedReport:
        os.truncate(path, 0)
        return inspect(data, header)

    monkeypatch.setattr(sealed, "_inspect", cut)
    assert inspect_sealed(path).sound
    assert path.stat().st_size == 0


def test_a_file_may_not_be_too_large(tmp_path: Path) -> None:
    """It is read into memory: just as many bytes as may be are looked at, one more is told."""
    path = tmp_path / "sealed.pdf"
    path.write_bytes(sealed_by_sandbox())
    size = path.stat().st_size
    assert inspect_sealed(path, max_bytes=size).sound
    words = f"source: {str(path)!r} has more than {size - 1} bytes (max_sealed_bytes)"
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        inspect_sealed(path, max_bytes=size - 1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that cannot be read at its start")
def test_a_file_that_cannot_be_read() -> None:
    """It can be opened, and reading it fails, as on a broken disk."""
    with pytest.raises(InvalidRequest, match=r"'/proc/self/mem' cannot be read: \w+"):
        inspect_sealed("/proc/self/mem")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("D:20260304050607Z", WHEN),
        ("20260304060607+01'00'", WHEN),
        ("D:20260304000607-0500", WHEN),
        ("D:20260304050607", WHEN),
        ("20260304050607.25Z", WHEN),
        ("D:2026", datetime(2026, 1, 1, tzinfo=UTC)),
        ("D:20261304050607Z", None),
        ("D:20260304050607+99'00'", None),
        ("yesterday", None),
    ],
)
def test_moments(text: str, moment: datetime | None) -> None:
    """As PDFs and certificates write them; what is none is left out."""
    assert read_time(text) == moment


def test_an_old_year_of_two_digits() -> None:
    """Before 1950 there is none."""
    old = datetime(1999, 12, 31, tzinfo=UTC)

    def sign(data: bytes) -> bytes:
        return cms(data, kind="rsa").replace(b"260304050607Z", b"991231000000Z")

    assert inspect_sealed(signed_pdf(sign)).seals[0].signed_at == old


def test_a_key_that_is_not_known_is_not_judged() -> None:
    """What cannot be told is not said; the digest is compared all the same."""
    report = inspect_sealed(signed_pdf(partial(cms, kind="dsa")))
    assert (report.sound, report.seals[0].digest_right, report.seals[0].key_right) == (True, True, None)
    broken = inspect_sealed(
        signed_pdf(
            lambda data: cms(data).replace(
                b"\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x7f"
            )
        )
    )
    assert broken.seals[0].key_right is None


def test_a_name_in_an_alphabet_of_two_bytes() -> None:
    """It is read like any other; here the country, which fits into the room of the usual spelling."""
    certificate = read_cms(cms(b"x").replace(b"\x13\x02SE", b"\x1e\x02\x00S")).certificate
    assert certificate is not None
    assert certificate.subject == "C=S, O=Åkesson AB, CN=Björn Åkesson"


def test_certificates_beside_the_signers() -> None:
    """Others, things that are none, and lists of revoked ones are passed over."""
    der = cms(b"x")
    certificate = next(part for part in elements(elements(elements(der)[1])[0]) if part[0] == 0xA0)
    odd = certificate[:4] + b"\xa1\x02\x05\x00" + certificate[4:]
    odd = bytes([0xA0, 0x82]) + (len(odd) - 4).to_bytes(2, "big") + odd[4:]
    assert read_cms(as_ber(der).replace(certificate, odd)).certificate is not None
    assert read_cms(as_ber(der).replace(certificate, certificate + b"\xa1\x02\x30\x00")).certificate is not None
    with pytest.raises(MalformedCms, match="breaks off"):
        read_cms(der[:1])


POPPLER_LACKS = {"Ed25519", "named by its key"}


@pytest.mark.parametrize("name", ["sandbox", *sorted(KINDS.keys() - POPPLER_LACKS), *CHANGES, "two", "appended to"])
def test_pdfsig_comes_to_the_same(name: str, tmp_path: Path) -> None:
    """Poppler's verifier: valid and of the total document, where and only where the file is sound."""
    needs("pdfsig")
    data = sealed_by_sandbox()
    if name in KINDS:
        data = signed_pdf(KINDS[name])
    elif name in CHANGES:
        data = CHANGES[name][0](data)
    elif name == "two":
        data = pdfs.signed_by_pyhanko(data)
    elif name == "appended to":
        data = pdfs.signed_by_pyhanko(pdfs.make_pdf()) + b"%%EOF\n"
    (tmp_path / "file.pdf").write_bytes(data)
    told = pdfs.run("pdfsig", tmp_path / "file.pdf").stdout
    last = told.rpartition("Signature #")[2]
    sound = "Signature is Valid" in last and "Total document signed" in last and "Digest Mismatch" not in told
    assert inspect_sealed(data).sound == sound, told
