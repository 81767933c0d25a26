"""Workers that average in one process and in virtual time, and the invariants of their rounds."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.training.codecs import ALIGNMENT, Codec, get_codec, result_codec
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules, aggregate, weighted_mean
from swarmnet_protocols.training.rounds.averaging import Averager
from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.round_runner import Outcome, RoundContext
from swarmnet_protocols.training.rounds.terms import RoundMember, RoundTerms
from swarmnet_protocols.wire import training_pb2 as pb
from tests.support.network.deliveries import once
from tests.support.network.memory_network import Delivery, LinkProfile, MemoryNetwork, MemoryTransport
from tests.support.network.virtual_time import run

JOB = bytes(range(32))
TIMING = RoundTiming(contribution_s=6.0, majority_s=12.0, deadline_s=18.0)
SLACK_S = 0.5
KINDS = ("hello", "contribution", "result", "report", "prepare", "propose", "vote", "decided")

IDENTITIES = {
    identity.peer_id: identity
    for identity in (Identity.from_seed(f"worker {index}".encode()) for index in range(16))
}
PEERS = tuple(IDENTITIES)

COUNT = 8 * ALIGNMENT
"""Values in a round, where nothing asks for another number."""
ROBUST = AggregationRules(aggregate=partial(aggregate, "median"), verifiable=True)

Outcomes = dict[PeerId, Outcome]


def terms_of(
    count: int,
    codec: str,
    *,
    exchange_number: int = 0,
    index: int = 0,
    members: int = 4,
) -> RoundTerms:
    """The terms of a round whose slice ``index`` has ``count`` values."""
    peers = tuple(RoundMember(peer, weight=1.0) for peer in sorted(PEERS[:members]))
    keys = tuple(IDENTITIES[member.peer].public_key for member in peers)
    slices = tuple((number * count, (number + 1) * count) for number in range(index + 1))
    reducers = tuple(range(index + 1))
    rules = AggregationRules()
    return RoundTerms(JOB, exchange_number, peers, slices, reducers, get_codec(codec), keys, rules)


@dataclass
class TrainingLab:
    """``count`` workers whose exchanges are open until ``crash``; ``average`` runs one round of
    all."""

    count: int
    seed: int = 0
    link: LinkProfile = field(
        default_factory=lambda: LinkProfile(delay_s=0.02, jitter_s=0.005, bytes_per_s=1e7)
    )
    timing: RoundTiming = TIMING
    rules: AggregationRules = field(default_factory=AggregationRules)

    def __post_init__(self) -> None:
        self.network = MemoryNetwork(random.Random(f"{self.seed}/network"), self.link)
        self.peers = sorted(PEERS[: self.count])
        self.exchanges: dict[PeerId, Averager] = {}
        self.transports: dict[PeerId, MemoryTransport] = {}
        self.crashed: list[PeerId] = []
        self._calls: dict[PeerId, asyncio.Task[Outcome]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "TrainingLab":
        for peer in self.peers:
            transport = await self._stack.enter_async_context(self.network.transport(peer))
            context = RoundContext(transport, JOB, IDENTITIES[peer].sign, self.timing, self.rules)
            self.transports[peer] = transport
            self.exchanges[peer] = await self._stack.enter_async_context(Averager(context))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    def members(self, bytes_per_s: Sequence[float] | None = None) -> list[RoundMember]:
        rates = bytes_per_s or [1e6] * self.count
        return [RoundMember(peer, (), rate) for peer, rate in zip(self.peers, rates, strict=True)]

    async def average(
        self,
        work: "Work",
        *,
        round: int = 0,
        members: Sequence[RoundMember] | None = None,
        late_s: Mapping[PeerId, float] = {},
        spread_s: float = 0.0,
        groups: Sequence[Sequence[RoundMember]] = (),
    ) -> Outcomes:
        """The outcomes of all members that did not crash."""

        async def call(peer: PeerId) -> Outcome:
            await asyncio.sleep(late_s.get(peer, 0.0))
            own = [group for group in groups if peer in {member.peer for member in group}]
            return await self.exchanges[peer].average(
                round,
                own[0] if own else members or self.members(),
                work.values[peer],
                weight=work.weights[peer],
                codec=work.codec,
                spread_s=spread_s,
                groups=groups,
            )

        self._calls = {
            peer: asyncio.create_task(call(peer)) for peer in self.peers if peer not in self.crashed
        }
        try:
            await asyncio.wait(self._calls.values())
            return {peer: task.result() for peer, task in self._calls.items() if peer not in self.crashed}
        finally:
            await cancel(*self._calls.values())

    def crash(self, peer: PeerId) -> None:
        """Crash the process of ``peer``."""
        self.crashed.append(peer)
        self.network.crash(peer)
        self._calls[peer].cancel()

    def open_streams(self) -> int:
        return sum(len(transport._streams) for transport in self.transports.values())


@dataclass
class Work:
    """The contributions of workers to a round."""

    values: dict[PeerId, torch.Tensor]
    weights: dict[PeerId, float]
    codec: Codec

    @classmethod
    def random(cls, lab: TrainingLab, size: int, codec: str = "float32", *, seed: int = 0) -> "Work":
        generator = torch.Generator().manual_seed(seed)
        values = {peer: torch.randn(size, generator=generator) for peer in lab.peers}
        weights = {peer: float(torch.rand(1, generator=generator)) + 0.5 for peer in lab.peers}
        return cls(values, weights, get_codec(codec))

    def mean(self, outcome: Outcome) -> torch.Tensor:
        """The exact mean, bit for bit, given the contributors of each slice."""
        pieces = []
        for (start, end), contributors in zip(outcome.slices, outcome.contributors, strict=True):
            rows = [
                self.codec.decode(self.codec.encode(self.values[peer][start:end]), end - start)
                for peer in contributors
            ]
            weights = torch.tensor([self.weights[peer] for peer in contributors], dtype=torch.float64)
            mean = weighted_mean(torch.stack(rows), weights)
            codec = get_codec("float32") if self.codec.sparse else result_codec(self.codec)
            pieces.append(codec.decode(codec.encode(mean), end - start))
        return torch.cat(pieces)


def check_agreement(work: Work, outcomes: Outcomes) -> None:
    """Assert that all decisions are equal, and that all members that committed have the same bits:
    the mean of the named contributors."""
    known = [outcome for outcome in outcomes.values() if not outcome.behind]
    assert len({outcome.committed for outcome in known}) <= 1
    committed = [outcome for outcome in known if outcome.committed]
    for outcome in committed:
        assert outcome.average is not None
        assert outcome.contributors == committed[0].contributors
        assert torch.equal(outcome.average, committed[0].average)  # type: ignore[arg-type]
    if committed:
        assert all(committed[0].contributors)
        assert torch.equal(work.mean(committed[0]), committed[0].average)  # type: ignore[arg-type]
    for outcome in outcomes.values():
        assert outcome.committed == (outcome.average is not None)
        assert not (outcome.committed and outcome.behind)
        assert outcome.wait_s <= TIMING.deadline_s + SLACK_S, outcome.reason


def kind_of(delivery: Delivery) -> str:
    """The kind of message that a delivery carries: "hello", "report", ...; "heartbeat" for messages
    of the accepting side."""
    return pb.ExchangeRequest.FromString(delivery.message.header).WhichOneof("kind") or "heartbeat"


def on_delivery(
    lab: TrainingLab, matches: Callable[[Delivery], bool], action: Callable[[Delivery], None]
) -> None:
    """Do ``action`` once, at the first delivery of an exchange that matches, before its receiver
    sees it."""
    once(lab.network, lambda delivery: delivery.protocol.id == EXCHANGE.id and matches(delivery), action)


def simulate(scenario: Callable[[TrainingLab], Awaitable[Any]], lab: TrainingLab) -> Any:
    """Run ``scenario``; afterwards no stream is open and no task left."""

    async def main() -> Any:
        async with lab:
            result = await scenario(lab)
            await asyncio.sleep(2 * TIMING.deadline_s)
            assert lab.open_streams() == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return run(main())


def averaged(lab: TrainingLab, work: Work) -> Outcomes:
    outcomes: Outcomes = simulate(lambda lab: lab.average(work), lab)
    check_agreement(work, outcomes)
    return outcomes


def nth(kind: str, number: int) -> Callable[[Delivery], bool]:
    """Matches the ``number``-th message of a kind, from 1."""
    seen = itertools.count(1)
    return lambda delivery: kind_of(delivery) == kind and next(seen) == number


def random_fault(lab: TrainingLab, rng: random.Random) -> Callable[[Delivery], None]:
    """A fault of a member or of a path, injected at a delivery."""

    def fault(delivery: Delivery) -> None:
        loop = asyncio.get_running_loop()
        one, other = delivery.source, delivery.target
        victim = rng.choice([one, other, rng.choice(lab.peers)])
        pause_s = rng.uniform(0.1, 15.0)
        match rng.choice(["crash", "crash", "hang", "hang", "cut", "isolate", "reset", "slow"]):
            case "crash" if victim not in lab.crashed:
                lab.crash(victim)
            case "hang":
                lab.network.hang(victim)
                loop.call_later(pause_s, lab.network.resume, victim)
            case "cut":
                lab.network.cut(one, other)
                loop.call_later(pause_s, lab.network.heal, one, other)
            case "isolate":
                lab.network.isolate(victim)
                loop.call_later(pause_s, lab.network.rejoin, victim)
            case "reset":
                lab.network.reset(one, other, delivery.protocol)
            case "slow":
                lab.network.set_link(one, other, LinkProfile(delay_s=0.5, bytes_per_s=3e3))

    return fault


def random_round(seed: str, faults: int) -> tuple[TrainingLab, Work, Outcomes]:
    rng = random.Random(seed)
    lab = TrainingLab(rng.choice([3, 3, 3, 4, 4, 5, 8]), seed=rng.getrandbits(32))
    codec = rng.choice(["float32", "bfloat16", "int8", "topk"])
    work = Work.random(lab, rng.randint(1, 4096 * lab.count), codec, seed=rng.getrandbits(32))
    for _ in range(faults):
        on_delivery(lab, nth(rng.choice(KINDS), rng.randint(1, 8)), random_fault(lab, rng))
    try:
        return lab, work, averaged(lab, work)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
