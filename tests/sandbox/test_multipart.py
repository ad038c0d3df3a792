"""The multipart parser, alone and under uploads that are not what they seem."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Sequence

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signing_async.sandbox import Sandbox
from signing_async.sandbox.multipart import MalformedMultipart, Multipart, PartHeaders, boundary_of
from tests.pdfs import make_pdf
from tests.sandbox.serving import API, Caller

Part = tuple[str | None, str | None, bytes | None]


def body_of(parts: Sequence[Part], boundary: str = "bOuNdArY") -> tuple[bytes, str]:
    """A body of these parts (name, filename, content; None is left out, and a small PDF), and its content type."""
    out = b""
    for name, filename, content in parts:
        disposition = "form-data"
        if name is not None:
            disposition += f'; name="{name}"'
        if filename is not None:
            disposition += '; filename="{}"'.format(filename.replace("\\", "\\\\").replace('"', '\\"'))
        out += f"--{boundary}\r\nContent-Disposition: {disposition}\r\n\r\n".encode()
        out += (make_pdf() if content is None else content) + b"\r\n"
    return out + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def parse(body: bytes, boundary: bytes, cuts: Sequence[int] = ()) -> list[tuple[PartHeaders, bytes]]:
    """The parts of a body that arrives cut into pieces."""
    multipart = Multipart(boundary)
    parts: list[tuple[PartHeaders, bytearray]] = []
    edges = [0, *sorted(cuts), len(body)]
    for start, end in itertools.pairwise(edges):
        for found in multipart.feed(body[start:end]):
            if isinstance(found, PartHeaders):
                parts.append((found, bytearray()))
            else:
                parts[-1][1].extend(found)
    if not multipart.finished:
        raise MalformedMultipart("not finished")
    return [(headers, bytes(content)) for headers, content in parts]


CONTENTS = st.one_of(
    st.binary(max_size=200),
    st.lists(st.sampled_from([b"\r\n", b"--", b"bOuNdArY", b"\r\n--bOuNdAr", b"x", b"-"]), max_size=12).map(b"".join),
)


@given(contents=st.lists(CONTENTS, min_size=1, max_size=4), data=st.data())
@settings(max_examples=200, deadline=None)
def test_however_it_is_cut_the_parts_come_out(contents: list[bytes], data: st.DataObject) -> None:
    """Parts of any content, arriving in any pieces, come out as they went in."""
    contents = [content for content in contents if b"\r\n--bOuNdArY" not in b"\r\n" + content]
    body, kind = body_of([(f"f{n}", None, content) for n, content in enumerate(contents)])
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    boundary = boundary_of(kind)
    assert boundary == b"bOuNdArY"
    assert [content for _, content in parse(body, boundary, cuts)] == contents


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5))
@settings(max_examples=200, deadline=None)
def test_noise_is_malformed_and_nothing_else(noise: bytes, cuts: list[int]) -> None:
    """Whatever comes, the parser gives parts or says that it is malformed."""
    for body in (noise, b"--b\r\n" + noise, b"--b\r\n\r\n" + noise + b"\r\n--b--"):
        try:
            parse(body, b"b", cuts)
        except MalformedMultipart:
            continue


@pytest.mark.parametrize(
    ("header", "filename"),
    [
        ('form-data; name="f"; filename="a.pdf"', "a.pdf"),
        ("form-data; name=f; filename=a.pdf", "a.pdf"),
        ('form-data; name="f"; filename="a \\"b\\" \\\\c.pdf"', 'a "b" \\c.pdf'),
        ('form-data; name="f"; filename="a%22b%0D%0A.pdf"', 'a"b\r\n.pdf'),
        ('form-data; name="f"; filename="x"; filename*=UTF-8\'\'%c3%a5.pdf', "å.pdf"),
        ('form-data; name="f"; filename="x"; filename*=nonsense', "x"),
        ('form-data; name="f"; filename="x"; filename*=klingon\'\'y', "x"),
        ('form-data; filename="åäö.pdf"; name="f"', "åäö.pdf"),
        ('FORM-DATA;NAME="f";FILENAME="a;b=c.pdf"', "a;b=c.pdf"),
        ('form-data; name="f"', None),
        ('form-data; name="f"; x="1"', None),
        ('form-data; name="f"; filename=""', ""),
    ],
)
def test_file_names(header: str, filename: str | None) -> None:
    """File names in all the ways in which browsers and libraries write them."""
    body = f"--b\r\nX-Other: 1\r\nContent-Disposition: {header}\r\n\r\nDATA\r\n--b--".encode()
    assert parse(body, b"b") == [(PartHeaders("f", filename), b"DATA")]


def test_parts_that_are_no_fields() -> None:
    """A part that is no form field has no name."""
    body = b'--b\r\nContent-Disposition: attachment; name="f"\r\n\r\nDATA\r\n--b\r\n\r\nMORE\r\n--b--'
    assert parse(body, b"b") == [(PartHeaders(None, None), b"DATA"), (PartHeaders(None, None), b"MORE")]


@pytest.mark.parametrize(
    ("kind", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=utf-8; Boundary="a b;c"', b"a b;c"),
        ("multipart/form-data", None),
        ("multipart/form-data; boundary=", None),
        ("multipart/mixed; boundary=abc", None),
        ("application/json", None),
        ("", None),
    ],
)
def test_boundaries(kind: str, boundary: bytes | None) -> None:
    """The boundary is what the content type says, or there is none."""
    assert boundary_of(kind) == boundary


MALFORMED = {
    "nothing": b"",
    "no boundary": b"hello",
    "no end": b'--b\r\nContent-Disposition: form-data; name="selected_file"; filename="a"\r\n\r\n%PDF',
    "no end of headers": b"--b\r\nContent-Disposition: form-data",
    "a header that is none": b"--b\r\nnonsense\r\n\r\nx\r\n--b--",
    "a header with space": b"--b\r\nContent-Disposition : form-data\r\n\r\nx\r\n--b--",
    "text after a boundary": b"--bxyz\r\nA: b\r\n\r\nx\r\n--b--",
    "endless headers": b"--b\r\nA: " + b"x" * 40_000,
    "long headers": b"--b\r\nA: " + b"x" * 40_000 + b"\r\n\r\n\r\n--b--",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_uploads(call: Caller, body: bytes) -> None:
    """A body that is no multipart is a clean 400."""
    path = f"{API}/signings/{await call.draft()}/documents"
    status, answer = await call("POST", path, data=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert (status, answer["code"]) == (400, "malformed_multipart")


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [("other", "a.pdf", None)],
        [("selected_file", None, None)],
        [(None, "a.pdf", None)],
        [("selected_file", "a.pdf", None), ("selected_file", "b.pdf", None)],
    ],
    ids=["none", "another name", "no file", "no name", "two"],
)
async def test_uploads_without_the_one_file(call: Caller, signing_sandbox: Sandbox, parts: list[Part]) -> None:
    """There must be one file part named selected_file."""
    signing_id = await call.draft()
    body, kind = body_of(parts)
    path = f"{API}/signings/{signing_id}/documents"
    status, answer = await call("POST", path, data=body, headers={"Content-Type": kind})
    assert status == 400
    assert "selected_file" in answer["errors"]
    assert signing_sandbox.documents(signing_id) == []


async def test_other_parts_are_ignored(call: Caller, signing_sandbox: Sandbox) -> None:
    """Further fields before and after the file do not matter, as long as they are small."""
    signing_id = await call.draft()
    data = make_pdf(5000)
    parts: list[Part] = [("a", None, b"1"), ("selected_file", "a.pdf", data), ("b", None, b"2")]
    body, kind = body_of(parts)
    path = f"{API}/signings/{signing_id}/documents"
    document = await call.ok("POST", path, data=b"preamble\r\n" + body + b"epilogue", headers={"Content-Type": kind})
    assert signing_sandbox.document_bytes(document["id"]) == data
    body, kind = body_of([*parts, ("c", None, random.Random(1).randbytes(1_100_000))])
    form = aiohttp.BytesIOPayload(io.BytesIO(body), headers={"Content-Type": kind})
    status, answer = await call("POST", path, data=form)
    assert (status, answer["code"]) == (413, "body_too_large")
