"""Hole punching: two peers behind routers replace their circuit by a direct connection.

As in DCUtR (Seemann, Inden and Vyzovitis, "Decentralized Hole Punching", 2022):

1. The two peers exchange their external addresses over the circuit and measure the round trip.
2. The first peer sends a start message. Half a round trip later both dial.
3. Over QUIC both dial as clients, and either connection will do. Half a second later both try a TCP
   simultaneous open.

If one of the two can be dialled, only the other one dials.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from swarmnet_protocols.errors import PeerUnreachable, ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import cancel, loop_time
from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.dialling import MAX_DIALLED
from swarmnet_protocols.net.limits.resource_limits import Rate
from swarmnet_protocols.net.multiaddr import Multiaddr, parse_multiaddrs
from swarmnet_protocols.net.protocol_ids import PUNCH, PUNCH_S
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.reachability.detection import Reachability
from swarmnet_protocols.reachability.relay import Relay
from swarmnet_protocols.reachability.routed_transport import RoutedTransport
from swarmnet_protocols.reachability.simultaneous_open import dial_through, serve_at, simultaneous_open
from swarmnet_protocols.wire import relay_pb2 as pb
from swarmnet_protocols.wire.report_pb2 import Reach

_log = logging.getLogger(__name__)

DIAL_S = 3.0
"""Timeout in seconds for dialling over both transports together."""
TCP_AFTER_S = 0.5
"""Head start of QUIC in seconds."""
CHECK_S = 0.05
"""Seconds between two checks whether the other side's dial has succeeded."""
TRIES = 3
PAUSE_S = 7.0
"""Seconds between two tries. libp2p refuses to dial an address for 5 to 6 s after a failure."""
AGAIN_S = 120.0
"""Seconds until a peer that was not reached is tried again."""
MAX_AT_ONCE = 16
MAX_REMEMBERED = 1024


class HolePunching:
    """Punches holes to peers behind circuits, and answers when other peers do."""

    def __init__(self, transport: RoutedTransport, guarded: Transport, reachability: Reachability) -> None:
        self._transport = transport
        self._guarded = guarded
        self._reachability = reachability
        self.succeeded = self.failed = 0
        """The numbers of holes that this peer has punched, and of failed attempts."""
        self.total_s = 0.0
        """Seconds that the successful attempts took, including the agreement."""
        self._running: dict[PeerId, asyncio.Task[None]] = {}
        self._first_tries: dict[PeerId, asyncio.Task[bool]] = {}
        self._not_before: Latest[PeerId, float] = Latest(MAX_REMEMBERED)

    async def serve(self) -> None:
        await PUNCH.serve(self._guarded, self._answer)

    async def close(self) -> None:
        await cancel(*self._running.values())

    def begin(self, peer: PeerId) -> "asyncio.Task[bool] | None":
        """Try to reach ``peer`` directly, in the background, unless that was tried lately.

        Returns the first try while it runs, else None.
        """
        now = loop_time()
        if peer in self._first_tries:
            return self._first_tries[peer]
        is_tried = self._not_before.get(peer, 0.0) > now
        if peer in self._running or is_tried or len(self._running) >= MAX_AT_ONCE:
            return None
        self._not_before[peer] = now + AGAIN_S
        first = self._first_tries[peer] = asyncio.create_task(self._try(peer), name=f"punch {peer}")
        first.add_done_callback(lambda _: self._first_tries.pop(peer))
        self._running[peer] = task = asyncio.create_task(self._persist(peer, first), name=f"punch {peer}")
        task.add_done_callback(lambda _: self._running.pop(peer))
        return first

    async def _persist(self, peer: PeerId, first: "asyncio.Task[bool]") -> None:
        """Repeat a failed first try."""
        try:
            is_done = await first
            for _ in range(TRIES - 1):
                if is_done:
                    return
                await asyncio.sleep(PAUSE_S)
                is_done = await self._try(peer)
        finally:
            await cancel(first)

    async def _try(self, peer: PeerId) -> bool:
        """Try once. Return whether to stop trying: the peer is connected, or does not agree."""
        began = loop_time()
        try:
            is_direct = await self._agree_and_dial(peer)
        except SwarmnetError as error:
            _log.info("no agreement with %s on a direct connection: %s", peer, error)
            return True
        if is_direct:
            self._not_before.pop(peer, None)
            self.succeeded += 1
            self.total_s += loop_time() - began
            _log.info("connected to %s directly after %.2f s", peer, loop_time() - began)
        else:
            self.failed += 1
            _log.info("%s was not reached directly", peer)
        return is_direct

    async def _agree_and_dial(self, peer: PeerId) -> bool:
        stream = await PUNCH.open(self._guarded, peer, deadline_s=PUNCH_S)
        with contextlib.closing(stream):
            asked = loop_time()
            mine = self._my_addresses()
            await stream.send(pb.PunchRequest(addresses=mine))
            reply, _ = await stream.receive()
            round_trip_s = loop_time() - asked
            await stream.send(pb.PunchRequest(start=pb.PunchStart()))
            await asyncio.sleep(round_trip_s / 2)
            return await self._dial(peer, mine, reply.addresses, serves=False)

    async def _answer(self, stream: TypedStream[pb.PunchReply, pb.PunchRequest]) -> None:
        scope, now = stream.stream.scope, loop_time()
        scope.check_rate(Rate.DIALS, 0.0, now)
        scope.charge(Rate.DIALS, 1, now)
        request, _ = await stream.receive()
        mine = self._my_addresses()
        await stream.send(pb.PunchReply(addresses=mine))
        start, _ = await stream.receive()
        if not start.HasField("start"):
            raise ProtocolViolation("a punch without a start")
        await self._dial(stream.peer, mine, request.addresses, serves=True)

    def _my_addresses(self) -> pb.PunchAddresses:
        """Return the external addresses of this peer.

        They are the addresses that relays observed. If none is a UDP address, the listening UDP
        port is added, because most routers keep it.
        """
        if self._reachability.is_surely_open:
            public = [
                each.without_peer()
                for each in parse_multiaddrs(self._transport.addresses())
                if not each.is_relayed
            ]
            return pb.PunchAddresses(addresses=map(str, public[:MAX_DIALLED]), is_open=True)
        own = self._own_addresses()
        observed = list(dict.fromkeys(each.without_peer() for each in self._transport.observed_addresses()))
        # Connections that were not dialled from the listening port have another mapping in the
        # router. Their addresses are of no use, so they come last.
        observed.sort(
            key=lambda each: not any((each.kind, each.port) == (mine.kind, mine.port) for mine in own)
        )
        if not any(each.kind == "udp" for each in observed):
            observed += [
                Multiaddr(ip, "udp", quic.port, ("quic-v1",))
                for ip in dict.fromkeys(each.ip for each in observed)
                if (quic := _first(own, "udp", ip.version)) is not None
            ]
        return pb.PunchAddresses(addresses=map(str, observed[:MAX_DIALLED]))

    def _own_addresses(self) -> list[Multiaddr]:
        """Return the addresses on which this peer listens for other machines."""
        own = parse_multiaddrs(self._transport.own_addresses())
        return [each for each in own if not each.is_relayed and not each.ip.is_loopback]

    async def _dial(
        self, peer: PeerId, mine: pb.PunchAddresses, theirs: pb.PunchAddresses, *, serves: bool
    ) -> bool:
        """Dial ``peer`` at the agreed moment. Returns whether it is connected.

        ``serves``: this end acts as the server of a simultaneous open.
        """
        named = [each for each in parse_multiaddrs(theirs.addresses[:MAX_DIALLED]) if not each.is_relayed]
        addresses = self._transport.direct.permitted(peer, list(map(str, named)))
        attempts = []
        if theirs.is_open:
            attempts.append(self._transport.connect(peer, addresses, deadline_s=DIAL_S))
        elif not mine.is_open:
            parsed = list(parse_multiaddrs(addresses))
            if quic := [str(each) for each in parsed if each.kind == "udp"]:
                attempts.append(self._transport.connect(peer, quic, deadline_s=DIAL_S))
            if (tcp := next((each for each in parsed if each.kind == "tcp"), None)) is not None:
                attempts.append(self._open_simultaneously(peer, tcp, serves=serves))
        tasks = [asyncio.create_task(attempt) for attempt in attempts]
        try:
            async with asyncio.timeout(DIAL_S + TCP_AFTER_S):
                while True:
                    if await self._transport.direct.is_connected(peer):
                        self._transport.connected_directly(peer)
                        return True
                    await asyncio.sleep(CHECK_S)
        except TimeoutError:
            return False
        finally:
            await cancel(*tasks)

    async def _open_simultaneously(self, peer: PeerId, address: Multiaddr, *, serves: bool) -> None:
        await asyncio.sleep(TCP_AFTER_S)
        own = _first(self._own_addresses(), "tcp", address.ip.version)
        if own is None or await self._transport.direct.is_connected(peer):
            return
        try:
            reader, writer = await simultaneous_open(own.port, address, within_s=DIAL_S - TCP_AFTER_S)
        except (OSError, TimeoutError) as error:
            _log.info("no simultaneous open with %s: %s", peer, error)
            return

        async def dial(local: str) -> None:
            await self._transport.connect(peer, [local], deadline_s=DIAL_S)

        async def use() -> None:
            forwarded = self._transport.direct.endpoint.forwarded
            with contextlib.suppress(PeerUnreachable):
                if serves:
                    await serve_at(reader, writer, address, own.port, forwarded)
                else:
                    await dial_through(reader, writer, address, dial, forwarded)

        # The endpoint runs this task, because the connection outlives this attempt.
        self._transport.direct.endpoint.start(use())


def _first(addresses: Iterable[Multiaddr], kind: str, version: int) -> Multiaddr | None:
    """Return the first address over ``kind`` with this IP version, or None."""
    return next((each for each in addresses if each.kind == kind and each.ip.version == version), None)


def describe(
    reachability: Reachability, punching: HolePunching, relay: Relay, transport: RoutedTransport
) -> Reach:
    """Collect the reachability of this peer from all modules of this folder."""
    return Reach(
        kind=reachability.kind,
        nat=reachability.nat,
        relays=reachability.relays_held,
        punched=punching.succeeded,
        not_punched=punching.failed,
        punch_s=punching.total_s / max(1, punching.succeeded),
        circuits=transport.circuits,
        reservations=relay.reservations,
        forwarded_circuits=relay.circuits,
        forwarded_bytes=relay.forwarded_bytes,
    )
