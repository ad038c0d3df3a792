"""What all pages share: the frame, filters, forms and the state of a recipient."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from importlib.resources import files
from typing import Any

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..clock import to_datetime
from ..records import Recipient, Signing
from ..refused import Refused
from ..state import State

STATE: web.AppKey[State] = web.AppKey("state", State)

DASHBOARD, INBOX, WEBHOOKS = "/sandbox", "/sandbox/inbox", "/sandbox/webhooks"
REQUESTS, FAULTS, APPS = "/sandbox/requests", "/sandbox/faults", "/developer/my-apps"
SECTIONS = {
    DASHBOARD: "Dashboard",
    INBOX: "Inbox",
    WEBHOOKS: "Webhooks",
    REQUESTS: "Requests",
    FAULTS: "Faults",
    APPS: "My apps",
}
STYLE, SCRIPT, _TEXTS = (
    files(__package__).joinpath(name).read_bytes() for name in ("style.css", "refresh.js", "texts.toml")
)
TEXTS: dict[str, Any] = tomllib.loads(_TEXTS.decode())


@dataclass(frozen=True)
class Filled:
    """The values of a submitted form and their errors; `problem` concerns the form as a whole."""

    values: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    problem: str | None = None
    status: int = 200

    @classmethod
    def refused(cls, refused: Refused, values: Mapping[str, str] | None = None) -> Filled:
        """Return a form that the service refused."""
        return cls(values or {}, refused.errors, None if refused.errors else refused.message, refused.status)


EMPTY = Filled()


def page(request: web.Request, template: str, filled: Filled = EMPTY, **context: object) -> web.Response:
    """Return a page. Templates see the whole state; `filled` is the refused form, if there is one."""
    state = request.app[STATE]
    html = _ENVIRONMENT.get_template(template).render(
        state=state,
        standing=partial(standing, state),
        token=state.forms.token(request),
        notice=TEXTS["notices"].get(request.query.get("done")),
        page=page_number(request),
        filled=filled,
        **context,
    )
    return state.forms.page(request, html, filled.status)


async def form(request: web.Request) -> dict[str, str]:
    """Return the fields of a form that a page of this sandbox sent; refuse any other form."""
    return await request.app[STATE].forms.read(request)


def redirect(path: str, done: str | None = None) -> web.HTTPSeeOther:
    """Return a redirect to another page; `done` is the key of the notice to show there."""
    return web.HTTPSeeOther(f"{path}?done={done}" if done else path)


def page_number(request: web.Request) -> int:
    """Return the number of the page that the query asks for, by default 1."""
    number = request.query.get("page", "")
    return max(1, int(number)) if re.fullmatch(r"[0-9]{1,9}", number) else 1


def standing(state: State, signing: Signing, recipient: Recipient) -> str:
    """Return the state of a recipient, a key of the labels."""
    if recipient.completed_at is not None:
        return "signed"
    if recipient.declined_at is not None:
        return "declined"
    if signing.state in {"draft", "cancelled"}:
        return signing.state
    if recipient.invited_at is None:
        return "waiting"
    return "expired" if state.signatures.refusal(recipient) else "invited"


def _isolated(text: str) -> str:
    """Return text that a user chose, isolated: its direction does not affect the text around it."""
    return f"\u2068{text}\u2069"


def _bdi(text: str) -> Markup:
    return Markup("<bdi>{}</bdi>").format(text)


def _badge(state: str) -> Markup:
    text, tone = TEXTS["labels"][state]
    return Markup('<span class="badge {}">{}</span>').format(tone, text)


def _moment(at: int | datetime | None) -> Markup:
    if at is None:
        return Markup('<span class="quiet">–</span>')
    at = at if isinstance(at, datetime) else to_datetime(at)
    return Markup('<time datetime="{}">{:%Y-%m-%d %H:%M:%S}</time>').format(at.isoformat(timespec="seconds"), at)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _indented(text: str) -> str:
    """Return JSON with indentation, and other text as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text


def _duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    parts = []
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count, seconds = divmod(seconds, length)
        if count:
            parts.append(_counted(int(count), unit, f"{unit}s"))
    return " ".join(parts[:2]) or "less than a second"


_ENVIRONMENT = Environment(
    loader=PackageLoader(__package__),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "badge": _badge,
    "bdi": _bdi,
    "counted": _counted,
    "duration": _duration,
    "indented": _indented,
    "isolated": _isolated,
    "moment": _moment,
}
_ENVIRONMENT.globals |= {
    "EMPTY": EMPTY,
    "SECTIONS": SECTIONS,
    "TEXTS": TEXTS,
    "zip": zip,
    "VERSION": hashlib.sha256(STYLE + SCRIPT).hexdigest()[:12],
}
