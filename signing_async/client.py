"""`SigningClient`: options, ownership of the session, and the resources."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import AsyncIterable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import attrs

from ._api import Api
from ._secret import Secret, hide
from ._tasks import leave
from .assumptions import Assumptions
from .documents.resource import Documents
from .endpoints import AnyEndpoint, as_timeouts
from .errors import ConfigurationError
from .models import Signing, User
from .recipients import Recipients
from .reconcile import Ledger
from .signings import Signings
from .telemetry import is_enabled
from .transport import urls, wire
from .transport.attempt import Bearer
from .transport.call import Transport
from .transport.decode import record_decoder
from .transport.operation import Attempt, Auth, Operation, Options, Shared, Timeouts
from .transport.proxy import parse_proxy
from .transport.rate_limit import LocalRateLimiter, RateLimiter, as_rate_limiter
from .transport.response import Response
from .transport.retry import RetryPolicy, Safety

if TYPE_CHECKING:
    from .archive.manifest import ArchivedDocument
    from .archive.stores import ArchiveStore
    from .auth.oauth import OAuth
    from .auth.refresh import CurrentToken
    from .bulk import Progress, Results
    from .dispatch.journal import Journal
    from .dispatch.package import SigningPackage
    from .dispatch.run import DispatchResult
    from .sealed import Trust

__all__ = ["SigningClient"]

_DEFAULT_RETRY = RetryPolicy()
_DEFAULT_TIMEOUTS = Timeouts()
_DEFAULT_ASSUMPTIONS = Assumptions()


class SigningClient(AnyEndpoint):
    """A client for one user of one tenant of the service.

    ``auth`` is an access token or an `OAuth`. ``session`` is the caller's own `aiohttp.ClientSession`, which any number
    of clients may share and which the client never closes; by default the client makes one, which uses the proxies of
    the environment (``HTTPS_PROXY``, ``NO_PROXY``, ...). ``proxy`` is the URL of another proxy. ``timeout`` is
    `Timeouts`, or the seconds that a whole call may take, including its waits and retries. ``on_attempt`` is called
    after every attempt, including those of token requests that a call causes; ``on_response`` with every response
    except those of downloads and streams. By default each client has a ``rate_limiter`` of its own; if the service
    counts the requests of several clients together, give them one: a `LocalRateLimiter`, or a
    `redis.RedisRateLimiter` for many machines. ``telemetry=False`` disables OpenTelemetry, as
    ``SIGNING_TELEMETRY=off`` does for a process; True overrides it. ::

        async with SigningClient("https://tenant.example.com", token) as client:
            user = await client.me()
    """

    def __init__(
        self,
        base_url: str,
        auth: str | OAuth,
        *,
        session: aiohttp.ClientSession | None = None,
        proxy: str | Secret[str] | None = None,
        retry: RetryPolicy = _DEFAULT_RETRY,
        timeout: float | Timeouts = _DEFAULT_TIMEOUTS,
        assumptions: Assumptions = _DEFAULT_ASSUMPTIONS,
        on_attempt: Callable[[Attempt], None] | None = None,
        on_response: Callable[[Response], None] | None = None,
        rate_limiter: RateLimiter | None = None,
        telemetry: bool | None = None,
    ) -> None:
        proxy = hide(proxy)
        origin = urls.check_origin(base_url)
        self._oauth: CurrentToken | None = None
        if isinstance(auth, str):
            source: Auth = Bearer(auth)
        else:
            source = self._oauth = _current_token(auth, origin)
        # Some tracebacks show variables.
        del auth
        if session is not None:
            _check_session(session)
        limiter = LocalRateLimiter() if rate_limiter is None else as_rate_limiter(rate_limiter)
        is_on = is_enabled() if telemetry is None else telemetry
        options = _check_options(Options(retry, as_timeouts(timeout), assumptions, on_attempt, on_response, is_on))
        sessions = wire.Sessions(session, origin, None if proxy is None else parse_proxy("proxy", proxy))
        if self._oauth is not None:
            self._oauth.endpoint.lend(sessions)
        self._set_up(Transport(Shared(origin, source, sessions, limiter), options), Ledger())
        self._owns = True

    def _set_up(self, transport: Transport, ledger: Ledger) -> None:
        self._shared, self._transport, self._ledger = transport.shared, transport, ledger
        self._api: Api = Api(transport, ledger)
        decode = record_decoder(User, transport.options.assumptions)
        self._me: Operation[User] = Operation("me", "GET", "/api/1.0/me", Safety.READ, decode=decode)

    @property
    def base_url(self) -> str:
        """The origin of the tenant."""
        return self._api.origin

    @property
    def signings(self) -> Signings:
        """Create drafts, read and list signings, send them, and wait until they are completed."""
        return self._api.signings

    @property
    def documents(self) -> Documents:
        """Upload PDFs to a draft, one or many, and download the sealed ones."""
        return self._api.documents

    @property
    def recipients(self) -> Recipients:
        """Add recipients to a draft, list and remind them."""
        return self._api.recipients

    @classmethod
    def from_env(
        cls,
        *,
        session: aiohttp.ClientSession | None = None,
        proxy: str | Secret[str] | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | Timeouts | None = None,
        assumptions: Assumptions | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
        on_response: Callable[[Response], None] | None = None,
        rate_limiter: RateLimiter | None = None,
        telemetry: bool | None = None,
    ) -> Self:
        """Return a client configured by the environment and the settings file; arguments override both.

        Set ``SIGNING_BASE_URL``, and either ``SIGNING_ACCESS_TOKEN`` or all of ``SIGNING_CLIENT_ID``,
        ``SIGNING_CLIENT_SECRET``, ``SIGNING_REDIRECT_URI`` and ``SIGNING_TOKEN_FILE``. After ``signing-async login``,
        ``SIGNING_TOKEN_FILE`` is optional. `signing_async.settings` lists the others.
        """
        given = {name: value for name, value in locals().items() if name != "cls" and value is not None}
        from .settings import Settings  # most clients are made without it

        settings = Settings.load()
        if assumptions is not None:
            settings = attrs.evolve(settings, assumptions=assumptions)
        return cls(settings.origin, settings.auth(), **{**settings.client_options(), **given})

    def with_options(
        self,
        *,
        timeout: float | Timeouts | None = None,
        retry: RetryPolicy | None = None,
        assumptions: Assumptions | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
        on_response: Callable[[Response], None] | None = None,
    ) -> Self:
        """Return a view with other options on the same session, rate limiter and tokens; it need not be closed.

        The view is a copy of the client, with the attributes of a subclass. ::

            await client.with_options(timeout=5, retry=RetryPolicy.none()).me()
        """
        given: Any = {name: value for name, value in locals().items() if name != "self" and value is not None}
        if timeout is not None:
            given["timeouts"] = as_timeouts(given.pop("timeout"))
        options = _check_options(attrs.evolve(self._transport.options, **given))
        view = copy.copy(self)
        view._owns = False
        view._set_up(Transport(self._shared, options), self._ledger)
        return view

    async def me(self) -> User:
        """Return the user whom the token belongs to; a cheap check of the token."""
        return await self._transport.call(self._me)

    async def dispatch(
        self, package: SigningPackage, journal: Journal | str | os.PathLike[str] | None = None, *, ordered: bool = True
    ) -> Signing:
        """Create a signing, upload its documents, add its recipients and send it; return the signing as sent.

        An `InvalidRequest` lists all problems of the package before the first request. With a journal, which is a path
        or a `Journal`, the call can be repeated whatever ended it, even a crash: the package is sent once, and each
        call returns its signing. If another run is working on the package, the call waits for that run. Documents are
        uploaded in the package's order; with ``ordered=False`` concurrently, in any order. ::

            package = SigningPackage("Lease 2031", "EN", ["lease.pdf"], [NewRecipient("anna@example.com")])
            signing = await client.dispatch(package, journal="leases.journal")
        """
        from .dispatch.run import dispatch_one  # takes a tenth of the package's import time, and needs SQLite

        return await dispatch_one(self._api, package, journal, ordered)

    def dispatch_many(
        self,
        packages: Iterable[SigningPackage] | AsyncIterable[SigningPackage],
        journal: Journal | str | os.PathLike[str],
        concurrency: int = 8,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        ordered: bool = True,
    ) -> Results[DispatchResult]:
        """Send packages, ``concurrency`` at a time; return an async iterator of results in completion order.

        A package that fails is a result with an error, and the others continue. After a fatal error (the client is
        closed, the token is rejected for good) every remaining package gets that error, and nothing more is sent.
        Repeat the call with the same journal after a crash, or for the packages that failed: each is sent once, with
        exactly its documents and recipients. If the journal fails, the run stops with a `JournalError`. ``ordered`` is
        as for `dispatch`. ::

            async for result in client.dispatch_many(packages, journal="leases.journal"):
                print(result.package.name, result.signing.id if result.error is None else result.error)
        """
        from .dispatch.run import dispatch_many

        return dispatch_many(self._api, packages, journal, concurrency, on_progress, ordered)

    async def archive(
        self,
        signing: str | Signing,
        to: ArchiveStore | str | os.PathLike[str],
        journal: Journal | str | os.PathLike[str] | None = None,
        *,
        template: str | None = None,
        verify: bool = False,
        trust: Trust | Iterable[Trust] | None = None,
    ) -> tuple[ArchivedDocument, ...]:
        """Download the sealed documents of one signing into an archive; return them all, also those of earlier calls.

        ``to`` is a folder or an `ArchiveStore`. There are no documents until the signing is completed. The call can be
        repeated whatever ended it: each document has one file and one line in the manifest. With a journal, which is a
        path or a `Journal`, runs that share it don't download the same document twice. `signing_async.archive.Archive`
        archives all signings, and describes the other arguments. ::

            for document in await client.archive(signing, "archive/"):
                print(document.path, document.sha256)
        """
        from .archive.archive import archive_one

        return await archive_one(self, signing, to, journal, template=template, verify=verify, trust=trust)

    @property
    def closed(self) -> bool:
        """Whether the client was closed, by itself or through a view."""
        return self._shared.sessions.closed

    async def aclose(self) -> None:
        """Close the client, its views, and the session unless it is the caller's.

        A pending token refresh finishes first, even if the caller is cancelled, so its token is not lost. A token that
        could not be saved is saved now; if that fails again, the client is closed and an `AuthError` is raised.
        """
        sessions = self._shared.sessions
        await (sessions.close() if self._oauth is None else self._oauth.close(sessions))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await leave(self.aclose(), error)

    def __repr__(self) -> str:
        # Some tracebacks show a client whose constructor raised.
        api = getattr(self, "_api", None)
        return f"{type(self).__name__}({'' if api is None else repr(api.origin)})"

    def __del__(self) -> None:
        # If the constructor raised, there is nothing to close; a view closes nothing.
        if getattr(self, "_owns", False):
            self._shared.sessions.warn_if_open(self)


def _current_token(auth: OAuth, origin: str) -> CurrentToken:
    from .auth.oauth import OAuth  # a client with an access token does without

    if not isinstance(auth, OAuth):
        raise ConfigurationError(f"auth: must be an access token or an OAuth, got {type(auth).__name__}")
    if auth.origin != origin:
        raise ConfigurationError(
            f"auth: its tokens are for {auth.origin}, not for {origin}: pass base_url={auth.origin!r}"
        )
    return auth.current


def _check_session(session: object) -> None:
    if not isinstance(session, aiohttp.ClientSession):
        raise ConfigurationError(f"session: must be an aiohttp.ClientSession, got {type(session).__name__}")
    if session.auth is not None:
        raise ConfigurationError("session: must have no credentials of its own: make it without auth=")
    if "Expect" in session.headers:
        # Then a request is sent in two steps, and a lost response could not be told from a request that was not sent.
        raise ConfigurationError("session: must not have the header Expect")


def _check_options(options: Options) -> Options:
    for name, kind in (("retry", RetryPolicy), ("assumptions", Assumptions)):
        value = getattr(options, name)
        if not isinstance(value, kind):
            raise ConfigurationError(f"{name}: must be {kind.__name__}, got {value!r}")
    for name in ("on_attempt", "on_response"):
        hook = getattr(options, name)
        if hook is not None and not callable(hook):
            raise ConfigurationError(f"{name}: must be callable, got {hook!r}")
        if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(type(hook).__call__):
            raise ConfigurationError(f"{name}: must be a plain function, because it is not awaited, got {hook!r}")
    if not isinstance(options.telemetry, bool):
        raise ConfigurationError(f"telemetry: must be True or False, got {options.telemetry!r}")
    return options
