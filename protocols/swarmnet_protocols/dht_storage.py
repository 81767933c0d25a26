"""What one DHT node keeps for others, within limits that hold whoever asks."""

import heapq
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnet_protocols.clock import Clock
from swarmnet_protocols.records import MAX_LIFETIME_S
from swarmnet_protocols.resources import Exhausted, Hold, Scope, Stock

if TYPE_CHECKING:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.timed_storage import ValueWithExpiration


@dataclass(frozen=True)
class StorageLimits:
    total_bytes: int = 64 << 20
    """When this is used up, the records that expire soonest go."""
    key_bytes: int = 2 << 20
    """Under one key: all of it has to fit into one answer, of at most 4 MiB."""
    signer_records: int = 256


@dataclass(frozen=True)
class _Kept:
    value: bytes
    expires_at: float
    room: tuple[Hold, ...]
    """In the scope of whoever stored it here."""


class BoundedStorage:
    """Stands in for hivemind's ``DHTLocalStorage``. Holds signed records only: values with the signer as their subkey."""

    def __init__(self, limits: StorageLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._records: dict[DHTID, dict[bytes, _Kept]] = {}
        self._expiries: list[tuple[float, DHTID, bytes]] = []
        self._key_bytes: Counter[DHTID] = Counter()
        self._signer_records: Counter[bytes] = Counter()
        self.total_bytes = 0
        self._storer: Scope | None = None

    @contextmanager
    def stored_by(self, scope: Scope) -> Iterator[None]:
        """What is stored while the context is open counts in ``scope`` for as long as it is kept."""
        self._storer = scope
        try:
            yield
        finally:
            self._storer = None

    def store(self, key: "DHTID", value: bytes, expiration_time: float, subkey: bytes | None = None) -> bool:
        """Whether the record was kept. A value without a signer never is."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: "DHTID", subkey: bytes, value: bytes, expiration_time: float) -> bool:
        """Whether the record was kept: it is within the limits and outlives the one it would replace."""
        now = self._clock()
        self._expire(now)
        old = self._records.get(key, {}).get(subkey)
        grown_bytes = len(value) - (len(old.value) if old else 0)
        if expiration_time <= now:
            return False
        # A record that outlives what is accepted was kept while our clock was ahead: it does not keep its successor out.
        if old and expiration_time <= old.expires_at <= now + MAX_LIFETIME_S:
            return False
        if self._key_bytes[key] + grown_bytes > self._limits.key_bytes:
            return False
        if old is None and self._signer_records[subkey] >= self._limits.signer_records:
            return False
        try:
            room = self._make_room(len(value))
        except Exhausted:
            return False
        if old is not None:
            self._forget(key, subkey)
        self._records.setdefault(key, {})[subkey] = _Kept(value, expiration_time, room)
        self._key_bytes[key] += len(value)
        self._signer_records[subkey] += 1
        self.total_bytes += len(value)
        heapq.heappush(self._expiries, (expiration_time, key, subkey))
        if len(self._expiries) > 2 * self._signer_records.total() + 64:
            self._drop_replaced()
        while self.total_bytes > self._limits.total_bytes:
            self._drop_soonest()
        return subkey in self._records.get(key, {})

    def get(self, key: "DHTID") -> "ValueWithExpiration[DictionaryDHTValue] | None":
        """All records under ``key``, in a dictionary of the caller's own."""
        self._expire(self._clock())
        if key not in self._records:
            return None
        return _as_dictionary(self._records[key])

    def items(self) -> "Iterator[tuple[DHTID, ValueWithExpiration[DictionaryDHTValue]]]":
        self._expire(self._clock())
        return iter([(key, _as_dictionary(records)) for key, records in self._records.items()])

    def __contains__(self, key: "DHTID") -> bool:
        self._expire(self._clock())
        return key in self._records

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            self._drop_soonest()

    def _drop_soonest(self) -> None:
        """Drop the first of the queue, unless it stands for a record that has been replaced."""
        expires_at, key, subkey = heapq.heappop(self._expiries)
        kept = self._records.get(key, {}).get(subkey)
        if kept is not None and kept.expires_at == expires_at:
            self._forget(key, subkey)

    def _drop_replaced(self) -> None:
        """Without this, whoever replaces a record often would grow the queue."""
        self._expiries = [
            (kept.expires_at, key, subkey)
            for key, records in self._records.items()
            for subkey, kept in records.items()
        ]
        heapq.heapify(self._expiries)

    def _make_room(self, nbytes: int) -> tuple[Hold, ...]:
        if self._storer is None:
            return ()
        number = self._storer.hold(Stock.RECORDS)
        try:
            return number, self._storer.hold(Stock.RECORD_BYTES, nbytes)
        except Exhausted:
            number.release()
            raise

    def _forget(self, key: "DHTID", subkey: bytes) -> None:
        kept = self._records[key].pop(subkey)
        for hold in kept.room:
            hold.release()
        self.total_bytes -= len(kept.value)
        self._key_bytes[key] -= len(kept.value)
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
