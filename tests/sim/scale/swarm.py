"""A simulated swarm: hosts that join, leave, look at the directory and move, as events of one heap;
the decisions are those of the real code."""

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.model_needs import ServedModel
from swarmnet_protocols.routing.outlook import Outlook
from swarmnet_protocols.routing.relocation import Look, Relocation, Remembered, blocks_to_leave, is_confirmed
from swarmnet_protocols.routing.throughput import Claim, Supply, holders
from swarmnet_protocols.timing import Timing
from tests.sim.scale.population import Peer

TIMING = Timing()
SNAPSHOT_S = 2.0
"""Age up to which hosts see what the directory holds: it takes that long to publish and to read."""
SAMPLE = 400
"""Records that hosts know in a large swarm: those of a few reads of the directory, each a random
sample. For blocks that are in none of them they read all records. Hosts that look at the same time
see the same sample here, which makes it harder for them not to act alike."""
MEASURE_S = 10.0
"""Period of measurements."""
RETRY_S = 15.0
"""Period at which a host that has loaded its new blocks looks whether it may leave the old ones."""
GIVE_UP_S = 600.0
"""Seconds after which such a host drops the new blocks instead."""


@dataclass(eq=False)
class SimulatedHost:
    peer: Peer
    span: tuple[int, int] | None = None
    """The blocks that it serves or will serve; None before it chose."""
    serves: bool = False
    is_settled: bool = False
    """Whether its choice is final: it serves or loads the blocks."""
    move: Relocation | None = None
    """The move that it has begun."""
    memory: Remembered = field(default_factory=Remembered)
    alive: bool = True
    moves: int = 0

    @property
    def id(self) -> PeerId:
        return self.peer.peer

    def has(self, blocks: Set[int]) -> bool:
        return self.span is not None and not blocks.isdisjoint(range(*self.span))

    def claim(self, span: tuple[int, int], *, settled: bool) -> Claim:
        return Claim(self.id, *span, self.peer.announced, settled)


@dataclass
class Snapshot:
    """What the directory holds, as hosts read it."""

    joining: list[Claim]
    """For joining hosts: settled are the claims of hosts that have chosen."""
    serving: list[Claim]
    """For hosts that may move: settled are the claims of hosts that serve."""
    model: ServedModel
    """The model with the claims of ``serving``."""

    @property
    def outlook(self) -> Outlook:
        return self.model.outlook


class Rule(Protocol):
    """How hosts choose blocks."""

    stops_to_move: bool
    """Whether a host that moves drops its old blocks before it loads the new ones."""

    def join(self, snapshot: Snapshot, host: SimulatedHost, rng: random.Random) -> tuple[int, int]:
        """The blocks of a joining host."""

    def look_s(self, rng: random.Random) -> float:
        """Seconds until a host's next look; infinite if it never looks."""

    def look(
        self, snapshot: Snapshot, host: SimulatedHost, now: float, rng: random.Random
    ) -> Relocation | None:
        """The move of a serving host."""


@dataclass
class Measures:
    """What was measured every ``MEASURE_S``, and what was counted."""

    times: list[float] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    """For each block, the measurements in which it had no serving host."""
    coverage: list[float] = field(default_factory=list)
    """Share of blocks with a serving host."""
    of_optimum: list[float] = field(default_factory=list)
    """Throughput of the serving hosts, divided by that of the same hosts if each had every
    block."""
    weakest: list[float] = field(default_factory=list)
    """Rate of the weakest block, divided by the mean."""
    moves: int = 0
    repairs: int = 0
    """Moves that fill a block without a host; ``moves`` counts them, too."""
    joins: int = 0
    leaves: int = 0
    host_s: float = 0.0

    def since(self, start: float) -> "Measures":
        """The measurements from ``start`` on, without the counts."""
        first = next((index for index, time in enumerate(self.times) if time >= start), len(self.times))
        return Measures(
            self.times[first:],
            self.hosts[first:],
            [],
            self.coverage[first:],
            self.of_optimum[first:],
            self.weakest[first:],
        )

    def block_coverage(self) -> list[float]:
        """For each block, the share of the time in which it had a serving host."""
        return [1 - missing / len(self.times) for missing in self.gaps]


class SimulatedSwarm:
    """Hosts of one model of ``blocks`` blocks. Loading a span takes ``load_s`` seconds, drawn
    between half and one and a half of it."""

    def __init__(self, rule: Rule, seed: int, *, blocks: int, load_s: float = 20.0) -> None:
        self.rng = random.Random(seed)
        self.blocks = blocks
        self.now = 0.0
        self.hosts: dict[PeerId, SimulatedHost] = {}
        """Those in the directory, alive or not."""
        self.measures = Measures()
        self._rule = rule
        self._load_s = load_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._trace = hashlib.sha256()
        self._snapshot: Snapshot | None = None
        self._snapshot_at = -math.inf
        self._changed = True
        """Whether anything happened since the last snapshot,"""
        self._unmeasured = True
        """and since the last measurement."""
        self.measures.gaps = [0] * blocks
        self._is_gap = [True] * blocks
        self.after(MEASURE_S, self._measure)

    @property
    def trace(self) -> str:
        """Hash of all that happened."""
        return self._trace.hexdigest()

    # ---- events ---------------------------------------------------------------------------------

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._events, (self.now + delay_s, self._number, event))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heappop(self._events)
            event()
        self.now = until

    def _happened(self, what: str, host: SimulatedHost, *details: object) -> None:
        self._changed = self._unmeasured = True
        self._trace.update(f"{self.now!r} {what} {host.id} {details}\n".encode())

    # ---- hosts ----------------------------------------------------------------------------------

    def join(self, peer: Peer, lifetime_s: float = math.inf, *, silent: bool = False) -> SimulatedHost:
        """A host joins now and leaves after ``lifetime_s``."""
        host = SimulatedHost(peer)
        self.measures.joins += 1
        host.span = self._rule.join(self.snapshot(), host, self.rng)
        self.hosts[host.id] = host
        self._happened("joins", host, host.span)
        self.after(TIMING.intent_s * self.rng.uniform(0.9, 1.1), lambda: self._settle(host))
        if lifetime_s < math.inf:
            self.after(lifetime_s, lambda: self.leave(host, silent=silent))
        return host

    def place(self, peers: Iterable[Peer]) -> list[SimulatedHost]:
        """Hosts that joined long ago, one after another, and serve."""
        placed = []
        for peer in peers:
            host = SimulatedHost(peer)
            host.span = self._rule.join(self.snapshot(fresh=True), host, self.rng)
            host.is_settled = host.serves = True
            self.hosts[host.id] = host
            self._happened("serves", host, host.span)
            self._look_later(host)
            placed.append(host)
        return placed

    def leave(self, host: SimulatedHost, *, silent: bool) -> None:
        """A host leaves now; silently, its record stays until it expires."""
        if not host.alive:
            return
        host.alive = False
        self.measures.leaves += 1
        self._happened("leaves", host, silent)
        if silent:
            left_s = TIMING.record_s - self.rng.uniform(0, TIMING.announce_s)
            self.after(left_s, lambda: self._forget(host))
        else:
            self._forget(host)

    def _forget(self, host: SimulatedHost) -> None:
        self._happened("is forgotten", host)
        self.hosts.pop(host.id, None)

    def _settle(self, host: SimulatedHost) -> None:
        """The host has seen the intents of others, and loads its blocks."""
        if host.alive:
            host.span = self._rule.join(self.snapshot(), host, self.rng)
            host.is_settled = True
            self._happened("loads", host, host.span)
            self.after(self._loading_s(), lambda: self._serve(host))

    def _serve(self, host: SimulatedHost) -> None:
        if host.alive:
            host.serves = True
            self._happened("serves", host, host.span)
            self._look_later(host)

    def _loading_s(self) -> float:
        return self._load_s * self.rng.uniform(0.5, 1.5)

    # ---- moves ----------------------------------------------------------------------------------

    def _look_later(self, host: SimulatedHost) -> None:
        delay_s = self._rule.look_s(self.rng)
        if delay_s < math.inf:
            self.after(delay_s, lambda: self._look(host))

    def _look(self, host: SimulatedHost) -> None:
        if not host.alive:
            return
        if host.move is None and host.serves:
            host.move = self._rule.look(self.snapshot(), host, self.now, self.rng)
            if host.move is not None:
                self._begin(host, host.move)
        self._look_later(host)

    def _begin(self, host: SimulatedHost, move: Relocation) -> None:
        self.measures.moves += 1
        self.measures.repairs += move.fills_gap
        host.moves += 1
        self._happened("moves", host, host.span, move)
        if self._rule.stops_to_move:
            host.serves = False
            host.span = move.start, move.end
            host.move = None
            self.after(self._loading_s(), lambda: self._serve_again(host))
        else:
            self.after(self._loading_s(), lambda: self._loaded(host, move, self.now + GIVE_UP_S))

    def _serve_again(self, host: SimulatedHost) -> None:
        if host.alive:
            host.serves = True
            self._happened("serves", host, host.span)

    def _loaded(self, host: SimulatedHost, move: Relocation, until: float) -> None:
        """The host has both its old and its new blocks."""
        if not host.alive or host.span is None:
            return
        old = host.claim(host.span, settled=True)
        left = set(range(*host.span)) - set(range(move.start, move.end))
        claims = self._claims(other for other in self.hosts.values() if other.has(left))[1]
        look = Look(self._model(claims), old, host.peer.length)
        if move.fills_gap or is_confirmed(look, move, blocks_to_leave(look, move, kept=move.span)):
            host.span, host.move = (move.start, move.end), None
            self._happened("has moved", host, host.span)
        elif self.now < until:
            self.after(RETRY_S, lambda: self._loaded(host, move, until))
        else:
            host.move = None
            self._happened("stays", host, host.span)

    # ---- the directory --------------------------------------------------------------------------

    def snapshot(self, *, fresh: bool = False) -> Snapshot:
        """What hosts read now. It is up to ``SNAPSHOT_S`` old."""
        if self._snapshot is None or (
            self._changed and (fresh or self.now >= self._snapshot_at + SNAPSHOT_S)
        ):
            joining, serving = self._sample()
            self._snapshot = Snapshot(joining, serving, self._model(serving))
            self._snapshot_at, self._changed = self.now, False
        return self._snapshot

    def _model(self, claims: list[Claim]) -> ServedModel:
        return ServedModel(b"model", "model", self.blocks, 1.0, claims)

    def _sample(self) -> tuple[list[Claim], list[Claim]]:
        """The claims of the hosts that others know."""
        chosen = list(self.hosts.values())
        if len(chosen) <= SAMPLE:
            return self._claims(chosen)
        sample = self.rng.sample(chosen, SAMPLE)
        claims = self._claims(sample)
        rare = {block for block, count in enumerate(holders(claims[1], self.blocks)) if not count}
        if rare:
            known = {host.id for host in sample}
            sample += [host for host in chosen if host.id not in known and host.has(rare)]
            claims = self._claims(sample)
        return claims

    def _claims(self, hosts: Iterable[SimulatedHost]) -> tuple[list[Claim], list[Claim]]:
        """The claims of ``hosts``, as in a snapshot."""
        joining, serving = [], []
        for host in hosts:
            if host.span is None:
                continue
            serving.append(host.claim(host.span, settled=host.serves))
            if host.move is None:
                joining.append(host.claim(host.span, settled=host.is_settled))
            else:
                target = host.move.start, host.move.end
                serving.append(host.claim(target, settled=False))
                joining.append(host.claim(target, settled=True))
        return joining, serving

    # ---- measurements ---------------------------------------------------------------------------

    def serving(self) -> list[SimulatedHost]:
        return [host for host in self.hosts.values() if host.alive and host.serves]

    def _measure(self) -> None:
        measures = self.measures
        if self._unmeasured:
            self._measure_anew()
            self._unmeasured = False
        else:
            for figures in (measures.hosts, measures.coverage, measures.of_optimum, measures.weakest):
                figures.append(figures[-1])
        measures.times.append(self.now)
        measures.gaps = [missing + gap for missing, gap in zip(measures.gaps, self._is_gap, strict=True)]
        measures.host_s += MEASURE_S * measures.hosts[-1]
        self.after(MEASURE_S, self._measure)

    def _measure_anew(self) -> None:
        measures = self.measures
        alive = self.serving()
        supply = Supply(self.blocks)
        for host in alive:
            if host.span is not None:
                supply.add(*host.span, host.peer.speed)
        # A host that is between two spans could serve, too.
        idle = sum(
            host.peer.speed for host in self.hosts.values() if host.alive and host.moves and not host.serves
        )
        rates = supply.rates()
        best = supply.mean + idle / self.blocks
        self._is_gap = [not rate for rate in rates]
        measures.hosts.append(len(alive))
        measures.coverage.append(sum(map(bool, rates)) / self.blocks)
        measures.of_optimum.append(supply.throughput() / best if best else 0.0)
        measures.weakest.append(min(rates) / (sum(rates) / self.blocks) if any(rates) else 0.0)
