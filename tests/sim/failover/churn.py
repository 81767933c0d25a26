"""Random work for clients and random faults of nodes, both from a seed."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swarmnet_client.chain.chain import Chain
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.session.steps import Row
from tests.support.models.tiny import BLOCKS, VOCABULARY
from tests.support.network.memory_network import Delivery, LinkProfile
from tests.support.swarm.swarm_lab import Lab, Reference

MAX_LENGTH = 400


@dataclass
class Writer:
    """A client that writes into several sequences at random, and checks every answer against the
    whole model."""

    reference: Reference
    rng: random.Random
    sequences: dict[int, list[int]] = field(default_factory=dict)

    async def write(self, chain: Chain, steps: int) -> None:
        """Raises what the chain raises; ``AssertionError`` for a wrong answer."""
        for _ in range(steps):
            rows, tokens = self._next()
            before = dict(self.sequences)
            for row, new in zip(rows, tokens, strict=True):
                self.sequences[row.sequence] = before.get(row.source, [])[: row.start] + new
            answer = await chain.forward(rows, np.array([token for new in tokens for token in new]))
            self._check(rows, answer)
            assert chain.lengths == {sequence: len(tokens) for sequence, tokens in self.sequences.items()}

    def _next(self) -> tuple[tuple[Row, ...], list[list[int]]]:
        rng = self.rng
        kind = (
            rng.choice(["extend", "extend", "extend", "reorder", "roll back"]) if self.sequences else "extend"
        )
        if kind == "reorder":
            choices = [(sequence, rng.choice(list(self.sequences))) for sequence in list(self.sequences)]
        else:
            choices = [(sequence, sequence) for sequence in rng.sample(range(4), rng.randint(1, 3))]
        rows, tokens = [], []
        for sequence, source in choices:
            held = len(self.sequences.get(source, []))
            start = rng.randint(0, held) if kind == "roll back" else held
            longest = 120 if rng.random() < 0.15 else 4
            count = min(rng.randint(1, longest), MAX_LENGTH - start)
            if count < 1:
                start, count = MAX_LENGTH // 2, 1
            rewrite = source != sequence or start < held
            rows.append(Row(sequence, start, count, rng.randint(0, min(count, 3)), source, rewrite))
            tokens.append([rng.randrange(VOCABULARY) for _ in range(count)])
        return tuple(rows), tokens

    def _check(self, rows: tuple[Row, ...], answer: Array) -> None:
        pieces = np.split(answer, np.cumsum([row.outputs for row in rows])[:-1])
        for row, piece in zip(rows, pieces, strict=True):
            if row.outputs:
                self.reference.check(self.sequences[row.sequence], piece)


@dataclass
class Trouble:
    """Faults at the deliveries that a seed chooses. Nodes named in ``spared`` are left alone."""

    lab: Lab
    rng: random.Random
    spared: frozenset[str]
    faults: int
    happened: list[str] = field(default_factory=list)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    _countdown: int = 0

    def begin(self) -> None:
        """Watch deliveries from now on."""
        self._countdown = self.rng.randint(1, 60)
        self.lab.network.observers.append(self._observe)

    async def end(self) -> None:
        """No more faults; what was begun is undone first."""
        self.faults = 0
        await asyncio.gather(*self._tasks)

    def _observe(self, _: Delivery) -> None:
        self._countdown -= 1
        if self._countdown > 0 or self.faults <= 0:
            return
        self.faults -= 1
        self._countdown = self.rng.randint(1, 60)
        victims = [name for name in self.lab.nodes if name not in self.spared and self._runs(name)]
        kinds: list[Callable[[str], Any]] = [self._crash, self._hang, self._isolate, self._cut, self._leave]
        kind = self.rng.choice(kinds)
        if victims:
            name = self.rng.choice(victims)
            self.happened.append(f"{kind.__name__[1:]} {name} at {asyncio.get_running_loop().time():.3f}")
            self._tasks.append(asyncio.create_task(kind(name)))
        if self.rng.random() < 0.3:
            self._tasks.append(asyncio.create_task(self._join(f"late{self.faults}")))

    def _runs(self, name: str) -> bool:
        return self.lab.network.is_online(self.lab.peer_id(name))

    async def _pause(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.1, 6.0))

    async def _crash(self, name: str) -> None:
        start, end = self.lab.nodes[name].span
        await self.lab.stop(name)
        await self._pause()
        if self.rng.random() < 0.7:
            await self.lab.start(name, self.lab.hosting((start, end)))

    async def _hang(self, name: str) -> None:
        self.lab.network.hang(self.lab.peer_id(name))
        await self._pause()
        self.lab.network.resume(self.lab.peer_id(name))

    async def _isolate(self, name: str) -> None:
        self.lab.network.isolate(self.lab.peer_id(name))
        await self._pause()
        self.lab.network.rejoin(self.lab.peer_id(name))

    async def _cut(self, name: str) -> None:
        other = self.lab.peer_id(self.rng.choice([other for other in self.lab.nodes if other != name]))
        self.lab.network.cut(self.lab.peer_id(name), other)
        await self._pause()
        self.lab.network.heal(self.lab.peer_id(name), other)

    async def _leave(self, name: str) -> None:
        self.lab.nodes[name].finish(grace_s=8.0)
        await self._pause()

    async def _join(self, name: str) -> None:
        await self.lab.start(name, self.lab.hosting(num_blocks=self.rng.randint(1, 4)))


def random_spans(rng: random.Random) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Spans that cover the model, one after another, and some more that overlap them."""
    cuts = sorted(rng.sample(range(1, BLOCKS), rng.randint(0, 2)))
    cover = list(zip([0, *cuts], [*cuts, BLOCKS], strict=True))
    more = [sorted(rng.sample(range(BLOCKS + 1), 2)) for _ in range(rng.randint(2, 4))]
    return cover, [(start, end) for start, end in more]


def random_links(lab: Lab, names: list[str], rng: random.Random) -> None:
    """Give every pair of peers its own path."""
    for index, one in enumerate(names):
        for other in names[:index]:
            profile = LinkProfile(
                delay_s=rng.uniform(0.001, 0.08),
                jitter_s=rng.choice([0.0, 0.02]),
                bytes_per_s=rng.choice([2e6, 2e7, 1e9]),
            )
            lab.network.set_link(lab.peer_id(one), lab.peer_id(other), profile)


async def request(lab: Lab, name: str, rng: random.Random, steps: int) -> "SwarmnetError | None":
    """The result of one client: None if all its requests had right answers, else the error."""
    try:
        async with lab.client(name) as swarm, lab.chain(swarm, max_length=MAX_LENGTH) as chain:
            await Writer(lab.reference, rng).write(chain, steps)
    except SwarmnetError as error:
        return error
    return None
