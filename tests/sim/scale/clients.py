"""Clients of a simulated swarm: each chooses chains with the real search on its own pings and
measurements; sessions are flows.

A host computes steps one after another at its speed. Steps wait only at hosts that have as much
work as they can do. (This is a fluid model: batches of steps absorb what is random.) The waits W_h
and rates X_k are an equilibrium of client k, whose chain has the delay Z_k and the service times
D_kh:

    X_k = 1 / (Z_k + sum over its hosts h of (D_kh + W_h))
    sum over k of X_k D_kh <= 1, and W_h > 0 only where that is 1
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from swarmnet_client.hosts.exclusions import Exclusions
from swarmnet_client.hosts.pings import PINGED_HOSTS, drawn
from swarmnet_node.engine.counters import BUSY_S
from swarmnet_protocols.directory.host_announcements import WANTED
from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_search import find_chain, uncovered
from swarmnet_protocols.routing.chain_view import Hop, View, credible
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.routing.measured_speed import Speeds
from swarmnet_protocols.routing.throughput import Claim, throughput
from tests.sim.scale.population import Peer, Place, delay_s, random_place

ROUND_S = 5.0
"""Seconds between two rounds, in each of which some clients end their sessions and begin others."""
SESSION_ROUNDS = 9
"""Mean rounds of a session."""
MAX_ITERATIONS = 1000
STEPS_MEASURED = 1
"""Steps of a round whose times a client notes, of the many that it makes."""

Draw = Callable[[Collection[HostInfo], Set[PeerId], random.Random], Sequence[HostInfo]]


def first_by_id(hosts: Collection[HostInfo], _: Set[PeerId], __: random.Random) -> list[HostInfo]:
    """The hosts that clients pinged before they drew them at random."""
    return sorted(hosts, key=lambda host: host.peer)[:PINGED_HOSTS]


@dataclass
class Client:
    place: Place
    rng: random.Random
    speeds: Speeds = field(default_factory=Speeds)
    exclusions: Exclusions = field(default_factory=Exclusions)
    known: dict[PeerId, HostInfo] = field(default_factory=dict)
    """The hosts that it read from the directory."""
    pinged: list[HostInfo] = field(default_factory=list)
    chain: list[Hop] = field(default_factory=list)
    step_s: float = 0.0


@dataclass
class Hosted:
    """A host and the blocks [start, end) that it serves."""

    peer: Peer
    start: int
    end: int

    @property
    def info(self) -> HostInfo:
        router = self.peer.place.router
        step_s = (self.end - self.start) / self.peer.announced
        return HostInfo(
            self.peer.peer,
            self.start,
            self.end,
            step_s,
            is_open=router == "open",
            is_symmetric=router == "symmetric",
            coordinate=self.peer.place.coordinate,
        )


class Clients:
    """Clients with one session each, over hosts that keep their blocks."""

    def __init__(
        self, hosts: Sequence[Hosted], count: int, seed: int, *, blocks: int, draw: Draw = drawn
    ) -> None:
        self.rng = random.Random(seed)
        self.blocks = blocks
        self.hosts = {host.peer.peer: host for host in hosts}
        self.infos = {peer: host.info for peer, host in self.hosts.items()}
        self.clients = [
            Client(random_place(self.rng), random.Random(self.rng.random())) for _ in range(count)
        ]
        self.work: dict[PeerId, float] = dict.fromkeys(self.hosts, 0.0)
        """Blocks per second of each host in the last round;"""
        self.minute: dict[PeerId, float] = dict(self.work)
        """and averaged over the last minute."""
        self.tokens_per_s = 0.0
        self.slanderers: Set[PeerId] = frozenset()
        """Hosts that report to clients that they do not reach the next host of a chain,"""
        self.slandered: Set[PeerId] = frozenset()
        """if it is one of these."""
        self.reports = 0
        """Such reports."""
        self._index = {peer: index for index, peer in enumerate(self.hosts)}
        self._wait_s = np.zeros(len(self.hosts))
        self._busy = dict.fromkeys(self.hosts, 0.0)
        self._now = 0.0
        for client in self.clients:
            client.known = self._sample(client.rng)
            client.pinged = list(draw(client.known.values(), frozenset(), client.rng))

    def run(self, rounds: int) -> None:
        """In the first round all clients choose a chain, on an idle swarm."""
        for _ in range(rounds):
            for client in self.clients:
                if not client.chain or self.rng.random() < 1 / SESSION_ROUNDS:
                    client.chain = self._route(client)
            self._settle()
            self._report()
            newest = 1 - math.exp(-ROUND_S / 60)
            for peer, work in self.work.items():
                self.minute[peer] += newest * (work - self.minute[peer])
            for client in self.clients:
                for _ in range(STEPS_MEASURED):
                    view = credible(self._view(client))
                    step_s = client.step_s * client.rng.uniform(0.9, 1.1)
                    client.speeds.measured(view, client.chain, step_s, self._now)
            self._now += ROUND_S

    @property
    def served(self) -> int:
        """Hosts with work."""
        return sum(work > 0 for work in self.work.values())

    @property
    def busiest_tenth(self) -> float:
        """Share of all work that the busiest tenth of the hosts does."""
        work = sorted(self.work.values(), reverse=True)
        return sum(work[: max(round(len(work) / 10), 1)]) / (sum(work) or 1.0)

    def _sample(self, rng: random.Random) -> dict[PeerId, HostInfo]:
        """The hosts that a client reads: all of a small swarm; of a large one a random sample, and
        the hosts of each block that the sample lacks."""
        if len(self.infos) <= WANTED:
            return self.infos
        known = {peer: self.infos[peer] for peer in rng.sample(list(self.infos), WANTED)}
        missing = uncovered(known.values(), (0, self.blocks))
        rare = {block for gap in missing for block in range(*gap)}
        if rare:
            known |= {
                peer: info
                for peer, info in self.infos.items()
                if not rare.isdisjoint(range(info.start, info.end))
            }
        return known

    def optimum(self) -> float:
        """Tokens per second that no choice of chains exceeds: by the hosts' speeds, and by each
        client's own delay without any queue.

        Of the delays, each client's best chain of its hosts is found with all delays known.
        """
        claims = [Claim(peer, host.start, host.end, host.peer.speed) for peer, host in self.hosts.items()]
        sample = self.clients[:: max(len(self.clients) // 10, 1)]
        alone = [self._alone_s(client) for client in sample]
        by_delay = len(self.clients) * sum(1 / step_s for step_s in alone) / len(alone)
        return min(throughput(claims, self.blocks), by_delay)

    def _alone_s(self, client: Client) -> float:
        delays = {peer: delay_s(client.place, host.peer.place) for peer, host in self.hosts.items()}
        speeds = {peer: 1 / host.peer.speed for peer, host in self.hosts.items()}
        view = View(list(self.infos.values()), delays, block_s=speeds)
        chain = find_chain(view, (0, self.blocks), client.rng)
        return min(self._delay_s(client, chain) + sum(self._service_s(hop) for hop in chain), client.step_s)

    def _view(self, client: Client) -> View:
        pinged = {host.peer: self.hosts[host.peer] for host in client.pinged}
        return View(
            list(client.known.values()),
            {peer: delay_s(client.place, host.peer.place) for peer, host in pinged.items()},
            {peer: float(self._wait_s[self._index[peer]]) for peer in pinged},
            block_s=client.speeds.at(client.known, self._now),
            relayed=frozenset(peer for peer, info in client.known.items() if not info.is_open),
            symmetric=frozenset(peer for peer, info in client.known.items() if info.is_symmetric),
            coordinates={
                peer: host.coordinate for peer, host in client.known.items() if host.coordinate is not None
            },
            own=client.place.coordinate,
            unreachable=client.exclusions.separated(self._now),
            reporters=client.exclusions.reporters(self._now),
            busy={peer: self._busy[peer] for peer in pinged},
        )

    def _route(self, client: Client) -> list[Hop]:
        try:
            chain = find_chain(self._view(client), (0, self.blocks), client.rng)
            while (at := self._slander(chain)) is not None:
                chain = self._replaced(client, chain, at)
        except NoRoute:
            return []
        return chain

    def _slander(self, chain: Sequence[Hop]) -> int | None:
        """The index of the first hop that reports that it does not reach the next one."""
        for at, (one, other) in enumerate(pairwise(chain)):
            if one.peer in self.slanderers and other.peer in self.slandered:
                return at
        return None

    def _replaced(self, client: Client, chain: Sequence[Hop], at: int) -> list[Hop]:
        """The chain in which the hop at index ``at``, which reported the next one, is replaced;
        that one too if another hop has reported it before."""
        is_repeated = client.exclusions.separate(chain[at].peer, chain[at + 1].peer, self._now)
        self.reports += 1
        view = replace(self._view(client), hops=[*chain[:at], *chain[at + 1 + is_repeated :]])
        return find_chain(view, (0, self.blocks), client.rng)

    def _service_s(self, hop: Hop) -> float:
        return (hop.end - hop.start) / self.hosts[hop.peer].peer.speed

    def _delay_s(self, client: Client, chain: Sequence[Hop]) -> float:
        places = [client.place, *(self.hosts[hop.peer].peer.place for hop in chain), client.place]
        return sum(delay_s(one, other) for one, other in pairwise(places))

    def _report(self) -> None:
        """The shares of time that hosts report as busy, averaged as engines do. A host that lies
        about its speed reports that it has no work."""
        newest = 1 - math.exp(-ROUND_S / BUSY_S)
        sessions = Counter(hop.peer for client in self.clients for hop in client.chain)
        for peer, host in self.hosts.items():
            share = 0.0 if host.peer.announced > host.peer.speed else self.work[peer] / host.peer.speed
            self._busy[peer] += newest * (
                min(share, sessions[peer] / (sessions[peer] + 1)) - self._busy[peer]
            )

    def _settle(self) -> None:
        """The fixed point of the module's equations."""
        routed = [client for client in self.clients if client.chain]
        rows = [
            (number, self._index[hop.peer], self._service_s(hop))
            for number, client in enumerate(routed)
            for hop in client.chain
        ]
        self.work = dict.fromkeys(self.hosts, 0.0)
        self.tokens_per_s = 0.0
        if not rows:
            return
        client_of, host_of = np.array([row[:2] for row in rows]).T
        service = np.array([row[2] for row in rows])
        delay = np.array([self._delay_s(client, client.chain) for client in routed])
        alone = delay + np.bincount(client_of, service, len(routed))
        visits = np.bincount(host_of, minlength=len(self.hosts))
        usual = np.bincount(host_of, service, len(self.hosts)) / np.maximum(visits, 1)
        wait = np.zeros(len(self.hosts))
        for _ in range(MAX_ITERATIONS):
            step = alone + np.bincount(client_of, wait[host_of], len(routed))
            busy = np.bincount(host_of, service / step[client_of], len(self.hosts))
            new = np.maximum((wait + usual) * np.sqrt(busy) - usual, 0.0)
            is_settled = np.abs(new - wait).max() < 1e-4 * step.min()
            wait = new
            if is_settled:
                break
        self._wait_s = wait
        for client, step_s in zip(routed, step, strict=True):
            client.step_s = float(step_s)
        self.tokens_per_s = float((1 / step).sum())
        for (peer, host), share in zip(self.hosts.items(), busy, strict=True):
            self.work[peer] = float(share) * host.peer.speed
