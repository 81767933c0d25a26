"""The cost of a placement of experts: messages, and the rows of the busiest peers."""

from collections.abc import Sequence

from swarmnet_node.experts.expert_choice import choose_experts
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.experts.dispatch import Expert, ExpertPeer, ExpertPlacement, divide
from swarmnet_protocols.routing.experts.placement import place_experts
from swarmnet_protocols.routing.experts.use import ExpertUse


class Dispatch:
    """Divides rows among peers, and adds up their messages and times."""

    def __init__(self, placement: ExpertPlacement, peers: Sequence[ExpertPeer], blocks: int) -> None:
        self._peers = peers
        self._holders: dict[Expert, list[int]] = {}
        for number, peer in enumerate(peers):
            for expert in placement.get(peer.peer, ()):
                self._holders.setdefault(expert, []).append(number)
        self.seconds = [dict.fromkeys(range(len(peers)), 0.0) for _ in range(blocks)]
        """Seconds that each peer computes: ``[block][place of the peer in the list]``."""
        self.messages = 0

    @property
    def busiest(self) -> float:
        """The measure ``busiest`` of ``dispatch.py``; 1 without rows."""
        speed = sum(peer.rows_per_s for peer in self._peers)
        ideal = sum(
            sum(s * self._peers[number].rows_per_s for number, s in each.items()) / speed
            for each in self.seconds
        )
        return sum(max(each.values()) for each in self.seconds) / ideal if ideal else 1.0

    def add(self, block: int, experts: Sequence[int]) -> dict[int, list[int]]:
        """Divide the experts of one row: place of the peer in the list → experts it computes.

        Raises ``LookupError`` for an expert that no peer holds.
        """
        holders = {expert: self._holders.get((block, expert), []) for expert in experts}
        shares = divide(holders, self.seconds[block], lambda number: 1 / self._peers[number].rows_per_s)
        self.messages += len(shares)
        return shares


def placed(use: ExpertUse, peers: Sequence[ExpertPeer]) -> ExpertPlacement:
    """The placement of peers that came one after another, each with the rarest experts."""
    counts, present = dict.fromkeys(range(use.blocks), use.experts), dict[PeerId, frozenset[Expert]]()
    for peer in peers:
        hosted = [_by_block(experts) for experts in present.values()]
        chosen = choose_experts(counts, hosted, peer.capacity)
        present[peer.peer] = frozenset((block, expert) for block in chosen for expert in chosen[block])
    return place_experts(use, peers, present, most_loads=use.blocks * use.experts * len(peers))


def _by_block(experts: frozenset[Expert]) -> dict[int, frozenset[int]]:
    return {block: frozenset(each for at, each in experts if at == block) for block, _ in experts}
