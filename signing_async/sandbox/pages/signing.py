"""The signing page: what a recipient sees, reads, and signs or declines."""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import web

from ..records import Document, Recipient, Signing
from ..refused import Refused
from .markup import Child, Html, isolated, tag, theirs
from .site import Site, Standing, alert, card, detail_page, facts, heading, moment, see, signing_page, standing
from .texts import LANGUAGES, Words

PDF_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'self'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class SigningPage:
    """One recipient's page, in the signing's language."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._sandbox = site.sandbox
        self._service = site.service

    def routes(self) -> list[web.RouteDef]:
        """The page, its step to BankID, and the documents."""
        return [
            web.get("/sandbox/sign/{recipient_id}", self.page),
            web.post("/sandbox/sign/{recipient_id}", self.act),
            web.get("/sandbox/sign/{recipient_id}/bankid", self.bankid),
            web.get("/sandbox/signings/{signing_id}/documents/{document_id}/original.pdf", self.original),
            web.get("/sandbox/signings/{signing_id}/documents/{document_id}/sealed.pdf", self.sealed),
        ]

    async def page(self, request: web.Request) -> web.Response:
        """What there is to sign."""
        return self._page(request, self._recipient(request))

    async def act(self, request: web.Request) -> web.Response:
        """Sign, decline, or go on to BankID."""
        fields, recipient = await self._site.fields(request), self._recipient(request)
        decision = fields.get("decision")
        words = self._words(recipient)
        if decision in {"sign", "bankid"} and fields.get("agree") != "on":
            return self._page(request, recipient, unticked=True, status=400)
        if decision == "bankid":
            raise see(f"{signing_page(recipient)}/bankid")
        try:
            if decision == "decline":
                await self._sandbox.decline(recipient.id)
            elif decision == "sign":
                await self._sandbox.sign(recipient.id)
            else:
                return self._page(request, recipient, problem=words.choose, status=400)
        except Refused as refused:
            return self._refused(request, refused)
        raise see(signing_page(recipient))

    def _refused(self, request: web.Request, refused: Refused) -> web.Response:
        recipient = self._recipient(request)  # as it is by now
        now = standing(self._service, self._service.signing(recipient.signing_id), recipient)
        problem = self._words(recipient).refusals.get(now, refused.message)
        return self._page(request, recipient, problem=problem, status=refused.status)

    def _recipient(self, request: web.Request) -> Recipient:
        return self._service.recipient(request.match_info["recipient_id"])

    def _words(self, recipient: Recipient) -> Words:
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
        signing, words = self._service.signing(recipient.signing_id), self._words(recipient)
        now = standing(self._service, signing, recipient)
        sender = self._sandbox.accounts.user(signing.user_id)
        documents = self._service.documents(signing.id)
        return self._site.page(
            request,
            f"{words.sign}: {isolated(signing.name)}",
            tag(
                "div",
                tag("h1", theirs(signing.name)),
                tag("p", f"{words.from_} ", tag("strong", theirs(sender.name)), " (", theirs(sender.email), ")"),
                tag("p", theirs(signing.message), class_="said") if signing.message else None,
                tag("p", words.own_page, class_="own"),
                class_="heading upright",
            ),
            alert(words.must_read if unticked else problem),
            self._state(words, signing, recipient, now),
            tag(
                "div",
                tag(
                    "div",
                    card(
                        words.documents,
                        [_document(words, d, open_=n == 0) for n, d in enumerate(documents)],
                        anchor="documents",
                    ),
                ),
                tag(
                    "div",
                    self._form(request, words, recipient, unticked) if now == "invited" else None,
                    self._signers(words, signing, recipient),
                    class_="side",
                ),
                class_="columns",
            ),
            for_recipients=True,
            language=words.code,
            status=status,
        )

    def _state(self, words: Words, signing: Signing, recipient: Recipient, now: Standing) -> Html:
        said: dict[Standing, tuple[str, int | None, str]] = {
            "draft": (words.state_draft, None, "quiet"),
            "waiting": (words.state_waiting, None, "quiet"),
            "invited": (words.valid_until, recipient.expires_at, "busy"),
            "expired": (words.state_expired, recipient.expires_at, "warn"),
            "signed": (
                words.state_completed if signing.is_completed else words.state_signed,
                recipient.completed_at,
                "good",
            ),
            "declined": (words.state_declined, recipient.declined_at, "bad"),
            "cancelled": (words.state_cancelled, None, "bad"),
        }
        text, at, tone = said[now]
        return tag(
            "p", tag("strong", words.standings[now]), tag("br"), text, [" ", moment(at), "."] if at else None,
            class_=f"state {tone}", id="state",
        )  # fmt: skip

    def _form(self, request: web.Request, words: Words, recipient: Recipient, unticked: bool) -> Html:
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
        button = words.approve if approves else words.to_bankid if method == "bankid" else words.sign
        sign = self._site.form(
            request,
            action,
            tag(
                "div",
                tag("label", agree, tag("span", words.read_approve if approves else words.read), class_="tick"),
                tag("p", words.must_read, class_="error", id="agree-error") if unticked else None,
                class_="field wrong" if unticked else "field",
            ),
            tag("button", button, name="decision", value="bankid" if method == "bankid" else "sign", class_="wide"),
            class_="stack",
        )
        cancels = self._sandbox.profile.decline_effect == "cancels"
        decline = self._site.form(
            request,
            action,
            tag("p", words.decline_cancels if cancels else words.decline_stays),
            tag("button", words.decline, name="decision", value="decline", class_="danger wide"),
            class_="stack",
        )
        return card(
            words.approve if approves else words.sign,
            tag("p", tag("span", words.simulated, class_="badge warn"), " ", _how(words, recipient), class_="how"),
            sign,
            tag("details", tag("summary", f"{words.decline} …"), decline),
            anchor="sign",
        )

    def _signers(self, words: Words, signing: Signing, me: Recipient) -> Html:
        everybody = self._service.recipients(signing.id)
        sequential = signing.signing_order == "sequential"
        if sequential:
            everybody = sorted(everybody, key=lambda recipient: recipient.order or 0)
        turn = [other for other in everybody if other.invited_at is not None and not other.is_done]
        shown = [
            tag(
                "li",
                tag("span", theirs(other.full_name), f" ({words.you})" if other.id == me.id else None),
                " ",
                _mark(words, standing(self._service, signing, other)),
                aria_current="step" if sequential and signing.state == "sent" and other in turn else None,
            )
            for other in everybody
        ]
        whose = None
        if sequential and signing.state == "sent" and turn and turn[0].id != me.id:
            whose = tag("p", f"{words.turn_of} ", tag("strong", theirs(turn[0].full_name)), ".")
        return card(
            words.signers,
            tag("p", words.sequential if sequential else words.parallel, class_="quiet"),
            whose,
            tag("ol" if sequential else "ul", shown, class_="signers"),
            anchor="signers",
        )

    # the simulated BankID

    async def bankid(self, request: web.Request) -> web.Response:
        """The step that the BankID app would take; for who cannot sign now, the signing page instead."""
        recipient = self._recipient(request)
        signing, words = self._service.signing(recipient.signing_id), self._words(recipient)
        if recipient.signing_method != "bankid" or standing(self._service, signing, recipient) != "invited":
            raise see(signing_page(recipient))
        form = self._site.form(
            request,
            signing_page(recipient),
            tag("input", type="hidden", name="agree", value="on"),
            tag("button", words.bankid_confirm, name="decision", value="sign", class_="wide"),
            tag("a", words.bankid_back, href=signing_page(recipient), class_="button plain wide"),
            class_="stack",
        )
        signs: list[Child] = [tag("li", theirs(document.name)) for document in self._service.documents(signing.id)]
        return self._site.page(
            request,
            words.bankid,
            tag(
                "section",
                heading(words.bankid, own=False),
                tag("p", words.bankid_plays, class_="warning"),
                tag("p", words.bankid_signs, " ", tag("strong", theirs(signing.name)), ":"),
                tag("ul", signs),
                facts(
                    (words.name, theirs(recipient.full_name)),
                    (words.bankid_number, theirs(recipient.identification) if recipient.identification else None),
                ),
                form,
                class_="card phone",
            ),
            for_recipients=True,
            language=words.code,
        )

    # the documents

    async def original(self, request: web.Request) -> web.FileResponse:
        """A document as it was uploaded."""
        document = self._document(request)
        return web.FileResponse(self._service.document_path(document.id), headers=_pdf(document.name))

    async def sealed(self, request: web.Request) -> web.FileResponse:
        """A sealed document, once it is."""
        document = self._document(request)
        path = self._service.signed_path(document.signing_id, document.id)
        return web.FileResponse(path, headers=_pdf(document.name))

    def _document(self, request: web.Request) -> Document:
        return self._service.document(request.match_info["signing_id"], request.match_info["document_id"])


def _how(words: Words, recipient: Recipient) -> Child:
    method = recipient.signing_method
    if method == "sms":
        before, after = words.how_sms.split("{phone}")
        return [before, theirs(recipient.phone or "–"), after]
    known = {"email": words.how_email, "approval": words.how_approval, "bankid": words.how_bankid}
    return known.get(method) or words.how_other.format(method=method)


def _mark(words: Words, now: Standing) -> Html:
    tone = {"signed": "good", "declined": "bad", "cancelled": "bad", "expired": "warn", "invited": "busy"}.get(
        now, "quiet"
    )
    return tag("span", words.standings[now], class_=f"badge {tone}")


def _document(words: Words, document: Document, *, open_: bool) -> Html:
    folder = f"{detail_page(document.signing_id)}/documents/{document.id}"
    original = f"{folder}/original.pdf"
    shown, label, kind = original, words.open_original, words.original
    if document.sealed_file:
        shown, label, kind = f"{folder}/sealed.pdf", words.open_sealed, words.sealed
    fallback = tag("p", words.no_viewer, " ", tag("a", label, href=shown))
    named = [tag("span", ": ", theirs(document.name), class_="unseen")]
    links = [tag("a", label, named, href=shown, target="_blank", rel="noopener")]
    if document.sealed_file:
        links.append(tag("a", words.open_original, named, href=original, target="_blank", rel="noopener"))
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
