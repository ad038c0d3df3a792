"""A small signing service whose effects show late: a gateway gives up, and the backend carries the request out later.

What happens to the requests of one call (one signing that is sent, one file name, one e-mail address) follows a script.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import Any

import attrs
from aiohttp import web


@attrs.frozen
class Fate:
    """What happens to one request: what the caller sees, and when the backend carries it out (None: never)."""

    kind: str
    """ok, 408, 504, 502, html, 503 (the service's own), drop, silent-drop, 429, 401, 303, refuse (no connection), page
    (a success with a page of HTML), garbled (a success that is no JSON), cannot-be-sent."""
    effect_after: float | None = None


OK = Fate("ok", 0.0)


@attrs.define
class Held:
    """What the service holds of one call."""

    effects: list[tuple[float, Fate]] = attrs.field(factory=list)
    """When they took place, by the loop's clock, and the fate of their request."""
    requests: int = 0


class LateService:
    """The service's state, and what it does with requests."""

    def __init__(self) -> None:
        self.origin = ""
        self.scripts: defaultdict[str, list[Fate]] = defaultdict(list)
        self.held: defaultdict[str, Held] = defaultdict(Held)
        self.documents: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.recipients: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.sent: set[str] = set()
        self.created = 0
        self.readings = 0
        self.lag = 0.0
        """Seconds by which readings are behind."""
        self.made_at: dict[str, float] = {}
        """When each record was made, by the loop's clock."""
        self.response_seconds = 0.0
        self.refresh_seconds = 0.0
        self.refresh_fails = False
        self.rejects_after_a_write = False
        """Whether readings are answered with 401 from the first write on."""
        self.pending: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._port = 0

    # Requests

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/api/oauth/token":
            await asyncio.sleep(self.refresh_seconds)
            if self.refresh_fails:
                return web.json_response({"error": "server_error"}, status=400)
            return web.json_response({"access_token": "new", "expires_in": 3600, "token_type": "Bearer"})
        if request.path == "/api/1.0/me":
            return web.Response(status=429, headers={"Retry-After": "3"})
        if request.path == "/api/1.0/signings":
            self.created += 1
            return web.json_response({"id": f"s{self.created}", "is_draft": True}, status=201)
        signing = request.path.split("/")[4]
        await asyncio.sleep(self.response_seconds)
        if request.method == "GET":
            self.readings += 1
            if self.rejects_after_a_write and any(held.requests for held in self.held.values()):
                return web.Response(status=401)
            shown_at = asyncio.get_running_loop().time() - self.lag

            def shown(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
                return [record for record in records if self.made_at.get(record["id"], 0.0) <= shown_at]

            if request.path.endswith("/recipients"):
                return web.json_response(shown(self.recipients[signing]))
            is_draft = signing not in self.sent or shown_at < self.held[signing].effects[0][0]
            documents = shown(self.documents[signing])
            return web.json_response({"id": signing, "is_draft": is_draft, "documents": documents})
        body = await request.read()
        key, create = self._understand(request.path, signing, body)
        self.held[key].requests += 1
        script = self.scripts[key]
        fate = script.pop(0) if script else OK

        def carry_out() -> dict[str, Any]:
            if request.path.endswith("/send") and signing in self.sent:
                return {}  # only a draft is sent
            self.held[key].effects.append((asyncio.get_running_loop().time(), fate))
            made: dict[str, Any] = create()
            return made

        record = {}
        if fate is OK and request.path.endswith("/send") and signing in self.sent:
            return web.json_response({"code": "cannot_be_sent"}, status=400)
        if fate.effect_after == 0.0:
            record = carry_out()
        elif fate.effect_after is not None:
            self._later(fate.effect_after, carry_out)
        if script and script[0].kind == "refuse":
            script.pop(0)
            await self._stop_listening()
            self._later(0.15, None)
        response = self._respond(request, fate, record)
        return await response if isawaitable(response) else response

    def _understand(self, path: str, signing: str, body: bytes) -> tuple[str, Any]:
        if path.endswith("/send"):

            def send() -> dict[str, Any]:
                self.sent.add(signing)
                return {}

            return signing, send
        if path.endswith("/documents"):
            found = re.search(rb'filename="([^"]+)"', body)
            assert found is not None
            content = body.partition(b"\r\n\r\n")[2].rpartition(b"\r\n--")[0]
            key, records = found[1].decode(), self.documents[signing]
            fields = {"name": key, "sha256": hashlib.sha256(content).hexdigest()}
        else:
            fields = json.loads(body)
            key, records = fields["email"], self.recipients[signing]

        def create() -> dict[str, Any]:
            records.append({"id": f"{key}-{len(records)}", **fields})
            self.made_at[records[-1]["id"]] = asyncio.get_running_loop().time()
            return records[-1]

        return key, create

    def _later(self, seconds: float, work: Any) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            if work is None:
                await self._listen()
            else:
                work()

        task = asyncio.create_task(wait())
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)

    def _respond(self, request: web.Request, fate: Fate, record: dict[str, Any]) -> web.StreamResponse:
        response = {
            "ok": lambda: web.json_response(record, status=201),
            "408": lambda: web.Response(status=408),
            "504": lambda: web.Response(status=504),
            "502": lambda: web.Response(status=502),
            "html": lambda: web.Response(status=500, text="<html>Oops</html>", content_type="text/html"),
            "503": lambda: web.json_response({"code": "unavailable", "message": "busy"}, status=503),
            "429": lambda: web.Response(status=429, headers={"Retry-After": "0"}),
            "1-s-429": lambda: web.Response(status=429, headers={"Retry-After": "1"}),
            "long-429": lambda: web.Response(status=429, headers={"Retry-After": "86400"}),
            "page": lambda: web.Response(text="<html>Sign in</html>", content_type="text/html"),
            "garbled": lambda: web.Response(status=201, text="<html>Sign in</html>"),
            "cannot-be-sent": lambda: web.json_response({"code": "cannot_be_sent"}, status=400),
            "401": lambda: web.Response(status=401),
            "403": lambda: web.Response(status=403),
            "303": lambda: web.Response(status=303, headers={"Location": "/elsewhere"}),
        }.get(fate.kind)
        if response is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response(status=200)
        answer = response()
        if self._site is None:
            answer.force_close()
        return answer

    # Connections

    async def _listen(self) -> None:
        assert self._runner is not None
        if self._site is None:
            site = web.TCPSite(self._runner, "127.0.0.1", self._port)
            await site.start()
            self._site = site
            self._port = self._runner.addresses[0][1]

    async def _stop_listening(self) -> None:
        if self._site is not None:
            site, self._site = self._site, None
            # asyncio forgets a connection that it has accepted, and not yet served, when its server is closed.
            server = site._server
            assert isinstance(server, asyncio.Server)
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener)
            for _ in range(5):
                await asyncio.sleep(0)
            await site.stop()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LateService]:
        app = web.Application(client_max_size=2**20)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        try:
            await self._listen()
            self.origin = f"http://127.0.0.1:{self._port}"
            yield self
        finally:
            for task in tuple(self.pending):
                task.cancel()
            await asyncio.gather(*self.pending, return_exceptions=True)
            await self._runner.cleanup()

    async def calm(self) -> None:
        """Wait until every effect has taken place."""
        while self.pending:
            await asyncio.wait(tuple(self.pending))


def script(*fates: Fate | str) -> Sequence[Fate]:
    """Return fates; a plain kind has no effect, except for ok."""
    return [fate if isinstance(fate, Fate) else OK if fate == "ok" else Fate(fate) for fate in fates]
