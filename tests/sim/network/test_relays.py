"""Relays and reservations on a simulated network, with relays that fail and peers that hoard."""

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet_protocols.directory import relay_announcements
from swarmnet_protocols.directory.records import Publisher, Record
from swarmnet_protocols.directory.relay_announcements import MAX_FOUND, TOPIC, choose
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel, in_background
from swarmnet_protocols.net import Message, PeerId, ReachKind, Stream
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.limits.resource_limits import SYSTEM_LIMITS, Resource
from swarmnet_protocols.net.protocol_ids import RELAY, RELAY_S
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import Patience
from swarmnet_protocols.reachability import detection, relay, reservations
from swarmnet_protocols.reachability.detection import Reachability
from swarmnet_protocols.reachability.dial_back import Probed
from swarmnet_protocols.reachability.relay import MAX_UNCONFIRMED, OPEN_S, Relay
from swarmnet_protocols.reachability.reservations import WANTED, Reservations
from swarmnet_protocols.wire import records_pb2
from swarmnet_protocols.wire import relay_pb2 as pb
from tests.defences import Patch, defence, no, replacing
from tests.support.network import virtual_time
from tests.support.network.memory_network import LinkProfile, MemoryNetwork, MemoryTransport

SYSTEM = 8
"""Reservations that a relay has in these tests."""


CIRCUITS_PER_PEER = 4


@dataclass
class Lab:
    network: MemoryNetwork
    stack: AsyncExitStack
    relays: dict[str, Relay] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)

    async def peer(self, name: str, address: str = "") -> MemoryTransport:
        peer = Identity.from_seed(name.encode()).peer_id
        if address:
            self.network.move(peer, address)
        return await self.stack.enter_async_context(self.network.transport(peer))

    async def relay(self, name: str, link: LinkLimiter | None = None) -> MemoryTransport:
        transport = await self.peer(name)
        transport.resources.limit(Resource.RELAY_RESERVATIONS, system=SYSTEM)
        relay = self.relays[name] = Relay(transport, lambda: True, link or LinkLimiter())
        await relay.serve()
        self.addresses += transport.addresses()
        return transport

    async def reserve(
        self,
        transport: MemoryTransport,
        candidates: Sequence[str] | None = None,
        on_incoming: Callable[[bytes], None] = lambda _: None,
        look_s: float = 0.0,
    ) -> Reservations:
        """``on_incoming`` is called with the number of each circuit that another peer wants."""

        async def found() -> Sequence[str]:
            await asyncio.sleep(look_s)
            return self.addresses if candidates is None else candidates

        async def address_of(peer: PeerId) -> str:
            return f"/memory/{peer}"

        reservations = Reservations(
            transport, found, address_of, lambda _, incoming, __: on_incoming(incoming.circuit)
        )
        self.stack.push_async_callback(cancel, asyncio.create_task(reservations.run()))
        return reservations


def run(scenario: Callable[[Lab], Awaitable[None]]) -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.02))
        async with AsyncExitStack() as stack:
            await scenario(Lab(network, stack))

    virtual_time.run(main())


@asynccontextmanager
async def reserved(lab: Lab, transport: MemoryTransport, relay: MemoryTransport) -> AsyncIterator[None]:
    """A reservation, silent after its request."""
    stream = await transport.open(relay.peer_id, RELAY, deadline_s=1.0)
    await stream.send(Message(pb.RelayRequest(reserve=pb.Reserve()).SerializeToString()))
    await asyncio.sleep(0.2)
    try:
        yield
    finally:
        stream.close()


# ---- relays that fail --------------------------------------------------------------------------


def test_a_peer_reserves_at_two_relays_and_elsewhere_when_one_is_lost() -> None:
    async def scenario(lab: Lab) -> None:
        relays = [await lab.relay(f"relay {number}") for number in range(3)]
        reservations = await lab.reserve(await lab.peer("alice"))
        await asyncio.sleep(1.0)
        assert len(reservations.held) == WANTED == 2
        lost = reservations.held[0].relay
        lab.network.crash(lost)
        await asyncio.sleep(3.0)
        assert {each.relay for each in reservations.held} == {each.peer_id for each in relays} - {lost}

    run(scenario)


def test_a_relay_that_takes_its_word_back_holds_up_nobody() -> None:
    async def scenario(lab: Lab) -> None:
        async def accept_and_close(stream: Stream) -> None:
            await stream.receive()
            accepted = pb.Accepted(observed_address="/ip4/203.0.113.7/tcp/9")
            await stream.send(Message(pb.RelayReply(accepted=accepted).SerializeToString()))
            stream.close()

        relay = await lab.peer("relay")
        await relay.serve(RELAY, accept_and_close)
        reservations = await lab.reserve(await lab.peer("alice"), relay.addresses(), look_s=1.0)
        await asyncio.sleep(1.5)  # the next relay is looked for
        assert not await reservations.wait_for_one(0.1)

    run(scenario)


@defence(
    "a relay that is silent is given up",
    off=replacing(reservations, "RELAY", replace(RELAY, opener=lambda _: Patience(1e9))),
    side="the relay",
)
@defence(
    "a reserved peer that is silent is given up",
    off=replacing(relay, "RELAY", replace(RELAY, server=lambda _: Patience(1e9))),
    side="the peer",
)
@pytest.mark.parametrize("side", ["the relay", "the peer"])
def test_a_reservation_ends_when_a_side_is_silent(side: str) -> None:
    async def scenario(lab: Lab) -> None:
        relay, alice = await lab.relay("relay"), await lab.peer("alice")
        reservations = await lab.reserve(alice)
        await asyncio.sleep(1.0)
        assert lab.relays["relay"].reservations == 1
        lab.network.hang(relay.peer_id if side == "the relay" else alice.peer_id)
        await asyncio.sleep(RELAY_S + 1.5)
        if side == "the relay":
            assert not reservations.held
        else:
            assert not lab.relays["relay"].reservations

    run(scenario)


@defence("an owner's relay that is off forwards nothing", off=replacing(relay.Relay, "relays", True))
def test_a_relay_that_is_switched_off_takes_no_peer() -> None:
    async def scenario(lab: Lab) -> None:
        link = LinkLimiter()
        link.set_relay_rate(0)
        relay, alice = await lab.relay("relay", link), await lab.peer("alice")
        stream = await RELAY.open(alice, relay.peer_id)
        with pytest.raises(Refused, match="does not relay"):
            await stream.ask(pb.RelayRequest(reserve=pb.Reserve()))

    run(scenario)


@defence(
    "an observed address is checked where it arrives",
    off=replacing(reservations, "parse_multiaddr", str),
    address="/ip4/1.2.3.4/tcp/²",
)
@pytest.mark.parametrize("address", ["/ip4/1.2.3.4/tcp/²", "/ip4/1.2.3.4/tcp/99999", "nonsense", ""])
def test_an_observed_address_that_is_none_is_not_known(address: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.relay("relay")
        alice = await lab.peer("alice", address)
        reservations = await lab.reserve(alice)
        await asyncio.sleep(1.0)
        assert [each.observed for each in reservations.held] == [None]

    run(scenario)


@defence("relays that do not answer are tried at a bounded rate", off=replacing(reservations, "WANTED", 1000))
def test_thousands_of_silent_relays_do_not_hide_one_that_answers() -> None:
    async def scenario(lab: Lab) -> None:
        await lab.relay("relay")
        gone = [f"/memory/0/p2p/{Identity.from_seed(bytes([number])).peer_id}" for number in range(200)]
        alice = await lab.peer("alice")
        opened: list[PeerId] = []
        dial = alice.open

        async def count(peer: PeerId, *args: object, **options: object) -> object:
            opened.append(peer)
            return await dial(peer, *args, **options)  # type: ignore[arg-type]

        alice.open = count  # type: ignore[method-assign, assignment]
        reservations = await lab.reserve(alice, [*lab.addresses, *gone])
        await asyncio.sleep(10.0)
        assert len(reservations.held) == 1
        # At any time at most WANTED attempts run, and a relay that failed is left alone for a
        # while.
        assert len(opened) <= 30

    run(scenario)


@defence(
    "a bounded number of announced relays is read", off=replacing(relay_announcements, "MAX_FOUND", 1 << 20)
)
def test_a_bounded_number_of_announced_relays_is_read() -> None:
    def record(number: int, address: str = "/ip4/25.0.0.1/tcp/4001") -> Record:
        identity = Identity.from_seed(number.to_bytes(4, "big"))
        addresses = [f"{address}/p2p/{identity.peer_id}"]
        body = records_pb2.RelayRecord(addresses=addresses).SerializeToString()
        return Publisher(identity, bytes(32), lambda: 1.0).seal(TOPIC, body, lifetime_s=10)[0]

    records = [record(number) for number in range(1000)] * 10
    assert len(choose(records, random.Random(0))) == MAX_FOUND
    circuit = f"/ip4/25.0.0.1/tcp/1/p2p/{Identity.from_seed(b'x').peer_id}/p2p-circuit"
    assert choose([record(1, circuit)], random.Random(0)) == []
    assert relay_announcements.ENOUGH >= MAX_FOUND


# ---- peers that take more than their share -----------------------------------------------------


def slots_for_the_first(patch: Patch) -> None:
    @contextmanager
    def first_come(self, stream):  # type: ignore[no-untyped-def]
        with stream.scope.reserve(self._resource):
            yield

    patch.setattr(relay.SubnetSlots, "slot", first_come)


@defence("a subnet cannot hoard the reservations of a relay", off=slots_for_the_first)
def test_a_subnet_that_hoards_reservations_keeps_no_other_out() -> None:
    async def scenario(lab: Lab) -> None:
        relay = await lab.relay("relay")
        relay.resources.limit(Resource.RELAY_RESERVATIONS, system=SYSTEM)
        for number in range(3 * SYSTEM):
            hoarder = await lab.peer(f"hoarder {number}", f"/ip4/203.0.113.{number}/tcp/1")
            await lab.reserve(hoarder)
        await asyncio.sleep(5.0)
        assert lab.relays["relay"].reservations == SYSTEM
        honest = await lab.reserve(await lab.peer("honest", "/ip4/198.51.100.1/tcp/1"))
        await asyncio.sleep(5.0)
        assert len(honest.held) == 1
        before = honest.held
        await asyncio.sleep(60.0)
        assert honest.held == before

    run(scenario)


def any_number_of_circuits(patch: Patch) -> None:
    patch.setattr(sys.modules[__name__], "CIRCUITS_PER_PEER", SYSTEM_LIMITS[Resource.CIRCUITS])


@defence("a relay forwards a bounded number of circuits for one peer", off=any_number_of_circuits)
def test_a_relay_forwards_a_bounded_number_of_circuits_for_one_peer() -> None:
    async def scenario(lab: Lab) -> None:
        relay = await lab.relay("relay")
        relay.resources.limit(Resource.CIRCUITS, per_peer=CIRCUITS_PER_PEER)
        alice, mallory = await lab.peer("alice"), await lab.peer("mallory")
        announced: list[bytes] = []
        await lab.reserve(alice, on_incoming=announced.append)
        await asyncio.sleep(1.0)
        request = pb.RelayRequest(connect=pb.Connect(peer=alice.peer_id)).SerializeToString()
        streams = [await mallory.open(relay.peer_id, RELAY, deadline_s=1.0) for _ in range(20)]
        for stream in streams:
            await stream.send(Message(request))
        await asyncio.sleep(1.0)
        assert len(announced) == 4

    run(scenario)


async def ask_for_circuit(opener: MemoryTransport, relay: MemoryTransport, target: PeerId) -> Stream:
    """A stream on which ``opener`` has asked for a circuit; it confirms nothing by itself."""
    stream = await opener.open(relay.peer_id, RELAY, deadline_s=1.0)
    await stream.send(Message(pb.RelayRequest(connect=pb.Connect(peer=target)).SerializeToString(), b"hello"))
    return stream


async def accept_circuits(lab: Lab, relay: MemoryTransport, name: str) -> MemoryTransport:
    """A peer with a reservation that accepts every circuit, and echoes what comes."""
    target = await lab.peer(name)

    async def accept(circuit: bytes) -> None:
        stream = await target.open(relay.peer_id, RELAY, deadline_s=1.0)
        with contextlib.suppress(SwarmnetError), contextlib.closing(stream):
            await stream.send(Message(pb.RelayRequest(accept=pb.Accept(circuit=circuit)).SerializeToString()))
            while True:
                await stream.send(Message(b"", (await stream.receive()).payload))

    tasks: list[asyncio.Task[None]] = []
    await lab.reserve(target, on_incoming=lambda circuit: tasks.append(asyncio.create_task(accept(circuit))))
    lab.stack.push_async_callback(lambda: cancel(*tasks))
    await asyncio.sleep(1.0)
    return target


async def use(stream: Stream) -> bool:
    """Confirm a circuit, and see whether it carries bytes."""
    try:
        async with asyncio.timeout(2.0):
            await stream.receive()
            await stream.send(Message(b"", b"confirmed"))
            return (await stream.receive()).payload == b"confirmed"
    except (SwarmnetError, TimeoutError):
        return False


@defence(
    "circuits that are not confirmed keep no other peer out", off=replacing(relay, "MAX_UNCONFIRMED", 1 << 20)
)
def test_circuits_that_are_not_confirmed_keep_no_other_peer_out() -> None:
    async def scenario(lab: Lab) -> None:
        relay = await lab.relay("relay")
        target = await accept_circuits(lab, relay, "target")
        mallory = await lab.peer("mallory", "/ip4/203.0.113.1/tcp/1")
        held = []

        async def hoard(number: int) -> None:
            for _ in range(number):
                with contextlib.suppress(SwarmnetError):
                    held.append(await ask_for_circuit(mallory, relay, target.peer_id))

        await hoard(120)
        await asyncio.sleep(0.5)
        assert sum(each.target == target.peer_id for each in lab.relays["relay"]._circuits.values()) <= (
            MAX_UNCONFIRMED
        )
        # Of the same subnet: the peer with the most loses one.
        honest = await lab.peer("honest", "/ip4/203.0.113.2/tcp/1")
        for _ in range(5):
            await hoard(1)
            assert await use(await ask_for_circuit(honest, relay, target.peer_id))
        await asyncio.sleep(2 * OPEN_S)
        assert lab.relays["relay"].circuits == len(lab.relays["relay"]._circuits) == 5
        for each in held:
            each.close()

    run(scenario)


@defence(
    "a peer with all circuits to another loses one to a peer with fewer",
    off=replacing(relay, "has_larger_share", no),
)
def test_a_peer_with_all_circuits_loses_one_to_a_peer_with_fewer() -> None:
    async def scenario(lab: Lab) -> None:
        relay = await lab.relay("relay")
        target = await accept_circuits(lab, relay, "target")
        relay.resources.limit(Resource.CIRCUITS, per_peer=CIRCUITS_PER_PEER)
        mallory = await lab.peer("mallory", "/ip4/203.0.113.1/tcp/1")
        for _ in range(CIRCUITS_PER_PEER):
            assert await use(await ask_for_circuit(mallory, relay, target.peer_id))
        for number in range(CIRCUITS_PER_PEER // 2):
            honest = await lab.peer(f"honest {number}", f"/ip4/198.51.100.{number}/tcp/1")
            assert await use(await ask_for_circuit(honest, relay, target.peer_id))
        assert not await use(await ask_for_circuit(mallory, relay, target.peer_id))

    run(scenario)


# ---- reports about reach -----------------------------------------------------------------------


def believe_one_report(patch: Patch) -> None:
    patch.setattr(detection, "judge", lambda answers: any(each.reached for each in answers) or None)


@defence(
    "one false report does not decide whether a peer can be dialled",
    off=believe_one_report,
    reached=[1, 0, 0],
    expected=False,
)
@pytest.mark.parametrize(
    ("reached", "expected"),
    [([], None), ([1], True), ([0], False), ([1, 0], False), ([1, 1, 0], True), ([1, 0, 0], False)],
)
def test_the_majority_of_reports_decides_whether_a_peer_is_dialable(
    reached: list[int], expected: bool | None
) -> None:
    peer = Identity.from_seed(b"x").peer_id
    answers = [Probed(peer, "25.0.0.1", (4001,) if each else (), 0.0, 0.1) for each in reached]
    assert detection.judge(answers) is expected


@pytest.mark.parametrize(("was_dialled", "kind"), [(False, ReachKind.UNKNOWN), (True, ReachKind.OPEN)])
def test_a_peer_without_bootstrap_peers_is_open_once_it_was_dialled(
    was_dialled: bool, kind: ReachKind
) -> None:
    async def scenario(lab: Lab) -> None:
        alice = await lab.peer("alice")
        routed: Any = SimpleNamespace(own_addresses=alice.addresses, reached_at=tuple, accept_circuit=None)

        async def no_address(_: PeerId) -> str:
            return ""

        async def dialled() -> bool:
            return answers[-1]

        async def no_relays() -> tuple[str, ...]:
            return ()

        answers = [was_dialled]
        reachability = Reachability(routed, alice, (), lambda: 0.0, no_address, dialled)
        await reachability.find_out()
        assert reachability.kind is kind
        async with in_background(reachability.run(no_relays, lambda _: None)):
            answers.append(True)
            await asyncio.sleep(2 * detection.CHECK_S)
            assert reachability.kind is ReachKind.OPEN, "a peer that is served shows it within seconds"
        assert not reachability.is_surely_open

    run(scenario)
