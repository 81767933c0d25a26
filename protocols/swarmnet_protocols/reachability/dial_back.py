"""Probes: a peer dials the ports of another one and sends the time, from which that one learns whether it can be reached and whether its clock is right."""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.net import PeerId, Stream
from swarmnet_protocols.net.limits.resources import Resource
from swarmnet_protocols.net.typed_stream import TypedStream, ask
from swarmnet_protocols.wire import probe_pb2 as pb

MAX_PORTS = 4
DIAL_S = 2.5
"""Timeout for dialling one port."""
REPLY_S = 6.0
"""Timeout for the request and for the reply, which comes after the dials."""
HELLO = b"\x13/multistream/1.0.0\n"
"""The first bytes that libp2p sends on a TCP connection."""


@dataclass(frozen=True)
class Probed:
    """The reply of one peer. ``observed_ip`` is empty for a connection through a relay."""

    peer: PeerId
    observed_ip: str
    reached: tuple[int, ...]
    behind_s: float
    """How far the clock of this machine is behind the peer's; negative: ahead. Accurate to half the round trip."""
    round_trip_s: float


class Probes:
    """Answers probes: ``transport.serve(PROBE, Probes(…).answer)``."""

    def __init__(self, addresses_of: Callable[[PeerId], Awaitable[Sequence[str]]], clock: Clock) -> None:
        """``addresses_of``: the multiaddrs from which a peer is connected."""
        self._addresses_of = addresses_of
        self._clock = clock

    async def answer(self, stream: Stream) -> None:
        """Serve one probe. Only the address from which the peer is connected is dialled, so that probes cannot be aimed at other machines.

        Raises ``ResourceLimitReached`` while another probe of this peer, or too many of all peers, are being served.
        """
        typed = TypedStream(stream, pb.ProbeReply, pb.ProbeRequest, silence_s=REPLY_S, send_s=REPLY_S)
        request, _ = await typed.receive()
        ports = list(dict.fromkeys(request.ports))
        if len(ports) > MAX_PORTS or not all(0 < port < 1 << 16 for port in ports):
            raise ProtocolViolation("a probe names up to 4 ports")
        with stream.scope.reserve(Resource.PROBES):
            observed_ip = direct_ip(await self._addresses_of(stream.peer))
            answers = await asyncio.gather(
                *(speaks_libp2p(observed_ip, port) for port in ports if observed_ip)
            )
            reached = [port for port, answered in zip(ports, answers, strict=False) if answered]
            reply = pb.ProbeReply(
                now_ms=round(self._clock() * 1000), observed_ip=observed_ip, reached=reached
            )
            await typed.send(reply)


def direct_ip(addresses: Sequence[str]) -> str:
    """The IP address of the first multiaddr that does not lead through a relay; empty if there is none."""
    for address in addresses:
        match address.split("/"):
            case ["", "ip4" | "ip6", host, "tcp" | "udp", *rest] if "p2p-circuit" not in rest:
                with suppress(ValueError):
                    return str(ipaddress.ip_address(host))
    return ""


async def speaks_libp2p(host: str, port: int) -> bool:
    """Whether a TCP port accepts within ``DIAL_S`` and sends the first bytes of libp2p."""
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


async def probe(stream: Stream, ports: Sequence[int], clock: Clock) -> Probed:
    """Ask the other side of a PROBE stream to dial ``ports`` of this machine. Closes the stream.

    Raises ``StreamEnded``, ``DeadlineExceeded`` without a reply, and ``ProtocolViolation`` for an invalid one.
    """
    asked = clock()
    reply, _ = await ask(stream, pb.ProbeRequest(ports=ports[:MAX_PORTS]), pb.ProbeReply, within_s=REPLY_S)
    answered = clock()
    try:
        observed_ip = str(ipaddress.ip_address(reply.observed_ip)) if reply.observed_ip else ""
    except ValueError as error:
        raise ProtocolViolation("an observed address is an IP address") from error
    # The reply has the time of its sending, after the dials.
    return Probed(
        stream.peer,
        observed_ip,
        tuple(port for port in ports if port in reply.reached),
        reply.now_ms / 1000 - answered,
        answered - asked,
    )


def ports_of(addresses: Sequence[str], kind: str = "tcp", *, with_loopback: bool = True) -> list[int]:
    """The distinct ports of multiaddrs over ``kind`` that do not lead through a relay."""
    found = []
    for address in addresses:
        match address.split("/"):
            case ["", _, host, each, port, *rest] if (
                each == kind and port.isdigit() and "p2p-circuit" not in rest
            ):
                if with_loopback or not (host.startswith("127.") or host == "::1"):
                    found.append(int(port))
    return list(dict.fromkeys(found))
