"""The doctor's GET requests. Every response is kept, whatever its status."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from ..assumptions import Assumptions
from ..client import SigningClient
from ..errors import APIError
from ..transport import wire
from ..transport.call import Auth, Operation, Options, Shared, Transport
from ..transport.decode import Unreadable, parse
from ..transport.lookup import look_up
from ..transport.retry import Repeat, RetryPolicy

__all__ = ["ProbeRequests", "ProbeResponse", "walk"]

_PREFIX = "/api/1.0"
_ATTEMPTS = 4


@attrs.frozen(slots=False)
class ProbeResponse:
    """A response, and when the request began and the response arrived."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    began: float
    ended: float
    transient: bool = False
    """Whether the error is transient, so the response says nothing about the probed convention."""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def rejects_token(self) -> bool:
        """Whether a response to ``GET /me`` rejects the token."""
        return self.status in (400, 401, 403)

    @property
    def data(self) -> Any:
        """The parsed JSON; None if it is not JSON."""
        try:
            return parse(self.body)
        except Unreadable:
            return None

    def items(self, assumptions: Assumptions) -> tuple[str, list[dict[str, Any]]] | None:
        """Return the path of a page's list ("" if it is the page itself) and its records; None if there is no list."""
        data = self.data if self.ok else None
        known = [(path, look_up(data, path)) for path in assumptions.item_paths]
        lists = [
            (path, [item for item in value if isinstance(item, dict)])
            for path, value in [("", data), *known, *walk(data)]
            if isinstance(value, list)
        ]
        return next((one for one in lists if one[1]), next(iter(lists), None))


class ProbeRequests:
    """Sends GET requests as a client does, without retries except after a 429."""

    def __init__(self, client: SigningClient) -> None:
        self.client: SigningClient = client
        transport = client._transport
        self.options: Options = attrs.evolve(
            transport.options,
            retry=RetryPolicy(max_attempts=_ATTEMPTS, max_retry_after=transport.options.timeouts.call),
        )
        self.shared: Shared = transport.shared
        self.responses: list[ProbeResponse] = []
        self.rate_limited: int = 0

    async def get(self, path: str, params: Mapping[str, str] = {}, *, auth: Auth | None = None) -> ProbeResponse:
        """Return the response, whatever its status; raise a `TransportError` if there is none.

        ``auth`` replaces the client's own.
        """
        began = time.time()
        headers: Mapping[str, str] = {}

        async def receive(response: wire.Response) -> ProbeResponse:
            ended = time.time()
            body = await response.read(self.options.assumptions.max_answer_bytes)
            return ProbeResponse(response.status, response.headers, body, began, ended)

        def keep_headers(error: APIError, response_headers: Mapping[str, str]) -> APIError:
            """Keep the headers of an error response, and count the 429s; the error stays as it is."""
            nonlocal headers
            headers = response_headers
            self.rate_limited += error.status == 429
            return error

        shared = self.shared
        if auth is not None:
            shared = Shared(shared.origin, auth, shared.sessions, shared.rate_limiter)
        operation = Operation(
            f"GET {path}",
            "GET",
            _PREFIX + path,
            Repeat.PROBE,
            receive=receive,
            convert_error=keep_headers,
            params=params,
        )
        try:
            response = await Transport(shared, self.options).call(operation)
        except APIError as error:
            response = ProbeResponse(error.status, headers, error.body, began, time.time(), error.transient)
        self.responses.append(response)
        return response

    def redact_and_truncate(self, text: str) -> str:
        """Return a text from the service without secrets, and at most 200 characters of it."""
        return self.client._transport.redacted(text)[:200]

    def secrets(self) -> Iterable[str]:
        return self.shared.auth.secrets()


def walk(data: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the members of nested objects, but not of lists, by dotted paths; outer ones first."""
    if not isinstance(data, dict) or depth > 2:
        return
    names = [name for name in data if isinstance(name, str) and "." not in name]
    for name in names:
        yield path + name, data[name]
    for name in names:
        yield from walk(data[name], f"{path}{name}.", depth + 1)
