"""Workers that average, in one process and in virtual time, and what must hold whatever happens to them."""

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import torch

from swarmnet_protocols.identity import Identity
from swarmnet_protocols.training.averaging import Exchange, Member, RoundTiming, Rules
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.transport.memory import LinkProfile, MemoryNetwork

JOB = bytes(range(32))
TIMING = RoundTiming(contribution_s=6.0, settle_s=12.0, deadline_s=18.0)


@dataclass
class TrainingLab:
    """``count`` workers with exchanges that are open; ``average`` is one round of them all."""

    count: int
    seed: int = 0
    link: LinkProfile = field(
        default_factory=lambda: LinkProfile(delay_s=0.02, jitter_s=0.005, bytes_per_s=1e7)
    )
    timing: RoundTiming = TIMING
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.network = MemoryNetwork(random.Random(f"{self.seed}/network"), self.link)
        self.peers = sorted(
            Identity.from_seed(f"worker {index}".encode()).peer_id for index in range(self.count)
        )
        self.exchanges: dict[PeerId, Exchange] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "TrainingLab":
        for peer in self.peers:
            transport = await self._stack.enter_async_context(self.network.transport(peer))
            exchange = Exchange(transport, JOB, timing=self.timing, rules=self.rules)
            self.exchanges[peer] = await self._stack.enter_async_context(exchange)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    def members(self, bytes_per_s: Sequence[float] | None = None) -> list[Member]:
        rates = bytes_per_s or [1e6] * self.count
        return [Member(peer, (), rate) for peer, rate in zip(self.peers, rates, strict=True)]


def vectors(lab: TrainingLab, size: int, *, round: int = 0) -> dict[PeerId, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * lab.seed + round)
    return {peer: torch.randn(size, generator=generator) for peer in lab.peers}
