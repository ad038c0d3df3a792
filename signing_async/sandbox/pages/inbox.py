"""The inbox: the invitations and reminders of all recipients."""

from __future__ import annotations

from aiohttp import web

from ..records import Notification
from .components import EMPTY, Standing, choice_field, heading, live, moment, signing_page, standing
from .markup import Child, Html, tag, theirs
from .site import INBOX, Site
from .texts import LANGUAGES

MOST = 100
ALL = ""
_TONES: dict[Standing, str] = {"signed": "good", "declined": "bad", "cancelled": "bad", "expired": "warn"}


class Inbox:
    """All messages on one page."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.get(INBOX, self.inbox)]

    async def inbox(self, request: web.Request) -> web.Response:
        """Show the newest messages, to all addresses or to one."""
        messages = self._site.state.invitations.notifications()
        addresses = sorted({message.email for message in messages})
        wanted = request.query.get("to", ALL)
        found = [message for message in reversed(messages) if wanted in (ALL, message.email)]
        listed = [self._message(message) for message in found[:MOST]]
        if len(found) > MOST:
            listed.append(tag("p", f"{len(found) - MOST} older messages are not shown.", class_="after quiet"))
        return self._site.page(
            request,
            "Inbox",
            heading("Inbox", tag("p", "The e-mails that the service would send. Nothing leaves this machine.")),
            _filter(addresses, wanted) if addresses else None,
            live("mails", tag("div", listed if listed else [_nothing(wanted)], class_="mails")),
            section=INBOX,
        )

    def _message(self, message: Notification) -> Html:
        service, signatures = self._site.state.service, self._site.state.signatures
        signing, recipient = service.signing(message.signing_id), service.recipient(message.recipient_id)
        sender = self._site.state.accounts.user(signing.user_id)
        texts = LANGUAGES[signing.language]
        is_reminder = message.kind == "reminder"
        now = standing(signatures, signing, recipient)
        subject = texts.reminder if is_reminder else texts.invitation
        greeting = (texts.reminds if is_reminder else texts.invites).split("{sender}")
        until = recipient.expires_at if now == "invited" else None
        return tag(
            "article",
            tag(
                "div",
                tag("h2", f"{subject}: ", theirs(signing.name), id=f"mail-{message.seq}"),
                tag("span", texts.standings[now], class_=f"badge {_TONES.get(now, 'busy')}"),
                class_="card-head",
            ),
            tag(
                "p",
                tag("span", "To ", lang="en"),
                theirs(recipient.full_name),
                " <",
                theirs(message.email),
                ">",
                tag("span", ", ", "reminder" if is_reminder else "invitation", " of ", lang="en"),
                moment(message.sent_at),
                class_="quiet break",
            ),
            tag("p", greeting[0], theirs(sender.name), greeting[1]),
            tag("p", theirs(signing.message), class_="said") if signing.message else None,
            tag("p", texts.valid_until, " ", moment(until), ".", class_="quiet") if until else None,
            tag(
                "p",
                tag(
                    "a",
                    texts.to_signing,
                    href=signing_page(recipient),
                    class_="button" if now == "invited" else "button plain",
                    aria_describedby=f"mail-{message.seq}",
                ),
            ),
            class_="card",
            lang=texts.code,
            aria_labelledby=f"mail-{message.seq}",
        )


def _filter(addresses: list[str], wanted: str) -> Html:
    options = [(ALL, "Everybody"), *((address, address) for address in addresses)]
    return tag(
        "form",
        tag(
            "div",
            choice_field("Sent to", "to", EMPTY, options, default=wanted),
            tag("button", "Show", class_="plain"),
            class_="line",
        ),
        method="get",
        action=INBOX,
        role="search",
        aria_label="Messages",
    )


def _nothing(wanted: str) -> Html:
    whose: Child = ["Nothing was sent to ", theirs(wanted), "."] if wanted else "No messages yet."
    return tag(
        "div",
        tag("p", tag("strong", whose)),
        tag("p", "Invitations and reminders appear here once a signing is sent."),
        class_="empty card",
    )
