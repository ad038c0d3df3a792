"""The state of one sandbox, shared by the API, the control API and the pages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from .accounts import Accounts
from .clock import Clock
from .database import Database
from .deliveries import Deliveries
from .faults import Faults, RateLimit
from .files import Files
from .forms import Forms
from .ids import Ids
from .invitations import Invitations
from .profile import Profile
from .request_log import RequestLog
from .sealer import Level, Sealer
from .service import Service
from .signatures import Signatures


@dataclass(frozen=True, repr=False)
class Snapshot:
    """A sandbox's database and clock at one moment, without the documents' files."""

    database: bytes
    offset: int


class State:
    """The parts of a running sandbox."""

    def __init__(
        self,
        database: Database,
        files: Files,
        profile: Profile,
        faults: Faults,
        *,
        seed: int | str | None,
        seal_level: Level,
        keep_requests: int,
        allow_remote_webhooks: bool,
        loopback_only: bool,
    ) -> None:
        self.database: Database = database
        self.profile: Profile = profile
        self.faults: Faults = faults
        self.base_url: str = ""
        self.rate_limit: RateLimit | None = None
        self.closing: asyncio.Event = asyncio.Event()
        self.clock: Clock = Clock(self._saved_offset(), self._clock_changed)
        clock = self.clock
        ids = Ids(database, seed, profile.ids)
        self.requests: RequestLog = RequestLog(clock, seed, keep_requests)
        self.forms: Forms = Forms(loopback_only=loopback_only)
        self.accounts: Accounts = Accounts(database, clock, ids, profile)
        self.webhooks: Deliveries = Deliveries(
            database, clock, ids, profile, faults, allow_remote=allow_remote_webhooks
        )
        emit = self.webhooks.emit
        self.service: Service = Service(database, files, clock, ids, profile, emit)
        self.invitations: Invitations = Invitations(database, clock, profile, self.service, emit)
        self.sealer: Sealer = Sealer(files.folder.parent / "authority", clock, seal_level)
        self.signatures: Signatures = Signatures(
            database, files, clock, profile, self.service, self.invitations, self.sealer, emit
        )
        files.remove_all_but(name for d in self.service.documents() for name in (d.file, d.sealed_file) if name)
        self.accounts.default_user()

    def limit_rate(self, rate: float | None, burst: int | None = None, retry_after: float | None = None) -> None:
        """Set the rate limit; None removes it. By default, one second's requests may arrive at once."""
        self.rate_limit = None if rate is None else RateLimit(rate, burst, retry_after, self.clock)

    def snapshot(self) -> Snapshot:
        """Return the database and the clock, without faults, the rate limit and the request log."""
        return Snapshot(self.database.dump(), self._saved_offset())

    def restore(self, snapshot: Snapshot) -> None:
        self.database.load(snapshot.database)
        self.clock.set_offset(snapshot.offset)

    def reset(self) -> None:
        """Delete signings, notifications, events, requests, faults and the rate limit; set the clock to real time.

        Users, applications, tokens and webhook endpoints stay.
        """
        with self.database.transaction():
            for table in ("signings", "documents", "recipients", "notifications", "events", "deliveries", "attempts"):
                self.database.run(f"DELETE FROM {table}")
        self.faults.clear()
        self.limit_rate(None)
        self.requests.records.clear()
        self.clock.set_offset(0)

    def _saved_offset(self) -> int:
        return self.database.value("SELECT value FROM meta WHERE key = 'offset'") or 0

    def _clock_changed(self, offset: int) -> None:
        self.database.run("INSERT OR REPLACE INTO meta VALUES ('offset', ?)", offset)
        self.webhooks.wake()
