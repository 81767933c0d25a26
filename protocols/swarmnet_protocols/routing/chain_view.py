"""The hosts of a model, as a client knows them when it searches for a chain.

:class:`View` holds announcements and the client's own measurements. :func:`credible` replaces
announced speeds and loads, which a host can falsify.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median_high

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.coordinates import Coordinate, distance
from swarmnet_protocols.routing.host_info import HostInfo

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
USUAL_EXCESS = 2.0
"""Ratio of measured to announced time that is still normal, since estimates of delays are wrong by
about this factor. Time beyond it counts as waiting."""
ENOUGH_MEASURED = 3
"""Measured hosts needed before their median speed replaces the median of the announcements. One or
two may be slow by chance."""


@dataclass(frozen=True)
class Hop:
    """A host and the blocks [start, end) that it runs in a chain."""

    peer: PeerId
    start: int
    end: int
    addresses: tuple[str, ...] = ()
    precision: str = ""
    arithmetic: str = ""

    @classmethod
    def of(cls, host: HostInfo, start: int, end: int) -> "Hop":
        """Return ``host`` as a hop that runs blocks [start, end)."""
        return cls(host.peer, start, end, host.addresses, host.precision, host.arithmetic)


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
    """Hosts that alone announce their precision for their blocks, so nobody could check their
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
    """True if an unmeasured host may count as fast as the fastest measured one, if it announces
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


def explain_choice(view: View, chosen: Sequence[Hop], now: float) -> dict[str, object]:
    """Return for logs what a search knew of the hops that it chose to open, and of the other hosts
    of their blocks. ``now``: on the clock of ``View.banned``."""
    view = credible(view)
    new, used = [hop for hop in chosen if hop not in view.hops], {hop.peer for hop in chosen}

    def known(peer: PeerId) -> str:
        block_s, queue_s = view.block_s.get(peer, 0.0), view.queue_s.get(peer, 0.0)
        text = f"{1000 * view.delay_to(peer):.0f} ms away, {1000 * block_s:.1f} ms a block, "
        text += f"{1000 * queue_s:.0f} ms queue, {view.busy.get(peer, 0.0):.0%} busy"
        return text + (f", failed {now - view.banned[peer]:.0f} s ago" if peer in view.banned else "")

    others = [host for host in view.hosts if host.online and host.peer not in used]
    return {
        "chosen": [f"{hop.start}:{hop.end} on {hop.peer}, {known(hop.peer)}" for hop in new],
        "others": [
            f"{host.start}:{host.end} on {host.peer}, {known(host.peer)}"
            for host in others
            if any(host.start < hop.end and hop.start < host.end for hop in new)
        ],
    }


def pair_of(one: PeerId, other: PeerId) -> tuple[PeerId, PeerId]:
    """Return an unordered pair of peers."""
    return min(one, other), max(one, other)
