"""Explanations: why a target is missed, and why the figures of a comparison differ from its former ones."""

from __future__ import annotations

__all__ = ["CHANGES", "NOTES"]

_SHA = (
    "the loop promises nothing about the file that it writes. It takes 0.55 ms of CPU time for each MB. SHA-256 of "
    "the received bytes takes another 0.55 ms (with the processor's own instructions), flushing the file and its "
    "folder to the disk 0.25 ms, and the call with its threads 0.15 ms. On one core, nothing that keeps these "
    "promises can reach more than 0.4 to 0.5 of that loop's speed. The same loop with the same promises is in the "
    "table."
)
_HTTPX = (
    "httpx neither hashes nor flushes. SHA-256 and the two flushes take 0.8 ms of CPU time for each MB, a third of "
    "what httpx takes for everything. Without them this package takes less than half of what httpx takes."
)
_FORM = (
    "the simplest payload that aiohttp can send, without check, count or repeat, is only 2.0 (TLS) to 2.5 times as "
    "fast as FormData with open files. The rest of the distance is the preflight of the file and the call around it "
    "(0.15 ms of CPU time together). sendfile, with which the raw sockets send plain files, is not used: it blocks "
    "the event loop while a slow disk is read, and it sends the page cache itself, so that a change of the file "
    "during the upload is sent unnoticed."
)
_MANY = (
    "as for the uploads of 1 MB: the simplest payload that aiohttp can send has only 2.3 to 2.5 times FormData's "
    "speed. The rest is the preflight of each file and what makes a repeat safe."
)
_READY = (
    "apart from aiohttp, a client needs attrs, cattrs and backoff, and the records: attrs generates the methods of "
    "each class at import, in about 0.5 ms a class."
)
_SMALL = (
    "the simplest payload that aiohttp can send, without check, count or repeat, is only 2.1 to 2.5 times as fast as "
    "FormData with open files. Of the 150 µs above it, opening, reading and checking the file takes 45, and the call "
    "with what makes a repeat safe 105, in many steps, none of which takes more than 10."
)
_CURL = (
    "curl is level with the simplest payload that aiohttp can send. The rest of the distance is the preflight of the "
    "file and the call around it (0.15 ms of CPU time together)."
)
_STREAMS = (
    "of about 70 µs, inflating the two streams takes 1, matching the five dictionaries 8, and reading their values "
    "another 10. The rest is the many small steps from the end of the file to its catalog: two objects are located, "
    "two streams are unpacked, and each step is charged to the budget. Patterns for whole files, as there are for "
    "files with tables, would be a second reader."
)
_FIELDS = (
    "of about 600 µs, opening the file and unpacking its two object streams takes 165 without a look at any field; "
    "inflating alone takes 23. The one pattern that skips a field without parsing it takes another 150 for all "
    "fields. The rest is locating each field: its newest cross-reference decides which object it is."
)
_CALLS = (
    "a deadline alone takes 8 to 10 µs of what aiohttp takes for it. This package adds 35 µs to a call, in many "
    "steps, none of which takes more than 3: the rate limiter, the look into the pool for closed connections, the "
    "deadline, the retry decision, the attempt's report, and the decoding into a record."
)
_DECODE = (
    "pydantic decodes in Rust. It is slower where records are nested or unknown fields are kept, and faster on the "
    "smallest records, on which checking the response and building a frozen attrs record from a dict count most."
)
_HOOK = (
    "the floor is two hashes and a comparison on states that were prepared, 0.76 µs here. This package adds 0.3 µs: a "
    "method call, the arguments, the look at the label and two slices of the header. The former figure (1.22) was "
    "measured before labels were checked with each signature."
)

CHANGES: dict[str, str] = {
    "calls": (
        "the candidate aiohttp + orjson was named bare aiohttp; it does the same. Calls 50 at a time are new, and the "
        "bound is 1.2 for both. What this package adds to a call, measured without a network, grew from 13 to 22 µs "
        "of CPU time, in many small steps."
    ),
    "decoding": "three more shapes of signings are decoded, and the bound is 1.1 for all.",
    "downloads": (
        "downloads 50 at a time, to tmpfs, and with the client on both cores are new. The loop by hand with the same "
        "promises has a target."
    ),
    "uploads": (
        "50 at a time takes the place of 32. Uploads from tmpfs, with the client on both cores, and of files of "
        "several producers are new. An upload of 50 KB takes 40 µs more of CPU time than before, in many small steps."
    ),
}
"""What changed in a comparison, by its name."""

NOTES: dict[str, str] = {
    "200 × 1000 KB, plain, 8 at a time: times as fast as aiohttp FormData, open file": _FORM,
    "200 × 1000 KB, TLS, 8 at a time: times as fast as aiohttp FormData, open file": _FORM,
    "1000 × 50 KB, plain, 8 at a time: times as fast as aiohttp FormData, open file": _SMALL,
    "1000 × 50 KB, TLS, 8 at a time: times as fast as aiohttp FormData, open file": _SMALL,
    "upload_many: speed, of FormData's": _MANY,
    "import with a client ready: CPU, of import aiohttp": _READY,
    "200 × 1000 KB, plain, 8 at a time: speed, of curl -Z": _CURL,
    "200 × 1000 KB, TLS, 8 at a time: speed, of curl -Z": _CURL,
    "downloads, 100 × 1000 KB, plain, 8 at a time: speed, of the best loop by hand": _SHA,
    "downloads, 100 × 1000 KB, TLS, 8 at a time: speed, of the best loop by hand": _SHA,
    "downloads, 100 × 1000 KB, plain, 8 at a time: times as fast as httpx": _HTTPX,
    "downloads, 100 × 1000 KB, TLS, 8 at a time: times as fast as httpx": _HTTPX,
    "downloads, 100 × 1000 KB, plain, the client on both cores, 8 at a time: speed, of the best loop by hand": _SHA,
    "downloads, 100 × 1000 KB, TLS, the client on both cores, 8 at a time: speed, of the best loop by hand": _SHA,
    "small calls: CPU, of aiohttp + orjson": _CALLS,
    "small calls, 50 at a time: CPU, of aiohttp + orjson": _CALLS,
    "decoding 100 signings with two documents each, no unknown field: CPU, of pydantic v2": _DECODE,
    "decoding 100 signings with no documents: CPU, of pydantic v2": _DECODE,
    "webhooks, 300 B: of the floor": _HOOK,
    "webhooks, 300 B: of bare hmac": _HOOK,
    "webhooks, 300 B: times as fast as gidgethub": _HOOK,
    "webhooks, 300 B: times as fast as stripe": _HOOK,
    "preflight: pikepdf, object streams": _STREAMS,
    "preflight: pikepdf, object streams, 50 fields": _FIELDS,
}
"""The floor that was found and why, by the target as `judge` names it."""
