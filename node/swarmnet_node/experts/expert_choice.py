"""Which routed experts a peer hosts: those that the fewest peers have when it joins, and later what hosts ask it to load and drop. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from swarmnet_protocols.directory.expert_announcements import BlockExperts
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.expert_moves import most_moves

ARRANGER_S = 600.0
"""Seconds after its last request for which one host decides alone which experts a peer holds."""
PERIOD_S = 50.0
"""Seconds between two requests that a peer follows."""


@dataclass(frozen=True)
class Followed:
    """The last request that a peer followed: whose it was, and when."""

    host: PeerId
    at: float


def choose_experts(counts: Mapping[int, int], hosted: Iterable[BlockExperts], capacity: int) -> BlockExperts:
    """The ``capacity`` experts with the fewest replicas.

    ``counts``: the number of experts of each block that has some. ``hosted``: the experts of each other peer. Ties go to the lowest number, so that
    a peer has the same experts of every block, and each block of a token is sent to equally many peers.
    """
    replicas = Counter((block, expert) for each in hosted for block in each for expert in each[block])
    every = [(block, expert) for block in counts for expert in range(counts[block])]
    return _by_block(sorted(every, key=lambda each: (replicas[each], each[1], each[0]))[:capacity])


def follows(last: Followed | None, host: PeerId, now: float) -> bool:
    """Whether a peer follows a request of ``host``: it follows one host at a time, and few requests a minute."""
    if last is None or now >= last.at + ARRANGER_S:
        return True
    return host == last.host and now >= last.at + PERIOD_S


def accepted_drops(drops: BlockExperts, held: BlockExperts, others: Iterable[BlockExperts]) -> BlockExperts:
    """The experts that a peer drops: those that one of ``others``, the experts of other peers that are online, has."""
    covered = _covered(others)
    found = {
        block: frozenset(each for each in experts if (block, each) in covered) & held.get(block, frozenset())
        for block, experts in drops.items()
    }
    return {block: experts for block, experts in found.items() if experts}


def accepted_loads(
    loads: BlockExperts,
    held: BlockExperts,
    others: Iterable[BlockExperts],
    counts: Mapping[int, int],
    capacity: int,
) -> BlockExperts:
    """The experts that a peer loads while there is room beside ``held``: those that no other peer has, and as many others as move in a minute.

    ``counts``: the number of experts of each block of the model that has some.
    """
    covered = _covered(others)
    room, most = capacity - sum(map(len, held.values())), most_moves(sum(counts.values()))
    wanted = [
        (block, expert)
        for block in sorted(loads)
        for expert in sorted(loads[block] - held.get(block, frozenset()))
        if expert < counts.get(block, 0)
    ]
    gaps = [each for each in wanted if each not in covered]
    taken = [*gaps, *[each for each in wanted if each in covered][:most]][: max(0, room)]
    return _by_block(taken)


def _covered(others: Iterable[BlockExperts]) -> set[tuple[int, int]]:
    return {(block, expert) for each in others for block in each for expert in each[block]}


def _by_block(experts: Collection[tuple[int, int]]) -> BlockExperts:
    return {
        block: frozenset(expert for at, expert in experts if at == block)
        for block in sorted({block for block, _ in experts})
    }
