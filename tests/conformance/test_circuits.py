"""Relays and circuits between real processes of p2pd on loopback."""

import asyncio
import contextlib

import pytest

from swarmnet_protocols.errors import PeerUnreachable, StreamEnded
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Stream
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.protocol_ids import RELAY
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.reachability.relay import Relay
from swarmnet_protocols.reachability.routed_transport import RoutedTransport
from swarmnet_protocols.wire import relay_pb2 as pb
from tests.conformance.conftest import CircuitLab

pytestmark = pytest.mark.slow

DEADLINE_S = 5.0
STRANGER: PeerId = Identity.from_seed(b"stranger").peer_id


def run(lab: CircuitLab, scenario: object) -> None:
    async def main() -> None:
        await scenario(*await lab.trio())  # type: ignore[operator]

    lab.loop.run(main())


async def echo(stream: Stream) -> None:
    with contextlib.suppress(StreamEnded):
        while True:
            await stream.send(await stream.receive())


def test_a_circuit_ends_when_the_relay_drops_it(circuit_lab: CircuitLab, protocol: ProtocolSpec) -> None:
    async def scenario(a: RoutedTransport, b: RoutedTransport, relay: Relay) -> None:
        await b.serve(protocol, echo)
        stream = await a.open(b.peer_id, protocol, addresses=b.addresses(), deadline_s=DEADLINE_S)
        await stream.send(Message(b"one"))
        assert (await stream.receive()).header == b"one"
        assert relay.circuits == 1
        for each in list(relay._transport.endpoint.streams):  # type: ignore[attr-defined]
            if each.peer == a.peer_id:
                each.close()
        with pytest.raises(StreamEnded):
            await stream.receive()
        stream.close()

    run(circuit_lab, scenario)


def test_bytes_that_a_relay_changes_end_the_stream(
    circuit_lab: CircuitLab, protocol: ProtocolSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def flip(self: Relay, source: Stream, target: Stream) -> None:
        with contextlib.suppress(StreamEnded):
            while True:
                payload = bytearray((await source.receive()).payload)
                payload[-1] ^= 1
                await target.send(Message(b"", payload))

    async def scenario(a: RoutedTransport, b: RoutedTransport, _: Relay) -> None:
        received = []

        async def record(stream: Stream) -> None:
            received.append(await stream.receive())

        await b.serve(protocol, record)
        monkeypatch.setattr(Relay, "_forward", flip)
        stream = await a.open(b.peer_id, protocol, addresses=b.addresses(), deadline_s=DEADLINE_S)
        await stream.send(Message(b"one"))
        with pytest.raises(StreamEnded):
            await stream.receive()
        assert received == []
        stream.close()

    run(circuit_lab, scenario)


def test_a_peer_without_a_reservation_is_not_reached(circuit_lab: CircuitLab, protocol: ProtocolSpec) -> None:
    async def scenario(a: RoutedTransport, b: RoutedTransport, _: Relay) -> None:
        circuit = next(each for each in b.addresses() if "/p2p-circuit" in each)
        address = circuit.replace(b.peer_id, STRANGER)
        with pytest.raises(PeerUnreachable, match="no reservation"):
            await a.open(STRANGER, protocol, addresses=[address], deadline_s=DEADLINE_S)

    run(circuit_lab, scenario)


def test_a_circuit_that_was_not_announced_cannot_be_accepted(circuit_lab: CircuitLab) -> None:
    async def scenario(a: RoutedTransport, b: RoutedTransport, relay: Relay) -> None:
        [address, *_] = relay._transport.addresses()
        stream = await RELAY.open(a.direct, relay._transport.peer_id, addresses=[address])
        request = pb.RelayRequest(accept=pb.Accept(circuit=bytes(16)))
        with pytest.raises(Refused, match="no such circuit"):
            await stream.ask(request)

    run(circuit_lab, scenario)


def test_a_peer_that_cannot_be_dialled_does_not_relay(circuit_lab: CircuitLab) -> None:
    async def scenario(a: RoutedTransport, b: RoutedTransport, relay: Relay) -> None:
        relay._is_open = lambda: False
        try:
            [address, *_] = relay._transport.addresses()
            stream = await RELAY.open(a.direct, relay._transport.peer_id, addresses=[address])
            request = pb.RelayRequest(connect=pb.Connect(peer=b.peer_id))
            with pytest.raises(Refused, match="does not relay"):
                await stream.ask(request)
        finally:
            relay._is_open = lambda: True

    run(circuit_lab, scenario)


def test_a_reservation_is_made_again_when_the_relay_drops_it(circuit_lab: CircuitLab) -> None:
    async def scenario(a: RoutedTransport, b: RoutedTransport, relay: Relay) -> None:
        assert b.reservations is not None
        before = relay._reserved[b.peer_id]
        before.close()
        for _ in range(500):
            if relay._reserved.get(b.peer_id) not in (None, before):
                break
            await asyncio.sleep(0.01)
        assert relay._reserved[b.peer_id] is not before
        assert await b.reservations.wait_for_one(DEADLINE_S)

    run(circuit_lab, scenario)
