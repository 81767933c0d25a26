"""The peers whose membership handshake succeeded, and the handshake streams kept open with them.

A peer is forgotten when it has no stream left. If its handshake stream was closed to make room, it
stays admitted, because it may just have opened another stream.
"""

import asyncio
from collections.abc import Sequence

from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.membership.certificates import Certificate
from swarmnet_protocols.membership.membership import Member
from swarmnet_protocols.net import PeerId, Stream
from swarmnet_protocols.net.limits.resources import Reservation
from swarmnet_protocols.net.refusal import Refusal

MAX_STREAMS = 256
"""Most handshake streams kept open. Beyond this, one is closed, and its two peers repeat the
handshake before their next stream."""
MAX_STREAMS_PER_PEER = 4
"""Most handshake streams kept open with one peer."""
MAX_WITHOUT_STREAM = 4096
"""Most peers that stay admitted after their handshake stream was closed to make room."""


class AdmittedPeer:
    """A peer whose certificate was accepted, with its open streams."""

    def __init__(self, member: Member, certificate: Certificate | None, reservation: Reservation) -> None:
        self.member = member
        self.certificate = certificate
        self.name = ""
        """The name that the peer gives itself. Empty without a name."""
        self.handshake_streams: dict[Stream, None] = {}
        self.streams: dict[Stream, None] = {}
        """Streams of other protocols. They close when the membership ends."""
        self.timer: asyncio.TimerHandle | None = None
        """Timer for the next check of the certificate."""
        self.serials: dict[bytes, int] = {}
        """Signer's key → serial of the revocation list that the peer has."""
        self.hello_received = asyncio.Event()
        self._reservation = reservation

    def end(self, refusal: Refusal | None = None) -> None:
        """Close every stream, or refuse it with ``refusal``, and release the reservation."""
        self._reservation.release()
        if self.timer is not None:
            self.timer.cancel()
        for stream in (*self.handshake_streams, *self.streams):
            if refusal is None:
                stream.close()
            else:
                stream.refuse(refusal)


class AdmittedPeers:
    """All admitted peers."""

    def __init__(self) -> None:
        self.by_peer: dict[PeerId, AdmittedPeer] = {}
        self.streams: dict[Stream, AdmittedPeer] = {}
        """Handshake streams, oldest first."""
        self._without_stream: dict[PeerId, None] = {}
        """Peers whose handshake stream was closed to make room, oldest first."""

    def get(self, peer: PeerId) -> AdmittedPeer:
        """Return an admitted peer. Raises ``NotAuthorised`` for any other."""
        try:
            return self.by_peer[peer]
        except KeyError:
            raise NotAuthorised(f"{peer} has not shown that it is a member") from None

    def add_stream(self, admitted: AdmittedPeer, stream: Stream) -> None:
        """Keep a handshake stream, and close another one if there are too many."""
        admitted.handshake_streams[stream] = None
        self.streams[stream] = admitted
        self._without_stream.pop(stream.peer, None)
        if len(admitted.handshake_streams) > MAX_STREAMS_PER_PEER:
            self.close_stream(admitted, next(iter(admitted.handshake_streams)))
        if len(self.streams) > MAX_STREAMS:
            self._evict_one_of(list(self.streams)[:-1])

    def _evict_one_of(self, streams: Sequence[Stream]) -> None:
        """Close one of ``streams``: the oldest whose peer has no stream of another protocol, or
        else the oldest.

        The peer of the closed stream stays admitted.
        """
        stream = next((each for each in streams if not self.streams[each].streams), streams[0])
        self._without_stream[stream.peer] = None
        self.close_stream(self.streams[stream], stream)
        if len(self._without_stream) > MAX_WITHOUT_STREAM:
            first = next(iter(self._without_stream))
            del self._without_stream[first]
            if first in self.by_peer:
                self._forget_if_unused(first, self.by_peer[first])

    def close_stream(self, admitted: AdmittedPeer, stream: Stream) -> None:
        """Close a handshake stream. Idempotent."""
        stream.close()
        self.streams.pop(stream, None)
        admitted.handshake_streams.pop(stream, None)
        self._forget_if_unused(stream.peer, admitted)

    def untrack(self, stream: Stream) -> None:
        """Forget a stream of another protocol. Idempotent."""
        if admitted := self.by_peer.get(stream.peer):
            admitted.streams.pop(stream, None)
            self._forget_if_unused(stream.peer, admitted)

    def _forget_if_unused(self, peer: PeerId, admitted: AdmittedPeer) -> None:
        is_unused = (
            not admitted.handshake_streams and not admitted.streams and peer not in self._without_stream
        )
        if is_unused and self.by_peer.get(peer) is admitted:
            del self.by_peer[peer]
            admitted.end()

    def remove(self, peer: PeerId) -> AdmittedPeer | None:
        """Remove a peer, whose streams stay open. Returns None if it is not admitted."""
        self._without_stream.pop(peer, None)
        admitted = self.by_peer.pop(peer, None)
        for stream in admitted.handshake_streams if admitted is not None else ():
            self.streams.pop(stream, None)
        return admitted

    def end(self) -> None:
        """Close every stream of every peer."""
        for admitted in self.by_peer.values():
            admitted.end()
