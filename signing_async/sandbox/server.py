"""The sandbox: a server on this machine, and its Python interface for tests and tools."""

from __future__ import annotations

import contextlib
import tempfile
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from aiohttp import web

from .. import _checks
from . import openapi, pages
from .accounts import DEFAULT_TENANT, Accounts
from .addresses import is_loopback, url_host
from .api import Api
from .clock import Clock
from .control import Control
from .database import Database
from .deliveries import Deliveries
from .faults import Faults, RateLimit
from .files import Files
from .profile import Profile
from .records import App, Document, Notification, Recipient, Signing, User
from .request_log import RequestRecord, logger
from .responses import Encoder, Middleware
from .sealer import LEVELS, Level
from .service import Service
from .state import Snapshot, State

__all__ = ["Sandbox", "Snapshot"]

SHUTDOWN = 0.25
"""How many seconds requests in flight have to finish when the sandbox stops."""


class HasId(Protocol):
    """A record, of the sandbox or of a client."""

    @property
    def id(self) -> str: ...


def _id_of(record: str | HasId) -> str:
    return record if isinstance(record, str) else record.id


class Sandbox:
    """The documented signing service on this machine. It is not a legal signing service.

    Without `data` everything is temporary. With a folder everything is kept there, and nothing acknowledged is lost
    even if the process is killed. `port=0` takes a free port. The same `seed` gives the same ids, tokens and secrets.
    Webhooks are sent to this machine only, unless `allow_remote_webhooks` is set. `seal_level` is the PAdES level of
    the sealed documents: B-B, B-T, B-LT or B-LTA. The sandbox itself makes the timestamps and OCSP responses.
    """

    clock: Clock
    webhooks: Deliveries
    accounts: Accounts
    service: Service
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
        _checks.integer("port", port, at_least=0, at_most=65535, error=ValueError)
        _checks.string("host", host, error=ValueError)
        _checks.integer("keep_requests", keep_requests, error=ValueError)
        if seal_level not in LEVELS:
            raise ValueError(f"seal_level: must be one of {', '.join(LEVELS)}, got {seal_level!r}")
        if webhook_secret is not None and webhook_url is None:
            raise ValueError("webhook_secret: needs webhook_url")
        self.profile: Profile = profile or Profile()
        self.faults: Faults = Faults()
        self.host: str = host
        self._port = port
        self._data = data
        self._webhook = (webhook_url, webhook_secret)
        self._new_state = partial(
            State,
            profile=self.profile,
            faults=self.faults,
            seed=seed,
            seal_level=seal_level,
            keep_requests=keep_requests,
            allow_remote_webhooks=allow_remote_webhooks,
            loopback_only=is_loopback(host),
        )
        self._state: State
        self._exits: contextlib.AsyncExitStack | None = None

    # start and stop

    async def start(self) -> Self:
        """Start the server and return the sandbox; `aclose` stops it. ``async with`` does both."""
        if self._exits is not None:
            raise RuntimeError("this sandbox was already started once; create a new one")
        async with contextlib.AsyncExitStack() as exits:
            self._open(exits)
            await self._listen(exits)
            self.webhooks.wake()
            url, secret = self._webhook
            if url is not None:
                self.webhooks.keep(url, secret)
            self._exits = exits.pop_all()
        return self

    async def aclose(self) -> None:
        """Stop the server. Without `data`, everything it holds is lost."""
        if self._exits is not None:
            await self._exits.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _open(self, exits: contextlib.AsyncExitStack) -> None:
        if self._data is None:
            # A thread of a cancelled request may still be writing there.
            temporary = tempfile.TemporaryDirectory(prefix="signing-sandbox-", ignore_cleanup_errors=True)
            folder = Path(exits.enter_context(temporary))
        else:
            folder = Path(self._data)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        durable = self._data is not None
        database = Database(folder / "sandbox.db", durable=durable)
        exits.callback(database.close)
        state = self._state = self._new_state(database, Files(folder / "files", durable=durable))
        self.clock, self.accounts = state.clock, state.accounts
        self.webhooks, self.service = state.webhooks, state.service

    async def _listen(self, exits: contextlib.AsyncExitStack) -> None:
        state = self._state
        encoder = Encoder(self.profile)
        api = Api(state, encoder)
        app = web.Application(middlewares=[Middleware(state.requests, encoder).handle, pages.errors])
        app[pages.STATE] = state
        for route in [*api.routes(), *Control(state).routes(), *pages.ROUTES]:
            if (route.method, route.path) == ("GET", "/oauth/authorize"):
                app.router.add_get(route.path, partial(api.serve, "oauth.authorize", route.handler))
            else:
                route.register(app.router)
        app.router.add_get("/openapi.json", partial(openapi.serve, self.profile))
        runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=SHUTDOWN, handle_signals=False)
        await runner.setup()
        exits.push_async_callback(runner.cleanup)
        exits.push_async_callback(self.webhooks.close)
        exits.callback(state.closing.set)
        await web.TCPSite(runner, self.host, self._port, backlog=1024).start()
        self.base_url = state.base_url = f"http://{url_host(self.host)}:{runner.addresses[0][1]}"

    # users and applications

    def add_user(self, name: str, email: str, tenant: str = DEFAULT_TENANT) -> User:
        """Add a user. A user of another tenant sees none of this tenant's signings."""
        return self.accounts.add_user(name, email, tenant)

    def register_app(self, redirect_uri: str, name: str = "My app", *, user: User | None = None) -> App:
        """Register an application and return it with its `client_secret`."""
        return self.accounts.register_app(name, redirect_uri, user)

    @property
    def apps(self) -> list[App]:
        """The registered applications, without their secrets."""
        return self.accounts.apps()

    def access_token(self, *, user: User | None = None, lifetime: float | None = None) -> str:
        """Return an access token of a user (default: the default user); it expires only if `lifetime` is given."""
        return self.accounts.access_token(user=user, lifetime=lifetime)

    def authorize(self, app: App, *, user: User | None = None) -> str:
        """Return an authorization code, as if the user had consented in the browser."""
        return self.accounts.authorize(app, user=user)

    # recipients' actions

    async def sign(self, recipient_id: str | HasId) -> Signing:
        """Sign for a recipient; the last signature seals the documents. Raise `Refused` if it is not allowed."""
        return await self._state.signatures.sign(_id_of(recipient_id))

    async def decline(self, recipient_id: str | HasId) -> Signing:
        """Decline to sign for a recipient."""
        return await self._state.signatures.decline(_id_of(recipient_id))

    async def complete(self, signing_id: str | HasId) -> Signing:
        """Sign for all recipients who have neither signed nor declined."""
        return await self._state.signatures.complete(_id_of(signing_id))

    async def cancel(self, signing_id: str | HasId) -> Signing:
        """Cancel a signing."""
        return self.service.cancel(_id_of(signing_id))

    async def certificate_pem(self) -> bytes:
        """Return the certificate of the sandbox's own certificate authority."""
        return await self._state.sealer.certificate_pem()

    # contents

    @property
    def signings(self) -> list[Signing]:
        """All signings, oldest first."""
        return self.service.signings()

    def signing(self, signing_id: str | HasId) -> Signing:
        """Return a signing."""
        return self.service.signing(_id_of(signing_id))

    def documents(self, signing_id: str | HasId | None = None) -> list[Document]:
        """Return the documents of a signing, or all documents, oldest first."""
        return self.service.documents(None if signing_id is None else _id_of(signing_id))

    def document_bytes(self, document_id: str | HasId) -> bytes:
        """Return an uploaded document as it was received."""
        return self.service.document_path(_id_of(document_id)).read_bytes()

    def recipients(self, signing_id: str | HasId | None = None) -> list[Recipient]:
        """Return the recipients of a signing, or all recipients, oldest first."""
        return self.service.recipients(None if signing_id is None else _id_of(signing_id))

    @property
    def notifications(self) -> list[Notification]:
        """The invitations and reminders sent, oldest first."""
        return self._state.invitations.notifications()

    @property
    def requests(self) -> list[RequestRecord]:
        """The newest requests, oldest first."""
        return list(self._state.requests.records)

    def requests_of(self, operation: str) -> list[RequestRecord]:
        """Return the newest requests to one operation, oldest first."""
        return [record for record in self._state.requests.records if record.operation == operation]

    # behaviour

    def rate_limit(self, rate: float | None, burst: int | None = None, *, retry_after: float | None = None) -> None:
        """Limit the API to `rate` requests per second, `burst` at once (default: one second's); None removes it.

        Other requests get 429 with a Retry-After of `retry_after`, by default the seconds until the next is admitted.
        """
        self._state.limit_rate(rate, burst, retry_after)

    @property
    def current_rate_limit(self) -> RateLimit | None:
        """The rate limit, if there is one."""
        return self._state.rate_limit

    def snapshot(self) -> Snapshot:
        """Return the database and the clock, without faults, the rate limit and the request log."""
        return self._state.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot."""
        self._state.restore(snapshot)

    def __repr__(self) -> str:
        return f"<Sandbox {getattr(self, 'base_url', 'not started')}>"
