"""The sandbox itself: a server on this machine, and what tests and tools do with it from Python."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from aiohttp import web

from .accounts import DEFAULT_TENANT, Accounts, is_loopback
from .api import Api, RateLimit, RequestRecord, logger
from .authority import LEVELS, Level
from .clock import Clock
from .database import Database
from .deliveries import Deliveries
from .faults import Faults
from .files import Files
from .forms import Forms
from .ids import Ids
from .control import Own
from .profile import Profile
from .records import App, Document, Notification, Recipient, Signing, User
from .service import Service

SHUTDOWN = 0.25
"""Seconds that requests in flight are given when the sandbox stops."""


@dataclass(frozen=True, repr=False)
class Snapshot:
    """All that the sandbox held at one moment."""

    database: bytes
    offset: int


class Sandbox:
    """The documented signing service, running here. It is no legal signing service.

    Without `data` everything is temporary; with a folder it is kept there, and nothing acknowledged is lost even if
    the process is killed. `port=0` takes a free port. The same `seed` gives the same ids, tokens and secrets.
    Webhooks go to this machine only, unless `allow_remote_webhooks` is set. `seal_level` is the PAdES level of the
    sealed documents: B-B, B-T, B-LT or B-LTA, by a timestamp service and OCSP responses of the sandbox's own.
    """

    clock: Clock
    webhooks: Deliveries
    accounts: Accounts
    service: Service
    forms: Forms
    base_url: str

    def __init__(
        self,
        port: int = 0,
        data: Path | str | None = None,
        profile: Profile | None = None,
        seed: int | str | None = None,
        webhook_url: str | None = None,
        webhook_secret: str | None = None,
        host: str = "127.0.0.1",
        *,
        allow_remote_webhooks: bool = False,
        keep_requests: int = 10_000,
        seal_level: Level = "B-B",
    ) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {port!r}")
        if not isinstance(host, str) or not host:
            raise ValueError(f"host must be an address or a name, not {host!r}")
        if isinstance(keep_requests, bool) or not isinstance(keep_requests, int) or keep_requests < 1:
            raise ValueError(f"keep_requests must be a whole number from 1, not {keep_requests!r}")
        if seal_level not in LEVELS:
            raise ValueError(f"seal_level must be one of {', '.join(LEVELS)}, not {seal_level!r}")
        if webhook_secret is not None and webhook_url is None:
            raise ValueError("webhook_secret is of no use without webhook_url")
        self.profile: Profile = profile or Profile()
        self.faults: Faults = Faults()
        self.host = host
        self._port = port
        self._data = None if data is None else Path(data)
        self._seed = seed
        self._webhook = (webhook_url, webhook_secret)
        self._allow_remote = allow_remote_webhooks
        self._keep_requests = keep_requests
        self._seal_level: Level = seal_level
        self._closing = asyncio.Event()
        self._exits: contextlib.AsyncExitStack | None = None

    # start and stop

    async def __aenter__(self) -> Self:
        if self._exits is not None:
            raise RuntimeError("this sandbox was started before; make a new one")
        async with contextlib.AsyncExitStack() as exits:
            folder = self._open_folder(exits)
            self._open(folder, exits)
            await self._listen(exits)
            self.webhooks.start()
            url, secret = self._webhook
            if url is not None:
                self.webhooks.keep(url, secret)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._exits is not None
        await self._exits.aclose()

    def _open_folder(self, exits: contextlib.AsyncExitStack) -> Path:
        if self._data is None:
            # a thread that a cancelled request left behind may still be writing
            folder = tempfile.TemporaryDirectory(prefix="signing-sandbox-", ignore_cleanup_errors=True)
            return Path(exits.enter_context(folder))
        self._data.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._data

    def _open(self, folder: Path, exits: contextlib.AsyncExitStack) -> None:
        durable = self._data is not None
        self._database = Database(folder / "sandbox.db", durable=durable)
        exits.callback(self._database.close)
        files = Files(folder / "files", durable=durable)
        self.clock = Clock(self._database.value("SELECT value FROM meta WHERE key = 'offset'") or 0, self._keep_offset)
        ids = Ids(self._database, self._seed, self.profile.ids)
        self.accounts = Accounts(self._database, self.clock, ids, self.profile)
        self.webhooks = Deliveries(
            self._database, self.clock, ids, self.profile, self.faults, allow_remote=self._allow_remote
        )
        self.service = Service(
            self._database,
            files,
            self.clock,
            ids,
            self.profile,
            self.accounts,
            self.webhooks.emit,
            self._seal_level,
        )
        files.remove_all_but(name for d in self.service.documents() for name in (d.file, d.sealed_file) if name)
        self.accounts.default_user()

    def _keep_offset(self, offset: int) -> None:
        self._database.run("INSERT OR REPLACE INTO meta VALUES ('offset', ?)", offset)

    async def _listen(self, exits: contextlib.AsyncExitStack) -> None:
        from . import openapi, pages

        self.forms = Forms(loopback_only=is_loopback(self.host))
        self._api = Api(
            self.service,
            self.accounts,
            self.profile,
            self.faults,
            self.clock,
            self._closing,
            seed=self._seed,
            keep_requests=self._keep_requests,
        )
        people = pages.Pages(self)
        app = web.Application(middlewares=[self._api.logged, self.forms.new_cookies, people.errors])
        app.router.add_routes(self._api.routes())
        app.router.add_routes(Own(self).routes())
        app.router.add_routes(self._watched(people.routes()))
        app.router.add_get("/openapi.json", partial(openapi.serve, self.profile))
        runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=SHUTDOWN, handle_signals=False)
        await runner.setup()
        exits.push_async_callback(runner.cleanup)
        exits.push_async_callback(self.webhooks.close)
        exits.callback(self._closing.set)
        site = web.TCPSite(runner, self.host, self._port, backlog=1024)
        await site.start()
        port = runner.addresses[0][1]
        self.base_url = f"http://{_reachable(self.host)}:{port}"

    def _watched(self, routes: list[web.RouteDef]) -> list[web.RouteDef]:
        return [
            web.get(route.path, partial(self._api.serve_page, "oauth.authorize", route.handler))
            if (route.method, route.path) == ("GET", "/oauth/authorize")
            else route
            for route in routes
        ]

    # who uses it

    def add_user(self, name: str, email: str, tenant: str = DEFAULT_TENANT) -> User:
        """One more user; with another tenant, somebody who sees none of this tenant's signings."""
        return self.accounts.add_user(name, email, tenant)

    def register_app(self, redirect_uri: str, name: str = "My app", *, user: User | None = None) -> App:
        """A new application, with its `client_secret`."""
        return self.accounts.register_app(name, redirect_uri, user)

    @property
    def apps(self) -> list[App]:
        """The registered applications, without their secrets."""
        return self.accounts.apps()

    def access_token(self, *, user: User | None = None, lifetime: float | None = None) -> str:
        """An access token of the default user (or another); it expires only if it is given a lifetime in seconds."""
        return self.accounts.access_token(user=user, lifetime=lifetime)

    def authorize(self, app: App, *, user: User | None = None) -> str:
        """An authorization code, as if the default user (or another) had agreed in the browser."""
        return self.accounts.authorize(app, user=user)

    # what people do

    async def sign(self, recipient_id: str) -> Signing:
        """The recipient signs; after the last one the documents are sealed. Refused when it cannot be."""
        return await self.service.sign(recipient_id)

    async def decline(self, recipient_id: str) -> Signing:
        """The recipient refuses to sign."""
        return await self.service.decline(recipient_id)

    async def complete(self, signing_id: str) -> Signing:
        """Everybody who has not yet signed does."""
        return await self.service.complete(signing_id)

    async def cancel(self, signing_id: str) -> Signing:
        """The signing is cancelled."""
        return self.service.cancel(signing_id)

    async def certificate_pem(self) -> bytes:
        """The certificate of the throw-away authority that seals."""
        return await self.service.certificate_pem()

    # what it holds

    @property
    def signings(self) -> list[Signing]:
        """All signings, oldest first."""
        return self.service.signings()

    def signing(self, signing_id: str) -> Signing:
        """One signing."""
        return self.service.signing(signing_id)

    def documents(self, signing_id: str | None = None) -> list[Document]:
        """The documents of a signing, or all, oldest first."""
        return self.service.documents(signing_id)

    def document_bytes(self, document_id: str) -> bytes:
        """An uploaded document as it was received."""
        return self.service.document_path(document_id).read_bytes()

    def recipients(self, signing_id: str | None = None) -> list[Recipient]:
        """The recipients of a signing, or all, oldest first."""
        return self.service.recipients(signing_id)

    @property
    def notifications(self) -> list[Notification]:
        """The invitations and reminders that were sent, oldest first."""
        return self.service.notifications()

    @property
    def requests(self) -> list[RequestRecord]:
        """The last requests, oldest first."""
        return list(self._api.log)

    def requests_of(self, operation: str) -> list[RequestRecord]:
        """The last requests to one operation, oldest first."""
        return [record for record in self._api.log if record.operation == operation]

    # how it behaves

    def rate_limit(self, rate: float | None, burst: int | None = None, *, retry_after: float | None = None) -> None:
        """Let so many requests a second pass, `burst` at once (default: one second's worth); None lifts the limit.

        The others get 429; `retry_after` is their Retry-After, by default the whole seconds until one may pass.
        """
        if rate is None:
            self._api.rate_limit = None
            return
        for name, value, least in (("rate", rate, 1e-6), ("retry_after", retry_after or 0, 0)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e9:
                raise ValueError(f"{name} must be a number from {least:g} to 1e9, not {value!r}")
        if burst is not None and (isinstance(burst, bool) or not isinstance(burst, int) or not 1 <= burst <= 1e9):
            raise ValueError(f"burst must be a whole number from 1 to 1e9, not {burst!r}")
        self._api.rate_limit = RateLimit(rate, burst or int(max(1, rate)), retry_after, self.clock)

    @property
    def current_rate_limit(self) -> RateLimit | None:
        """The rate limit in force, if there is one."""
        return self._api.rate_limit

    def snapshot(self) -> Snapshot:
        """All that the sandbox holds now, the clock included; faults and the request log are not part of it."""
        offset: int = self._database.value("SELECT value FROM meta WHERE key = 'offset'") or 0
        return Snapshot(self._database.dump(), offset)

    def restore(self, snapshot: Snapshot) -> None:
        """Be again as it was then."""
        self._database.load(snapshot.database)
        self.clock.set_offset(snapshot.offset)
        self.webhooks.wake_all()

    def __repr__(self) -> str:
        return f"<Sandbox {getattr(self, 'base_url', 'not started')}>"


def _reachable(host: str) -> str:
    """The host as it stands in an address; for all addresses at once, the loopback one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return f"[{host}]" if address.version == 6 else host
