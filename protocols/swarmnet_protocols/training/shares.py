"""Who reduces which part of the vector: contiguous slices, sized so that no link is waited for longer than it must be."""

import itertools
import math
from collections.abc import Sequence

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.codecs import ALIGNMENT

Share = tuple[int, int]
"""[start, end) of a member's slice in the vector."""


def shares(count: int, bytes_per_s: Sequence[float]) -> tuple[Share, ...]:
    """The slice of every member, in their order; empty for members too slow to own one. Cut at multiples of ``ALIGNMENT``.

    Raises ``ConfigError`` for a bandwidth that is not positive and finite, or for nothing to share.
    """
    if count < 1 or not bytes_per_s:
        raise ConfigError(f"{count} values cannot be shared among {len(bytes_per_s)} members")
    if any(not (math.isfinite(each) and each > 0) for each in bytes_per_s):
        raise ConfigError("a member's bandwidth must be positive and finite")
    blocks = math.ceil(count / ALIGNMENT)
    bounds = [0]
    so_far = 0.0
    for fraction in _fractions(bytes_per_s):
        so_far += fraction
        bounds.append(min(round(so_far * blocks) * ALIGNMENT, count))
    bounds[-1] = count
    return tuple(itertools.pairwise(bounds))


def _fractions(bytes_per_s: Sequence[float]) -> list[float]:
    """Non-negative w with sum 1 that minimise max_i (1 + (m - 2) w_i) / b_i over the m members.

    A member sends its vector but for its own slice, and its slice's mean to m - 1 others: 1 + (m - 2) w_i vectors
    (hivemind, ``averaging/load_balancing.py``). The optimum fills the fastest up to one common time.
    """
    total = sum(bytes_per_s)
    spare = len(bytes_per_s) - 2
    if spare <= 0:
        return [each / total for each in bytes_per_s]
    busiest_s = math.inf
    used = 0.0
    for owners, rate in enumerate(sorted(bytes_per_s, reverse=True), start=1):
        if rate * busiest_s <= 1.0:
            break
        used += rate
        busiest_s = (spare + owners) / used
    return [max(0.0, (busiest_s * each - 1.0) / spare) for each in bytes_per_s]
