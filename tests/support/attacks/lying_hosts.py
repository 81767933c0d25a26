"""Hosts of the simulated swarm that give wrong outputs or forge messages, and clients that use them
first."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from swarmnet_client.chain.chain import Chain
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_node.hosted_blocks import Hosting
from swarmnet_protocols.net import Message
from swarmnet_protocols.net.refusal import Refusal
from tests.support.attacks.forgers import Forger, rolled
from tests.support.network.memory_network import MemoryStream
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

PROMPT = [2, 7, 1, 8]
STEPS = 200
THREE_OF_EACH = {
    name + each: span for name, span in (("a", (0, 2)), ("b", (2, 4)), ("c", (4, 6))) for each in "123"
}


class LyingStage:
    """A stage that passes each of its outputs through ``lie``."""

    def __init__(
        self, stage: Any, lie: Forger, precision: str | None = None, arithmetic: str | None = None
    ) -> None:
        self._stage = stage
        self._lie = lie
        self.precision: str = stage.precision if precision is None else precision
        self.arithmetic: str = stage.arithmetic if arithmetic is None else arithmetic

    def part(self, start: int, end: int) -> "LyingStage":
        return LyingStage(self._stage.part(start, end), self._lie, self.precision, self.arithmetic)

    def forward(self, rows: Any) -> list[torch.Tensor]:
        return [self._lie(outputs) for outputs in self._stage.forward(rows)]

    def run_sequences(self, *arguments: Any) -> torch.Tensor:
        return self._lie(self._stage.run_sequences(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


def lying(
    hosting: Hosting, lie: Forger = rolled, *, precision: str | None = None, arithmetic: str | None = None
) -> Hosting:
    """A node whose outputs are all wrong, or right in ``precision`` and ``arithmetic`` and wrong in
    those of others."""
    load = hosting.load
    loaded: Any = lambda start, end: LyingStage(load(start, end), lie, precision, arithmetic)  # noqa: E731
    return dataclasses.replace(hosting, load=loaded)


async def start(
    lab: Lab, spans: Mapping[str, tuple[int, int]], liars: Sequence[str] = (), lie: Forger = rolled
) -> None:
    """Start nodes for these spans; the ``liars`` among them lie."""
    for name, span in spans.items():
        hosting = lab.hosting(span)
        await lab.start(name, lying(hosting, lie) if name in liars else hosting)


def names(lab: Lab, peers: Iterable[str]) -> list[str]:
    known = {lab.peer_id(name): name for name in lab.nodes}
    return [known[peer] for peer in peers]


def prefer(swarm: ModelHosts, first: Iterable[str]) -> None:
    """Route through these hosts as long as they may be used, so that a test need not wait for
    chance."""
    route = swarm.route
    wanted = set(first)

    def preferring(span: tuple[int, int], **ends: Any) -> Any:
        known = dict(swarm._hosts)
        banned = set(swarm.banned)
        others = {
            peer: host
            for peer, host in known.items()
            if peer in wanted - banned
            or not any(other in wanted - banned and known[other].start == host.start for other in known)
        }
        swarm._hosts = others
        try:
            return route(span, **ends)
        finally:
            swarm._hosts = known

    swarm.route = preferring  # type: ignore[method-assign]


async def used(
    lab: Lab, liars: Iterable[str], look: Callable[[ModelHosts, Chain], None], prompt: list[int] = PROMPT
) -> list[int]:
    """An answer of ``STEPS`` steps through ``liars`` first, after which ``look`` looks."""
    async with lab.client() as swarm:
        await asyncio.sleep(1.0)
        prefer(swarm, [lab.peer_id(name) for name in liars])
        async with lab.chain(swarm) as chain:
            tokens = await lab.generate(chain, prompt, STEPS)
            look(swarm, chain)
            return tokens


Forge = Callable[[MemoryStream, Message], Message | Refusal | None]
"""The message that a liar sends in place of another, or its refusal of the stream; None: it sends
the true message."""


def assert_liar_is_replaced(
    reference: Reference,
    layout: Mapping[str, tuple[int, int]],
    forge: Forge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first peer that lies continues to lie; the answer is right, and the last chain does not
    contain the liar."""
    honest = MemoryStream.send
    liar = ""

    async def send(self: MemoryStream, message: Message) -> None:
        nonlocal liar
        sender = self._transport.peer_id
        forged = forge(self, message) if liar in ("", sender) else None
        if forged is not None:
            liar = sender
        if isinstance(forged, Refusal):
            self.refuse(forged)
        else:
            await honest(self, forged or message)

    monkeypatch.setattr(MemoryStream, "send", send)

    async def scenario(lab: Lab) -> list[int]:
        await lab.start_all(layout)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            tokens = await lab.generate(chain, PROMPT, 6)
            assert liar not in [hop for hop, _, _ in chain.report.route]
        return tokens

    assert simulate(reference, scenario) == reference.greedy(PROMPT, 6)
    assert liar
