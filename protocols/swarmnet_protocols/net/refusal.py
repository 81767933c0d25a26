"""Refusals: a peer ends a stream with a reason, and the other side gets an exception."""

from swarmnet_protocols.errors import OutOfResources, ProtocolViolation, StreamEnded, SwarmnetError
from swarmnet_protocols.net.limits.resources import ResourceLimitReached
from swarmnet_protocols.wire import refusal_pb2 as pb

MAX_DETAIL_CHARS = 500
MAX_RETRY_S = 60.0
"""Longest wait that a refusal can ask for, in seconds."""
OUT_OF_RESOURCES = "it is out of resources at the moment"
"""Detail of a refusal at a resource limit. It does not say which limit, so that other peers do not
learn the limits."""


def printable(text: str) -> str:
    """Return text of another peer, shortened and without control characters."""
    return "".join(filter(str.isprintable, text[:MAX_DETAIL_CHARS]))


class Refusal(SwarmnetError):
    """This side refuses a stream, for a ``reason`` that programs understand.

    A handler raises it, or passes it to ``Stream.refuse``.

    - ``detail``: a text that any peer may read.
    - ``retry_after_s``: seconds after which the other side may try again; 0 if unknown, or if
      trying again is useless.
    - ``unix_time``: the clock of this side, if the refusal depends on the time; 0: not sent.
    """

    def __init__(
        self, reason: "pb.Reason", detail: str, retry_after_s: float = 0.0, *, unix_time: float = 0.0
    ) -> None:
        self.reason = reason
        self.detail = detail[:MAX_DETAIL_CHARS] or pb.Reason.Name(reason)
        self.retry_after_s = min(max(0.0, retry_after_s), MAX_RETRY_S)
        self.unix_time = unix_time
        super().__init__(f"{pb.Reason.Name(reason)}: {self.detail}")

    @classmethod
    def of(cls, error: Exception) -> "Refusal":
        """Return ``error`` as a refusal for the other side. A ``Refusal`` is returned unchanged."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, OutOfResources):
            return cls.out_of_resources(error)
        if isinstance(error, ProtocolViolation):
            return cls(pb.REASON_PROTOCOL, str(error))
        return cls(pb.REASON_INTERNAL, f"{type(error).__name__}: {error}")

    @classmethod
    def out_of_resources(cls, error: OutOfResources, detail: str = "") -> "Refusal":
        """Return the refusal at a resource limit. Without ``detail`` it names the limit."""
        retry_after_s = error.retry_after_s if isinstance(error, ResourceLimitReached) else 0.0
        return cls(pb.REASON_OUT_OF_RESOURCES, detail or str(error), retry_after_s)

    @classmethod
    def overloaded(cls, wait_s: float) -> "Refusal":
        """Return the refusal of work that would have to wait for ``wait_s``."""
        return cls(pb.REASON_OVERLOADED, f"new work would wait for about {wait_s:.0f} s", wait_s)

    def to_wire(self) -> pb.Refusal:
        return pb.Refusal(
            reason=self.reason,
            detail=self.detail,
            retry_after_s=self.retry_after_s,
            time_ms=max(0, round(1000 * self.unix_time)),
        )


class Refused(StreamEnded):
    """The other side, ``peer``, refused the stream. The attributes come from its
    :class:`Refusal`."""

    def __init__(self, peer: str, refusal: pb.Refusal) -> None:
        """Take the fields of a peer's message, except invalid ones.

        Invalid are an unknown reason, a wait out of range, and control characters.
        """
        is_known = refusal.reason in pb.Reason.values()
        self.reason = refusal.reason if is_known else pb.REASON_UNSPECIFIED
        self.detail = printable(refusal.detail) or pb.Reason.Name(self.reason)
        self.retry_after_s = refusal.retry_after_s if 0 <= refusal.retry_after_s <= MAX_RETRY_S else 0.0
        self.unix_time = refusal.time_ms / 1000
        if self.retry_after_s:
            hint = f"try again in {self.retry_after_s:.0f} s"
        elif self.reason == pb.REASON_NOT_AUTHORISED:
            hint = "`swarmnet doctor --swarm SWARM` shows whether this peer is a member and in which roles; ask the owner of the swarm"
        else:
            hint = ""
        super().__init__(f"{peer} refused the stream: {self.detail}", hint=hint)
