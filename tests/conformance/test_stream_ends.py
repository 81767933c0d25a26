"""Ends and refusals of streams: the same on every transport."""

import asyncio
import contextlib

import pytest

from swarmnet_protocols.errors import IncompatibleVersion, PeerUnreachable, StreamEnded
from swarmnet_protocols.net import Message, ProtocolSpec, Stream, Transport
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.refusal import Refusal, Refused
from swarmnet_protocols.wire import refusal_pb2
from tests.support.network.conversations import DEADLINE_S, collect, dial, drain, echo

from .conftest import UNKNOWN_PEER, Lab


async def flood(stream: Stream) -> None:
    while True:
        await stream.send(Message(b"too late"))
        await asyncio.sleep(0.01)


def test_a_protocol_that_a_peer_lacks_is_an_incompatible_version(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        with pytest.raises(IncompatibleVersion):
            await dial(a, b, protocol)

    lab.run(scenario)


@pytest.mark.parametrize("addresses", [(), ("/ip4/127.0.0.1/tcp/1",)])
def test_a_peer_that_does_not_exist_is_unreachable(
    lab: Lab, protocol: ProtocolSpec, addresses: tuple[str, ...]
) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(PeerUnreachable):
                await a.open(UNKNOWN_PEER, protocol, addresses=addresses, deadline_s=2.0)

    lab.run(scenario)


def test_another_peer_at_the_address_is_not_taken_for_the_asked_one(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        impostor_of = Identity.from_seed(b"impostor").peer_id
        await b.serve(protocol, echo)
        addresses = [address.replace(b.peer_id, impostor_of) for address in b.addresses()]
        with pytest.raises(PeerUnreachable):
            await a.open(impostor_of, protocol, addresses=addresses, deadline_s=2.0)

    lab.run(scenario)


def test_close_delivers_what_was_sent_by_the_opener(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        result = await collect(b, protocol)
        stream = await dial(a, b, protocol)
        for number in range(20):
            await stream.send(Message(b"%d" % number, bytes(200_000)))
        stream.close()
        stream.close()
        async with asyncio.timeout(DEADLINE_S):
            assert [int(message.header) for message in await result] == list(range(20))

    lab.run(scenario)


def test_close_delivers_what_was_sent_by_the_handler(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        async def handler(stream: Stream) -> None:
            for number in range(20):
                await stream.send(Message(b"%d" % number, bytes(200_000)))

        await b.serve(protocol, handler)
        stream = await dial(a, b, protocol)
        async with asyncio.timeout(DEADLINE_S):
            assert [int(message.header) for message in await drain(stream)] == list(range(20))

    lab.run(scenario)


@pytest.mark.parametrize("is_in_use", [False, True], ids=["at once", "while it is listened to"])
def test_a_refused_opener_learns_the_reason(lab: Lab, protocol: ProtocolSpec, is_in_use: bool) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        async def handler(stream: Stream) -> None:
            listening = asyncio.create_task(drain(stream) if is_in_use else asyncio.sleep(0))
            await asyncio.sleep(0.05)
            # Although something was said already.
            stream.refuse(Refusal(refusal_pb2.REASON_NOT_AUTHORISED, "it is \x1b[1mclosed", 2.5))
            await listening

        await b.serve(protocol, handler)

        async def ask() -> None:
            stream = await dial(a, b, protocol)
            with contextlib.suppress(StreamEnded):
                await stream.send(Message(b"hello", bytes(100_000)))
            for _ in range(2):
                with pytest.raises(Refused, match=f"{b.peer_id} refused the stream: it is .1mclosed") as info:
                    await stream.receive()
                assert info.value.retry_after_s == 2.5
                assert info.value.hint == "try again in 2 s"
            stream.close()

        await asyncio.gather(*(ask() for _ in range(20)))

    lab.run(scenario)


def test_close_ends_both_directions(lab: Lab, protocol: ProtocolSpec) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        server_saw_the_end = asyncio.Event()

        async def handler(stream: Stream) -> None:
            await drain(stream)
            with pytest.raises(StreamEnded):
                await flood(stream)
            server_saw_the_end.set()

        await b.serve(protocol, handler)
        stream = await dial(a, b, protocol)
        await stream.send(Message(b"hello"))  # a stream on which nothing was said may never be seen
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        stream.close()
        with pytest.raises(StreamEnded):
            await waiting
        with pytest.raises(StreamEnded):
            await stream.receive()
        with pytest.raises(StreamEnded):
            await stream.send(Message(b""))
        async with asyncio.timeout(DEADLINE_S):
            await server_saw_the_end.wait()

    lab.run(scenario)


def test_an_error_in_a_handler_closes_its_stream_and_no_other(
    lab: Lab, protocol: ProtocolSpec, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(a: Transport, b: Transport) -> None:
        async def handler(stream: Stream) -> None:
            while True:
                message = await stream.receive()
                if message.header == b"fail":
                    raise RuntimeError("as asked")
                await stream.send(message)

        await b.serve(protocol, handler)
        failing, other = await dial(a, b, protocol), await dial(a, b, protocol)
        await failing.send(Message(b"fail"))
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(StreamEnded):
                await failing.receive()
            for stream in (other, await dial(a, b, protocol)):
                await stream.send(Message(b"alive"))
                assert (await stream.receive()).header == b"alive"
                stream.close()

    lab.run(scenario)
    assert "as asked" in caplog.text
