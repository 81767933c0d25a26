"""The parts of a recorded swarm: hosts, chains of sessions over them, workers of a job, and the
reports of each."""

import hashlib
import math
import random
from dataclasses import dataclass, field

from prometheus_client import Histogram

from swarmnet.dashboard.observing.observations import JobObservation, PeerObservation, TimedReport
from swarmnet_node.engine.counters import cumulative_counts, node_histogram, total
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.directory.node_reports import BOUNDS_S, check, describe_experts
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.wire import report_pb2
from swarmnet_protocols.wire.records_pb2 import HostRecord, HostState

SCRIPTS = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=1">',
    "{{7*7}} ${7*7} &lt;b&gt;",
)


def state_of(name: str) -> HostState:
    """The state of a host with this name."""
    return HostState.Value(f"HOST_STATE_{name.upper()}")


@dataclass
class Host:
    """One host with its counters, which grow as the swarm's clock advances."""

    peer: PeerId
    model: CatalogModel
    span: tuple[int, int]
    name: str
    born_s: float
    speed: float
    delay_s: float
    relayed: bool
    version: str
    state: str = "online"
    sessions: int = 0
    positions: float = 0.0
    answered: float = 0.0
    rebuilt: int = 0
    links_lost: int = 0
    firsts: Histogram = field(default_factory=lambda: node_histogram("firsts", "", BOUNDS_S))
    tokens: Histogram = field(default_factory=lambda: node_histogram("tokens", "", BOUNDS_S))
    flows: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    trunk: report_pb2.TrunkReport | None = None
    """The experts of its blocks that peers compute."""
    died_s: float | None = None
    before: TimedReport | None = None
    newest: TimedReport | None = None

    def report(self, now_s: float) -> None:
        """Make a report with the present values of the counters."""
        cache_bytes = min(self.sessions * (150 << 20), 8 << 30)
        record = HostRecord(
            manifest=self.model.manifest,
            start=self.span[0],
            end=self.span[1],
            state=state_of(self.state),
            precision="bfloat16" if self.speed >= 1 else "float32",
            arithmetic="torch" if self.speed >= 1 else "exact-1",
            step_s=0.002 * (self.span[1] - self.span[0]) / self.speed,
            token_s=0.0004 * (self.span[1] - self.span[0]) / self.speed,
            cache_bytes_free=(8 << 30) - cache_bytes,
            sessions=self.sessions,
        )
        host = report_pb2.HostReport(
            record=record,
            model=self.model.name,
            total_blocks=self.model.blocks,
            queue_s=0.0 if self.sessions < 3 else 0.01 * self.sessions / self.speed,
            cache_bytes=cache_bytes,
            cache_bytes_limit=8 << 30,
            forwards=int(self.positions / 2),
            positions=int(self.positions),
            answered=int(self.answered),
            rebuilt=self.rebuilt,
            links_lost=self.links_lost,
            first_tokens=report_pb2.Times(counts=cumulative_counts(self.firsts), total_s=total(self.firsts)),
            token_times=report_pb2.Times(counts=cumulative_counts(self.tokens), total_s=total(self.tokens)),
            flows=[
                report_pb2.Flow(upstream=up, downstream=down, sessions=int(flow[0]), positions=int(flow[1]))
                for (up, down), flow in list(self.flows.items())[-64:]
            ],
        )
        if self.trunk is not None:
            self.trunk.rows = int(8 * self.positions)
            host.trunk.CopyFrom(self.trunk)
        uptime_s = now_s - self.born_s
        node = report_pb2.NodeReport(
            version=self.version,
            public_name=self.name,
            uptime_s=uptime_s,
            host=host,
            given=report_pb2.Given(
                block_positions=int(self.positions) * (self.span[1] - self.span[0]),
                clients=7,
                sent_bytes=int(self.positions) * 9000,
                received_bytes=int(self.positions) * 9000,
                active_s=uptime_s / 3,
                kwh=uptime_s / 3600 * 0.02,
                since=self.born_s,
            ),
        )
        check(node)
        self.before, self.newest = self.newest, TimedReport(node, now_s)

    def observation(self, began_s: float, now_s: float, delay_s: float) -> PeerObservation:
        """The observation of the host by an observer that started at ``began_s``."""
        announced = HostInfo(
            self.peer,
            *self.span,
            step_s=0.002,
            addresses=("/p2p-circuit",) if self.relayed else ("/ip4/203.0.113.5/tcp/4001",),
            state=self.state,
            manifest=self.model.manifest,
            version=self.version,
            public_name=self.name,
            sessions=self.sessions,
        )
        return PeerObservation(
            self.peer,
            max(self.born_s, began_s),
            announced if self.died_s is None else None,
            now_s if self.died_s is None else self.died_s,
            self.newest,
            self.before,
            delay_s,
            self.died_s,
        )


@dataclass
class Chain:
    """A client's session: its hops and its speed."""

    hops: list[Host]
    tokens_per_s: float
    ends_s: float

    def flow(self, elapsed_s: float, rng: random.Random) -> None:
        """Add the tokens of ``elapsed_s`` to the counters of its hops."""
        count = self.tokens_per_s * elapsed_s * rng.uniform(0.8, 1.2)
        sides = ["", *(hop.peer for hop in self.hops), ""]
        for index, hop in enumerate(self.hops):
            hop.positions += count
            flow = hop.flows.setdefault((sides[index], sides[index + 2]), [0, 0.0])
            flow[0] += 1
            flow[1] += count
        last = self.hops[-1]
        last.answered += count
        for _ in range(min(20, max(1, round(count)))):
            last.tokens.observe(rng.lognormvariate(math.log(1 / self.tokens_per_s), 0.35))


NUM_EXPERTS = 256
DENSE = 3
"""Blocks before the first one with experts."""


@dataclass
class ExpertPeers:
    """Peers that compute the experts of ``model``, each those of one residue in every block with
    experts, and in the first half also its neighbour's."""

    model: CatalogModel
    count: int
    lost: frozenset[int] = frozenset()
    """The numbers of the peers that are not there."""

    @property
    def blocks(self) -> range:
        return range(DENSE, self.model.blocks)

    def experts_of(self, number: int, block: int) -> list[int]:
        """The experts of a block that a peer has."""
        own = [number, (number + 1) % self.count] if block % 2 else [number]
        return [expert for expert in range(NUM_EXPERTS) if expert % self.count in own]

    def trunk(self) -> report_pb2.TrunkReport:
        """The part about experts of the report of a host of all blocks that has no experts."""
        there = [number for number in range(self.count) if number not in self.lost]
        found = {
            block: {*range(NUM_EXPERTS)}.difference(*(self.experts_of(number, block) for number in there))
            for block in self.blocks
        }
        every = frozenset(range(NUM_EXPERTS))
        return report_pb2.TrunkReport(
            lacks=describe_experts(dict.fromkeys(self.blocks, every)),
            missing=describe_experts({block: frozenset(each) for block, each in found.items() if each}),
            round_trips_s=[0.0004 + 0.0001 * number for number in there],
            failed=2,
            hedged=17,
        )

    def observations(self, began_s: float, now_s: float) -> list[PeerObservation]:
        """The observation of each peer."""
        return [
            self._observation(number, began_s, now_s)
            for number in range(self.count)
            if number not in self.lost
        ]

    def _observation(self, number: int, began_s: float, now_s: float) -> PeerObservation:
        def report(at_s: float) -> TimedReport:
            experts = {block: frozenset(self.experts_of(number, block)) for block in self.blocks}
            rows = {
                (block, expert): int((at_s - began_s + 900) * 3 / (1 + (expert * 7 + block) % 29))
                for block, each in experts.items()
                for expert in each
            }
            record = HostRecord(manifest=self.model.manifest, state=state_of("online"), precision="q8_0/bf16")
            peer = report_pb2.HostReport(
                record=record,
                model=self.model.name,
                total_blocks=self.model.blocks,
                experts=describe_experts(experts, rows),
                expert_streams=2,
            )
            node = report_pb2.NodeReport(
                version="0.1.0", uptime_s=at_s - began_s + 900, public_name="", host=peer
            )
            check(node)
            return TimedReport(node, at_s)

        peer = Identity.from_seed(f"expert peer {number}".encode()).peer_id
        return PeerObservation(
            peer, began_s, newest=report(now_s), before=report(now_s - 2.0), delay_s=0.0004
        )


STAGES = 3
"""Stages of the job."""


def training(
    count: int, began_s: float, now_s: float, done_s: float | None = None
) -> tuple[list[JobObservation], list[PeerObservation]]:
    """A job with ``count`` workers, and the observation of each. All rounds are complete at
    ``done_s``, when the workers stop."""
    if not count:
        return [], []
    job, observations = hash_of("job"), []
    round = 212 + int((now_s - began_s) / 20) if done_s is None else 1000
    now_s = now_s if done_s is None else done_s
    peers = [Identity.from_seed(f"worker {number}".encode()).peer_id for number in range(count)]
    for number, peer in enumerate(peers):
        worker = report_pb2.WorkerReport(
            job=job,
            name="tiny stories, diloco",
            method="diloco",
            state="training" if done_s is None else "done",
            round=round,
            rounds=1000,
            loss=loss_after(round),
            val_loss=loss_after(round) + 0.04,
            tokens=round * 65_536 // (number + 1),
            bytes_sent=round * 9_000_000,
            bytes_received=round * 9_000_000,
            contributions=[
                report_pb2.Contribution(peer=each, rounds=round // (place + 1))
                for place, each in enumerate(peers)
            ],
            recent=report_pb2.RecentWork(
                seconds=20.0,
                compute_s=17.0 - 6 * (number % STAGES),
                tokens=65_536,
                forward_bytes=65_536 * 576,
                backward_bytes=65_536 * 588,
            ),
            stage=report_pb2.WorkerStage(
                number=number % STAGES, start=number % STAGES * 10, end=number % STAGES * 10 + 10
            ),
        )
        age_s = 5000.0 + 700 * number + now_s - began_s
        name = SCRIPTS[0] if number == 0 else ""
        report = report_pb2.NodeReport(version="0.1.0", public_name=name, uptime_s=age_s, worker=worker)
        newest = TimedReport(report, now_s)
        observations.append(PeerObservation(peer, began_s, newest=newest, delay_s=0.02, failed_at_s=done_s))
    there = tuple(peers) if done_s is None else ()
    known = JobObservation(job.hex(), "tiny stories, diloco", "diloco", 1000, there, round, stages=STAGES)
    return [known], observations


def loss_after(round: int) -> float:
    """The loss of the job after a round."""
    return 1.9 + 6 * math.exp(-round / 60) + 0.03 * math.sin(round * 1.7)


def hash_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
