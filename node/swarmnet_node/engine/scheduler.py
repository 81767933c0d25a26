"""Which of the waiting work goes into the next forward, and when. Pure: no torch, no clock, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

PREFILL_SHARE = 4
"""While single tokens fill the budget, prefill still gets one part in this many: neither starves the other."""

PATIENCE_SHARE = 0.4
"""What of the time that a forward takes may be spent on waiting for one more lane."""
PATIENCE_S = 0.004
"""And no more than this: whoever comes right behind others comes sooner."""


@dataclass(frozen=True)
class Waiting:
    """One lane with ``tokens`` inputs to compute, in order of arrival; a lower ``priority`` goes first.

    ``part`` names the part of the stage it goes through: only work for the same part shares a forward.
    """

    tokens: int
    priority: int
    part: int


def schedule(waiting: Sequence[Waiting], budget_tokens: int) -> list[tuple[int, int]]:
    """The next batch: (index into ``waiting``, how many of its tokens), at most ``budget_tokens`` in all.

    Short work goes before long within a priority, because somebody waits for each token of it; long work is cut to what
    room is left, and never less than its share. The first in line decides the part of the stage.
    """
    if not waiting:
        return []
    order = sorted(range(len(waiting)), key=lambda index: (waiting[index].priority, index))
    part = waiting[order[0]].part
    order = [index for index in order if waiting[index].part == part]
    share = max(1, budget_tokens // PREFILL_SHARE)
    short = [index for index in order if waiting[index].tokens <= share]
    long = [index for index in order if waiting[index].tokens > share]
    room = budget_tokens - (share if long else 0)
    batch: list[tuple[int, int]] = []
    for index in short:
        tokens = waiting[index].tokens
        if tokens <= room:
            batch.append((index, tokens))
            room -= tokens
    room += share if long else 0
    for index in long:
        tokens = min(waiting[index].tokens, room)
        if tokens:
            batch.append((index, tokens))
            room -= tokens
    return batch


def worth_waiting_s(waiting: int, expected: int, forward_s: float) -> float:
    """How long to wait for one more lane before a forward, which takes ``forward_s``, of those that wait.

    Lanes that were computed together come together to the next host, one message after the other: a forward that begins with the
    first of them tears them apart for good. Nothing, unless more are ``expected``: a lane alone is never kept.
    """
    return min(PATIENCE_S, PATIENCE_SHARE * forward_s) if 0 < waiting < expected else 0.0
