"""The rules by which simulated hosts choose blocks: ours, Petals', and none after the host
joined."""

import math
import random

import numpy as np
from numpy.typing import NDArray

from swarmnet_protocols.routing.placement import choose_span, resolve_claims
from swarmnet_protocols.routing.relocation import LOOK_S, Kind, Look, Relocation, should_relocate
from swarmnet_protocols.routing.throughput import Claim
from tests.sim.scale.swarm import Rule, SimulatedHost, Snapshot


class Ours:
    """The functions of ``routing/placement.py`` and ``routing/relocation.py``."""

    stops_to_move = False

    def __init__(self, *, moves: bool = True) -> None:
        self._moves = moves

    def join(self, snapshot: Snapshot, host: SimulatedHost, rng: random.Random) -> tuple[int, int]:
        blocks = snapshot.outlook.blocks
        length = min(host.peer.length, blocks)
        if host.span is None:
            choice = choose_span(snapshot.joining, blocks=blocks, length=length, rng=random.Random(host.id))
        else:
            others = [claim for claim in snapshot.joining if claim.peer != host.id]
            choice = resolve_claims(host.claim(host.span, settled=False), others, blocks=blocks)
        return choice.start, choice.end

    def look_s(self, rng: random.Random) -> float:
        return LOOK_S * rng.uniform(0.5, 1.5) if self._moves else math.inf

    def look(
        self, snapshot: Snapshot, host: SimulatedHost, now: float, rng: random.Random
    ) -> Relocation | None:
        if host.span is None:
            return None
        mine = host.claim(host.span, settled=True)
        look = Look(snapshot.model, mine, host.peer.length)
        relocation, host.memory = should_relocate(look, host.memory, now=now, rng=rng)
        return relocation


class Petals:
    """Petals' ``server/block_selection.py`` and the periods of its command line, with the claims of
    all hosts that chose blocks."""

    stops_to_move = True
    period_s = 60.0
    balance_quality = 0.75
    eps = 1e-3

    def join(self, snapshot: Snapshot, host: SimulatedHost, rng: random.Random) -> tuple[int, int]:
        if host.span is not None:
            return host.span
        throughputs = _throughputs(snapshot.joining, snapshot.outlook.blocks)
        start = _best_start(throughputs, min(host.peer.length, snapshot.outlook.blocks))
        return start, start + min(host.peer.length, snapshot.outlook.blocks)

    def look_s(self, rng: random.Random) -> float:
        return rng.uniform(0, 2 * self.period_s)

    def look(
        self, snapshot: Snapshot, host: SimulatedHost, now: float, rng: random.Random
    ) -> Relocation | None:
        """``should_choose_other_blocks``."""
        if host.span is None:
            return None
        blocks = snapshot.outlook.blocks
        others = [claim for claim in snapshot.joining if claim.peer != host.id]
        initial = _throughputs([*others, host.claim(host.span, settled=True)], blocks)
        if initial.min() > self.balance_quality * initial.mean():
            # no placement has a minimum above the mean, so the last condition below cannot hold
            return None
        length = host.span[1] - host.span[0]
        throughputs = initial.copy()
        throughputs[slice(*host.span)] -= host.peer.announced * (1 + self.eps)
        if initial.min() > self.eps and throughputs.min() <= 0:
            return None  # the swarm would become disjoint
        start = _best_start(throughputs, length)
        if start == host.span[0]:
            return None
        throughputs[slice(*host.span)] += host.peer.announced * self.eps
        throughputs[start : start + length] += host.peer.announced
        spans = {claim.peer: (claim.start, claim.end, claim.blocks_per_s) for claim in others}
        spans[host.id] = start, start + length, host.peer.announced
        moved = True
        while moved:
            moved = False
            peers = list(spans)
            rng.shuffle(peers)
            for peer in peers:
                old, end, speed = spans[peer]
                throughputs[old:end] -= speed * (1 + self.eps)
                new = _best_start(throughputs, end - old)
                throughputs[old:end] += speed * self.eps
                if new != old:
                    spans[peer] = new, new + end - old, speed
                    moved = True
                throughputs[new : new + end - old] += speed
        quality = initial.min() / throughputs.min() if throughputs.min() > 0 else 1.0
        if quality < self.balance_quality - self.eps:
            return Relocation(Kind.MOVE, start, start + length, f"balance quality {quality:.2f}")
        return None


def _throughputs(claims: list[Claim], blocks: int) -> NDArray[np.float64]:
    """The sum of the speeds of the hosts of each block."""
    changes = np.zeros(blocks + 1)
    np.add.at(changes, [claim.start for claim in claims], [claim.blocks_per_s for claim in claims])
    np.add.at(changes, [claim.end for claim in claims], [-claim.blocks_per_s for claim in claims])
    return np.maximum(np.cumsum(changes[:-1]), 0.0)


def _best_start(throughputs: NDArray[np.float64], length: int) -> int:
    """The first of the windows whose sorted throughputs are least, compared one after another: one
    of those with the least throughput."""
    values: list[float] = throughputs.tolist()
    least, last = min(values), len(values) - length
    at = values.index(least)
    if values.count(least) > 1:
        starts = [start for start in range(last + 1) if least in values[start : start + length]]
    else:
        starts = list(range(max(at - length + 1, 0), min(at, last) + 1))
    return min(starts, key=lambda start: sorted(values[start : start + length]))


RULES: dict[str, Rule] = {"ours": Ours(), "petals": Petals(), "none": Ours(moves=False)}
