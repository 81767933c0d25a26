"""Which hosts a chain is made of. Pure: a function of what is known, the time and a random source.

A chain costs the sum of the delays between neighbours (the client is at both ends) and, at each hop, the wait for the
engine and the compute of the blocks used. Hosts may be entered and left in mid-span.
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
"""One-way delay assumed to a peer nobody has pinged yet: a far one, so that measured peers are preferred."""
PARTED_COST_S = 10.0
"""Added between two hosts that did not reach each other: they are neighbours only where nobody else will do."""
CANDIDATES_PER_BLOCK = 8
"""Cheapest hosts of each block that are considered: bounds the search in a swarm of any size."""
MARGIN = 0.1
"""A chain may cost this much more than the best: room for clients to spread over equals."""
ENOUGH_MEASURED = 3
"""Measured hosts whose median counts without announcements: one or two may be slow by chance."""
GUARD_MARGIN = 1.5
"""Another host than a guard is the first or last hop only where a guard would cost this many times as much."""
BAN_S = 15.0
"""How long a peer is avoided after its first failure."""
BAN_MAX_S = 240.0
"""And after many."""


@dataclass(frozen=True)
class HostInfo:
    """What a host announced of itself: blocks [start, end), seconds for one token through all of them."""

    peer: PeerId
    start: int
    end: int
    step_s: float
    addresses: tuple[str, ...] = ()
    online: bool = True
    record: bytes = field(default=b"", compare=False, repr=False)
    """The signed announcement that this is from."""

    @property
    def block_s(self) -> float:
        return self.step_s / (self.end - self.start)


@dataclass(frozen=True)
class Hop:
    """A host and the blocks [start, end) it is to run in a chain."""

    peer: PeerId
    start: int
    end: int
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """What a client knows: the announcements, and what it has measured itself, which counts for more.

    ``delay_s`` is one way from the client; ``queue_s`` the wait for a host's engine; ``banned`` who failed lately, whoever did so longest
    ago first.
    """

    hosts: Sequence[HostInfo]
    delay_s: Mapping[PeerId, float] = field(default_factory=dict)
    queue_s: Mapping[PeerId, float] = field(default_factory=dict)
    banned: Sequence[PeerId] = ()
    parted: frozenset[tuple[PeerId, PeerId]] = frozenset()
    """Pairs, as ``pair_of`` gives them, that did not reach each other lately."""
    block_s: Mapping[PeerId, float] = field(default_factory=dict)
    """Seconds per block that the client measured."""
    guards: frozenset[PeerId] = frozenset()
    """Hosts that the client prefers as first and last hop, which see its text."""
    explore: bool = False
    """Whether unmeasured hosts may count as being as fast as the fastest measured one, if they announce it."""

    def delay_between(self, one: PeerId | None, other: PeerId | None) -> float:
        """One-way seconds between two peers (None: the client). Two hosts are no farther apart than through us."""
        if one == other:
            return 0.0
        parted_s = 0.0
        if one is not None and other is not None and pair_of(one, other) in self.parted:
            parted_s = PARTED_COST_S
        return parted_s + sum(
            self.delay_s.get(peer, UNKNOWN_DELAY_S) for peer in (one, other) if peer is not None
        )


def believed(view: View) -> View:
    """``view`` with the speeds and queues that its client may believe in place of those that hosts claim.

    A measured host counts as measured. An unmeasured host counts as what it announces, but at best as the median: of the measured
    hosts, or, where fewer than ``ENOUGH_MEASURED`` are, of all hosts. It has no reason to claim to be slower than it is, so that is believed.
    Its queue, too, counts at least as the median of all claims; a false claim of a measured host is part of what was measured.
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
    """Two peers, in no order of their own."""
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

    A chain changes hosts where the span of some host begins or ends. It costs at most ``1 + MARGIN`` times the best of these, and
    is drawn at random among such: every cost is stretched by a random factor in [1, 1 + MARGIN], and the cheapest chain
    under stretched costs cannot be truly dearer than that. Where there are guards, a first or last hop that is none counts as
    ``GUARD_MARGIN`` times as dear. Speeds and queues are those that ``believed`` gives. Banned hosts are used only where nobody else
    will do. Raises ``NoRoute`` with the blocks nobody hosts.
    """
    view = believed(view)
    allowed, missing = _allowed(view, span)
    if missing:
        raise NoRoute(missing)
    stretch = {host.peer: 1 + MARGIN * rng.random() for host in allowed}
    return _search(_shortlist(view, allowed, span, stretch), view, span, stretch, (source, sink))


def _allowed(view: View, span: tuple[int, int]) -> tuple[list[HostInfo], list[tuple[int, int]]]:
    """Who may take part, and what of ``span`` nobody hosts.

    Where only banned hosts are left they take turns, the one that failed longest ago first: another may have come back.
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
    """The hosts that are among the cheapest for some block, under stretched costs: of equals no peer id is ahead of others."""

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
    settled: set[tuple[int, PeerId | None]] = set()
    while queue:
        cost, _, reached, last, hops = heapq.heappop(queue)
        if reached > span[1]:
            return list(hops)
        if (reached, last) in settled:
            continue
        settled.add((reached, last))
        if reached == span[1]:
            home = cost + view.delay_between(last, sink)
            heapq.heappush(queue, (home, next(order), span[1] + 1, last, hops))
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
    """Peers that failed us lately. Whoever fails again after a ban is banned for twice as long; good service forgets it."""

    def __init__(self) -> None:
        self._failed: dict[PeerId, tuple[float, float]] = {}
        """When a peer failed last, and for how long it is banned since."""

    def failed(self, peer: PeerId, now: float) -> None:
        at, ban_s = self._failed.get(peer, (-math.inf, BAN_S))
        if now > at + 2 * ban_s:  # a ban served twice over is forgotten
            ban_s = BAN_S
        elif now > at + ban_s:
            ban_s = min(2 * ban_s, BAN_MAX_S)
        self._failed[peer] = (now, ban_s)

    def served(self, peer: PeerId) -> None:
        self._failed.pop(peer, None)

    def at(self, now: float) -> list[PeerId]:
        """Who is banned at this time, whoever failed longest ago first."""
        banned = [peer for peer, (at, ban_s) in self._failed.items() if at + ban_s > now]
        return sorted(banned, key=lambda peer: self._failed[peer][0])
