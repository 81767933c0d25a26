"""Blame and retries: which host caused a failure, whether to try again, and the error for the user.

A host may refuse with good reason, for example inputs that are too long or not finite. Then the
client or the host that computed those inputs is at fault. Or the refusing host lies.

All hosts refuse a client at fault. A lying host cannot make another host refuse, unless that host
used its outputs. So the client is blamed if independent hosts refuse for the same reason. In the
same way, messages of independent hosts that the client cannot handle show a bug of the client.
"""

from collections.abc import Sequence
from enum import Enum, auto

from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import (
    ConfigError,
    IncompatibleVersion,
    MissingExperts,
    NoRoom,
    NoRoute,
    NotAuthorised,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resources import ResourceLimitReached
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.wire import refusal_pb2

CLIENT_FAULTS = {
    refusal_pb2.REASON_PROTOCOL: "update swarmnet, or leave out the adapter",
    refusal_pb2.REASON_TOO_LONG: "send shorter sequences",
    refusal_pb2.REASON_NOT_FINITE: "the model's own weights are damaged, or an adapter has grown too large: train it with a lower learning rate",
}
"""Reasons why every honest host refuses a client at fault, each with advice to the user."""
PAUSE_S = 0.25
"""Seconds between two attempts, once the first ones have failed."""
QUICK_ATTEMPTS = 3
"""Attempts to fill a chain without a pause. With fewer, a lost packet costs a pause; with more, a
host that refuses at once is asked too often."""
DIRECTORY_S = 0.3
"""Longest wait for the directory before a failed host is tried again.

Most answers take a round trip. A directory replica that failed together with the host would take
seconds.
"""
ATTEMPTS = 10
"""Repairs in a row, without an answer in between, after which a chain may be given up."""
OUT_OF_RESOURCES_ATTEMPTS = 4
"""As ``ATTEMPTS``, but when a host had no room. Each attempt recomputes the prompt up to that
host."""


class UnhandledMessage(SwarmnetError):
    """A message of a host caused an error that no code foresaw.

    The message may be at fault, or a bug of this client.
    """

    def __init__(self, peer: PeerId, error: Exception) -> None:
        super().__init__(
            f"a message of {peer} cannot be handled: {type(error).__name__}: {error}",
            hint="update swarmnet, or report this error",
        )
        self.__cause__ = error


class Suspects:
    """For each reason, the hosts that may have caused all refusals so far. Pure."""

    def __init__(self) -> None:
        self._left: dict[int, frozenset[PeerId]] = {}
        self._accused: dict[int, frozenset[PeerId]] = {}

    def narrow(self, reason: int, peers: frozenset[PeerId]) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """Count a refusal caused by one of ``peers`` or by the client.

        Returns the peers that may have caused all refusals for ``reason``, and the peers that this
        refusal clears of suspicion.
        """
        left = self._left[reason] = self._left.get(reason, peers) & peers
        accused = self._accused[reason] = self._accused.get(reason, peers) | peers
        return left, accused - left


class Blame:
    """Attributes the failures of one piece of work: a session between two answers, or a batch of
    passes."""

    def __init__(self, hosts: ModelHosts) -> None:
        self._hosts = hosts
        self._suspects = Suspects()

    def attribute(
        self,
        error: SwarmnetError,
        hop: Hop,
        *,
        made_by: Sequence[Hop] = (),
        sent_by: Hop | None = None,
        continues: bool = False,
    ) -> list[Hop]:
        """Ban the hosts that may have caused the failure of ``hop``. Return the hops to replace.

        - ``error``: the failure. An overloaded host is left alone instead of banned.
        - ``made_by``: the hops whose outputs led to the inputs of ``hop``.
        - ``sent_by``: the hop that sent those inputs; None for the client.
        - ``continues``: whether ``hop`` was to continue an answer.

        Hosts that this failure clears are unbanned. The client is at fault if no host that can be
        replaced can have caused all failures of this kind. Then this raises an ``UnhandledMessage``
        again, and ``ConfigError`` for any other ``error``.
        """
        if isinstance(error, Refused) and error.reason == refusal_pb2.REASON_OVERLOADED:
            self._hosts.overloaded(hop.peer, error.retry_after_s, continues=continues)
            return [hop]
        reason = error.reason if isinstance(error, Refused) else refusal_pb2.REASON_UNSPECIFIED
        suspects = [hop]
        may_be_client = reason in CLIENT_FAULTS or isinstance(error, UnhandledMessage)
        # any of them may have made the numbers too large
        if reason == refusal_pb2.REASON_NOT_FINITE:
            suspects = list(dict.fromkeys([hop, *made_by]))
        elif reason in CLIENT_FAULTS and sent_by is not None:
            suspects, may_be_client = [hop, sent_by], False
        banned = self._narrow(error, reason, suspects) if may_be_client else suspects
        for each in banned:
            self._hosts.failed(each.peer)
        return suspects

    def _narrow(
        self, error: SwarmnetError, reason: "refusal_pb2.Reason", suspects: Sequence[Hop]
    ) -> list[Hop]:
        """Return the hops that may have caused all such failures. Raises as ``attribute`` does."""
        left, cleared = self._suspects.narrow(reason, frozenset(hop.peer for hop in suspects))
        for peer in cleared:
            self._hosts.answered(peer)
        if any(self._hosts.can_replace(hop) for hop in suspects if hop.peer in left):
            return [hop for hop in suspects if hop.peer in left]
        for peer in left:
            self._hosts.answered(peer)
        if isinstance(error, UnhandledMessage):
            raise error
        raise ConfigError(
            f"the hosts refuse what this client sends: {error}", hint=CLIENT_FAULTS[reason]
        ) from error


class RetryPolicy:
    """Counts repairs and waits for overloaded hosts since a chain last answered. Pure."""

    def __init__(self, recover_s: float) -> None:
        """``recover_s``: least seconds before a chain is given up."""
        self._recover_s = recover_s
        self._attempts = 0
        self._since = 0.0
        self._repaired_at = 0.0
        self._overloaded_since: float | None = None

    def pause_s(self, error: SwarmnetError | None) -> float:
        """Return the seconds to wait before the next attempt. ``error`` ended the last one.

        A refusal may name a time to wait. A host without room is asked again after that time, then
        after twice that.
        """
        if self._attempts <= (2 if is_out_of_resources(error) else 3):  # another host may do
            return 0.0
        asked_s = error.retry_after_s if isinstance(error, Refused) else 0.0
        if is_out_of_resources(error):
            asked_s *= 2.0 ** (self._attempts - 3)
        return min(max(PAUSE_S, asked_s), self._recover_s / 2)

    def is_given_up(self, now: float, error: SwarmnetError | None = None, *, idle: bool) -> bool:
        """Count one more failure, ``error``, and return whether to give up.

        True after ``ATTEMPTS`` failures in a row over at least ``recover_s``, or after
        ``OUT_OF_RESOURCES_ATTEMPTS`` for lack of resources. An ``idle`` chain has nothing to
        answer: if it held for ``recover_s`` since its last repair, the count starts over.
        """
        if self._attempts == 0 or (idle and now > self._repaired_at + self._recover_s):
            self._attempts, self._since = 0, now
        self._attempts += 1
        if is_out_of_resources(error) and self._attempts > OUT_OF_RESOURCES_ATTEMPTS:
            return True
        return self._attempts > ATTEMPTS and now > self._since + self._recover_s

    def may_wait(self, wait_s: float, most_s: float, now: float) -> bool:
        """Return whether a wait of ``wait_s`` for overloaded hosts ends within ``most_s`` of their
        first refusal.

        Hosts cannot prolong the wait by their answers, because they may lie.
        """
        if self._overloaded_since is None:
            self._overloaded_since = now
        return now + wait_s <= self._overloaded_since + most_s

    def repaired(self, now: float) -> None:
        """Note that the chain was repaired at ``now``."""
        self._repaired_at = now

    def answered(self) -> None:
        """Note that the chain has answered a step."""
        self._attempts, self._overloaded_since = 0, None


class Unfilled(Enum):
    """The reason why an attempt to fill the gaps of a chain has failed."""

    NO_ROUTE = auto()
    """No hosts are known that have the blocks, or they have no room."""
    DOUBTFUL = auto()
    """A host of the only route has failed before. The directory may know another."""
    NOT_OPENED = auto()
    """A host did not open its session, or a hop ended meanwhile."""


def before_attempt(failures: Sequence[Unfilled]) -> tuple[float, float | None]:
    """Return two times in seconds before the next attempt to fill a chain, after ``failures``.

    The first is a pause. The second is the longest wait for the directory; None if the wait has no
    limit, because without a route only the directory can help.
    """
    pause_s = PAUSE_S if len(failures) >= QUICK_ATTEMPTS else 0.0
    return pause_s, None if set(failures) == {Unfilled.NO_ROUTE} else DIRECTORY_S


def is_out_of_resources(error: SwarmnetError | None) -> bool:
    """Return whether a host refused because its memory, slots or a rate are used up."""
    return isinstance(error, Refused) and error.reason == refusal_pb2.REASON_OUT_OF_RESOURCES


def is_missing_experts(error: SwarmnetError | None) -> bool:
    """Return whether a host refused because experts that it needs are out of reach."""
    return isinstance(error, Refused) and error.reason == refusal_pb2.REASON_MISSING_EXPERTS


def explain(error: SwarmnetError) -> SwarmnetError:
    """Return the error for the user after many attempts. ``error`` ended the last attempt."""
    if isinstance(error, NoRoom | NoRoute | NotAuthorised):
        return error
    if isinstance(error, IncompatibleVersion):
        return IncompatibleVersion(
            f"a host runs another version: {error}", hint="upgrade here, or have the host's owner upgrade"
        )
    if isinstance(error, Refused) and error.reason == refusal_pb2.REASON_NOT_AUTHORISED:
        return NotAuthorised(str(error), hint=error.hint)
    if isinstance(error, Refused) and is_out_of_resources(error):
        return ResourceLimitReached(
            f"the hosts have no room: {error}",
            error.retry_after_s,
            hint="try again later, or start another node: swarmnet join",
        )
    if is_missing_experts(error):
        return MissingExperts(
            str(error), hint="host the missing ones: swarmnet join SWARM --experts BLOCK:EXPERTS"
        )
    return Unreachable(f"no host computes: {error}", hint="try again; the swarm may be changing")
