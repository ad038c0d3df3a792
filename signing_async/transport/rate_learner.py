"""How fast to ask a service that may answer 429: learnt from what it lets through. Pure: whoever asks says the time.

Until the first 429 only the number of requests under way is bounded, and opened quickly. From then on requests go out
evenly spaced, a little below the rate that the service was seen to let through; a rate that is used and not refused
grows, hardly at first, then faster and faster; the next 429 puts it right again.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise

__all__ = ["Limit"]


class Limit:
    """When the next request may go out. For each one: `ready_at`, `go`, and at its end `left`; after a 429 `close`."""

    def __init__(self) -> None:
        self.closed_until: float = 0.0
        self._window = _Window()
        self._pace: _Pace | None = None
        self._refused_at: float | None = None
        """When the first 429 came of those that the pause answers; None when its lesson is learnt."""
        self._since = -math.inf
        """Requests that went out before have nothing new to say about the rate."""

    @property
    def rate(self) -> float | None:
        """Requests a second that go out at present; None before the first 429."""
        return None if self._pace is None else self._pace.rate

    def ready_at(self, now: float) -> float:
        """The earliest time for the next request; one that is not after ``now`` says that it may go."""
        if now < self.closed_until:
            return self.closed_until
        if self._refused_at is not None:
            # A pause is over when it was said, however late somebody asks.
            self._learn(self._refused_at, max(self._refused_at, self.closed_until))
        return self._window.ready_at(now) if self._pace is None else self._pace.next

    def go(self, now: float) -> None:
        """A request goes out."""
        if self._pace is None:
            self._window.go(now)
        else:
            self._pace.go(now)

    def left(self, now: float, since: float, admitted: bool | None) -> None:
        """A request that went out at ``since`` has ended: refused, let through, or in a way that tells nothing."""
        if admitted is False and self._refused_at is None and since >= self._since:
            self._refused_at = now
        if self._pace is None:
            self._window.left(now, since, admitted)
        elif admitted:
            self._pace.admitted(since)

    def close(self, now: float, seconds: float) -> None:
        """Nothing goes out for so long."""
        self.closed_until = max(self.closed_until, now + seconds)

    def _learn(self, refused_at: float, now: float) -> None:
        self._refused_at, self._since = None, now
        if self._pace is None:
            self._pace = _Pace.after(self._window, refused_at, now)
        else:
            self._pace.learn(refused_at, now)


class _Window:
    """How many requests may be under way before anything is known of a limit.

    It is doubled after each round of answers for as long as that makes more of them come in a second: more requests at
    once than keep a service busy would only be more to be refused.
    """

    FIRST = 8
    PAYS = 1.5
    # After that it is widened by one in so many answers, and then faster and faster.
    SLOWLY = 32
    # One more in this time, however few are answered: nobody waits long for requests that hang.
    PATIENCE = 0.05
    KEPT = 1000

    def __init__(self) -> None:
        self.began_at: float | None = None
        self.admitted = 0
        self.sent: deque[float] = deque(maxlen=self.KEPT)
        """When the last of them went out."""
        self._under_way = 0
        self._pressed = False
        self._size = float(self.FIRST)
        self._widened_at = 0.0
        self._doubling = True
        self._round = self.FIRST
        self._answers = 0
        self._round_began = 0.0
        self._speed = 0.0
        self._more = 0

    def ready_at(self, now: float) -> float:
        self._pressed = self._under_way >= self._size
        return max(now, self._widened_at + self.PATIENCE) if self._pressed else now

    def go(self, now: float) -> None:
        if self.began_at is None:
            self.began_at = now
        if not self._under_way:
            self._round_began = self._widened_at = now
            self._answers = 0
        elif self._under_way >= self._size:
            self._size += 1
            self._widened_at = now
        self._under_way += 1

    def left(self, now: float, since: float, admitted: bool | None) -> None:
        if admitted:
            self.admitted += 1
            self.sent.append(since)
            # A window that is not used up is wide enough.
            if self._pressed:
                self._answered(now)
        self._under_way -= 1

    def _answered(self, now: float) -> None:
        if not self._doubling:
            self._more += 1
            self._size += 2 * self._more / self.SLOWLY**2
            return
        if self._speed:
            self._size += 1
        if not self._speed and self.admitted <= self.FIRST:
            # Connections were made, and much was done for the first time.
            self._round_began = now
            return
        self._answers += 1
        if self._answers < self._round:
            return
        speed = self._answers / max(now - self._round_began, 1e-6)
        self._doubling = speed >= self.PAYS * self._speed
        # Where it did not pay: as many as the service was faster with them.
        self._size = 2.0 * self._round if self._doubling else self._round / 2 * max(1.0, speed / self._speed)
        self._round *= 2
        self._speed, self._round_began, self._answers = speed, now, 0


class _Pace:
    """Requests evenly spaced, at a rate that is learnt from what was let through between two refusals.

    Between them a service with a token bucket fills it as fast as its rate allows, and one that counts by the second
    counts. So what came through in that time is the rate, but for what overflowed a bucket that was full: that is put
    right with the burst that was let through before the first refusal.
    """

    # What a limit is counted by, at the least: it makes a burst that was let through a rate.
    SECOND, MINUTE = 1.0, 60.0
    TRUSTED = 20
    REMEMBERED = 100
    KEPT = 400
    BELOW = 0.95
    REFUSED = 0.8
    # However many share a limit: what is never tried is never learnt.
    LEAST = 0.2
    SHORTEST, LONGEST = 0.5, 10.0
    # What a timer was late is caught up, unless the service seems to want them one by one, and not too many of them.
    LATE = 0.01
    BURST, FINE = 5, 200.0

    def __init__(self, rate: float, burst: int, plateau: float, refused_at: float, now: float) -> None:
        self.next: float = now
        self._burst = burst
        self._refused_at, self._opened_at = refused_at, now
        self._sent: deque[float] = deque(maxlen=self.KEPT)
        """When those went out that were let through since the last refusal, the last ones as far as they are kept."""
        self._requests = self._seconds = 0.0
        self._set(rate, 1.0, plateau)

    @classmethod
    def after(cls, window: _Window, refused_at: float, now: float) -> _Pace:
        """The first rate: a guess from what came through before the first refusal."""
        began, count = cls._busiest(window, now)
        pause = now - refused_at
        if count >= cls.TRUSTED:
            rate = count / max(now - began, cls.SECOND)
            # What was asked for over minutes may be far less than what would have been let through.
            plateau = min(5.0, 5.0 * pause) if now - began <= cls.MINUTE else 0.0
            return cls(rate, count, max(cls.SHORTEST, plateau), refused_at, now)
        # With a wide margin: it is between these two.
        slowest, fastest = count / (now - began + 0.001), count / max(refused_at - began, 0.001)
        return cls(math.sqrt(slowest * fastest), count, cls.SHORTEST, refused_at, now)

    @classmethod
    def _busiest(cls, window: _Window, now: float) -> tuple[float, int]:
        """Since when how many were let through, where that was most in a second: a quiet time shows no limit."""
        began, count = now if window.began_at is None else window.began_at, max(window.admitted, 1)
        most = count / max(now - began, cls.SECOND)
        for after, at in enumerate(sorted(window.sent, reverse=True)):
            if (rate := after / max(now - at, cls.SECOND)) > most:
                began, count, most = at, after + 1, rate
        return began, count

    @property
    def rate(self) -> float:
        """Requests a second now: from a part of what was learnt to all of it on the plateau, and beyond it after."""
        if self._used < self._plateau:
            return self._learnt * (self._start + (1.0 - self._start) * self._used / self._plateau)
        beyond = self._used / self._plateau - 1.0
        return self._learnt * (1.0 + min(0.08 * beyond**3, 8.0 * beyond))

    def _set(self, learnt: float, start: float, plateau: float) -> None:
        self._learnt = max(learnt, self.LEAST)
        self._start = start
        self._plateau = plateau
        self._used = 0.0
        """Seconds for which the rate was used to the full: one that is not needed proves nothing, and does not grow."""

    def go(self, now: float) -> None:
        rate = self.rate
        space = 1.0 / rate
        late = now - self.next
        if late < max(space, self.LATE):
            self._used += space
        catches_up = self._burst >= self.BURST or rate > self.FINE
        self.next = (max(self.next, now - self.LATE) if catches_up else now) + space

    def admitted(self, since: float) -> None:
        self._sent.append(since)

    def learn(self, refused_at: float, now: float) -> None:
        """A pause is over that began with a refusal."""
        reached, pause = self.rate, now - refused_at
        if not self._sent:
            self._set(self._learnt * self.REFUSED, 1.0, self.SHORTEST)
        else:
            self._remember(refused_at, reached)
            seen = self._requests / self._seconds
            # What was reached is too much, what was seen may be too little; where pauses are long, errors are dear.
            most = max(seen, self.BELOW * reached)
            learnt = seen * (most / seen) ** (0.5 / (1.0 + 4.0 * pause))
            plateau = min(self.LONGEST, self._requests / 5.0) / (1.0 + 4.0 * (most / seen - 1.0))
            if self._requests >= self.TRUSTED:
                plateau = max(plateau, 7.0 * min(pause, 1.5))
            self._set(learnt, max(0.5, self.BELOW * seen / learnt), max(plateau, self.SHORTEST))
        self._refused_at, self._opened_at, self.next = refused_at, now, now
        self._sent.clear()

    def _remember(self, refused_at: float, reached: float) -> None:
        """Add what was let through since the last refusal, and forget as much as makes it too much to remember."""
        began, opened, taken = self._refused_at, self._opened_at, sorted(self._sent)
        if len(taken) == self.KEPT:
            began = opened = taken.pop(0)
        # Where nothing was asked, nothing was seen.
        gaps = (min(at - before, 1.0 / self.LEAST) for before, at in pairwise((opened, *taken, refused_at)))
        busy = max(opened - began + sum(gaps), 0.001)
        count = len(taken)
        seconds = count / _filling(self._burst, began, taken, refused_at, count / busy, reached)
        kept = min(1.0, max(0.0, self.REMEMBERED - count) / self._requests) if self._requests else 0.0
        self._requests = kept * self._requests + count
        self._seconds = kept * self._seconds + seconds


def _filling(size: float, began: float, taken: list[float], ended: float, least: float, most: float) -> float:
    """The rate at which a bucket of this size, empty when it ``began``, was filled, if it was empty when it ``ended``
    with one taken at each of these times; from ``least`` to ``most``."""

    def runs_dry(rate: float) -> bool:
        content = 0.0
        for before, at in pairwise((began, *taken)):
            content = min(size, content + (at - before) * rate) - 1.0
        return content + (ended - taken[-1]) * rate <= 0.0

    most = max(least, most)
    for _ in range(12):
        middle = (least + most) / 2.0
        least, most = (middle, most) if runs_dry(middle) else (least, middle)
    return (least + most) / 2.0
