"""Limits to the byte, words to the letter, and the quick way: what only a changed program would get wrong."""

from __future__ import annotations

import asyncio
import base64
import json
import queue
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from signing_async.errors import ConfigurationError, InvalidSignature, MalformedEvent
from signing_async.webhooks import (
    GITHUB,
    STANDARD_WEBHOOKS,
    STRIPE,
    Claim,
    Event,
    MemorySeenEvents,
    Receiver,
    Scheme,
    SQLiteSeenEvents,
    Wakeups,
    WebhookVerifier,
    decide,
    sign,
)
from signing_async.webhooks.event import MAX_DEPTH, MAX_DIGITS, parse_event
from signing_async.webhooks.receiver import BROKEN, TOO_LARGE, TOO_SLOW, admit
from signing_async.webhooks.scheme import decode_base64
from signing_async.webhooks.verifier import MAX_HEADER, as_bytes
from tests.webhooks.deliveries import SECRET, event_body, hex_of, signed

NOW = datetime(2026, 1, 2, tzinfo=UTC)
VERIFIER = WebhookVerifier(SECRET)


# The verifier


@pytest.mark.parametrize("scheme", [Scheme(), GITHUB, Scheme(labels=("sha256=", ""), encodings=("hex",))])
def test_nearly_every_delivery_takes_the_quick_way(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right signature in hex, with or without its label, is not searched for in the header."""

    def slow(self: WebhookVerifier, *given: object) -> None:
        raise AssertionError("the slow way")

    monkeypatch.setattr(WebhookVerifier, "_verify", slow)
    verifier = WebhookVerifier(SECRET, scheme)
    for label in scheme.labels:
        verifier.verify(b"{}", label + hex_of(b"{}"))
        with pytest.raises(AssertionError, match="slow"):
            verifier.verify(b"{}", label + hex_of(b"{ }"))
    if "" not in scheme.labels:
        with pytest.raises(AssertionError, match="slow"):
            verifier.verify(b"{}", hex_of(b"{}"))


def _refusal(header: Any, *, scheme: Scheme | None = None, headers: Any = None, at: float = 1000.0) -> InvalidSignature:
    scheme = replace(scheme or Scheme(), clock=lambda: at)
    with pytest.raises(InvalidSignature) as caught:
        WebhookVerifier(SECRET.encode(), scheme).verify(b"{}", header, headers=headers)
    return caught.value


WEBHOOK = {"webhook-id": "m1", "webhook-timestamp": "1000"}
RIGHT = sign(SECRET.encode(), b"{}", STANDARD_WEBHOOKS, id="m1", timestamp=1000)["webhook-signature"]
STRIPED = sign(SECRET.encode(), b"{}", STRIPE, timestamp=1000)["Stripe-Signature"]


@pytest.mark.parametrize(
    ("given", "reason", "words"),
    [
        ((5,), "malformed", "X-Signature is no text but int"),
        (("é",), "malformed", "X-Signature has characters outside ASCII"),
        ((" ",), "missing", "X-Signature is missing or empty"),
        (("a" * (MAX_HEADER + 1),), "malformed", "X-Signature has 16385 characters: no signature is as long"),
        (
            ("a" * MAX_HEADER,),
            "malformed",
            "X-Signature holds no SHA-256 signature in hex or base64 with one of the labels"
            " ('', 'sha256=', 'v1=', 'v1,')",
        ),
        (("0" * 64,), "mismatch", "no secret matches the signature"),
    ],
)
def test_the_words_of_a_refusal(given: tuple[Any], reason: str, words: str) -> None:
    """Each kind of fault has its reason for code, and its words for people."""
    error = _refusal(*given)
    assert (error.reason, str(error)) == (reason, words)


@pytest.mark.parametrize(
    ("more", "at", "reason", "words"),
    [
        ({}, 1301.0, "too_old", "signed 301 s ago, which is too long: a replay, or a slow clock"),
        ({}, 699.0, "too_new", "signed 301 s in the future: the clocks disagree"),
        (
            {"webhook-id": None},
            1000.0,
            "header",
            "what is signed includes webhook-id, which is missing (pass headers=)",
        ),
        ({"webhook-id": "a.b"}, 1000.0, "header", "the id in webhook-id has characters that no id may have"),
        ({"webhook-id": "a b"}, 1000.0, "header", "the id in webhook-id has characters that no id may have"),
        (
            {"webhook-timestamp": "1e3"},
            1000.0,
            "header",
            "the timestamp in webhook-timestamp is not a number of seconds",
        ),
    ],
)
def test_the_words_about_what_else_is_signed(more: dict[str, Any], at: float, reason: str, words: str) -> None:
    """Ids and timestamps are named by their headers."""
    headers = {name: value for name, value in (WEBHOOK | more).items() if value is not None}
    error = _refusal(RIGHT, scheme=STANDARD_WEBHOOKS, headers=headers, at=at)
    assert (error.reason, str(error)) == (reason, words)


def test_a_header_that_is_there_twice() -> None:
    """Which of two timestamps was signed cannot be told."""
    pairs = [*WEBHOOK.items(), ("Webhook-Timestamp", "1000")]
    error = _refusal(RIGHT, scheme=STANDARD_WEBHOOKS, headers=pairs)
    assert str(error) == "what is signed includes webhook-timestamp, which is there 2 times"


def test_values_of_headers_may_be_of_any_kind() -> None:
    """Frameworks give text, bytes, or objects that show themselves as text."""
    clock = replace(STANDARD_WEBHOOKS, clock=lambda: 1000.0)
    verifier = WebhookVerifier(SECRET.encode(), clock)
    for stamp in ("1000", b"1000", 1000):
        verifier.verify(b"{}", RIGHT, headers=[("webhook-id", "m1"), ("webhook-timestamp", stamp)])  # type: ignore[list-item]  # as some frameworks do


def test_tabs_separate_too() -> None:
    """Where the timestamp stands in the signature's header, white space of any kind may follow it."""
    verifier = WebhookVerifier(SECRET.encode(), replace(STRIPE, clock=lambda: 1000.0))
    for separator in (",", " ", "\t", ",\t ", "\t,"):
        verifier.verify(b"{}", STRIPED.replace(",", separator))


def test_settings_of_the_verifier() -> None:
    """The least is allowed, and less is refused by name and value."""
    assert WebhookVerifier(SECRET, max_body=1).max_body == 1
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_body": 0}, "max_body must be at least 1 byte, not 0"),
        ({"scheme": 5}, "scheme must be a Scheme, not int"),
        ({"secrets": []}, "no webhook secret is given"),
        ({"secrets": 5}, "a webhook secret must be str or bytes, or several, not int"),
        ({"secrets": [5]}, "a webhook secret must be str or bytes, not int"),
        ({"secrets": " \t\r\n"}, "the webhook secret is empty"),
    ]
    for settings, words in wrong:
        with pytest.raises(ConfigurationError) as caught:
            WebhookVerifier(**({"secrets": SECRET} | settings))
        assert str(caught.value) == words
    WebhookVerifier(b"XX")


def test_the_words_about_a_body_that_is_no_bytes() -> None:
    """They say what to do."""
    with pytest.raises(TypeError) as caught:
        as_bytes({"a": 1})
    assert str(caught.value) == (
        "body must be the bytes as they were received, not dict: the signature covers those bytes, and decoding or"
        " parsing and writing them again gives others"
    )


# The scheme


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"header": ""}, "Scheme.header is empty"),
        (
            {"signed": "{id}.{body}"},
            "Scheme.signed has {id}, and Scheme.id_header does not name its header",
        ),
        (
            {"signed": "{timestamp}.{body}"},
            "Scheme.signed has {timestamp}: set either Scheme.timestamp_header or Scheme.timestamp_label",
        ),
    ],
)
def test_the_words_about_a_scheme(settings: dict[str, Any], words: str) -> None:
    """They name the setting."""
    with pytest.raises(ConfigurationError) as caught:
        Scheme(**settings)
    assert str(caught.value) == words


def test_a_tolerance_of_less_than_a_second() -> None:
    """Any time above 0 may be tolerated."""
    assert Scheme(tolerance=0.5).tolerance == 0.5


def test_a_key_in_base64() -> None:
    """Standard or URL-safe, with any padding; nothing else is let through."""
    for key in (b"\xfb\xff\xfe!", b"\x00\x00\x17", b"abcd", b"abcde"):
        text = base64.b64encode(key).decode()
        for spelled in (text, text.rstrip("="), text + "==", text.replace("+", "-").replace("/", "_")):
            assert decode_base64(spelled) == key
    assert decode_base64("AAAX") == b"\x00\x00\x17"
    for bad in ("==AAAX", "AA AX", "AA\nAX", "AAAX!", "A", "ÄAAX"):
        with pytest.raises(ValueError):
            decode_base64(bad)


def test_signing_without_an_id() -> None:
    """What is not given is empty, and not made up."""
    headers = sign(b"k", b"{}", STANDARD_WEBHOOKS, timestamp=5)
    assert (headers["webhook-id"], headers["webhook-timestamp"]) == ("", "5")


# The event


def _parse(body: bytes, **limits: int) -> Event:
    return parse_event(body, NOW, **limits)


def test_sizes_of_an_event_are_exact() -> None:
    """What is just small enough is read, and one more of anything is not."""
    body = event_body("e")
    assert _parse(body, max_body=len(body)).id == "e"
    with pytest.raises(MalformedEvent, match=f"the body has {len(body)} bytes; at most {len(body) - 1} are read"):
        _parse(body, max_body=len(body) - 1)
    number = b"1." + b"0" * (MAX_DIGITS - 2)
    assert _parse(b'{"id": "e", "x": %s}' % number).id == "e"
    with pytest.raises(MalformedEvent) as caught:
        _parse(b'{"id": "e", "x": %s0}' % number)
    assert str(caught.value) == f"the body has a number that cannot be held: {number[:40].decode()}"
    with pytest.raises(MalformedEvent) as caught:
        _parse(b'{"%s": 1, "%s": 2}' % (b"n" * 100, b"n" * 100))
    twice = "n" * 80
    assert str(caught.value) == f"the body has the member '{twice}' twice: which one counts cannot be told"


def test_depth_is_counted_through_siblings() -> None:
    """What was closed counts no more, and what is still open does."""
    deep = b"[" * (MAX_DEPTH - 2) + b"[],{},[]," * 40
    assert _parse(b'{"id": "e", "x": ' + deep + b"1" + b"]" * (MAX_DEPTH - 2) + b"}").id == "e"
    with pytest.raises(MalformedEvent, match=f"deeper than {MAX_DEPTH} levels"):
        _parse(b'{"id": "e", "x": ' + deep + b"[[1]]" + b"]" * (MAX_DEPTH - 2) + b"}")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{}", "the event has no id"),
        (b'{"id": " "}', "the event's id is empty"),
        (b"[]", "the body is JSON, and no object but an array"),
    ],
)
def test_the_words_about_an_event(body: bytes, words: str) -> None:
    """They are for whoever sends it."""
    with pytest.raises(MalformedEvent) as caught:
        _parse(body)
    assert str(caught.value) == words


# The receiver


class Guard(MemorySeenEvents):
    """A guard whose steps fail on demand."""

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.failing = failing

    def claim(self, event_id: str) -> Claim:
        self._fail("claim")
        return super().claim(event_id)

    def confirm(self, event_id: str) -> None:
        self._fail("confirm")
        super().confirm(event_id)

    def release(self, event_id: str) -> None:
        self._fail("release")
        super().release(event_id)

    def _fail(self, step: str) -> None:
        if step in self.failing:
            raise OSError("disk full")


def _fails(event: Event) -> None:
    raise RuntimeError("no")


def _full(event: Event) -> None:
    raise queue.Full


@pytest.mark.parametrize(
    ("failing", "hand_off", "status", "message", "logged"),
    [
        ((), lambda event: None, 202, {"message": "accepted"}, []),
        (("claim",), lambda event: None, 503, {"error": "cannot be taken now"}, ["event e1 cannot be claimed"]),
        ((), _full, 503, {"error": "the queue is full"}, ["event e1 finds the queue full"]),
        ((), _fails, 503, {"error": "could not be handed over"}, ["event e1 could not be handed over"]),
        (
            ("confirm",),
            lambda event: None,
            503,
            {"error": "cannot be recorded now"},
            ["event e1 was handed over, and that cannot be recorded"],
        ),
        (
            ("release",),
            _fails,
            503,
            {"error": "could not be handed over"},
            ["event e1 could not be handed over", "event e1 stays claimed until its lease is over"],
        ),
    ],
    ids=["accepted", "claim", "full", "fails", "confirm", "release"],
)
def test_what_a_receiver_says(
    failing: tuple[str, ...],
    hand_off: Any,
    status: int,
    message: dict[str, str],
    logged: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To the sender in the answer's body, to its operator in the log, with the event's id."""
    body = event_body("e1")
    receiver = Receiver(VERIFIER, hand_off, seen=Guard(*failing))
    decision = receiver.receive_blocking(signed(body), body)
    assert (decision.status, json.loads(decision.body)) == (status, message)
    assert [record.getMessage() for record in caplog.records] == logged


@pytest.mark.parametrize("hand_off", [_full, _fails])
def test_a_claim_is_given_back_at_once(hand_off: Any) -> None:
    """The sender's next delivery of the event finds it free, and not for the end of a lease."""
    body, seen = event_body("e1"), MemorySeenEvents()
    Receiver(VERIFIER, hand_off, seen=seen).receive_blocking(signed(body), body)
    assert seen.claim("e1") is Claim.NEW
    assert json.loads(Receiver(VERIFIER, hand_off, seen=seen).receive_blocking(signed(body), body).body) == {
        "error": "being handed over"
    }


def test_a_claim_is_given_back_when_the_program_ends(caplog: pytest.LogCaptureFixture) -> None:
    """What is no error of the hand-off, such as Ctrl-C, gives the claim back too."""

    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    body, seen = event_body("e1"), MemorySeenEvents()
    with pytest.raises(KeyboardInterrupt):
        Receiver(VERIFIER, stop, seen=seen).receive_blocking(signed(body), body)
    assert seen.claim("e1") is Claim.NEW
    assert caplog.records == []


def test_what_is_refused_is_logged_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """A forged delivery by its reason, a genuine one without event by what is wrong with it."""
    assert decide(VERIFIER, {"X-Signature": "0" * 64}, b"{}").status == 401
    decision = decide(VERIFIER, signed(b"{}"), b"{}")
    assert (decision.status, decision.message) == (400, "the event has no id")
    assert [record.getMessage() for record in caplog.records] == [
        "a webhook delivery was refused (mismatch): no secret matches the signature",
        "a genuine webhook delivery holds no event: the event has no id",
    ]


def test_what_is_admitted_to_the_byte() -> None:
    """A body of just the size is, one byte more is not; an empty encoding is none."""
    body = event_body("e1")
    exact = WebhookVerifier(SECRET, max_body=len(body))
    assert (decide(exact, signed(body), body).status, decide(exact, signed(body), body).message) == (202, "accepted")
    assert decide(exact, signed(body + b" "), body + b" ") is TOO_LARGE
    assert admit("POST", {"Content-Length": "10", "Content-Encoding": ""}, 10) is None
    assert admit("POST", {"Content-Length": "11"}, 10) is TOO_LARGE
    assert admit("POST", {"Content-Length": "9" * 18}, 10**18) is None
    assert admit("POST", {"Content-Length": "9" * 19}, 10**20) is TOO_LARGE


def test_a_connection_that_breaks_before_and_after_the_deadline() -> None:
    """In time it is a broken body; later it is one that took too long."""

    def chunks(seconds: float) -> Iterator[bytes]:
        yield b"{"
        time.sleep(seconds)
        raise ConnectionResetError

    for timeout, pause, answer in ((60.0, 0.0, BROKEN), (0.05, 0.1, TOO_SLOW)):
        receiver = Receiver(VERIFIER, lambda event: None, body_timeout=timeout)
        assert receiver.handle_blocking("POST", {}, chunks(pause)) is answer


async def test_drain_waits_for_every_hand_off() -> None:
    """With two under way, the end of one is not the end."""
    release = {"e1": asyncio.Event(), "e2": asyncio.Event()}

    async def hand_off(event: Event) -> None:
        await release[event.id].wait()

    receiver = Receiver(VERIFIER, hand_off)
    bodies = [event_body(name) for name in release]
    under_way = [asyncio.create_task(receiver.receive(signed(body), body)) for body in bodies]
    await asyncio.sleep(0.01)
    release["e1"].set()
    assert (await under_way[0]).status == 202
    assert await receiver.drain(0.05) is False
    release["e2"].set()
    assert await receiver.drain(5.0) is True
    assert (await under_way[1]).status == 202


async def test_waiting_for_one_subject() -> None:
    """A wake-up for somebody else's signing is none."""
    wakeups = Wakeups()
    with wakeups.subscribe("s2"):
        mine = asyncio.create_task(wakeups.wait(0.2, subject="s1"))
        await asyncio.sleep(0.01)
        wakeups.publish(Event("e", "", {"id": "s2"}, NOW))
        assert await mine is False
        mine = asyncio.create_task(wakeups.wait(10.0, subject="s1"))
        await asyncio.sleep(0.01)
        wakeups.publish(Event("e", "", {"ids": ["s1", "s2"]}, NOW))
        assert await mine is True


def test_the_words_about_a_queue_and_a_lease() -> None:
    """They say what to do instead."""
    body = event_body()
    with pytest.raises(ConfigurationError) as caught:
        Receiver(VERIFIER, asyncio.Queue()).receive_blocking(signed(body), body)
    assert str(caught.value) == (
        "an asyncio.Queue cannot be filled from threads: hand over to a queue.Queue or a callback"
    )
    with pytest.raises(ConfigurationError) as caught:
        Receiver(VERIFIER, _fails, hand_off_timeout=60)
    assert str(caught.value) == (
        "hand_off_timeout (60 s) must be shorter than seen.lease (60 s):"
        " else an event is handed over again while the first hand-off runs"
    )


# The guards


def test_settings_of_the_guards(tmp_path: Path) -> None:
    """The least is allowed; 0 is not."""
    one = MemorySeenEvents(max_events=1, ttl=0.5, lease=0.5)
    assert one.claim("a") is Claim.NEW
    assert one.claim("b") is Claim.PENDING
    for settings in ({"max_events": 0}, {"ttl": 0}, {"lease": 0}):
        with pytest.raises(ConfigurationError):
            MemorySeenEvents(**settings)  # type: ignore[arg-type]  # one of them each time
    for settings in ({"ttl": 0}, {"lease": 0}):
        with pytest.raises(ConfigurationError):
            SQLiteSeenEvents(tmp_path / "seen.db", **settings)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(("settings", "level"), [({}, 1), ({"power_safe": False}, 1), ({"power_safe": True}, 2)])
def test_a_power_cut_is_paid_for_only_where_it_is_asked_for(tmp_path: Path, settings: Any, level: int) -> None:
    """SQLite's synchronous is FULL (2) for those who want it, else NORMAL (1)."""
    guard = SQLiteSeenEvents(tmp_path / "seen.db", **settings)
    guard.claim("a")
    assert guard._database.connection is not None
    assert guard._database.connection.execute("PRAGMA synchronous").fetchone() == (level,)
    guard.close()


def test_one_connection_until_it_is_closed(tmp_path: Path) -> None:
    """Every step uses the same one, and close closes it."""
    guard = SQLiteSeenEvents(tmp_path / "seen.db")
    assert guard.lease == 60.0
    guard.close()
    guard.claim("a")
    connection = guard._database.connection
    guard.confirm("a")
    assert guard.claim("a") is Claim.CONFIRMED
    assert guard._database.connection is connection
    guard.close()
    assert connection is not None
    with pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT 1")


def test_a_file_is_tidied_at_the_first_claim_and_every_hundredth(tmp_path: Path) -> None:
    """What is over is removed so often, and not at every claim."""
    now = 0.0
    guard = SQLiteSeenEvents(tmp_path / "seen.db", ttl=10, lease=5, clock=lambda: now)

    def rows() -> int:
        count: int = guard._run("SELECT count(*) FROM seen_events").fetchone()[0]
        return count

    for number in range(50):
        guard.claim(f"a{number}")
    now = 100.0
    for number in range(50):
        guard.claim(f"b{number}")
    assert rows() == 100
    guard.claim("c")
    assert rows() == 51
    guard.close()
    again = SQLiteSeenEvents(tmp_path / "seen.db", ttl=10, lease=5, clock=lambda: 200.0)
    again.claim("d")
    assert again._run("SELECT count(*) FROM seen_events").fetchone()[0] == 1
    again.close()
