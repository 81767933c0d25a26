"""How many threads a native step is given."""

from collections import deque
from statistics import median

EVERY = 48
"""Steps of the size that is faster, then one of the other: the machine's other work comes and goes."""
FIRST = 2
"""Steps of each size before one is preferred: the very first of a thread team is slow."""
KEPT = 5
"""Durations whose median is expected of the next: one that was interrupted says nothing."""


class Team:
    """All threads of the node or one, whichever was faster of late.

    Alone on a machine a node is fastest with all. Where several nodes compute at once, threads that wait for each other at
    every product wait for cores as well, and one alone is several times as fast. No clock or load average tells the two
    apart, since nodes of one chain compute in turns; durations do.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._steps: dict[int, int] = {}

    def size(self, rows: int, most: int) -> int:
        """The threads of the next step of so many rows: 1 or ``most``."""
        if most == 1:
            return 1
        sizes = {size: self._seconds.setdefault((rows, size), deque(maxlen=KEPT)) for size in (most, 1)}
        for size, seconds in sizes.items():
            if len(seconds) < FIRST:
                return size
        faster, other = sorted(sizes, key=lambda size: median(sizes[size]))
        turn = self._steps[rows] = self._steps.get(rows, 0) + 1
        improved = sizes[other][-1] < median(sizes[faster])
        return other if improved or turn % EVERY == 0 else faster

    def took(self, rows: int, threads: int, seconds: float) -> None:
        """A step of so many rows was given so many threads."""
        if (durations := self._seconds.get((rows, threads))) is not None:
            durations.append(seconds)
