"""Passes of misbehaving clients that hosts refuse without an effect on other clients."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
import torch

from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.chain.passes import RemoteBatch
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_protocols.arrays import as_array
from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.net import Message, Stream
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.passes import MAX_POSITIONS, MAX_SEQUENCES
from swarmnet_protocols.session.wire_tensors import encode_tensor
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import defence
from tests.support.attacks.raw_client import Stranger, next_reply
from tests.support.attacks.refusals import refusal
from tests.support.attacks.switched_off import count_only
from tests.support.models.rounding import assert_near
from tests.support.network import memory_network
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

HIDDEN = 32
POSITIONS = 8
PROMPT = [5, 6, 7, 8]
TOKENS = 6


def part(values: torch.Tensor) -> Message:
    tensor, payload = encode_tensor(as_array(values))
    return Message(pb.PassRequest(part=pb.Part(tensor=tensor)).SerializeToString(), payload)


def zeros(positions: int = POSITIONS, width: int = HIDDEN) -> torch.Tensor:
    return torch.zeros(positions, width)


def with_value(value: float) -> torch.Tensor:
    values = zeros()
    values[3, 7] = value
    return values


async def assert_refused(stream: Stream, reason: int) -> None:
    async with asyncio.timeout(1.0):
        refused = await refusal(next_reply(stream, pb.PassReply))
        assert refused.reason == reason
        assert refused.detail


def with_stranger(reference: Reference, talk: Callable[[Stranger], Awaitable[None]], **hosting: Any) -> None:
    """A stranger sends to the only host while one client generates and another trains; both get
    correct results."""

    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6), **hosting))
        async with (
            lab.client() as swarm,
            lab.chain(swarm) as chain,
            lab.network.transport(lab.peer_id("stranger")) as transport,
        ):
            counts = (40, 128, 60)
            values = torch.randn(2, sum(counts), HIDDEN, generator=torch.Generator().manual_seed(0))
            batch = RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32), counts)

            async def train() -> None:
                expected = reference.train(values[0], counts, values[1])
                found = await batch.forward(values[0]), (await batch.backward(values[1]))[0]
                for ours, theirs in zip(found, expected, strict=True):
                    assert_near(ours, theirs)

            tokens, *_ = await asyncio.gather(
                lab.generate(chain, PROMPT, TOKENS), train(), talk(Stranger(lab, transport))
            )
            assert tokens == reference.greedy(PROMPT, TOKENS)
            assert batch.report.failovers == 0

    simulate(reference, scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swarm": bytes(31)}, refusal_pb2.REASON_WRONG_SWARM),
        ({"manifest": bytes(32)}, refusal_pb2.REASON_WRONG_MODEL),
        ({"span": pb.Span(start=0, end=7)}, refusal_pb2.REASON_WRONG_SPAN),
        ({"span": pb.Span(start=2, end=2)}, refusal_pb2.REASON_WRONG_SPAN),
        ({"span": pb.Span(start=3, end=1 << 31)}, refusal_pb2.REASON_WRONG_SPAN),
        ({"counts": [MAX_POSITIONS, 1]}, refusal_pb2.REASON_TOO_LONG),
        ({"counts": [(1 << 32) - 1] * MAX_SEQUENCES}, refusal_pb2.REASON_TOO_LONG),
        ({"counts": []}, refusal_pb2.REASON_PROTOCOL),
        ({"counts": [4, 0]}, refusal_pb2.REASON_PROTOCOL),
        ({"counts": [1] * (MAX_SEQUENCES + 1)}, refusal_pb2.REASON_PROTOCOL),
        ({"wire": pb.DTYPE_UNSPECIFIED}, refusal_pb2.REASON_PROTOCOL),
    ],
)
def test_a_pass_that_the_host_does_not_offer_is_refused(
    reference: Reference, changes: dict[str, Any], reason: int
) -> None:
    async def talk(stranger: Stranger) -> None:
        await assert_refused(await stranger.begin_pass(**changes), reason)

    with_stranger(reference, talk)


BAD_TENSORS: dict[str, list[Message]] = {
    "another width": [part(zeros(width=HIDDEN + 1))],
    "too few positions": [part(zeros(7))],
    "a position at a time": [part(zeros(1))],
    "too many positions": [part(zeros(9))],
    "NaN": [part(with_value(float("nan")))],
    "infinity": [part(with_value(float("inf")))],
    "NaN gradients": [part(zeros()), part(with_value(float("nan")))],
    "gradients of another shape": [part(zeros()), part(zeros(9))],
    "a shape that is not its payload's": [
        Message(
            pb.PassRequest(part=pb.Part(tensor=encode_tensor(as_array(zeros()))[0])).SerializeToString(),
            b"1234",
        )
    ],
    "no shape": [Message(pb.PassRequest(part=pb.Part()).SerializeToString())],
    "garbage": [Message(b"\xff\xff\xff")],
    "another beginning": [Message(pb.PassRequest(begin=pb.Begin()).SerializeToString())],
}


@pytest.mark.parametrize("messages", BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_tensors_that_were_not_announced_are_not_computed(
    reference: Reference, messages: Iterable[Message]
) -> None:
    async def talk(stranger: Stranger) -> None:
        stream = await stranger.begin_pass(backward=True)
        for message in messages:
            await stream.send(message)
        await assert_refused(stream, refusal_pb2.REASON_PROTOCOL)

    with_stranger(reference, talk)


@defence("passes of a client are limited", off=count_only)
def test_no_client_has_more_passes_at_once_than_its_share(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        held = [await stranger.begin_pass() for _ in range(3)]
        await assert_refused(await stranger.begin_pass(), refusal_pb2.REASON_OUT_OF_RESOURCES)
        await held[0].send(part(zeros()))
        assert (await next_reply(held[0], pb.PassReply)).HasField("part")
        with pytest.raises(StreamEnded):
            await next_reply(held[0], pb.PassReply)
        again = await stranger.begin_pass()  # what was used is free again
        await again.send(part(zeros()))
        assert (await next_reply(again, pb.PassReply)).HasField("part")

    with_stranger(reference, talk, limits=ClientLimits(passes_per_client=3))


def test_passes_of_all_clients_are_bounded_together(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6), limits=ClientLimits(passes=2)))
        async with (
            lab.network.transport(lab.peer_id("one")) as one,
            lab.network.transport(lab.peer_id("two")) as two,
        ):
            for transport in (one, two):
                await Stranger(lab, transport).begin_pass()
            await assert_refused(await Stranger(lab, two).begin_pass(), refusal_pb2.REASON_OUT_OF_RESOURCES)

    simulate(reference, scenario)


def test_a_client_that_does_not_continue_its_pass_loses_it(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        stream = await stranger.begin_pass()
        with pytest.raises(StreamEnded):
            await next_reply(stream, pb.PassReply)
        again = await stranger.begin_pass()
        await again.send(part(zeros()))
        assert (await next_reply(again, pb.PassReply)).HasField("part")

    with_stranger(reference, talk, limits=ClientLimits(passes_per_client=2))


def test_a_client_that_does_not_read_the_result_loses_its_pass(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that reads nothing; one message fits into the buffers."""
    monkeypatch.setattr(memory_network, "STREAM_BUFFER_BYTES", 1)

    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6), limits=ClientLimits(passes_per_client=1)))
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            stranger = Stranger(lab, transport)
            await (await stranger.begin_pass()).send(part(zeros()))
            await asyncio.sleep(lab.timing.chunk_s - 2)
            await assert_refused(await stranger.begin_pass(), refusal_pb2.REASON_OUT_OF_RESOURCES)
            await asyncio.sleep(4)
            again = await stranger.begin_pass()
            await again.send(part(zeros()))
            assert (await next_reply(again, pb.PassReply)).HasField("part")

    simulate(reference, scenario)


def test_a_leaving_host_refuses_passes_and_finishes_the_running_ones(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        node = await lab.start("a", lab.hosting((0, 6)))
        async with lab.network.transport(lab.peer_id("client")) as transport:
            stranger = Stranger(lab, transport)
            before = await stranger.begin_pass()
            assert pb.PassReply.FromString((await before.receive()).header).HasField("heartbeat")
            node.finish(grace_s=10.0)
            await assert_refused(await stranger.begin_pass(), refusal_pb2.REASON_LEAVING)
            await before.send(part(zeros()))
            assert (await next_reply(before, pb.PassReply)).HasField("part")
            async with asyncio.timeout(1.0):
                await node.finished()

    simulate(reference, scenario)
