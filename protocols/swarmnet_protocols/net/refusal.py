"""Refusals: of a stream, by its last frame, and of a request, by a message (:class:`Refused`)."""

from swarmnet_protocols.errors import OutOfResources, StreamRefused, SwarmnetError
from swarmnet_protocols.net import Refusal
from swarmnet_protocols.net.resources import ResourceLimitReached
from swarmnet_protocols.wire import session_pb2

MAX_REASON_CHARS = 300
NO_REASON = "no reason given"
MAX_RETRY_S = 60.0
"""Longest wait that a refusal can ask for, in seconds."""
MAX_DETAIL_CHARS = 500


def printable(reason: str) -> str:
    """Text of another peer, shortened and without control characters."""
    return "".join(filter(str.isprintable, reason[:MAX_REASON_CHARS]))


def overloaded(error: ResourceLimitReached) -> Refusal:
    """The refusal of a stream at a resource limit. It does not name the limit, which strangers need not know."""
    return Refusal("it is overloaded at the moment", error.retry_after_s)


def refused_by(peer: str, refusal: Refusal) -> StreamRefused:
    """The error for a refusal by ``peer``."""
    if refusal.retry_after_s:
        hint = f"try again in {refusal.retry_after_s:.0f} s"
    else:
        hint = "`swarmnet doctor --swarm SWARM` shows whether this peer is a member and in which roles; ask the owner of the swarm"
    return StreamRefused(
        f"{peer} refused the stream: {printable(refusal.reason)}",
        retry_after_s=refusal.retry_after_s,
        hint=hint,
    )


class Refused(SwarmnetError):
    """A request was refused, for a ``reason`` that programs understand.

    It is worth trying again after ``retry_after_s``; 0: unknown.
    """

    def __init__(self, reason: "session_pb2.Reason", detail: str, retry_after_s: float = 0.0) -> None:
        self.detail = detail[:MAX_DETAIL_CHARS]
        super().__init__(f"{session_pb2.Reason.Name(reason)}: {self.detail}")
        self.reason = reason
        self.retry_after_s = retry_after_s

    @classmethod
    def overloaded(cls, error: OutOfResources) -> "Refused":
        """The refusal at a resource limit."""
        retry_after_s = error.retry_after_s if isinstance(error, ResourceLimitReached) else 0.0
        return cls(session_pb2.REASON_OUT_OF_MEMORY, str(error), retry_after_s)

    @classmethod
    def from_wire(cls, refused: session_pb2.Refused) -> "Refused":
        """From a peer's message, without unknown reasons, control characters and waits out of range."""
        is_known = refused.reason in session_pb2.Reason.values()
        wait_s = refused.retry_after_s
        return cls(
            refused.reason if is_known else session_pb2.REASON_UNSPECIFIED,
            printable(refused.detail),
            wait_s if 0 <= wait_s <= MAX_RETRY_S else 0.0,
        )

    def to_wire(self) -> session_pb2.Refused:
        return session_pb2.Refused(reason=self.reason, detail=self.detail, retry_after_s=self.retry_after_s)
