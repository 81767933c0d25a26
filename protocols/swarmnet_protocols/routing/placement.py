"""Which blocks a joining host takes. Pure.

Petals' rule (Borzunov et al. 2023, "Distributed Inference and Fine-tuning of Large Language Models Over The Internet",
section 3.2): a swarm is as fast as its weakest block, so a newcomer takes the contiguous window whose blocks are the weakest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.net import PeerId


@dataclass(frozen=True)
class Claim:
    """Blocks [start, end) that a host serves, or means to, at ``tokens_per_s``.

    ``settled`` is False while the host may still change its mind.
    """

    peer: PeerId
    start: int
    end: int
    tokens_per_s: float = 1.0
    settled: bool = True


def choose_start(claims: Sequence[Claim], *, blocks: int, length: int) -> int:
    """Start of the window of ``length`` blocks that is weakest at present.

    Windows are compared by their blocks' throughputs sorted from the weakest up, then by start: the same claims give the same
    answer on every machine. Raises ``ValueError`` unless 0 < length <= blocks.
    """
    if not 0 < length <= blocks:
        raise ValueError(f"a window of {length} in a model of {blocks} blocks")
    rate = [0.0] * blocks
    for claim in claims:
        for block in range(max(claim.start, 0), min(claim.end, blocks)):
            rate[block] += claim.tokens_per_s
    return min(range(blocks - length + 1), key=lambda start: (sorted(rate[start : start + length]), start))


def settle(mine: Claim, others: Sequence[Claim], *, blocks: int) -> Claim:
    """What to do with ``mine`` now that the intents of others are seen: keep it, or the claim to make instead.

    Hosts that chose at the same moment order themselves by peer id: everyone chooses again in that order, after the settled
    ones, so that all who see the same claims come to the same placement without a word.
    """
    settled = [claim for claim in others if claim.settled]
    rivals = sorted([claim for claim in others if not claim.settled] + [mine], key=lambda claim: claim.peer)
    placed = list(settled)
    for rival in rivals:
        length = rival.end - rival.start
        start = choose_start(placed, blocks=blocks, length=length)
        placed.append(Claim(rival.peer, start, start + length, rival.tokens_per_s, settled=False))
        if rival.peer == mine.peer:
            break
    return placed[-1]
