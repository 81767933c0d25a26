"""Search for the cheapest chain of hosts, as a pure function of a view and a random source.

Clients call :func:`find_chain`. A chain is a list of hops that cover blocks [start, end). Each hop
is a host and the blocks it runs. The cost of a chain is the expected time of one decode step of one
token, in seconds::

    cost = sum over hops of (delay to the hop + queue_s + block_s * blocks / spare + penalties)
           + delay from the last hop + changes of precision * PRECISION_S

- Delays are one-way seconds. The first and the last delay are to and from the client (or ``source``
  and ``sink``). Delays to the client are measured, or estimated from network coordinates. Delays
  between hosts are estimated within bounds from the measured ones (``View.delay_between``).
- ``queue_s`` is the wait for the host's engine. ``block_s`` is the host's time per block.
- ``spare`` is the share of time in which the host is idle. Clients prefer hosts with time to spare,
  long before steps wait at busy hosts.

A hop may use any part of the span that its host announced. Two consecutive hops have different
hosts, because hosts do not dial themselves. When a chain loses hops, the whole chain is searched
again, with the open hops among the candidates (``View.hops``). So if only the next hop's host can
fill a gap, the search makes that hop longer and needs no extra rule.

The search has three steps:

1. ``credible`` replaces announced speeds and loads, which a host can falsify. The new values bound
   what a host gains from a false announcement.
2. ``_shortlist`` keeps the ``CANDIDATES_PER_BLOCK`` cheapest hosts of each block, which bounds the
   search in a swarm of any size.
3. ``_search`` finds the cheapest chain by dynamic programming. Costs are stretched at random by up
   to ``MARGIN``, so that clients spread over chains of about equal cost.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_view import Hop, View, credible, pair_of
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.routing.spans import overlap

REPLACED_S = 1.0
"""Seconds added for each open hop that is replaced. Hosts usually differ by less, and another host
would have to rebuild the KV caches. It is less than ``UNREACHABLE_COST_S``, since a hop that no
neighbour reaches is useless."""
PRECISION_S = 1.0
"""Seconds added where a hop and its upstream hop differ in precision, so that a chain of one
precision wins unless it is far slower."""
CANDIDATES_PER_BLOCK = 8
"""Number of cheapest hosts that the search considers for each block and precision."""
PRECISIONS = 3
"""Number of precisions with candidates of their own, the most common first. All others share one
list."""
MARGIN = 0.2
"""Largest extra cost of a chain over the cheapest one, as a share. It spreads clients over equal
hosts."""
LEAST_SPARE = 0.1
"""Least share of a host's time that counts as spare. Clients know the load of some seconds ago, so
a host that looks fully busy may have time again."""
GUARD_MARGIN = 1.5
"""A guard becomes the first or last hop even if it costs more than another host, up to this factor
more."""


def find_chain(
    view: View,
    span: tuple[int, int],
    rng: random.Random,
    *,
    source: PeerId | None = None,
    sink: PeerId | None = None,
    precision: str | None = None,
) -> list[Hop]:
    """Return hops that cover ``span`` in order, from ``source`` to ``sink`` (None: the client).

    No host follows itself. An open hop of the view either stays unchanged, and the result contains
    it, or is replaced, which costs ``REPLACED_S``. ``precision`` is the precision of the chain so
    far.

    A chain changes hosts only where the span of a host or hop begins or ends. It costs at most ``1
    + MARGIN`` times the cheapest such chain, because each host's costs are multiplied by a random
    factor in [1, 1 + MARGIN]. If there are guards, any other host costs ``GUARD_MARGIN`` times as
    much as first or last hop.

    Banned hosts come back only when the others make no chain, or only a chain whose neighbours
    failed to reach each other. The search forgives the oldest failure first, since its cause has
    most likely gone. A failure is a banned host, or two hosts that did not reach each other.

    Raises ``NoRoute`` with the blocks that no host covers.
    """
    view = credible(view)
    spare = {peer: max(1 - busy, LEAST_SPARE) for peer, busy in view.busy.items()}
    view = replace(
        view, block_s={peer: block_s / spare.get(peer, 1.0) for peer, block_s in view.block_s.items()}
    )
    usable = {host.peer: host for host in view.hosts if host.online and overlap(host, span)}
    banned = [usable.pop(peer) for peer in view.banned if peer in usable]
    allowed = list(usable.values())
    opened = [_as_host(hop) for hop in view.hops]
    stretch = {host.peer: 1 + MARGIN * rng.random() for host in (*allowed, *banned, *opened)}
    best = None
    while True:
        missing, broken_at = uncovered([*allowed, *opened], span), -math.inf
        if not missing:
            candidates = [*_shortlist(view, allowed, span, stretch), *opened]
            found = _search(candidates, view, span, stretch, (source, sink), precision)
            if found is not None:
                failures = failed_links([source, *(hop.peer for hop in found), sink], view.unreachable)
                if not failures:
                    return found
                broken_at = max(failures)
            best = best or found
        useful = [host for host in banned if not missing or _has_some(host, missing)]
        if best is not None and not (useful and view.banned[useful[0].peer] < broken_at):
            return best
        if not useful:
            raise NoRoute(missing or uncovered(allowed, span) or [span])
        banned.remove(useful[0])
        allowed.append(useful[0])


def _as_host(hop: Hop) -> HostInfo:
    return HostInfo(
        *(hop.peer, hop.start, hop.end, 0.0, hop.addresses),
        precision=hop.precision,
        arithmetic=hop.arithmetic,
        is_hop=True,
    )


def failed_links(
    peers: Sequence[PeerId | None], unreachable: Mapping[tuple[PeerId, PeerId], float]
) -> list[float]:
    """Return the times at which neighbours among ``peers`` failed to reach each other (None: the
    client).
    """
    return [
        unreachable[pair_of(one, other)]
        for one, other in pairwise(peers)
        if one is not None and other is not None and pair_of(one, other) in unreachable
    ]


def _has_some(host: HostInfo, spans: Sequence[tuple[int, int]]) -> bool:
    return any(overlap(host, span) for span in spans)


def uncovered(hosts: Iterable[HostInfo], span: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the parts of ``span`` that no host covers."""
    gaps: list[tuple[int, int]] = []
    reached = span[0]
    for host in sorted(hosts, key=lambda host: host.start):
        if host.start > reached:
            gaps.append((reached, min(host.start, span[1])))
        reached = max(reached, host.end)
        if reached >= span[1]:
            return gaps
    gaps.append((reached, span[1]))
    return gaps


def _shortlist(
    view: View, hosts: Sequence[HostInfo], span: tuple[int, int], stretch: Mapping[PeerId, float]
) -> list[HostInfo]:
    """Return the hosts that are among the cheapest of some block, and all guards.

    Stretched costs are compared, so ties are broken at random.
    """

    def price(host: HostInfo) -> float:
        cost_s = view.block_s[host.peer] + view.queue_s.get(host.peer, 0.0) + view.delay_to(host.peer)
        cost_s += view.penalty_of(host.peer)
        return stretch[host.peer] * cost_s

    cheapest = sorted(hosts, key=price)
    usual = [precision for precision, _ in Counter(host.precision for host in hosts).most_common(PRECISIONS)]
    taken: Counter[tuple[int, str | None]] = Counter()
    kept: list[HostInfo] = []
    for host in cheapest:
        blocks = range(max(host.start, span[0]) - span[0], min(host.end, span[1]) - span[0])
        kind = host.precision if host.precision in usual else None
        if host.peer in view.guards or any(taken[block, kind] < CANDIDATES_PER_BLOCK for block in blocks):
            kept.append(host)
            taken.update((block, kind) for block in blocks)
    return kept


class _Path(NamedTuple):
    """A chain up to a block boundary: the hops of ``before``, then ``host`` from block ``begun``
    on.
    """

    cost: float
    host: HostInfo
    begun: int
    factor: float
    """Multiplies the costs of the last hop."""
    is_final: bool
    """True if the last hop goes to the end of the span."""
    before: "_Path | None"

    @property
    def key(self) -> tuple[PeerId, bool, float, bool]:
        """The state of the path. The search keeps the cheapest path of each state at each
        boundary."""
        return self.host.peer, self.host.is_hop, self.factor, self.is_final

    def may_end(self, boundary: int) -> bool:
        """Tell whether another host may continue at ``boundary``."""
        return not self.is_final and (not self.host.is_hop or self.host.end == boundary)

    def hops(self, end: int) -> list[Hop]:
        """Return all hops. The last one ends at ``end``."""
        earlier = self.before.hops(self.begun) if self.before is not None else []
        return [*earlier, Hop.of(self.host, self.begun, end)]


def _search(
    hosts: Sequence[HostInfo],
    view: View,
    span: tuple[int, int],
    stretch: Mapping[PeerId, float],
    ends: tuple[PeerId | None, PeerId | None],
    precision: str | None,
) -> list[Hop] | None:
    """Return the chain with the lowest stretched cost, None if there is no chain.

    The Viterbi algorithm runs over the boundaries where a span begins or ends. No host may follow
    itself, ``source`` and ``sink`` included. A path has to know the factor of a host's costs when
    it enters the host. So a host that would cost more as the last hop has two states: as the last
    hop, and as a hop that another one follows.
    """
    source, sink = ends
    delays = _Delays(view)
    penalties = {host.peer: view.penalty_of(host.peer) for host in hosts}
    replaced_s = {host.start: REPLACED_S for host in hosts if host.is_hop}
    # A chain changes hosts only here, so the search takes few steps in a model of many blocks.
    inside = {block for host in hosts for block in (host.start, host.end) if span[0] < block < span[1]}
    paths: list[_Path] = []
    for start, end in pairwise(sorted({*span, *inside})):
        blocks = end - start
        ready = sorted((path for path in paths if path.may_end(start)), key=itemgetter(0))
        found: dict[tuple[PeerId, bool, float, bool], _Path] = {}
        # Paths whose last host also has these blocks may stay there.
        for path in paths:
            if path.host.end >= end:
                more_s = path.factor * view.block_s.get(path.host.peer, 0.0) * blocks
                more_s += replaced_s.get(start, 0.0)  # it takes the place of the open hop that begins here
                found[path.key] = path._replace(cost=path.cost + more_s)
        # Paths that enter a host here. An open hop is entered at its first block only, because it
        # stays unchanged.
        for host in hosts:
            if not host.start <= start < host.end or (host.is_hop and host.start != start):
                continue
            peer, is_first = host.peer, start == span[0]
            if is_first and peer == source:
                continue
            is_dearer = bool(view.guards) and peer not in view.guards
            may_be_final = is_dearer and sink is None and host.end >= span[1]
            for is_final in (False, True) if may_be_final else (False,):
                is_end = is_final or (is_first and source is None)
                factor = stretch[peer] * (GUARD_MARGIN if is_dearer and is_end else 1.0)
                here_s = view.queue_s.get(peer, 0.0) + view.block_s.get(peer, 0.0) * blocks
                if is_first:
                    cost, before = factor * (view.delay_between(source, peer) + here_s), None
                    cost += PRECISION_S * (precision not in (None, host.precision))
                elif (entry := _cheapest_entry(delays, ready, host, factor)) is not None:
                    cost, before = entry[0] + factor * here_s, entry[1]
                else:
                    continue
                if not host.is_hop:
                    cost += penalties[peer] + replaced_s.get(start, 0.0)
                path = _Path(cost, host, start, factor, is_final, before)
                known = found.get(path.key)
                if known is None or cost < known.cost:
                    found[path.key] = path
        paths = list(found.values())
    complete = [
        path
        for path in paths
        if path.host.peer != sink
        and (path.is_final or sink is not None or path.host.peer in view.guards or not view.guards)
    ]
    if not complete:
        return None
    return min(complete, key=lambda path: path.cost + view.delay_between(path.host.peer, sink)).hops(span[1])


class _Delays(dict[tuple[PeerId, PeerId], float]):
    """Cache of ``View.delay_between`` for the pairs of one search."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view

    def __missing__(self, pair: tuple[PeerId, PeerId]) -> float:
        self[pair] = self[pair[1], pair[0]] = delay_s = self._view.delay_between(*pair)
        return delay_s


def _cheapest_entry(
    delays: _Delays, paths: Sequence[_Path], host: HostInfo, factor: float
) -> tuple[float, _Path] | None:
    """Return the cheapest way to continue one of ``paths`` at ``host``, as its cost and the path.

    ``paths`` are sorted by cost. None if no path can continue there.
    """
    least, best = math.inf, None
    peer, precision = host.peer, host.precision
    for path in paths:
        if path.cost >= least:  # all later paths cost more, too
            break
        before = path.host
        if before.peer != peer:
            cost = (
                path.cost + factor * delays[before.peer, peer] + PRECISION_S * (before.precision != precision)
            )
            if cost < least:
                least, best = cost, path
    return None if best is None else (least, best)
