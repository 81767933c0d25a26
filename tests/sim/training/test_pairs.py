"""Workers that average in pairs wait for no third worker, over simulated links."""

import asyncio
import random
import struct

import pytest
import torch

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training import pairs
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.matchmaking.positions import OutOfSync
from swarmnet_protocols.training.methods import get_method
from swarmnet_protocols.training.pairs import Pairs
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.round_runner import Outcome, RoundContext
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.training.state_transfer import PackedState, StateServer
from tests.defences import defence, replacing
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import TimedExecutor, run

JOB = b"j" * 32
ROUND_S = 100.0
ROUNDS = 3
VALUES = 1000


class Replica:
    """A worker that only averages: its inner steps are a sleep."""

    def __init__(self, network: MemoryNetwork, name: str, round_s: float = ROUND_S) -> None:
        self.identity = Identity.from_seed(name.encode())
        self.peer = self.identity.peer_id
        self.round_s = round_s
        self.took_s: dict[int, float] = {}
        """Seconds of each round, with its average."""
        self.outcomes: dict[int, Outcome] = {}
        self.done = asyncio.Event()
        self._network = network

    def partner(self, round: int, peers: list[PeerId]) -> PeerId | None:
        pair = get_method("noloco", {}).partners(round, peers, self.peer)
        return next((PeerId(peer) for peer in pair if peer != self.peer), None)

    async def live(self, peers: list[PeerId], ended: asyncio.Event) -> None:
        async with self._network.transport(self.peer) as transport:
            rules = AggregationRules.named("mean", 100.0)
            context = RoundContext(
                transport, JOB, self.identity.sign, rules=rules, executor=TimedExecutor(0.0)
            )
            states = StateServer(transport, JOB, context.timing.streams)
            await states.serve()
            averager = Pairs(context, states, get_codec("float32"))
            loop, round = asyncio.get_running_loop(), 0
            while round < ROUNDS:
                start_s = loop.time()
                states.expect(round, self.round_s)
                await asyncio.sleep(self.round_s)
                peer = self.partner(round, peers)
                partner = None if peer is None else RoundMember(peer)
                try:
                    values = torch.full((VALUES,), float(peers.index(self.peer)))
                    self.outcomes[round] = await averager.average(round, partner, values, 1.0)
                    self.took_s[round] = loop.time() - start_s
                    round += 1
                except OutOfSync as ahead:
                    round = ahead.position.round
            self.done.set()
            await ended.wait()


def simulate(replicas: list[Replica], *silent: Replica) -> None:
    """Run all replicas to their last round, but the ``silent`` ones stop answering at once."""

    async def main() -> None:
        peers, ended = sorted(each.peer for each in replicas), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            lives = [group.create_task(each.live(peers, ended)) for each in replicas]
            await asyncio.sleep(1.0)
            for each in silent:
                replicas[0]._network.hang(each.peer)
            await asyncio.gather(*(each.done.wait() for each in replicas if each not in silent))
            ended.set()
            for life in lives:
                life.cancel()

    run(main())


@pytest.mark.parametrize("count", [8, 64, pytest.param(512, marks=pytest.mark.thorough)])
def test_only_the_partner_of_a_dead_worker_waits(count: int) -> None:
    rng = random.Random(count)
    network = MemoryNetwork(rng, LinkProfile(delay_s=0.02, bytes_per_s=1e6))
    replicas = [Replica(network, str(n), ROUND_S * rng.uniform(0.98, 1.02)) for n in range(count)]
    slow, dead = replicas[:2]
    slow.round_s = 3 * ROUND_S
    simulate(replicas, dead)

    peers = sorted(each.peer for each in replicas)
    for each in replicas[2:]:
        assert len(each.took_s) == ROUNDS
        for round, took_s in each.took_s.items():
            (contributors,) = each.outcomes[round].contributors
            partner = each.partner(round, peers)
            if partner == dead.peer:
                assert contributors == (each.peer,)
                assert dead.peer in each.outcomes[round].reason
                assert took_s < each.round_s + 2 * Timing().open_s
            else:
                assert took_s < 1.1 * ROUND_S
                assert partner in (None, slow.peer) or len(contributors) == 2


def average_of(data: bytes) -> Outcome:
    """The outcome of a worker whose partner offers ``data``."""
    network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.02, bytes_per_s=1e6))
    honest, liar = Replica(network, "a"), Replica(network, "b")

    async def main() -> Outcome:
        async with network.transport(honest.peer) as mine, network.transport(liar.peer) as theirs:
            rules = AggregationRules.named("mean", 100.0)
            contexts = [
                RoundContext(each, JOB, honest.identity.sign, rules=rules, executor=TimedExecutor(0.0))
                for each in (mine, theirs)
            ]
            states = [StateServer(each.transport, JOB, each.timing.streams) for each in contexts]
            for each in states:
                await each.serve()
            await states[1].contribute(0, PackedState.of([data]))
            averager = Pairs(contexts[0], states[0], get_codec("float32"))
            return await averager.average(0, RoundMember(liar.peer), torch.ones(VALUES), 1.0)

    return run(main())


def contribution(weight: float, values: torch.Tensor) -> bytes:
    return struct.pack(">d", weight) + bytes(get_codec("float32").encode(values))


def test_a_pair_averages_by_tokens() -> None:
    outcome = average_of(contribution(3.0, -torch.ones(VALUES)))
    assert outcome.average is not None
    assert torch.equal(outcome.average, torch.full((VALUES,), -0.5))
    assert (outcome.tokens, len(outcome.all_contributors())) == (4.0, 2)


@defence(
    "a partner's weight is bounded",
    off=replacing(pairs, "_check_weight", lambda *_: None),
    data=contribution(1e9, -torch.ones(VALUES)),
)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        contribution(1e9, -torch.ones(VALUES)),
        contribution(-1.0, -torch.ones(VALUES)),
        contribution(float("nan"), -torch.ones(VALUES)),
        contribution(1.0, -torch.ones(VALUES + 1)),
        contribution(1.0, -torch.ones(VALUES)[:-1]),
    ],
    ids=["empty", "short", "heavy", "negative", "nan", "long", "cut"],
)
def test_a_false_contribution_of_a_partner_is_left_out(data: bytes) -> None:
    outcome = average_of(data)
    assert outcome.average is not None
    assert torch.equal(outcome.average, torch.ones(VALUES))
    assert len(outcome.all_contributors()) == 1
    assert "averaged without" in outcome.reason
