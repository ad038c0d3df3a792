"""The signing page, where a recipient reads the documents and signs or declines."""

from __future__ import annotations

from types import SimpleNamespace
from urllib.parse import quote

from aiohttp import web

from ..records import Document, Recipient
from ..refused import Refused
from .site import Site, redirect, standing
from .texts import LANGUAGES

PDF_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'self'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class SigningPage:
    """A recipient's page, in the signing's language."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._state = site.state
        self._service = site.state.service

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/sandbox/sign/{recipient_id}", self.page),
            web.post("/sandbox/sign/{recipient_id}", self.act),
            web.get("/sandbox/sign/{recipient_id}/bankid", self.bankid),
            web.get("/sandbox/signings/{signing_id}/documents/{document_id}/original.pdf", self.original),
            web.get("/sandbox/signings/{signing_id}/documents/{document_id}/sealed.pdf", self.sealed),
        ]

    async def page(self, request: web.Request) -> web.Response:
        """Show the signing page."""
        return self._page(request, self._recipient(request))

    async def act(self, request: web.Request) -> web.Response:
        """Sign, decline, or continue to the simulated BankID."""
        fields, recipient = await self._site.fields(request), self._recipient(request)
        decision = fields.get("decision")
        texts = self._texts(recipient)
        if decision in {"sign", "bankid"} and fields.get("agree") != "on":
            return self._page(request, recipient, unticked=True, status=400)
        if decision == "bankid":
            raise redirect(f"{_path(recipient)}/bankid")
        try:
            if decision == "decline":
                await self._state.signatures.decline(recipient.id)
            elif decision == "sign":
                await self._state.signatures.sign(recipient.id)
            else:
                return self._page(request, recipient, problem=texts.choose, status=400)
        except Refused as refused:
            return self._refused(request, refused)
        raise redirect(_path(recipient))

    def _refused(self, request: web.Request, refused: Refused) -> web.Response:
        recipient = self._recipient(request)  # read again: its state may have changed
        now = standing(self._state, self._service.signing(recipient.signing_id), recipient)
        problem = self._texts(recipient).refusals.get(now, refused.message)
        return self._page(request, recipient, problem=problem, status=refused.status)

    def _recipient(self, request: web.Request) -> Recipient:
        return self._service.recipient(request.match_info["recipient_id"])

    def _texts(self, recipient: Recipient) -> SimpleNamespace:
        return LANGUAGES[self._service.signing(recipient.signing_id).language]

    def _page(
        self,
        request: web.Request,
        recipient: Recipient,
        *,
        problem: str | None = None,
        unticked: bool = False,
        status: int = 200,
    ) -> web.Response:
        signing, texts = self._service.signing(recipient.signing_id), self._texts(recipient)
        everybody = self._service.recipients(signing.id)
        if signing.signing_order == "sequential":
            everybody = sorted(everybody, key=lambda recipient: recipient.order or 0)
        how = {name: getattr(texts, f"how_{name}") for name in ("email", "approval", "bankid", "sms")}
        return self._site.page(
            request,
            "sign.html",
            status,
            signing=signing,
            recipient=recipient,
            now=standing(self._state, signing, recipient),
            everybody=everybody,
            turns=[other.id for other in everybody if other.invited_at is not None and not other.is_done],
            texts=texts,
            how=how.get(recipient.signing_method, texts.how_other),
            problem=texts.must_read if unticked else problem,
            unticked=unticked,
        )

    # the simulated BankID

    async def bankid(self, request: web.Request) -> web.Response:
        """Show the simulated BankID app; redirect to the signing page if the recipient cannot sign with BankID now."""
        recipient = self._recipient(request)
        signing, texts = self._service.signing(recipient.signing_id), self._texts(recipient)
        if recipient.signing_method != "bankid" or standing(self._state, signing, recipient) != "invited":
            raise redirect(_path(recipient))
        return self._site.page(request, "bankid.html", signing=signing, recipient=recipient, texts=texts)

    # the documents

    async def original(self, request: web.Request) -> web.FileResponse:
        """Respond with a document as it was uploaded."""
        document = self._document(request)
        return web.FileResponse(self._service.document_path(document.id), headers=_pdf(document.name))

    async def sealed(self, request: web.Request) -> web.FileResponse:
        """Respond with a sealed document; 404 until it is sealed."""
        document = self._document(request)
        path = self._service.signed_path(document.signing_id, document.id)
        return web.FileResponse(path, headers=_pdf(document.name))

    def _document(self, request: web.Request) -> Document:
        return self._service.document(request.match_info["signing_id"], request.match_info["document_id"])


def _pdf(name: str) -> dict[str, str]:
    full = name if name.lower().endswith(".pdf") else f"{name}.pdf"
    disposition = f"inline; filename=\"document.pdf\"; filename*=UTF-8''{quote(full, safe='')}"
    return PDF_HEADERS | {"Content-Type": "application/pdf", "Content-Disposition": disposition}


def _path(recipient: Recipient) -> str:
    return f"/sandbox/sign/{recipient.id}"
