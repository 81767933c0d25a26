"""Flow control on streams of the libp2p transport, over a socket pair in place of p2pd."""

import asyncio

import pytest

from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation, StreamEnded
from swarmnet_protocols.net import Message
from swarmnet_protocols.net.limits.flow_control import MIN_BYTES, ReceiveWindow
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.timing import Timing
from tests.defences import defence
from tests.support.attacks.switched_off import overlooking
from tests.support.network.socket_streams import End, connect, inbound_stream, two_ends
from tests.support.network.virtual_time import run

SOON_S = 0.5
RATE = 100_000.0


def limited_to(rate: float) -> LinkLimiter:
    link = LinkLimiter()
    link.down.set_rate(rate)
    return link


def test_a_large_payload_is_sent_no_further_than_its_credit() -> None:
    """The socket buffers would take all of it."""

    async def main() -> None:
        async with two_ends(limited_to(RATE)) as (one, other):
            listening = asyncio.create_task(other.stream.receive())
            await asyncio.sleep(0)
            small, large = Message(b"small", bytes(MIN_BYTES)), Message(b"large", bytes(100_000))
            await other.stream.send(small)
            sending = asyncio.create_task(other.stream.send(large))
            await asyncio.sleep(SOON_S)
            assert not sending.done()
            came_bytes = len(one.pipe.reader._buffer)  # type: ignore[attr-defined]
            assert came_bytes == 8 + 5 + MIN_BYTES + 8 + 5
            assert await one.stream.receive() == small
            assert await one.stream.receive() == large
            await sending
            await one.stream.send(Message(b"thanks"))
            assert (await listening).header == b"thanks"

    run(main())


def test_messages_come_whole_at_the_rate_when_receives_are_cancelled() -> None:
    async def main() -> float:
        async with two_ends(limited_to(RATE)) as (one, other):
            listening = asyncio.create_task(other.stream.receive())
            sent = [
                Message(b"%d" % size, bytes([size % 251]) * size)
                for size in (300_000, 10, 200_000, 0, 70_001)
            ]

            async def speak() -> None:
                for message in sent:
                    await other.stream.send(message)

            speaking = asyncio.create_task(speak())
            received: list[Message] = []
            while len(received) < len(sent):
                try:
                    async with asyncio.timeout(0.07):
                        received.append(await one.stream.receive())
                except TimeoutError:
                    await one.stream.send(Message(b"heartbeat"))
                    assert (await listening).header == b"heartbeat"
                    listening = asyncio.create_task(other.stream.receive())
            assert received == sent
            await speaking
            listening.cancel()
            return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(570_000 * 1.04 / RATE, rel=0.1)


def test_a_slow_limit_extends_the_deadline_of_the_sender() -> None:
    async def main() -> float:
        async with two_ends(limited_to(RATE / 10)) as (one, other):
            listening = asyncio.create_task(other.stream.receive())
            await other.stream.send(Message(b"hello"))
            await one.stream.receive()
            sending = asyncio.create_task(other.stream.send(Message(b"", bytes(1 << 20))))
            await one.stream.receive()
            await sending
            listening.cancel()
            return asyncio.get_running_loop().time()

    assert run(main()) > 3 * Timing().chunk_s


def test_a_limit_holds_from_the_next_message_until_it_is_lifted() -> None:
    async def main() -> None:
        link, loop = LinkLimiter(), asyncio.get_running_loop()
        async with two_ends(link) as (one, other):
            listening = asyncio.create_task(other.stream.receive())
            large = Message(b"", bytes(300_000))

            async def carry() -> float:
                began = loop.time()
                sending = asyncio.create_task(other.stream.send(large))
                assert await one.stream.receive() == large
                await sending
                return loop.time() - began

            assert await carry() == 0
            link.down.set_rate(RATE)
            assert await carry() == pytest.approx(3, rel=0.1)
            sending = asyncio.create_task(other.stream.send(large))
            await asyncio.sleep(SOON_S)
            assert not sending.done()
            assert await one.stream.receive() == large
            await sending
            link.down.set_rate(None)
            assert await carry() == 0
            listening.cancel()

    run(main())


def test_a_host_without_a_limit_sends_no_flow_control() -> None:
    async def main() -> None:
        async with inbound_stream() as (end, theirs):
            theirs.sendall(bytes.fromhex("00000000 00010000") + bytes(1 << 16))
            await end.stream.receive()
            await asyncio.sleep(SOON_S)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)

    run(main())


LIMITED, CREDITED = bytes.fromhex("fffffffd 00004000"), bytes.fromhex("fffffffe 00004000")


@defence(
    "a sender that exceeds its credit is disconnected",
    off=overlooking(ReceiveWindow, "received"),
    is_flagged=True,
)
@pytest.mark.parametrize("is_flagged", [False, True])
def test_a_sender_that_ignores_flow_control_is_disconnected(is_flagged: bool) -> None:
    async def main() -> None:
        async with inbound_stream(limited_to(RATE)) as (end, theirs):
            loop = asyncio.get_running_loop()
            receiving = asyncio.create_task(end.stream.receive())
            assert await loop.sock_recv(theirs, 100) == LIMITED
            head = "80000000 00010000" if is_flagged else "00000000 00010000"
            await loop.sock_sendall(theirs, bytes.fromhex(head) + bytes(1 << 16))
            with pytest.raises(ProtocolViolation, match="credit"):
                await receiving

    run(main())


def test_a_sender_that_does_not_use_its_credit_times_out() -> None:
    async def main() -> None:
        async with inbound_stream(limited_to(RATE)) as (end, theirs):
            loop = asyncio.get_running_loop()
            receiving = asyncio.create_task(end.stream.receive())
            assert await loop.sock_recv(theirs, 100) == LIMITED
            await loop.sock_sendall(theirs, bytes.fromhex("00000000 00000000"))
            await receiving
            receiving = asyncio.create_task(end.stream.receive())
            await loop.sock_sendall(theirs, bytes.fromhex("80000000 00010000"))
            assert await loop.sock_recv(theirs, 100) == CREDITED
            with pytest.raises(DeadlineExceeded):
                await receiving
            assert loop.time() == pytest.approx(Timing().chunk_s, rel=0.1)
            assert end.link.down.open_windows == 1
            end.stream.close()
            assert end.link.down.open_windows == 0, "the window no longer shares the link"

    run(main())


def test_a_host_that_grants_unexpected_credit_is_disconnected() -> None:
    async def main() -> None:
        async with inbound_stream() as (end, theirs):
            other = End(await connect(theirs.dup()), LinkLimiter(), is_outbound=True)
            end.pipe.writer.write(LIMITED + CREDITED)
            for _ in range(2):
                with pytest.raises(ProtocolViolation, match="credit of 16384 bytes while 0 need credit"):
                    await other.stream.receive()
            other.pipe.writer.transport.abort()

    run(main())


def test_closing_a_stream_ends_a_send_that_waits_for_credit() -> None:
    async def main() -> None:
        async with two_ends(limited_to(RATE)) as (_, other):
            listening = asyncio.create_task(other.stream.receive())
            await asyncio.sleep(SOON_S)
            sending = asyncio.create_task(other.stream.send(Message(b"", bytes(100_000))))
            await asyncio.sleep(SOON_S)
            other.stream.close()
            for waiting in (sending, listening):
                with pytest.raises(StreamEnded):
                    await waiting

    run(main())
