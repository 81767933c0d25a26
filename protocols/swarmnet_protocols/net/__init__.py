"""Streams of bounded messages between authenticated peers: the interface to the network.

The life of a stream:

1. **Open.** :meth:`Transport.open` dials the peer if there is no connection, and opens a stream
   under a protocol id. ``dialling.py`` says which addresses may be dialled. Each
   :class:`ProtocolSpec` says how large messages may be and which members may open it.
2. **Accept.** The other side's transport checks the limits of the peer and its subnet
   (``limits/resources.py``, ``subnets.py``). It refuses the stream, or accepts it and may evict
   another stream. The protocol's handler runs in a task (``limits/stream_scope.py``).
3. **Messages.** A message is a protobuf header and raw bytes in one frame (``framing.py``). Memory
   is reserved in the scope of the peer before a message is read. A peer that sends too many
   messages is read more slowly. The owner's limits on the link apply to all streams together
   (``limits/rate_limit.py``). For large payloads the receiver grants credit
   (``limits/flow_control.py``).
4. **End.** Either side closes the stream, or refuses it with a reason (``refusal.py``). A handler
   refuses by raising :class:`Refusal`. After the last message, the other side's ``receive`` raises
   ``StreamEnded`` or ``Refused``. Reservations are released when both sides have closed, or after a
   timeout.

``p2pd/`` and ``pylibp2p/`` implement this over libp2p. Tests implement it in one process over
simulated links. ``tests/conformance`` checks all implementations. Protocols use typed streams
(``typed_stream.py``) on top.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType, Protocol

from swarmnet_protocols.net.limits.resources import ResourceManager, Scope
from swarmnet_protocols.wire.roles import Role

if TYPE_CHECKING:
    # Imports protobuf. `--help` and most checks of options do without it.
    from swarmnet_protocols.net.refusal import Refusal
    from swarmnet_protocols.wire.report_pb2 import Reach

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58. It contains the peer's public key."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ProtocolSpec:
    """A protocol id, its largest message in either direction, and the roles of members that may use
    it."""

    id: str
    max_header_bytes: int = 64 << 10
    max_payload_bytes: int = 0
    roles: frozenset[Role] = frozenset()
    """Members with one of these roles may open it."""
    served_by: frozenset[Role] = frozenset()
    """Members with one of these roles serve it."""
    has_flow_control: bool = False
    """The serving side may grant credit for large payloads, so the opening side must receive while
    it sends."""


@dataclass(frozen=True)
class Message:
    """A message: a serialized protobuf and raw bytes (tensor data)."""

    header: bytes
    payload: Buffer = b""


class ReachKind(StrEnum):
    """The ways in which other peers reach this one."""

    UNKNOWN = "unknown"
    """No peer could be asked."""
    OPEN = "open"
    """Directly, at an address of this machine."""
    FORWARDED = "forwarded"
    """Directly, at an address of a router that forwards a port, by UPnP, NAT-PMP or its
    settings."""
    RELAYED = "relayed"
    """Through relays, and directly after hole punching."""
    UNREACHABLE = "unreachable"
    """Not at all: no relay takes this peer."""


class Stream(Protocol):
    """An ordered and reliable sequence of messages in both directions with one peer."""

    @property
    def peer(self) -> PeerId:
        """The authenticated id of the other side."""

    @property
    def address(self) -> str:
        """The other side's multiaddr on this connection; empty if unknown."""

    @property
    def scope(self) -> Scope:
        """The scope of the other side, with all that its streams reserve and use."""

    async def send(self, message: Message) -> None:
        """Send one message. Waits while the other side reads too slowly.

        Raises ``ProtocolViolation`` for a message over the limits (nothing is sent),
        ``StreamEnded`` when the stream has ended, and ``Refused`` when the other side has refused
        it. Several tasks may send; messages are never interleaved.
        """

    async def receive(self) -> Message:
        """Return the next message.

        Raises ``StreamEnded`` at the end, ``Refused`` if the other side has refused the stream, and
        ``ProtocolViolation`` for an oversized message. A cancelled ``receive`` loses nothing: the
        next call returns the same message.
        """

    def close(self) -> None:
        """End the stream in both directions. Idempotent.

        Messages already sent are delivered if the other side reads them.
        """

    async def path_improved(self) -> None:
        """Return when a new stream to this peer would take a better path: direct instead of through
        a relay.
        """

    def refuse(self, refusal: "Refusal") -> None:
        """End the stream as ``close`` does, with a reason that the other side's ``receive`` raises.

        The reason is not sent if part of a message went out before it.
        """


Handler = Callable[[Stream], Awaitable[None]]
"""Serves one inbound stream. The stream is closed when the handler returns, and refused when the
handler raises ``Refusal`` or ``ResourceLimitReached``."""


class Transport(Protocol):
    """Opens and serves streams.

    Leaving the async context manager that made a transport ends everything the transport started.
    """

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def resources(self) -> ResourceManager:
        """The resource manager of everything that is served over this transport."""

    def addresses(self) -> Sequence[str]:
        """Multiaddrs with ``/p2p/ID`` at which this peer can be dialled."""

    def reach(self) -> "Reach":
        """Return how other peers reach this one now, and what this one forwards for others."""

    async def died(self) -> None:
        """Return when the transport has failed and carries no stream any more."""

    async def is_connected(self, peer: PeerId) -> bool:
        """Tell whether ``peer`` is connected, as far as is known, so that a stream needs no
        dial."""

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        """Serve streams under ``protocol`` until the transport closes, each in a task."""

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        """Open a stream to ``peer``, and dial the permitted ``addresses`` if the peer is not
        connected.

        Without ``addresses``, the transport uses the addresses it knows. Raises ``PeerUnreachable``
        within ``deadline_s``, and ``IncompatibleVersion`` when the peer does not serve
        ``protocol``.
        """


class StreamWrapper:
    """Base class of streams that wrap another stream and change some of its methods."""

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
    """Base class of transports that wrap another transport and change some of its methods.

    A wrapper does not close the transport it wraps.
    """

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

    def reach(self) -> "Reach":
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
