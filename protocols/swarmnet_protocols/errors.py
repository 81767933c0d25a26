"""The errors of the project: a small tree, named for what failed.

Every error a person may see carries ``hint``: one sentence that says what to do next. Foreign exceptions
(libp2p, the operating system, a model library) are turned into these at the edge where they arise.
"""

from collections.abc import Sequence


class SwarmnetError(Exception):
    """Something failed for a reason we can name."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(SwarmnetError):
    """A file, flag or argument is wrong: nothing was started."""


class NotAuthorised(SwarmnetError):
    """The peer, the swarm or the record is not allowed to do this."""


class Unreachable(SwarmnetError):
    """Nobody answers where somebody is needed."""


class PeerUnreachable(Unreachable):
    """A stream to this peer could not be opened within its deadline."""


class NoRoute(Unreachable):
    """No live peer hosts some blocks of the model."""

    def __init__(
        self, missing: Sequence[tuple[int, int]], *, hint: str = "", among_trusted: bool = False
    ) -> None:
        """``among_trusted``: others than the hosts that the user or the swarm file names may host them."""
        spans = ", ".join(f"{start}:{end}" for start, end in missing)
        if among_trusted:
            hint = hint or "name more hosts with --hosts, or start a trusted node for these blocks"
        super().__init__(
            f"no trusted host serves blocks {spans}" if among_trusted else f"nobody hosts blocks {spans}",
            hint=hint
            or f"start a node for them: swarmnet join SWARM --blocks {missing[0][0]}:{missing[0][1]}",
        )
        self.missing = tuple(missing)


class OutOfResources(SwarmnetError):
    """Memory, disk or a quota is used up."""


class IntegrityError(SwarmnetError):
    """Bytes are not what their hash, signature or header says."""


class IncompatibleVersion(SwarmnetError):
    """The peers speak different versions of a protocol."""


class ProtocolViolation(SwarmnetError):
    """A peer sent something the protocol does not allow. The stream it came on is not used again."""


class StreamEnded(SwarmnetError):
    """The other side of a stream is gone: it closed, it died, or the path to it broke."""


class StreamRefused(StreamEnded):
    """The other side of a stream does not want it, and has said why.

    It is worth trying again after ``retry_after_s``; where that is 0, not before something has changed.
    """

    def __init__(self, message: str, *, retry_after_s: float = 0.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(SwarmnetError):
    """An answer did not come within its deadline."""
