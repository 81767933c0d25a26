"""The last word on a stream, in place of a message: that it is refused, which the other side's ``receive`` raises, or that it ends."""

import struct

from swarmnet_protocols.errors import OutOfResources, StreamRefused, SwarmnetError
from swarmnet_protocols.net import Refusal
from swarmnet_protocols.net.messages import parse
from swarmnet_protocols.net.resources import ResourceLimitReached
from swarmnet_protocols.wire import handshake_pb2 as pb
from swarmnet_protocols.wire import session_pb2

SIZES = struct.Struct(">II")
REFUSED = 0xFFFF_FFFF
"""In place of the size of a header: a ``Refusal`` of as many bytes as the second size says, and nothing after it."""
ENDED = SIZES.pack(REFUSED, 0)
"""The last word on a stream that is done with: everything has been said, and whoever has read it may close."""
MAX_REFUSAL_BYTES = 2048
MAX_REASON_CHARS = 300
NO_REASON = "it does not say why"
MAX_RETRY_S = 60.0
MAX_DETAIL_CHARS = 500
LINGER_S = 5.0
"""How long the other side has to hear that it is refused."""


def printable(reason: str) -> str:
    """What somebody else says, so that it can be shown to a person."""
    return "".join(filter(str.isprintable, reason[:MAX_REASON_CHARS]))


def no_room(error: ResourceLimitReached) -> Refusal:
    """What a stream is refused with for ``error``. How much of what is taken is nobody's business."""
    return Refusal("it has no room for more at the moment", error.retry_after_s)


def encode_refusal(refusal: Refusal) -> bytes:
    """The frame of ``refusal``, which always has something to say: one that has not is ``ENDED``."""
    reason = refusal.reason[:MAX_REASON_CHARS] or NO_REASON
    retry_ms = round(1000 * min(max(0.0, refusal.retry_after_s), MAX_RETRY_S))
    said = pb.Refusal(reason=reason, retry_ms=retry_ms).SerializeToString()
    return SIZES.pack(REFUSED, len(said)) + said


def decode_refusal(said: bytes) -> Refusal:
    """What follows the sizes in a frame. Raises ``ProtocolViolation``."""
    refused = parse(pb.Refusal, said)
    return Refusal(refused.reason, min(refused.retry_ms / 1000, MAX_RETRY_S))


def refused_by(peer: str, refusal: Refusal) -> StreamRefused:
    """The error of whoever was refused by ``peer``."""
    if refusal.retry_after_s:
        hint = f"try again in {refusal.retry_after_s:.0f} s"
    else:
        hint = "`swarmnet doctor --swarm SWARM` says whether we are a member, and in which roles; ask whoever runs the swarm"
    return StreamRefused(
        f"{peer} refuses us: {printable(refusal.reason)}", retry_after_s=refusal.retry_after_s, hint=hint
    )


class Refused(SwarmnetError):
    """A host does not do what it was asked to, for a ``reason`` that its client understands.

    It is worth asking again after ``retry_after_s``; 0: the host cannot tell.
    """

    def __init__(self, reason: "session_pb2.Reason", detail: str, retry_after_s: float = 0.0) -> None:
        self.detail = detail[:MAX_DETAIL_CHARS]
        super().__init__(f"{session_pb2.Reason.Name(reason)}: {self.detail}")
        self.reason = reason
        self.retry_after_s = retry_after_s

    @classmethod
    def no_room(cls, error: OutOfResources) -> "Refused":
        """For a resource limit that is reached."""
        retry_after_s = error.retry_after_s if isinstance(error, ResourceLimitReached) else 0.0
        return cls(session_pb2.REASON_OUT_OF_MEMORY, str(error), retry_after_s)

    @classmethod
    def from_wire(cls, refused: session_pb2.Refused) -> "Refused":
        """From a message of a peer: an unknown reason, text that cannot be shown and an impossible wait are dropped."""
        is_known = refused.reason in session_pb2.Reason.values()
        wait_s = refused.retry_after_s
        return cls(
            refused.reason if is_known else session_pb2.REASON_UNSPECIFIED,
            printable(refused.detail),
            wait_s if 0 <= wait_s <= MAX_RETRY_S else 0.0,
        )

    def to_wire(self) -> session_pb2.Refused:
        return session_pb2.Refused(reason=self.reason, detail=self.detail, retry_after_s=self.retry_after_s)
