"""The signing page, where a recipient reads the documents and signs or declines."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from aiohttp import web

from ..records import Recipient, Signing
from ..refused import Refused
from .site import EMPTY, STATE, TEXTS, Filled, form, page, redirect, standing

SIGN = "/sandbox/sign/{recipient_id}"
DOCUMENT = "/sandbox/signings/{signing_id}/documents/{document_id}"
PDF_HEADERS = {
    "Content-Type": "application/pdf",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'self'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def _find(request: web.Request) -> tuple[Recipient, Signing, dict[str, Any], str]:
    """Return the recipient of the page, the signing, the texts in its language, and the recipient's state."""
    state = request.app[STATE]
    recipient = state.service.recipient(request.match_info["recipient_id"])
    signing = state.service.signing(recipient.signing_id)
    return recipient, signing, TEXTS[signing.language], standing(state, signing, recipient)


async def sign(request: web.Request, filled: Filled = EMPTY) -> web.Response:
    recipient, signing, texts, now = _find(request)
    everybody = request.app[STATE].service.recipients(signing.id)
    if signing.signing_order == "sequential":
        everybody = sorted(everybody, key=lambda recipient: recipient.order or 0)
    return page(
        request,
        "sign.html",
        filled,
        signing=signing,
        recipient=recipient,
        now=now,
        everybody=everybody,
        turns=[other.id for other in everybody if other.invited_at is not None and not other.is_done],
        texts=texts,
    )


async def act(request: web.Request) -> web.Response:
    """Sign, decline, or continue to the simulated BankID."""
    fields, state = await form(request), request.app[STATE]
    recipient, _, texts, _ = _find(request)
    decision = fields.get("decision")
    if decision not in {"sign", "bankid", "decline"}:
        return await sign(request, Filled(problem=texts["choose"], status=400))
    if decision != "decline" and fields.get("agree") != "on":
        return await sign(request, Filled(errors={"agree": []}, problem=texts["must_read"], status=400))
    if decision == "bankid":
        raise redirect(f"{request.path}/bankid")
    try:
        await (state.signatures.sign if decision == "sign" else state.signatures.decline)(recipient.id)
    except Refused as refused:
        now = _find(request)[-1]
        return await sign(request, Filled(problem=texts["refusals"].get(now, refused.message), status=refused.status))
    raise redirect(request.path)


async def bankid(request: web.Request) -> web.Response:
    """Show the simulated BankID app; redirect to the signing page if the recipient cannot sign with BankID now."""
    recipient, signing, texts, now = _find(request)
    if recipient.signing_method != "bankid" or now != "invited":
        raise redirect(request.path.removesuffix("/bankid"))
    return page(request, "bankid.html", signing=signing, recipient=recipient, texts=texts)


async def document(request: web.Request) -> web.FileResponse:
    """Respond with a document as it was uploaded, or sealed; 404 until it is sealed."""
    service = request.app[STATE].service
    found = service.document(request.match_info["signing_id"], request.match_info["document_id"])
    sealed = request.match_info["file"] == "sealed"
    path = service.signed_path(found.signing_id, found.id) if sealed else service.document_path(found.id)
    name = found.name if found.name.lower().endswith(".pdf") else f"{found.name}.pdf"
    disposition = f"inline; filename=\"document.pdf\"; filename*=UTF-8''{quote(name, safe='')}"
    return web.FileResponse(path, headers=PDF_HEADERS | {"Content-Disposition": disposition})


ROUTES = [
    web.get(SIGN, sign),
    web.post(SIGN, act),
    web.get(f"{SIGN}/bankid", bankid),
    web.get(f"{DOCUMENT}/{{file:original|sealed}}.pdf", document),
]
