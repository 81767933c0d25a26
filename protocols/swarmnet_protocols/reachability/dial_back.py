"""Probes: a peer dials another peer's ports and tells it the time.

The other peer learns whether it can be reached and whether its clock is right. A client that finds
no host compares its clock in this way (``advise_on_clock``).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.clock import Clock, clock_advice, wall_clock
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.dialling import Network, may_dial_back
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.multiaddr import Multiaddr, parse_ip, parse_multiaddrs
from swarmnet_protocols.net.p2pd.transport import peer_of
from swarmnet_protocols.net.protocol_ids import PROBE
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.wire import probe_pb2 as pb

MAX_PORTS = 4
DIAL_S = 2.5
"""Timeout in seconds for dialling one port."""
HELLO = b"\x13/multistream/1.0.0\n"
"""The first bytes that libp2p sends on a TCP connection."""


@dataclass(frozen=True)
class Probed:
    """One peer's reply to a probe."""

    peer: PeerId
    observed_ip: str
    """The IP address of this machine that the peer dialled.

    Empty if the peer dialled nothing, for example because it sees only a relay's address.
    """
    reached: tuple[int, ...]
    behind_s: float
    """Seconds that this machine's clock is behind the peer's; negative if ahead.

    Accurate to half the round trip.
    """
    round_trip_s: float


class Probes:
    """Answers probes: ``PROBE.serve(transport, Probes(…).answer)``."""

    def __init__(
        self,
        addresses_of: Callable[[PeerId], Awaitable[Sequence[str]]],
        clock: Clock,
        networks: Callable[[], Sequence[Network]] = tuple,
    ) -> None:
        """``addresses_of`` returns the multiaddrs that a peer is connected from.

        For ``networks`` see ``may_dial_back``.
        """
        self._addresses_of = addresses_of
        self._clock = clock
        self._networks = networks

    async def answer(self, stream: TypedStream[pb.ProbeReply, pb.ProbeRequest]) -> None:
        """Serve one probe.

        Dials only the address that the peer is connected from, if ``may_dial_back`` allows it. So a
        peer cannot aim probes at other machines, nor at services of this one.

        Raises ``ResourceLimitReached`` while this peer serves another probe of the same peer, or
        too many probes of all peers together.
        """
        request, _ = await stream.receive()
        ports = list(dict.fromkeys(request.ports))
        if len(ports) > MAX_PORTS or not all(0 < port < 1 << 16 for port in ports):
            raise ProtocolViolation("a probe names up to 4 ports")
        with stream.stream.scope.reserve(Resource.PROBES):
            direct = direct_address(await self._addresses_of(stream.peer))
            may_dial = direct is not None and may_dial_back(direct.ip, self._networks())
            observed_ip = str(direct.ip) if direct is not None and may_dial else ""
            answers = await asyncio.gather(
                *(speaks_libp2p(observed_ip, port) for port in ports if observed_ip)
            )
            reached = [port for port, answered in zip(ports, answers, strict=False) if answered]
            reply = pb.ProbeReply(
                now_ms=round(self._clock() * 1000), observed_ip=observed_ip, reached=reached
            )
            await stream.send(reply)


def direct_address(addresses: Iterable[str]) -> Multiaddr | None:
    """Return the first multiaddr that does not lead through a relay, or None."""
    return next((each for each in parse_multiaddrs(addresses) if not each.is_relayed), None)


async def speaks_libp2p(host: str, port: int) -> bool:
    """Return whether a TCP port accepts within ``DIAL_S`` and sends the first bytes of libp2p."""
    writer = None
    try:
        async with asyncio.timeout(DIAL_S):
            reader, writer = await asyncio.open_connection(host, port)
            return await reader.readexactly(len(HELLO)) == HELLO
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()


async def probe(
    stream: TypedStream[pb.ProbeRequest, pb.ProbeReply], ports: Sequence[int], clock: Clock
) -> Probed:
    """Ask the other side of a PROBE stream to dial ``ports`` of this machine. Closes the stream.

    Raises ``StreamEnded``, ``DeadlineExceeded`` without a reply, and ``ProtocolViolation`` for an
    invalid reply.
    """
    asked = clock()
    reply, _ = await stream.ask(pb.ProbeRequest(ports=ports[:MAX_PORTS]))
    answered = clock()
    observed_ip = parse_ip(reply.observed_ip)
    if observed_ip is None and reply.observed_ip:
        raise ProtocolViolation("an observed address is an IP address")
    # The peer reads its clock after its dials, just before it sends the reply.
    return Probed(
        stream.peer,
        str(observed_ip) if observed_ip is not None else "",
        tuple(port for port in ports if port in reply.reached),
        reply.now_ms / 1000 - answered,
        answered - asked,
    )


async def probe_at(transport: Transport, address: str, ports: Sequence[int], open_s: float) -> Probed:
    """Probe the peer at an address. ``open_s``: timeout of opening the stream. Raises
    ``SwarmnetError``."""
    stream = await PROBE.open(transport, peer_of(address), addresses=[address], deadline_s=open_s)
    return await probe(stream, ports, wall_clock)


def ports_of(addresses: Iterable[str]) -> list[int]:
    """Return the distinct TCP ports of multiaddrs that do not lead through a relay."""
    found = (each.port for each in parse_multiaddrs(addresses) if each.kind == "tcp" and not each.is_relayed)
    return list(dict.fromkeys(found))


MAX_CLOCKS = 3
"""Most peers that are asked for the time. Their median counts."""
CLOCK_S = 3.0
"""Timeout in seconds for a peer to tell its time."""


async def advise_on_clock(transport: Transport, addresses: Sequence[str]) -> str:
    """Return advice to set the clock if it differs from the clocks of the peers at ``addresses``.

    Empty if the clock agrees, or nobody answers. Records of hosts expire within a minute, so a
    wrong clock makes every host look gone.
    """
    answers = await asyncio.gather(*(_clock_error_s(transport, each) for each in addresses[:MAX_CLOCKS]))
    errors_s = [each for each in answers if each is not None]
    return clock_advice(median(errors_s)) if errors_s else ""


async def _clock_error_s(transport: Transport, address: str) -> float | None:
    """Return how many seconds this machine's clock is behind a peer's; None without an answer."""
    try:
        async with asyncio.timeout(CLOCK_S):
            return (await probe_at(transport, address, (), CLOCK_S)).behind_s
    except (SwarmnetError, TimeoutError):
        return None
