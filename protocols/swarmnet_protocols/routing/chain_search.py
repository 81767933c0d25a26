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
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from statistics import median_high
from typing import NamedTuple

from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.coordinates import Coordinate, distance
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.routing.spans import overlap

UNKNOWN_DELAY_S = 0.15
"""One-way seconds assumed for a peer without a measured delay. High, so that measured peers are
preferred."""
UNREACHABLE_COST_S = 10.0
"""Seconds added between two hosts that failed to reach each other, so that they become neighbours
only if no other chain exists."""
RELAY_S = 0.05
"""Seconds added between two hosts that need a relay, for its delay and the wait for its rate
limit."""
FULL_S = 0.5
"""Seconds added for a host without free memory for KV caches. Such a host would refuse a session or
evict another one."""
HEADROOM = 0.1
"""Share of a host's memory for KV caches. If less than this share is free, a part of ``FULL_S`` is
added."""
REPORTER_S = 0.1
"""Seconds added for a host that reported a live host as unreachable. Either host may be at fault. A
host that lies about this loses sessions itself. If the other host is at fault, all upstream hosts
report it, and all of them get the same penalty."""
USABLE_ERROR = 0.5
"""If the error of the client's own coordinate is larger, it estimates no delays from it."""
ENOUGH_DELAYS = 3
"""Measured delays that a client needs before it estimates others. Estimates are at least the median
of the measured delays."""
UNAUDITED_S = 0.5
"""Seconds added for a host in ``View.unaudited``. It is used only if the other hosts are far
slower, or would change the precision of the chain."""
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
USUAL_EXCESS = 2.0
"""Ratio of measured to announced time that is still normal, since estimates of delays are wrong by
about this factor. Time beyond it counts as waiting."""
ENOUGH_MEASURED = 3
"""Measured hosts needed before their median speed replaces the median of the announcements. One or
two may be slow by chance."""
GUARD_MARGIN = 1.5
"""A guard becomes the first or last hop even if it costs more than another host, up to this factor
more."""
BAN_S = 15.0
"""Seconds of the ban after a host's first failure."""
BAN_MAX_S = 240.0
"""Longest ban in seconds, after repeated failures."""


@dataclass(frozen=True)
class Hop:
    """A host and the blocks [start, end) that it runs in a chain."""

    peer: PeerId
    start: int
    end: int
    addresses: tuple[str, ...] = ()
    precision: str = ""


@dataclass(frozen=True)
class View:
    """A client's view of a model's hosts: their announcements, and its own measurements.

    ``delay_s``: one-way seconds from the client; ``queue_s``: seconds of wait for a host's engine.
    """

    hosts: Sequence[HostInfo]
    delay_s: Mapping[PeerId, float] = field(default_factory=dict)
    queue_s: Mapping[PeerId, float] = field(default_factory=dict)
    banned: Mapping[PeerId, float] = field(default_factory=dict)
    """Hosts that failed recently → time of the failure, the oldest first."""
    unreachable: Mapping[tuple[PeerId, PeerId], float] = field(default_factory=dict)
    """Pairs of hosts (``pair_of``) that recently failed to reach each other → time of the
    failure."""
    reporters: frozenset[PeerId] = frozenset()
    """The hosts that reported such a failure."""
    block_s: Mapping[PeerId, float] = field(default_factory=dict)
    """Seconds per block that the client measured."""
    guards: frozenset[PeerId] = frozenset()
    """Hosts preferred as first and last hop, which see the client's text."""
    relayed: frozenset[PeerId] = frozenset()
    """Hosts that cannot be dialled."""
    symmetric: frozenset[PeerId] = frozenset()
    """Hosts of ``relayed`` behind symmetric routers. They reach other hosts of ``relayed`` only
    through a relay."""
    unaudited: frozenset[PeerId] = frozenset()
    """Hosts whose precision no other host of the same blocks announces, so nobody could check their
    outputs."""
    coordinates: Mapping[PeerId, Coordinate] = field(default_factory=dict)
    """Network coordinates that hosts announced."""
    own: Coordinate | None = None
    """The network coordinate of the client."""
    cache_free: Mapping[PeerId, float] = field(default_factory=dict)
    """Free share of each host's memory for KV caches, as the host reported."""
    busy: Mapping[PeerId, float] = field(default_factory=dict)
    """Busy share of the last seconds of each host, as the host reported."""
    hops: Sequence[Hop] = ()
    """Open hops of the chain that the search replaces or extends."""
    explore: bool = False
    """Whether an unmeasured host may count as fast as the fastest measured one, if it announces
    that speed. This is how new hosts get measured."""

    def delay_between(self, one: PeerId | None, other: PeerId | None) -> float:
        """Return the one-way seconds between two peers (None: the client).

        Between two hosts this is the distance of their coordinates, kept between the difference and
        the sum of their delays to the client (the triangle inequality). So a host gains little by a
        false coordinate. Without coordinates it is the sum.
        """
        if one == other:
            return 0.0
        own_s = 0.0 if one is None else self.delay_to(one)
        others_s = 0.0 if other is None else self.delay_to(other)
        between_s = own_s + others_s
        if one is None or other is None:
            return between_s
        here, there = self.coordinates.get(one), self.coordinates.get(other)
        if here is not None and there is not None:
            between_s = min(between_s, max(distance(here, there), abs(own_s - others_s)))
        if self.unreachable and pair_of(one, other) in self.unreachable:
            return between_s + UNREACHABLE_COST_S
        if (
            one in self.relayed
            and other in self.relayed
            and (one in self.symmetric or other in self.symmetric)
        ):
            return between_s + RELAY_S
        return between_s

    def delay_to(self, peer: PeerId) -> float:
        """Return the one-way seconds to a host: measured, or estimated from coordinates.

        An estimate is at least the median of the measured delays.
        """
        measured_s = self.delay_s.get(peer)
        if measured_s is not None:
            return measured_s
        there = self.coordinates.get(peer)
        if there is None or self.own is None or self.own.error > USABLE_ERROR:
            return UNKNOWN_DELAY_S
        if len(self.delay_s) < ENOUGH_DELAYS:
            return UNKNOWN_DELAY_S
        return max(distance(self.own, there), self._usual_delay_s)

    @cached_property
    def _usual_delay_s(self) -> float:
        return median_high(self.delay_s.values())

    def penalty_of(self, peer: PeerId) -> float:
        """Return the seconds added for a host, the sum of up to three penalties.

        - It has little or no free memory for KV caches.
        - It reported failures to reach other hosts.
        - No other host can audit it.
        """
        full_s = FULL_S * max(0.0, 1 - self.cache_free.get(peer, 1.0) / HEADROOM)
        return full_s + REPORTER_S * (peer in self.reporters) + UNAUDITED_S * (peer in self.unaudited)


def credible(view: View) -> View:
    """Return ``view`` with credible speeds and loads instead of announced ones, and all delays
    filled in.

    - **Speed.** A measured host has its measured speed. An unmeasured host has its announced speed,
      but at best the median of the measured hosts (of all hosts while fewer than
      ``ENOUGH_MEASURED`` are measured). A slower announcement is used as it is, because it gains
      the host nothing.
    - **Queue.** The queue of an unmeasured host is at least the median of all queues. The queue of
      a measured host is already part of its measured speed.
    - **Busy share.** Each host has at least the median share. A host that takes n times its
      announced time, beyond ``USUAL_EXCESS``, is busy or lied about its speed, so its share is
      raised to match. While others report a share, a host that reports none counts as always busy.
      So clients use hosts whose load they know.
    - **Audits.** ``unaudited`` is filled in. A dishonest host could announce a precision of its own
      to avoid audits.
    """
    announced = {host.peer: host.step_s / (host.end - host.start) for host in view.hosts if host.online}
    if not announced:
        return view
    known = {peer: block_s for peer, block_s in view.block_s.items() if peer in announced}
    is_enough = len(known) >= ENOUGH_MEASURED
    speeds = known if is_enough else announced | known
    floor_s = min(known.values()) if view.explore and is_enough else median_high(speeds.values())
    block_s = {peer: step_s if step_s > floor_s else floor_s for peer, step_s in announced.items()} | known

    queue_s, busy = view.queue_s, view.busy
    if queue_s:
        wait_s = median_high(queue_s.values())
        queue_s = {peer: max(queue_s.get(peer, 0.0), wait_s) for peer in announced if peer not in known}
        queue_s |= {peer: view.queue_s.get(peer, 0.0) for peer in known}
    if busy:
        usual = median_high(busy.values())
        busy = {peer: max(busy.get(peer, 1.0), usual) for peer in announced}
        for peer, measured_s in known.items():
            if measured_s > USUAL_EXCESS * announced[peer]:
                busy[peer] = max(busy[peer], 1 - USUAL_EXCESS * announced[peer] / measured_s)
    return replace(
        view,
        block_s=block_s,
        queue_s=queue_s,
        busy=busy,
        delay_s={**view.delay_s, **{peer: view.delay_to(peer) for peer in announced}},
        unaudited=_alone_in_precision(view.hosts),
    )


def _alone_in_precision(hosts: Iterable[HostInfo]) -> frozenset[PeerId]:
    online = [host for host in hosts if host.online]
    if len({host.precision for host in online}) < 2:
        return frozenset()
    holders: Counter[int] = Counter()
    alike: Counter[tuple[int, str]] = Counter()
    for host in online:
        holders.update(range(host.start, host.end))
        alike.update((block, host.precision) for block in range(host.start, host.end))
    return frozenset(
        host.peer
        for host in online
        if any(holders[block] > 1 == alike[block, host.precision] for block in range(host.start, host.end))
    )


def pair_of(one: PeerId, other: PeerId) -> tuple[PeerId, PeerId]:
    """Return an unordered pair of peers."""
    return min(one, other), max(one, other)


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
    return HostInfo(hop.peer, hop.start, hop.end, 0.0, hop.addresses, precision=hop.precision, is_hop=True)


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
    """Whether the last hop goes to the end of the span."""
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
        return [*earlier, Hop(self.host.peer, self.begun, end, self.host.addresses, self.host.precision)]


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
    inside = {block for host in hosts for block in (host.start, host.end) if span[0] < block < span[1]}
    paths: list[_Path] = []
    for start, end in pairwise(sorted({*span, *inside})):
        blocks = end - start
        ready = sorted((path for path in paths if path.may_end(start)), key=itemgetter(0))
        found: dict[tuple[PeerId, bool, float, bool], _Path] = {}
        for path in paths:
            if path.host.end >= end:
                more_s = path.factor * view.block_s.get(path.host.peer, 0.0) * blocks
                more_s += replaced_s.get(start, 0.0)
                found[path.key] = path._replace(cost=path.cost + more_s)
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


class Bans:
    """Hosts that failed recently. A failure after a ban doubles the next ban; a success clears
    it."""

    def __init__(self) -> None:
        self._failed: dict[PeerId, tuple[float, float]] = {}
        """Time of the last failure, and seconds of the ban since then."""

    def failed(self, peer: PeerId, now: float) -> None:
        at, ban_s = self._failed.get(peer, (-math.inf, BAN_S))
        if now > at + 2 * ban_s:  # no failure for another ban's length clears the history
            ban_s = BAN_S
        elif now > at + ban_s:
            ban_s = min(2 * ban_s, BAN_MAX_S)
        # Entries end by time, because hosts that have left never succeed again.
        self._failed = {each: (at, ban) for each, (at, ban) in self._failed.items() if now <= at + 2 * ban}
        self._failed[peer] = (now, ban_s)

    def served(self, peer: PeerId) -> None:
        self._failed.pop(peer, None)

    def at(self, now: float) -> dict[PeerId, float]:
        """Return the hosts that are banned at ``now`` → time of the failure, the oldest first."""
        banned = {peer: at for peer, (at, ban_s) in self._failed.items() if at + ban_s > now}
        return dict(sorted(banned.items(), key=lambda each: each[1]))
