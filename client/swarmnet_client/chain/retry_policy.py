"""How often a chain is mended before it is given up, and what is said then. Pure: takes the time as an argument."""

from swarmnet_protocols.errors import (
    IncompatibleVersion,
    NoRoute,
    NotAuthorised,
    StreamRefused,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.resources import ResourceLimitReached
from swarmnet_protocols.wire import session_pb2 as pb

PAUSE_S = 0.25
"""Between two attempts, once the first ones have failed."""
ATTEMPTS = 10
"""Times a chain is mended without an answer in between before we ask whether there will ever be one."""


class RetryPolicy:
    """Counts how often a chain broke since it last answered."""

    def __init__(self, recover_s: float) -> None:
        self._recover_s = recover_s
        self._attempts = 0
        self._since = 0.0
        self._mended_at = 0.0

    def pause_s(self, error: SwarmnetError | None) -> float:
        """Wait this long before the next attempt, the last of which failed with ``error``: as long as a host asked us to."""
        if self._attempts <= 2:  # somebody else may have room
            return 0.0
        asked_s = error.retry_after_s if isinstance(error, Refused | StreamRefused) else 0.0
        return min(max(PAUSE_S, asked_s), self._recover_s / 2)

    def lost(self, now: float, *, idle: bool) -> bool:
        """The chain broke. True when it is time to give up: many attempts, over ``recover_s`` at least, all in vain.

        A chain that was ``idle`` gave no answers because nobody asked: then one that held for long starts afresh.
        """
        if self._attempts == 0 or (idle and now > self._mended_at + self._recover_s):
            self._attempts, self._since = 0, now
        self._attempts += 1
        return self._attempts > ATTEMPTS and now > self._since + self._recover_s

    def mended(self, now: float) -> None:
        """The chain is whole, as far as we know."""
        self._mended_at = now

    def answered(self) -> None:
        """An answer came through the chain."""
        self._attempts = 0


def verdict(error: SwarmnetError) -> SwarmnetError:
    """What a person is told after many attempts, the last of which failed so."""
    if isinstance(error, NoRoute | NotAuthorised):
        return error
    if isinstance(error, IncompatibleVersion):
        return IncompatibleVersion(
            f"a host runs another version: {error}", hint="upgrade here, or have whoever runs it upgrade"
        )
    if isinstance(error, StreamRefused) and not error.retry_after_s:
        return NotAuthorised(str(error), hint=error.hint)
    if isinstance(error, StreamRefused) or (
        isinstance(error, Refused) and error.reason == pb.REASON_OUT_OF_MEMORY
    ):
        return ResourceLimitReached(
            f"the hosts have no room: {error}",
            error.retry_after_s,
            hint="try again later, or start another node: swarmnet join",
        )
    return Unreachable(f"no host computes: {error}", hint="try again; the swarm may be changing")
