"""The parts of clients' adapters that one host keeps: each for its owner only, as long as it is used and there is room."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarmnet_node.adapters import StageAdapter
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.session.link import Refused
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.wire import session_pb2 as pb

HASH_BYTES = 32

Key = tuple[PeerId, bytes]
"""Owner and hash. Whoever else knows the hash has to send the bytes."""


@dataclass(frozen=True)
class Quota:
    """How much may be kept."""

    nbytes: int
    number: int


@dataclass(eq=False)
class _Kept:
    adapter: StageAdapter
    users: int = 0
    expiry: asyncio.TimerHandle | None = None


class AdapterStore:
    """Adapters by owner and hash, least recently used first. Those in use stay; of the others the oldest make way."""

    def __init__(self, *, per_client: Quota, in_all: Quota, idle_s: float) -> None:
        """What nobody used for ``idle_s`` goes by itself."""
        self._per_client = per_client
        self._in_all = in_all
        self._idle_s = idle_s
        self._kept: dict[Key, _Kept] = {}
        self._awaited: list[tuple[PeerId, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters that are here, and of those that are on their way."""
        return self._bytes_of(None)

    def __len__(self) -> int:
        return len(self._kept)

    def renew(self, owner: PeerId, digest: bytes) -> bool:
        """Whether the adapter is here; if so it counts as used now."""
        if (owner, digest) not in self._kept:
            return False
        with self.use(owner, digest):
            return True

    @contextmanager
    def room(self, owner: PeerId, nbytes: int) -> Iterator[None]:
        """Keep so many bytes free for an adapter that comes while the context is open.

        Raises ``Refused`` when the owner's adapters, or all, would take more than they may.
        """
        self._make_room(owner, nbytes)
        awaited = (owner, nbytes)
        self._awaited.append(awaited)
        try:
            yield
        finally:
            self._awaited.remove(awaited)

    def put(self, owner: PeerId, digest: bytes, adapter: StageAdapter) -> None:
        """Keep an adapter. Raises ``Refused`` as ``room`` does: it may be larger than the bytes it came as."""
        if self.renew(owner, digest):
            return
        self._make_room(owner, adapter.nbytes)
        self._kept[owner, digest] = _Kept(adapter)
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
            if not kept.users:
                self._rest(key)

    def _rest(self, key: Key) -> None:
        """Nobody uses it now: it is the last of those to make way, and goes in time."""
        kept = self._kept.pop(key)
        self._kept[key] = kept
        kept.expiry = asyncio.get_running_loop().call_later(self._idle_s, self._kept.pop, key)

    def _make_room(self, owner: PeerId, nbytes: int) -> None:
        self._make_way(owner, nbytes, self._per_client)
        self._make_way(None, nbytes, self._in_all)

    def _make_way(self, owner: PeerId | None, nbytes: int, quota: Quota) -> None:
        """Drop adapters of one owner, or of all, that nobody uses, until another of ``nbytes`` is within ``quota``."""
        excess_bytes = self._bytes_of(owner) + nbytes - quota.nbytes
        excess = sum(_is(owner, who) for who, _ in [*self._kept, *self._awaited]) + 1 - quota.number
        going = []
        for key, kept in self._kept.items():
            if excess_bytes <= 0 and excess <= 0:
                break
            if not kept.users and _is(owner, key[0]):
                going.append(key)
                excess_bytes -= kept.adapter.nbytes
                excess -= 1
        if excess_bytes > 0 or excess > 0:
            raise Refused(
                pb.REASON_OUT_OF_MEMORY,
                f"no room for an adapter of {nbytes} bytes: {quota.number} of {quota.nbytes} bytes may be here",
            )
        for key in going:
            expiry = self._kept.pop(key).expiry
            if expiry is not None:
                expiry.cancel()

    def _bytes_of(self, owner: PeerId | None) -> int:
        kept = sum(kept.adapter.nbytes for (who, _), kept in self._kept.items() if _is(owner, who))
        return kept + sum(nbytes for who, nbytes in self._awaited if _is(owner, who))


def _is(owner: PeerId | None, who: PeerId) -> bool:
    return owner is None or owner == who
