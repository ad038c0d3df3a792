"""Uploads that are not what they seem: file names, further parts, malformed bodies."""

from __future__ import annotations

import random

import pytest

from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.sandbox.serving import API, Caller, Part, body_of

KIND = {"Content-Type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ('form-data; name="selected_file"; filename="a.pdf"', "a.pdf"),
        ("form-data; name=selected_file; filename=a.pdf", "a.pdf"),
        ('form-data; name="selected_file"; filename="a \\"b\\".pdf"', 'a "b".pdf'),
        ('form-data; name="selected_file"; filename="a%22b%0D%0A.pdf"', 'a"b.pdf'),
        ('form-data; name="selected_file"; filename="x"; filename*=UTF-8\'\'%c3%a5.pdf', "å.pdf"),
        ('form-data; filename="åäö.pdf"; name="selected_file"', "åäö.pdf"),
        ('FORM-DATA;NAME="selected_file";FILENAME="a;b=c.pdf"', "a;b=c.pdf"),
        ('form-data; name="selected_file"; filename=""', "document.pdf"),
    ],
)
async def test_file_names_are_read_as_browsers_and_libraries_write_them(call: Caller, header: str, name: str) -> None:
    path = f"{API}/signings/{await call.draft()}/documents"
    body = f"--b\r\nX-Other: 1\r\nContent-Disposition: {header}\r\n\r\n".encode() + make_pdf() + b"\r\n--b--\r\n"
    assert (await call.ok("POST", path, data=body, headers=KIND))["name"] == name


MALFORMED = {
    "nothing": b"",
    "no boundary": b"hello",
    "no end": b'--b\r\nContent-Disposition: form-data; name="selected_file"; filename="a"\r\n\r\n%PDF',
    "no end of headers": b"--b\r\nContent-Disposition: form-data",
    "an invalid header": b"--b\r\nnonsense\r\n\r\nx\r\n--b--",
    "a header with a space": b"--b\r\nContent-Disposition : form-data\r\n\r\nx\r\n--b--",
    "endless headers": b"--b\r\nA: " + b"x" * 40_000,
    "long headers": b"--b\r\nA: " + b"x" * 40_000 + b"\r\n\r\n\r\n--b--",
    "many headers": b"--b\r\n" + b"A: b\r\n" * 3000 + b"\r\nx\r\n--b--",
    "a nested part": b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\nx\r\n--c--\r\n--b--",
    "a nested part without a boundary": b"--b\r\nContent-Type: multipart/mixed\r\n\r\nx\r\n--b--",
    "a long charset": b'--b\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\n' + b"x" * 40 + b"\r\n--b--",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_multipart_is_refused_with_400(call: Caller, body: bytes) -> None:
    path = f"{API}/signings/{await call.draft()}/documents"
    status, response = await call("POST", path, data=body, headers=KIND)
    assert (status, response["code"]) == (400, "malformed_multipart")


async def test_random_multipart_is_never_a_server_error(call: Caller) -> None:
    path = f"{API}/signings/{await call.draft()}/documents"
    pieces = [b"--b", b"--b--", b"\r\n", b"\n", b"--", b"x", b"\x00", b"Content-Disposition: form-data", b'; name="',
              b'selected_file"', b'; filename="a"', b": ", b"Content-Type: multipart/mixed; boundary=c"]  # fmt: skip
    for seed in range(150):
        dice = random.Random(seed)
        body = b"--b\r\n" * (seed % 2) + b"".join(dice.choices(pieces, k=dice.randrange(1, 30)))
        status, _ = await call("POST", path, data=body, headers=KIND)
        assert 400 <= status < 500, body


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
async def test_upload_needs_exactly_one_file_named_selected_file(
    call: Caller, signing_sandbox: Sandbox, parts: list[Part]
) -> None:
    signing_id = await call.draft()
    body, kind = body_of(parts)
    path = f"{API}/signings/{signing_id}/documents"
    status, response = await call("POST", path, data=body or b"--bOuNdArY--\r\n", headers={"Content-Type": kind})
    assert status == 400
    assert "selected_file" in response["errors"]
    assert signing_sandbox.documents(signing_id) == []


async def test_small_parts_beside_the_file_are_ignored(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id = await call.draft()
    data = make_pdf(5000)
    parts: list[Part] = [("a", None, b"1"), ("selected_file", "a.pdf", data), ("b", None, b"2")]
    body, kind = body_of(parts)
    path = f"{API}/signings/{signing_id}/documents"
    document = await call.ok("POST", path, data=b"preamble\r\n" + body + b"epilogue", headers={"Content-Type": kind})
    assert signing_sandbox.document_bytes(document["id"]) == data
