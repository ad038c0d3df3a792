"""The signing page, where a recipient reads the documents and signs or declines."""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import web

from ..records import Document, Recipient, Signing
from ..refused import Refused
from .components import Standing, alert, card, detail_page, facts, heading, moment, signing_page, standing
from .markup import Child, Html, isolated, tag, theirs
from .site import Site, redirect
from .texts import LANGUAGES, Texts

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
            raise redirect(f"{signing_page(recipient)}/bankid")
        try:
            if decision == "decline":
                await self._state.signatures.decline(recipient.id)
            elif decision == "sign":
                await self._state.signatures.sign(recipient.id)
            else:
                return self._page(request, recipient, problem=texts.choose, status=400)
        except Refused as refused:
            return self._refused(request, refused)
        raise redirect(signing_page(recipient))

    def _refused(self, request: web.Request, refused: Refused) -> web.Response:
        recipient = self._recipient(request)  # read again: its state may have changed
        now = standing(self._state.signatures, self._service.signing(recipient.signing_id), recipient)
        problem = self._texts(recipient).refusals.get(now, refused.message)
        return self._page(request, recipient, problem=problem, status=refused.status)

    def _recipient(self, request: web.Request) -> Recipient:
        return self._service.recipient(request.match_info["recipient_id"])

    def _texts(self, recipient: Recipient) -> Texts:
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
        now = standing(self._state.signatures, signing, recipient)
        sender = self._state.accounts.user(signing.user_id)
        documents = self._service.documents(signing.id)
        return self._site.page(
            request,
            f"{texts.sign}: {isolated(signing.name)}",
            tag(
                "div",
                tag("h1", theirs(signing.name)),
                tag("p", f"{texts.from_} ", tag("strong", theirs(sender.name)), " (", theirs(sender.email), ")"),
                tag("p", theirs(signing.message), class_="said") if signing.message else None,
                tag("p", texts.own_page, class_="own"),
                class_="heading upright",
            ),
            alert(texts.must_read if unticked else problem),
            self._status(texts, signing, recipient, now),
            tag(
                "div",
                tag(
                    "div",
                    card(
                        texts.documents,
                        [_document(texts, d, open_=n == 0) for n, d in enumerate(documents)],
                        anchor="documents",
                    ),
                ),
                tag(
                    "div",
                    self._form(request, texts, recipient, unticked) if now == "invited" else None,
                    self._signers(texts, signing, recipient),
                    class_="side",
                ),
                class_="columns",
            ),
            for_recipients=True,
            language=texts.code,
            status=status,
        )

    def _status(self, texts: Texts, signing: Signing, recipient: Recipient, now: Standing) -> Html:
        statuses: dict[Standing, tuple[str, int | None, str]] = {
            "draft": (texts.state_draft, None, "quiet"),
            "waiting": (texts.state_waiting, None, "quiet"),
            "invited": (texts.valid_until, recipient.expires_at, "busy"),
            "expired": (texts.state_expired, recipient.expires_at, "warn"),
            "signed": (
                texts.state_completed if signing.is_completed else texts.state_signed,
                recipient.completed_at,
                "good",
            ),
            "declined": (texts.state_declined, recipient.declined_at, "bad"),
            "cancelled": (texts.state_cancelled, None, "bad"),
        }
        text, at, tone = statuses[now]
        return tag(
            "p", tag("strong", texts.standings[now]), tag("br"), text, [" ", moment(at), "."] if at else None,
            class_=f"state {tone}", id="state",
        )  # fmt: skip

    def _form(self, request: web.Request, texts: Texts, recipient: Recipient, unticked: bool) -> Html:
        method = recipient.signing_method
        action = signing_page(recipient)
        approves = method == "approval"
        agree = tag(
            "input",
            type="checkbox",
            name="agree",
            value="on",
            id="agree",
            required=True,
            aria_invalid="true" if unticked else None,
            aria_describedby="agree-error" if unticked else None,
        )
        button = texts.approve if approves else texts.to_bankid if method == "bankid" else texts.sign
        sign = self._site.form(
            request,
            action,
            tag(
                "div",
                tag("label", agree, tag("span", texts.read_approve if approves else texts.read), class_="tick"),
                tag("p", texts.must_read, class_="error", id="agree-error") if unticked else None,
                class_="field wrong" if unticked else "field",
            ),
            tag("button", button, name="decision", value="bankid" if method == "bankid" else "sign", class_="wide"),
            class_="stack",
        )
        cancels = self._state.profile.decline_effect == "cancels"
        decline = self._site.form(
            request,
            action,
            tag("p", texts.decline_cancels if cancels else texts.decline_stays),
            tag("button", texts.decline, name="decision", value="decline", class_="danger wide"),
            class_="stack",
        )
        return card(
            texts.approve if approves else texts.sign,
            tag("p", tag("span", texts.simulated, class_="badge warn"), " ", _how(texts, recipient), class_="how"),
            sign,
            tag("details", tag("summary", f"{texts.decline} …"), decline),
            anchor="sign",
        )

    def _signers(self, texts: Texts, signing: Signing, me: Recipient) -> Html:
        everybody = self._service.recipients(signing.id)
        sequential = signing.signing_order == "sequential"
        if sequential:
            everybody = sorted(everybody, key=lambda recipient: recipient.order or 0)
        invited = [other for other in everybody if other.invited_at is not None and not other.is_done]
        shown = [
            tag(
                "li",
                tag("span", theirs(other.full_name), f" ({texts.you})" if other.id == me.id else None),
                " ",
                _mark(texts, standing(self._state.signatures, signing, other)),
                aria_current="step" if sequential and signing.state == "sent" and other in invited else None,
            )
            for other in everybody
        ]
        next_up = None
        if sequential and signing.state == "sent" and invited and invited[0].id != me.id:
            next_up = tag("p", f"{texts.turn_of} ", tag("strong", theirs(invited[0].full_name)), ".")
        return card(
            texts.signers,
            tag("p", texts.sequential if sequential else texts.parallel, class_="quiet"),
            next_up,
            tag("ol" if sequential else "ul", shown, class_="signers"),
            anchor="signers",
        )

    # the simulated BankID

    async def bankid(self, request: web.Request) -> web.Response:
        """Show the simulated BankID app; redirect to the signing page if the recipient cannot sign with BankID now."""
        recipient = self._recipient(request)
        signing, texts = self._service.signing(recipient.signing_id), self._texts(recipient)
        if recipient.signing_method != "bankid" or standing(self._state.signatures, signing, recipient) != "invited":
            raise redirect(signing_page(recipient))
        form = self._site.form(
            request,
            signing_page(recipient),
            tag("input", type="hidden", name="agree", value="on"),
            tag("button", texts.bankid_confirm, name="decision", value="sign", class_="wide"),
            tag("a", texts.bankid_back, href=signing_page(recipient), class_="button plain wide"),
            class_="stack",
        )
        documents: list[Child] = [tag("li", theirs(document.name)) for document in self._service.documents(signing.id)]
        return self._site.page(
            request,
            texts.bankid,
            tag(
                "section",
                heading(texts.bankid, own=False),
                tag("p", texts.bankid_plays, class_="warning"),
                tag("p", texts.bankid_signs, " ", tag("strong", theirs(signing.name)), ":"),
                tag("ul", documents),
                facts(
                    (texts.name, theirs(recipient.full_name)),
                    (texts.bankid_number, theirs(recipient.identification) if recipient.identification else None),
                ),
                form,
                class_="card phone",
            ),
            for_recipients=True,
            language=texts.code,
        )

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


def _how(texts: Texts, recipient: Recipient) -> Child:
    method = recipient.signing_method
    if method == "sms":
        before, after = texts.how_sms.split("{phone}")
        return [before, theirs(recipient.phone or "–"), after]
    known = {"email": texts.how_email, "approval": texts.how_approval, "bankid": texts.how_bankid}
    return known.get(method) or texts.how_other.format(method=method)


def _mark(texts: Texts, now: Standing) -> Html:
    tone = {"signed": "good", "declined": "bad", "cancelled": "bad", "expired": "warn", "invited": "busy"}.get(
        now, "quiet"
    )
    return tag("span", texts.standings[now], class_=f"badge {tone}")


def _document(texts: Texts, document: Document, *, open_: bool) -> Html:
    folder = f"{detail_page(document.signing_id)}/documents/{document.id}"
    original = f"{folder}/original.pdf"
    shown, label, kind = original, texts.open_original, texts.original
    if document.sealed_file:
        shown, label, kind = f"{folder}/sealed.pdf", texts.open_sealed, texts.sealed
    fallback = tag("p", texts.no_viewer, " ", tag("a", label, href=shown))
    named = [tag("span", ": ", theirs(document.name), class_="unseen")]
    links = [tag("a", label, named, href=shown, target="_blank", rel="noopener")]
    if document.sealed_file:
        links.append(tag("a", texts.open_original, named, href=original, target="_blank", rel="noopener"))
    return tag(
        "details",
        tag(
            "summary",
            theirs(document.name),
            " ",
            tag("span", kind, class_="badge good" if document.sealed_file else "badge quiet"),
        ),
        tag("div", links, class_="buttons"),
        tag(
            "object",
            fallback,
            data=f"{shown}#navpanes=0&view=FitH",
            type="application/pdf",
            aria_label=f"{kind}: {isolated(document.name)}",
        ),
        class_="document",
        open=open_,
    )


def _pdf(name: str) -> dict[str, str]:
    full = name if name.lower().endswith(".pdf") else f"{name}.pdf"
    disposition = f"inline; filename=\"document.pdf\"; filename*=UTF-8''{quote(full, safe='')}"
    return PDF_HEADERS | {"Content-Type": "application/pdf", "Content-Disposition": disposition}
