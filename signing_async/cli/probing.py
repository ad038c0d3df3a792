"""Determine how a tenant responds where the specification says "not shown", by some twenty GET requests.

One of them is for a record that does not exist, and one has no token. A wrong token is sent only on request: a service
may take it for an attack.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from .._connections import connection_error
from ..client import SigningClient
from ..errors import NotFound, SigningError
from ..transport.call import Anonymous, Bearer
from ..transport.error_response import error_from
from ..transport.lookup import record, request_id
from .findings import NAME, Finding, Learned
from .list_probe import NO_SUCH, ListProbe
from .probe_requests import ProbeRequests, ProbeResponse

__all__ = ["Probe"]

CERTIFICATE_WARNING_DAYS = 21
MAX_CLOCK_SKEW = 10.0

_REQUEST_ID = re.compile(r"request.?id|correlation|trace.?id|^x-amzn-trace", re.IGNORECASE)
_RATE_LIMIT = re.compile(r"rate.?limit|quota", re.IGNORECASE)


class Probe:
    """The checks of one tenant, with a client's settings."""

    def __init__(self, client: SigningClient, *, wrong_token: bool = False) -> None:
        self._client = client
        self._requests = ProbeRequests(client)
        self._get = self._requests.get
        self._wrong_token = wrong_token
        self._assumptions = self._requests.options.assumptions
        self.learned: Learned = Learned(self._assumptions)

    async def findings(self) -> AsyncGenerator[Finding, None]:
        """Yield the finding of each check; stop if ``GET /me`` fails."""
        yield await self._certificate()
        me = await self._get("/me")
        yield self._clock(me)
        yield self._token(me)
        if not me.ok:
            return
        yield await self._without_token()
        if self._wrong_token:
            yield await self._with_wrong_token()
        has_list = True
        async with aclosing(ListProbe(self._requests, self.learned).findings()) as findings:
            async for finding in findings:
                has_list = has_list and (finding.check, finding.state) != ("list", "failed")
                yield finding
        yield await self._unknown_record()
        yield self._request_ids()
        yield self._rate_limits()
        if has_list:
            yield await self._read_pages()

    # The connection and the token

    async def _certificate(self) -> Finding:
        origin = self._requests.shared.origin
        parts = urlsplit(origin)
        if parts.scheme == "http":
            return Finding("https", "ok", "plain HTTP, on this machine")
        try:
            async with asyncio.timeout(self._requests.options.timeouts.connect):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or 443, ssl=True)
        except (OSError, TimeoutError) as error:
            reason = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or type(error).__name__
            raise connection_error(f"no secure connection to {origin}: {reason}", error) from None
        certificate = writer.get_extra_info("peercert")
        version = writer.get_extra_info("ssl_object").version()
        writer.transport.abort()
        days = int((ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) // 86_400)
        words = f"{version}; the certificate is valid for {days} more days"
        return Finding("https", "warning" if days < CERTIFICATE_WARNING_DAYS else "ok", words, {"days_left": days})

    def _clock(self, response: ProbeResponse) -> Finding:
        try:
            date = parsedate_to_datetime(response.headers.get("Date", ""))
        except ValueError:
            return Finding("clock", "unknown", "no Date header in the response")
        # The header has whole seconds.
        skew = date.timestamp() + 0.5 - (response.began + response.ended) / 2
        uncertain = 0.5 + (response.ended - response.began) / 2
        facts = {"skew_seconds": round(skew, 1)}
        if abs(skew) <= MAX_CLOCK_SKEW + uncertain:
            words = f"the clocks of this machine and the service agree within {abs(skew) + uncertain:.1f} s"
            return Finding("clock", "ok", words, facts)
        words = f"this machine's clock is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} the service's"
        return Finding("clock", "failed", f"{words}: tokens and webhooks may seem expired", facts)

    def _token(self, me: ProbeResponse) -> Finding:
        if me.ok:
            user = record(me.data, self._assumptions)
            named = [str(user[name]) for name in ("name", "email") if isinstance(user, dict) and user.get(name)]
            return Finding(
                "token", "ok", f"works: {self._requests.redact_and_truncate(', '.join(named)) or 'GET /me succeeds'}"
            )
        if me.transient:
            return Finding("service", "failed", f"failing: HTTP {me.status} on GET /me", {"status": me.status})
        if me.rejects_token:
            self._learn_rejection(me.status, "observed: the token was not accepted")
        return Finding("token", "failed", f"not accepted: HTTP {me.status} on GET /me", {"status": me.status})

    async def _without_token(self) -> Finding:
        response = await self._get("/me", auth=Anonymous(self._requests.secrets))
        status = response.status
        words = f"HTTP {status} without a token"
        if response.ok:
            return Finding("no token", "warning", f"{words}: anyone can read the user", {"status": status})
        if response.transient:
            return Finding("no token", "warning", f"{words}: the service is failing or busy", {"status": status})
        if not self._wrong_token and status != 401:
            words += "; an expired token may get another status (--wrong-token checks that)"
        return Finding("no token", "ok", words, {"status": status})

    async def _with_wrong_token(self) -> Finding:
        response = await self._get("/me", auth=Bearer("not-a-token-of-this-service"))
        status = response.status
        if not response.rejects_token:
            words = f"HTTP {status} with a wrong token, which says nothing about expired tokens"
            return Finding("wrong token", "warning", words, {"status": status})
        self._learn_rejection(status, "observed: a wrong token was sent")
        return Finding("wrong token", "ok", f"HTTP {status} with a wrong token", {"status": status})

    def _learn_rejection(self, status: int, evidence: str) -> None:
        statuses = sorted({*self._assumptions.expired_token_statuses, status})
        self.learned.add("expired_token_statuses", statuses, evidence)

    # Errors and headers

    async def _unknown_record(self) -> Finding:
        response = await self._get(f"/signings/{NO_SUCH}")
        if response.ok or response.transient:
            words = f"HTTP {response.status} for a signing that does not exist"
            return Finding("errors", "warning", words, {"status": response.status})
        error = error_from(
            response.status,
            response.headers,
            response.body,
            reason="",
            operation="signings.get",
            not_found=NotFound,
            retry_after=None,
            secrets=self._requests.secrets(),
            assumptions=self._assumptions,
        )
        data, redact = response.data, self._requests.redact_and_truncate
        shape = f"an object with {', '.join(sorted(map(str, data)))}" if isinstance(data, dict) else "no object"
        kind = response.headers.get("Content-Type", "no Content-Type").partition(";")[0]
        words = f"HTTP {response.status}, {redact(kind)}, {redact(shape)}; code {error.code or 'missing'}"
        return Finding("errors", "ok", words, {"status": response.status, "code": error.code})

    def _request_ids(self) -> Finding:
        responses = self._requests.responses
        for response in responses:
            name = next((name for name in self._assumptions.request_id_headers if response.headers.get(name)), None)
            if name is None:
                name = next(
                    (name for name in response.headers if _REQUEST_ID.search(name) and NAME.fullmatch(name)), None
                )
            if name is not None:
                self.learned.add_first("request_id_headers", name, "observed")
                return Finding("request id", "ok", f"in the header {name}", {"header": name})
        if any(request_id({}, response.data, self._assumptions) for response in responses):
            return Finding("request id", "ok", "in the body")
        return Finding("request id", "unknown", "not found in any response")

    def _rate_limits(self) -> Finding:
        requests = self._requests
        names = sorted(
            {name for response in requests.responses for name in response.headers if _RATE_LIMIT.search(name)}
        )
        if names:
            return Finding(
                "rate limit", "ok", f"reported in {requests.redact_and_truncate(', '.join(names))}", {"headers": names}
            )
        if requests.rate_limited:
            words = f"{requests.rate_limited} requests were rejected with 429; no header reports the limit"
            return Finding("rate limit", "warning", words)
        return Finding("rate limit", "unknown", "no header reports a limit")

    async def _read_pages(self) -> Finding:
        """Read two pages as the client does, with the learned assumptions."""
        client = self._client.with_options(assumptions=self.learned.assumptions)
        known_ids: set[str] = set()
        pages = 0
        limit = 1 if "limit_param" in self.learned.values else None
        try:
            async with aclosing(client.signings.list(limit=limit, read_ahead=False).pages()) as all_pages:
                async for page in all_pages:
                    pages += 1
                    if known_ids & {signing.id for signing in page.items}:
                        return Finding("client", "failed", f"page {pages} of a list repeats earlier signings")
                    known_ids |= {signing.id for signing in page.items}
                    if pages == 2:
                        break
        except SigningError as error:
            return Finding("client", "failed", f"a list cannot be read: {error}")
        words = f"{'2 pages' if pages == 2 else '1 page'} with {len(known_ids)} signings read with these assumptions"
        return Finding("client", "ok", words, {"pages": pages})
