"""The adapter parts that clients upload to one host. The life of a part:

1. The client announces a part with its SHA-256 and its size in bytes. If the store has the part,
   the host answers ``stored``.
2. Otherwise the host answers ``wanted``, and receives the part in chunks. It reserves memory as
   chunks arrive.
3. The host checks the hash, loads the part onto its device and answers ``stored``.
4. The store keeps the part until it is idle for long or memory runs out. Only its owner can use it.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnet_node.engine.engine import Engine
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import ResourceLimitReached, Scope
from swarmnet_protocols.net.protocol_ids import ADAPTER
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

if TYPE_CHECKING:
    from swarmnet_node.engine.torch_layers.adapters import StageAdapter

HASH_BYTES = 32

Key = tuple[PeerId, bytes]
"""Owner and hash. Another client that knows the hash must still upload the bytes."""


class _Reservation:
    """The place and the memory of one adapter, reserved in its owner's scope until ``release``."""

    def __init__(self, scope: Scope, nbytes: int) -> None:
        """Raises ``ResourceLimitReached``."""
        self._place = scope.reserve(Resource.ADAPTERS)
        try:
            self._bytes = scope.reserve(Resource.ADAPTER_BYTES, nbytes)
        except ResourceLimitReached:
            self._place.release()
            raise

    @property
    def nbytes(self) -> int:
        return self._bytes.amount

    def resize(self, nbytes: int) -> None:
        """Raises ``ResourceLimitReached``."""
        self._bytes.resize(nbytes)

    def release(self) -> None:
        self._place.release()
        self._bytes.release()


@dataclass(eq=False)
class _Kept:
    adapter: "StageAdapter"
    reservation: _Reservation
    users: int = 0
    expiry: asyncio.TimerHandle | None = None


class AdapterStore:
    """Adapters by owner and hash. Adapters in use stay; idle ones are dropped, least recently used
    first."""

    def __init__(self, system: Scope, *, idle_s: float) -> None:
        """``system`` is the scope around the owners' scopes. An adapter is dropped after ``idle_s``
        without use."""
        self._system = system
        self._idle_s = idle_s
        self._kept: dict[Key, _Kept] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters in the store, including uploads in progress."""
        return self._system.used[Resource.ADAPTER_BYTES]

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drop all adapters. Sessions and passes that use one keep it until they end."""
        for key in list(self._kept):
            self._drop(key)

    def renew(self, owner: PeerId, digest: bytes) -> bool:
        """Return whether the adapter is here. If so, it counts as used now."""
        if (owner, digest) not in self._kept:
            return False
        with self.use(owner, digest):
            return True

    @contextmanager
    def reserve(self, scope: Scope, nbytes: int) -> Iterator[Callable[[int], None]]:
        """Reserve memory for an adapter of ``nbytes`` during its upload.

        ``scope`` belongs to its owner. The context yields a function. Call it with the number of
        bytes received so far: an announced size alone evicts nobody's adapter. This method and that
        function raise ``Refusal`` at the limit of the owner's adapters or of all adapters.
        """
        if not scope.can_ever_reserve(Resource.ADAPTER_BYTES, nbytes):
            with self._refusing():
                scope.reserve(Resource.ADAPTER_BYTES, nbytes).release()
        reservation = self._reserve(scope, 0)

        def grow(received_bytes: int) -> None:
            with self._refusing():
                self._make_room(scope, received_bytes - reservation.nbytes, 0)
                reservation.resize(received_bytes)

        try:
            yield grow
        finally:
            reservation.release()

    def put(self, owner: PeerId, scope: Scope, digest: bytes, adapter: "StageAdapter") -> None:
        """Store an adapter. Raises ``Refusal`` like ``reserve``, because it may be larger than its
        upload."""
        if self.renew(owner, digest):
            return
        self._kept[owner, digest] = _Kept(adapter, self._reserve(scope, adapter.nbytes))
        self._mark_idle((owner, digest))

    @contextmanager
    def use(self, owner: PeerId, digest: bytes) -> "Iterator[StageAdapter | None]":
        """Yield the adapter with this hash, or None for an empty hash.

        The adapter stays while the context is open. Raises ``ProtocolViolation`` for bytes that are
        not a hash, and ``Refusal`` if the owner has no such adapter here.
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
                self._mark_idle(key)

    def _mark_idle(self, key: Key) -> None:
        """Mark an adapter as idle from now on.

        The store drops it after ``idle_s``, or earlier if memory runs out. Then the adapter that
        was idle longest goes first.
        """
        kept = self._kept.pop(key)
        self._kept[key] = kept
        kept.expiry = asyncio.get_running_loop().call_later(self._idle_s, self._drop, key)

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key)
        kept.reservation.release()
        if kept.expiry is not None:
            kept.expiry.cancel()

    def _reserve(self, scope: Scope, nbytes: int) -> _Reservation:
        """Reserve memory for one adapter. Drop idle ones if needed. Raises ``Refusal``."""
        with self._refusing():
            self._make_room(scope, nbytes, 1)
            return _Reservation(scope, nbytes)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except ResourceLimitReached as error:
            raise Refusal.of(error) from error

    def _make_room(self, scope: Scope, nbytes: int, number: int) -> None:
        """Drop idle adapters, the owner's first, until ``number`` more with ``nbytes`` fit.

        If all idle adapters of the owner together would not make room within its limit, drop none.
        """
        if self._evict(scope, nbytes, number, lambda owner: owner == scope.name):
            self._evict(self._system, nbytes, number, lambda owner: True)

    def _evict(self, scope: Scope, nbytes: int, number: int, counts: Callable[[PeerId], bool]) -> bool:
        """Drop idle adapters, least recently used first, until there is room in ``scope``.

        Only adapters of owners that ``counts`` accepts are dropped. If that would not suffice, drop
        none and return False.
        """
        excess_bytes = nbytes - scope.available(Resource.ADAPTER_BYTES)
        excess = number - scope.available(Resource.ADAPTERS)
        evicted = []
        for key, kept in self._kept.items():
            if excess_bytes <= 0 and excess <= 0:
                break
            if not kept.users and counts(key[0]):
                evicted.append(key)
                excess_bytes -= kept.adapter.nbytes
                excess -= 1
        if excess_bytes > 0 or excess > 0:
            return False
        for key in evicted:
            self._drop(key)
        return True


AdapterStream = TypedStream[pb.AdapterReply, pb.AdapterRequest]


@dataclass(frozen=True)
class AdapterReceiver:
    """Receives one part of a client's adapter.

    ``start``: the block of the first layer of the loaded stage. The engine's stage may be a part of
    the loaded one.
    """

    upload: pb.Upload
    store: AdapterStore
    engine: Engine
    start: int
    stream: AdapterStream
    heartbeat_s: float

    async def run(self) -> None:
        """Receive and store the part unless the store has it. Send heartbeats meanwhile.

        Raises:

        - ``Refusal`` at a limit of the store.
        - ``ProtocolViolation`` if hash, size or shapes are wrong.
        - ``StreamEnded`` or ``DeadlineExceeded`` if the client has left or is too slow.
        """
        owner, scope, digest = self.stream.peer, self.stream.stream.scope, self.upload.adapter
        if len(digest) != HASH_BYTES or self.upload.size_bytes < 1:
            raise ProtocolViolation("an upload must name a hash of 32 bytes and a size of at least 1 byte")
        if not self.store.renew(owner, digest):
            with self.store.reserve(scope, self.upload.size_bytes) as grow:
                adapter = await race(
                    self._receive(grow),
                    self.stream.send_heartbeats(
                        self.heartbeat_s, lambda: pb.AdapterReply(heartbeat=pb.Heartbeat())
                    ),
                )
            self.store.put(owner, scope, digest, adapter)
        await self.stream.send(pb.AdapterReply(stored=pb.Stored()))

    async def _receive(self, grow: Callable[[int], None]) -> "StageAdapter":
        await self.stream.send(pb.AdapterReply(wanted=pb.Wanted()))
        chunks: list[Buffer] = []
        left = self.upload.size_bytes
        while left:
            request, payload = await self.stream.receive()
            wanted = min(left, ADAPTER.max_payload_bytes)
            if not request.HasField("chunk") or len(payload) != wanted:
                raise ProtocolViolation(f"expected a chunk of {wanted} bytes")
            left -= wanted
            grow(self.upload.size_bytes - left)
            chunks.append(payload)
        data = await asyncio.to_thread(self._checked, chunks)
        return await self.engine.run_on_torch_thread(lambda: self._adapt(data))

    def _checked(self, chunks: list[Buffer]) -> bytes:
        data = b"".join(chunks)
        chunks.clear()
        if hashlib.sha256(data).digest() != self.upload.adapter:
            raise ProtocolViolation("the bytes of an adapter do not have its hash")
        return data

    def _adapt(self, data: bytes) -> "StageAdapter":
        from swarmnet_protocols.session.adapters import read_part

        adapter = self.engine.stage.load_adapter(read_part(data), self.start)
        adapter.check_span(self.upload.span.start, self.upload.span.end)
        return adapter
