"""What is attacked, and the two ways to do it: guided by coverage with atheris, and by plain mutation."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

LONGEST = 8 * 1024
SLOW = 2.0

Attack = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """Something that reads foreign bytes.

    ``attacking`` gives what takes the bytes, and raises unless all that was promised of them holds.
    """

    name: str
    attacking: Callable[[], AbstractContextManager[Attack]]
    seeds: Sequence[bytes]
    words: Sequence[bytes]
    """What is worth putting into its input."""


class Found(Exception):
    """An input that broke a promise."""

    def __init__(self, target: Target, data: bytes, why: BaseException | str) -> None:
        super().__init__(f"{target.name}: {why!r} for {data!r}")
        self.data = data


def mutate(target: Target, chance: random.Random) -> bytes:
    """A seed with some wounds."""
    data = bytearray(chance.choice(target.seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 5, 9))):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(8)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = chance.randrange(256)
        elif kind == 2:
            del data[at : at + chance.choice((1, 1, 2, 8, len(data)))]
        elif kind == 3:
            data[at:at] = data[at : at + chance.randrange(1, 40)] * chance.choice((1, 1, 2, 300))
        elif kind == 4:
            other = chance.choice(target.seeds)
            data[at:] = other[chance.randrange(len(other) + 1) :]
        elif kind == 5:
            data[at : at + chance.choice((0, 1, 4))] = chance.randbytes(chance.randrange(1, 5))
        else:
            data[at : at + chance.choice((0, 0, 1, 4, 12))] = chance.choice(target.words)
    return bytes(data[:LONGEST])


def guarded(target: Target, attack: Attack) -> Attack:
    """The attack, which also ends when an input costs far too much time."""

    def once(data: bytes) -> None:
        began = time.thread_time()
        try:
            attack(data)
        except Exception as error:
            raise Found(target, data, error) from error
        spent = time.thread_time() - began
        if spent > SLOW:
            raise Found(target, data, f"{spent:.1f} s")

    return once


def by_mutation(target: Target, *, seconds: float, seed: int) -> int:
    """Attack for so long; how many inputs there were. The seeds themselves come first."""
    chance = random.Random(seed)
    tried = 0
    with target.attacking() as attack:
        once = guarded(target, attack)
        for data in target.seeds:
            once(data)
        until = time.monotonic() + seconds
        while tried < 100 or time.monotonic() < until:
            once(mutate(target, chance))
            tried += 1
    return tried
