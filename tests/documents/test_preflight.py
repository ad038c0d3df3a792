"""The preflight refuses only what the sandbox's own judge refuses, and does bounded work."""

from __future__ import annotations

import mmap
import re
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signing_async.documents import pdf_objects, pdf_syntax
from signing_async.documents import preflight as module
from signing_async.documents.pdf_syntax import STEP
from signing_async.documents.preflight import BUDGET, GLANCE_BUDGET, glance, preflight
from signing_async.sandbox.inspection import inspect
from tests import pdfs

SIGNED_VALUE = b"/V 7 0 R"


def judge(data: bytes) -> str | None:
    """Return the sandbox's verdict on these bytes."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "upload.pdf")
        path.write_bytes(data)
        rejection = inspect(path, max_bytes=20 * 2**20)
    return rejection.code if rejection else None


def same_places(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace the first `old` by `new`, padded so that all offsets stay right."""
    assert old in data
    assert len(new) <= len(old)
    return data.replace(old, new.ljust(len(old)), 1)


@cache
def accepted() -> dict[str, bytes]:
    """Documents that must pass."""
    report = pdfs.by_reportlab()
    return {
        "small": pdfs.make_pdf(),
        "large": pdfs.make_pdf(1_000_000, pages=200),
        "nested": pdfs.nested_pages(),
        "form": pdfs.with_form(),
        "reportlab": report,
        "fpdf2": pdfs.by_fpdf2(),
        "linearized": pdfs.rewritten(report, linearize=True),
        "object streams": pdfs.rewritten(report, linearize=True, object_streams=True),
        "xref stream": pdfs.xref_stream_pdf(),
        "hybrid": pdfs.hybrid_pdf(),
        "hybrid, its encryption seen by some readers alone": pdfs.hybrid_pdf(b"/Encrypt 6 0 R"),
        "empty field": pdfs.with_signature_field(),
        "usage rights": pdfs.with_usage_rights(),
        "usage rights, old": pdfs.with_usage_rights(key=b"UR"),
        "usage rights in a field": pdfs.with_usage_rights(in_field=True),
        "signature taken back": pdfs.update(pdfs.with_signature_field(SIGNED_VALUE), {6: pdfs.FIELD + b">>"}, size=9),
        "another generation's signature": pdfs.with_signature_field(b"/V 7 1 R"),
        "junk first": pdfs.prefixed(b"junk\n" * 200, absolute=False),
        "counted junk first": pdfs.prefixed(b"junk\n" * 200, absolute=True),
        **pdfs.decoys(),
        **pdfs.damaged(),
    }


@cache
def refused() -> dict[str, tuple[str, bytes]]:
    """Ordinary documents that must be refused, with their verdicts."""
    report = pdfs.by_reportlab()
    protected = {
        f"{method}, password {user!r}, object streams {packed}": pdfs.encrypted(
            report, method, user=user, object_streams=packed
        )
        for method in ("AES-256", "AES-128", "RC4-128", "RC4-40")
        for user in ("", "secret")
        for packed in (False, True)
    }
    locked = pdfs.encrypted(report)
    protected |= {
        "encrypted, end lost": locked[: locked.rindex(b"startxref")],
        "encrypted, startxref wrong": locked[: locked.rindex(b"startxref")] + b"startxref\n3\n%%EOF\n",
        "encrypted, junk first": b"junk" * 9 + locked,
        "encrypted in place": pdfs.assemble(pdfs.basic_objects(), trailer=b"/Encrypt<</Filter/Standard/V 1>>"),
        "encrypted, escaped": locked.replace(b"/Encrypt ", b"/#45ncryp#74 "),
        "encrypted, a table row out of place": locked.replace(b" 00000 n \n", b" 00000 n\n ", 1),
        "encrypted hybrid": pdfs.hybrid_pdf(b"/Encrypt 4 0 R"),
        "encrypted by a hidden object": pdfs.hybrid_pdf(b"/Encrypt 6 0 R", listed=False),
        "encrypted, predicted rows": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R", predictor=True),
        "encrypted, filters in an array": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/Filter[/FlateDecode]"),
        "encrypted by an object in a stream": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R"),
    }
    signature = pdfs.signed_by_pyhanko(report)
    in_place = b"/V " + pdfs.SIGNATURE
    signed = {
        "pyHanko": signature,
        "certified": pdfs.signed_by_pyhanko(report, certify=True),
        "rewritten": pdfs.rewritten(signature, object_streams=True),
        "linearized": pdfs.rewritten(signature, linearize=True, object_streams=True),
        "after an update": pdfs.update(pdfs.with_signature_field(SIGNED_VALUE), {5: pdfs.stream_object(b"")}, size=9),
        "by an update": pdfs.update(pdfs.with_signature_field(), {6: pdfs.FIELD + SIGNED_VALUE + b">>"}, size=9),
        "of a large file": pdfs.signed_by_pyhanko(pdfs.make_pdf(1_000_000, pages=300)),
        "in place": pdfs.with_signature_field(in_place),
        "beside usage rights": pdfs.with_signature_field(
            SIGNED_VALUE, catalog=b"/Perms<</UR3<</Type/Sig/ByteRange[0 1 2 3]/Contents<00>>>>>"
        ),
        "behind junk": b"junk\n" + signature,
        "behind counted junk": b"junk\n"
        + pdfs.with_catalog(b"/AcroForm<</Fields[6 0 R]>>", {6: b"<</FT/Sig/V 7 0 R>>", 7: pdfs.SIGNATURE}, offset=5),
        "itself in the permissions": pdfs.with_catalog(b"/Perms 6 0 R", {6: b"<</DocMDP" + pdfs.SIGNATURE + b">>"}),
        "in the permissions": pdfs.with_signature_field(catalog=b"/Perms<</DocMDP 7 0 R>>"),
        "below a parent": pdfs.with_catalog(
            b"/AcroForm<</Fields[6 0 R 6 0 R 9 0 R 8 1 R]>>",
            {6: b"<</FT/Sig/T(a)/Kids[8 0 R]>>", 7: pdfs.SIGNATURE, 8: b"<</Parent 6 0 R/V 7 0 R>>"},
        ),
    }
    return {name: ("protected", data) for name, data in protected.items()} | {
        name: ("already_signed", data) for name, data in signed.items()
    }


@pytest.mark.parametrize("name", accepted())
def test_document_that_the_sandbox_accepts_passes(name: str) -> None:
    assert judge(accepted()[name]) is None
    assert preflight(accepted()[name]) is None


@pytest.mark.parametrize("name", refused())
def test_protected_and_signed_documents_get_the_verdict_of_the_sandbox(name: str) -> None:
    verdict, data = refused()[name]
    assert judge(data) == verdict
    assert preflight(data) == verdict


@pytest.mark.skipif(not pdfs.have("pdfsig", "certutil", "mutool"), reason="needs poppler, libnss3 and mupdf tools")
def test_documents_signed_by_poppler_and_mupdf_are_already_signed(tmp_path: Path) -> None:
    for name in ("poppler", "mupdf"):
        (tmp_path / name).mkdir()
    assert preflight(pdfs.signed_by_pdfsig(pdfs.by_reportlab(), tmp_path / "poppler")) == "already_signed"
    assert preflight(pdfs.signed_by_mutool(tmp_path / "mupdf")) == "already_signed"


@pytest.mark.parametrize("name", pdfs.not_pdfs())
def test_broken_file_is_not_pdf_or_passes(name: str) -> None:
    """Subtle damage is left to the service."""
    assert preflight(pdfs.not_pdfs()[name]) in ("not_pdf", None)


@pytest.mark.parametrize("name", ["nothing", "text", "html", "zip", "png", "only a header", "a header too late"])
def test_files_of_other_kinds_are_not_pdf(name: str) -> None:
    assert preflight(pdfs.not_pdfs()[name]) == "not_pdf"


@pytest.mark.parametrize("name", pdfs.hostile())
def test_hostile_file_is_refused_only_if_the_sandbox_refuses_it(name: str) -> None:
    data = pdfs.hostile()[name]
    assert preflight(data) in (None, judge(data))


WORDS = [
    b"/Encrypt", b"/V", b"null", b"/Root", b"trailer", b"startxref", b"endobj", b" obj", b"<<", b">>", b"(", b")", b"[",
    b"0", b"7", b"6 0 R", b"/Sig", b"/FT", b"/Kids", b"/Fields", b"stream", b"%", b"\n", b"/Prev", b"xref", b"/Perms",
    b"/UR3", b"/AcroForm", b"#", b"99", b"endstream", b"/Type", b"/Length", b"/W", b"/Index", b"/N", b"/First", b" ",
]  # fmt: skip


@cache
def seeds() -> list[bytes]:
    """Documents to mutate: mostly refused ones and those that come close."""
    close = ["empty field", "usage rights in a field", "signature taken back", "words in a content stream"]
    return [data for _, data in refused().values() if len(data) < 50_000] + [accepted()[name] for name in close]


@st.composite
def mutated(draw: st.DrawFn, pool: Callable[[], list[bytes]] = seeds) -> bytes:
    """Return a document with a few small changes, most of them at words that matter."""
    data = bytearray(draw(st.sampled_from(pool())))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        found = data.find(draw(st.sampled_from(WORDS)), at)
        at = max(0, min(len(data), (found if found >= 0 else at) + draw(st.integers(-3, 9))))
        cut = draw(st.sampled_from([0, 0, 1, 1, 2, 8, 30, len(data)]))
        put = draw(st.sampled_from(WORDS) | st.binary(min_size=1, max_size=1))
        data[at : at + cut] = put
    return bytes(data)


@settings(max_examples=400, derandomize=True)
@given(mutated())
def test_damaged_file_is_refused_only_if_the_sandbox_refuses_it(data: bytes) -> None:
    if verdict := preflight(data):
        assert judge(data) is not None, verdict


@settings(max_examples=300)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_arbitrary_bytes_never_raise(inner: bytes, tail: bytes) -> None:
    preflight(b"%PDF-1.7\n" + inner + b"\nxref\n" + tail)
    preflight(b"%PDF-1.7\n1 0 obj" + inner + b"startxref\n9\n%%EOF")
    preflight(inner + tail)


@pytest.mark.parametrize("name", ["pyHanko", "AES-256, password '', object streams True"])
def test_buffers_of_every_kind_get_the_same_verdict_and_are_released(name: str, tmp_path: Path) -> None:
    """Bytes, bytearrays, memoryviews with items of any size, and maps."""
    verdict, data = refused()[name]
    data += b"\n" * (-len(data) % 8)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    array = bytearray(data)
    assert preflight(array) == preflight(memoryview(data)) == preflight(memoryview(data).cast("Q")) == verdict
    array += b"still resizable"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert preflight(mapped) == verdict
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert preflight(memoryview(mapped)[: len(data)]) == verdict


class Reader:
    """A file that counts the bytes read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[int] = []

    def __call__(self, at: int, size: int) -> bytes:
        assert 0 <= at <= at + size <= len(self.data)
        self.reads.append(size)
        return self.data[at : at + size]


def glanced(data: bytes) -> bool:
    """Return whether `glance` passes a file. Then `preflight` passes it, too."""
    passed = glance(Reader(data), len(data))
    assert not (passed and preflight(data))
    return passed


def test_glance_passes_ordinary_files_of_all_programs() -> None:
    doubtful = [name for name, data in accepted().items() if not glanced(data)]
    assert set(doubtful) <= {
        *pdfs.decoys(),
        *pdfs.damaged(),
        "counted junk first",
        *(n for n in accepted() if "hybrid" in n),
    }
    assert len(doubtful) < len(accepted()) / 3


@pytest.mark.parametrize("name", refused())
def test_glance_passes_no_file_that_is_refused(name: str) -> None:
    assert not glanced(refused()[name][1])


@pytest.mark.parametrize("name", [*pdfs.hostile(), *pdfs.not_pdfs()])
def test_glance_reads_little_of_a_hostile_file(name: str) -> None:
    data = (pdfs.hostile() | pdfs.not_pdfs())[name]
    reader = Reader(data)
    assert not (glance(reader, len(data)) and preflight(data))
    assert sum(reader.reads) < 4 * GLANCE_BUDGET
    assert len(reader.reads) < GLANCE_BUDGET // STEP
    passes_by_patterns(data)


def test_glance_reads_a_few_kilobytes_of_a_large_file() -> None:
    data = pdfs.make_pdf(10 * 2**20)
    reader = Reader(data)
    assert glance(reader, len(data))
    assert sum(reader.reads) < 12_000
    assert len(reader.reads) < 8


@pytest.mark.parametrize(
    "filler", [b" ", b"%comment\n", b"(x)", b"/N" + b"a" * 90 + b" 1 "], ids=["space", "comment", "string", "name"]
)
@pytest.mark.parametrize("bytes_before", range(pdf_syntax.WINDOW - 12, pdf_syntax.WINDOW + 4))
def test_glance_reads_tokens_across_the_edge_of_its_window(filler: bytes, bytes_before: int) -> None:
    one = (filler * bytes_before)[:bytes_before] if len(filler) == 1 else filler * (bytes_before // len(filler))
    pairs = one if filler in (b" ", b"%comment\n") else b"/Z[" + one + b"]"
    for last, signed in ((b"/AcroForm<</Fields[6 0 R]>>", True), (b"/AcroFormX<</Fields[6 0 R]>>", False)):
        data = pdfs.with_catalog(pairs + last, {6: b"<</FT/Sig/V 7 0 R>>", 7: pdfs.SIGNATURE})
        assert preflight(data) == ("already_signed" if signed else None)
        assert glanced(data) is not signed


@settings(max_examples=300, derandomize=True)
@given(mutated())
def test_glance_agrees_with_the_preflight_on_mutated_files(data: bytes) -> None:
    glanced(data)


def simple(trailer: bytes = b"", catalog: bytes = b"") -> bytes:
    """Return a file as the simplest programs write it, with an unused encryption (8) and signed field (6)."""
    more = {6: pdfs.FIELD + b"/V 7 0 R>>", 7: pdfs.SIGNATURE, 8: b"<</Filter/Standard/V 1>>"}
    return pdfs.in_one_table(pdfs.with_catalog(catalog, more, trailer=trailer))


def passes_by_patterns(data: bytes) -> bool:
    """Return whether a file passes by the patterns alone. Then the reader passes it, too."""
    reader = Reader(data)
    passes = module._is_plain(reader, len(data))
    assert len(reader.reads) <= 6
    assert sum(reader.reads) <= pdf_objects.TAIL_WINDOW + 4 * pdf_syntax.WINDOW + 5
    if passes:
        assert data.startswith(b"%PDF-")
        assert module._look_closely(memoryview(data), 0) is None
    return passes


# As Skia (Chromium) and LibreOffice write the parts that matter.
SKIA = b"\n/MarkInfo <</Type /MarkInfo\n/Marked true>>\n/ViewerPreferences <</DisplayDocTitle true>>\n/Lang (en)"
LIBREOFFICE = b"\n/OpenAction[4 0 R /XYZ null null 0]\n/Lang(en-US)\n"


def altered(old: bytes, new: bytes) -> bytes:
    """Return the simple file with its last `old` replaced."""
    head, found, tail = simple().rpartition(old)
    assert found
    return head + new + tail


ROOT_ROW = b"%010d 00000 n" % simple().index(b"1 0 obj")


def updated(data: bytes, words: bytes, *, head: bytes = b"xref\n0 2\n", gap: bytes = b" \n") -> bytes:
    """Return the file with an appended table whose root is object 2."""
    at = len(data) + head.index(b"xref")
    rows = b"0000000000 65535 f \n" + ROOT_ROW + gap
    return data + head + rows + b"trailer<<" + words + b">>\nstartxref\n%d\n%%%%EOF\n" % at


OTHER_ROW = b"%010d 00000 n" % simple().index(b"2 0 obj")


@pytest.mark.parametrize(
    "make",
    [
        simple,
        lambda: pdfs.in_one_table(pdfs.make_pdf(1_000_000, pages=200)),
        lambda: pdfs.in_one_table(pdfs.nested_pages()),
        lambda: simple(b"\n/Info 5 0 R", SKIA),
        lambda: simple(catalog=rb"/A(\))/MarkInfo<</B(\()>>"),
        lambda: simple(b"/A[(x)<00>/B 1 0 R]", b"/Info<</Producer(MuPDF 1.28)/A<00>>>"),
        lambda: simple(b"\n/ID [ <00FF>\n<00FF> ]\n/DocChecksum /8D00FF\n", LIBREOFFICE),
        lambda: simple(b"\n% a comment -- (/Encrypt 8 0 R)\r/Info 5 0 R%\n", b"/PageLayout/OneColumn/Version/1.7"),
        lambda: simple().replace(b" 00000 n \n", b" 00000 n\r\n").replace(b"\ntrailer\n", b"\r\ntrailer\r\n"),
        lambda: pdfs.by_reportlab(form=False),
        pdfs.by_fpdf2,
        lambda: pdfs.rewritten(pdfs.by_fpdf2()),
        lambda: pdfs.rewritten(pdfs.by_fpdf2(), linearize=True),
        lambda: updated(simple(), b"/Size 9/Root 1 0 R/Prev %d" % simple().index(b"xref\n")),
    ],
)
def test_files_of_most_programs_pass_by_the_patterns_alone(make: Callable[[], bytes]) -> None:
    assert passes_by_patterns(make())
    assert judge(make()) is None
    assert preflight(make()) is None


NOT_SIMPLE = {
    "another form": simple(catalog=b"/AcroForm 6 0 R"),
    "a form": simple(catalog=b"/AcroForm<</Fields[6 0 R]>>"),
    "a form, escaped": simple(catalog=b"/Acro#46orm<</Fields[6 0 R]>>"),
    "a form, its name alone escaped": simple(catalog=b"/Acro#46orm/A/B/#43"),
    "a form after other entries": simple(catalog=b"/Lang(en)/Marked true/AcroForm<</Fields[6 0 R]>>"),
    "permissions": simple(catalog=b"/Perms<</DocMDP 7 0 R>>"),
    "permissions elsewhere": simple(catalog=b"/Perms 6 0 R"),
    "a string in an array with an end in it": simple(catalog=rb"/A[(\)]/B(])]"),
    "an escape in a dictionary's string": simple(catalog=rb"/A<</B(\)>>/C()>>"),
    "a bracket that closes nothing": simple(catalog=b"/A<</B ]>>"),
    "a bracket that is not closed": simple(catalog=b"/A[/B[1]"),
    "a dictionary that is not closed": simple(catalog=b"/A<</B 1>"),
    "a form after a dictionary in a dictionary": simple(catalog=b"/A<</B<<>>/AcroForm<<>>>>"),
    "nested too deep": simple(catalog=b"/MarkInfo<</A<<>>>>"),
    "a string with an end in it": simple(catalog=rb"/A(\)/B(x)"),
    "a string that does not end": simple(catalog=b"/A((x)"),
    "strings in strings": simple(catalog=b"/A((x))"),
    "a form between brackets in comments": simple(catalog=b"/A[%(\n]/AcroForm 6 0 R%)]\n"),
    "a form between dictionaries in comments": simple(catalog=b"/A<<%(\n>>/AcroForm 6 0 R%)>>\n"),
    "a form after a comment": simple(catalog=b"%x\n/AcroForm<<>>"),
    "a form after a comment's carriage return": simple(catalog=b"%x\r/AcroForm<<>>\n"),
    "a comment to the end": simple(catalog=b"%"),
    "encrypted": simple(b"/Encrypt 8 0 R"),
    "encrypted by a direct dictionary": simple(b"/Encrypt<</Filter/Standard>>"),
    "encrypted, escaped": simple(b"/#45ncrypt 8 0 R"),
    "encrypted, escaped in the middle": simple(b"/Enc#72ypt 8 0 R"),
    "encrypted before the root": altered(b"/Root", b"/Encrypt 8 0 R/Root"),
    "encrypted after a comment": simple(b"%x\n/Encrypt 8 0 R"),
    "encrypted after a comment's carriage return": simple(b"%x\r/Encrypt 8 0 R\n"),
    "hidden objects": simple(b"/XRefStm 20"),
    "two roots": simple(b"/Root 6 0 R"),
    "two roots, one escaped": simple(b"/R#6fot 6 0 R"),
    "no root": altered(b"/Root", b"/Boot"),
    "a root that is another name": altered(b"/Root 1", b"/Root1"),
    "a root that is a value": altered(b"/Root", b"/A/Root"),
    "a root in a string": altered(b"/Root 1 0 R", b"/A(/Root 1 0 R)"),
    "a root that is no reference": altered(b"/Root 1 0 R", b"/Root 1 0 Rx"),
    "a root of another generation": altered(b"/Root 1 0 R", b"/Root 1 1 R"),
    "a root below the table": altered(b"xref\n0 9", b"xref\n2 9"),
    "a root beyond the table": altered(b"/Root 1 0 R", b"/Root 9 0 R"),
    "a root whose row is in the trailer": altered(
        b"/Size 9/Root 1 0 R", b"/Size 9/A(%b)/Root 10 0 R" % ROOT_ROW
    ).replace(b"\n1 0 obj", b"\n10 0 obj"),
    "a root whose row is before the table": updated(simple(), b"/Root 1 0 R", head=ROOT_ROW.ljust(31) + b"xref\n3 2\n"),
    "encrypted by an update": updated(simple(), b"/Size 9/Root 1 0 R/Encrypt 8 0 R"),
    "a root that is free": altered(ROOT_ROW, ROOT_ROW[:-1] + b"f"),
    "a root whose row is of another generation": altered(ROOT_ROW, ROOT_ROW.replace(b"00000 n", b"00001 n")),
    "a root at the beginning": altered(ROOT_ROW, b"0000000000 00000 n"),
    "a row that leads elsewhere": altered(ROOT_ROW, OTHER_ROW),
    "a row that leads nowhere": altered(ROOT_ROW, b"9999999999 00000 n"),
    "a row that is none": altered(ROOT_ROW, ROOT_ROW.replace(b" ", b"  ")[: len(ROOT_ROW)]),
    "an object of another number": simple().replace(b"\n1 0 obj", b"\n9 0 obj"),
    "an object of another generation": simple().replace(b"\n1 0 obj", b"\n1 1 obj"),
    "an object without an end": simple().replace(b"endobj", b"endoby", 1),
    "two tables": pdfs.make_pdf(),
    "no table": altered(b"xref\n0", b"xray\n0"),
    "a trailer that is not where it should be": altered(b"xref\n0 9", b"xref\n0 8"),
    "a trailer behind a space": altered(b" \ntrailer", b"\n trailer"),
    "a trailer at once": altered(b" \ntrailer", b"  trailer"),
    "a trailer that does not end": altered(b">>\nstartxref", b">\nstartxref"),
    "no end": altered(b"startxref", b"startxraf"),
    "another header": simple().replace(b"%PDF-1", b"%!PS-1", 1),
    "something before the header": b"x" + simple(),
    "nothing": b"",
}


@pytest.mark.parametrize("name", NOT_SIMPLE)
def test_file_that_the_patterns_cannot_judge_is_parsed(name: str) -> None:
    assert passes_by_patterns(simple())
    assert not passes_by_patterns(NOT_SIMPLE[name])
    assert preflight(NOT_SIMPLE[name]) is None or judge(NOT_SIMPLE[name])


@pytest.mark.parametrize(
    "words", [b"/Size 9/Root 1 0 R", b"/Root 1 0 R", b"/Size x/Root 1 0 R", b"/Size null/Root 1 0 R"]
)
@pytest.mark.parametrize("gap", [b" \n", b"\n ", b"\r ", b" \r", b"  ", b"\n\0", b"\r\n", b" \t"])
def test_damaged_encrypted_file_does_not_pass_by_the_patterns(words: bytes, gap: bytes) -> None:
    """One of several trailers that other programs would not find proves nothing."""
    passes_by_patterns(updated(simple(b"/Encrypt 8 0 R"), words, gap=gap))


def read(data: bytes) -> object:
    """Return the value at the start and its end; None if it cannot be read. Skipped containers count as strings."""
    try:
        value, end = pdf_syntax.Text(data, pdf_syntax.Budget(BUDGET)).value(0)
    except pdf_syntax.UnreadablePdf:
        return None
    assert isinstance(value, dict)
    return {
        key: "" if isinstance(one, list | dict) and key not in pdf_syntax._READ_CONTAINERS else one
        for key, one in value.items()
    }, end


PARTS = [
    b"/Root", b"/ID", b"/V", b"/A#42", b"/", b" ", b"\n", b"1 0 R", b"12", b"-3", b"+4", b"5.", b"1 0 Rx",
    b"1  0  R", b"7x", b"<00>", b"<0 0>", b"(a)", b"(/Root)", b"(\\))", b"((b))", b"[<00><11>]", b"[<00> <11> ]", b"[]",
    b"[1]", b"[1 0 R 2]", b"[1 [2]]",
    b"[[[[1]]]]", b"<<>>", b"<</V 1>>", b"<</V<</V[1 0 R]>>>>",
    b"/Kids", b"-.5", b"false", b"null", b"true", b"%c\n", b"99999999999999999999", b"12345678901 0 R",
    b"0 99999 R", b"1 0", b"<<", b">>",
]  # fmt: skip


@settings(max_examples=1500)
@given(st.lists(st.sampled_from(PARTS), max_size=8))
def test_plain_dictionaries_parse_the_same_by_pattern_and_token_by_token(parts: list[bytes]) -> None:
    """Patterns do not look for errors inside what they skip."""
    data = b"<<" + b"".join(parts) + b">>/after"
    with pytest.MonkeyPatch.context() as patched:
        quick = read(data)
        patched.setattr(pdf_syntax, "_PLAIN_DICTIONARY", re.compile(rb"(?!)"))
        patched.setattr(pdf_syntax, "_PLAIN_ARRAY", re.compile(rb"(?!)"))
        slow = read(data)
    assert quick == slow or (slow is None and b"<<" in parts)


ENTRIES = [
    b"/Encrypt 8 0 R", b"/Encrypt", b"/Enc#72ypt", b"/#45ncrypt 8 0 R", b"/XRefStm 20", b"/Size null", b"/R#6fot 6 0 R",
    b"/AcroForm<</Fields[6 0 R]>>", b"/AcroForm", b"/Acro#46orm", b"/Acro#46orm<</Fields[6 0 R]>>", b"/Perms", b"#44",
    b"/Perms<</DocMDP 7 0 R>>", b"<</Fields[6 0 R]>>", b"<</DocMDP 7 0 R>>", b"8 0 R", b"%\r", b"[x]", b"R", b"{",
    b">>\nendobj\n", b">>\nstartxref\n0\n", b"\ntrailer<</Root 1 0 R/Encrypt 8 0 R>>", b" trailer<</Root 1 0 R>>",
]  # fmt: skip


@cache
def simple_seeds() -> list[bytes]:
    """Documents to mutate: simple files, and others with a single table."""
    files = [*accepted().values(), *(data for _, data in refused().values()), *(simple(entry) for entry in ENTRIES)]
    files += [simple(catalog=entry) for entry in ENTRIES]
    return [pdfs.in_one_table(data) for data in files if len(data) < 20_000]


@settings(max_examples=1000)
@given(
    st.lists(st.sampled_from([*PARTS, *ENTRIES]), max_size=6), st.lists(st.sampled_from([*PARTS, *ENTRIES]), max_size=6)
)
def test_patterns_pass_no_trailer_and_catalog_that_the_reader_refuses(
    trailer: list[bytes], catalog: list[bytes]
) -> None:
    passes_by_patterns(simple(b"".join(trailer), b"".join(catalog)))


@settings(max_examples=600)
@given(mutated(simple_seeds))
def test_patterns_pass_no_damaged_file_that_the_reader_refuses(data: bytes) -> None:
    passes_by_patterns(data)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], int]:
    """Return the work spent on a file until its verdict."""
    calls = 0
    original = pdf_syntax.Budget.spend

    def counting(budget: pdf_syntax.Budget, cost: int) -> None:
        nonlocal calls
        calls += cost >= STEP
        original(budget, cost)

    def run(data: bytes) -> int:
        nonlocal calls
        calls = 0
        preflight(data)
        return calls

    monkeypatch.setattr(pdf_syntax.Budget, "spend", counting)
    return run


def test_work_does_not_depend_on_size_or_page_count(count: Callable[[bytes], int]) -> None:
    assert count(pdfs.make_pdf(10 * 2**20)) == count(pdfs.make_pdf(5_000)) == count(pdfs.make_pdf(500_000, pages=900))
    assert 0 < count(pdfs.make_pdf()) < 60


@pytest.mark.parametrize("name", pdfs.hostile())
def test_work_on_any_file_is_within_the_budget(name: str, count: Callable[[bytes], int]) -> None:
    assert count(pdfs.hostile()[name]) <= BUDGET // STEP + 1


@pytest.mark.parametrize(
    "part",
    [b"[", b"<<", b"(", b"<</A", b"[]", b"0 ", b"1 0 R ", b"%\n", b"/", b"<", b"((", b"\\", b"\n", b"xref\n", b"null "],
)
def test_trailer_of_a_million_equal_parts_is_left_to_the_service(part: bytes, count: Callable[[bytes], int]) -> None:
    head = b"%PDF-1.7\n1 0 obj null endobj\nxref\n0 0\ntrailer\n<</Root "
    data = head + part * (2**20 // len(part)) + b"\nstartxref\n30\n%%EOF\n"
    assert count(data) <= BUDGET // STEP
    assert preflight(data) is None


def test_decompression_bomb_is_abandoned_at_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decompressobj = zlib.decompressobj

    class Counting:
        def __init__(self) -> None:
            self.inner = decompressobj()

        def decompress(self, data: bytes, limit: int) -> bytes:
            out = self.inner.decompress(data, limit)
            sizes.append(len(out))
            return out

    monkeypatch.setattr(zlib, "decompressobj", Counting)
    assert preflight(pdfs.hostile()["an object stream bomb"]) is None
    assert 0 < sum(sizes) <= BUDGET


def test_signature_behind_hundreds_of_fields_is_found() -> None:
    """One behind ten thousand is left to the service."""
    for many, verdict in ((800, "already_signed"), (20_000, None)):
        fields = b"<</FT/Tx/T(a)>>" * many
        objects = {6: b"[" + fields + b"8 0 R]", 7: pdfs.SIGNATURE, 8: b"<</FT/Sig/V 7 0 R>>"}
        assert preflight(pdfs.with_catalog(b"/AcroForm<</Fields 6 0 R>>", objects)) == verdict


def form_of(fields: int, field: bytes) -> bytes:
    """Return a form with equal fields, and then a signed one, whose fields are objects of their own."""
    numbers = range(8, 8 + fields)
    objects = {6: b"<</FT/Sig/V 7 0 R>>", 7: pdfs.SIGNATURE} | dict.fromkeys(numbers, field)
    references = b" ".join(b"%d 0 R" % number for number in [*numbers, 6])
    return pdfs.with_catalog(b"/AcroForm<</Fields[" + references + b"]>>", objects)


def test_signature_behind_a_thousand_fields_of_a_predicted_cross_reference_stream_is_found() -> None:
    data = pdfs.rewritten(form_of(1000, b"<</FT/Sig/T(a)>>"), object_streams=True)
    assert b"/Predictor 12" in data
    assert preflight(data) == judge(data) == "already_signed"


TEXT_FIELD = (
    b"<</AP<</N 5 0 R>>/BS<</S/S/W 1>>/DA(/F1 12 Tf)/DV()/F 4/FT/Tx/Ff 0/MK<</BC[.1 .1 .1]>>/MaxLen 100"
    b"/P 4 0 R/Rect[0 0 9 9]/Subtype/Widget/T(name)/Type/Annot/V(Anna)>>"
)


def test_signature_behind_two_thousand_text_fields_is_found() -> None:
    data = form_of(2000, TEXT_FIELD)
    assert preflight(data) == judge(data) == "already_signed"


def test_glance_passes_a_form_of_a_hundred_text_fields() -> None:
    form = form_of(100, TEXT_FIELD).replace(b"/FT/Sig", b"/FT/Btn")
    assert judge(form) is None
    assert glanced(form)
    assert glanced(pdfs.rewritten(form, object_streams=True))


FIELD_PARTS = [
    b"/FT/Tx", b"/FT/Btn", b"/FT /Ch ", b"/FT/Sig", b"/FT/Txt", b"/FT/Tx#20", b"/FT 9 0 R", b"/FT", b"/F#54/Sig",
    b"/FTx 1", b"x", b"/Kids[8 0 R]", b"/Kids 10 0 R", b"/K#69ds[8 0 R]", b"/Kids", b"/V 7 0 R", b"/V(a)", b"/V[(a)]",
    b"/V[R]", b"/V <<R>>", b"/V", b"/V<</V 1>>", b"/DA(/FT/Sig)", b"/MK<</FT/Sig>>", b"/MK<</R R>>", b"/Filter[R]",
    b"/A%c\n", b"/A null", b"R", b" ", b">>", b"<<", b"1 0 R", b"/Parent 6 0 R",
]  # fmt: skip


SOME_FIELD_PARTS = st.lists(st.sampled_from(FIELD_PARTS), max_size=2).map(b"".join)


@settings(max_examples=1500)
@given(
    SOME_FIELD_PARTS,
    st.sampled_from([b"", b"/FT/Tx"]),
    SOME_FIELD_PARTS,
    st.sampled_from([b"", b"/FT/Sig"]),
    st.booleans(),
)
def test_fields_get_the_same_verdict_by_pattern_and_parsed(
    before: bytes, kind: bytes, after: bytes, parent: bytes, signed: bool
) -> None:
    """A field that can't be parsed leaves the file to the service, even if another field is signed."""
    objects = {
        6: b"<<" + parent + b"/Kids[11 0 R 12 0 R]>>",
        7: pdfs.SIGNATURE,
        8: b"<</FT/Sig/V 7 0 R>>",
        9: b"/Sig",
        10: b"[8 0 R]",
        11: b"<<" + before + kind + after + b">>",
        12: b"<</FT/Sig/V 7 0 R>>" if signed else b"<</FT/Tx>>",
    }
    data = pdfs.with_catalog(b"/AcroForm<</Fields[6 0 R]>>", objects)
    with pytest.MonkeyPatch.context() as patched:
        quick = preflight(data)
        patched.setattr(pdf_objects, "PLAIN_FIELD", re.compile(rb"(?!)"))
        assert preflight(data) == quick


LOCKED = pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R", filters=False)
SIGNED = pdfs.with_signature_field(SIGNED_VALUE, more={8: b"(unused)"})
UNFOLLOWED = {
    "not a cross-reference": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/Type/Other"),
    "no widths": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/W 3"),
    "too wide": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/W[1 20 2]"),
    "an odd index": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/Index[0 8 9]"),
    "an index of words": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/Index[/A/B]"),
    "a negative index": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/Index[-1 8]"),
    "an index beyond the rows": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/Index[0 90]"),
    "an object beyond the rows": pdfs.xref_stream_pdf(entries=b"/Encrypt 50 0 R/Index[0 90]"),
    "an object beyond the predicted rows": pdfs.xref_stream_pdf(predictor=True, entries=b"/Encrypt 50 0 R/Index[0 90]"),
    "another compression": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/Filter/LZWDecode"),
    "a TIFF predictor": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/DecodeParms<</Predictor 2/Columns 7>>"),
    "a filter of rows that is not there": pdfs.xref_stream_pdf(
        entries=b"/Encrypt 4 0 R/DecodeParms[<</Predictor 15/Columns 7>>]"
    ),
    "a short predicted table": pdfs.xref_stream_pdf(predictor=True, entries=b"/Encrypt 4 0 R/Index[0 90]"),
    "a stream that is not compressed": LOCKED.replace(b"/Encrypt 4 0 R", b"/Encrypt 4 0 R/Filter/FlateDecode"),
    "no object stream": same_places(LOCKED, b"/ObjStm", b"/Other"),
    "an object stream without a count": same_places(LOCKED, b"/N 4", b"/M 4"),
    "an object stream with words for numbers": same_places(LOCKED, b"1 0 2 ", b"a 0 2 "),
    "an object twice in its stream": same_places(LOCKED, b"1 0 2 ", b"2 0 2 "),
    "an object stream that is no dictionary": same_places(LOCKED, b"6 0 obj\n<<", b"6 0 obj\n[1"),
    "an object stream of another number": same_places(LOCKED, b"6 0 obj", b"8 0 obj"),
    "a length beyond the end": re.sub(rb"/Length \d{3}(>>\nstream\n1 0 2)", rb"/Length 999\1", LOCKED),
    "half a reference": pdfs.assemble(pdfs.basic_objects(), trailer=b"/Encrypt 3 R"),
    "an object that does not end": same_places(SIGNED, b"<3000>>>\nendobj", b"<3000>>>\nenddict"[:15]),
    "another object's row astray": SIGNED.replace(b"0000000149 00000 n", b"0000000150 00000 n"),
    "a row astray in a stream": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R", predictor=True, astray=1),
    "a stream that does not end": same_places(LOCKED, b"endstream\nendobj\nstartxref", b"endstreax\nendobj\nstartxref"),
    "a cross-reference stream without a size": pdfs.xref_stream_pdf(entries=b"/Encrypt 4 0 R/Size null"),
    "a spoilt row": SIGNED[: SIGNED.rindex(b" n ")] + b" x " + SIGNED[SIGNED.rindex(b" n ") + 3 :],
    "a table before itself": re.sub(rb"(/Root 1 0 R)(>>\nstartxref\n)(\d+)", rb"\1/Prev \3\2\3", SIGNED),
    "a previous table before the beginning": pdfs.assemble(
        pdfs.basic_objects(), trailer=b"/Encrypt<</Filter/Standard>>/Prev -5"
    ),
    "a previous table that is nowhere": pdfs.assemble(
        pdfs.basic_objects(), trailer=b"/Encrypt<</Filter/Standard>>/Prev 20"
    ),
    "a trailer without a root": pdfs.assemble(pdfs.basic_objects(), trailer=b"/Encrypt<</V 1>>/Root null"),
    "an encryption of another generation": pdfs.assemble(pdfs.basic_objects(), trailer=b"/Encrypt 3 1 R"),
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_invalid_cross_reference_is_left_to_the_service(name: str) -> None:
    assert preflight(LOCKED) == "protected"
    assert preflight(SIGNED) == "already_signed"
    assert preflight(UNFOLLOWED[name]) is None


def _packed_with_length(length: bytes, *, lost: int = 0) -> bytes:
    """Return an encrypted file whose object stream has a reference as /Length and whose table lost its last bytes."""
    packed = b"<</Type/ObjStm/N 1/First 4/Length %b>>\nstream\n4 0 <</Filter/Standard/V 1>>  \nendstream" % length
    out = bytearray(b"%PDF-1.7\n")
    rows = {1: (2, 6, 0), 4: (2, 6, 0)}
    for number, body in {5: b"28", 6: packed}.items():
        rows[number] = (1, len(out), 0)
        out += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    rows[7] = (1, len(out), 0)
    table = b"".join(
        kind.to_bytes(1, "big") + at.to_bytes(4, "big") + more.to_bytes(1, "big")
        for kind, at, more in (rows.get(number, (0, 0, 0)) for number in range(8))
    )
    entries = b"/Type/XRef/Size 8/W[1 4 1]/Root 1 0 R/Encrypt 4 0 R/Filter/FlateDecode"
    stream = pdfs.stream_object(zlib.compress(table)[: -lost or None], entries)
    return bytes(out) + b"7 0 obj\n" + stream + b"\nendobj\nstartxref\n%d\n%%%%EOF\n" % len(out)


def test_truncated_cross_reference_stream_is_not_used() -> None:
    assert preflight(_packed_with_length(b"5 0 R")) == "protected"
    assert preflight(_packed_with_length(b"5 0 R", lost=4)) is None


@given(
    st.lists(st.tuples(st.sampled_from([0, 2]), st.binary(min_size=4, max_size=4)), min_size=1),
    st.lists(st.integers(0, 99)),
)
def test_predicted_rows_are_the_same_in_any_order(lines: list[tuple[int, bytes]], order: list[int]) -> None:
    entries: pdf_syntax.Dict = {b"/W": [0, 3, 1], b"/DecodeParms": {b"/Predictor": 12, b"/Columns": 4}}
    data = b"".join(bytes([kind]) + cells for kind, cells in lines)
    rows = pdf_objects._Rows(data, entries, pdf_syntax.Budget(BUDGET))
    in_order = list(rows.places(0))
    for number in order:
        assert rows.place(number % len(lines)) == in_order[number % len(lines)]


def test_stream_length_may_be_an_object_outside_the_stream() -> None:
    assert preflight(_packed_with_length(b"5 0 R")) == "protected"
    assert preflight(_packed_with_length(b"4 0 R")) is None
    assert preflight(_packed_with_length(b"1 0 R")) is None
    assert preflight(_packed_with_length(b"99 0 R")) is None


def test_hybrid_file_whose_hidden_stream_is_its_own_table_ends() -> None:
    data = pdfs.hybrid_pdf(b"/Encrypt 4 0 R")
    at = data[data.rindex(b"startxref") + 10 :].split()[0]
    circle = re.sub(rb"/XRefStm \d+", b"/XRefStm " + at, data)
    assert circle != data
    assert preflight(circle) == judge(circle) == "protected"


DAMAGED = pdfs.encrypted(pdfs.make_pdf())
DAMAGED = DAMAGED[: DAMAGED.rindex(b"startxref")]


@pytest.mark.parametrize(
    "change",
    [
        (b"trailer", b"railer "),
        (b"/Encrypt", b"/Decrypt"),
        (b"/Root 1 0 R", b"/Root 0 0 R"),
        (b"/Root 1 0 R", b"/Root (1)  "),
        (b"\n1 0 obj", b"  1 0 obj"),
        (b"endobj\nxref", b"endobj\n1 0 obj\nxref"),
        (b"trailer", b"trailer []\ntrailer <</Root 1 0 R>>\ntrailer"),
    ],
)
def test_damaged_encrypted_file_is_refused_only_if_all_trailers_agree(change: tuple[bytes, bytes]) -> None:
    assert preflight(DAMAGED) == "protected"
    assert preflight(DAMAGED.replace(b"trailer", b"trailer []\ntrailer")) == "protected"
    assert change[0] in DAMAGED
    assert preflight(DAMAGED.replace(*change)) is None


def test_signature_of_the_oldest_revision_is_found_through_many_updates() -> None:
    data = pdfs.with_signature_field(SIGNED_VALUE)
    for number in (5, 9, 5):
        data = pdfs.update(data, {number: pdfs.stream_object(b"")}, size=number + 1)
    assert preflight(data) == judge(data) == "already_signed"
