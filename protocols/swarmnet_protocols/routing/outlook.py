"""The state of a model's swarm: blocks without a host, shortage, and the plan that fills gaps.

Hosts compute an :class:`Outlook` from the claims they see. Hosts that see the same claims compute
the same outlook, so they move without further messages.
"""

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.placement import choose_span
from swarmnet_protocols.routing.spans import Span, clipped
from swarmnet_protocols.routing.throughput import Claim, Supply, highest_speed, holders

DEAD_BAND = 0.05
"""Hosts stay while the throughput is at most this share below ``Outlook.mean``.
With a smaller share, hosts move for nothing. With a larger one, a shortage lasts."""
STEP = 0.25
"""The assumed demand is this share above the present throughput. The difference reveals
shortages."""


class Outlook:
    """The state of the swarm as one list of claims shows it."""

    def __init__(self, claims: Sequence[Claim], *, blocks: int) -> None:
        self.blocks = blocks
        self.claims = claims
        self.most = highest_speed(claim for claim in claims if claim.settled)
        intents = {claim.peer: claim for claim in claims if not claim.settled}
        self.staying = [claim for claim in claims if claim.settled and claim.peer not in intents]
        """Claims of hosts that neither move nor join."""
        self.placed = [*self.staying, *intents.values()]
        """One claim per host: the blocks it will have after all announced moves."""
        self.supply = Supply(blocks, self.placed, self.most)

    def including(self, mine: Claim) -> "Outlook":
        """Return an outlook that contains the settled claim ``mine``.

        A sampled outlook may lack this host, or hold an older claim of it.
        """
        if mine in self._settled:
            return self
        others = [claim for claim in self.claims if claim.peer != mine.peer]
        return Outlook([*others, mine], blocks=self.blocks)

    @cached_property
    def _settled(self) -> frozenset[Claim]:
        return frozenset(claim for claim in self.claims if claim.settled)

    @cached_property
    def gaps(self) -> list[int]:
        """The blocks without a host, present or announced."""
        return [block for block, rate in enumerate(self.supply.rates()) if not rate]

    @cached_property
    def throughput(self) -> float:
        return self.supply.throughput()

    @cached_property
    def mean(self) -> float:
        """The throughput if every host had every block."""
        return self.supply.mean

    @cached_property
    def is_balanced(self) -> bool:
        """True if the throughput is so close to the mean that no move could raise it clearly."""
        return self.throughput >= (1 - DEAD_BAND) * self.mean

    @cached_property
    def demand(self) -> float:
        """Tokens per second that the swarm should serve next."""
        return min(self.mean, (1 + STEP) * self.throughput)

    @cached_property
    def served(self) -> float:
        """Blocks per second that hosts serve at this demand."""
        return self.supply.served(self.demand)

    @cached_property
    def short(self) -> float:
        """The shortage at this demand, in blocks per second."""
        return self.blocks * self.demand - self.served

    @cached_property
    def holders(self) -> list[int]:
        """The number of staying hosts of each block."""
        return holders(self.staying, self.blocks)

    def may_leave(self, claim: Claim, kept: Span = (0, 0)) -> bool:
        """Tell whether all blocks of ``claim`` outside ``kept`` have another staying host."""
        start, end = kept
        return all(
            start <= block < end or self.holders[block] > 1 for block in range(*clipped(claim, self.blocks))
        )

    @cached_property
    def repairs(self) -> dict[PeerId, Claim]:
        """The claims of the hosts that move to fill gaps. Empty if no move leaves fewer gaps."""
        return _repairs(self)


def _repairs(outlook: Outlook) -> dict[PeerId, Claim]:
    """Return a plan that fills gaps with few moves.

    Hosts that leave no gap move first. Then neighbours of a gap shift towards it.
    """
    blocks = outlook.blocks
    placed = {
        claim.peer: replace(claim, start=max(claim.start, 0), end=min(claim.end, blocks))
        for claim in outlook.placed
        if claim.start < blocks and claim.end > 0
    }
    movable = {claim.peer for claim in outlook.staying if claim.may_move and claim.seen}
    before = dict(placed)
    while not all(counts := holders(placed.values(), blocks)):
        rates = Supply(blocks, placed.values(), outlook.most).rates()
        spare = [
            claim
            for peer, claim in placed.items()
            if peer in movable
            and claim == before[peer]
            and all(count > 1 for count in counts[claim.start : claim.end])
        ]
        if not spare:
            break
        claim = max(spare, key=lambda claim: (_rate_without(claim, rates, outlook.most), claim.peer))
        del placed[claim.peer]
        choice = choose_span(
            [*placed.values()], blocks=blocks, length=claim.end - claim.start, rng=random.Random(claim.peer)
        )
        placed[claim.peer] = replace(claim, start=choice.start, end=choice.end)
    if not all(counts):
        left_first = _shifted(_shifted(placed, movable, blocks, 1), movable, blocks, -1)
        right_first = _shifted(_shifted(placed, movable, blocks, -1), movable, blocks, 1)
        complete = [plan for plan in (left_first, right_first) if all(holders(plan.values(), blocks))]
        placed = min(complete, key=lambda plan: len(_changed(before, plan)), default=placed)
    return _changed(before, placed)


def _rate_without(claim: Claim, rates: Sequence[float], most: float) -> float:
    """Return the tokens per second of the slowest block of ``claim`` without its host."""
    own = min(claim.blocks_per_s, most) / (claim.end - claim.start)
    return min(rates[claim.start : claim.end]) - own


def _shifted(
    placed: Mapping[PeerId, Claim], movable: Set[PeerId], blocks: int, direction: int
) -> dict[PeerId, Claim]:
    """Return the claims after each host behind a gap has moved to the beginning of the gap.

    ``direction`` is 1 to begin at block 0 and -1 to begin at the last block.
    """

    def mirrored(claim: Claim) -> Claim:
        return claim if direction > 0 else replace(claim, start=blocks - claim.end, end=blocks - claim.start)

    shifted = dict(placed)
    reached = 0
    for claim in sorted(map(mirrored, placed.values()), key=lambda claim: (claim.start, claim.peer)):
        end = claim.end
        if claim.start > reached and claim.peer in movable:
            end = reached + claim.end - claim.start
            shifted[claim.peer] = mirrored(replace(claim, start=reached, end=end))
        reached = max(reached, end)
    return shifted


def _changed(before: Mapping[PeerId, Claim], after: Mapping[PeerId, Claim]) -> dict[PeerId, Claim]:
    return {peer: claim for peer, claim in after.items() if claim != before[peer]}
