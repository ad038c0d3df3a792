"""The arguments of `client.request`: all bad ones are refused by name; forms are multipart."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from signing_async import InvalidRequest, PdfSource, RequestTimeout, SigningClient
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.servers import echo, serving


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("GETT", "/x"), {}, "method: must be one of GET, HEAD, POST, PUT, PATCH, DELETE, got 'GETT'"),
        *(
            (("GET", template), {}, "the path must begin with one slash and be percent-encoded, without query or")
            for template in ("x", None, "https://evil.example/x", "//evil.example/x", "/x?a=1", "/å")
        ),
        *(
            (("GET", template), {"path": {"id": "1"}}, "and its placeholders must be names: got")
            for template in ("/x%", "/x\r\nHost: y", "/{}", "/{id.x}", "/{id")
        ),
        (("GET", "/x/%2e%2E"), {}, "the path must have no segments . and .."),
        (("GET", "/{id}"), {}, r"path: must have a value for each of ['id'] of '/{id}', got []"),
        (("GET", "/x"), {"path": {"id": "1"}}, r"path: must have a value for each of [] of '/x', got ['id']"),
        *((("GET", "/{id}"), {"path": {"id": value}}, "path: id: must be an id") for value in ("", "..", None, True)),
        (("GET", "/{id}"), {"path": "1"}, "path: must be a mapping, got str"),
        (("GET", "/x"), {"params": "a=1"}, "params: must be a mapping, got str"),
        (("GET", "/x"), {"params": {5: "a"}}, "params: names must be non-empty strings, got 5"),
        (("GET", "/x"), {"params": {"a": {}}}, "params: a: must be a string, a number, true, false, None or a list"),
        *((("GET", "/x"), {"params": {"a": bad}}, "params: a: must be") for bad in ([None], float("nan"), "\ud800")),
        (("GET", "/x"), {"headers": []}, "headers: must be a mapping, got list"),
        (("GET", "/x"), {"headers": {"a b": "c"}}, "headers: invalid name 'a b'"),
        *((("POST", "/x"), {"headers": {name: "x"}}, "is set by the client") for name in ("authorization", "expect")),
        (("GET", "/x"), {"headers": {"X": "hush\r\n"}}, "headers: X: must be a string of printable ASCII"),
        (("GET", "/x"), {"json": {}}, "json, body: a GET has no body"),
        (("HEAD", "/x"), {"body": b""}, "json, body: a HEAD has no body"),
        (("POST", "/x"), {"json": {}, "body": {"a": "b"}}, "json, body: pass only one of them"),
        (("POST", "/x"), {"json": {"a": float("inf")}}, "json: cannot encode as JSON: Out of range"),
        (
            ("POST", "/x"),
            {"body": io.BytesIO(b"x")},
            "got BytesIO: encode a string, or use json=; wrap a file in a PdfSource",
        ),
        (("POST", "/x"), {"body": {}}, "body: a form must have a field"),
        (("POST", "/x"), {"body": {5: "x"}}, "body: names of fields must be non-empty strings, got 5"),
        (("POST", "/x"), {"body": {"a": 5}}, "body: a: must be a string or a PdfSource, got int"),
        (("POST", "/x"), {"body": {"a": "b"}, "headers": {"content-type": "x"}}, "the client sets that of a form"),
        (("POST", "/x"), {"repeat": 1}, "repeat: must be true or false, got 1"),
        (("POST", "/x"), {"reconcile": 1}, "reconcile: must be an async function of a Reader, got 1"),
        (("POST", "/x"), {"into": object}, "into: cannot decode JSON to <class 'object'>"),
    ],
)
async def test_bad_argument_is_refused_by_name_before_anything_is_sent(
    arguments: tuple[Any, Any], options: dict[str, Any], said: str
) -> None:
    async with serving(echo) as server, SigningClient(server.origin, "token") as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.request(*arguments, **options)
        assert said in str(caught.value)
        assert "hush" not in str(caught.value)
        assert not server.requests


# Forms


def _parts(sent: dict[str, Any]) -> list[tuple[str, bytes]]:
    """The headers and the content of each part of a form."""
    boundary = sent["headers"]["content-type"].partition("boundary=")[2]
    parts = sent["body"].encode("latin-1").split(b"--" + boundary.encode())
    assert (parts[0], parts[-1]) == (b"", b"--\r\n")
    found = []
    for part in parts[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        found.append((head.decode().strip(), content.removesuffix(b"\r\n")))
    return found


@pytest.mark.parametrize("size", [0, 200_000, 1_000_000])
async def test_form_has_texts_and_files_in_their_order(size: int, tmp_path: Path) -> None:
    small, large = make_pdf(), make_pdf(size)
    path = tmp_path / "large.pdf"
    path.write_bytes(large)
    form = {"title": "Öl", "terms": PdfSource(small, 'a"b.pdf'), "note": "", "annex": PdfSource(path), "end": "x"}
    async with serving(echo) as server, SigningClient(server.origin, "token") as client:
        sent = (await client.request("POST", "/api/1.0/templates", body=form)).json()
    disposition = "Content-Disposition: form-data; name="
    pdf = "\r\nContent-Type: application/pdf"
    assert _parts(sent) == [
        (f'{disposition}"title"', "Öl".encode()),
        (f'{disposition}"terms"; filename="a%22b.pdf"{pdf}', small),
        (f'{disposition}"note"', b""),
        (f'{disposition}"annex"; filename="large.pdf"{pdf}', large),
        (f'{disposition}"end"', b"x"),
    ]
    assert sent["headers"]["content-length"] == str(len(sent["body"]))


async def test_source_alone_is_the_selected_file_of_the_service(sandbox: Sandbox, client: SigningClient) -> None:
    """Any stream of bytes can be sent, and sent again."""
    signing = await client.signings.create(name="x", language="EN")
    pdf = make_pdf(300_000)

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(pdf), 50_000):
            yield pdf[at : at + 50_000]

    sandbox.faults.add("documents.upload", "429", retry_after=0)
    response = await client.request(
        "POST", "/api/1.0/signings/{id}/documents", path={"id": signing}, body=PdfSource(chunks(), "lease.pdf")
    )
    assert sandbox.document_bytes(response.json()["id"]) == pdf
    assert len(sandbox.requests_of("documents.upload")) == 2


async def test_file_of_a_form_is_not_judged_but_its_hash_is(client: SigningClient) -> None:
    async with serving(echo) as server, SigningClient(server.origin, "token") as client:
        assert (await client.request("POST", "/x", body=PdfSource(b"no PDF", "a.pdf"))).status == 200
        with pytest.raises(InvalidRequest, match="sha256 mismatch"):
            await client.request("POST", "/x", body=PdfSource(b"no PDF", "a.pdf", sha256="0" * 64))
        with pytest.raises(InvalidRequest, match="cannot open"):
            await client.request("POST", "/x", body=PdfSource("/missing/a.pdf"))


async def test_source_that_is_slow_ends_at_the_deadline_before_anything_is_sent() -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async def fails() -> AsyncIterator[bytes]:
        raise TimeoutError("the bucket")
        yield b""

    async with serving(echo) as server, SigningClient(server.origin, "token") as client:
        with pytest.raises(RequestTimeout, match="deadline passed before anything was sent") as caught:
            await client.request("POST", "/x", body=PdfSource(never(), "a.pdf"), timeout=0.1)
        assert caught.value.effect == "none"
        with pytest.raises(TimeoutError, match="the bucket"):
            await client.request("POST", "/x", body=PdfSource(fails(), "a.pdf"), timeout=5)
        assert not server.requests
