"""Where peers publish what they do and find others: the interface, and one board in memory for simulations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnet_protocols.directory.records import MAX_LIFETIME_S, Record, newest, open_valid, seal
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.memory import MemoryNetwork


class Directory(Protocol):
    """Signed records by topic, eventually seen by every peer of the swarm."""

    @property
    def swarm(self) -> bytes:
        """Id of the swarm, 32 bytes."""

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        """Replace this peer's record under ``topic``.

        The new record lives for ``lifetime_s``, or longer if the one it replaces would outlive it.
        """

    async def lookup(self, topic: str) -> Sequence[Record]:
        """The newest record of every signer, verified and not expired; empty if nobody can be asked."""


class Publisher:
    """Seals one peer's records. Sequences grow with every record; expiries grow too, unless the clock was set back by more than a day."""

    def __init__(self, identity: Identity, swarm: bytes, clock: Clock) -> None:
        self._identity = identity
        self.swarm = swarm
        self.clock = clock
        self._last: dict[str, Record] = {}

    def seal(self, topic: str, body: bytes, *, lifetime_s: float) -> tuple[Record, bytes]:
        """The next record under ``topic``, and its sealed form."""
        now = self.clock()
        sequence, expires_at = int(now * 1000), now + lifetime_s
        if last := self._last.get(topic):
            sequence = max(sequence, last.sequence + 1)
            # Holders of the old record take a new one only if it expires later. A record that outlives what they accept was sealed while
            # our clock was ahead: they have refused it, and would refuse its successor too.
            if last.expires_at < now + MAX_LIFETIME_S:
                expires_at = max(expires_at, last.expires_at + 0.001)
        record = Record(self.swarm, topic, self._identity.public_key, sequence, round(expires_at, 3), body)
        sealed = seal(self._identity, record)
        self._last[topic] = record
        return record, sealed


@dataclass(frozen=True)
class _Posting:
    visible_at: float
    topic: str
    expires_at: float
    sealed: bytes


class MemoryBoard:
    """One place that all peers of a :class:`MemoryNetwork` publish to and read from."""

    def __init__(self, network: MemoryNetwork, clock: Clock, *, delay_s: float = 0.0) -> None:
        self.network = network
        self.clock = clock
        self._delay_s = delay_s
        self._postings: list[_Posting] = []

    def post(self, record: Record, sealed: bytes) -> None:
        now = self.clock()
        self._postings = [posting for posting in self._postings if posting.expires_at > now]
        self._postings.append(_Posting(now + self._delay_s, record.topic, record.expires_at, sealed))

    def read(self, topic: str) -> list[bytes]:
        now = self.clock()
        return [
            posting.sealed
            for posting in self._postings
            if posting.topic == topic and posting.visible_at <= now < posting.expires_at
        ]


class MemoryDirectory:
    """A peer's view of a :class:`MemoryBoard`. A peer that is crashed, hung or isolated neither writes nor reads."""

    def __init__(self, board: MemoryBoard, identity: Identity, swarm: bytes) -> None:
        self._board = board
        self._peer_id = identity.peer_id
        self._swarm = swarm
        self._publisher = Publisher(identity, swarm, board.clock)

    @property
    def swarm(self) -> bytes:
        return self._swarm

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        posting = self._publisher.seal(topic, body, lifetime_s=lifetime_s)
        if self._board.network.is_online(self._peer_id):
            self._board.post(*posting)

    async def lookup(self, topic: str) -> Sequence[Record]:
        if not self._board.network.is_online(self._peer_id):
            return ()
        now = self._board.clock()
        return newest(open_valid(self._board.read(topic), swarm=self._swarm, now=now))
