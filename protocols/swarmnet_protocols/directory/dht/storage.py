"""The bounded storage of a DHT node, shared fairly between the subnets that store in it.

Identities are free, subnets are not. So when a key or the whole storage is full, a new record
evicts a record of the subnet with the most bytes there.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnet_protocols.directory.records import MAX_LIFETIME_S
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import Reservation, ResourceLimitReached, Scope

if TYPE_CHECKING:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.timed_storage import ValueWithExpiration


@dataclass(frozen=True)
class StorageLimits:
    total_bytes: int = 64 << 20
    """Most bytes of all records.

    At the limit, records of the subnet with the most bytes are evicted, soonest expiry first.
    """
    key_bytes: int = 2 << 20
    """Most bytes under one key. They must fit into one answer (``MAX_ANSWER_BYTES``)."""
    signer_records: int = 256


@dataclass(frozen=True)
class _Kept:
    value: bytes
    expires_at: float
    reservations: tuple[Reservation, ...]
    """The bytes of the record, reserved in the scope of the peer that stored it."""
    origin: str
    """Subnet of the peer that stored the record; empty for this node."""
    blocks: tuple[int, int]
    """Blocks [start, end) of the host that the record announces; (0, 0) for other records."""


class BoundedStorage:
    """Replaces hivemind's ``DHTLocalStorage``. Stores only signed records.

    The subkey of a record is its signer's key.
    """

    def __init__(
        self,
        limits: StorageLimits,
        clock: Clock,
        blocks_of: Callable[[bytes], tuple[int, int]] = lambda _: (0, 0),
    ) -> None:
        """``blocks_of`` returns the blocks of the host that a value announces, for :meth:`draw`."""
        self._limits = limits
        self._clock = clock
        self._blocks_of = blocks_of
        self._records: dict[DHTID, dict[bytes, _Kept]] = {}
        self._expiries: list[tuple[float, DHTID, bytes]] = []
        self._key_bytes: Counter[DHTID] = Counter()
        self._signer_records: Counter[bytes] = Counter()
        self.total_bytes = 0
        self._origin_bytes: Counter[tuple[DHTID | None, str]] = Counter()
        """Bytes by (key, subnet). The key None stands for all keys together."""
        self._expiries_of: dict[str, list[tuple[float, DHTID, bytes]]] = {}
        self._storer: Scope | None = None
        self._origin = ""
        self._shown: Set[DHTID] | None = None

    @contextmanager
    def stored_by(self, scope: Scope, origin: str) -> Iterator[None]:
        """Charge records that are stored in this context to ``scope`` and to the subnet ``origin``.

        The charge ends when a record is dropped.
        """
        self._storer, self._origin = scope, origin
        try:
            yield
        finally:
            self._storer, self._origin = None, ""

    @contextmanager
    def showing(self, keys: "Set[DHTID]") -> Iterator[None]:
        """Let :meth:`get` return only records under ``keys`` while the context is open."""
        self._shown = keys
        try:
            yield
        finally:
            self._shown = None

    def key_bytes(self, key: "DHTID") -> int:
        """Return the bytes of all records under ``key``."""
        self._expire(self._clock())
        return self._key_bytes.get(key, 0)

    def store(self, key: "DHTID", value: bytes, expiration_time: float, subkey: bytes | None = None) -> bool:
        """Store a record and return whether it was accepted. Never accepts a value without a
        signer."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: "DHTID", subkey: bytes, value: bytes, expiration_time: float) -> bool:
        """Store a record and return whether it was accepted.

        It must be within the limits. It must also expire later than its predecessor, or be the same
        record again.
        """
        now = self._clock()
        self._expire(now)
        old = self._records.get(key, {}).get(subkey)
        grown_bytes = len(value) - (len(old.value) if old else 0)
        if expiration_time <= now:
            return False
        if old and (old.value, old.expires_at) == (value, expiration_time):
            return True
        # A record that expires after MAX_LIFETIME_S was accepted while the clock was ahead. It must
        # not block its successor.
        if old and expiration_time <= old.expires_at <= now + MAX_LIFETIME_S:
            return False
        if self._key_bytes[key] + grown_bytes > self._limits.key_bytes and not self._can_evict(
            key, old, len(value)
        ):
            return False
        if old is None and self._signer_records[subkey] >= self._limits.signer_records:
            return False
        try:
            reservations = self._reserve(len(value))
        except ResourceLimitReached:
            return False
        if old is not None:
            self._forget(key, subkey)
        while self._key_bytes[key] + len(value) > self._limits.key_bytes:
            self._evict(key)
        self._records.setdefault(key, {})[subkey] = _Kept(
            value, expiration_time, reservations, self._origin, self._blocks_of(value)
        )
        self._key_bytes[key] += len(value)
        for where in (key, None):
            self._origin_bytes[where, self._origin] += len(value)
        self._signer_records[subkey] += 1
        self.total_bytes += len(value)
        for queue in (self._expiries, self._expiries_of.setdefault(self._origin, [])):
            heapq.heappush(queue, (expiration_time, key, subkey))
        if len(self._expiries) > 2 * self._signer_records.total() + 64:
            self._drop_replaced()
        while self.total_bytes > self._limits.total_bytes:
            largest = max(self._expiries_of, key=lambda origin: self._origin_bytes.get((None, origin), 0))
            self._drop_soonest(self._expiries_of[largest])
        return subkey in self._records.get(key, {})

    def get(self, key: "DHTID") -> "ValueWithExpiration[DictionaryDHTValue] | None":
        """Return all records under ``key`` in a new dictionary."""
        self._expire(self._clock())
        if key not in self._records or (self._shown is not None and key not in self._shown):
            return None
        return _as_dictionary(self._records[key])

    def draw(
        self, key: "DHTID", most: int, rng: random.Random, blocks: tuple[int, int] | None = None
    ) -> list[bytes]:
        """Draw up to ``most`` random values under ``key``.

        ``blocks`` [start, end): draw only announcements of hosts with one of these blocks. Draws
        one value from each subnet before a second one from any. So a subnet that stores thousands
        of records cannot keep the records of others out of a sample.
        """
        self._expire(self._clock())
        kept = list(self._records.get(key, {}).values())
        if blocks is not None:
            kept = [each for each in kept if each.blocks[0] < blocks[1] and blocks[0] < each.blocks[1]]
        rng.shuffle(kept)
        drawn: Counter[str] = Counter()

        def turn(each: _Kept) -> int:
            drawn[each.origin] += 1
            return drawn[each.origin]

        return [each.value for each in sorted(kept, key=turn)[:most]]

    def items(self) -> "Iterator[tuple[DHTID, ValueWithExpiration[DictionaryDHTValue]]]":
        self._expire(self._clock())
        return iter([(key, _as_dictionary(records)) for key, records in self._records.items()])

    def __contains__(self, key: "DHTID") -> bool:
        self._expire(self._clock())
        return key in self._records

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            self._drop_soonest(self._expiries)

    def _drop_soonest(self, queue: "list[tuple[float, DHTID, bytes]]") -> None:
        """Drop the record of the first entry of ``queue``, unless it was replaced or dropped."""
        expires_at, key, subkey = heapq.heappop(queue)
        kept = self._records.get(key, {}).get(subkey)
        if kept is not None and kept.expires_at == expires_at:
            self._forget(key, subkey)

    def _drop_replaced(self) -> None:
        """Remove entries of replaced records from the queues. They would grow without bound."""
        self._expiries, self._expiries_of = [], {}
        for key, records in self._records.items():
            for subkey, kept in records.items():
                entry = kept.expires_at, key, subkey
                self._expiries.append(entry)
                self._expiries_of.setdefault(kept.origin, []).append(entry)
        for queue in (self._expiries, *self._expiries_of.values()):
            heapq.heapify(queue)

    def _can_evict(self, key: "DHTID", old: _Kept | None, nbytes: int) -> bool:
        """Return whether another subnet would still have more bytes under a full key than this one.

        ``nbytes`` more are counted for the storing subnet. False for a record larger than the limit
        of a key.
        """
        mine_bytes = self._origin_bytes[key, self._origin] + nbytes
        if old is not None and old.origin == self._origin:
            mine_bytes -= len(old.value)
        return self._key_bytes[key] > 0 and mine_bytes < self._origin_bytes[key, self._largest_subnet(key)]

    def _evict(self, key: "DHTID") -> None:
        """Drop the record of the largest subnet under ``key`` that expires soonest."""
        origin = self._largest_subnet(key)
        theirs = {signer: kept for signer, kept in self._records[key].items() if kept.origin == origin}
        self._forget(key, min(theirs, key=lambda signer: theirs[signer].expires_at))

    def _largest_subnet(self, key: "DHTID") -> str:
        origins = {kept.origin for kept in self._records[key].values()}
        return max(sorted(origins), key=lambda origin: self._origin_bytes[key, origin])

    def _reserve(self, nbytes: int) -> tuple[Reservation, ...]:
        if self._storer is None:
            return ()
        number = self._storer.reserve(Resource.RECORDS)
        try:
            return number, self._storer.reserve(Resource.RECORD_BYTES, nbytes)
        except ResourceLimitReached:
            number.release()
            raise

    def _forget(self, key: "DHTID", subkey: bytes) -> None:
        kept = self._records[key].pop(subkey)
        for reservation in kept.reservations:
            reservation.release()
        self.total_bytes -= len(kept.value)
        self._key_bytes[key] -= len(kept.value)
        for place in ((key, kept.origin), (None, kept.origin)):
            self._origin_bytes[place] -= len(kept.value)
            if not self._origin_bytes[place]:
                del self._origin_bytes[place]
        self._signer_records[subkey] -= 1
        if not self._records[key]:
            del self._records[key], self._key_bytes[key]
        if not self._signer_records[subkey]:
            del self._signer_records[subkey]


def _as_dictionary(records: dict[bytes, _Kept]) -> "ValueWithExpiration[DictionaryDHTValue]":
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.timed_storage import ValueWithExpiration

    dictionary = DictionaryDHTValue()
    for subkey, kept in records.items():
        dictionary.store(subkey, kept.value, kept.expires_at)
    return ValueWithExpiration(dictionary, dictionary.latest_expiration_time)
