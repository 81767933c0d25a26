"""Whose fault it is that hosts refuse what we send: that of one of them, or our own."""

from collections.abc import Sequence

from swarmnet_client.swarm import Swarm
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.routing import Hop
from swarmnet_protocols.session.link import Refused
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.wire import session_pb2 as pb

OURS = {
    pb.REASON_PROTOCOL: "update swarmnet, or leave out the adapter",
    pb.REASON_TOO_LONG: "send shorter sequences",
    pb.REASON_NOT_FINITE: "the adapter, or what comes before the blocks, has grown too large: train with a lower learning rate",
}
"""Refusals that every honest host would repeat, and what to do about them."""


class Suspects:
    """Who may be the one liar that is behind all refusals for the same reason. Pure."""

    def __init__(self) -> None:
        self._left: dict[int, frozenset[PeerId]] = {}
        self._accused: dict[int, frozenset[PeerId]] = {}

    def narrow(self, reason: int, peers: frozenset[PeerId]) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """Another refusal, which is a lie, or comes of one, of one of ``peers`` if it is not our fault.

        Returns who may still be behind all of them, and who was suspected and is cleared.
        """
        left = self._left[reason] = self._left.get(reason, peers) & peers
        accused = self._accused[reason] = self._accused.get(reason, peers) | peers
        return left, accused - left


class Blame:
    """Settles, of some work that hosts refuse, whether that is our own fault."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._suspects = Suspects()

    def settle(self, refusal: Refused, hops: Sequence[Hop]) -> None:
        """Raise ``ConfigError`` once it is our fault: no one host can be behind all refusals, or none that others could replace.

        ``hops``: who refuses, and whoever else may be why. Until then they are to be replaced; whoever is cleared is as good
        as it was.
        """
        if refusal.reason not in OURS:
            return
        left, cleared = self._suspects.narrow(refusal.reason, frozenset(hop.peer for hop in hops))
        for peer in cleared:
            self._swarm.served(peer)
        if any(self._swarm.can_replace(hop) for hop in hops if hop.peer in left):
            return
        for peer in left:
            self._swarm.served(peer)
        raise ConfigError(f"the hosts refuse what we send: {refusal}", hint=OURS[refusal.reason]) from refusal
