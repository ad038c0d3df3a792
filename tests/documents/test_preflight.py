"""The preflight refuses only what the sandbox's own judge refuses, in linear time."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from signing_async.documents import preflight as module  # an upload of each of hundreds of files takes minutes
from signing_async.sandbox.inspection import inspect  # for the same reason
from tests import pdfs
from tests.growth import grows_linearly

SIGNED_VALUE = b"/V 7 0 R"


def preflight(data: bytes) -> str | None:
    return module.preflight(lambda at, count: data[at : at + count], len(data))


def judge(data: bytes, folder: Path) -> str | None:
    """Return the sandbox's verdict on these bytes."""
    path = folder / "upload.pdf"
    path.write_bytes(data)
    rejection = inspect(path)
    return rejection.code if rejection else None


def accepted() -> dict[str, bytes]:
    """Documents that must pass."""
    report = pdfs.by_reportlab()
    # The preflight does not follow references from the catalog to a signature.
    followed = ("a signature outside any field", "a signed field outside the form", "a text field with the signature's")
    decoys = {name: data for name, data in pdfs.decoys().items() if not name.startswith(followed)}
    return {
        "small": pdfs.make_pdf(),
        "large": pdfs.make_pdf(3_000_000, pages=200),
        "form": pdfs.with_form(),
        "reportlab": report,
        "fpdf2": pdfs.by_fpdf2(),
        "object streams": pdfs.rewritten(report, linearize=True, object_streams=True),
        "xref stream": pdfs.xref_stream_pdf(),
        "hybrid": pdfs.hybrid_pdf(),
        "empty field": pdfs.with_signature_field(),
        "usage rights": pdfs.with_usage_rights(),
        "usage rights, old": pdfs.with_usage_rights(key=b"UR"),
        "usage rights in a field": pdfs.with_usage_rights(in_field=True),
        "a signed attachment, not compressed": pdfs.with_catalog(
            b"/Names<</EmbeddedFiles<</Names[(a)5 0 R]>>>>",
            {5: b"<</Type/Filespec/F(a)/EF<</F 6 0 R>>>>", 6: pdfs.stream_object(pdfs.signed_by_pyhanko(report))},
        ),
        "usage rights, a large file": pdfs.with_signature_field(
            catalog=b"/Perms<</UR3 7 0 R>>", more={5: pdfs.stream_object(b"\n" * 2_500_000)}
        ),
        "signature taken back": pdfs.update(pdfs.with_signature_field(SIGNED_VALUE), {6: pdfs.FIELD + b">>"}, size=9),
        "another generation's signature": pdfs.with_signature_field(b"/V 7 1 R"),
        "junk first": pdfs.prefixed(b"junk\n" * 200, absolute=False),
        "counted junk first": pdfs.prefixed(b"junk\n" * 200, absolute=True),
        **decoys,
        **pdfs.damaged(),
    }


def refused() -> dict[str, tuple[str, bytes]]:
    """Ordinary documents that must be refused, with their verdicts."""
    report = pdfs.by_reportlab()
    locked = pdfs.encrypted(report)
    protected = {
        "encrypted": locked,
        "encrypted, object streams": pdfs.encrypted(report, "AES-128", user="secret", object_streams=True),
        "encrypted, linearized": pdfs.encrypted(report, linearize=True),
        "encrypted, linearized, object streams": pdfs.encrypted(report, linearize=True, object_streams=True),
        "encrypted, with RC4": pdfs.encrypted(report, "RC4-40"),
        "encrypted, junk first": b"junk" * 9 + locked,
        "encrypted in place": pdfs.assemble(pdfs.basic_objects(), trailer=b"/Encrypt<</Filter/Standard/V 1>>"),
        "encrypted hybrid": pdfs.hybrid_pdf(b"/Encrypt 4 0 R"),
        "encrypted, a large file": pdfs.encrypted(pdfs.make_pdf(2_500_000)),
        "encrypted, behind strings": pdfs.assemble(pdfs.basic_objects(), trailer=rb"/ID[(a\)(>>)) (b)]/Encrypt 4 0 R"),
    }
    signature = pdfs.signed_by_pyhanko(report)
    signed = {
        "pyHanko": signature,
        "linearized": pdfs.rewritten(signature, linearize=True, object_streams=True),
        "after an update": pdfs.update(pdfs.with_signature_field(SIGNED_VALUE), {5: pdfs.stream_object(b"")}, size=9),
        "of a large file": pdfs.signed_by_pyhanko(pdfs.make_pdf(2_500_000, pages=300)),
        "in place": pdfs.with_catalog(
            b"/AcroForm<</Fields[6 0 R]>>", {6: pdfs.FIELD + b"/V " + pdfs.SIGNATURE + b">>"}
        ),
        "behind junk": b"junk\n" + signature,
        "in the permissions": pdfs.with_signature_field(catalog=b"/Perms<</DocMDP 7 0 R>>"),
    }
    return {name: ("protected", data) for name, data in protected.items()} | {
        name: ("already_signed", data) for name, data in signed.items()
    }


def test_document_that_the_sandbox_accepts_passes(tmp_path: Path) -> None:
    for name, data in accepted().items():
        assert judge(data, tmp_path) is None, name
        assert preflight(data) is None, name


def test_protected_and_signed_documents_get_the_verdict_of_the_sandbox(tmp_path: Path) -> None:
    for name, (verdict, data) in refused().items():
        assert judge(data, tmp_path) == verdict, name
        assert preflight(data) == verdict, name


def test_broken_file_is_not_pdf_or_passes() -> None:
    """Subtle damage is left to the service."""
    others = ("nothing", "text", "html", "zip", "png", "only a header", "a header too late")
    for name, data in pdfs.not_pdfs().items():
        assert preflight(data) in (("not_pdf",) if name in others else ("not_pdf", None)), name


def test_hostile_file_is_refused_only_if_the_sandbox_refuses_it(tmp_path: Path) -> None:
    for name, data in pdfs.hostile().items():
        verdict = preflight(data)
        assert verdict is None or verdict == judge(data, tmp_path), name


def test_words_across_the_edge_of_a_block_are_found() -> None:
    signed = pdfs.with_signature_field(SIGNED_VALUE)
    for edge in range(-12, 3):
        filler = module.BLOCK + edge - signed.index(b"/ByteRange")
        assert preflight(signed[:9] + b"\n" * filler + signed[9:]) == "already_signed", edge


PARTS = [
    b"trailer", b"obj", b"\ntrailer<<", b"startxref 9\n", b"startxref\n9", b"(", b"()", b"((", b"<<", b">>", b"[", b"%",
    b"\\", b"/Encrypt", b"/Encrypt 1 0 R ", b"/ByteRange", b"1 0 obj<</ByteRange", b"(/ByteRange", b"1 0 ",
    b"\n1 0 obj", b"1 0 R", b"%%EOF", b"/FT/Sig", b"1 0 obj\n", b" ", b"9",
]  # fmt: skip


def test_time_is_linear_on_repeated_words() -> None:
    def work(part: bytes, size: int) -> None:
        middle = part * (size // len(part))
        preflight(b"%PDF-1.7\n1 0 obj" + middle + b"\nxref\n0 0\ntrailer\n<<" + middle + b"/ByteRange>>\nstartxref\n9")

    for part in PARTS:
        assert grows_linearly(partial(work, part), 100_000), part
