"""Find out how a tenant answers where the specification says "not shown": by reading only, and by few requests.

Nothing but GET requests is made, one of them for a record that does not exist and one without a token. A wrong token is
sent only where that is asked for: a service may count it as an attempt to break in.
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

from ..client import SigningClient
from ..errors import NotFound, SigningError, TransportError
from ..transport.call import Anonymous, Bearer
from ..transport.error_response import error_from, record, request_id
from .findings import NAME, Finding, Learned
from .list_probe import NO_SUCH, ListProbe
from .probe_requests import ProbeRequests, ProbeResponse

__all__ = ["Probe"]

SOON_DAYS = 21
SKEW = 10.0

_IDENTITY = re.compile(r"request.?id|correlation|trace.?id|^x-amzn-trace", re.IGNORECASE)
_RATE = re.compile(r"rate.?limit|quota", re.IGNORECASE)


class Probe:
    """One look at a tenant, through a client's settings."""

    def __init__(self, client: SigningClient, *, wrong_token: bool = False) -> None:
        self._client = client
        self._requests = ProbeRequests(client)
        self._get = self._requests.get
        self._wrong_token = wrong_token
        self._assumptions = self._requests.options.assumptions
        self.learned: Learned = Learned(self._assumptions)

    async def findings(self) -> AsyncGenerator[Finding, None]:
        """Look, and tell of each thing; where the token is not accepted the rest cannot be looked at."""
        yield await self._certificate()
        me = await self._get("/me")
        yield self._clock(me)
        yield self._token(me)
        if not me.ok:
            return
        yield await self._without_token()
        if self._wrong_token:
            yield await self._with_wrong_token()
        listed = True
        async with aclosing(ListProbe(self._requests, self.learned).findings()) as findings:
            async for finding in findings:
                listed = listed and (finding.check, finding.state) != ("list", "failed")
                yield finding
        yield await self._unknown_record()
        yield self._request_ids()
        yield self._rate_limits()
        if listed:
            yield await self._try_out()

    # The connection and the token

    async def _certificate(self) -> Finding:
        origin = self._requests.shared.origin
        parts = urlsplit(origin)
        if parts.scheme == "http":
            return Finding("https", "ok", "plain HTTP, to this machine itself")
        try:
            async with asyncio.timeout(self._requests.options.timeouts.connect):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or 443, ssl=True)
        except (OSError, TimeoutError) as error:
            said = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or type(error).__name__
            raise TransportError(f"no secure connection to {origin}: {said}") from None
        certificate = writer.get_extra_info("peercert")
        version = writer.get_extra_info("ssl_object").version()
        writer.transport.abort()
        days = int((ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) // 86_400)
        words = f"{version}; the certificate is valid for {days} more days"
        return Finding("https", "warning" if days < SOON_DAYS else "ok", words, {"days_left": days})

    def _clock(self, answer: ProbeResponse) -> Finding:
        try:
            date = parsedate_to_datetime(answer.headers.get("Date", ""))
        except ValueError:
            return Finding("clock", "unknown", "the answers carry no date")
        # The header counts whole seconds.
        skew = date.timestamp() + 0.5 - (answer.began + answer.ended) / 2
        uncertain = 0.5 + (answer.ended - answer.began) / 2
        facts = {"skew_seconds": round(skew, 1)}
        if abs(skew) <= SKEW + uncertain:
            words = f"this machine and the service agree within {abs(skew) + uncertain:.1f} s"
            return Finding("clock", "ok", words, facts)
        words = f"this machine's clock is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} the service's"
        return Finding("clock", "failed", f"{words}: tokens and signed webhooks may seem expired", facts)

    def _token(self, me: ProbeResponse) -> Finding:
        if me.ok:
            user = record(me.data, self._assumptions)
            named = [str(user[name]) for name in ("name", "email") if isinstance(user, dict) and user.get(name)]
            return Finding("token", "ok", f"works: {self._requests.shown(', '.join(named)) or 'GET /me is answered'}")
        if 400 <= me.status <= 499 and me.status not in (404, 429):
            self._learn_rejection(me.status, "seen: a token that the service does not accept")
        return Finding("token", "failed", f"is not accepted: HTTP {me.status} on GET /me", {"status": me.status})

    async def _without_token(self) -> Finding:
        status = (await self._get("/me", auth=Anonymous(self._requests.secrets))).status
        words = f"HTTP {status} without a token"
        if 200 <= status < 300:
            return Finding("no token", "warning", f"{words}: anybody may ask who is logged in", {"status": status})
        if not self._wrong_token and status != 401:
            words += "; an expired one may get the same or another (--wrong-token finds out)"
        return Finding("no token", "ok", words, {"status": status})

    async def _with_wrong_token(self) -> Finding:
        status = (await self._get("/me", auth=Bearer("not-a-token-of-this-service"))).status
        if not 400 <= status <= 499:
            words = f"HTTP {status} with a wrong token: that says nothing of expired ones"
            return Finding("wrong token", "warning", words, {"status": status})
        self._learn_rejection(status, "seen: a token that is none")
        return Finding("wrong token", "ok", f"HTTP {status} with a wrong token", {"status": status})

    def _learn_rejection(self, status: int, evidence: str) -> None:
        statuses = sorted({*self._assumptions.expired_token_statuses, status})
        self.learned.add("expired_token_statuses", statuses, evidence)

    # Errors and headers

    async def _unknown_record(self) -> Finding:
        answer = await self._get(f"/signings/{NO_SUCH}")
        if answer.ok or answer.status >= 500:
            words = f"HTTP {answer.status} for a signing that does not exist"
            return Finding("errors", "warning", words, {"status": answer.status})
        error = error_from(
            answer.status,
            answer.headers,
            answer.body,
            reason="",
            operation="signings.get",
            not_found=NotFound,
            retry_after=None,
            secrets=self._requests.secrets(),
            assumptions=self._assumptions,
        )
        data, shown = answer.data, self._requests.shown
        shape = f"an object with {', '.join(sorted(map(str, data)))}" if isinstance(data, dict) else "no object"
        kind = answer.headers.get("Content-Type", "no type").partition(";")[0]
        words = f"HTTP {answer.status}, {shown(kind)}, {shown(shape)}; code {error.code or 'not told'}"
        return Finding("errors", "ok", words, {"status": answer.status, "code": error.code})

    def _request_ids(self) -> Finding:
        responses = self._requests.responses
        for answer in responses:
            name = next((name for name in self._assumptions.request_id_headers if answer.headers.get(name)), None)
            if name is None:
                name = next((name for name in answer.headers if _IDENTITY.search(name) and NAME.fullmatch(name)), None)
            if name is not None:
                self.learned.add_first("request_id_headers", name, "seen")
                return Finding("request id", "ok", f"in the header {name}", {"header": name})
        if any(request_id({}, answer.data, self._assumptions) for answer in responses):
            return Finding("request id", "ok", "in the body")
        return Finding("request id", "unknown", "no answer carries one that is known")

    def _rate_limits(self) -> Finding:
        requests = self._requests
        names = sorted({name for answer in requests.responses for name in answer.headers if _RATE.search(name)})
        if names:
            return Finding("rate limit", "ok", f"told in {requests.shown(', '.join(names))}", {"headers": names})
        if requests.rate_limited:
            words = f"{requests.rate_limited} requests were too many; no header tells how many may be"
            return Finding("rate limit", "warning", words)
        return Finding("rate limit", "unknown", "no header tells of one")

    async def _try_out(self) -> Finding:
        """Read two pages as the client does, by what was learned."""
        client = self._client.with_options(assumptions=self.learned.assumptions)
        seen: set[str] = set()
        pages = 0
        limit = 1 if "limit_param" in self.learned.values else None
        try:
            async with aclosing(client.signings.list(limit=limit, read_ahead=False).pages()) as listed:
                async for page in listed:
                    pages += 1
                    if seen & {signing.id for signing in page.items}:
                        return Finding("client", "failed", f"page {pages} of a list repeats an earlier one")
                    seen |= {signing.id for signing in page.items}
                    if pages == 2:
                        break
        except SigningError as error:
            return Finding("client", "failed", f"a list cannot be read: {error}")
        words = f"{'2 pages' if pages == 2 else '1 page'} with {len(seen)} signings were read with these assumptions"
        return Finding("client", "ok", words, {"pages": pages})
