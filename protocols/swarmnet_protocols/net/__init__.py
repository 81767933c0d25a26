"""Streams of bounded messages between peers: the one interface to the network.

Conversations (sessions, links) speak only to :class:`Transport` and :class:`Stream`; ``p2pd.py`` implements them over
libp2p, ``memory.py`` over simulated links in virtual time; one conformance suite (``tests/conformance``) holds for both.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from swarmnet_protocols.net.resources import ResourceManager, Scope
from swarmnet_protocols.wire.roles import Role

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58: the hash of, or the whole of, the peer's public key."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ProtocolSpec:
    """A protocol id with the largest message either side may send under it.

    A frame on the wire is ``u32 header size, u32 payload size, header, payload`` (big endian). Sizes over the
    limits are refused before anything is allocated.
    """

    id: str
    max_header_bytes: int = 64 << 10
    max_payload_bytes: int = 0
    roles: frozenset[Role] = frozenset()
    """Who may open it: members with one of these roles."""
    served_by: frozenset[Role] = frozenset()
    """Whom it may be opened to: members with one of these roles."""
    has_flow_control: bool = False
    """Whoever serves it may have large payloads sent no faster than it grants them; so whoever opens it listens while it sends."""


@dataclass(frozen=True)
class Message:
    """One message: a protobuf ``header`` and the raw bytes (tensor data) that follow it."""

    header: bytes
    payload: Buffer = b""


@dataclass(frozen=True)
class Refusal:
    """Why a stream is not wanted, for people: to be shown to whoever opened it, stranger or not.

    It is worth trying again after ``retry_after_s``; where that is 0, not before something has changed.
    """

    reason: str
    retry_after_s: float = 0.0


class Stream(Protocol):
    """An ordered, reliable, two-way sequence of messages with one peer."""

    @property
    def peer(self) -> PeerId:
        """The authenticated id of the other side."""

    @property
    def address(self) -> str:
        """The multiaddr from which the other side is connected; empty where that is not known."""

    @property
    def scope(self) -> Scope:
        """What the other side holds and uses of ours, over all its streams."""

    async def send(self, message: Message) -> None:
        """Send one message; waits while the other side reads too slowly.

        Raises ``ProtocolViolation`` for a message over the limits (nothing is sent), ``StreamEnded`` when the other
        side is gone. Safe to call from several tasks: messages are never interleaved.
        """

    async def receive(self) -> Message:
        """The next message. Raises ``StreamEnded`` at the end, ``ProtocolViolation`` for an oversized message.

        The end of a stream that the other side refuses is ``StreamRefused``; so may that of a ``send`` be.

        Cancelling a ``receive`` loses nothing: the next call returns the same message.
        """

    def close(self) -> None:
        """End the stream in both directions at once; idempotent. Messages already sent are delivered, if the other side reads them."""

    def refuse(self, refusal: Refusal) -> None:
        """As ``close``, and the other side is told why, unless half a message has been sent. What it says is not read any more."""


Handler = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream; the stream is closed when it returns or raises."""


class Transport(Protocol):
    """How this peer reaches others and is reached. An async context manager owns everything it starts."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def resources(self) -> ResourceManager:
        """The account of what others hold and use here, through this transport or beside it."""

    def addresses(self) -> Sequence[str]:
        """Multiaddrs, with ``/p2p/ID``, at which others may reach this peer."""

    async def died(self) -> None:
        """Return once nothing can go through this transport any more, although nobody closed it."""

    async def is_connected(self, peer: PeerId) -> bool:
        """Whether a stream to ``peer`` needs no new connection, as far as is known."""

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        """Accept streams under ``protocol``, each in a task of its own, until the transport closes."""

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> Stream:
        """Open a stream to ``peer``, dialling those of ``addresses`` that may be dialled if it is not connected yet.

        Without addresses, whatever the network knows of ``peer`` is used.

        Raises ``PeerUnreachable`` within ``deadline_s``, or ``IncompatibleVersion`` when the peer is there but does not
        speak ``protocol``.
        """
