"""Components of the pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlencode

from aiohttp import web

from ..clock import to_datetime
from ..records import Recipient, Signing
from ..refused import Refused
from ..signatures import Signatures
from .markup import Child, Html, tag

Standing = Literal["draft", "waiting", "invited", "expired", "signed", "declined", "cancelled"]

LABELS: dict[str, tuple[str, str]] = {
    "draft": ("Draft", "quiet"),
    "sent": ("Sent", "busy"),
    "completed": ("Completed", "good"),
    "cancelled": ("Cancelled", "bad"),
    "waiting": ("Not invited yet", "quiet"),
    "invited": ("Invited", "busy"),
    "expired": ("Invitation expired", "warn"),
    "signed": ("Signed", "good"),
    "declined": ("Declined", "bad"),
    "pending": ("Pending", "busy"),
    "retrying": ("Retrying", "warn"),
    "delivered": ("Delivered", "good"),
    "failed": ("Failed", "bad"),
    "lost": ("Lost", "warn"),
}


@dataclass(frozen=True)
class Filled:
    """The values of a submitted form and their errors; `problem` concerns the form as a whole."""

    values: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    problem: str | None = None

    @classmethod
    def refused(cls, values: Mapping[str, str], refused: Refused) -> Filled:
        """Return a form that the service refused."""
        return cls(values, refused.errors, None if refused.errors else refused.message)


EMPTY = Filled()


def heading(title: Child, *more: Child, own: bool = True, kind: Child = None) -> Html:
    """Return a page's heading; `own` marks pages that the specification does not describe."""
    label = tag("p", "A page of the sandbox only, not in the specification.", class_="own") if own else None
    return tag("div", kind, tag("h1", title), label, more, class_="heading")


def badge(state: str) -> Html:
    """Return a state as a coloured word."""
    text, tone = LABELS[state]
    return tag("span", text, class_=f"badge {tone}")


def moment(micros: int | None) -> Child:
    """Return a time, or a dash."""
    if micros is None:
        return tag("span", "–", class_="quiet")
    at = to_datetime(micros)
    return tag("time", f"{at:%Y-%m-%d %H:%M:%S}", datetime=at.isoformat(timespec="seconds"))


def identifier(text: str) -> Html:
    """Return an id that one click selects."""
    return tag("code", text, class_="id")


def page_number(request: web.Request) -> int:
    """Return the number of the page that the query asks for, by default 1."""
    number = request.query.get("page", "")
    return max(1, int(number)) if re.fullmatch(r"[0-9]{1,9}", number) else 1


def pager(page: int, total: int, size: int, noun: str, path: str, query: Mapping[str, str]) -> Html | None:
    """Return the links to the other pages of a list with `size` items a page; one page has only a count."""
    pages = -(-total // size)
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    count = f"{total:,} {noun if total == 1 else plural}"
    if not total or (pages == 1 and page == 1):
        return tag("p", count, class_="quiet") if total else None

    def link(label: str, number: int) -> Html | None:
        if number == page or not 1 <= number <= pages:
            return None
        kept = {key: value for key, value in query.items() if value}
        return tag("li", tag("a", label, href=f"{path}?{urlencode({**kept, 'page': number})}"))

    links = [link("Newest", 1), link("Newer", page - 1), link("Older", page + 1), link("Oldest", pages)]
    return tag(
        "nav",
        tag("p", f"Page {page:,} of {pages:,}, {count}", class_="quiet"),
        tag("ul", [each for each in links if each]),
        class_="tabs pager",
        aria_label="Pages",
    )


def facts(*pairs: tuple[str, Child]) -> Html:
    """Return a list of names and values, without those whose value is None."""
    shown = (tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value is not None)
    return tag("dl", shown, class_="facts")


def table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[Child]], empty: Child) -> Html:
    """Return a table, which becomes a list of cards on narrow screens, or `empty` if there are no rows.

    The roles are explicit because browsers drop them if a table gets another layout.
    """
    body = [
        tag(
            "tr",
            (_cell(n, header, cell) for n, (header, cell) in enumerate(zip(headers, row, strict=True))),
            role="row",
        )
        for row in rows
    ]
    if not body:
        return tag("div", empty, class_="empty")
    head = (tag("th", header, scope="col", role="columnheader") for header in headers)
    return tag(
        "table",
        tag("caption", caption, class_="unseen"),
        tag("thead", tag("tr", head, role="row"), role="rowgroup"),
        tag("tbody", body, role="rowgroup"),
        role="table",
    )


def _cell(number: int, header: str, content: Child) -> Html:
    inner = tag("div", content)
    if number == 0:
        return tag("th", inner, scope="row", role="rowheader")
    return tag("td", inner, role="cell", data_label=header)


def card(title: str, *content: Child, anchor: str | None = None, more: Child = None) -> Html:
    """Return a section of a page with its own heading."""
    name = anchor or title.lower().replace(" ", "-")
    head = tag("div", tag("h2", title, id=name), more, class_="card-head")
    return tag("section", head, content, class_="card", aria_labelledby=name)


def live(name: str, *content: Child) -> Html:
    """Return a part of a page that the script keeps up to date. Forms do not belong there: they would be reset."""
    return tag("div", content, class_="live", id=name)


def alert(problem: str | None) -> Html | None:
    """Return a problem that screen readers announce."""
    return tag("p", problem, class_="alert", role="alert") if problem else None


def rejected(*forms: Filled) -> Html | None:
    """Return why a form was refused, with links to its invalid fields, for the top of the page."""
    for form in forms:
        if form.errors:
            links = [tag("a", " ".join(texts), href=f"#{name}-field") for name, texts in form.errors.items()]
            return tag("p", "Nothing was done. ", [[link, " "] for link in links], class_="alert", role="alert")
        if form.problem:
            return alert(form.problem)
    return None


def text_field(
    label: str, name: str, filled: Filled, hint: Child = None, default: str = "", **attributes: str | int | bool | None
) -> Html:
    """Return a labelled text field with its value and errors."""
    return _field("input", label, name, filled, hint, value=filled.values.get(name, default), **attributes)


def choice_field(label: str, name: str, filled: Filled, options: Iterable[tuple[str, str]], default: str = "") -> Html:
    """Return a labelled select field; the options are values and their texts."""
    chosen = filled.values.get(name, default)
    shown = [tag("option", text, value=value, selected=value == chosen) for value, text in options]
    return _field("select", label, name, filled, None, shown)


def _field(
    kind: str,
    label: str,
    name: str,
    filled: Filled,
    hint: Child,
    content: Child = None,
    **attributes: str | int | bool | None,
) -> Html:
    errors = filled.errors.get(name, ())
    described_by = [f"{name}-{part}" for part, present in (("hint", hint), ("error", errors)) if present]
    control = tag(
        kind,
        content,
        id=f"{name}-field",
        name=name,
        aria_describedby=" ".join(described_by) or None,
        aria_invalid="true" if errors else None,
        **attributes,
    )
    return tag(
        "div",
        tag("label", label, for_=f"{name}-field"),
        tag("p", hint, class_="hint", id=f"{name}-hint") if hint else None,
        control,
        tag("p", " ".join(errors), class_="error", id=f"{name}-error") if errors else None,
        class_="field wrong" if errors else "field",
    )


def standing(signatures: Signatures, signing: Signing, recipient: Recipient) -> Standing:
    """Return the state of a recipient."""
    if recipient.completed_at is not None:
        return "signed"
    if recipient.declined_at is not None:
        return "declined"
    if signing.cancelled_at is not None:
        return "cancelled"
    if signing.is_draft:
        return "draft"
    if recipient.invited_at is None:
        return "waiting"
    return "expired" if signatures.refusal(recipient) else "invited"


def signing_page(recipient: Recipient) -> str:
    """Return the path of a recipient's signing page."""
    return f"/sandbox/sign/{recipient.id}"


def detail_page(signing_id: str) -> str:
    """Return the path of a signing's page."""
    return f"/sandbox/signings/{signing_id}"
