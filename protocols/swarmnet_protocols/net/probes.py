"""Asking another peer what one cannot know alone: is my port open from where you are, and what time is it there?"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.net import Message, PeerId, Stream
from swarmnet_protocols.net.messages import parse, receive_within, send_within
from swarmnet_protocols.net.resources import Resource
from swarmnet_protocols.wire import probe_pb2 as pb

MAX_PORTS = 4
DIAL_S = 4.0
REPLY_S = 6.0
HELLO = b"\x13/multistream/1.0.0\n"
"""What libp2p says first to whoever connects."""


@dataclass(frozen=True)
class Probed:
    """What one peer saw of us. ``observed_ip`` is empty when we come through a relay."""

    peer: PeerId
    observed_ip: str
    reached: tuple[int, ...]
    behind_s: float
    """How far our clock is behind theirs; negative: ahead. Off by half of the round trip at most."""
    round_trip_s: float


class Probes:
    """Answers probes: ``transport.serve(PROBE, Probes(…).answer)``."""

    def __init__(self, addresses_of: Callable[[PeerId], Awaitable[Sequence[str]]], clock: Clock) -> None:
        """``addresses_of`` tells the multiaddrs from which a peer is connected to us now."""
        self._addresses_of = addresses_of
        self._clock = clock

    async def answer(self, stream: Stream) -> None:
        """Dials nobody but the asker, whose address an established connection has proven: no probe can be turned on others.

        Raises ``ResourceLimitReached`` while the asker, or too many of them, are dialled already.
        """
        request = parse(pb.ProbeRequest, (await receive_within(stream, REPLY_S)).header)
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
            await send_within(stream, Message(reply.SerializeToString()), REPLY_S)


def direct_ip(addresses: Sequence[str]) -> str:
    """The IP address of the first multiaddr that does not lead through a relay; empty if there is none."""
    for address in addresses:
        match address.split("/"):
            case ["", "ip4" | "ip6", host, "tcp" | "udp", *rest] if "p2p-circuit" not in rest:
                with suppress(ValueError):
                    return str(ipaddress.ip_address(host))
    return ""


async def speaks_libp2p(host: str, port: int) -> bool:
    """Whether something at this TCP port begins as libp2p does, within ``DIAL_S``."""
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
    """What the peer at the other end of a PROBE stream sees of us.

    Raises ``StreamEnded``, ``DeadlineExceeded`` when it is silent, ``ProtocolViolation`` for what cannot be.
    """
    asked = clock()
    request = pb.ProbeRequest(ports=ports[:MAX_PORTS])
    await stream.send(Message(request.SerializeToString()))
    reply = parse(pb.ProbeReply, (await receive_within(stream, REPLY_S)).header)
    answered = clock()
    try:
        observed_ip = str(ipaddress.ip_address(reply.observed_ip)) if reply.observed_ip else ""
    except ValueError as error:
        raise ProtocolViolation("an observed address is an IP address") from error
    # The answer is stamped when it is sent, after the dials.
    return Probed(
        stream.peer,
        observed_ip,
        tuple(port for port in ports if port in reply.reached),
        reply.now_ms / 1000 - answered,
        answered - asked,
    )
