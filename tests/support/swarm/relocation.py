"""For simulations of moves and switches: a client that generates meanwhile, and models that a node
may switch to."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from swarmnet_node.hosted_blocks import Hosting
from swarmnet_node.node import Node
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.supervisor import Supervisor
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.routing.model_needs import ServedModel
from swarmnet_protocols.session.steps import Row
from tests.support.swarm.swarm_lab import Lab

PROMPT = [5, 6, 7, 8]
GAP_S = 120.0
"""A third of the hosts may leave without a word: within this time every block has a host again."""
PAUSE_S = 2.0
"""Seconds between two tokens of a slow reader."""


async def wait_until(holds: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(1.0)


async def wait_for_span(node: Node | Supervisor, span: tuple[int, int], within_s: float) -> None:
    await wait_until(lambda: node.span == span, within_s)


class Reader:
    """A client that reads one answer slowly, token by token, until it is told to stop."""

    def __init__(self, lab: Lab, pause_s: float = PAUSE_S) -> None:
        self._lab = lab
        self._pause_s = pause_s
        self.tokens: list[int] = []
        self.waits_s: list[float] = []
        self.handovers = self.failovers = 0
        self.is_enough = False
        self.begun = asyncio.Event()

    async def read(self) -> None:
        clock = asyncio.get_running_loop().time
        async with self._lab.client() as swarm, self._lab.chain(swarm) as chain:
            fed, new = 0, list(PROMPT)
            while not self.is_enough:
                began = clock()
                hidden = await chain.forward((Row(0, fed, len(new), 1, 0),), np.array(new))
                self.waits_s.append(clock() - began)
                fed += len(new)
                new = [self._lab.reference.next_token(hidden)]
                self.tokens += new
                self.begun.set()
                await asyncio.sleep(self._pause_s)
            self.handovers, self.failovers = chain.report.handovers, chain.report.failovers

    def check(self) -> None:
        assert self.tokens == self._lab.reference.greedy(PROMPT, len(self.tokens))


@dataclass(frozen=True)
class LabModels:
    """The models of some labs in one swarm, for a node of the first."""

    labs: Sequence[Lab]
    asked: list[bytes] = field(default_factory=list)
    error: SwarmnetError | None = None
    """The error of every attempt to read a model for hosting."""
    load_error: SwarmnetError | None = None
    """The error of every attempt to load its blocks."""
    outline_at: float = 0.0
    """Seconds from which on the outlines of other models can be read."""

    @property
    def manifests(self) -> Sequence[bytes]:
        return [lab.manifest for lab in self.labs[1:]]

    def own(self) -> ServedModel:
        return self._described(self.labs[0])

    async def read(self, manifest: bytes, blocks: int) -> ServedModel:
        if asyncio.get_running_loop().time() < self.outline_at:
            raise Unreachable("no peer of the swarm provides the model", hint="")
        found = self._described(self._lab(manifest))
        return replace(found, length=min(found.blocks, blocks))

    async def hosting(self, manifest: bytes, weight_bytes: int, limits: OwnerLimits) -> Hosting:
        self.asked.append(manifest)
        assert weight_bytes > 0
        lab = self._lab(manifest)
        others = replace(self, labs=[lab, *(each for each in self.labs if each is not lab)])
        await asyncio.sleep(60.0)  # longer than a record lasts
        if self.error is not None:
            raise self.error
        hosting = lab.hosting(num_blocks=3, may_move=True, others=others)
        return replace(hosting, load=self._fail) if self.load_error is not None else hosting

    def _fail(self, _start: int, _end: int) -> None:
        assert self.load_error is not None
        raise self.load_error

    def _lab(self, manifest: bytes) -> Lab:
        return next(lab for lab in self.labs if lab.manifest == manifest)

    @staticmethod
    def _described(lab: Lab) -> ServedModel:
        blocks = lab.reference.local.manifest.blocks
        return ServedModel(lab.manifest, f"{blocks} blocks", blocks, 1.0, ())
