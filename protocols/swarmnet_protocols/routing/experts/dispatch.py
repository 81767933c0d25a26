"""Choose which peers compute the experts of a row, as a pure function of who holds them.

Trunks divide the rows of a forward with :func:`divide`.

The trunk of a block computes its routing. A row is sent once to each peer that computes some of its
experts, so the first measure is

    messages = the number of (row, block, peer) where the peer computes an expert of the row

A row returns to its trunk after every block, even if the same peer computes its experts in the next
block. The trunk waits for the slowest peer, so the second measure is

    busiest = sum over blocks of the longest time of a peer
              / sum over blocks of the mean time, if all peers took equally long
"""

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarmnet_protocols.net import PeerId

Expert = tuple[int, int]
"""The block of an expert, and its number in the block."""
ExpertPlacement = Mapping[PeerId, frozenset[Expert]]
"""The experts that each peer holds."""
P = TypeVar("P")
"""A peer: its ID, or its place in a list."""


def divide(
    holders: Mapping[int, Sequence[P]], seconds: MutableMapping[P, float], row_s: Callable[[P], float]
) -> dict[P, list[int]]:
    """Divide the experts of one row among peers: peer → experts it computes.

    The peer that holds most of the experts computes all it holds. Then the peer that holds most of
    the rest follows, and so on. Ties go to the peer with the least work so far.

    - ``holders``: expert → the peers that hold it.
    - ``seconds``: peer → its work so far. The new work is added.
    - ``row_s``: a peer's seconds for one row of one expert.

    Raises ``LookupError`` for an expert without a holder.
    """
    shares: dict[P, list[int]] = {}
    rest = list(holders)
    while rest:
        held: dict[P, list[int]] = {}
        for expert in rest:
            if not holders[expert]:
                raise LookupError(f"no peer holds expert {expert}")
            for peer in holders[expert]:
                held.setdefault(peer, []).append(expert)
        best = min(held, key=lambda peer: (-len(held[peer]), seconds.get(peer, 0.0)))
        shares[best] = held[best]
        seconds[best] = seconds.get(best, 0.0) + len(held[best]) * row_s(best)
        rest = [expert for expert in rest if expert not in held[best]]
    return shares


@dataclass(frozen=True)
class ExpertPeer:
    """A peer that holds at most ``capacity`` experts and computes ``rows_per_s`` rows of one.

    Peers may announce these numbers. Raises ``ValueError`` for a negative capacity or an invalid
    speed.
    """

    peer: PeerId
    capacity: int
    rows_per_s: float = 1.0
    is_fixed: bool = False
    """True if the owner chose the experts. They then stay where they are."""

    def __post_init__(self) -> None:
        if self.capacity < 0 or not 0.0 < self.rows_per_s < math.inf:
            raise ValueError(f"{self.capacity} experts, {self.rows_per_s} rows/s")
