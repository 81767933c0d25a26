"""Calls of the DHT: how many, how large and how fast, before any of them is parsed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

import pytest

from swarmnet_protocols.directory.dht.contacts import Contacts
from swarmnet_protocols.directory.records import Publisher
from swarmnet_protocols.errors import NotAuthorised, ProtocolViolation
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.net import Handler, Message, PeerId, ProtocolSpec, Stream
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits import resources
from swarmnet_protocols.net.limits.resource_limits import PEER_LIMITS, SYSTEM_LIMITS, Resource
from swarmnet_protocols.net.limits.resources import ResourceLimitReached, ResourceManager, Scope
from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind
from swarmnet_protocols.net.protocol_ids import DHT_FIND
from swarmnet_protocols.net.refusal import Refusal
from tests.defences import Patch, defence, nothing, replacing
from tests.support.attacks.switched_off import count_only
from tests.support.network.virtual_time import run

CALLER = Identity.from_seed(b"caller").peer_id


class Call(Protocol):
    async def __call__(self, request: bytes, caller: PeerId = CALLER) -> bytes: ...


class HandlersOnly:
    """A transport of which only the handlers are used."""

    def __init__(self) -> None:
        self.peer_id = Identity.from_seed(b"answerer").peer_id
        self.resources = ResourceManager()
        self.handlers: dict[str, Handler] = {}

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        self.handlers[protocol.id] = handler


class OneCall:
    """A stream with one request; records the reply."""

    address = "/ip4/203.0.113.9/tcp/1"

    def __init__(self, request: bytes, caller: PeerId, scope: Scope) -> None:
        self.peer, self.scope = caller, scope
        self.reply: bytes | None = None
        self._request = request

    async def receive(self) -> Message:
        return Message(self._request)

    async def send(self, message: Message) -> None:
        self.reply = message.header

    def refuse(self, refusal: Refusal) -> None:
        """Do nothing: the handler raises the reason, too."""


class SlowHandshakes:
    """Handshakes that end when the test sets ``finished``, and admit every peer or none."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.admits = True

    async def wait_outgoing(self, _peer: str) -> None:
        await self.finished.wait()

    def check(self, _peer: str, _protocol: object) -> None:
        if not self.admits:
            raise NotAuthorised("no member")


def with_guard(talk: Callable[[Call, SlowHandshakes, ResourceManager], Awaitable[None]]) -> None:
    """Run in virtual time, in which calls of one moment are many a second, however slow the machine
    is."""

    async def main() -> None:
        from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

        prepare_hivemind()
        from hivemind.proto import dht_pb2

        from swarmnet_protocols.directory.dht.rpc import GuardedP2P

        transport, handshakes = HandlersOnly(), SlowHandshakes()
        resources = transport.resources
        contacts = Contacts(Publisher(Identity.from_seed(b"answerer"), bytes(32), wall_clock), tuple)
        guard = GuardedP2P(cast(Any, transport), cast(Any, handshakes), contacts)

        async def answer(_request: Any, _context: Any) -> Any:
            return dht_pb2.FindResponse()

        await guard.add_protobuf_handler(DHT_FIND.id, answer, dht_pb2.FindRequest)

        async def call(request: bytes, caller: PeerId = CALLER) -> bytes:
            stream = OneCall(request, caller, resources.peer(caller, 0.0))
            await transport.handlers[DHT_FIND.id](cast(Stream, stream))
            assert stream.reply is not None
            return stream.reply

        await talk(call, handshakes, resources)
        assert not any(resources.system.used.values())

    run(main())


@defence("concurrent DHT calls of a peer are limited", off=count_only)
def test_calls_that_wait_for_a_handshake_are_few() -> None:
    async def talk(call: Call, handshakes: SlowHandshakes, resources: ResourceManager) -> None:
        calls = [asyncio.ensure_future(call(b"")) for _ in range(PEER_LIMITS[Resource.CALLS] + 1)]
        await asyncio.sleep(0)
        waiting, refused = calls[:-1], calls[-1]
        assert refused.done()
        with pytest.raises(ResourceLimitReached, match="calls"):
            await refused
        handshakes.finished.set()
        await asyncio.gather(*waiting)
        await call(b"")

    with_guard(talk)


@defence(
    "strangers leave a share of the DHT calls to known peers",
    off=replacing(resources, "KNOWN_PEER_SHARE", {}),
)
def test_a_known_peer_is_answered_while_strangers_use_all_their_calls() -> None:
    async def talk(call: Call, handshakes: SlowHandshakes, resources: ResourceManager) -> None:
        strangers = [
            Identity.from_seed(f"stranger {number}".encode()).peer_id
            for number in range(SYSTEM_LIMITS[Resource.CALLS] // PEER_LIMITS[Resource.CALLS])
        ]
        waiting = [
            asyncio.ensure_future(call(b"", stranger))
            for stranger in strangers
            for _ in range(PEER_LIMITS[Resource.CALLS])
        ]
        await asyncio.sleep(0)
        with resources.peer(CALLER, 0.0).reserve(Resource.ADMITTED_PEERS):
            known = [asyncio.ensure_future(call(b"")) for _ in range(PEER_LIMITS[Resource.CALLS])]
            await asyncio.sleep(0)
            handshakes.finished.set()
            await asyncio.gather(*known)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(outcome, bytes) for outcome in outcomes) == 0.75 * SYSTEM_LIMITS[Resource.CALLS]

    with_guard(talk)


def allow_large_calls(patch: pytest.MonkeyPatch) -> None:
    prepare_hivemind()
    from swarmnet_protocols.directory.dht import rpc as dht_rpc

    patch.setitem(dht_rpc.MAX_REQUEST_BYTES, DHT_FIND.id, 1 << 30)


@defence("DHT calls have a size limit", off=allow_large_calls)
def test_a_call_that_asks_for_too_much_is_not_parsed() -> None:
    """hivemind would look up every key of it before any other call."""

    async def talk(call: Call, handshakes: SlowHandshakes, resources: ResourceManager) -> None:
        from hivemind.proto import dht_pb2

        handshakes.finished.set()
        await call(dht_pb2.FindRequest(keys=[bytes(20)] * 500).SerializeToString())
        with pytest.raises(ProtocolViolation, match="at most 16384 are allowed"):
            await call(dht_pb2.FindRequest(keys=[bytes(20)] * 1000).SerializeToString())

    with_guard(talk)


@defence("a peer far over its rate makes no DHT calls", off=replacing(Scope, "check_rate", nothing))
def test_endless_calls_are_delayed_before_they_are_parsed() -> None:
    async def talk(call: Call, handshakes: SlowHandshakes, resources: ResourceManager) -> None:
        handshakes.finished.set()
        refused = 0
        for _ in range(10_000):
            try:
                await call(b"")
            except ResourceLimitReached:
                refused += 1
        assert 4_000 < refused < 6_000

    with_guard(talk)


def test_messages_of_strangers_are_not_parsed() -> None:
    async def talk(call: Call, handshakes: SlowHandshakes, resources: ResourceManager) -> None:
        handshakes.finished.set()
        handshakes.admits = False
        with pytest.raises(NotAuthorised):
            await call(b"\xff" * 100)

    with_guard(talk)


def check_nothing(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht import rpc as dht_rpc

    patch.setattr(dht_rpc, "_check_found", nothing)


@defence("answers with too much to check are refused", off=check_nothing, results=[21])
@pytest.mark.parametrize("results", [[0] * 17, [21]], ids=["keys", "peers"])
def test_an_answer_that_would_keep_us_busy_is_refused(results: list[int]) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from hivemind.proto import dht_pb2

    from swarmnet_protocols.directory.dht.rpc import _check_found

    _check_found(dht_pb2.FindResponse(results=[dht_pb2.FindResult(nearest_peer_ids=[b"x"] * 20)] * 16))
    with pytest.raises(ProtocolViolation):
        _check_found(
            dht_pb2.FindResponse(
                results=[dht_pb2.FindResult(nearest_peer_ids=[b"x"] * count) for count in results]
            )
        )
