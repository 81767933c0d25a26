"""How often a chain is mended before it is given up, and what is said then. Pure: takes the time as an argument."""

from collections import defaultdict

from swarmnet_protocols.errors import ConfigError, NoRoute, NotAuthorised, SwarmnetError, Unreachable
from swarmnet_protocols.resources import Exhausted
from swarmnet_protocols.session.link import Refused
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.wire import session_pb2 as pb

PAUSE_S = 0.25
"""Between two attempts, once the first ones have failed."""
ATTEMPTS = 10
"""Times a chain is mended without an answer in between before we ask whether there will ever be one."""


OURS = {
    pb.REASON_PROTOCOL: "update swarmnet, or leave out the adapter",
    pb.REASON_TOO_LONG: "send shorter sequences",
    pb.REASON_NOT_FINITE: "the adapter, or what comes before the blocks, has grown too large: train with a lower learning rate",
}
"""Refusals that every honest host would repeat, and what to do about them."""
BELIEVED = 2
"""So many hosts are not taken for liars when they say the same."""


class Blame:
    """Which hosts say that it is our own fault. One alone may lie, so another is asked, if there is one."""

    def __init__(self) -> None:
        self._by: defaultdict[int, set[PeerId]] = defaultdict(set)

    def settled(self, refusal: Refused, peer: PeerId, *, others: bool) -> frozenset[PeerId]:
        """Whom to believe, now that ``peer`` refuses as well; nobody yet while ``others`` could be asked."""
        if refusal.reason not in OURS:
            return frozenset()
        blaming = self._by[refusal.reason]
        blaming.add(peer)
        return frozenset(blaming) if len(blaming) >= BELIEVED or not others else frozenset()


def our_fault(refusal: Refused) -> ConfigError:
    """What a person is told of a refusal that is in ``OURS``."""
    return ConfigError(f"the hosts refuse what we send: {refusal}", hint=OURS[refusal.reason])


class Patience:
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
        asked_s = error.retry_after_s if isinstance(error, Refused) else 0.0
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
    if isinstance(error, Refused) and error.reason == pb.REASON_OUT_OF_MEMORY:
        return Exhausted(
            f"the hosts have no room: {error}",
            error.retry_after_s,
            hint="try again later, or start another node: swarmnet join",
        )
    return Unreachable(f"no host computes: {error}", hint="try again; the swarm may be changing")
