"""Who is at fault when a host refuses what a client sends: that host, a host before it, or the client.

A refusal may be honest: the numbers that came were not finite, or too long. Then the fault is of a host whose outputs they were, or of the
client. Or it is a lie. A client at fault is refused by every host; one liar is not behind the refusals of hosts that have nothing to do with
it. So refusals of independent hosts for the same reason blame the client.
"""

from collections.abc import Sequence

from swarmnet_client.swarm.swarm import Swarm
from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.routing.chain_search import Hop
from swarmnet_protocols.wire import refusal_pb2

CLIENT_FAULTS = {
    refusal_pb2.REASON_PROTOCOL: "update swarmnet, or leave out the adapter",
    refusal_pb2.REASON_TOO_LONG: "send shorter sequences",
    refusal_pb2.REASON_NOT_FINITE: "the adapter, or what comes before the blocks, has grown too large: train with a lower learning rate",
}
"""Reasons that every honest host would give a client at fault, with what its user can do."""


class Suspects:
    """The hosts that may be the one liar behind all refusals for a reason. Pure."""

    def __init__(self) -> None:
        self._left: dict[int, frozenset[PeerId]] = {}
        self._accused: dict[int, frozenset[PeerId]] = {}

    def narrow(self, reason: int, peers: frozenset[PeerId]) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """Count a refusal that is the fault of one of ``peers``, if not the client's.

        Returns the peers that may be behind all refusals for ``reason``, and those that were suspected and no longer are.
        """
        left = self._left[reason] = self._left.get(reason, peers) & peers
        accused = self._accused[reason] = self._accused.get(reason, peers) | peers
        return left, accused - left


class Blame:
    """Attributes the failures of one piece of work: a session between two answers, or a batch of passes."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._suspects = Suspects()

    def attribute(
        self, error: SwarmnetError, hop: Hop, *, made_by: Sequence[Hop] = (), sent_by: Hop | None = None
    ) -> list[Hop]:
        """Ban the hosts that may be why ``hop`` failed with ``error``, and return them: they are to be replaced.

        ``made_by``: the hops whose outputs led to its inputs; ``sent_by``: the hop that sent them, None for the client. Hosts that this
        failure clears are no longer banned. Raises ``ConfigError`` when the client is at fault: no single host can be behind all
        refusals, or none that could be replaced.
        """
        reason = error.reason if isinstance(error, Refused) else refusal_pb2.REASON_UNSPECIFIED
        suspects, may_be_client = [hop], reason in CLIENT_FAULTS
        if reason == refusal_pb2.REASON_NOT_FINITE:  # any of them may have made the numbers too large
            suspects = list(dict.fromkeys([hop, *made_by]))
        elif reason in CLIENT_FAULTS and sent_by is not None:
            suspects, may_be_client = [hop, sent_by], False
        banned = self._narrow(error, reason, suspects) if may_be_client else suspects
        for each in banned:
            self._swarm.failed(each.peer)
        return suspects

    def _narrow(
        self, error: SwarmnetError, reason: "refusal_pb2.Reason", suspects: Sequence[Hop]
    ) -> list[Hop]:
        """The hops that may be behind all refusals. Raises ``ConfigError`` as ``attribute`` does."""
        left, cleared = self._suspects.narrow(reason, frozenset(hop.peer for hop in suspects))
        for peer in cleared:
            self._swarm.served(peer)
        if any(self._swarm.can_replace(hop) for hop in suspects if hop.peer in left):
            return [hop for hop in suspects if hop.peer in left]
        for peer in left:
            self._swarm.served(peer)
        raise ConfigError(f"the hosts refuse what we send: {error}", hint=CLIENT_FAULTS[reason]) from error
