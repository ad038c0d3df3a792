"""The sandbox's own HTTP interface under /sandbox/api: people, clock, faults. No part of the documented service."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .faults import Fault
from .request_body import read_json
from .refused import Refused, invalid

if TYPE_CHECKING:
    from .server import Sandbox

OWN_API = "/sandbox/api"

Handler = Callable[[web.Request], Awaitable[Any]]


class Own:
    """Each method takes a request and gives what is shown as JSON."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def routes(self) -> list[web.RouteDef]:
        """All of it."""
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/state", self.state),
            ("POST", "/recipients/{id}/sign", self.sign),
            ("POST", "/recipients/{id}/decline", self.decline),
            ("POST", "/signings/{id}/complete", self.complete),
            ("POST", "/signings/{id}/cancel", self.cancel),
            ("POST", "/clock/advance", self.advance),
            ("GET", "/faults", self.faults),
            ("POST", "/faults", self.add_fault),
            ("DELETE", "/faults", self.clear_faults),
            ("POST", "/rate-limit", self.rate_limit),
            ("GET", "/requests", self.requests),
            ("GET", "/notifications", self.notifications),
            ("GET", "/webhooks", self.webhooks),
            ("POST", "/webhooks", self.add_webhook),
            ("DELETE", "/webhooks/{id}", self.remove_webhook),
            ("GET", "/deliveries", self.deliveries),
            ("POST", "/deliveries/{id}/resend", self.resend),
        ]
        routes = [web.route(method, OWN_API + path, partial(self._serve, handler)) for method, path, handler in table]
        return [*routes, web.get("/sandbox/authority.pem", self.authority)]

    async def _serve(self, handler: Handler, request: web.Request) -> web.Response:
        self._sandbox.forms.check_site(request)
        if request.method != "GET" and request.headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"}:
            raise Refused(403, "foreign_origin", "Another site may not do this.")
        return web.json_response(await handler(request), dumps=_dumps)

    async def state(self, _: web.Request) -> Any:
        """The clock, and what there is of everything."""
        sandbox = self._sandbox
        return {
            "now": sandbox.clock.now().isoformat(),
            "ahead_seconds": sandbox.clock.offset.total_seconds(),
            "signings": [dataclasses.asdict(s) | {"state": s.state} for s in sandbox.signings[-100:]],
        }

    async def sign(self, request: web.Request) -> Any:
        """A recipient signs."""
        await read_json(request)
        return {"state": (await self._sandbox.sign(request.match_info["id"])).state}

    async def decline(self, request: web.Request) -> Any:
        """A recipient declines."""
        await read_json(request)
        return {"state": (await self._sandbox.decline(request.match_info["id"])).state}

    async def complete(self, request: web.Request) -> Any:
        """Everybody signs."""
        await read_json(request)
        return {"state": (await self._sandbox.complete(request.match_info["id"])).state}

    async def cancel(self, request: web.Request) -> Any:
        """A signing is cancelled."""
        await read_json(request)
        return {"state": (await self._sandbox.cancel(request.match_info["id"])).state}

    async def advance(self, request: web.Request) -> Any:
        """The clock moves on by days, hours, minutes and seconds."""
        body = await read_json(request)
        names = ("days", "hours", "minutes", "seconds")
        wrong = [name for name, value in body.items() if name not in names or not _is_number(value)]
        if wrong:
            raise invalid({name: [f"{name} must be one of {', '.join(names)}, as a number."] for name in wrong})
        return {"now": _valued(lambda: self._sandbox.clock.advance(**body)).isoformat()}

    async def faults(self, _: web.Request) -> Any:
        """The arranged faults."""
        return [_fault(fault) for fault in self._sandbox.faults.arranged]

    async def add_fault(self, request: web.Request) -> Any:
        """One more fault: the arguments of `sandbox.faults.add` as members."""
        body = await read_json(request)
        missing = {
            name: [f"{name} is required."] for name in ("operation", "kind") if not isinstance(body.get(name), str)
        }
        if missing:
            raise invalid(missing)
        return _fault(_valued(lambda: self._sandbox.faults.add(**body)))

    async def clear_faults(self, _: web.Request) -> Any:
        """No more faults."""
        self._sandbox.faults.clear()
        return []

    async def rate_limit(self, request: web.Request) -> Any:
        """So many requests a second, and at once; `rate: null` lifts it."""
        body = await read_json(request)
        _valued(lambda: self._sandbox.rate_limit(**body))
        return body

    async def requests(self, _: web.Request) -> Any:
        """The last requests."""
        return [
            dataclasses.asdict(record) | {"received_at": record.received_at.isoformat()}
            for record in self._sandbox.requests[-200:]
        ]

    async def notifications(self, _: web.Request) -> Any:
        """What recipients were sent."""
        return [dataclasses.asdict(notification) for notification in self._sandbox.notifications[-500:]]

    async def webhooks(self, _: web.Request) -> Any:
        """The endpoints, without their secrets."""
        return [{"id": e.id, "url": e.url, "created_at": e.created_at} for e in self._sandbox.webhooks.endpoints()]

    async def add_webhook(self, request: web.Request) -> Any:
        """One more endpoint: `url`, and `secret` unless one shall be made; it is shown this once."""
        body = await read_json(request)
        url, secret = body.get("url"), body.get("secret")
        if not isinstance(url, str) or not isinstance(secret, str | None):
            raise invalid({"url": ["url is required, and secret may be given, both as strings."]})
        return dataclasses.asdict(self._sandbox.webhooks.register(url, secret))

    async def remove_webhook(self, request: web.Request) -> Any:
        """One endpoint less."""
        self._sandbox.webhooks.remove(request.match_info["id"])
        return {}

    async def deliveries(self, _: web.Request) -> Any:
        """The last deliveries."""
        return [dataclasses.asdict(delivery) for delivery in self._sandbox.webhooks.deliveries(500)]

    async def resend(self, request: web.Request) -> Any:
        """The same event once more."""
        await read_json(request)
        return dataclasses.asdict(self._sandbox.webhooks.resend(request.match_info["id"]))

    async def authority(self, request: web.Request) -> web.Response:
        """The certificate to trust, so that sealed documents verify."""
        self._sandbox.forms.check_site(request)
        pem = await self._sandbox.certificate_pem()
        disposition = {"Content-Disposition": 'attachment; filename="sandbox-authority.pem"'}
        return web.Response(body=pem, content_type="application/x-pem-file", headers=disposition)


def _valued(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused(400, "validation_failed", str(error)) from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fault(fault: Fault) -> dict[str, Any]:
    names = ("operation", "kind", "times", "probability", "skip", "details", "hits")
    return {name: getattr(fault, name) for name in names}


def _dumps(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)
