"""What a peer with experts refuses to hosts, and what a host with experts on peers refuses."""

import asyncio
from typing import Any

import pytest
import torch

from swarmnet_node.experts.expert_dispatcher import ExpertDispatcher
from swarmnet_node.experts.expert_service import ExpertService
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.limits.rate_limit import RateLimit
from swarmnet_protocols.net.limits.resource_limits import PEER_LIMITS, Rate, Resource
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.net.refusal import Refusal, Refused
from swarmnet_protocols.session.expert_rows import TrunkStream, encode_rows, split_rows
from swarmnet_protocols.wire import refusal_pb2, session_pb2
from tests.defences import Patch, defence, nothing, replacing
from tests.support.swarm.expert_lab import LAN, ExpertLab, attach, open_experts
from tests.support.swarm.swarm_lab import Lab, Reference, simulate


async def call(
    stream: TrunkStream, request: session_pb2.ExpertsRequest, payload: Buffer = b""
) -> session_pb2.ExpertsReply:
    await stream.send(request, payload)
    reply, _ = await stream.receive()
    return reply


def rows_of(block: int, expert: int) -> tuple[session_pb2.ExpertsRequest, memoryview]:
    [request] = split_rows(block, torch.zeros(1, 32), {expert: torch.tensor([0])})
    message, payload = encode_rows(request, 1)
    return session_pb2.ExpertsRequest(rows=message), payload


@defence(
    "a peer computes only for hosts of its swarm and model",
    off=replacing(ExpertService, "_check_model", nothing),
    changes={"swarm": bytes(31) + b"1"},
)
@pytest.mark.parametrize(
    ("changes", "block", "expert", "reason"),
    [
        ({"swarm": bytes(31) + b"1"}, 0, 0, refusal_pb2.REASON_WRONG_SWARM),
        ({"manifest": bytes(32)}, 0, 0, refusal_pb2.REASON_WRONG_MODEL),
        ({}, 0, 1, refusal_pb2.REASON_MISSING_EXPERTS),
        ({}, 9, 0, refusal_pb2.REASON_MISSING_EXPERTS),
    ],
)
def test_a_peer_refuses_rows_that_it_cannot_compute(
    mixtral: Reference, changes: dict[str, bytes], block: int, expert: int, reason: int
) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        await experts.peer("peer", experts.everywhere([0]))
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            stream = await open_experts(lab, transport, "peer")
            request = attach(lab, **changes)
            if not changes:
                assert (await call(stream, request)).HasField("attached")
                request, payload = rows_of(block, expert)
            with pytest.raises(Refused) as refused:
                await call(stream, request, b"" if changes else payload)
            assert refused.value.reason == reason

    simulate(mixtral, scenario, link=LAN)


def any_number_of_streams(patch: Patch) -> None:
    patch.setitem(PEER_LIMITS, Resource.EXPERTS, 4)  # what the test counts to
    reserve = Scope.reserve

    def unlimited(scope: Scope, resource: Resource, amount: int = 1) -> Any:
        return reserve(scope, resource, 0 if resource is Resource.EXPERTS else amount)

    patch.setattr(Scope, "reserve", unlimited)


@defence("one host has few streams for experts", off=any_number_of_streams)
def test_one_host_has_few_streams_for_experts(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        await experts.peer("peer", experts.everywhere([0]))
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            streams = []
            for _ in range(PEER_LIMITS[Resource.EXPERTS]):
                streams.append(await open_experts(lab, transport, "peer"))
                await streams[-1].send(attach(lab))
                await streams[-1].receive()
            more = await open_experts(lab, transport, "peer")
            with pytest.raises(Refused) as refused:
                await call(more, attach(lab))
            assert refused.value.reason == refusal_pb2.REASON_OUT_OF_RESOURCES
            streams[0].close()
            await asyncio.sleep(0.1)
            again = await open_experts(lab, transport, "peer")
            await again.send(attach(lab))
            assert (await again.receive())[0].HasField("attached")

    simulate(mixtral, scenario, link=LAN)


def free_rows(patch: Patch) -> None:
    charge = Scope.charge

    def charged(scope: Scope, rate: Rate, amount: float, now: float) -> float:
        return 0.0 if rate is Rate.POSITIONS else charge(scope, rate, amount, now)

    patch.setattr(Scope, "charge", charged)


@defence("rows for experts count in the quota of a peer", off=free_rows)
def test_rows_count_in_the_quota_of_a_peer(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        node = await experts.peer("peer", experts.everywhere([0]))
        resources = node.dependencies.transport.resources
        resources.limit_rate(Rate.POSITIONS, per_peer=RateLimit(1.0, 2.0))
        loop = asyncio.get_running_loop()
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            stream = await open_experts(lab, transport, "peer")
            await stream.send(attach(lab))
            await stream.receive()
            started = loop.time()
            for _ in range(6):
                await stream.send(*rows_of(0, 0))
                await stream.receive()
            assert loop.time() - started > 3.0

    simulate(mixtral, scenario, link=LAN)


def let_gradients_pass(patch: Patch) -> None:
    """Outputs of peers enter the graph as constants."""
    elsewhere = ExpertDispatcher.elsewhere

    def detached(dispatcher: ExpertDispatcher, block: int) -> Any:
        start = elsewhere(dispatcher, block)
        return lambda hidden, rows: start(hidden.detach(), rows)

    patch.setattr(ExpertDispatcher, "elsewhere", detached)


@defence("no training pass leaves out the gradients of experts on peers", off=let_gradients_pass)
def test_gradients_do_not_flow_through_experts_of_peers(mixtral: Reference) -> None:
    """A pass through a host whose experts are elsewhere is refused, not computed without their
    gradients."""

    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        await experts.peer("peer", experts.everywhere(range(8)))
        trunk = await experts.trunk("trunk", own=())
        assert trunk.engine is not None
        stage, engine = trunk.engine.stage, trunk.engine
        inputs = torch.ones(2, 32)
        with pytest.raises(Refusal, match="serves no training passes"):
            await engine.compute_pass(lambda: lambda: stage.record_sequences(inputs, [2]), 2)

    simulate(mixtral, scenario, link=LAN)
