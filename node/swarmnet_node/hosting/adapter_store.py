"""The parts of adapters that clients uploaded to one host. Only its owner can use a part, until it is idle or memory is needed."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarmnet_node.engine.adapters import StageAdapter
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.resources import Resource, ResourceLimitReached, Scope
from swarmnet_protocols.wire import refusal_pb2

HASH_BYTES = 32

Key = tuple[PeerId, bytes]
"""Owner and hash. Another client that knows the hash has to upload the bytes."""


class Room:
    """The memory of one adapter, in the scope of its owner, until ``release``."""

    def __init__(self, scope: Scope, nbytes: int) -> None:
        """Raises ``ResourceLimitReached``."""
        self._number = scope.reserve(Resource.ADAPTERS)
        try:
            self._bytes = scope.reserve(Resource.ADAPTER_BYTES, nbytes)
        except ResourceLimitReached:
            self._number.release()
            raise

    def release(self) -> None:
        self._number.release()
        self._bytes.release()


@dataclass(eq=False)
class _Kept:
    adapter: StageAdapter
    room: "Room"
    users: int = 0
    expiry: asyncio.TimerHandle | None = None


class AdapterStore:
    """Adapters by owner and hash, least recently used first. Those in use stay; of the others the oldest are dropped first."""

    def __init__(self, in_all: Scope, *, idle_s: float) -> None:
        """``in_all`` is the scope around those of owners. An adapter that is idle for ``idle_s`` is dropped."""
        self._in_all = in_all
        self._idle_s = idle_s
        self._kept: dict[Key, _Kept] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters here, and of those being uploaded."""
        return self._in_all.used[Resource.ADAPTER_BYTES]

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drop all adapters. Those in use stay until they are released."""
        for key in list(self._kept):
            self._drop(key)

    def renew(self, owner: PeerId, digest: bytes) -> bool:
        """Whether the adapter is here. If so, it counts as used now."""
        if (owner, digest) not in self._kept:
            return False
        with self.use(owner, digest):
            return True

    @contextmanager
    def room(self, scope: Scope, nbytes: int) -> Iterator[None]:
        """Reserve memory for an adapter that is uploaded while the context is open. ``scope`` is its owner's.

        Raises ``Refusal`` when the owner's adapters, or all, would take more than they may.
        """
        room = self._make_room(scope, nbytes)
        try:
            yield
        finally:
            room.release()

    def put(self, owner: PeerId, scope: Scope, digest: bytes, adapter: StageAdapter) -> None:
        """Keep an adapter. Raises ``Refusal`` as ``room`` does: it may be larger than its upload."""
        if self.renew(owner, digest):
            return
        self._kept[owner, digest] = _Kept(adapter, self._make_room(scope, adapter.nbytes))
        self._rest((owner, digest))

    @contextmanager
    def use(self, owner: PeerId, digest: bytes) -> Iterator[StageAdapter | None]:
        """The adapter with this hash, which stays while the context is open; None for an empty hash.

        Raises ``ProtocolViolation`` for what is not a hash, ``Refusal`` when the owner has no such adapter here.
        """
        if not digest:
            yield None
            return
        if len(digest) != HASH_BYTES:
            raise ProtocolViolation(f"an adapter's hash is {HASH_BYTES} bytes")
        key = owner, digest
        if key not in self._kept:
            raise Refusal(
                refusal_pb2.REASON_UNKNOWN_ADAPTER, f"adapter {digest.hex()[:16]} of yours is not here"
            )
        kept = self._kept.pop(key)
        self._kept[key] = kept
        kept.users += 1
        if kept.expiry is not None:
            kept.expiry.cancel()
        try:
            yield kept.adapter
        finally:
            kept.users -= 1
            if not kept.users and key in self._kept:
                self._rest(key)

    def _rest(self, key: Key) -> None:
        """It is no longer in use: drop it when it has been idle, or after all others when memory is needed."""
        kept = self._kept.pop(key)
        self._kept[key] = kept
        kept.expiry = asyncio.get_running_loop().call_later(self._idle_s, self._drop, key)

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key)
        kept.room.release()
        if kept.expiry is not None:
            kept.expiry.cancel()

    def _make_room(self, scope: Scope, nbytes: int) -> Room:
        """Drop unused adapters, first of this owner, then of all, until there is room."""
        try:
            if self._make_way(scope, nbytes, lambda owner: owner == scope.name):
                self._make_way(self._in_all, nbytes, lambda owner: True)
            return Room(scope, nbytes)
        except ResourceLimitReached as error:
            raise Refusal.overloaded(error) from error

    def _make_way(self, scope: Scope, nbytes: int, counts: Callable[[PeerId], bool]) -> bool:
        """Drop unused adapters that count in ``scope``, oldest first, until it has room; none if they would not suffice."""
        excess_bytes = nbytes - scope.available(Resource.ADAPTER_BYTES)
        excess = 1 - scope.available(Resource.ADAPTERS)
        going = []
        for key, kept in self._kept.items():
            if excess_bytes <= 0 and excess <= 0:
                break
            if not kept.users and counts(key[0]):
                going.append(key)
                excess_bytes -= kept.adapter.nbytes
                excess -= 1
        if excess_bytes > 0 or excess > 0:
            return False
        for key in going:
            self._drop(key)
        return True
