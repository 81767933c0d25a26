"""Typed streams over a simulated network: heartbeats keep them alive, silence and refusals end
them."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable

import pytest

from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation
from swarmnet_protocols.net import Message, PeerId, Stream, refusal, typed_stream
from swarmnet_protocols.net.protocol_ids import PASS
from swarmnet_protocols.net.refusal import Refusal, Refused
from swarmnet_protocols.net.typed_stream import AdaptiveTimeout, Patience, TypedStream
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import defence, replacing
from tests.support.network.memory_network import MemoryNetwork, MemoryStream
from tests.support.network.virtual_time import run

SILENCE_S = 3.0

Host = TypedStream[pb.PassReply, pb.PassRequest]
Client = TypedStream[pb.PassRequest, pb.PassReply]


def between(serve: Callable[[Host], Awaitable[None]], use: Callable[[Stream], Awaitable[None]]) -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        async with network.transport(PeerId("host")) as host, network.transport(PeerId("client")) as client:

            async def answer(stream: Stream) -> None:
                await serve(Host(stream, pb.PassReply, pb.PassRequest, Patience(SILENCE_S, 1.0)))

            await host.serve(PASS, answer)
            await use(await client.open(PeerId("host"), PASS, deadline_s=1.0))

    run(main())


def client_side(stream: Stream, heartbeats: list[pb.PassReply] | None = None) -> Client:
    note = (heartbeats if heartbeats is not None else []).append
    return Client(stream, pb.PassRequest, pb.PassReply, Patience(SILENCE_S, math.inf), on_heartbeat=note)


def test_heartbeats_keep_a_stream_alive_and_are_not_received() -> None:
    async def serve(host: Host) -> None:
        await host.receive()
        beating = asyncio.create_task(
            host.send_heartbeats(1.0, lambda: pb.PassReply(heartbeat=pb.Heartbeat()))
        )
        await asyncio.sleep(10 * SILENCE_S)
        await host.send(pb.PassReply(part=pb.Part()), b"")
        beating.cancel()
        await asyncio.sleep(1.0)

    async def use(stream: Stream) -> None:
        heartbeats: list[pb.PassReply] = []
        client = client_side(stream, heartbeats)
        await client.send(pb.PassRequest(begin=pb.Begin()))
        reply, _ = await client.receive()
        assert reply.HasField("part")
        assert len(heartbeats) > 9 * SILENCE_S

    between(serve, use)


@defence(
    "a peer that sends its heartbeats later and later is not waited for",
    off=replacing(typed_stream, "MAX_EXTENSION", 1e9),
)
def test_late_heartbeats_are_waited_for_but_not_for_ever() -> None:
    pauses_s = [0.2 * SILENCE_S, 0.5 * SILENCE_S, SILENCE_S, 2 * SILENCE_S]

    async def serve(host: Host) -> None:
        await host.receive()
        for pause_s in pauses_s:
            await host.send(pb.PassReply(heartbeat=pb.Heartbeat()))
            await asyncio.sleep(pause_s)
        await host.send(pb.PassReply(part=pb.Part()), b"")
        await asyncio.sleep(10 * SILENCE_S)

    async def use(stream: Stream) -> None:
        client = client_side(stream)
        await client.send(pb.PassRequest(begin=pb.Begin()))
        reply, _ = await client.receive()
        assert reply.HasField("part")
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await client.receive()
        assert asyncio.get_running_loop().time() - began == pytest.approx(3 * SILENCE_S)

    between(serve, use)


def test_the_timeout_is_the_least_again_after_even_heartbeats() -> None:
    timeout = AdaptiveTimeout()
    timeout.observe(1.5)  # the answer to a request
    assert timeout.seconds(2.0) == 2.0
    timeout.observe(1.5)
    assert timeout.seconds(2.0) == 6.0
    for _ in range(50):  # 20 s of even heartbeats
        timeout.observe(0.4)
    assert timeout.seconds(2.0) == 2.0


def test_silence_ends_a_stream() -> None:
    async def serve(host: Host) -> None:
        await host.receive()
        await asyncio.sleep(10 * SILENCE_S)

    async def use(stream: Stream) -> None:
        client = client_side(stream)
        await client.send(pb.PassRequest(begin=pb.Begin()))
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await client.receive()
        assert asyncio.get_running_loop().time() - began == pytest.approx(SILENCE_S)

    between(serve, use)


@pytest.mark.parametrize("wait_s", [0.0, 2.5])
def test_a_refusal_is_raised_with_its_reason(wait_s: float) -> None:
    async def serve(host: Host) -> None:
        await host.receive()
        host.refuse(Refusal(refusal_pb2.REASON_TOO_LONG, "too \x1b[1mlong", wait_s))

    async def use(stream: Stream) -> None:
        client = client_side(stream)
        await client.send(pb.PassRequest(begin=pb.Begin()))
        with pytest.raises(Refused, match=r"refused the stream: too \[1mlong") as info:
            await client.receive()
        assert (info.value.reason, info.value.retry_after_s) == (refusal_pb2.REASON_TOO_LONG, wait_s)

    between(serve, use)


def test_bytes_that_are_no_message_are_a_violation() -> None:
    async def serve(host: Host) -> None:
        with pytest.raises(ProtocolViolation):
            await host.receive()
        await host.send(pb.PassReply(part=pb.Part()), b"")
        await asyncio.sleep(1.0)

    async def use(stream: Stream) -> None:
        await stream.send(Message(b"\xff"))
        assert (await client_side(stream).receive())[0].HasField("part")

    between(serve, use)


def test_one_question_has_one_answer_and_closes_the_stream() -> None:
    async def serve(host: Host) -> None:
        request, _ = await host.receive()
        assert request.begin.counts == [3]
        await host.send(pb.PassReply(part=pb.Part()), b"abc")
        await asyncio.sleep(1.0)

    async def use(stream: Stream) -> None:
        reply, payload = await client_side(stream).ask(pb.PassRequest(begin=pb.Begin(counts=[3])))
        assert reply.HasField("part")
        assert payload == b"abc"
        assert isinstance(stream, MemoryStream)
        assert stream.closed

    between(serve, use)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_an_invalid_retry_time_is_read_as_zero(seconds: float) -> None:
    said = refusal_pb2.Refusal(reason=refusal_pb2.REASON_OUT_OF_RESOURCES, retry_after_s=seconds)
    assert Refused("host", said).retry_after_s == 0.0


def test_a_reason_of_a_newer_version_is_a_refusal_all_the_same() -> None:
    said = refusal_pb2.Refusal.FromString(b"\x08\xe7\x07")
    assert Refused("host", said).reason == refusal_pb2.REASON_UNSPECIFIED


@defence(
    "the reason of a refusal does not control the terminal",
    off=replacing(refusal, "printable", lambda text: text),
)
def test_a_refusal_cannot_steer_the_terminal_that_shows_it() -> None:
    said = refusal_pb2.Refusal(
        reason=refusal_pb2.REASON_INTERNAL, detail="\x1b]52;c;cm0gLXJm\x07no room\x9b2J"
    )
    assert str(Refused("host", said)).isprintable()
