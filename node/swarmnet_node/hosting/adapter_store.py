"""The parts of clients' adapters that one host keeps: each for its owner only, as long as it is used and there is room."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarmnet_node.engine.adapters import StageAdapter
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.resources import Resource, ResourceLimitReached, Scope
from swarmnet_protocols.wire import session_pb2 as pb

HASH_BYTES = 32

Key = tuple[PeerId, bytes]
"""Owner and hash. Whoever else knows the hash has to send the bytes."""


class Room:
    """For one adapter, in the scope of its owner, until ``release``."""

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
    """Adapters by owner and hash, least recently used first. Those in use stay; of the others the oldest make way."""

    def __init__(self, in_all: Scope, *, idle_s: float) -> None:
        """``in_all``: the scope around those of owners. What nobody used for ``idle_s`` goes by itself."""
        self._in_all = in_all
        self._idle_s = idle_s
        self._kept: dict[Key, _Kept] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters that are here, and of those that are on their way."""
        return self._in_all.used[Resource.ADAPTER_BYTES]

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forget all of them. Who uses one has it still."""
        for key in list(self._kept):
            self._drop(key)

    def renew(self, owner: PeerId, digest: bytes) -> bool:
        """Whether the adapter is here; if so it counts as used now."""
        if (owner, digest) not in self._kept:
            return False
        with self.use(owner, digest):
            return True

    @contextmanager
    def room(self, scope: Scope, nbytes: int) -> Iterator[None]:
        """Keep so many bytes free for an adapter that comes while the context is open, to an owner whose scope this is.

        Raises ``Refused`` when the owner's adapters, or all, would take more than they may.
        """
        room = self._make_room(scope, nbytes)
        try:
            yield
        finally:
            room.release()

    def put(self, owner: PeerId, scope: Scope, digest: bytes, adapter: StageAdapter) -> None:
        """Keep an adapter. Raises ``Refused`` as ``room`` does: it may be larger than the bytes it came as."""
        if self.renew(owner, digest):
            return
        self._kept[owner, digest] = _Kept(adapter, self._make_room(scope, adapter.nbytes))
        self._rest((owner, digest))

    @contextmanager
    def use(self, owner: PeerId, digest: bytes) -> Iterator[StageAdapter | None]:
        """The adapter that has this hash, which stays while the context is open; None for no hash.

        Raises ``ProtocolViolation`` for what is not a hash, ``Refused`` when the owner has no such adapter here.
        """
        if not digest:
            yield None
            return
        if len(digest) != HASH_BYTES:
            raise ProtocolViolation(f"an adapter's hash is {HASH_BYTES} bytes")
        key = owner, digest
        if key not in self._kept:
            raise Refused(pb.REASON_UNKNOWN_ADAPTER, f"adapter {digest.hex()[:16]} of yours is not here")
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
        """Nobody uses it now: it is the last of those to make way, and goes in time."""
        kept = self._kept.pop(key)
        self._kept[key] = kept
        kept.expiry = asyncio.get_running_loop().call_later(self._idle_s, self._drop, key)

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key)
        kept.room.release()
        if kept.expiry is not None:
            kept.expiry.cancel()

    def _make_room(self, scope: Scope, nbytes: int) -> Room:
        """Drop what nobody uses, of this owner and of anybody, until there is room."""
        try:
            if self._make_way(scope, nbytes, lambda owner: owner == scope.name):
                self._make_way(self._in_all, nbytes, lambda owner: True)
            return Room(scope, nbytes)
        except ResourceLimitReached as error:
            raise Refused.overloaded(error) from error

    def _make_way(self, scope: Scope, nbytes: int, counts: Callable[[PeerId], bool]) -> bool:
        """Drop adapters that count in ``scope`` and nobody uses, the oldest first, until it has room; none if that is in vain."""
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
