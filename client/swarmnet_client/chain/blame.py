"""Whose fault it is that hosts refuse what we send: that of one of them, or our own."""

from collections.abc import Sequence

from swarmnet_client.swarm.swarm import Swarm
from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.routing.cost import Hop
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
    """Settles, of some work, who is to blame when a host fails us: that host, another one, or we ourselves."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._suspects = Suspects()

    def settle(
        self, error: SwarmnetError, hop: Hop, *, made_by: Sequence[Hop] = (), fed_by: Hop | None = None
    ) -> list[Hop]:
        """Ban whoever may be why ``hop`` failed us with ``error``, and return them: they are to be replaced, with all they made.

        ``made_by``: whose outputs led to what it was to compute with; ``fed_by``: who sent it that, if we did not. Whoever is
        cleared by this failure and earlier ones is as good as it was. Raises ``ConfigError`` once it is our own fault: no one host can
        be behind all refusals, or none that others could replace.
        """
        reason = error.reason if isinstance(error, Refused) else pb.REASON_UNSPECIFIED
        suspects, is_maybe_ours = [hop], reason in OURS
        if reason == pb.REASON_NOT_FINITE:  # any of them may have made the numbers too large
            suspects = list(dict.fromkeys([hop, *made_by]))
        elif reason in OURS and fed_by is not None:
            suspects, is_maybe_ours = [hop, fed_by], False
        banned = self._narrow(error, reason, suspects) if is_maybe_ours else suspects
        for each in banned:
            self._swarm.failed(each.peer)
        return suspects

    def _narrow(self, error: SwarmnetError, reason: "pb.Reason", suspects: Sequence[Hop]) -> list[Hop]:
        """Those who may still be behind all refusals. Raises ``ConfigError`` as ``settle`` does."""
        left, cleared = self._suspects.narrow(reason, frozenset(hop.peer for hop in suspects))
        for peer in cleared:
            self._swarm.served(peer)
        if any(self._swarm.can_replace(hop) for hop in suspects if hop.peer in left):
            return [hop for hop in suspects if hop.peer in left]
        for peer in left:
            self._swarm.served(peer)
        raise ConfigError(f"the hosts refuse what we send: {error}", hint=OURS[reason]) from error
