"""How often a chain is repaired before it is given up, and the error that explains why. Pure: time is an argument."""

from swarmnet_protocols.errors import (
    IncompatibleVersion,
    NoRoute,
    NotAuthorised,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.resources import ResourceLimitReached
from swarmnet_protocols.wire import refusal_pb2

PAUSE_S = 0.25
"""Seconds between two attempts, once the first ones have failed."""
ATTEMPTS = 10
"""Repairs in a row, without an answer in between, after which a chain may be given up."""


class RetryPolicy:
    """Counts the repairs of a chain since it last answered."""

    def __init__(self, recover_s: float) -> None:
        """``recover_s``: a chain is tried for this long at least."""
        self._recover_s = recover_s
        self._attempts = 0
        self._since = 0.0
        self._repaired_at = 0.0

    def pause_s(self, error: SwarmnetError | None) -> float:
        """Seconds to wait before the next attempt; ``error`` ended the last one, and may name a time to wait."""
        if self._attempts <= 2:  # another host may have room
            return 0.0
        asked_s = error.retry_after_s if isinstance(error, Refused) else 0.0
        return min(max(PAUSE_S, asked_s), self._recover_s / 2)

    def is_given_up(self, now: float, *, idle: bool) -> bool:
        """Count one more failure; True after ``ATTEMPTS`` in a row over at least ``recover_s``.

        An ``idle`` chain had nothing to answer: if it held for ``recover_s`` since its last repair, counting begins anew.
        """
        if self._attempts == 0 or (idle and now > self._repaired_at + self._recover_s):
            self._attempts, self._since = 0, now
        self._attempts += 1
        return self._attempts > ATTEMPTS and now > self._since + self._recover_s

    def repaired(self, now: float) -> None:
        """The chain is whole, as far as is known."""
        self._repaired_at = now

    def answered(self) -> None:
        """The chain has answered a step."""
        self._attempts = 0


def explain(error: SwarmnetError) -> SwarmnetError:
    """The error for the user after many attempts, of which ``error`` ended the last."""
    if isinstance(error, NoRoute | NotAuthorised):
        return error
    if isinstance(error, IncompatibleVersion):
        return IncompatibleVersion(
            f"a host runs another version: {error}", hint="upgrade here, or have the host's owner upgrade"
        )
    if isinstance(error, Refused) and error.reason == refusal_pb2.REASON_NOT_AUTHORISED:
        return NotAuthorised(str(error), hint=error.hint)
    if isinstance(error, Refused) and error.reason == refusal_pb2.REASON_OUT_OF_MEMORY:
        return ResourceLimitReached(
            f"the hosts have no room: {error}",
            error.retry_after_s,
            hint="try again later, or start another node: swarmnet join",
        )
    return Unreachable(f"no host computes: {error}", hint="try again; the swarm may be changing")
