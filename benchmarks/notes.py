"""Explanations: why a target is missed."""

from __future__ import annotations

_FORM = (
    "the simplest payload that aiohttp can send, without check, count or repeat, is only 2.0 to 2.7 times as fast as "
    "FormData with open files. Of the 110 to 190 µs above it, the search of the preflight through the file takes 75 to "
    "90, and the call with what makes a repeat safe about 40. sendfile is not used: it blocks the event loop while a "
    "slow disk is read, and it sends the page cache itself, so that a change of the file during the upload is sent "
    "unnoticed."
)
_READY = (
    "apart from aiohttp, a client needs attrs and its classes: attrs generates the methods of each class at import, in "
    "about 0.5 ms a class. cattrs and backoff are imported when they are first used."
)
_SMALL = (
    "of the 55 to 60 µs above the simplest payload that aiohttp can send, without check, count or repeat, the "
    "preflight takes 14, the time limit of the attempt with the part that it keeps for readings 9, and the rest is "
    "spread over the call and what makes a repeat safe, in steps of 0.5 to 4 µs."
)
_CALL = (
    "the check of idle connections, the headers and the bounded reading take 3.5 µs more than aiohttp's own request, "
    "making the request and judging the response 4, one attempt (rate limiter 1.6, token, time limit) 5 more than the "
    "time limit by hand, the record 1, and one call (retries, hooks, deadline, span) 5. Each step is 0.5 to 1.7 µs. A "
    "timer instead of asyncio.timeout would save 3, and miss the target too."
)
_RECORDS = (
    "the records keep unknown fields and parse timestamps in Python, 1.6 µs a record; pydantic does both in Rust. The "
    "ratio varies with the machine: 0.86 to 1.12 with documents, 1.16 without."
)
_MANY = (
    "one task more for each worker and a progress report for each file; the ratio wavers between 0.89 and 1.03 "
    "from run to run."
)
_BYTES = (
    "the bytes were read before: opening, reading and checking a file, and what makes a repeat safe, cost more than "
    "the slow way of FormData saves."
)
_DISK = (
    "each commit waits for the disk, which differs between machines of one kind: 2,500 to 5,100 deliveries a second, "
    "and 215 to 330 µs for each handled event, were measured with almost the same code."
)
_AHEAD = (
    "pauses of 5 ms last longer on a virtual machine, and the request of the next page shares the core with the work "
    "on the last one: 1.60 to 1.9 from run to run."
)
_HOOK = (
    "the floor is two hashes on states that were prepared, without a comparison. A method that does nothing but these "
    "hashes, the hexadecimal digest and the comparison takes 1.26 times as long; the attributes and arguments of this "
    "package's method are the rest."
)

_SIGNED = (
    "a file with a signature is searched also for usage rights and for attached PDFs, in order to refuse only what the "
    "service refuses; such a file is not uploaded."
)

_BY_HAND = "CPU, of aiohttp + orjson + asyncio.timeout + attrs"
NOTES: dict[str, str] = {
    f"small calls: {_BY_HAND}": _CALL,
    f"small calls, 50 at a time: {_BY_HAND}": _CALL,
    "decoding 100 signings with two documents each: CPU, of pydantic v2": _RECORDS,
    "inbox: durable 202s a second, under wrk on the same cores": _DISK,
    "inbox: an async handler's overhead": _DISK,
    "listing: times as fast as the loop by hand, with latency and work (2 is the bound)": _AHEAD,
    "200 × 1000 KB, plain, 8 at a time: speed of upload_many, of upload": _MANY,
    "200 × 1000 KB, TLS, 8 at a time: speed of upload_many, of upload": _MANY,
    "1000 × 50 KB, plain, 8 at a time: speed of upload_many, of upload": _MANY,
    "1000 × 50 KB, TLS, 8 at a time: speed of upload_many, of upload": _MANY,
    "1000 × 50 KB, plain, 8 at a time: times as fast as aiohttp FormData, bytes": _BYTES,
    "200 × 1000 KB, plain, 8 at a time: times as fast as aiohttp FormData, open file": _FORM,
    "200 × 1000 KB, TLS, 8 at a time: times as fast as aiohttp FormData, open file": _FORM,
    "1000 × 50 KB, plain, 8 at a time: times as fast as aiohttp FormData, open file": _SMALL,
    "1000 × 50 KB, TLS, 8 at a time: times as fast as aiohttp FormData, open file": _SMALL,
    "import with a client ready: CPU, of import aiohttp": _READY,
    "preflight: pyHanko, signed": _SIGNED,
    "webhooks, 300 B: of the floor": _HOOK,
    "webhooks, 300 B: of bare hmac": _HOOK,
    "webhooks, 300 B: times as fast as gidgethub": _HOOK,
    "webhooks, 300 B: times as fast as stripe": _HOOK,
}
"""The floor that was found and why, by the target as `judge` names it."""
