"""The promises of a transport about streams and messages, tested on every transport."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.net import Message, ProtocolSpec, Stream, Transport
from tests.support.network.conversations import DEADLINE_S, collect, dial, drain, echo

from .conftest import Lab


def test_messages_arrive_in_order_from_an_authenticated_peer(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        callers = []

        async def handler(stream: Stream) -> None:
            callers.append(stream.peer)
            await echo(stream)

        await b.serve(protocol, handler)
        stream = await dial(a, b, protocol)
        sent = [
            Message(b"%d" % size, bytes([size % 251]) * size)
            for size in (0, 1, 1000, 1 << 16, 1 << 20, 4 << 20)
        ]
        for message in sent:
            await stream.send(message)
            assert await stream.receive() == message
        assert stream.peer == b.peer_id
        assert callers == [a.peer_id]
        stream.close()

    lab.run(scenario)


def test_an_empty_message_arrives(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        await b.serve(protocol, echo)
        stream = await dial(a, b, protocol)
        await stream.send(Message(b""))
        assert await stream.receive() == Message(b"", b"")
        stream.close()

    lab.run(scenario)


def test_the_sender_may_reuse_its_buffer_after_send(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        result = await collect(b, protocol)
        stream = await dial(a, b, protocol)
        buffer = bytearray(30_000)
        for number in range(1000):
            buffer[:] = bytes([number % 256]) * len(buffer)
            await stream.send(Message(b"", memoryview(buffer)))
        stream.close()
        received = [set(message.payload) for message in await result]
        assert received == [{number % 256} for number in range(1000)]

    lab.run(scenario)


def test_many_streams_at_once(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        await b.serve(protocol, echo)

        async def talk(number: int) -> None:
            stream = await dial(a, b, protocol)
            for turn in range(5):
                message = Message(b"%d %d" % (number, turn), bytes([number]) * 5000)
                await stream.send(message)
                assert await stream.receive() == message
            stream.close()

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(talk(number))

    lab.run(scenario)


def test_messages_of_concurrent_senders_are_not_interleaved(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        await b.serve(protocol, echo)
        stream = await dial(a, b, protocol)
        sizes = [100_000 + 17 * number for number in range(20)]

        async def speak(number: int) -> None:
            for turn in range(5):
                await stream.send(Message(b"%d/%d" % (number, turn), bytes([number]) * sizes[number]))

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(speak(number))
            turns: dict[int, list[int]] = {number: [] for number in range(20)}
            for _ in range(100):
                message = await stream.receive()
                number, turn = map(int, message.header.split(b"/"))
                assert message.payload == bytes([number]) * sizes[number]
                turns[number].append(turn)
        assert all(order == list(range(5)) for order in turns.values())
        stream.close()

    lab.run(scenario)


def test_a_cancelled_receive_loses_nothing(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        async def count(stream: Stream) -> None:
            for number in range(100):
                await stream.send(Message(b"%d" % number, b"x" * 30_000))

        await b.serve(protocol, count)
        stream = await dial(a, b, protocol)
        received: list[int] = []
        cancelled = 0
        while len(received) < 100:
            task = asyncio.create_task(stream.receive())
            # One more turn of the loop each time, so that every point of a receive is hit by a
            # cancellation.
            for _ in range(cancelled % 50):
                if not task.done():
                    await asyncio.sleep(0.001)
            if task.cancel():
                cancelled += 1
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                received.append(int(task.result().header))
        assert received == list(range(100))
        assert cancelled > 0
        stream.close()

    lab.run(scenario)


def test_a_slow_reader_blocks_the_sender(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        gate, received, done = asyncio.Event(), 0, asyncio.Event()
        total = 64

        async def slow(stream: Stream) -> None:
            nonlocal received
            await gate.wait()
            for _ in range(total):
                await stream.receive()
                received += 1
            done.set()

        await b.serve(protocol, slow)
        stream = await dial(a, b, protocol)
        sent = 0

        async def speak() -> None:
            nonlocal sent
            for _ in range(total):
                await stream.send(Message(b"", bytes(1 << 20)))
                sent += 1

        speaker = asyncio.create_task(speak())
        finished, _ = await asyncio.wait({speaker}, timeout=1.5)
        assert not finished
        assert sent <= 40, "MiB were taken from a sender whose reader reads nothing"
        gate.set()
        await speaker
        await done.wait()
        assert received == total
        stream.close()

    lab.run(scenario)


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["", "by receives that are cancelled"])
def test_a_message_that_waits_for_credit_arrives_whole_at_the_rate(
    lab: Lab, protocol: ProtocolSpec, is_cancelled: bool
) -> None:
    granted = replace(protocol, has_flow_control=True)
    rate = 4e6
    sent = [Message(b"%d" % size, bytes([size % 251]) * size) for size in (1 << 20, 100, 1 << 14, 3 << 20, 0)]

    async def scenario(a: Transport, b: Transport) -> None:
        received: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()

        async def handler(stream: Stream) -> None:
            messages: list[Message] = []
            while len(messages) < len(sent):
                await stream.send(Message(b"a beat"))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02 if is_cancelled else DEADLINE_S):
                        messages.append(await stream.receive())
            received.set_result(messages)

        await b.serve(granted, handler)
        clock = asyncio.get_running_loop().time
        stream = await dial(a, b, granted)
        await stream.receive()
        began = clock()
        listening = asyncio.create_task(drain(stream))
        for message in sent:
            await stream.send(message)
        async with asyncio.timeout(DEADLINE_S):
            assert await received == sent
        assert clock() - began > 0.8 * (4 << 20) / rate
        stream.close()
        await listening

    async def at_the_rate(a: Transport, b: Transport) -> None:
        lab.link.down.set_rate(rate)
        try:
            await scenario(a, b)
        finally:
            lab.link.down.set_rate(None)

    lab.run(at_the_rate)


def test_an_oversized_message_is_not_sent(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        await b.serve(protocol, echo)
        stream = await dial(a, b, protocol)
        with pytest.raises(ProtocolViolation, match="payload"):
            await stream.send(Message(b"", bytes(protocol.max_payload_bytes + 1)))
        with pytest.raises(ProtocolViolation, match="header"):
            await stream.send(Message(bytes(protocol.max_header_bytes + 1)))
        await stream.send(Message(b"fine"))
        assert (await stream.receive()).header == b"fine"
        stream.close()

    lab.run(scenario)


@pytest.mark.parametrize(
    "oversized", [Message(bytes(1025)), Message(b"", bytes((4 << 20) + 1))], ids=["header", "payload"]
)
def test_an_oversized_message_is_not_received(lab: Lab, protocol: ProtocolSpec, oversized: Message) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        refused = []
        done = asyncio.Event()

        async def handler(stream: Stream) -> None:
            assert (await stream.receive()).header == b"fine"
            for _ in range(2):
                with pytest.raises(ProtocolViolation) as info:
                    await stream.receive()
                refused.append(str(info.value))
            done.set()

        await b.serve(protocol, handler)
        lax = replace(protocol, max_header_bytes=1 << 20, max_payload_bytes=1 << 30)
        stream = await dial(a, b, lax)
        await stream.send(Message(b"fine"))
        # the other side may have had enough before all of it was sent
        with contextlib.suppress(StreamEnded):
            await stream.send(oversized)
        async with asyncio.timeout(DEADLINE_S):
            await done.wait()
        assert len(refused) == 2
        stream.close()

    lab.run(scenario)
