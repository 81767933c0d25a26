"""The exceptions of the project, named for what failed.

An error that the user may see has a ``hint``: one sentence on what to do next. Exceptions of
libp2p, the operating system and model libraries are converted where they arise.
"""

from collections.abc import Sequence


class SwarmnetError(Exception):
    """Base class: something failed for a known reason."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(SwarmnetError):
    """A file, flag or argument is wrong. Nothing was started."""


class NotAuthorised(SwarmnetError):
    """A peer, or the signer of a record, may not do this."""


class Unreachable(SwarmnetError):
    """None of the needed peers answers."""


class NetworkStopped(SwarmnetError):
    """The transport of this process failed for good."""

    def __init__(self, *, hint: str = "start it again") -> None:
        super().__init__("the network process stopped, so no peer can be reached", hint=hint)


class PeerUnreachable(Unreachable):
    """A stream to this peer could not be opened within its deadline."""


def _spans(blocks: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{start}:{end}" for start, end in blocks)


class NoRoute(Unreachable):
    """Some blocks of the model have no live host."""

    def __init__(
        self,
        missing: Sequence[tuple[int, int]],
        *,
        hint: str = "",
        among_trusted: bool = False,
        missing_experts: str = "",
        message: str = "",
    ) -> None:
        """Describe blocks without a live host.

        - ``missing``: spans of blocks.
        - ``among_trusted``: hosts outside the trusted list were not considered.
        - ``missing_experts``: routed experts that a host of some of these blocks waits for, as
          ``block:experts``.
        - ``message``: replaces the message that no host serves these blocks.
        """
        nobody = "no trusted host" if among_trusted else "no host"
        message = message or f"{nobody} serves blocks {_spans(missing)}"
        if missing_experts:
            message += f"; hosts wait for experts {missing_experts} (block:experts), which no peer within their reach has"
            wanted = "auto" if missing_experts.endswith("…") else f"'{missing_experts}'"
            hint = hint or f"host these experts: swarmnet join SWARM --experts {wanted}"
        if among_trusted:
            hint = hint or "name more hosts with --hosts, or start a trusted node for these blocks"
        super().__init__(
            message,
            hint=hint
            or f"start a node for them: swarmnet join SWARM --blocks {missing[0][0]}:{missing[0][1]}",
        )
        self.missing = tuple(missing)


class HostsOverloaded(NoRoute):
    """All hosts of some blocks have refused work because of their load.

    After ``retry_after_s`` each block has a host that may accept work again.
    """

    def __init__(self, missing: Sequence[tuple[int, int]], wait_s: float) -> None:
        super().__init__(
            missing,
            message=f"all hosts of blocks {_spans(missing)} are overloaded; the shortest expected wait is {wait_s:.0f} s",
            hint="try again then, let `run` wait with --wait SECONDS, or start another node: swarmnet join SWARM "
            f"--blocks {missing[0][0]}:{missing[0][1]}",
        )
        self.retry_after_s = wait_s


class MissingExperts(Unreachable):
    """Some routed experts of a block are on no peer that its hosts can reach."""


class OutOfResources(SwarmnetError):
    """Memory, disk or a quota is used up."""


class NoRoom(OutOfResources):
    """Sequences are longer than what the hosts keep for one client. Waiting does not help."""

    def __init__(self, positions: int, room: int) -> None:
        """``positions`` are needed; the hosts have room for ``room``."""
        super().__init__(
            f"{positions} positions are needed, and the hosts keep {room} for one client",
            hint="send a shorter text; or give a host more memory: --max-cache or --client-share of swarmnet join",
        )
        self.positions = positions
        self.room = room


class IntegrityError(SwarmnetError):
    """Bytes do not match their hash, signature or header."""


class IncompatibleVersion(SwarmnetError):
    """The peers speak different versions of a protocol."""


class ProtocolViolation(SwarmnetError):
    """A peer sent something that the protocol does not allow. Its stream is not used again."""


class StreamEnded(SwarmnetError):
    """A stream ended: the other side closed it or failed, or the path broke."""


class DeadlineExceeded(SwarmnetError):
    """Something did not happen before its deadline."""


def how_to_add(package: str) -> str:
    """Return the hint for an optional package that is not installed."""
    return f"pip install {package} (after pipx: pipx inject swarmnet-p2p {package})"
