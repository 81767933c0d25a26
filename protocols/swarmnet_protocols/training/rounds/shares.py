"""Who reduces which part of the vector: contiguous slices, sized so that no link is waited for longer than it must be."""

import itertools
import math
from collections.abc import Sequence

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.codecs import ALIGNMENT

MAX_SHARE = 0.5
"""Of the vector, that one member of three or more reduces, however fast it is said to be."""

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
    """Non-negative w with sum 1, none above ``MAX_SHARE``, that minimise max_i (1 + (m - 2) w_i) / b_i over the m members.

    A member sends its vector but for its own slice, and its slice's mean to m - 1 others: 1 + (m - 2) w_i vectors
    (hivemind, ``averaging/load_balancing.py``, which gives everything to who claims m - 1 times the rate of the others). Of
    two it does not matter who reduces what.
    """
    members = len(bytes_per_s)
    if members <= 2:
        return [1.0 / members] * members
    fractions = _filled(bytes_per_s, members - 2, 1.0)
    most = max(range(members), key=fractions.__getitem__)
    if fractions[most] > MAX_SHARE:
        others = [*bytes_per_s[:most], *bytes_per_s[most + 1 :]]
        fractions = _filled(others, members - 2, 1.0 - MAX_SHARE)
        fractions.insert(most, MAX_SHARE)
    return fractions


def _filled(bytes_per_s: Sequence[float], spare: int, total: float) -> list[float]:
    """Non-negative w with sum ``total`` that minimise max_i (1 + spare w_i) / b_i: the fastest are filled up to one common time."""
    busiest_s = math.inf
    used = 0.0
    for owners, rate in enumerate(sorted(bytes_per_s, reverse=True), start=1):
        if rate * busiest_s <= 1.0:
            break
        used += rate
        busiest_s = (spare * total + owners) / used
    return [max(0.0, (busiest_s * each - 1.0) / spare) for each in bytes_per_s]
