"""The end of a stream: sent messages arrive, and every wait for a peer is bounded. A socket pair
replaces p2pd."""

import asyncio

import pytest

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.net import Message, framed_stream, pipe
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.pipe import LINGER_BYTES
from swarmnet_protocols.net.refusal import Refusal, Refused
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import refusal_pb2
from tests.defences import defence, replacing
from tests.support.network.socket_streams import inbound_stream, two_ends
from tests.support.network.virtual_time import run

TIMEOUT_S = 60.0
SOON_S = 0.5
SOCKET_BYTES = 1 << 20
"""More bytes than a socket and one read of it ever hold."""


def test_a_stream_closes_when_its_messages_have_been_received() -> None:
    async def main() -> None:
        async with two_ends() as (one, other):
            await one.stream.send(Message(b"the answer"))
            one.stream.close()
            await asyncio.sleep(SOON_S)
            assert not one.pipe.writer.is_closing()
            assert (await other.stream.receive()).header == b"the answer"
            for _ in range(2):
                with pytest.raises(StreamEnded, match="the stream ended"):
                    await other.stream.receive()
            with pytest.raises(StreamEnded):
                await other.stream.send(Message(b"unread"))
            assert one.streams == 1, "a stream counts until it is gone"
            other.stream.close()
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*one.flushes, *other.flushes)
            assert one.streams == other.streams == 0

    run(main())


def test_a_stream_closed_before_its_last_bytes_leave_ends_well() -> None:
    """On a loop of asyncio itself: its transport forgets the loop when the last of its buffer is
    sent."""

    async def main() -> None:
        async with two_ends() as (one, other):
            sending = asyncio.create_task(one.stream.send(Message(b"", bytes(SOCKET_BYTES))))
            await asyncio.sleep(0.05)
            one.stream.evict()
            receiving = asyncio.create_task(other.stream.receive())
            await asyncio.gather(sending, receiving, return_exceptions=True)
            other.stream.close()
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*one.flushes, *other.flushes)

    asyncio.run(main())


def test_a_refused_peer_gets_the_reason_although_it_goes_on_sending() -> None:
    async def main() -> None:
        async with two_ends() as (one, other):
            await other.stream.send(Message(b"unread", bytes(50_000)))
            waiting = asyncio.create_task(one.stream.receive())
            one.stream.refuse(Refusal(refusal_pb2.REASON_NOT_AUTHORISED, "no", 2.0))
            await asyncio.gather(waiting, return_exceptions=True)
            with pytest.raises(Refused, match="no"):
                await other.stream.receive()
            other.stream.close()
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*one.flushes)

    run(main())


def test_two_peers_that_close_at_once_do_not_wait_for_each_other() -> None:
    async def main() -> None:
        async with two_ends() as (one, other):
            for end in (one, other):
                await end.stream.send(Message(b"hello"))
            for end in (one, other):
                end.stream.close()
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*one.flushes, *other.flushes)

    run(main())


def test_a_stream_without_sent_messages_closes_at_once() -> None:
    async def main() -> None:
        async with inbound_stream() as (end, theirs):
            end.stream.close()
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*end.flushes)
            assert theirs.recv(100) == b""

    run(main())


def test_a_pending_receive_ends_at_once_when_the_stream_is_closed() -> None:
    async def main() -> None:
        async with inbound_stream() as (end, _):
            await end.stream.send(Message(b"hello"))
            waiting = asyncio.create_task(end.stream.receive())
            await asyncio.sleep(SOON_S)
            end.stream.close()
            async with asyncio.timeout(SOON_S):
                with pytest.raises(StreamEnded):
                    await waiting

    run(main())


def test_after_half_a_message_no_refusal_is_sent() -> None:
    async def main() -> None:
        link = LinkLimiter()
        link.up.set_rate(100_000.0)
        async with inbound_stream(link) as (end, theirs):
            sending = asyncio.create_task(end.stream.send(Message(b"", b"x" * 1_000_000)))
            await asyncio.sleep(SOON_S)
            end.stream.refuse(Refusal(refusal_pb2.REASON_NOT_AUTHORISED, "no", 2.0))
            with pytest.raises(StreamEnded):
                await sending
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*end.flushes)
            said = b""
            while piece := theirs.recv(1 << 16):
                said += piece
            assert len(said) < 1_000_000
            assert set(said[8:]) == set(b"x")

    run(main())


@defence("a refused stream that stays open is closed", off=replacing(framed_stream, "LINGER_S", 1e9))
def test_a_refused_peer_that_does_not_close_is_not_waited_for() -> None:
    async def main() -> None:
        async with inbound_stream() as (end, _):
            end.stream.refuse(Refusal(refusal_pb2.REASON_NOT_AUTHORISED, "no", 2.0))
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*end.flushes)
            assert end.streams == 0

    run(main())


async def waited_for_s(said_mib: int) -> float:
    """Seconds until a stream with this much sent data is closed by its server."""
    async with inbound_stream() as (end, theirs):
        loop = asyncio.get_running_loop()
        for _ in range(said_mib):
            message = Message(b"", bytes(1 << 20))
            sending = asyncio.create_task(end.stream.send(message))
            left_bytes = 8 + len(message.payload)
            while left_bytes:
                left_bytes -= len(await loop.sock_recv(theirs, left_bytes))
            await sending
        ended_at = loop.time()
        end.stream.close()
        await asyncio.gather(*end.flushes)
        assert end.streams == 0
        return loop.time() - ended_at


def test_a_served_peer_has_the_time_that_a_slow_link_takes() -> None:
    assert run(waited_for_s(3)) >= 3 * Timing().chunk_s


@defence("a served stream that stays open is closed", off=replacing(framed_stream, "MAX_IN_FLIGHT_MIB", 1e9))
def test_the_time_to_receive_what_was_sent_is_bounded() -> None:
    assert run(waited_for_s(40)) <= 17.5 * Timing().chunk_s


@defence("a refused stream is read to a limit", off=replacing(pipe, "LINGER_BYTES", 1 << 40))
def test_a_refused_peer_that_goes_on_sending_is_read_to_a_limit() -> None:
    async def main() -> None:
        async with inbound_stream() as (end, theirs):
            end.stream.refuse(Refusal(refusal_pb2.REASON_NOT_AUTHORISED, "no", 2.0))
            taken_bytes = 0
            try:
                while taken_bytes < 8 * SOCKET_BYTES:
                    taken_bytes += theirs.send(bytes(1 << 10))
                    await asyncio.sleep(0)
            except BlockingIOError:
                await asyncio.sleep(SOON_S)
            assert taken_bytes < LINGER_BYTES + SOCKET_BYTES
            assert not end.flushes[0].done(), "and yet has its time to hear why"

    run(main())
