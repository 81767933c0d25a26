"""A simulated swarm, shown by the real dashboard.

    python -m tests.support.dashboard.recorded_swarm --port 8090 --kind full

Peers join and fail, tokens flow and a job makes progress as its clock advances. All of it follows
from one seed; nothing is computed.
"""

import argparse
import asyncio
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client import Histogram

from swarmnet.dashboard import feed as feeds
from swarmnet.dashboard import server
from swarmnet.dashboard.feed import Feed
from swarmnet.dashboard.history import DAY_S, MONTH_S, History
from swarmnet.dashboard.observing.counts import Counts, Totals, Work
from swarmnet.dashboard.observing.observations import PeerObservation, Snapshot, SwarmInfo
from swarmnet.dashboard.sampling import MODELS, PEERS, JobPoint, ModelSample, PeerSample
from swarmnet.web.middleware import AccessPolicy
from swarmnet_node.engine.counters import cumulative_counts, node_histogram
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.directory.node_reports import BOUNDS_S
from swarmnet_protocols.machine.clock import Clock, wall_clock
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from tests.support.dashboard.recorded_peers import (
    SCRIPTS,
    Chain,
    ExpertPeers,
    Host,
    hash_of,
    loss_after,
    training,
)

KINDS = ("full", "empty", "broken", "large", "experts", "missing")
NAMES = (
    "attic",
    "Küche",
    "lab-3",
    "",
    "",
    "noor's laptop",
    "",
    "basement",
    "",
    "gpu-on-loan",
    "",
    "zürich-2",
)


@dataclass(frozen=True)
class Shape:
    """The size of a swarm: hosts of a large and of a small model, blocks of the large one, workers
    of a job."""

    hosts: int
    small_hosts: int = 0
    blocks: int = 126
    workers: int = 0
    gap: tuple[int, int] | None = None
    """Blocks of the large model that have no host."""
    expert_peers: int = 0
    lost_expert_peers: int = 0


SHAPES = {
    "full": Shape(hosts=22, small_hosts=4, workers=5),
    "empty": Shape(hosts=0),
    "broken": Shape(hosts=9, small_hosts=2, workers=1, gap=(57, 71)),
    "large": Shape(hosts=480, small_hosts=20, workers=12),
    "experts": Shape(hosts=4, blocks=61, workers=1, expert_peers=40),
    "missing": Shape(hosts=4, blocks=61, workers=1, expert_peers=40, lost_expert_peers=3),
}


class RecordedSwarm:
    """A ``SnapshotSource``. Each snapshot first advances the simulation to the clock."""

    def __init__(self, kind: str, clock: Clock, *, seed: int = 0) -> None:
        self.shape = SHAPES[kind]
        self._clock = clock
        self._rng = random.Random(f"{kind}/{seed}")
        self._began_s = self._now_s = clock()
        self._totals = Totals()
        self.large = CatalogModel(hash_of("large"), "meta-llama/Llama-3.1-405B-Instruct", self.shape.blocks)
        self.small = CatalogModel(hash_of("small"), "smollm2-135m-instruct", 30)
        if self.shape.expert_peers:
            self.large = CatalogModel(hash_of("experts"), "deepseek-ai/DeepSeek-V3", self.shape.blocks)
        lost = frozenset(range(self.shape.lost_expert_peers))
        self.experts = ExpertPeers(self.large, self.shape.expert_peers, lost)
        self.hosts: dict[PeerId, Host] = {}
        self._chains: list[Chain] = []
        self._numbers = iter(range(1_000_000))
        self.done_s: float | None = None
        """The time at which the job was done. None until then."""
        for _ in range(self.shape.hosts):
            self._join(self.large, age_s=self._rng.expovariate(1 / 90_000))
        for _ in range(self.shape.small_hosts):
            self._join(self.small, age_s=self._rng.expovariate(1 / 20_000))
        for host, name in zip(self.hosts.values(), SCRIPTS, strict=False):
            host.name = name
        if self.shape.expert_peers:
            for host in self.hosts.values():
                host.span, host.trunk = (0, self.shape.blocks), self.experts.trunk()
        others = list(self.hosts.values())[4 if self.shape.expert_peers else 3 :]
        for host, state in zip(others, ("leaving", "paused"), strict=False):
            host.state = state
        for step in range(3):
            self._move(self._began_s - 6 + 2 * step, 2.0)

    def snapshot(self) -> Snapshot:
        """The snapshot of an observer now."""
        now_s = self._clock()
        if now_s - self._now_s >= 1.0:
            self._move(now_s, now_s - self._now_s)
        jobs, workers = training(self.shape.workers, self._began_s, now_s, self.done_s)
        return Snapshot(
            now_s,
            self._began_s,
            SwarmInfo(
                "neighbours", hash_of("swarm").hex(), "certificate", Identity.from_seed(b"observer").peer_id
            ),
            models=tuple(
                model
                for model in (self.large, self.small)
                if any(host.model == model for host in self.hosts.values())
            ),
            peers=[
                *(self._observation(host) for host in self.hosts.values()),
                *workers,
                *self.experts.observations(self._began_s, now_s),
            ],
            jobs=jobs,
            totals=dict(self._totals.models),
            work=dict(self._totals.peers),
        )

    def kill(self, peer: PeerId) -> None:
        """Crash a host; its sessions continue on other hosts."""
        host = self.hosts[peer]
        host.died_s = self._now_s
        self._totals.add_failure(host.model.manifest)
        for chain in [chain for chain in self._chains if host in chain.hops]:
            chain.ends_s = self._now_s
            for hop in chain.hops:
                if hop is not host:
                    hop.links_lost += 1
                    hop.rebuilt += self._rng.random() < 0.5
                    break

    def add(self, name: str = "") -> PeerId:
        """Add a host that starts now."""
        return self._join(self.large, age_s=0.0, name=name).peer

    # ---- the simulation -------------------------------------------------------------------------

    def _join(self, model: CatalogModel, *, age_s: float, name: str | None = None) -> Host:
        rng, number = self._rng, next(self._numbers)
        speed = rng.choice((0.4, 1.0, 1.0, 1.7, 3.2))
        length = max(3, min(model.blocks, round(model.blocks * (0.06 + 0.08 * speed * rng.random()))))
        if self.shape.hosts < 100:
            length = min(model.blocks, 2 * length)
        host = Host(
            Identity.from_seed(f"host {number}".encode()).peer_id,
            model,
            self._span(model, length, number),
            rng.choice(NAMES) if name is None else name,
            self._now_s - age_s,
            speed,
            rng.choice((0.004, 0.012, 0.03, 0.07, 0.14)) * (0.8 + 0.4 * rng.random()),
            rng.random() < 0.2,
            rng.choice(("0.1.0", "0.1.0", "0.1.0", "0.0.9")),
            positions=rng.random() * age_s * 20 * speed,
        )
        if age_s < 30 and self._now_s > self._began_s:
            host.state = "joining"
        self.hosts[host.peer] = host
        return host

    def _span(self, model: CatalogModel, length: int, number: int) -> tuple[int, int]:
        if model == self.small:
            return (0, 15) if number % 2 else (15, 30)
        last = model.blocks - length
        start = round(number * 0.381966 * model.blocks) % (last + 1) if last else 0
        if number % 5 == 0:
            start = 0
        elif number % 5 == 1:
            start = last
        gap = self.shape.gap
        if gap is not None and model == self.large and start < gap[1] and start + length > gap[0]:
            return (
                (max(0, gap[0] - length), gap[0])
                if number % 2
                else (gap[1], min(model.blocks, gap[1] + length))
            )
        return start, start + length

    def _move(self, now_s: float, elapsed_s: float) -> None:
        rng = self._rng
        self._now_s = now_s
        for host in list(self.hosts.values()):
            if host.died_s is not None and now_s - host.died_s > 900:
                del self.hosts[host.peer]
            elif host.trunk is not None and host.trunk.missing:
                host.state = "joining"
            elif host.state == "joining" and now_s - host.born_s > 12:
                host.state = "online"
        alive = [host for host in self.hosts.values() if host.died_s is None]
        if len(alive) > 8 and rng.random() < 0.01 * elapsed_s:
            self.kill(rng.choice(alive).peer)
        if self.shape.hosts and len(alive) < self.shape.hosts + 6 and rng.random() < 0.012 * elapsed_s:
            self._join(self.large, age_s=0.0)
        self._chains = [chain for chain in self._chains if chain.ends_s > now_s]
        for model in (self.large, self.small):
            wanted = sum(host.model == model for host in alive) // 3
            while sum(chain.hops[0].model == model for chain in self._chains) < wanted and self._begin(model):
                pass
        for host in alive:
            host.sessions = sum(host in chain.hops for chain in self._chains)
            for flow in host.flows.values():
                flow[0] = 0
        for chain in self._chains:
            chain.flow(elapsed_s, self._rng)
        for host in alive:
            host.report(now_s)
            if host.before is not None and host.newest is not None:
                before, newest = host.before, host.newest
                self._totals.add(host.peer, before.report, newest.report, newest.at_s - before.at_s)

    def _begin(self, model: CatalogModel) -> bool:
        """A client opens a session; False if no chain covers the model."""
        hops: list[Host] = []
        block = 0
        online = [
            host
            for host in self.hosts.values()
            if host.model == model and host.died_s is None and host.state == "online"
        ]
        while block < model.blocks:
            able = [host for host in online if host.span[0] <= block < host.span[1]]
            if not able:
                return False
            hop = self._rng.choice(sorted(able, key=lambda host: -host.span[1])[:4])
            hops.append(hop)
            block = hop.span[1]
        rate = 1 / sum(hop.delay_s / 4 + 0.004 * (hop.span[1] - hop.span[0]) / hop.speed / 10 for hop in hops)
        self._chains.append(Chain(hops, min(rate, 45.0), self._now_s + self._rng.uniform(8, 90)))
        hops[-1].firsts.observe(len(hops) / rate * self._rng.uniform(2, 9))
        return True

    def _observation(self, host: Host) -> PeerObservation:
        delay_s = round(host.delay_s * self._rng.uniform(0.97, 1.03), 4)
        return host.observation(self._began_s, self._now_s, delay_s)


@contextmanager
def recorded_history(swarm: RecordedSwarm, folder: Path, now_s: float) -> Iterator[History]:
    """A month of history of a swarm."""
    rng = random.Random(7)
    with History.open(folder) as history:
        snapshot = swarm.snapshot()
        if snapshot.models:
            for step_s, kept_s in (
                (MODELS.coarse_s, MONTH_S),
                (MODELS.fine_s, DAY_S),
            ):
                times = range(int(now_s - kept_s), int(now_s), step_s)
                for model in ("", *(each.manifest.hex() for each in snapshot.models)):
                    history.add(models=[_model_sample(model, at_s, step_s, swarm, rng) for at_s in times])
                history.downsample(now_s)
            peers = [seen.peer for seen in snapshot.peers][:40]
            of_peers = [
                PeerSample(
                    peer,
                    swarm.hosts[peer].name or None if peer in swarm.hosts else None,
                    at_s,
                    PEERS.fine_s,
                    _work(swarm.hosts.get(peer), rng),
                    0.02 + 0.01 * rng.random(),
                    PEERS.fine_s * (rng.random() > 0.05),
                )
                for peer in peers
                for at_s in range(int(now_s - DAY_S), int(now_s), PEERS.fine_s)
            ]
            history.add(peers=of_peers)
        for job in snapshot.jobs:
            history.add(
                jobs=[
                    JobPoint(
                        job.id,
                        now_s - 60 * (212 - number),
                        number,
                        number * 65_536 * 3,
                        number * 45_000_000,
                        loss_after(number),
                        loss_after(number) + 0.04 if number % 5 == 0 else None,
                        5,
                    )
                    for number in range(212)
                ]
            )
        history.downsample(now_s)
        yield history


def _work(host: Host | None, rng: random.Random) -> Work:
    """The work of a host, or of a worker, in one sample."""
    if host is None:
        return Work(block_positions=rng.randrange(60_000), samples=rng.randrange(20))
    positions = rng.randrange(9000)
    return Work(positions, positions * (host.span[1] - host.span[0]))


def _model_sample(
    model: str, at_s: int, step_s: int, swarm: RecordedSwarm, rng: random.Random
) -> ModelSample:
    wave = 1 + 0.5 * math.sin(at_s / DAY_S * 2 * math.pi) + 0.15 * rng.random()
    tokens = round(40 * wave * step_s)
    firsts, times = (node_histogram(name, "", BOUNDS_S) for name in ("firsts", "times"))
    for _ in range(8):
        firsts.observe(rng.lognormvariate(-0.2, 0.5) * wave)
        times.observe(rng.lognormvariate(-2.6, 0.4) * wave)
    failures = int(rng.random() < 0.04)
    counts = Counts(tokens, tokens, failures, failures, _each(firsts), _each(times))
    return ModelSample(
        model, at_s, step_s, counts, swarm.shape.hosts * (0.8 + 0.1 * wave), 1 + int(wave), round(6 * wave)
    )


def _each(histogram: Histogram) -> tuple[int, ...]:
    counts = cumulative_counts(histogram)
    return tuple(now - before for before, now in zip([0, *counts], counts, strict=False))


async def serve_recorded(kind: str, port: int) -> None:
    """Serve a swarm until cancelled."""
    swarm = RecordedSwarm(kind, wall_clock)
    with TemporaryDirectory() as folder, recorded_history(swarm, Path(folder), wall_clock()) as history:
        async with (
            Feed(swarm, history).running() as feed,
            server.serve(feed, "127.0.0.1", port, AccessPolicy()) as endpoint,
        ):
            print(endpoint.url, flush=True)
            await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("--kind", choices=KINDS, default="full")
    parser.add_argument("--tick", type=float, default=feeds.TICK_S, help="seconds between two states")
    arguments = parser.parse_args()
    feeds.TICK_S = arguments.tick
    with suppress(KeyboardInterrupt):
        asyncio.run(serve_recorded(arguments.kind, arguments.port))


if __name__ == "__main__":
    main()
