"""What others may take of this process: one account of everything from the network that takes room or time.

Scopes lie within each other: all peers together, each peer, each session of a peer. What is held or used in one counts in all
around it, and is refused, with nothing taken, where it would pass the limit of any. Time is an argument.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

from swarmnet_protocols.errors import OutOfResources

RETRY_S = 2.0
"""A wait to suggest to whoever is refused something that others give back at their leisure."""
MIN_SWEEP = 256
"""Peers that are remembered before it is looked who of them has nothing any more."""


class Resource(StrEnum):
    """What is held, and given back."""

    MEMORY = "memory_bytes"
    """Messages that are being read, and those that wait for their turn."""
    STREAMS = "streams"
    """Streams that others opened."""
    HEARD = "heard"
    """Those of them on which something came."""
    OWN_STREAMS = "own_streams"
    """Streams that we opened."""
    STRANGERS = "strangers"
    """Callers at the door that have not said who they are."""
    NEWCOMERS = "newcomers"
    """Those who have come to ask for a certificate, and have not asked."""
    ADMISSIONS = "admissions"
    """Those who have asked, and wait for the answer."""
    GUESTS = "guests"
    """Members that the door has let in."""
    CALLS = "calls"
    """Calls of the DHT that are being answered."""
    REPORTS = "reports"
    """Streams on which others watch what this node says of itself."""
    PROBES = "probes"
    """Those whose ports are being dialled."""
    RECORDS = "records"
    RECORD_BYTES = "record_bytes"
    """What is kept for the DHT, by who stored it here."""
    SESSIONS = "sessions"
    EARLY_LINKS = "early_links"
    """Links that wait for their session."""
    LINKS = "links"
    """Those that have found it."""
    PASSES = "passes"
    CACHE = "cache_bytes"
    """Keys and values of sessions."""
    GRAPHS = "graph_bytes"
    """What forward passes have left for their backward passes."""
    LOG = "log_bytes"
    """What sessions keep for a hop that may have to be replaced."""
    ADAPTERS = "adapters"
    ADAPTER_BYTES = "adapter_bytes"
    TRANSFERS = "transfers"
    """Others that fetch the state of a training job."""
    EARLY_ROUNDS = "early_rounds"
    """Members of rounds that have not begun here."""
    ROUNDS = "rounds"
    """Those of rounds that have."""


class Rate(StrEnum):
    """What is used up as time goes by."""

    FRAMES = "frames"
    """Messages, and what costs as much as so many of them."""
    BYTES_IN = "bytes_in"
    BYTES_OUT = "bytes_out"
    POSITIONS = "positions"
    """Tokens that are computed, of each block that is here at once."""
    REPORTS_TOLD = "reports_told"
    DIALS = "dials"
    """Attempts to connect to peers that others named."""


@dataclass(frozen=True)
class RateLimit:
    """``per_s`` on average, and ``burst`` at once after a quiet time."""

    per_s: float
    burst: float


Limits = Mapping[Resource, int]
RateLimits = Mapping[Rate, RateLimit]

MIB = 1 << 20
IN_ALL: Limits = {
    Resource.MEMORY: 256 * MIB,
    Resource.STREAMS: 4096,
    Resource.STRANGERS: 128,
    Resource.NEWCOMERS: 32,
    Resource.ADMISSIONS: 32,
    Resource.CALLS: 256,
    Resource.REPORTS: 64,
    Resource.PROBES: 8,
    Resource.TRANSFERS: 256,
    Resource.EARLY_ROUNDS: 256,
}
EACH_PEER: Limits = {
    Resource.MEMORY: 64 * MIB + 64 * 1024,
    Resource.STREAMS: 384,
    Resource.STRANGERS: 4,
    Resource.NEWCOMERS: 2,
    Resource.ADMISSIONS: 2,
    Resource.CALLS: 32,
    Resource.REPORTS: 2,
    Resource.PROBES: 1,
    Resource.RECORDS: 1024,
    Resource.RECORD_BYTES: 8 * MIB,
    Resource.TRANSFERS: 8,
    Resource.EARLY_ROUNDS: 8,
}
KEPT: Mapping[Resource, float] = {Resource.MEMORY: 0.25, Resource.STREAMS: 0.25, Resource.CALLS: 0.25}
"""The share of what all peers may hold that is kept for those we know: identities cost nothing, and many could take all of it."""
FAMILIAR = (
    Resource.OWN_STREAMS,
    Resource.GUESTS,
    Resource.SESSIONS,
    Resource.LINKS,
    Resource.PASSES,
    Resource.ROUNDS,
)
"""We know a peer while it holds any of these: we speak to it, or serve it."""
FRAMES_IN_ALL = RateLimit(4000.0, 8000.0)
FRAMES_EACH_PEER = RateLimit(1000.0, 4000.0)
"""An eager client of a fast host sends some hundred a second, and a relay of many sessions as many for each of them."""
REPORTS_EACH_PEER = RateLimit(2.0, 1.0)
DIALS_IN_ALL = RateLimit(2.0, 128.0)
DIALS_EACH_PEER = RateLimit(0.2, 16.0)
"""Connections between hosts stay, so a client needs one attempt for each pair of neighbours in its chains, not for each chain."""


class Exhausted(OutOfResources):
    """There is no room, or too much was used. It is worth asking again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Reservation:
    """So much of a stock, until ``release``, which is idempotent. A context manager. Made by :meth:`Scope.hold`."""

    __slots__ = ("_resource", "_scope", "amount")

    def __init__(self, scope: "Scope", resource: Resource) -> None:
        self._scope = scope
        self._resource = resource
        self.amount = 0

    def resize(self, amount: int) -> None:
        """Hold ``amount`` from now on. Raises ``Exhausted``, and holds what it did, when there is no room for more."""
        self._scope.change(self._resource, amount - self.amount)
        self.amount = amount

    async def grow(self, amount: int) -> None:
        """Hold ``amount`` as soon as there is room. Raises ``Exhausted`` at once where there never is so much."""
        while True:
            try:
                self.resize(amount)
                return
            except Exhausted:
                if not self._scope.can_ever_hold(self._resource, amount):
                    raise
            await self._scope.room_for(self._resource, amount - self.amount)

    def release(self) -> None:
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Scope:
    """One account within others. Limits are looked up at each use: they may change at any time."""

    def __init__(
        self, name: str, resources: Limits, flows: RateLimits, parent: "Scope | None" = None
    ) -> None:
        self.name = name
        self.used: Counter[Resource] = Counter()
        self._resources = resources
        self._flows = flows
        self._credits: dict[Rate, tuple[float, float]] = {}
        """How much may be used at once, as it was at a time; below zero, what is owed."""
        self._path: tuple[Scope, ...] = (self, *(parent._path if parent else ()))
        self.refused: Counter[Resource | Rate] = Counter()
        self.spent: dict[Rate, float] = dict.fromkeys(Rate, 0.0)
        """These of the outermost scope only: how often there was no room, and all that was ever used."""
        self._waiting: dict[asyncio.Event, tuple[Resource, float]] = {}
        """Who waits for how much room in this scope."""

    def hold(self, resource: Resource, amount: int = 1) -> Reservation:
        """Raises ``Exhausted`` where there is no room in this scope or one around it."""
        hold = Reservation(self, resource)
        hold.resize(amount)
        return hold

    def spare(self, resource: Resource) -> float:
        """How much more may be held as far as this scope alone is concerned; infinite without a limit, below zero over it."""
        return self._resources.get(resource, math.inf) - self.used[resource]

    def can_hold(self, resource: Resource, amount: int) -> bool:
        """Whether there is room for so much more."""
        return all(scope.used[resource] + amount <= self._limit_in(scope, resource) for scope in self._path)

    def can_ever_hold(self, resource: Resource, amount: int) -> bool:
        """Whether there is room for so much when nothing else is held."""
        return all(amount <= self._limit_in(scope, resource) for scope in self._path)

    async def room_for(self, resource: Resource, amount: int) -> None:
        """Wait until so much may be held as far as the first scope is concerned that has no room for it now."""
        for scope in self._path:
            needed = amount + scope._resources.get(resource, 0) - self._limit_in(scope, resource)
            if scope.spare(resource) < needed:
                freed = asyncio.Event()
                scope._waiting[freed] = resource, needed
                try:
                    await freed.wait()
                finally:
                    del scope._waiting[freed]
                return

    def use(self, flow: Rate, amount: float, now: float) -> float:
        """Use so much at ``now``; how many seconds to wait before anything more is used.

        A scope that has used less than half of its own burst does not wait for those around it: others are too many then.
        """
        self._path[-1].spent[flow] += amount
        wait_s, is_modest = 0.0, False
        for scope in self._path:
            rate = scope._flows.get(flow)
            if rate is not None:
                credit = scope._credit(flow, rate, now) - amount
                scope._credits[flow] = credit, now
                if not is_modest:
                    wait_s = max(wait_s, -credit / rate.per_s)
                is_modest = is_modest or credit >= rate.burst / 2
        return wait_s

    def check(self, flow: Rate, max_wait_s: float, now: float) -> None:
        """Raise ``Exhausted`` when so much was used that it takes more than ``max_wait_s`` until more may be."""
        wait_s = self.use(flow, 0, now)
        if wait_s > max_wait_s:
            self._path[-1].refused[flow] += 1
            raise Exhausted(f"too many {flow.replace('_', ' ')} of {self.name}", wait_s)

    def within(self, name: str, resources: Limits) -> "Scope":
        """A scope within this one, which lasts as long as somebody has it."""
        return Scope(name, resources, {}, self)

    def is_idle(self, now: float) -> bool:
        """Whether to forget this scope changes nothing: nothing is held, nothing owed."""
        return not any(self.used.values()) and all(
            self._credit(flow, rate, now) >= rate.burst for flow, rate in self._flows.items()
        )

    def change(self, resource: Resource, amount: int) -> None:
        """What holds do: take so much more, or give it back. Raises ``Exhausted``."""
        if amount > 0:
            for scope in self._path:
                limit = self._limit_in(scope, resource)
                if scope.used[resource] + amount > limit:
                    self._path[-1].refused[resource] += 1
                    what = f"{scope.used[resource]} of {limit} {resource.replace('_', ' ')} of {scope.name} are taken"
                    raise Exhausted(what, RETRY_S)
        for scope in self._path:
            scope.used[resource] += amount
            if amount < 0:
                scope.wake(resource)

    def _limit_in(self, scope: "Scope", resource: Resource) -> float:
        """How much ``scope``, around us or ourselves, may hold before it refuses us."""
        limit = scope._resources.get(resource, math.inf)
        if scope is self._path[-1] and resource in KEPT and limit < math.inf and self.is_stranger:
            limit -= int(limit * KEPT[resource])
        return limit

    @property
    def is_stranger(self) -> bool:
        """Whether this is of a peer, or of something of a peer, that we do not know."""
        return len(self._path) > 1 and not any(self._path[-2].used[resource] for resource in FAMILIAR)

    def wake(self, resource: Resource) -> None:
        """Those for whom there is room. To wake the others would cost more than what somebody may have them wait with."""
        for freed, (wanted, amount) in self._waiting.items():
            if wanted is resource and amount <= self.spare(resource):
                freed.set()

    def _credit(self, flow: Rate, rate: RateLimit, now: float) -> float:
        credit, then = self._credits.get(flow, (rate.burst, now))
        return min(rate.burst, credit + (now - then) * rate.per_s)


@dataclass(frozen=True)
class Account:
    """What is held of one stock, its limit in all and that of each peer, and how often there was no room."""

    used: int
    in_all: int | None
    each_peer: int | None
    refused: int


@dataclass(frozen=True)
class Snapshot:
    """Everything as it is now, for metrics. ``spent`` has all that was used since the start."""

    peers: int
    resources: Mapping[Resource, Account]
    spent: Mapping[Rate, float]


class ResourceManager:
    """The outermost scope and those of peers. Whatever is served to others at one place on the network shares one."""

    def __init__(self) -> None:
        self._in_all: dict[Resource, int] = dict(IN_ALL)
        self._each_peer: dict[Resource, int] = dict(EACH_PEER)
        self._rates_in_all: dict[Rate, RateLimit] = {
            Rate.FRAMES: FRAMES_IN_ALL,
            Rate.DIALS: DIALS_IN_ALL,
        }
        self._rates_each_peer: dict[Rate, RateLimit] = {
            Rate.FRAMES: FRAMES_EACH_PEER,
            Rate.REPORTS_TOLD: REPORTS_EACH_PEER,
            Rate.DIALS: DIALS_EACH_PEER,
        }
        self.in_all = Scope("all peers", self._in_all, self._rates_in_all)
        self._peers: dict[str, Scope] = {}
        self._sweep_at = MIN_SWEEP

    def peer(self, peer: str, now: float) -> Scope:
        """The scope of a peer. It is remembered while something is held in it, or owed."""
        if peer not in self._peers:
            if len(self._peers) >= self._sweep_at:
                self._peers = {each: scope for each, scope in self._peers.items() if not scope.is_idle(now)}
                self._sweep_at = max(MIN_SWEEP, 2 * len(self._peers))
            self._peers[peer] = Scope(peer, self._each_peer, self._rates_each_peer, self.in_all)
        return self._peers[peer]

    def find(self, peer: str) -> Scope | None:
        """The scope of a peer, if anything has been held or used in it lately."""
        return self._peers.get(peer)

    def streams_of_known(self) -> int:
        """How many streams there are with peers that we know."""
        return sum(
            scope.used[Resource.STREAMS] + scope.used[Resource.OWN_STREAMS]
            for scope in self._peers.values()
            if not scope.is_stranger
        )

    def limit(self, resource: Resource, *, in_all: int | None = None, each_peer: int | None = None) -> None:
        """Change limits from now on; None leaves one as it is. What is held stays, even if it is more."""
        if in_all is not None:
            self._in_all[resource] = in_all
            self.in_all.wake(resource)
        if each_peer is not None:
            self._each_peer[resource] = each_peer
            for scope in self._peers.values():
                scope.wake(resource)

    def limit_rate(
        self, flow: Rate, *, in_all: RateLimit | None = None, each_peer: RateLimit | None = None
    ) -> None:
        """Change rates from now on; None leaves one as it is."""
        if in_all is not None:
            self._rates_in_all[flow] = in_all
        if each_peer is not None:
            self._rates_each_peer[flow] = each_peer

    def snapshot(self) -> Snapshot:
        used, refused = self.in_all.used, self.in_all.refused
        return Snapshot(
            peers=len(self._peers),
            resources={
                resource: Account(
                    used[resource],
                    self._in_all.get(resource),
                    self._each_peer.get(resource),
                    refused[resource],
                )
                for resource in Resource
            },
            spent=dict(self.in_all.spent),
        )
