"""The resource manager limits how much of this process peers may reserve and use.

The model is the resource manager of go-libp2p:

1. A *resource* is reserved and released (:class:`Resource`: streams, message bytes, sessions). A
   *rate* is used and recovers with time (:class:`Rate`: messages, bytes, tokens). All memory,
   streams and CPU time that peers can cause are one or the other.
2. *Scopes* are nested. The system scope surrounds everything. Within it are subnet scopes, peer
   scopes, and session scopes where code asks for them. A reservation counts in its scope and in all
   scopes around it. It succeeds in all of them or in none.
3. A peer is *known* while it holds something that takes consent or work: a stream that this process
   opened, a successful handshake, a session. Identities cost nothing, so a quarter of memory,
   streams and DHT calls is out of reach of unknown peers.
4. *Shared* resources are never all taken by one network, however many identities it has. A subnet
   holds at most a multiple of what it leaves free (a dynamic threshold: Choudhury and Hahne, 1998).
   So a subnet can use most of a resource while no other peer wants it.
5. Memory for a large message is reserved before the whole message has come. A quarter of the memory
   is kept for small messages, which reserve after they have come.

Time is an argument. The network enforces the limits (``stream_scope.py``, ``subnets.py``); this
module only counts.
"""

import asyncio
import math
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.net.limits.rate_limit import RateLimit, TokenBucket
from swarmnet_protocols.net.limits.resource_limits import (
    KNOWN_BY,
    KNOWN_PEER_SHARE,
    PEER_DIALS,
    PEER_FRAMES,
    PEER_LIMITS,
    PEER_REPORTS,
    SHARED,
    SYSTEM_DIALS,
    SYSTEM_FRAMES,
    SYSTEM_LIMITS,
    Rate,
    RateLimits,
    Resource,
    ResourceLimits,
)

RETRY_S = 2.0
"""Seconds that a peer at a resource limit is told to wait."""
MIN_SWEEP = 256
"""Number of peer scopes that triggers the deletion of idle ones."""
SUBNET_FACTOR = 3
"""Most that a subnet may hold, as a multiple of what it leaves free. A subnet alone may hold three
quarters of all.

With a larger factor, newcomers find less. With a smaller one, a swarm within one network uses less
of its hosts."""
SMALL_BYTES = 64 << 10
"""Largest memory reservation that is small. It ignores the subnet's limit and may use
``SMALL_SHARE``."""
SMALL_SHARE = 0.25
"""Share of the memory that only small reservations may take."""


class ResourceLimitReached(OutOfResources):
    """A resource or rate limit is reached. The caller may try again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Reservation:
    """An amount of a resource, held until ``release``. Made by :meth:`Scope.reserve`.

    It is a context manager, and ``release`` is idempotent.
    """

    __slots__ = ("_resource", "amount", "scope")

    def __init__(self, scope: "Scope", resource: Resource) -> None:
        self.scope = scope
        self._resource = resource
        self.amount = 0

    def resize(self, amount: int) -> None:
        """Change the amount. At a limit, keep the old amount and raise ``ResourceLimitReached``."""
        self.scope.change(self._resource, amount - self.amount)
        self.amount = amount

    async def grow(self, amount: int) -> None:
        """Wait until the limits allow this amount, and change to it. Raises
        ``ResourceLimitReached`` if they never will."""
        while True:
            try:
                self.resize(amount)
                return
            except ResourceLimitReached:
                if not self.scope.can_ever_reserve(self._resource, amount):
                    raise
            await self.scope.wait_available(self._resource, amount - self.amount)

    def release(self) -> None:
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Scope:
    """Reservations and used rates of the system, a subnet, a peer or a session.

    Limits are read at each use, since they may change at any time.
    """

    def __init__(
        self, name: str, limits: ResourceLimits, rate_limits: RateLimits, parent: "Scope | None" = None
    ) -> None:
        self.name = name
        self.used: Counter[Resource] = Counter()
        self.limits = limits
        self._rate_limits = rate_limits
        self._buckets: dict[Rate, TokenBucket] = {}
        self._parent = parent
        self.refused: Counter[Resource | Rate] = Counter()
        """The number of times a limit was reached. Only in the system scope."""
        self.spent: dict[Rate, float] = dict.fromkeys(Rate, 0.0)
        """All that was used since the start. Only in the system scope."""
        self._waiting: dict[asyncio.Event, tuple[Resource, Callable[[], bool]]] = {}
        """Reservations that wait for a release in this scope: the resource, and a check whether
        enough is free."""
        self._is_subnet = False
        """True if this is the scope of a subnet."""
        self._path: tuple[Scope, ...] = (self, *(parent._path if parent else ()))
        self._children: weakref.WeakSet[Scope] = weakref.WeakSet()
        is_peer = parent is None or parent is parent._path[-1]
        self.owner: Scope = self if parent is None or is_peer else parent.owner
        """The peer scope that contains this scope. A subnet or the system owns itself."""

    def reserve(self, resource: Resource, amount: int = 1) -> Reservation:
        """Reserve an amount. Raises ``ResourceLimitReached`` at the limit of this or a surrounding
        scope.
        """
        reservation = Reservation(self, resource)
        reservation.resize(amount)
        return reservation

    def available(self, resource: Resource) -> float:
        """Return the amount left in this scope alone: infinite without a limit, negative if the
        limit was lowered meanwhile.
        """
        return self.limits.get(resource, math.inf) - self.used[resource]

    def can_reserve(self, resource: Resource, amount: int) -> bool:
        return self._lacking(resource, amount) is None

    def can_ever_reserve(self, resource: Resource, amount: int) -> bool:
        """Return whether the limits allow the amount when nothing else is reserved."""
        limit = math.inf
        for scope in reversed(self._path):
            limit = min(limit, self._limit_in(scope, resource, amount))
            if scope._is_subnet and _is_shared(resource, amount):
                limit *= SUBNET_FACTOR / (1 + SUBNET_FACTOR)
        return amount <= limit

    def is_awaited(self, resource: Resource) -> bool:
        """Tell whether a reservation waits until other peers release some of ``resource``."""
        return any(wanted is resource for wanted, _ in self._path[-1]._waiting.values())

    async def wait_available(self, resource: Resource, amount: int) -> None:
        """Wait until the innermost scope that lacks ``amount`` has it.

        A surrounding scope may still lack it, so callers try again.
        """
        for scope in self._path:
            if scope._parent is not None and not scope._has(resource, amount):
                await scope._wait_until(resource, partial(scope._has, resource, amount))
                return
        if not self.can_reserve(resource, amount):
            await self._path[-1]._wait_until(resource, partial(self.can_reserve, resource, amount))

    def _has(self, resource: Resource, amount: int) -> bool:
        return self.available(resource) >= amount

    async def _wait_until(self, resource: Resource, is_enough: Callable[[], bool]) -> None:
        freed = asyncio.Event()
        self._waiting[freed] = resource, is_enough
        try:
            await freed.wait()
        finally:
            del self._waiting[freed]

    def charge(self, rate: Rate, amount: float, now: float) -> float:
        """Use ``amount`` at ``now``. Returns the seconds to wait before anything more is used.

        A scope with more than half of its own burst left does not wait for surrounding scopes:
        other peers have overloaded those.
        """
        self._path[-1].spent[rate] += amount
        wait_s, is_modest = 0.0, False
        for scope in self._path:
            if (bucket := scope._bucket(rate, now)) is not None:
                bucket.spend(amount, now)
                if not is_modest:
                    wait_s = max(wait_s, bucket.wait_s(now))
                is_modest = is_modest or bucket.level(now) >= bucket.limit.burst / 2
        return wait_s

    def check_rate(self, rate: Rate, max_wait_s: float, now: float) -> None:
        """Raise ``ResourceLimitReached`` if the next use would have to wait longer than
        ``max_wait_s``.
        """
        wait_s = self.charge(rate, 0, now)
        if wait_s > max_wait_s:
            self._path[-1].refused[rate] += 1
            raise ResourceLimitReached(f"too many {rate.replace('_', ' ')} of {self.name}", wait_s)

    @classmethod
    def of_subnet(cls, name: str, system: "Scope") -> "Scope":
        """Return the scope of all peers of a subnet."""
        scope = cls(name, {}, {}, system)
        scope._is_subnet = True
        return scope

    def child(self, name: str, limits: ResourceLimits) -> "Scope":
        """Return a scope within this one."""
        scope = Scope(name, limits, {}, self)
        self._children.add(scope)
        return scope

    def is_idle(self, now: float) -> bool:
        """Tell whether nothing is reserved and every rate has recovered. The scope can then be
        deleted.
        """
        return not any(self.used.values()) and all(
            (bucket := self._bucket(rate, now)) is None or bucket.level(now) >= bucket.limit.burst
            for rate in self._rate_limits
        )

    def change(self, resource: Resource, amount: int) -> None:
        """Reserve ``amount`` more in this scope and all around it (negative: release).

        Raises ``ResourceLimitReached``.
        """
        path = self._path
        if amount > 0 and (lacking := self._lacking(resource, amount)) is not None:
            scope, limit = lacking
            path[-1].refused[resource] += 1
            what = f"{scope.used[resource]} of {limit:.0f} {resource.replace('_', ' ')} of {scope.name} are taken"
            raise ResourceLimitReached(what, RETRY_S)
        for scope in path:
            scope.used[resource] += amount
        if amount < 0:
            for scope in path:
                scope.wake(resource)

    @property
    def is_unknown(self) -> bool:
        """True if this is the scope of an unknown peer, or lies within it."""
        return self._parent is not None and not any(self.owner.used[resource] for resource in KNOWN_BY)

    def wake(self, resource: Resource) -> None:
        """Wake the waiting reservations that now fit.

        If all were woken, one peer with many of them could waste processor time.
        """
        for freed, (wanted, is_enough) in self._waiting.items():
            if wanted is resource and not freed.is_set() and is_enough():
                freed.set()

    def move(self, parent: "Scope") -> None:
        """Move this peer scope, with all that it holds, to ``parent``."""
        before = self._parent
        if before is parent or before is None:
            return
        for scope, sign in ((before, -1), (parent, 1)):
            if scope._is_subnet:
                for resource, amount in self.used.items():
                    scope.used[resource] += sign * amount
        self._parent, self._path = parent, (self, *parent._path)
        for child in self._children:
            child._path = (child, *self._path)

    def _lacking(self, resource: Resource, amount: int) -> "tuple[Scope, float] | None":
        """Return the innermost scope where ``amount`` more is too much, and its limit; None if it
        fits.
        """
        *inner, system = self._path
        in_all = system.limits.get(resource, math.inf)
        # usually so little is used that no share of the system can be used up
        if (system.used[resource] + amount) * 8 <= in_all:
            for scope in inner:
                if scope.used[resource] + amount > (limit := scope.limits.get(resource, math.inf)):
                    return scope, limit
            return None
        innermost: tuple[Scope, float] | None = None
        left = math.inf
        for scope in reversed(self._path):
            used, limit = scope.used[resource], self._limit_in(scope, resource, amount)
            if scope._is_subnet and _is_shared(resource, amount):
                limit = used + (SUBNET_FACTOR * left - used) / (1 + SUBNET_FACTOR)
            if used + amount > limit:
                innermost = scope, limit
            left = limit - used
        return innermost

    def _limit_in(self, scope: "Scope", resource: Resource, amount: int) -> float:
        """Return the limit of ``scope`` for a reservation of ``amount`` more that this scope makes.
        ``scope`` is this scope or a surrounding one."""
        limit = scope.limits.get(resource, math.inf)
        if scope._parent is None and limit < math.inf:
            if resource in KNOWN_PEER_SHARE and self.is_unknown:
                limit -= int(limit * KNOWN_PEER_SHARE[resource])
            if resource is Resource.MEMORY and amount > SMALL_BYTES:
                limit -= int(limit * SMALL_SHARE)
        return limit

    def _bucket(self, rate: Rate, now: float) -> TokenBucket | None:
        """Return the token bucket of ``rate`` at its current limit; None without a limit."""
        limit = self._rate_limits.get(rate)
        if limit is None:
            return None
        bucket = self._buckets.get(rate)
        if bucket is None:
            bucket = self._buckets[rate] = TokenBucket(limit, now)
        elif bucket.limit is not limit:
            bucket.set_limit(limit, now)
        return bucket


def _is_shared(resource: Resource, amount: int) -> bool:
    return resource in SHARED and (resource is not Resource.MEMORY or amount > SMALL_BYTES)


class ResourceManager:
    """The system scope and the peer scopes. Everything served over one transport shares one
    manager.
    """

    def __init__(self) -> None:
        self._system_limits: dict[Resource, int] = dict(SYSTEM_LIMITS)
        self._peer_limits: dict[Resource, int] = dict(PEER_LIMITS)
        self._system_rates: dict[Rate, RateLimit] = {
            Rate.FRAMES: SYSTEM_FRAMES,
            Rate.DIALS: SYSTEM_DIALS,
        }
        self._peer_rates: dict[Rate, RateLimit] = {
            Rate.FRAMES: PEER_FRAMES,
            Rate.REPORTS_SENT: PEER_REPORTS,
            Rate.DIALS: PEER_DIALS,
        }
        self.system = Scope("all peers", self._system_limits, self._system_rates)
        self._subnets: dict[str, Scope] = {}
        self._peers: dict[str, Scope] = {}
        self._sweep_at = MIN_SWEEP

    def peer(self, peer: str, now: float, subnet: str = "") -> Scope:
        """Return the scope of a peer. It exists until it is idle.

        With a ``subnet``, the peer counts there from now on.
        """
        if peer not in self._peers:
            if len(self._peers) >= self._sweep_at:
                self._peers = {each: scope for each, scope in self._peers.items() if not scope.is_idle(now)}
                self._subnets = {
                    each: scope for each, scope in self._subnets.items() if any(scope.used.values())
                }
                self._sweep_at = max(MIN_SWEEP, 2 * len(self._peers))
            self._peers[peer] = Scope(peer, self._peer_limits, self._peer_rates, self.system)
        scope = self._peers[peer]
        if subnet:
            scope.move(self._subnets.setdefault(subnet, Scope.of_subnet(subnet, self.system)))
        return scope

    def find(self, peer: str) -> Scope | None:
        """Return the scope of a peer, None if it has none."""
        return self._peers.get(peer)

    def known_peer_streams(self) -> int:
        """Return the number of streams with known peers, in both directions."""
        return sum(
            scope.used[Resource.INBOUND_STREAMS] + scope.used[Resource.OUTBOUND_STREAMS]
            for scope in self._peers.values()
            if not scope.is_unknown
        )

    def limit(self, resource: Resource, *, system: int | None = None, per_peer: int | None = None) -> None:
        """Change limits (None: keep). Reservations stay, even above a new limit."""
        if system is not None:
            self._system_limits[resource] = system
            self.system.wake(resource)
        if per_peer is not None:
            self._peer_limits[resource] = per_peer
            for scope in self._peers.values():
                scope.wake(resource)

    def limit_rate(
        self, rate: Rate, *, system: RateLimit | None = None, per_peer: RateLimit | None = None
    ) -> None:
        """Change rate limits (None: keep)."""
        if system is not None:
            self._system_rates[rate] = system
        if per_peer is not None:
            self._peer_rates[rate] = per_peer

    @property
    def peer_count(self) -> int:
        """The number of peers that hold something, or did recently."""
        return len(self._peers)
