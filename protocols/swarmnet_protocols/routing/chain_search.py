"""The search for the cheapest chain of hosts: a pure function of a view of the swarm and a random source.

A chain covers blocks [start, end) with hops, each a host and the blocks it runs there. Its cost is the expected seconds of one decode
step of one token::

    cost = sum over hops of (delay to the hop + queue_s + block_s * blocks) + delay from the last hop

Delays are one-way seconds, measured from the client; the first and last delay are to and from the client (or ``source`` and
``sink``). ``queue_s`` is the wait for the host's engine, ``block_s`` its seconds per block. A hop may begin and end inside the span that
its host announced.

The search has three steps:

1. ``credible`` replaces announced speeds and queues, which a host can falsify, by values that bound the gain of a false one.
2. ``_shortlist`` keeps the ``CANDIDATES_PER_BLOCK`` cheapest hosts of each block, so the search is bounded in a swarm of any size.
3. ``_search`` runs Dijkstra's algorithm over states (blocks covered, last host), with costs stretched at random by up to ``MARGIN``, so
   clients spread over chains of about equal cost.
"""

import heapq
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median_high

from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.net import PeerId

UNKNOWN_DELAY_S = 0.15
"""One-way seconds assumed for a peer without a measured delay. High, so that measured peers are preferred."""
UNREACHABLE_COST_S = 10.0
"""Seconds added between two hosts that failed to reach each other: they are neighbours only if no other chain exists."""
RELAY_S = 0.05
"""Seconds added between two hosts that need a relay: its delay, and the wait for its rate limit."""
CANDIDATES_PER_BLOCK = 8
"""Cheapest hosts of each block that the search considers."""
MARGIN = 0.1
"""Share by which a chain may cost more than the cheapest, so that clients spread over equal hosts."""
ENOUGH_MEASURED = 3
"""Measured hosts from which on their median replaces that of the announcements. One or two may be slow by chance."""
GUARD_MARGIN = 1.5
"""A host that is no guard is first or last hop only if a guard costs this many times as much."""
BAN_S = 15.0
"""Seconds for which a host is avoided after its first failure."""
BAN_MAX_S = 240.0
"""Longest ban in seconds, after repeated failures."""


@dataclass(frozen=True)
class HostInfo:
    """An announcement of a host: blocks [start, end), and ``step_s``, seconds for one token through all of them."""

    peer: PeerId
    start: int
    end: int
    step_s: float
    addresses: tuple[str, ...] = ()
    online: bool = True
    is_open: bool = True
    """Whether other peers can dial it, as far as is known."""
    is_symmetric: bool = False
    """Whether it is behind a router through which no hole is punched."""
    record: bytes = field(default=b"", compare=False, repr=False)
    """The sealed announcement."""

    @property
    def block_s(self) -> float:
        return self.step_s / (self.end - self.start)


@dataclass(frozen=True)
class Hop:
    """A host and the blocks [start, end) that it runs in a chain."""

    peer: PeerId
    start: int
    end: int
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """A client's view of a model's hosts: their announcements, and its own measurements.

    ``delay_s``: one-way seconds from the client; ``queue_s``: seconds of wait for a host's engine; ``banned``: hosts that failed
    recently, the oldest failure first.
    """

    hosts: Sequence[HostInfo]
    delay_s: Mapping[PeerId, float] = field(default_factory=dict)
    queue_s: Mapping[PeerId, float] = field(default_factory=dict)
    banned: Sequence[PeerId] = ()
    unreachable: frozenset[tuple[PeerId, PeerId]] = frozenset()
    """Pairs, as made by ``pair_of``, that failed to reach each other recently."""
    block_s: Mapping[PeerId, float] = field(default_factory=dict)
    """Seconds per block that the client measured."""
    guards: frozenset[PeerId] = frozenset()
    """Hosts preferred as first and last hop, which see the client's text."""
    relayed: frozenset[PeerId] = frozenset()
    """Hosts that cannot be dialled."""
    symmetric: frozenset[PeerId] = frozenset()
    """Those of them behind symmetric routers: such a host and another one of ``relayed`` need a relay between them."""
    explore: bool = False
    """Whether an unmeasured host that announces it counts as fast as the fastest measured one, so that it gets measured."""

    def delay_between(self, one: PeerId | None, other: PeerId | None) -> float:
        """One-way seconds between two peers (None: the client). Between two hosts: an upper bound, the way through the client."""
        if one == other:
            return 0.0
        extra_s = 0.0
        if one is not None and other is not None:
            if pair_of(one, other) in self.unreachable:
                extra_s = UNREACHABLE_COST_S
            elif {one, other} <= self.relayed and not {one, other}.isdisjoint(self.symmetric):
                extra_s = RELAY_S
        return extra_s + sum(
            self.delay_s.get(peer, UNKNOWN_DELAY_S) for peer in (one, other) if peer is not None
        )


def credible(view: View) -> View:
    """``view`` with credible speeds and queues in place of announced ones.

    A measured host has its measured speed. An unmeasured host has its announced speed, but at best the median: of the measured hosts,
    or of all hosts while fewer than ``ENOUGH_MEASURED`` are measured. A slower announcement is taken as it is: it gains a host nothing.
    The queue of an unmeasured host is at least the median of all queues; that of a measured host is part of its measured speed.
    """
    announced = {host.peer: host.step_s / (host.end - host.start) for host in view.hosts if host.online}
    if not announced:
        return view
    known = {peer: block_s for peer, block_s in view.block_s.items() if peer in announced}
    is_enough = len(known) >= ENOUGH_MEASURED
    speeds = known if is_enough else announced | known
    floor_s = min(known.values()) if view.explore and is_enough else median_high(speeds.values())
    block_s = {peer: step_s if step_s > floor_s else floor_s for peer, step_s in announced.items()} | known
    queue_s = view.queue_s
    if queue_s:
        wait_s = median_high(queue_s.values())
        queue_s = {peer: max(queue_s.get(peer, 0.0), wait_s) for peer in announced if peer not in known}
        queue_s |= {peer: view.queue_s.get(peer, 0.0) for peer in known}
    return replace(view, block_s=block_s, queue_s=queue_s)


def pair_of(one: PeerId, other: PeerId) -> tuple[PeerId, PeerId]:
    """An unordered pair of peers."""
    return min(one, other), max(one, other)


def find_chain(
    view: View,
    span: tuple[int, int],
    rng: random.Random,
    *,
    source: PeerId | None = None,
    sink: PeerId | None = None,
) -> list[Hop]:
    """Hops that cover ``span`` in order, from ``source`` to ``sink`` (None: the client).

    A chain changes hosts where the span of some host begins or ends. It costs at most ``1 + MARGIN`` times the cheapest such chain:
    each host's costs are multiplied by a random factor in [1, 1 + MARGIN]. With guards, a first or last hop that is no guard costs
    ``GUARD_MARGIN`` times as much. Banned hosts are used only for blocks without another host. Raises ``NoRoute`` with the blocks
    that no host covers.
    """
    view = credible(view)
    allowed, missing = _allowed(view, span)
    if missing:
        raise NoRoute(missing)
    stretch = {host.peer: 1 + MARGIN * rng.random() for host in allowed}
    return _search(_shortlist(view, allowed, span, stretch), view, span, stretch, (source, sink))


def _allowed(view: View, span: tuple[int, int]) -> tuple[list[HostInfo], list[tuple[int, int]]]:
    """The hosts that may be used, and the parts of ``span`` that none covers.

    Where only banned hosts are left, the one whose failure is oldest is used: it is the likeliest to have recovered.
    """
    usable = {
        host.peer: host for host in view.hosts if host.online and host.start < span[1] and host.end > span[0]
    }
    banned = [usable.pop(peer) for peer in view.banned if peer in usable]
    allowed = list(usable.values())
    missing = uncovered(allowed, span)
    for host in banned:
        if any(host.start < end and host.end > start for start, end in missing):
            allowed.append(host)
            missing = uncovered(allowed, span)
    return allowed, missing


def uncovered(hosts: Iterable[HostInfo], span: tuple[int, int]) -> list[tuple[int, int]]:
    """The parts of ``span`` that no host covers."""
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
    """The hosts among the cheapest for some block, and all guards. Stretched costs decide, so peer ids do not decide between equals."""

    def price(host: HostInfo) -> float:
        cost_s = (
            view.block_s[host.peer] + view.queue_s.get(host.peer, 0.0) + view.delay_between(None, host.peer)
        )
        return stretch[host.peer] * cost_s

    cheapest = sorted(hosts, key=price)
    taken = [0] * (span[1] - span[0])
    kept: list[HostInfo] = []
    for host in cheapest:
        blocks = range(max(host.start, span[0]) - span[0], min(host.end, span[1]) - span[0])
        if host.peer in view.guards or any(taken[block] < CANDIDATES_PER_BLOCK for block in blocks):
            kept.append(host)
            for block in blocks:
                taken[block] += 1
    return kept


def _search(
    hosts: Sequence[HostInfo],
    view: View,
    span: tuple[int, int],
    stretch: Mapping[PeerId, float],
    ends: tuple[PeerId | None, PeerId | None],
) -> list[Hop]:
    """Dijkstra's algorithm over (covered up to, last host), with stretched costs."""
    source, sink = ends
    boundaries = sorted({span[1], *(host.start for host in hosts), *(host.end for host in hosts)})
    order = count()
    queue: list[tuple[float, int, int, PeerId | None, tuple[Hop, ...]]] = [
        (0.0, next(order), span[0], source, ())
    ]
    visited: set[tuple[int, PeerId | None]] = set()
    while queue:
        cost, _, reached, last, hops = heapq.heappop(queue)
        if reached > span[1]:
            return list(hops)
        if (reached, last) in visited:
            continue
        visited.add((reached, last))
        if reached == span[1]:
            total = cost + view.delay_between(last, sink)
            heapq.heappush(queue, (total, next(order), span[1] + 1, last, hops))
            continue
        for host in hosts:
            if not host.start <= reached < host.end or (hops and host.peer == last):
                continue
            entry = view.delay_between(last, host.peer) + view.queue_s.get(host.peer, 0.0)
            for leave in boundaries:
                if reached < leave <= min(host.end, span[1]):
                    price = stretch[host.peer] * (entry + view.block_s[host.peer] * (leave - reached))
                    is_end = (last is None and not hops) or (leave == span[1] and sink is None)
                    if is_end and view.guards and host.peer not in view.guards:
                        price *= GUARD_MARGIN
                    hop = Hop(host.peer, reached, leave, host.addresses)
                    heapq.heappush(queue, (cost + price, next(order), leave, host.peer, (*hops, hop)))
    raise NoRoute(uncovered(hosts, span))


class Bans:
    """Hosts that failed recently. A failure after a ban doubles the next ban; a success clears the history."""

    def __init__(self) -> None:
        self._failed: dict[PeerId, tuple[float, float]] = {}
        """Time of the last failure, and seconds of the ban since then."""

    def failed(self, peer: PeerId, now: float) -> None:
        at, ban_s = self._failed.get(peer, (-math.inf, BAN_S))
        if now > at + 2 * ban_s:  # no failure for another ban's length clears the history
            ban_s = BAN_S
        elif now > at + ban_s:
            ban_s = min(2 * ban_s, BAN_MAX_S)
        # Hosts without a failure for another ban's length are forgotten, as those that have left would never be.
        self._failed = {each: (at, ban) for each, (at, ban) in self._failed.items() if now <= at + 2 * ban}
        self._failed[peer] = (now, ban_s)

    def served(self, peer: PeerId) -> None:
        self._failed.pop(peer, None)

    def at(self, now: float) -> list[PeerId]:
        """The hosts that are banned at ``now``, the oldest failure first."""
        banned = [peer for peer, (at, ban_s) in self._failed.items() if at + ban_s > now]
        return sorted(banned, key=lambda peer: self._failed[peer][0])
