"""Streams of bounded messages between authenticated peers: the interface to the network.

The life of a stream:

1. Open. :meth:`Transport.open` dials the peer if there is no connection (``dialling.py``: which addresses may be dialled) and opens a stream
   under a protocol id. Each :class:`ProtocolSpec` says how large messages may be and which members may open it.
2. Accept. The transport of the other side checks the limits of the peer and of its subnet (``limits/resources.py``, ``subnets.py``), refuses the stream
   or evicts another one for it, and runs the protocol's handler in a task (``limits/stream_scope.py``).
3. Messages. A message is a protobuf header and raw bytes. It is framed (``framing.py``) and counted in the scope of its peer: memory is
   reserved before it is read, and a peer that sends too many messages is read more slowly. The owner's limits on the link apply to all streams
   together (``limits/rate_limit.py``); for large payloads the receiver grants credit (``limits/flow_control.py``).
4. End. Either side closes the stream, or refuses it with a reason (``refusal.py``): a handler by raising :class:`Refusal`. The other side's
   ``receive`` raises ``StreamEnded`` or ``Refused`` after the last message. What was reserved is released when both sides have closed, or after
   a timeout.

``p2pd/`` and ``pylibp2p/`` implement this over libp2p; tests implement it in one process, over
simulated links. ``tests/conformance`` holds for all of them. Protocols use typed streams
(``typed_stream.py``) on top.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType, Protocol

from swarmnet_protocols.net.limits.resources import ResourceManager, Scope
from swarmnet_protocols.wire.roles import Role

if TYPE_CHECKING:
    # Imports protobuf, which `--help` and most checks of options do without.
    from swarmnet_protocols.net.refusal import Refusal

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58. It contains the peer's public key."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ProtocolSpec:
    """A protocol id, the largest message that either side may send under it, and who may use it."""

    id: str
    max_header_bytes: int = 64 << 10
    max_payload_bytes: int = 0
    roles: frozenset[Role] = frozenset()
    """Members with one of these roles may open it."""
    served_by: frozenset[Role] = frozenset()
    """Members with one of these roles serve it."""
    has_flow_control: bool = False
    """The serving side may grant credit for large payloads, so the opening side must receive while it sends."""


@dataclass(frozen=True)
class Message:
    """A message: a serialized protobuf and raw bytes (tensor data)."""

    header: bytes
    payload: Buffer = b""


class ReachKind(StrEnum):
    """How other peers reach this one."""

    UNKNOWN = "unknown"
    """No peer could be asked."""
    OPEN = "open"
    """Directly, at an address of this machine."""
    FORWARDED = "forwarded"
    """Directly, at an address of a router that forwards a port, by UPnP, NAT-PMP or its settings."""
    RELAYED = "relayed"
    """Through relays, and directly after hole punching."""
    UNREACHABLE = "unreachable"
    """Not at all: no relay takes this peer."""


@dataclass(frozen=True)
class Reach:
    """How other peers reach this one, and what this peer forwards for others. Counts are since the start, unless they say otherwise."""

    kind: ReachKind = ReachKind.UNKNOWN
    nat: str = ""
    """``cone`` if relays see one external address, ``symmetric`` if each sees another one; empty if unknown."""
    relays: tuple[PeerId, ...] = ()
    """Relays that hold a reservation for this peer now."""
    punched: int = 0
    """Direct connections made through routers at the request of this peer."""
    not_punched: int = 0
    punch_s: float = 0.0
    """Mean seconds that the successful ones took, agreement included."""
    circuits: int = 0
    """Streams that this peer has through relays now."""
    reservations: int = 0
    """Peers that are reached through this one now."""
    forwarded_circuits: int = 0
    """Streams that this peer forwards for others now."""
    forwarded_bytes: int = 0


class Stream(Protocol):
    """An ordered and reliable sequence of messages in both directions with one peer."""

    @property
    def peer(self) -> PeerId:
        """The authenticated id of the other side."""

    @property
    def address(self) -> str:
        """The multiaddr from which the other side is connected; empty if unknown."""

    @property
    def scope(self) -> Scope:
        """The scope of the other side, which holds what all its streams reserve and use."""

    async def send(self, message: Message) -> None:
        """Send one message. Waits while the other side reads too slowly.

        Raises ``ProtocolViolation`` for a message over the limits (nothing is sent), ``StreamEnded`` when the stream has ended, and
        ``Refused`` when the other side has refused it. Several tasks may send: messages are never interleaved.
        """

    async def receive(self) -> Message:
        """The next message.

        Raises ``StreamEnded`` at the end, ``Refused`` if the other side has refused the stream, and ``ProtocolViolation`` for an
        oversized message. A cancelled ``receive`` loses nothing: the next call returns the same message.
        """

    def close(self) -> None:
        """End the stream in both directions. Messages already sent are delivered if the other side reads them. Idempotent."""

    async def path_improved(self) -> None:
        """Return when a stream opened to this peer now would take a better path: directly, where this one goes through a relay."""

    def refuse(self, refusal: "Refusal") -> None:
        """End the stream as ``close`` does, with a reason that the other side's ``receive`` raises. The reason is not sent after part of a message."""


Handler = Callable[[Stream], Awaitable[None]]
"""Serves one inbound stream, which is closed when the handler returns, and refused when it raises ``Refusal`` or ``ResourceLimitReached``."""


class Transport(Protocol):
    """Opens and serves streams. The async context manager that makes a transport ends everything it started."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def resources(self) -> ResourceManager:
        """The resource manager of everything that is served over this transport."""

    def addresses(self) -> Sequence[str]:
        """Multiaddrs with ``/p2p/ID`` at which this peer can be dialled."""

    def reach(self) -> Reach:
        """How other peers reach this one now."""

    async def died(self) -> None:
        """Return when the transport has failed and carries no stream any more."""

    async def is_connected(self, peer: PeerId) -> bool:
        """Whether a stream to ``peer`` needs no new connection, as far as is known."""

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        """Serve streams under ``protocol`` until the transport closes, each in a task."""

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        """Open a stream to ``peer``. If it is not connected, the permitted ones of ``addresses`` are dialled.

        Without addresses, the transport uses those that it knows. Raises ``PeerUnreachable`` within ``deadline_s``, and
        ``IncompatibleVersion`` when the peer does not serve ``protocol``.
        """


class StreamWrapper:
    """Base class of streams that change some methods of another one, and delegate the rest."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def peer(self) -> PeerId:
        return self._stream.peer

    @property
    def address(self) -> str:
        return self._stream.address

    @property
    def scope(self) -> Scope:
        return self._stream.scope

    async def send(self, message: Message) -> None:
        await self._stream.send(message)

    async def receive(self) -> Message:
        return await self._stream.receive()

    def close(self) -> None:
        self._stream.close()

    async def path_improved(self) -> None:
        await self._stream.path_improved()

    def refuse(self, refusal: "Refusal") -> None:
        self._stream.refuse(refusal)
        self.close()


class TransportWrapper:
    """Base class of transports that change some methods of another one, which they do not close, and delegate the rest."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def peer_id(self) -> PeerId:
        return self._transport.peer_id

    @property
    def resources(self) -> ResourceManager:
        return self._transport.resources

    def addresses(self) -> Sequence[str]:
        return self._transport.addresses()

    def reach(self) -> Reach:
        return self._transport.reach()

    async def died(self) -> None:
        await self._transport.died()

    async def is_connected(self, peer: PeerId) -> bool:
        return await self._transport.is_connected(peer)

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        await self._transport.serve(protocol, handler)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        return await self._transport.open(peer, protocol, addresses=addresses, deadline_s=deadline_s)
