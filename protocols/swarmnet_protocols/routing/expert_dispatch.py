"""The peers that compute the experts of rows: a pure function of a placement, with the two measures of its cost.

The trunk of a block computes its routing. A row is sent once to each other peer that computes some of its experts, so the first measure is

    messages = the number of (row, block, peer other than the trunk of the block) that compute an expert of the row

A row returns to its trunk after every block, even if the same peer computes its experts in the next one. The trunk waits for the peer that
takes longest, so the second measure is

    busiest = sum over blocks of the longest time of a peer / sum over blocks of the mean time, if all peers took equally long
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnet_protocols.net import PeerId

Expert = tuple[int, int]
"""The block of an expert, and its number in the block."""
Placement = Mapping[PeerId, frozenset[Expert]]
"""The experts that each peer holds."""


@dataclass(frozen=True)
class ExpertPeer:
    """A peer that holds experts in ``memory_bytes``, and computes ``rows_per_s`` rows of one expert.

    Raises ``ValueError`` unless these are numbers of a peer: they may be announced.
    """

    peer: PeerId
    memory_bytes: int
    rows_per_s: float = 1.0
    trunk_of: range = range(0)
    """The blocks of which it is the trunk; their rows reach it without a message."""

    def __post_init__(self) -> None:
        if self.memory_bytes < 0 or not 0.0 < self.rows_per_s < math.inf:
            raise ValueError(f"{self.memory_bytes} bytes, {self.rows_per_s} rows/s")


class Dispatch:
    """Divides rows among peers, and adds up messages and times."""

    def __init__(self, placement: Placement, peers: Sequence[ExpertPeer], blocks: int) -> None:
        self._peers = peers
        self._blocks = blocks
        self._holders: dict[Expert, list[int]] = {}
        for number, peer in enumerate(peers):
            for expert in placement.get(peer.peer, ()):
                self._holders.setdefault(expert, []).append(number)
        self.seconds = [[0.0] * len(peers) for _ in range(blocks)]
        """Seconds that each peer computes, by block."""
        self.messages = 0

    @property
    def busiest(self) -> float:
        """The second measure of the module docstring; 1 without rows."""
        speed = sum(peer.rows_per_s for peer in self._peers)
        ideal = sum(
            sum(s * peer.rows_per_s for s, peer in zip(each, self._peers, strict=True)) / speed
            for each in self.seconds
        )
        return sum(map(max, self.seconds)) / ideal if ideal else 1.0

    def add(self, block: int, experts: Sequence[int]) -> dict[int, list[int]]:
        """The experts of one row that each peer computes, by the peer's place among the peers.

        The trunk computes the experts that it holds. The peer that holds most of the rest computes those, and so on; ties go to the peer that has
        computed for the shortest time. Raises ``LookupError`` for an expert that no peer holds.
        """
        seconds = self.seconds[block]
        shares: dict[int, list[int]] = {}
        rest = list(experts)
        while rest:
            held: dict[int, list[int]] = {}
            for expert in rest:
                if (block, expert) not in self._holders:
                    raise LookupError(f"no peer holds expert {expert} of block {block}")
                for number in self._holders[block, expert]:
                    held.setdefault(number, []).append(expert)
            best = min(
                held,
                key=lambda number: (
                    block not in self._peers[number].trunk_of,
                    -len(held[number]),
                    seconds[number],
                ),
            )
            shares[best] = held[best]
            seconds[best] += len(held[best]) / self._peers[best].rows_per_s
            self.messages += block not in self._peers[best].trunk_of
            rest = [expert for expert in rest if expert not in held[best]]
        return shares
