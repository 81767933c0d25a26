"""Chooses the waiting work of the next forward, and how long a forward waits for more work. Pure: no torch, no clock, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

PREFILL_SHARE = 4
"""Prefill gets at least the batch divided by this, even while decoding could fill it, so that neither starves the other."""
MAX_WAIT_SHARE = 0.4
"""Share of a forward's duration for which it may wait for one more sequence."""
MAX_WAIT_S = 0.004
"""Most seconds for which a forward waits for one more sequence. Messages that were sent together arrive within less."""


@dataclass(frozen=True)
class Waiting:
    """One sequence with ``tokens`` positions to compute.

    ``part`` identifies the part of the stage that computes them: only work for the same part can share a forward.
    """

    tokens: int
    part: int


def schedule(waiting: Sequence[Waiting], max_tokens: int) -> list[tuple[int, int]]:
    """The next batch from work in order of arrival: (index into ``waiting``, its tokens), at most ``max_tokens`` in all.

    The oldest work determines the part of the stage. Short work (decoding, short prompts) has priority, because a client waits for each of its
    tokens. Long work is split to fill the rest of the batch, but at least its share.
    """
    if not waiting:
        return []
    part = waiting[0].part
    order = [index for index, work in enumerate(waiting) if work.part == part]
    share = max(1, max_tokens // PREFILL_SHARE)
    short = [index for index in order if waiting[index].tokens <= share]
    long = [index for index in order if waiting[index].tokens > share]
    free = max_tokens - (share if long else 0)
    batch: list[tuple[int, int]] = []
    for index in short:
        tokens = waiting[index].tokens
        if tokens <= free:
            batch.append((index, tokens))
            free -= tokens
    free += share if long else 0
    for index in long:
        tokens = min(waiting[index].tokens, free)
        if tokens:
            batch.append((index, tokens))
            free -= tokens
    return batch


def batching_delay_s(waiting: int, expected: int, forward_s: float) -> float:
    """Seconds that a forward of ``waiting`` sequences, which takes ``forward_s``, should wait for one more.

    0 unless more sequences are ``expected``: a single sequence never waits. Sequences that one host computes together reach the next host
    one message after another. A forward that began with the first one alone would keep them apart in all later forwards.
    """
    return min(MAX_WAIT_S, MAX_WAIT_SHARE * forward_s) if 0 < waiting < expected else 0.0
