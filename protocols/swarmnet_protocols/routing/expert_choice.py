"""Which routed experts a joining peer hosts: those that the fewest peers have. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping

Experts = Mapping[int, frozenset[int]]
"""The numbers of some experts of each block."""


def choose_experts(
    counts: Mapping[int, int], hosted: Iterable[Experts], capacity: int
) -> dict[int, frozenset[int]]:
    """The ``capacity`` experts with the fewest replicas.

    ``counts``: the number of experts of each block that has some. ``hosted``: the experts of each other peer. Ties go to the lowest number, so that
    a peer has the same experts of every block, and each block of a token is sent to equally many peers.
    """
    replicas = Counter((block, expert) for each in hosted for block in each for expert in each[block])
    every = [(block, expert) for block in counts for expert in range(counts[block])]
    chosen = sorted(every, key=lambda each: (replicas[each], each[1], each[0]))[:capacity]
    return {
        block: frozenset(expert for at, expert in chosen if at == block)
        for block in sorted({block for block, _ in chosen})
    }
