"""A node calls other hosts, counts those of one subnet once, and believes outputs that agree with
its own."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import numpy as np
import pytest

from swarmnet_node.host_checks import Asked, HostChecker, Trial, trial_inputs
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.net import PeerId, Stream
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.protocol_ids import PASS, PING
from swarmnet_protocols.routing.coordinates import OwnCoordinate
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.routing.sightings import ModelClaims, Sighting
from swarmnet_protocols.routing.throughput import Claim, holders
from swarmnet_protocols.session.passes import receive_tensor, split_tensor
from swarmnet_protocols.session.pings import answer_pings
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import Patch, defence
from tests.support.network import virtual_time
from tests.support.network.memory_network import LinkProfile, MemoryNetwork

MODEL = bytes(32)
WIDTH = 8
SPAN = (0, 3)


class World:
    """A node and other hosts of the same blocks, which double what they get, or do something
    else."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.01))
        self.claims: dict[Claim, HostInfo] = {}
        self._stack = stack

    async def node(self) -> HostChecker:
        transport = await self._stack.enter_async_context(self.network.transport(peer_of("node")))
        rng = random.Random(0)
        return HostChecker(transport, OwnCoordinate(rng), rng, Timing())

    async def host(self, address: str, computes: Callable[[Array], Array] | None = None) -> Claim:
        peer = peer_of(address)
        self.network.move(peer, address)
        transport = await self._stack.enter_async_context(self.network.transport(peer))
        await transport.serve(PING, _answer)
        if computes is not None:
            await transport.serve(PASS, partial(_compute, computes))
        claim = Claim(peer, *SPAN)
        self.claims[claim] = HostInfo(peer, *SPAN, step_s=1.0, addresses=(address,))
        return claim

    async def trial(self, span: tuple[int, int]) -> Trial:
        inputs = np.random.default_rng(1).standard_normal((2, WIDTH), np.float32)
        return Trial(span, inputs, 2 * inputs)


def peer_of(name: str) -> PeerId:
    return Identity.from_seed(name.encode()).peer_id


async def _answer(stream: Stream) -> None:
    pings = PING.accept(stream)
    await answer_pings(pings, lambda nonce: pb.Pong(nonce=nonce, manifest=MODEL, start=SPAN[0], end=SPAN[1]))


async def _compute(computes: Callable[[Array], Array], stream: Stream) -> None:
    asked = PASS.accept(stream)
    begin, _ = await asked.receive()
    await asked.send(pb.PassReply(heartbeat=pb.Heartbeat()))

    async def part() -> tuple[pb.Part, bytes]:
        message, payload = await asked.receive()
        return message.part, payload  # type: ignore[return-value]

    inputs = await receive_tensor(part, positions=sum(begin.begin.counts), hidden_size=WIDTH)
    for message, payload in split_tensor(computes(inputs)):
        await asked.send(pb.PassReply(part=message), payload)
    await asyncio.sleep(10.0)


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def within() -> None:
        async with AsyncExitStack() as stack:
            await scenario(World(stack))

    virtual_time.run(within())


def count_identities(patch: Patch) -> None:
    patch.setattr(Sighting, "place", property(lambda _: "", lambda *_: None))


@defence("the identities of one machine count once", off=count_identities)
def test_hosts_of_one_subnet_are_one_place() -> None:
    async def scenario(world: World) -> None:
        public = [await world.host(f"/ip4/25.0.0.{number}/tcp/1") for number in range(1, 4)]
        elsewhere = [await world.host("/ip4/26.0.0.1/tcp/1")]
        local = [await world.host(f"/ip4/192.168.1.{number}/tcp/1") for number in range(1, 4)]
        checker = await world.node()
        hosts = {claim.peer: host for claim, host in world.claims.items()}
        model = ModelClaims(MODEL, 3, list(world.claims))
        seen: list[Claim] = []
        while len(seen) < len(hosts):
            seen = [claim for claim in await checker.counted(hosts, model) if claim.seen]

        def counted(some: list[Claim]) -> int:
            peers = {claim.peer for claim in some}
            return holders((claim for claim in seen if claim.peer in peers), 3)[0]

        assert (counted(public), counted(elsewhere), counted(local)) == (1, 1, 3)

    run(scenario)


@pytest.mark.parametrize(
    ("computes", "is_believed"),
    [
        (lambda inputs: 2 * inputs, True),
        (lambda inputs: 2.1 * inputs, True),
        (lambda inputs: inputs, False),
        (lambda inputs: 2 * inputs[::-1], False),
        (lambda inputs: np.full_like(inputs, np.nan), False),
        (None, False),
    ],
    ids=["the same", "less exactly", "nothing", "something else", "no numbers", "refused"],
)
def test_only_hosts_that_compute_what_the_node_computes_are_relied_on(
    computes: Callable[[Array], Array] | None, is_believed: bool
) -> None:
    async def scenario(world: World) -> None:
        claim = await world.host("/ip4/25.0.0.1/tcp/1", computes)
        asked = Asked(bytes(32), MODEL, frozenset(range(*SPAN)), 1)
        found = await (await world.node()).computing(world.claims, asked, world.trial)
        assert [each.peer for each in found] == [claim.peer] * is_believed

    run(scenario)


@pytest.mark.parametrize(
    ("computes", "is_right", "is_refuted"),
    [
        (lambda inputs: 2 * inputs, True, False),
        (lambda inputs: inputs, False, True),
        (None, False, False),
    ],
    ids=["the same", "something else", "refused"],
)
def test_a_block_that_the_node_lacks_is_loaded_to_check_an_answer(
    computes: Callable[[Array], Array] | None, is_right: bool, is_refuted: bool
) -> None:
    async def scenario(world: World) -> None:
        claim = await world.host("/ip4/25.0.0.1/tcp/1", computes)
        checker, loaded = await world.node(), list[int]()

        async def compute(block: int, inputs: Array) -> Array | None:
            loaded.append(block)
            return 2 * inputs

        inputs = trial_inputs(WIDTH, random.Random(0))
        asked = Asked(bytes(32), MODEL, frozenset({1}), 1)
        await checker.prove(world.claims, asked, inputs, compute)
        assert loaded == [1] * (computes is not None)
        now = asyncio.get_running_loop().time()
        seen = checker.sightings.of(claim.peer)
        assert (seen.proves(claim, MODEL, now), seen.has_failed(now)) == (is_right, is_refuted)

    run(scenario)


def test_hosts_of_other_subnets_are_asked_until_there_are_enough() -> None:
    async def scenario(world: World) -> None:
        for number in range(1, 7):
            await world.host(f"/ip4/25.0.0.{number}/tcp/1", lambda inputs: 2 * inputs)
        last = await world.host("/ip4/26.0.0.1/tcp/1", lambda inputs: 2 * inputs)
        asked = Asked(bytes(32), MODEL, frozenset(range(*SPAN)), 2)
        found = await (await world.node()).computing(world.claims, asked, world.trial)
        assert last.peer in {claim.peer for claim in found}
        assert holders(found, 3) == [2, 2, 2]

    run(scenario)


def test_a_host_that_has_left_is_not_relied_on() -> None:
    async def scenario(world: World) -> None:
        claim = await world.host("/ip4/25.0.0.1/tcp/1", lambda inputs: 2 * inputs)
        checker = await world.node()
        world.network.crash(claim.peer)
        asked = Asked(bytes(32), MODEL, frozenset(range(*SPAN)), 1)
        assert await checker.computing(world.claims, asked, world.trial) == []
        assert not await checker.call(world.claims[claim])

    run(scenario)
