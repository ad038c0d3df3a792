"""How the package is used, for type checkers: every value has the type that its documentation promises.

Checked by mypy and pyright, and never run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, assert_type

import aiohttp
import attrs

from signing_async import (
    DispatchResult,
    Document,
    FileTokenStore,
    Journal,
    Language,
    LocalRateLimiter,
    MemoryTokenStore,
    NewRecipient,
    OAuth,
    Page,
    Pager,
    PdfSource,
    RateLimiter,
    Reader,
    Recipient,
    RemindResult,
    Response,
    ResponseStream,
    SealedFile,
    Signing,
    SigningClient,
    SigningMethod,
    SigningPackage,
    SigningState,
    SqliteJournal,
    TenantApp,
    Tenants,
    Token,
    TokenStore,
    UploadResult,
    User,
)
from signing_async.archive import Archive, ArchivedDocument, ArchiveResult
from signing_async.documents.source import Source  # named in a signature


async def records(client: SigningClient) -> None:
    """What the calls return, and what is in it."""
    assert_type(await client.me(), User)
    signing = await client.signings.create(name="Lease", language="EN", signing_order="parallel")
    assert_type(signing, Signing)
    assert_type(signing.state, SigningState)
    assert_type(signing.language, Language | None)
    assert_type(signing.documents, tuple[Document, ...])
    assert_type(signing.extra, Mapping[str, Any])
    assert_type(await client.signings.get(signing), Signing)
    recipient = await client.recipients.add(signing, email="anna@example.com", signing_method=SigningMethod.BANKID)
    assert_type(recipient, Recipient)
    assert_type(client.recipients.list(signing), Pager[Recipient])
    assert_type(await client.recipients.remind_pending(signing), list[RemindResult])


async def paging(client: SigningClient) -> None:
    """The three ways to use a list."""
    pager = client.signings.list(limit=50)
    assert_type(pager, Pager[Signing])
    page = await pager
    assert_type(page, Page[Signing])
    async for signing in pager:
        assert_type(signing, Signing)
    async for each in client.signings.list(cursor=page.next_cursor, prefetch=False).pages():
        assert_type(each, Page[Signing])


async def files(client: SigningClient, signing: Signing) -> None:
    """Documents go up from any source, and come down sealed."""
    document = await client.documents.upload(signing, Path("lease.pdf"))
    assert_type(document, Document)
    assert_type(await client.documents.upload(signing, PdfSource("lease.pdf")), Document)
    sealed = await client.documents.download_signed(signing, document, Path("sealed.pdf"))
    assert_type(sealed, SealedFile)


@attrs.frozen
class Template:
    """A class of the user's own."""

    id: str
    name: str = ""


async def any_endpoint(client: SigningClient, signing: Signing) -> None:
    """A response has the type that is asked for, also after a reconciliation."""

    async def find(read: Reader) -> Template | None:
        assert_type(await read("/api/1.0/x/{id}", path={"id": signing}, params={"a": 1}), Response)
        templates = [template async for template in read.paginate("/api/1.0/templates", into=Template)]
        assert_type(read.only(templates), Template | None)
        return read.only(templates)

    async def find_response(read: Reader) -> Response | None:
        return await read("/api/1.0/x")

    response = await client.request("POST", "/api/1.0/x/{id}", path={"id": signing}, json={"a": [1]}, timeout=5)
    assert_type(response, Response)
    assert_type(response.decode(Signing), Signing)
    assert_type(response.decode(list[Template]), list[Template])
    assert_type(await client.request("POST", "/api/1.0/x", into=Template, reconcile=find), Template)
    assert_type(await client.request("POST", "/api/1.0/x", body=b"a", reconcile=find_response), Response)
    assert_type(await client.request("PUT", "/x", body={"a": "b", "file": PdfSource("a.pdf")}, repeat=True), Response)
    assert_type(client.paginate("/api/1.0/templates", into=Template, limit=5), Pager[Template])
    assert_type(client.paginate("/api/1.0/templates", params={"state": "new"}), Pager[dict[str, Any]])
    async with client.stream("GET", "/api/1.0/exports", headers={"Accept": "text/csv"}) as stream:
        assert_type(stream, ResponseStream)
        async for chunk in stream:
            assert_type(chunk, bytes)
    seen: list[Response] = []
    client.with_options(on_response=seen.append, on_attempt=lambda attempt: print(attempt.headers["X-Limit"]))


async def tokens(oauth: OAuth, path: Path) -> None:
    """Either store, or one of the user's own."""
    store: TokenStore = FileTokenStore(path)
    store = MemoryTokenStore()
    assert_type(await store.load(), Token | None)
    assert_type(await oauth.exchange("https://app.example.com/callback?code=x", state="s"), Token)
    SigningClient("https://tenant.example.com", oauth)


async def in_bulk(client: SigningClient, folder: Path) -> None:
    """Each result has the source that was given, in its own type."""
    async with client.documents.upload_many("id", folder.glob("*.pdf"), concurrency=4) as results:
        async for result in results:
            assert_type(result, UploadResult[Path])
            assert_type(result.document, Document | None)
            assert_type(result.error, Exception | None)
            assert_type(result.error or result.document, Exception | Document | None)
            if result.error is not None:
                assert_type(result.document, None)
                raise result.error
            assert_type(result.document, Document)
    async for paired in client.documents.upload_many(None, [("id", "lease.pdf")]):
        assert_type(paired.source, tuple[str, str])
    signing, file = await client.signings.get("id"), PdfSource("plan.pdf")
    async for mixed in client.documents.upload_many(signing, ["lease.pdf", folder / "a.pdf", b"%PDF-1.7", file]):
        if mixed.error is None:
            assert_type(mixed.document, Document)
    async for mixed_pair in client.documents.upload_many(
        None, [("id", "lease.pdf"), (signing, folder), (signing, file)]
    ):
        if mixed_pair.error is None:
            assert_type(mixed_pair.document, Document)


async def whole_packages(client: SigningClient, journal: Journal) -> None:
    """A package takes lists of what a recipient and a document may be, and packages come from anywhere."""
    anna = NewRecipient(
        "anna@example.com", "Anna", signing_method=SigningMethod.BANKID, extra={"phone": "+46701234567"}
    )
    package = SigningPackage("Lease", "EN", [Path("lease.pdf"), b"%PDF-1.7", PdfSource("plan.pdf")], [anna], key="2031")
    assert_type(package.documents[0], Source | PdfSource)
    assert_type(package.recipients, tuple[NewRecipient, ...])
    assert_type(await client.dispatch(package, "leases.journal"), Signing)

    async def packages() -> AsyncGenerator[SigningPackage, None]:
        yield package

    async with (
        SqliteJournal(Path("leases.journal")) as kept,
        client.dispatch_many(packages(), journal=kept, concurrency=4) as results,
    ):
        async for result in results:
            assert_type(result, DispatchResult)
            assert_type(result.signing, Signing | None)
            assert_type(result.error, Exception | None)
            assert_type(result.error or result.signing, Exception | Signing | None)
            if result.error is None:
                assert_type(result.signing, Signing)


async def archiving(client: SigningClient) -> None:
    """A document that was archived has a line in the manifest."""
    async with Archive(client, "archive/", journal="archive.db") as archive, archive.sweep() as results:
        async for result in results:
            assert_type(result, ArchiveResult)
            assert_type(result.error or result.entry, Exception | ArchivedDocument | None)
            if result.error is None:
                assert_type(result.entry, ArchivedDocument)
                assert_type(result.document, Document)


async def many_tenants(session: aiohttp.ClientSession, shared: RateLimiter) -> None:
    """Factories may be plain or asynchronous."""

    async def app(tenant_id: str) -> TenantApp:
        return TenantApp("https://tenant.example.com", "id", "secret", "https://app.example.com/callback")

    def store(tenant_id: str) -> TokenStore:
        return MemoryTokenStore()

    async with Tenants(store, app, session, max_clients=10, rate_limiter_factory=lambda tenant_id: shared) as tenants:
        async with tenants.client("acme") as client:
            assert_type(client, SigningClient)
        async with tenants.oauth("acme") as oauth:
            assert_type(oauth, OAuth)
    limiter: RateLimiter = LocalRateLimiter()
    SigningClient("https://tenant.example.com", "token", rate_limiter=limiter)
