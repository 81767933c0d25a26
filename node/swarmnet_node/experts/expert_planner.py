"""Moves experts between the peers of a trunk, so that rows travel less and peers are equally busy.

The life of a plan:

1. The trunk counts which experts its routers choose (``routing/experts/use.py``).
2. From time to time it computes where experts should be (``routing/experts/placement.py``).
3. It asks peers for the next few moves (``routing/experts/moves.py``). Peers whose owners fixed the
   experts keep them. One peer loads an expert before another peer drops it.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from swarmnet_node.experts.expert_dispatcher import ExpertDispatcher
from swarmnet_node.experts.expert_link import ExpertLink
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.quantization.packed_experts import ExpertsModule
from swarmnet_protocols.routing.experts.dispatch import Expert, ExpertPeer
from swarmnet_protocols.routing.experts.moves import Moves, most_moves, next_moves
from swarmnet_protocols.routing.experts.placement import place_experts
from swarmnet_protocols.routing.experts.use import ExpertUse

_log = logging.getLogger(__name__)

PLAN_S = 60.0
"""Seconds between two plans."""
GAP_S = 10.0
"""Seconds to the next plan while experts are missing."""
MIN_ROWS = 64
"""Rows of each block that must be counted before experts move. Fewer would move experts by
chance."""
FORWARD_ROWS = 16
"""Most rows of one forward and block that are counted. A prompt has hundreds of similar rows, which
would outweigh other requests."""
MAX_FORWARDS = 256
"""Most forwards of each block that one plan counts: the newest."""
MIN_ROW_S = 1e-7
"""Seconds for one row, if a peer announces less. The plan divides by this time. Even a GPU takes
longer for one row of a small expert."""
MAX_COPIES = 1 << 15
"""Most copies of experts in one plan, which then takes one core about a second. A model of 58
blocks with 256 experts each has 14,848. If peers claim more than twice as many, each plan takes
some of the blocks."""


class ExpertPlanner:
    """Plans where to place the experts that the trunk of ``dispatcher`` lacks."""

    def __init__(self, dispatcher: ExpertDispatcher, rng: random.Random) -> None:
        self._dispatcher = dispatcher
        self._rng = rng
        self._missing = {block: sorted(dispatcher.wanted[block]) for block in sorted(dispatcher.wanted)}
        """The experts of each block to place. ``_counts`` and plans use their indices in these
        lists."""
        sizes = {len(experts) for experts in self._missing.values()}
        self._counts = ExpertUse(len(self._missing), sizes.pop()) if len(sizes) == 1 else None
        self._number = {
            block: {expert: number for number, expert in enumerate(experts)}
            for block, experts in self._missing.items()
        }
        self._turn = 0
        """The index of the block where the next plan begins."""
        self._rows: dict[int, deque[torch.Tensor]] = {
            block: deque(maxlen=MAX_FORWARDS) for block in self._missing
        }

    def watch(self, modules: Mapping[int, ExpertsModule]) -> list[Any]:
        """Count what the routers of ``modules`` (by block) choose. Return the handles that remove
        the hooks."""
        hooks = []
        for block in self._missing:
            module: Any = modules[block]
            hooks.append(module.register_forward_pre_hook(partial(self._count_choice, block)))
        return hooks

    def _count_choice(self, block: int, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        """Note a choice, on the torch thread. ``inputs[1]``: numbers of the chosen experts [T,
        k]."""
        if not hasattr(module, "record_choice"):
            self._rows[block].append(inputs[1][-FORWARD_ROWS:].to("cpu", copy=True))

    async def run(self) -> NoReturn:
        """Plan again and again, and ask peers for the next moves."""
        loop = asyncio.get_running_loop()
        while True:
            # Do not wait until every expert has a peer: peers that joined together may have chosen
            # the same experts.
            every_s = GAP_S if self._dispatcher.links.missing() else PLAN_S
            await asyncio.sleep(every_s * self._rng.uniform(0.9, 1.1))
            links = {link.host.peer: link for link in self._dispatcher.links.every if link.is_open}
            if self._counts is None or not any(link.host.capacity for link in links.values()):
                continue
            moves = await loop.run_in_executor(None, self.plan, list(links.values()), every_s)
            if moves.loads or moves.drops:
                _log.info("experts move: %d loads, %d drops", len(moves.loads), len(moves.drops))
            for peer, link in links.items():
                loads, drops = _of(peer, moves.loads), _of(peer, moves.drops)
                if loads or drops:
                    try:
                        await link.rearrange(loads, drops)
                    except SwarmnetError as error:
                        _log.info("experts not moved: %s", error)

    def plan(self, links: Sequence[ExpertLink], since_s: float) -> Moves:
        """Return the next moves, ``since_s`` after the last plan.

        Takes seconds for large models, so never call this on the event loop.
        """
        self._count(since_s)
        counts = self._counts
        has_rows = counts is not None and counts.rows.sum() >= MIN_ROWS * counts.blocks
        if counts is None or not (has_rows or self._dispatcher.links.missing()):
            return Moves()
        blocks = self._blocks_in_turn(links)
        present = {link.host.peer: self._numbered(link, blocks) for link in links}
        peers = []
        for link in links:
            mine, is_fixed = len(present[link.host.peer]), not link.host.capacity
            others = sum(map(len, link.experts.values())) - mine
            capacity = mine if is_fixed else max(0, link.host.capacity - others)
            speed = 1 / max(link.row_s, MIN_ROW_S) if link.row_s > 0 else 1.0
            peers.append(ExpertPeer(link.host.peer, capacity, speed, is_fixed=is_fixed))
        most = most_moves(counts.blocks * counts.experts, PLAN_S / 60)
        every = list(self._missing)
        use = counts.part([every.index(block) for block in blocks])
        try:
            wanted = place_experts(use, peers, present, most_loads=most)
        except ValueError as error:  # not enough memory for every expert
            _log.info("experts are not placed: %s", error)
            return Moves()
        return self._named(next_moves(present, wanted, peers, most=most), blocks)

    def _blocks_in_turn(self, links: Sequence[ExpertLink]) -> list[int]:
        """Return the blocks of the next plan: blocks with missing experts, then others in turn.

        They have at most ``MAX_COPIES`` copies together. One block is planned in any case.
        """
        every, missing = list(self._missing), self._dispatcher.links.missing()
        turned = every[self._turn :] + every[: self._turn]
        chosen, copies = list[int](), 0
        for block in sorted(turned, key=lambda block: block not in missing):
            copies += sum(len(link.experts.get(block, ())) for link in links)
            if chosen and copies > MAX_COPIES:
                break
            chosen.append(block)
        self._turn = (every.index(chosen[-1]) + 1) % len(every)
        return sorted(chosen)

    def _count(self, since_s: float) -> None:
        """Add the rows since the last plan, ``since_s`` ago, to the counts."""
        counts = self._counts
        if counts is None:
            return
        counts.decay(since_s)
        for at, (block, experts) in enumerate(self._missing.items()):
            waiting = self._rows[block]  # the torch thread appends meanwhile
            rows = [waiting.popleft() for _ in range(len(waiting))]
            if not rows:
                continue
            chosen = torch.cat(rows).numpy()
            number = np.full(int(max(chosen.max(), experts[-1])) + 1, -1)
            number[experts] = np.arange(len(experts))
            numbered = number[chosen]
            # A row may also choose experts that the trunk has, so rows differ in how many experts
            # of peers they choose.
            of_peers = (numbered >= 0).sum(axis=1)
            ordered = -np.sort(-numbered, axis=1)
            for size in range(1, numbered.shape[1] + 1):
                counts.add(ordered[of_peers == size, None, :size], at)

    def _numbered(self, link: ExpertLink, blocks: Sequence[int]) -> frozenset[Expert]:
        """Return the experts of a peer in ``blocks``, as pairs of an index in ``blocks`` and one in
        ``_missing``."""
        return frozenset(
            (at, self._number[block][expert])
            for at, block in enumerate(blocks)
            for expert in link.experts.get(block, ())
            if expert in self._number[block]
        )

    def _named(self, moves: Moves, blocks: Sequence[int]) -> Moves:
        """Undo ``_numbered``."""

        def named(each: tuple[tuple[PeerId, Expert], ...]) -> tuple[tuple[PeerId, Expert], ...]:
            return tuple(
                (peer, (blocks[at], self._missing[blocks[at]][number])) for peer, (at, number) in each
            )

        return Moves(named(moves.loads), named(moves.drops))


def _of(peer: PeerId, moves: Sequence[tuple[PeerId, Expert]]) -> dict[int, frozenset[int]]:
    """Return the experts of one peer, by block."""
    mine = [expert for other, expert in moves if other == peer]
    return {
        block: frozenset(number for at, number in mine if at == block)
        for block in sorted({at for at, _ in mine})
    }
