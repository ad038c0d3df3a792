"""A set of short hashes in 16 to 32 bytes each: an archive of a million documents fits in memory."""

from __future__ import annotations

import hashlib
from array import array

__all__ = ["DigestSet", "digest"]

_FIRST_SLOTS = 1024


def digest(*parts: str) -> int:
    """Return a hash of 64 bits, never 0. The probability that two of ten million are equal is one in 370,000."""
    text = "\0".join(parts).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") or 1


class DigestSet:
    """A set of digests: an open-addressing hash table, at most half full."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _FIRST_SLOTS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, value: int) -> bool:
        return self._slots[self._find(value)] == value

    def add(self, value: int) -> None:
        slot = self._find(value)
        if self._slots[slot] == value:
            return
        self._slots[slot] = value
        self._count += 1
        if 2 * self._count > len(self._slots):
            self._grow()

    def _find(self, value: int) -> int:
        """Return the slot that holds the value, or the free slot for it."""
        mask = len(self._slots) - 1
        slot = value & mask
        while self._slots[slot] not in (0, value):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        for value in old:
            if value:
                self._slots[self._find(value)] = value
