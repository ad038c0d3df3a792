"""The page of one signing for developers: its fields, documents, recipients, events and API requests."""

from __future__ import annotations

from aiohttp import web

from ..records import Document, Recipient, Signing
from ..refused import Refused
from . import requests
from .components import (
    alert,
    badge,
    card,
    detail_page,
    facts,
    heading,
    identifier,
    live,
    moment,
    signing_page,
    standing,
    table,
)
from .markup import Child, Html, isolated, tag, theirs
from .site import DASHBOARD, Site, redirect

LATEST = 20
_DOCUMENTS = ("Name", "Size", "SHA-256", "Signed", "Files")
_RECIPIENTS = ("Recipient", "Order", "Method", "State", "Act as")
_EVENTS = ("Event", "Time", "Id")
_NO_DOCUMENTS = tag("p", "No documents yet. A signing cannot be sent without one.")
_NO_RECIPIENTS = tag("p", "No recipients yet. A signing cannot be sent without one.")


class SigningDetails:
    """The page of one signing, which can be completed or cancelled there."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._state = site.state

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        path = detail_page("{signing_id}")
        return [
            web.get(path, self.signing),
            web.post(f"{path}/cancel", self.cancel),
            web.post(f"{path}/complete", self.complete),
        ]

    async def signing(self, request: web.Request) -> web.Response:
        """Show a signing."""
        return self._page(request, request.match_info["signing_id"])

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a signing."""
        fields, signing_id = await self._site.fields(request), request.match_info["signing_id"]
        try:
            self._state.service.cancel(signing_id)
        except Refused as refused:
            return self._page(request, signing_id, refused.message, refused.status)
        raise redirect(DASHBOARD if fields.get("back") == "list" else detail_page(signing_id), "cancelled")

    async def complete(self, request: web.Request) -> web.Response:
        """Sign for all recipients who have neither signed nor declined."""
        fields, signing_id = await self._site.fields(request), request.match_info["signing_id"]
        try:
            signing = await self._state.signatures.complete(signing_id)
        except Refused as refused:
            return self._page(request, signing_id, refused.message, refused.status)
        if not signing.is_completed:
            return self._page(request, signing_id, "The signing is not completed: a recipient declined.", 400)
        raise redirect(DASHBOARD if fields.get("back") == "list" else detail_page(signing_id), "completed")

    def _page(
        self, request: web.Request, signing_id: str, problem: str | None = None, status: int = 200
    ) -> web.Response:
        service = self._state.service
        signing = service.signing(signing_id)
        documents = map(_document, service.documents(signing_id))
        recipients = (self._recipient(signing, recipient) for recipient in service.recipients(signing_id))
        events = [
            [event.type, moment(event.created_at), identifier(event.id)]
            for event in self._state.webhooks.events_of(signing_id)
        ]
        latest = requests.table_of_requests(self._state, LATEST, about=signing_id)
        main = [
            card("Documents", live("document-list", table("Documents", _DOCUMENTS, documents, _NO_DOCUMENTS))),
            card("Recipients", live("recipient-list", table("Recipients", _RECIPIENTS, recipients, _NO_RECIPIENTS))),
            card("Events", live("event-list", table("Events", _EVENTS, events, tag("p", "No events yet.")))),
            card("API requests", live("request-list", latest)),
        ]
        return self._site.page(
            request,
            isolated(signing.name),
            tag("p", tag("a", "Dashboard", href=DASHBOARD), class_="crumb"),
            alert(problem),
            heading(
                theirs(signing.name),
                signing_actions(self._site, request, signing, "page"),
                kind=badge(signing.state),
            ),
            tag("div", tag("div", main), tag("div", self._about(signing), class_="side"), class_="columns"),
            section=DASHBOARD,
            status=status,
        )

    def _about(self, signing: Signing) -> Child:
        sender = self._state.accounts.user(signing.user_id)
        pairs: list[tuple[str, Child]] = [
            ("Id", identifier(signing.id)),
            ("Sender", [theirs(sender.name), " (", theirs(sender.email), f"), tenant {sender.tenant}"]),
            ("Language", signing.language),
            ("Order", signing.signing_order),
            ("Message", tag("p", theirs(signing.message), class_="said") if signing.message else None),
            ("Created", moment(signing.created_at)),
            ("Sent", moment(signing.sent_at)),
            ("Completed", moment(signing.completed_at) if signing.completed_at else None),
            ("Cancelled", moment(signing.cancelled_at) if signing.cancelled_at else None),
            ("Last update", moment(signing.updated_at)),
        ]
        return card("About", live("about-signing", facts(*pairs)))

    def _recipient(self, signing: Signing, recipient: Recipient) -> list[Child]:
        details = [part for part in (recipient.phone, recipient.identification) if part]
        reminders = f"{recipient.reminders} reminder{'s' if recipient.reminders != 1 else ''}"
        since = recipient.completed_at or recipient.declined_at or recipient.invited_at
        until = None if recipient.is_done else recipient.expires_at
        return [
            [
                theirs(recipient.full_name),
                tag("p", theirs(recipient.email), class_="quiet break"),
                tag("p", theirs(", ".join(details)), class_="quiet") if details else None,
                identifier(recipient.id),
            ],
            recipient.order if recipient.order is not None else "–",
            recipient.signing_method,
            [
                badge(standing(self._state.signatures, signing, recipient)),
                tag("p", "since ", moment(since), class_="quiet") if since else None,
                tag("p", "valid until ", moment(until), class_="quiet") if until else None,
                tag("p", reminders, class_="quiet") if recipient.reminders else None,
            ],
            tag(
                "a",
                "Signing page",
                tag("span", " of ", theirs(recipient.full_name), class_="unseen"),
                href=signing_page(recipient),
            ),
        ]


def signing_actions(site: Site, request: web.Request, signing: Signing, back: str) -> Html | None:
    """Return the buttons that complete or cancel a signing."""
    if signing.state not in {"draft", "sent"}:
        return None
    about, address = f"the signing {isolated(signing.name)}", detail_page(signing.id)
    buttons = [site.button(request, f"{address}/cancel", "Cancel", about, "plain", back=back)]
    if signing.state == "sent":
        buttons.insert(0, site.button(request, f"{address}/complete", "Complete", about, back=back))
    return tag("div", buttons, class_="buttons")


def _document(document: Document) -> list[Child]:
    folder = f"{detail_page(document.signing_id)}/documents/{document.id}"
    links = [
        tag("a", "Original", tag("span", " of ", theirs(document.name), class_="unseen"), href=f"{folder}/original.pdf")
    ]
    if document.sealed_file:
        unseen = tag("span", " version of ", theirs(document.name), class_="unseen")
        links.append(tag("a", "Sealed", unseen, href=f"{folder}/sealed.pdf"))
    return [
        [theirs(document.name), tag("p", identifier(document.id))],
        f"{document.size:,} bytes",
        tag("code", f"{document.sha256[:12]}…", title=document.sha256),
        moment(document.completed_at),
        tag("div", links, class_="buttons"),
    ]
