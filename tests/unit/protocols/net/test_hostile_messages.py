"""The cost of hostile messages: no lasting memory, and an error that names the violation."""

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest
from google.protobuf.message import Message as Protobuf

from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, framing, typed_stream
from swarmnet_protocols.net.framing import CHECK_S, STALL_S, FrameReader
from swarmnet_protocols.net.limits.flow_control import LimitedReader
from swarmnet_protocols.net.limits.rate_limit import RateLimit, RateLimiter
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import ResourceLimitReached, ResourceManager, Scope
from swarmnet_protocols.net.limits.stream_scope import MAX_WAIT_S, OPEN_FRAMES, StreamScope
from swarmnet_protocols.session import wire_tensors
from swarmnet_protocols.session.adapters import read_part
from swarmnet_protocols.session.wire_tensors import decode_tensor
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import (
    handshake_pb2,
    membership_pb2,
    probe_pb2,
    report_pb2,
    session_pb2,
    training_pb2,
    workers_pb2,
)
from tests.defences import defence, nothing, replacing
from tests.support.attacks.hostile import NESTED, nested
from tests.support.attacks.switched_off import count_only, parse_leniently, wait_for_ever
from tests.support.network.virtual_time import run

MIB = 1 << 20
SPEC = ProtocolSpec("/test/1", max_payload_bytes=64 * MIB)
FIRST_MESSAGES: list[type[Protobuf]] = [
    session_pb2.SessionRequest,
    session_pb2.LinkRequest,
    session_pb2.PassRequest,
    session_pb2.AdapterRequest,
    session_pb2.Ping,
    report_pb2.ReportRequest,
    probe_pb2.ProbeRequest,
    workers_pb2.MatchmakingRequest,
    workers_pb2.StateRequest,
    training_pb2.ExchangeRequest,
    handshake_pb2.HandshakeMessage,
    handshake_pb2.RevocationsRequest,
    membership_pb2.AdmissionRequest,
]


@defence(
    "messages nested 100,000 deep are refused",
    off=replacing(typed_stream, "parse", parse_leniently),
    kind=session_pb2.SessionRequest,
)
@pytest.mark.parametrize("kind", FIRST_MESSAGES, ids=lambda kind: kind.DESCRIPTOR.name)
def test_messages_nested_without_end_are_not_parsed(kind: type[Protobuf]) -> None:
    with pytest.raises(ProtocolViolation):
        typed_stream.parse(kind, nested(NESTED))


@defence(
    "the shape of a tensor is checked before memory is allocated",
    off=replacing(wire_tensors, "_check_shape", nothing),
    shape=(1 << 30, 1 << 30),
)
@pytest.mark.parametrize("shape", [(1 << 30, 1 << 30), (1 << 31, 1 << 29), ((1 << 32) - 1,) * 64])
def test_a_tensor_of_two_to_the_sixty_numbers_is_refused_unread(shape: tuple[int, ...]) -> None:
    header = session_pb2.Tensor(dtype=session_pb2.DTYPE_FLOAT32, shape=shape)
    with pytest.raises(ProtocolViolation):
        decode_tensor(header, bytes(64), positions=1, hidden_size=16)


@pytest.mark.parametrize("shape", [[1 << 30, 1 << 30], [1 << 60, 1], [1 << 60, 0]])
def test_an_adapter_whose_tensors_have_an_invalid_shape_is_refused(shape: list[int]) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 64]}
    header = json.dumps({"0.q.down": entry, "0.q.up": entry}).encode()
    with pytest.raises(ProtocolViolation):
        read_part(struct.pack("<Q", len(header)) + header + bytes(64))


def with_frames(
    talk: Callable[
        [asyncio.StreamReader, Callable[[], Awaitable[Message]], ResourceManager], Awaitable[None]
    ],
) -> None:
    """An inbound stream, in virtual time. Afterwards nothing is held."""

    async def main() -> None:
        reader, resources = asyncio.StreamReader(), ResourceManager()
        scope = StreamScope.inbound(resources, PeerId("mallory"), Timing())
        frames = FrameReader(LimitedReader(reader, RateLimiter()), SPEC, scope)
        try:
            await talk(reader, lambda: scope.receive(frames.read), resources)
        finally:
            scope.close()
        assert not any(resources.system.used.values())

    run(main())


async def drip(reader: asyncio.StreamReader, data: bytes) -> None:
    """One byte a second."""
    for byte in data:
        reader.feed_data(bytes([byte]))
        await asyncio.sleep(1.0)


@defence("a first message has a deadline", off=wait_for_ever)
def test_a_first_message_that_drips_in_is_not_waited_for() -> None:
    async def talk(
        reader: asyncio.StreamReader, receive: Callable[[], Awaitable[Message]], _: ResourceManager
    ) -> None:
        dripping = asyncio.create_task(drip(reader, struct.pack(">II", 1000, 0) + bytes(1000)))
        with pytest.raises(DeadlineExceeded):
            await receive()
        assert asyncio.get_running_loop().time() == pytest.approx(Timing().first_message_s)
        dripping.cancel()

    with_frames(talk)


def test_a_later_message_that_drips_in_is_waited_for_a_limited_time() -> None:
    async def talk(
        reader: asyncio.StreamReader, receive: Callable[[], Awaitable[Message]], resources: ResourceManager
    ) -> None:
        reader.feed_data(struct.pack(">II", 1, 0) + b"1")
        await receive()
        dripping = asyncio.create_task(drip(reader, struct.pack(">II", 1000, 0) + bytes(1000)))
        with pytest.raises(DeadlineExceeded):
            await receive()
        assert asyncio.get_running_loop().time() == pytest.approx(Timing().chunk_s + 7.0, abs=1.5)
        dripping.cancel()

    with_frames(talk)


@pytest.mark.parametrize("why", ["another stream of it is in use", "it is served"])
def test_a_stopped_worker_of_the_same_round_is_waited_for(why: str) -> None:
    async def talk(
        reader: asyncio.StreamReader, receive: Callable[[], Awaitable[Message]], resources: ResourceManager
    ) -> None:
        scope = resources.peer("mallory", 0.0)
        if why == "it is served":
            stack.enter_context(scope.reserve(Resource.SESSIONS))
        else:
            reader.feed_data(struct.pack(">II", 1, 0) + b"1")
            await receive()
        started = asyncio.get_running_loop().time()
        second = StreamScope.inbound(resources, PeerId("mallory"), Timing())
        with pytest.raises(DeadlineExceeded):
            await second.receive(asyncio.Event().wait)  # type: ignore[arg-type]
        assert asyncio.get_running_loop().time() - started == pytest.approx(Timing().chunk_s)
        second.close()
        stack.close()

    stack = ExitStack()
    with_frames(talk)


def test_a_large_message_has_to_go_on_coming() -> None:
    async def talk(
        reader: asyncio.StreamReader, receive: Callable[[], Awaitable[Message]], resources: ResourceManager
    ) -> None:
        reader.feed_data(struct.pack(">II", 1, 0) + b"1")
        await receive()
        receiving = asyncio.ensure_future(receive())
        reader.feed_data(struct.pack(">II", 0, 4 * MIB))
        for number in range(4):
            await asyncio.sleep(0.9 * Timing().chunk_s)
            assert resources.peer("mallory", 0.0).used[Resource.MEMORY] == (4 * MIB if number else 0)
            reader.feed_data(bytes([number]) * MIB)
        assert bytes((await receiving).payload) == b"".join(bytes([number]) * MIB for number in range(4))

    with_frames(talk)


@defence("a message waits for memory", off=count_only)
def test_a_message_waits_for_room_or_is_refused_if_there_is_never_any() -> None:
    async def talk(
        reader: asyncio.StreamReader, receive: Callable[[], Awaitable[Message]], resources: ResourceManager
    ) -> None:
        resources.limit(Resource.MEMORY, system=6 * MIB, per_peer=3 * MIB // 2)
        other = resources.peer("other", 0.0).reserve(Resource.MEMORY, MIB)
        third = resources.peer("third", 0.0).reserve(Resource.MEMORY, 3 * MIB // 2)
        reader.feed_data(struct.pack(">II", 0, MIB) + bytes(MIB))
        receiving = asyncio.ensure_future(receive())
        await asyncio.sleep(1.0)
        assert not receiving.done()
        other.release()
        assert len((await receiving).payload) == MIB
        third.release()
        reader.feed_data(struct.pack(">II", 1, 3 * MIB // 2))
        with pytest.raises(ResourceLimitReached):
            await receive()

    with_frames(talk)


class Announcer:
    """A peer of a host whose memory for messages is limited. Each of its streams receives one
    message."""

    def __init__(self, resources: ResourceManager, name: str) -> None:
        self.resources = resources
        self.name = name

    def announce(self, size_bytes: int, sent_bytes: int) -> "asyncio.Task[Message]":
        """Announce a message, and send the beginning of it."""
        reader = asyncio.StreamReader()
        scope = StreamScope.inbound(self.resources, PeerId(self.name), Timing())
        frames = FrameReader(LimitedReader(reader, RateLimiter()), SPEC, scope)
        reader.feed_data(struct.pack(">II", 0, size_bytes) + bytes(sent_bytes))

        async def receive() -> Message:
            try:
                return await scope.receive(frames.read)
            finally:
                scope.close()

        return asyncio.create_task(receive())


def host_of_messages(*peers: str) -> tuple[ResourceManager, list[Announcer]]:
    """Memory for six messages of 4 MiB, and peers of one subnet, all known."""
    resources = ResourceManager()
    resources.limit(Resource.MEMORY, system=24 * MIB, per_peer=8 * MIB)
    for peer in peers:
        resources.peer(peer, 0.0, "203.0.113.0/24").reserve(Resource.SESSIONS)
    return resources, [Announcer(resources, peer) for peer in peers]


def reserve_when_announced(patch: pytest.MonkeyPatch) -> None:
    """Reserve the announced size of a message before any of it has come."""
    read_body = FrameReader._read_body

    async def reading(frames: FrameReader, size_bytes: int) -> memoryview:
        await frames._scope.reserve(size_bytes)
        return await read_body(frames, size_bytes)

    patch.setattr(FrameReader, "_read_body", reading)


@defence("messages that are announced and not sent hold no memory", off=reserve_when_announced)
def test_messages_that_are_announced_and_not_sent_hold_no_memory() -> None:
    async def main() -> None:
        resources, (*greedy, honest) = host_of_messages(*(f"greedy {n}" for n in range(7)), "honest")
        for peer in greedy:
            for _ in range(2):
                peer.announce(4 * MIB, 0)
        await asyncio.sleep(1.0)
        assert resources.system.used[Resource.MEMORY] == 0
        assert len((await honest.announce(4 * MIB, 4 * MIB)).payload) == 4 * MIB
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)

    run(main())


@defence("a message that stops gives way", off=replacing(framing, "STALL_S", 1e6))
def test_a_stopped_message_holds_memory_only_while_nobody_needs_it() -> None:
    async def main() -> None:
        resources, (*greedy, honest) = host_of_messages(*(f"greedy {n}" for n in range(3)), "honest")
        held = [peer.announce(4 * MIB, 100 << 10) for peer in greedy]
        await asyncio.sleep(10.0)
        assert not any(each.done() for each in held)  # slow links may pause
        assert resources.system.used[Resource.MEMORY] > 8 * MIB
        small = await honest.announce(1000, 1000)
        assert len(small.payload) == 1000
        assert asyncio.get_running_loop().time() == pytest.approx(10.0)
        large = await honest.announce(8 * MIB - 1000, 8 * MIB - 1000)
        assert len(large.payload) == 8 * MIB - 1000
        assert asyncio.get_running_loop().time() < 10.0 + STALL_S + 2 * CHECK_S
        assert isinstance(held[0].exception(), DeadlineExceeded)

    run(main())


def test_the_beginning_of_a_message_counts_without_the_rest() -> None:
    async def main() -> None:
        resources, (greedy, honest) = host_of_messages("greedy", "honest")
        resources.limit(Resource.MEMORY, system=6 * MIB, per_peer=6 * MIB)
        resources.limit(Resource.INBOUND_STREAMS, system=4096, per_peer=4096)
        held = [greedy.announce(60 << 10, 50 << 10) for _ in range(400)]
        await asyncio.sleep(2.5)
        assert resources.system.used[Resource.MEMORY] > 5 * MIB
        assert len((await honest.announce(MIB, MIB)).payload) == MIB
        assert asyncio.get_running_loop().time() < STALL_S + 3 * CHECK_S
        assert sum(isinstance(each.exception(), ResourceLimitReached) for each in held if each.done()) > 200
        for each in held:
            each.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    run(main())


@defence("messages of a peer are read at a limited rate", off=replacing(Scope, "charge", lambda *_: 0.0))
def test_frames_are_read_at_the_rate_of_their_peer_over_all_streams() -> None:
    async def main() -> None:
        resources = ResourceManager()
        resources.limit_rate(Rate.FRAMES, per_peer=RateLimit(per_s=100.0, burst=60.0))
        loop = asyncio.get_running_loop()

        async def read_all(count: int) -> None:
            reader = asyncio.StreamReader()
            reader.feed_data((struct.pack(">II", 1, 0) + b"x") * count)
            scope = StreamScope.inbound(resources, PeerId("mallory"), Timing())
            frames = FrameReader(LimitedReader(reader, RateLimiter()), SPEC, scope)
            for _ in range(count):
                await scope.receive(frames.read)
            scope.close()

        await asyncio.gather(*(read_all(100) for _ in range(3)))
        # 300 frames and 3 openings, 60 of them in a burst; nobody waits for the last frame of a
        # stream.
        assert loop.time() == pytest.approx((300 + 3 * OPEN_FRAMES - 60) / 100.0, abs=0.1)

    run(main())


@defence("a peer far over its rate opens no streams", off=replacing(Scope, "check_rate", nothing))
def test_streams_of_a_peer_that_owes_too_much_are_not_taken() -> None:
    async def main() -> None:
        resources = ResourceManager()
        resources.limit_rate(Rate.FRAMES, per_peer=RateLimit(per_s=100.0, burst=100.0))
        for _ in range(int(100 + 100 * MAX_WAIT_S) // OPEN_FRAMES + 1):
            StreamScope.inbound(resources, PeerId("mallory"), Timing())
        with pytest.raises(ResourceLimitReached) as caught:
            StreamScope.inbound(resources, PeerId("mallory"), Timing())
        assert caught.value.retry_after_s > MAX_WAIT_S
        await asyncio.sleep(caught.value.retry_after_s)
        StreamScope.inbound(resources, PeerId("mallory"), Timing())
        StreamScope.inbound(resources, PeerId("bob"), Timing())

    run(main())
