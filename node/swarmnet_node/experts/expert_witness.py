"""Checks other peers with experts: which of them answer, and whose outputs equal this peer's.

An announcement is only a claim. If a peer dropped experts because others announce them, nobody
might hold them any more. So before it drops an expert, the peer has others compute that expert for
a row that nobody can foresee, and compares the outputs with its own.
"""

from collections.abc import Awaitable, Callable, Sequence

import torch

from swarmnet_node.experts.expert_link import ExpertLink
from swarmnet_node.experts.expert_links import ExpertLinks
from swarmnet_protocols.directory.expert_announcements import BlockExperts, ExpertBits
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.session.expert_rows import ExpertRows, split_rows

LOOK_S = 5.0
"""Seconds to look for peers. Fewer would miss busy peers. More delays moves: meanwhile the peer
follows no request."""
MAX_DIFFERENCE = 0.1
"""Largest relative difference between two outputs of one expert. Machines round differently, in
bfloat16 by up to a hundredth, so less rejects honest peers. More would accept another expert's
outputs."""

Compute = Callable[[ExpertRows], Awaitable[torch.Tensor]]
"""Computes rows on this machine, like ``ExpertService.compute``."""


async def answering(links: ExpertLinks) -> Sequence[BlockExperts]:
    """Return the experts of each peer that answers, as the peer states them."""
    async with links.running():
        await links.settle(LOOK_S)
        return [link.experts for link in links.every if link.is_open]


async def computed_elsewhere(links: ExpertLinks, compute: Compute) -> BlockExperts:
    """Return the ``links.wanted`` experts that another peer just computed with the same outputs."""
    found: dict[int, ExpertBits] = {}
    async with links.running():
        await links.settle(LOOK_S)
        for block, experts in links.wanted.items():
            row = torch.randn(1, links.model.hidden_size).to(links.model.dtype)
            left = experts
            for link in links.every:
                if link.is_open and (common := left & link.experts.get(block, ExpertBits())):
                    left -= await _agreed(link, compute, block, row, common)
            if seen := experts - left:
                found[block] = seen
    return found


async def _agreed(
    link: ExpertLink, compute: Compute, block: int, row: torch.Tensor, experts: ExpertBits
) -> ExpertBits:
    """Return the ``experts`` whose outputs agree between this peer and another."""
    agreed: list[int] = []
    for request in split_rows(block, row, {expert: torch.tensor([0]) for expert in experts}):
        mine = request.outputs(await compute(request))
        try:
            theirs = await link.ask(request)
        except SwarmnetError:  # no answer proves nothing
            continue
        agreed += [expert for expert in mine if is_alike(mine[expert], theirs[expert])]
    return ExpertBits.of(agreed)


def is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two outputs [1, D] are equal up to rounding. Pure."""
    size = torch.linalg.vector_norm(one.float())
    difference = torch.linalg.vector_norm(one.float() - other.float())
    return bool(difference <= MAX_DIFFERENCE * size)
