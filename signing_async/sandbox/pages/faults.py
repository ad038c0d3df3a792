"""Faults and the rate limit."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from ..faults import DELIVERY, DELIVERY_KINDS, KINDS, OPERATIONS
from .site import EMPTY, FAULTS, STATE, Filled, form, page, redirect


async def faults(request: web.Request, filled: Filled = EMPTY) -> web.Response:
    """Show the faults, the rate limit and their forms."""
    kinds = [
        (kind, kind if kind in KINDS else f"{kind} ({DELIVERY})") for kind in dict.fromkeys(KINDS + DELIVERY_KINDS)
    ]
    return page(request, "faults.html", filled, operations=(*OPERATIONS, DELIVERY), kinds=kinds)


async def add(request: web.Request) -> web.Response:
    fields = await form(request)
    kind, details = fields.get("kind", ""), dict[str, Any]()
    try:
        seconds, times = _number("seconds", fields), _number("times", fields)
        if seconds is not None:
            details["retry_after" if kind in {"429", "503"} else "seconds"] = seconds
        request.app[STATE].faults.add(fields.get("operation", ""), kind, times, **details)
    except ValueError as error:
        return await faults(request, Filled(fields, problem=str(error), status=400))
    raise redirect(FAULTS, "fault")


async def remove(request: web.Request) -> web.Response:
    """Remove a fault if it still exists."""
    wanted = (await form(request)).get("fault")
    for fault in list(request.app[STATE].faults.arranged):
        if fault.id == wanted:
            fault.remove()
    raise redirect(FAULTS, "fault-removed")


async def clear(request: web.Request) -> web.Response:
    await form(request)
    request.app[STATE].faults.clear()
    raise redirect(FAULTS, "faults-cleared")


async def limit(request: web.Request) -> web.Response:
    fields = await form(request)
    try:
        rate = _number("rate", fields)
        request.app[STATE].limit_rate(rate, _number("burst", fields))
    except ValueError as error:
        return await faults(request, Filled(fields, problem=str(error), status=400))
    raise redirect(FAULTS, "limit-lifted" if rate is None else "limit")


def _number(name: str, fields: dict[str, str]) -> Any:
    """Return the number in a field, or None if it is empty."""
    text = fields.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}([.][0-9]{1,6})?", text):
        raise ValueError(f"{name}: must be a number or empty, got {text!r}")
    return float(text) if "." in text else int(text)


ROUTES = [
    web.get(FAULTS, faults),
    web.post(FAULTS, add),
    web.post(f"{FAULTS}/remove", remove),
    web.post(f"{FAULTS}/clear", clear),
    web.post(f"{FAULTS}/rate-limit", limit),
]
