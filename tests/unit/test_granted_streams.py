"""A stream to a peer that keeps a rate: large payloads come as they are granted. p2pd is left out: its socket is one of a pair."""

import asyncio

import pytest

from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation, StreamEnded
from swarmnet_protocols.net import Message
from swarmnet_protocols.net.flow_control import MIN_BYTES
from swarmnet_protocols.net.rate_limit import LinkLimiter
from swarmnet_protocols.timing import Timing
from tests.support.stream_ends import End, a_stream_to, connected, two_ends
from tests.support.virtual_time import run

SOON_S = 0.5
RATE = 100_000.0


def keeping(rate: float) -> LinkLimiter:
    pace = LinkLimiter()
    pace.down.set_rate(rate)
    return pace


def test_of_a_large_payload_nothing_is_sent_that_was_not_granted() -> None:
    """Although nobody reads: the sockets would take all of it."""

    async def main() -> None:
        async with two_ends(keeping(RATE)) as (one, other):
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


def test_messages_come_whole_and_at_the_rate_however_often_a_receive_is_cancelled() -> None:
    async def main() -> float:
        async with two_ends(keeping(RATE)) as (one, other):
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
                    await one.stream.send(Message(b"a beat"))
                    assert (await listening).header == b"a beat"
                    listening = asyncio.create_task(other.stream.receive())
            assert received == sent
            await speaking
            listening.cancel()
            return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(570_000 * 1.04 / RATE, rel=0.1)


def test_who_is_granted_little_has_as_long_as_that_takes() -> None:
    async def main() -> float:
        async with two_ends(keeping(RATE / 10)) as (one, other):
            listening = asyncio.create_task(other.stream.receive())
            await other.stream.send(Message(b"hello"))
            await one.stream.receive()
            sending = asyncio.create_task(other.stream.send(Message(b"", bytes(1 << 20))))
            await one.stream.receive()
            await sending
            listening.cancel()
            return asyncio.get_running_loop().time()

    assert run(main()) > 3 * Timing().chunk_s


def test_a_limit_that_is_set_holds_from_the_next_message_on_and_one_that_is_lifted_does_not() -> None:
    async def main() -> None:
        pace, loop = LinkLimiter(), asyncio.get_running_loop()
        async with two_ends(pace) as (one, other):
            listening = asyncio.create_task(other.stream.receive())
            large = Message(b"", bytes(300_000))

            async def carry() -> float:
                began = loop.time()
                sending = asyncio.create_task(other.stream.send(large))
                assert await one.stream.receive() == large
                await sending
                return loop.time() - began

            assert await carry() == 0
            pace.down.set_rate(RATE)
            assert await carry() == pytest.approx(3, rel=0.1)
            sending = asyncio.create_task(other.stream.send(large))
            await asyncio.sleep(SOON_S)
            assert not sending.done()
            assert await one.stream.receive() == large
            await sending
            pace.down.set_rate(None)
            assert await carry() == 0
            listening.cancel()

    run(main())


def test_who_opens_a_stream_to_somebody_without_a_limit_hears_of_no_grants() -> None:
    async def main() -> None:
        async with a_stream_to() as (end, theirs):
            theirs.sendall(bytes.fromhex("00000000 00010000") + bytes(1 << 16))
            await end.stream.receive()
            await asyncio.sleep(SOON_S)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)

    run(main())


ASKED, FIRST = bytes.fromhex("fffffffd 00004000"), bytes.fromhex("fffffffe 00004000")


@pytest.mark.parametrize("is_flagged", [False, True])
def test_who_does_not_wait_for_grants_is_not_listened_to(is_flagged: bool) -> None:
    async def main() -> None:
        async with a_stream_to(keeping(RATE)) as (end, theirs):
            loop = asyncio.get_running_loop()
            receiving = asyncio.create_task(end.stream.receive())
            assert await loop.sock_recv(theirs, 100) == ASKED
            head = "80000000 00010000" if is_flagged else "00000000 00010000"
            await loop.sock_sendall(theirs, bytes.fromhex(head) + bytes(1 << 16))
            with pytest.raises(ProtocolViolation, match="granted"):
                await receiving

    run(main())


def test_who_was_granted_some_and_sends_none_is_given_up() -> None:
    async def main() -> None:
        async with a_stream_to(keeping(RATE)) as (end, theirs):
            loop = asyncio.get_running_loop()
            receiving = asyncio.create_task(end.stream.receive())
            assert await loop.sock_recv(theirs, 100) == ASKED
            await loop.sock_sendall(theirs, bytes.fromhex("00000000 00000000"))
            await receiving
            receiving = asyncio.create_task(end.stream.receive())
            await loop.sock_sendall(theirs, bytes.fromhex("80000000 00010000"))
            assert await loop.sock_recv(theirs, 100) == FIRST
            with pytest.raises(DeadlineExceeded):
                await receiving
            assert loop.time() == pytest.approx(Timing().chunk_s, rel=0.1)
            assert end.pace.down.sharing == 1
            end.stream.close()
            assert end.pace.down.sharing == 0, "others may have what it left"

    run(main())


def test_who_grants_what_nobody_waits_for_is_not_listened_to() -> None:
    async def main() -> None:
        async with a_stream_to() as (end, theirs):
            other = End(await connected(theirs.dup()), LinkLimiter(), is_ours=True)
            end.pipe.writer.write(ASKED + FIRST)
            for _ in range(2):
                with pytest.raises(ProtocolViolation, match="a grant of 16384 bytes where 0 wait"):
                    await other.stream.receive()
            other.pipe.writer.transport.abort()

    run(main())


def test_a_stream_that_is_closed_while_a_payload_waits_says_so() -> None:
    async def main() -> None:
        async with two_ends(keeping(RATE)) as (_, other):
            listening = asyncio.create_task(other.stream.receive())
            await asyncio.sleep(SOON_S)
            sending = asyncio.create_task(other.stream.send(Message(b"", bytes(100_000))))
            await asyncio.sleep(SOON_S)
            other.stream.close()
            for waiting in (sending, listening):
                with pytest.raises(StreamEnded):
                    await waiting

    run(main())
