"""A directory in memory, for simulations: one board that all peers of a ``MemoryNetwork`` share."""

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarmnet_protocols.directory.host_announcements import announced_blocks
from swarmnet_protocols.directory.records import Publisher, Record, newest, open_valid
from swarmnet_protocols.directory.signers import Signers
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.net.identity import Identity
from tests.support.network.memory_network import MemoryNetwork


@dataclass(frozen=True)
class _Posting:
    visible_at: float
    topic: str
    expires_at: float
    sealed: bytes


class MemoryBoard:
    """All records of a :class:`MemoryNetwork`, each visible ``delay_s`` after it was published."""

    def __init__(self, network: MemoryNetwork, clock: Clock, *, delay_s: float = 0.0) -> None:
        self.network = network
        self.clock = clock
        self.delay_s = delay_s
        self._postings: list[_Posting] = []

    def post(self, record: Record, sealed: bytes) -> None:
        now = self.clock()
        self._postings = [posting for posting in self._postings if posting.expires_at > now]
        self._postings.append(_Posting(now + self.delay_s, record.topic, record.expires_at, sealed))

    async def shown(self) -> None:
        """Wait until everything that was published is visible."""
        while any(each.visible_at > self.clock() for each in self._postings):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(self.delay_s)

    def read(self, topic: str) -> list[bytes]:
        now = self.clock()
        return [
            posting.sealed
            for posting in self._postings
            if posting.topic == topic and posting.visible_at <= now < posting.expires_at
        ]


class MemoryDirectory:
    """A peer's view of a :class:`MemoryBoard`. A peer that is crashed, hung or isolated neither
    writes nor reads."""

    def __init__(
        self,
        board: MemoryBoard,
        identity: Identity,
        swarm: bytes,
        membership: Membership | None = None,
    ) -> None:
        """``membership``: that of the peer in a private swarm."""
        self._board = board
        self._peer_id = identity.peer_id
        self._swarm = swarm
        self._signers = None if membership is None else Signers(membership)
        certificate = bytes if membership is None else lambda: membership.certificate
        self._publisher = Publisher(identity, swarm, board.clock, certificate)
        self._rng = random.Random(identity.peer_id)
        self.refused = 0

    @property
    def swarm(self) -> bytes:
        return self._swarm

    @property
    def clock(self) -> Clock:
        return self._board.clock

    @property
    def known_peers(self) -> int:
        return max(0, self._board.network.size - 1)

    def warning(self) -> str:
        return ""

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        posting = self._publisher.seal(topic, body, lifetime_s=lifetime_s)
        if self._board.network.is_online(self._peer_id):
            self._board.post(*posting)

    async def lookup(self, topic: str) -> Sequence[Record]:
        if not self._board.network.is_online(self._peer_id):
            return ()
        now = self._board.clock()
        check = (lambda _: None) if self._signers is None else self._signers.check
        return newest(open_valid(self._board.read(topic), swarm=self._swarm, now=now, check=check))

    async def sample(
        self,
        topics: Collection[str],
        most: int,
        *,
        blocks: tuple[int, int] | None = None,
        copies: int = 1,
    ) -> Sequence[Record]:
        drawn: list[Record] = []
        for topic in topics:
            found = await self.lookup(topic)
            if blocks is not None:
                spans = [announced_blocks(each.sealed) for each in found]
                pairs = zip(found, spans, strict=True)
                found = [each for each, (start, end) in pairs if start < blocks[1] and blocks[0] < end]
            drawn += self._rng.sample(found, min(most, len(found)))
        return drawn
