"""Slots limit the number of sessions, passes and pending links.

When all slots are taken, a slot without work is evicted.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import PeerId, Stream
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import Reservation, ResourceLimitReached, Scope
from swarmnet_protocols.net.limits.subnets import Occupancy, Place, subnet_of
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.wire import refusal_pb2

NEW_S = 3.0
"""Seconds until the first work of a slot must arrive. Less would evict a session while the upstream
hops still compute; more would let idle clients hold slots."""
IDLE_S = 5.0
"""Seconds without work until a slot may be evicted. Less would cut off clients between two tokens
over far links, or between two parts of a slow pass. More would let idle clients hold slots."""
SLOW_BYTES_PER_S = 64_000.0
"""Lowest rate in bytes per second at which a transfer counts as work."""


@dataclass(eq=False)
class Slot:
    """The slot of one session, pass or pending link. Eviction ends that; the client may retry."""

    peer: PeerId
    subnet: str
    since: float
    """Loop time of its last work, or of its start."""
    has_worked: bool = False
    at_work: bool = False
    """True if it waits for a computation of this host. Then it is not evicted."""
    new_s: float = NEW_S
    """Seconds until its first work must arrive."""
    stands_by: bool = False
    """True if it belongs to a standby. No client waits for a standby, so it may be evicted at any
    time."""
    is_spare: bool = False
    """True if it belongs to a standby that may stay only while the host has no other work."""
    is_batch: bool = False
    """True if it belongs to a batch. Then it may be evicted for any other work."""
    _evicted: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, stream: Stream, new_s: float = NEW_S) -> "Slot":
        """Return a slot for the peer of ``stream``. :meth:`Slots.acquire` makes it count."""
        now = loop_time()
        return cls(stream.peer, subnet_of(stream.address) or stream.peer, now, new_s=new_s)

    def evict(self) -> None:
        """Have :meth:`eviction` end what holds the slot."""
        self._evicted.set()

    async def eviction(self) -> NoReturn:
        """Raise the ``Refusal`` for the client once the slot is evicted."""
        await self._evicted.wait()
        raise idle()

    def worked(self) -> None:
        """Note that work has arrived."""
        self.has_worked, self.since = True, loop_time()

    def moved(self, size_bytes: int) -> None:
        """Note ``size_bytes`` of transferred work. A rate of at least ``SLOW_BYTES_PER_S`` keeps
        the slot."""
        now = loop_time()
        self.since = min(now, self.since + size_bytes / SLOW_BYTES_PER_S)

    def is_idle(self, now: float) -> bool:
        """Return whether the slot may be evicted for another client."""
        if self.stands_by:
            return True
        return not self.at_work and now - self.since >= (IDLE_S if self.has_worked else self.new_s)


def idle() -> Refusal:
    """Return the refusal for a session, pass or link without work."""
    return Refusal(refusal_pb2.REASON_IDLE, "no work arrived for too long, and other peers wait")


def slot_to_evict(
    slots: Iterable[Slot], now: float, amount: Callable[[Slot], int], *, for_batch: bool = False
) -> Slot | None:
    """Return the slot to evict so that another client gets its ``amount``. Pure.

    None if all are in use. ``for_batch``: the client's work is a batch, which evicts no other. The
    choice starts with the subnet (/24 or /48) that holds the most, and there with the peer that
    holds the most. Of this peer's slots, a slot that never had work goes first, then the slot that
    is idle for longest.
    """
    places = [
        Place(slot.subnet, slot.peer, held, (slot.has_worked, slot.since), slot)
        for slot in slots
        if (held := amount(slot))
    ]
    return Occupancy(places).victim(lambda slot: slot.is_idle(now) or (slot.is_batch and not for_batch))


class Slots:
    """The slots of one kind. The limit of ``resource`` in the ``system`` scope is their number."""

    def __init__(self, system: Scope, resource: Resource) -> None:
        self._system = system
        self._resource = resource
        self._slots: dict[Slot, Reservation] = {}

    @contextmanager
    def acquire(self, slot: Slot, scope: Scope) -> Iterator[None]:
        """Let ``slot`` count while the context is open. ``scope`` is its peer's.

        Raises ``Refusal``. When all slots are taken and the peer is below its own limit, a slot
        without work is evicted first.
        """
        if self._system.available(self._resource) < 1 <= scope.available(self._resource):
            now = loop_time()
            evicted = slot_to_evict(self._slots, now, lambda _: 1, for_batch=slot.is_batch)
            if evicted is not None:
                self._slots.pop(evicted).release()
                evicted.evict()
        try:
            reservation = scope.reserve(self._resource)
        except ResourceLimitReached as error:
            raise Refusal.of(error) from error
        self._slots[slot] = reservation
        try:
            yield
        finally:
            self._slots.pop(slot, None)
            reservation.release()
