"""Plans of audits: the hop, the number of positions, and the budget. Pure but for the random
source.

To check one position, an audit has to compute all positions before it, too. So an audit of ``m``
positions costs ``m`` positions of the host's blocks. It finds every lie that begins at a position
``x <= m``. ``m`` is drawn with P(m >= x) = 1 / x. So one of ``x`` audits finds a lie that begins at
``x``, and an audit costs 1 + ln(MAX_DIGEST_POSITIONS) positions on average.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.session.received_digests import MAX_DIGEST_POSITIONS

SHARE = 0.03
"""Extra work for audits, as a share of the work that hosts do for the client, in positions times
blocks."""
NEWCOMER_POSITIONS = 4
"""Positions of a host's first audit. With more, the budget would not cover every host of a chain
within 200 positions. With fewer, a host that repeats its earlier outputs would pass more often: at
the first position it has none to repeat."""
MAX_REMEMBERED = 4096
"""Most audited hosts that are remembered."""


@dataclass(frozen=True)
class AuditPlan:
    """An audit of ``hop`` over the first ``positions`` positions of a sequence."""

    hop: Hop
    positions: int

    @property
    def cost(self) -> int:
        """Positions times blocks."""
        return self.positions * (self.hop.end - self.hop.start)


class Ledger:
    """The audit budget of a client, and the hosts it has audited. All chains of the client share
    one."""

    def __init__(self, rng: random.Random) -> None:
        """Hosts must not be able to predict ``rng``."""
        self.rng = rng
        self.doubted: set[PeerId] = set()
        """Hosts whose recomputation another host contradicted. They are not witnesses again."""
        self._credit = 0.0
        self._audited: Latest[PeerId, None] = Latest(MAX_REMEMBERED)

    def earn(self, work: int) -> None:
        """Credit a share of the ``work``, in positions times blocks, that hosts have computed."""
        self._credit += SHARE * work

    def may_spend(self, cost: int) -> bool:
        """Return whether the budget covers ``cost``."""
        return cost <= self._credit

    def charge(self, cost: int) -> None:
        """Spend ``cost`` on an audit. A negative cost is a refund. The budget may be overdrawn,
        because every mismatch needs a third host."""
        self._credit -= cost

    def plan(self, hops: Sequence[Hop]) -> AuditPlan:
        """Return the next audit. Hosts that were never audited come first."""
        new = [hop for hop in hops if hop.peer not in self._audited]
        drawn = min(int(1 / (1 - self.rng.random())), MAX_DIGEST_POSITIONS)
        return AuditPlan(self.rng.choice(new or list(hops)), NEWCOMER_POSITIONS if new else drawn)

    def passed(self, peer: PeerId) -> None:
        """Note that an audit found the outputs of ``peer`` right."""
        self._audited[peer] = None


def witnesses(
    hosts: Sequence[HostInfo],
    audited: Hop,
    without: frozenset[PeerId],
    rng: random.Random,
    arithmetic: str | None = None,
) -> list[Hop]:
    """Return random hosts that together have the blocks of ``audited``, in the precision of
    ``audited`` and, if given, with this ``arithmetic``.

    Hosts in ``without`` are left out. Empty if no hosts have all of these blocks.
    """
    able = [
        host
        for host in hosts
        if host.online
        and host.peer not in without
        and host.precision == audited.precision
        and arithmetic in (None, host.arithmetic)
    ]
    found: list[Hop] = []
    reached, end = audited.start, audited.end
    while reached < end:
        next_hosts = [host for host in able if host.start <= reached < host.end]
        if not next_hosts:
            return []
        whole = [host for host in next_hosts if host.end >= end]
        host = rng.choice(whole or next_hosts)
        found.append(Hop.of(host, reached, min(host.end, end)))
        reached = host.end
    return found
