"""Signings: create drafts, read and list them, send them, wait for them to be completed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import InvalidRequest, SigningCancelled, SigningError, WaitTimeout
from .models import Language, Signing, SigningOrder, SigningState
from .pagination import Pager
from .reconcile import Read, Sent, Tracker
from .transport import wire
from .transport.call import Operation, Transport, log
from .transport.decode import Unreadable, decode_record
from .transport.error_response import one_line, record
from .transport.retry import Repeat

if TYPE_CHECKING:
    from .webhooks import Wakeups

__all__ = ["Signings", "check_signing", "reading", "signing_path"]

T = TypeVar("T")

_PATH = "/api/1.0/signings"
_LONGEST_MESSAGE = 400
_SLOWER = 1.5


def signing_path(signing_id: str | Signing) -> str:
    """The path of one signing."""
    return f"{_PATH}/{wire.segment('signing_id', signing_id)}"


def reading(path: str, decode: Callable[[Any, wire.Response], T]) -> Operation[T]:
    """Reads the signing of this path, for whatever of it is wanted."""
    return Operation("signings.get", "GET", path, Repeat.READ, decode=decode)


class Signings:
    """``client.signings``."""

    def __init__(self, transport: Transport, tracker: Tracker) -> None:
        self._transport = transport
        self._tracker = tracker

    async def create(
        self,
        *,
        name: str,
        language: Language | str,
        signing_order: SigningOrder | str | None = None,
        message: str | None = None,
    ) -> Signing:
        """Create a draft. After a lost answer it is created again: a spare draft may remain, which notifies nobody. ::

        signing = await client.signings.create(name="Lease 2031", language="EN", signing_order="parallel")
        """
        fields = {"name": name, "language": language, "signing_order": signing_order, "message": message}
        check_signing(fields)
        sent = {name: value for name, value in fields.items() if value is not None}

        def body() -> wire.Body:
            return wire.bytes_body(json.dumps(sent).encode(), "application/json")

        operation = Operation("signings.create", "POST", _PATH, Repeat.CREATE, decode=self._decode, body=body)
        signing = await self._transport.call(operation)
        self._tracker.note_created(signing_path(signing))
        return signing

    async def get(self, signing_id: str | Signing) -> Signing:
        """One signing with its documents."""
        path = signing_path(signing_id)
        note = self._tracker.observe(path)
        signing = await self._transport.call(reading(path, self._decode))
        note(signing.documents)
        return signing

    def list(
        self,
        cursor: str | None = None,
        limit: int | None = None,
        *,
        prefetch: bool = True,
        read_ahead: bool | None = None,
    ) -> Pager[Signing]:
        """List the signings, from ``cursor`` on; see `Pager`. ``limit`` is the size of a page."""
        return Pager(
            self._transport,
            "signings.list",
            _PATH,
            Signing,
            cursor=cursor,
            limit=limit,
            prefetch=prefetch,
            read_ahead=read_ahead,
        )

    async def send(self, signing_id: str | Signing) -> None:
        """Send a draft to its recipients, once: before it is ever repeated, the signing is read.

        Raises `CannotBeSent` for one without documents or recipients, or that was sent before.
        """
        await self._send(signing_id, was_begun=False)

    async def send_again(self, signing_id: str | Signing) -> None:
        """Send a draft whose sending an earlier process has begun: it is read first, as after a lost response."""
        await self._send(signing_id, was_begun=True)

    async def _send(self, signing_id: str | Signing, *, was_begun: bool) -> None:
        path = signing_path(signing_id)

        def get(read: Read) -> Awaitable[Signing]:
            return read(reading(path, self._decode))

        await self._transport.call(
            Operation(
                "signings.send",
                "POST",
                f"{path}/send",
                Repeat.RECONCILED,
                effect=Sent(self._tracker.signing(path), get),
                body=wire.bytes_body,
                was_begun=was_begun,
            )
        )

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

        It is read again and again, every ``poll`` seconds at first and every ``max_poll`` in the end. An outage on the
        way is waited out. Raises `SigningCancelled`, and `WaitTimeout` after ``timeout`` seconds. With the ``wakeups``
        of a webhook receiver it is also read when an event comes: completion is then seen at once, and an event that is
        missed costs no more than the next poll. ::

            wakeups = Wakeups()
            receiver = Receiver(WebhookVerifier(secret), wakeups.publish)
            signing = await client.signings.wait_until_completed(signing_id, wakeups=wakeups)
        """
        _check_waiting(timeout, poll, max_poll)
        signing: Signing | None = None
        try:
            async with asyncio.timeout(timeout) as bound:
                with _alarm(wakeups, _id(signing_id)) as woken:
                    while True:
                        signing = await self._look(signing_id, signing)
                        if signing is not None and signing.state is SigningState.COMPLETED:
                            return signing
                        if signing is not None and signing.state is SigningState.CANCELLED:
                            break
                        if not await woken(poll * random.uniform(0.75, 1.0)):
                            poll = min(poll * _SLOWER, max_poll)
        except TimeoutError:
            if not bound.expired():
                raise
            raise WaitTimeout(
                f"the signing {_shown(signing_id)} was not completed within {timeout:g} s", signing=signing
            ) from None
        raise SigningCancelled(f"the signing {_shown(signing_id)} was cancelled", signing=signing)

    async def _look(self, signing_id: str | Signing, last: Signing | None) -> Signing | None:
        try:
            return await self.get(signing_id)
        except SigningError as error:
            if not error.transient:
                raise
            log.warning("waiting for signing %s goes on: %s", _shown(signing_id), error)
            return last

    def _decode(self, data: Any, response: wire.Response) -> Signing:
        signing = decode_record(record(data, self._transport.options.assumptions), Signing)
        with suppress(InvalidRequest):
            signing_path(signing)
            return signing
        raise Unreadable(f"expected an id, got {signing.id!r}", "id")


@contextmanager
def _alarm(wakeups: Wakeups | None, signing_id: str) -> Iterator[Callable[[float], Awaitable[object]]]:
    """Waits for some seconds, or until a wake-up."""
    if wakeups is None:
        yield asyncio.sleep
        return
    with wakeups.subscribe(signing_id) as subscription:
        yield subscription.wait


def _id(signing_id: str | Signing) -> str:
    return signing_id.id if isinstance(signing_id, Signing) else signing_id


def _shown(signing_id: str | Signing) -> str:
    return one_line(_id(signing_id))


def check_signing(fields: Mapping[str, Any]) -> None:
    """Refuse what the specification says is refused; all of it at once."""
    problems = []
    name, message = fields["name"], fields["message"]
    if not isinstance(name, str) or not name.strip():
        problems.append(f"name: must be a text that is not empty, not {name!r}")
    for field, allowed in (("language", Language), ("signing_order", SigningOrder)):
        listed = [member.value for member in allowed]
        if fields[field] not in listed and not (field == "signing_order" and fields[field] is None):
            problems.append(f"{field}: must be {' or '.join(listed)}, not {fields[field]!r}")
    if message is not None and not isinstance(message, str):
        problems.append(f"message: must be a text, not {message!r}")
    elif message is not None and len(message) > _LONGEST_MESSAGE:
        problems.append(f"message: at most {_LONGEST_MESSAGE} characters, this has {len(message)}: {message[:40]!r}...")
    if problems:
        raise InvalidRequest("; ".join(problems), problems=problems)


def _check_waiting(timeout: float | None, poll: float, max_poll: float) -> None:
    for name, value in (("timeout", timeout), ("poll", poll), ("max_poll", max_poll)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise InvalidRequest(f"{name}: must be seconds above 0, not {value!r}")
