"""Create drafts, read, list and send signings, wait until they are completed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from . import _checks
from .assumptions import Assumptions
from .errors import InvalidRequest, SigningCancelled, SigningError, WaitTimeout
from .models import Language, Signing, SigningOrder, SigningState
from .pagination import Pager
from .reconcile import Ledger, Read, Sent
from .transport import wire
from .transport.call import Transport
from .transport.decode import Unreadable, decode_record, parse, record
from .transport.operation import Operation, log
from .transport.problems import one_line
from .transport.response import Response
from .transport.retry import Safety
from .transport.urls import signing_path

if TYPE_CHECKING:
    from .webhooks import Wakeups

__all__ = ["Signings", "check_signing", "id_of", "reading", "sending", "signing_path"]

T = TypeVar("T")

_PATH = "/api/1.0/signings"
_MAX_MESSAGE_LENGTH = 400
_POLL_GROWTH = 1.5


def reading(path: str, decode: Callable[[Response], T]) -> Operation[T]:
    """Return the operation that reads a signing and decodes what the caller needs from it."""
    return Operation("signings.get", "GET", path, Safety.READ, decode=decode)


def sending(
    signing_id: str | Signing, ledger: Ledger, assumptions: Assumptions, *, is_own: bool = False
) -> Operation[Signing | None]:
    """Return the operation that sends a draft; see `Sent` for ``is_own``. Its result is the signing, if it was read."""
    path = signing_path(signing_id)

    def get(read: Read) -> Awaitable[Signing]:
        return read(reading(path, _decoder(assumptions)))

    return Operation(
        "signings.send",
        "POST",
        f"{path}/send",
        Safety.RECONCILED,
        effect=Sent(ledger.signing(path), get, is_own=is_own),
        body=wire.bytes_body,
    )


def _decoder(assumptions: Assumptions) -> Callable[[Response], Signing]:
    def decode(response: Response) -> Signing:
        signing = decode_record(record(parse(response.bytes), assumptions), Signing)
        with suppress(InvalidRequest):
            signing_path(signing)
            return signing
        raise Unreadable(f"expected an id, got {signing.id!r}", "id")

    return decode


class Signings:
    """``client.signings``."""

    def __init__(self, transport: Transport, ledger: Ledger) -> None:
        self._transport = transport
        self._ledger = ledger
        self._decode = _decoder(transport.options.assumptions)

    async def create(
        self,
        *,
        name: str,
        language: Language | str,
        signing_order: SigningOrder | str | None = None,
        message: str | None = None,
    ) -> Signing:
        """Create a draft. After a lost response it is created again, and a spare draft may remain unsent. ::

        signing = await client.signings.create(name="Lease 2031", language="EN", signing_order="parallel")
        """
        fields = {"name": name, "language": language, "signing_order": signing_order, "message": message}
        check_signing(fields)
        sent = {name: value for name, value in fields.items() if value is not None}

        def body() -> wire.Body:
            return wire.bytes_body(json.dumps(sent).encode(), "application/json")

        operation: Operation[Signing] = Operation(
            "signings.create", "POST", _PATH, Safety.CREATE, decode=self._decode, body=body
        )
        signing = await self._transport.call(operation)
        self._ledger.signing(signing_path(signing), documents=set())
        return signing

    async def get(self, signing_id: str | Signing) -> Signing:
        """Return a signing with its documents."""
        path = signing_path(signing_id)
        note = self._ledger.observe(path)
        signing = await self._transport.call(reading(path, self._decode))
        note(signing.documents)
        return signing

    def list(self, cursor: str | None = None, limit: int | None = None, *, prefetch: bool = True) -> Pager[Signing]:
        """List the signings, from ``cursor`` on; see `Pager`. ``limit`` is the size of a page."""
        return Pager(self._transport, "signings.list", _PATH, Signing, cursor=cursor, limit=limit, prefetch=prefetch)

    async def send(self, signing_id: str | Signing) -> None:
        """Send a draft to its recipients, once: before the request is repeated, the signing is read.

        Raises `CannotBeSent` if the signing has no documents or no recipients, or was sent before.
        """
        await self._transport.call(sending(signing_id, self._ledger, self._transport.options.assumptions))

    async def wait_until_completed(
        self,
        signing_id: str | Signing,
        timeout: float | None = None,
        poll: float = 2.0,
        max_poll: float = 30.0,
        *,
        wakeups: Wakeups | None = None,
    ) -> Signing:
        """Return the signing once everyone has signed.

        The signing is polled at an interval that grows from ``poll`` to ``max_poll`` seconds. Polling continues after
        transient errors. Raises `SigningCancelled`, and `WaitTimeout` after ``timeout`` seconds. With the ``wakeups``
        of a webhook receiver the signing is also read when an event arrives: completion is seen at once, and a missed
        event costs no more than the next poll. ::

            wakeups = Wakeups()
            receiver = Receiver(WebhookVerifier(secret), wakeups.publish)
            signing = await client.signings.wait_until_completed(signing_id, wakeups=wakeups)
        """
        for argument, value in (("timeout", timeout), ("poll", poll), ("max_poll", max_poll)):
            if value is not None or argument != "timeout":
                _checks.number(argument, value, above=0, error=InvalidRequest)
        signing: Signing | None = None
        try:
            async with asyncio.timeout(timeout) as bound:
                with _sleeper(wakeups, id_of(signing_id)) as sleep:
                    while True:
                        signing = await self._poll(signing_id, signing)
                        if signing is not None and signing.state is SigningState.COMPLETED:
                            return signing
                        if signing is not None and signing.state is SigningState.CANCELLED:
                            break
                        if not await sleep(poll * random.uniform(0.75, 1.0)):
                            poll = min(poll * _POLL_GROWTH, max_poll)
        except TimeoutError:
            if not bound.expired():
                raise
            raise WaitTimeout(
                f"signing {_id_on_one_line(signing_id)} was not completed within {timeout:g} s", signing=signing
            ) from None
        raise SigningCancelled(f"signing {_id_on_one_line(signing_id)} was cancelled", signing=signing)

    async def _poll(self, signing_id: str | Signing, last: Signing | None) -> Signing | None:
        try:
            return await self.get(signing_id)
        except SigningError as error:
            if not error.transient:
                raise
            log.warning("polling of signing %s continues after: %s", _id_on_one_line(signing_id), error)
            return last


@contextmanager
def _sleeper(wakeups: Wakeups | None, signing_id: str) -> Iterator[Callable[[float], Awaitable[object]]]:
    """Return a function that waits for some seconds or until the signing has an event."""
    if wakeups is None:
        yield asyncio.sleep
        return
    with wakeups.subscribe(signing_id) as subscription:
        yield subscription.wait


def id_of(signing: str | Signing) -> str:
    """Return the id of a signing that is given by its id or its record."""
    return signing.id if isinstance(signing, Signing) else signing


def _id_on_one_line(signing_id: str | Signing) -> str:
    return one_line(id_of(signing_id))


def check_signing(fields: Mapping[str, Any]) -> None:
    """Raise one `InvalidRequest` with all problems of a new signing."""
    problems = []
    name, message = fields["name"], fields["message"]
    if not _checks.is_text(name) or not name.strip():
        problems.append(f"name: {_checks.text_rule(name)}, got {name!r}")
    for field, allowed in (("language", Language), ("signing_order", SigningOrder)):
        listed = [member.value for member in allowed]
        if fields[field] not in listed and not (field == "signing_order" and fields[field] is None):
            problems.append(f"{field}: must be {' or '.join(listed)}, got {fields[field]!r}")
    if message is not None and not isinstance(message, str):
        problems.append(f"message: must be a string, got {message!r}")
    elif message is not None and len(message) > _MAX_MESSAGE_LENGTH:
        shown = f"{len(message)}: {message[:40]!r}..."
        problems.append(f"message: must be at most {_MAX_MESSAGE_LENGTH} characters, got {shown}")
    if problems:
        raise InvalidRequest("; ".join(problems), problems=problems)
