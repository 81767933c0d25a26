"""The choice of blocks of a joining host: a pure function of the claims of all hosts.

Petals' rule (Borzunov et al. 2023, "Distributed Inference and Fine-tuning of Large Language Models Over The Internet",
section 3.2): the throughput of a swarm is that of its weakest block, so a new host takes the contiguous window whose blocks are the weakest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.net import PeerId


@dataclass(frozen=True)
class Claim:
    """Blocks [start, end) that a host serves, or intends to, at ``tokens_per_s``.

    ``settled``: whether the choice is final.
    """

    peer: PeerId
    start: int
    end: int
    tokens_per_s: float = 1.0
    settled: bool = True


def choose_start(claims: Sequence[Claim], *, blocks: int, length: int) -> int:
    """The start of the weakest window of ``length`` blocks.

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


def resolve_claims(mine: Claim, others: Sequence[Claim], *, blocks: int) -> Claim:
    """The claim to make in place of ``mine`` (or ``mine`` itself) after the claims of other joining hosts arrived.

    Hosts that chose at the same time choose again in the order of their peer ids, after the settled ones, so all hosts that see the
    same claims compute the same placement without further messages.
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
