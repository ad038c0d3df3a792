"""A small signing service whose effects show late: a gateway gives up, and the backend carries the request out later.

What happens to the requests of one call (one signing that is sent, one file name, one e-mail address) follows a script.
`judge` compares what a caller was told with what took effect.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
from aiohttp import web

from signing_async import OutcomeUnknown, Reader, Response, RetryPolicy, Signing, SigningClient, SigningError
from tests.pdfs import make_pdf

SETTLE = 0.3
POLICY = RetryPolicy(max_attempts=4, base_delay=0.02, settle=SETTLE)
# Effects that show within the settle time end a call at once, so these tests take no longer for it.
PATIENT = RetryPolicy(max_attempts=4, base_delay=0.02, settle=10.0)


@attrs.frozen
class Fate:
    """What happens to one request: what the caller sees, and when the backend carries it out (None: never)."""

    kind: str
    """ok, 408, 504, 502, html, 503 (the service's own), drop, silent-drop, 429, 401, 303, refuse (no connection), page
    (a success with a page of HTML), garbled (a success that is no JSON), endless-408 and endless-504 (whose body never
    ends), cannot-be-sent."""
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

    client: SigningClient
    """A client of the service while it runs."""

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
        """Whether readings are rejected with 401 from the first write on."""
        self.before_response: Callable[[Fate, dict[str, Any]], object] = lambda fate, record: None
        """Called before each response to a write: what happens at this very moment."""
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
        self.before_response(fate, record)
        if fate.kind.startswith("endless-"):
            response = web.StreamResponse(status=int(fate.kind[-3:]))
            await response.prepare(request)
            await asyncio.sleep(60)
        return self._respond(request, fate, record)

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
        made = response()
        if self._site is None:
            made.force_close()
        return made

    # Connections

    async def _listen(self) -> None:
        assert self._runner is not None
        if self._site is None:
            self._site = web.TCPSite(self._runner, "127.0.0.1", self._port)
            await self._site.start()
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
    async def running(self, retry: RetryPolicy = POLICY) -> AsyncIterator[LateService]:
        app = web.Application(client_max_size=2**20)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        try:
            await self._listen()
            self.origin = f"http://127.0.0.1:{self._port}"
            async with SigningClient(self.origin, "token", retry=retry) as self.client:
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


# Calls

WRITES = ["send", "upload", "add"]


def make_call(client: SigningClient, write: str, number: int = 1, signing: str = "") -> tuple[str, Awaitable[Any]]:
    """Return the key of a call's script, and the call: on a signing of its own, unless ``signing`` is given."""
    signing, email = signing or f"s{number}", f"{number}@example.com"
    if write == "send":
        return f"s{number}", client.signings.send(f"s{number}")
    if write == "upload":
        return f"{number}.pdf", client.documents.upload(signing, make_pdf(), f"{number}.pdf")
    if write == "request send":
        return f"s{number}", request_send(client, f"s{number}")
    if write == "request add":
        return email, request_add(client, email, signing)
    return email, client.recipients.add(signing, email=email, first_name="Anna")


def request_send(client: SigningClient, signing: str) -> Awaitable[Response]:
    """Send a signing by `client.request`."""

    async def find(read: Reader) -> Response | None:
        response = await read("/api/1.0/signings/{id}", path={"id": signing})
        return None if response.decode(Signing).is_draft else response

    return client.request("POST", "/api/1.0/signings/{id}/send", path={"id": signing}, reconcile=find)


@attrs.frozen
class Person:
    """A class of the caller."""

    id: str
    email: str
    extra: dict[str, Any] = attrs.field(factory=dict)


RECIPIENTS = "/api/1.0/signings/{id}/recipients"


def request_add(client: SigningClient, email: str, signing: str = "s1", *, into: Any = Person) -> Awaitable[Any]:
    """Add a recipient by `client.request`."""

    async def find(read: Reader) -> Person | None:
        people = read.paginate(RECIPIENTS, into=Person, path={"id": signing})
        return read.only([each async for each in people if each.email == email])

    return client.request("POST", RECIPIENTS, path={"id": signing}, json={"email": email}, reconcile=find, into=into)


async def outcome(call: Awaitable[Any]) -> tuple[SigningError | None, float]:
    """Return the call's error, and when it ended by the loop's clock."""
    try:
        await call
    except SigningError as error:
        return error, asyncio.get_running_loop().time()
    return None, asyncio.get_running_loop().time()


def judge(held: Held, error: SigningError | None, ended_at: float, settle: float = SETTLE) -> None:
    """Compare what the caller was told with the effects that showed during the call or within their settle time."""
    seen = [fate for at, fate in held.effects if at < ended_at - 0.02 or _is_in_time(fate, settle)]
    if error is None:
        assert len(seen) <= 1, f"{len(seen)} silent effects"
        assert held.effects, "a success without an effect"
    elif error.effect == "none":
        assert not seen, f"a definite {error!r} for what took effect"
    else:
        assert isinstance(error, OutcomeUnknown)


def _is_in_time(fate: Fate, settle: float) -> bool:
    """Whether the effect shows well within the settle time, of which some outcomes have a tenth."""
    most = 0.0 if fate.kind in ("503", "drop") else 0.7 * settle
    return fate.effect_after is not None and fate.effect_after <= most
