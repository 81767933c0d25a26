"""What a peer does of what a host asks for: which experts it loads and drops. Pure."""

from collections.abc import Iterable, Mapping
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


def follows(last: Followed | None, host: PeerId, now: float) -> bool:
    """Whether a peer follows a request of ``host``: it follows one host at a time, and few requests a minute."""
    if last is None or now >= last.at + ARRANGER_S:
        return True
    return host == last.host and now >= last.at + PERIOD_S


def accepted_drops(drops: BlockExperts, held: BlockExperts, others: Iterable[BlockExperts]) -> BlockExperts:
    """The experts that a peer drops: those that one of ``others``, the experts of other peers that are online, has."""
    covered: dict[int, set[int]] = {}
    for each in others:
        for block, experts in each.items():
            covered.setdefault(block, set()).update(experts)
    found = {
        block: experts & held.get(block, frozenset()) & covered.get(block, set())
        for block, experts in drops.items()
    }
    return {block: experts for block, experts in found.items() if experts}


def accepted_loads(
    loads: BlockExperts, held: BlockExperts, counts: Mapping[int, int], capacity: int
) -> BlockExperts:
    """The experts that a peer loads: as many as there is room beside ``held``, and as the moves of a minute.

    ``counts``: the number of experts of each block of the model that has some.
    """
    room = min(capacity - sum(map(len, held.values())), most_moves(sum(counts.values())))
    found: dict[int, frozenset[int]] = {}
    for block in sorted(loads):
        own = held.get(block, frozenset())
        new = sorted(each for each in loads[block] if each < counts.get(block, 0) and each not in own)
        if taken := new[: max(0, room)]:
            found[block] = frozenset(taken)
            room -= len(taken)
    return found
