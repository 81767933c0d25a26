"""Sampling: reads a few records of topics under which many peers publish, from single replicas.

hivemind's look-up asks at least twenty peers, and each sends every record that it has under the
key. Sampling is cheaper:

1. Once in ``FOUND_S`` it finds the peers nearest to a key. Records are stored at these peers.
2. A read asks one of these peers for random records.

Records are signed, so a replica can leave some out but cannot make any. A topic has several keys.
The key and the replica are drawn at random, so no peer can hide a record from many reads.
"""

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from swarmnet_protocols.directory.dht.node import MAX_SAMPLE
from swarmnet_protocols.directory.dht.replication import FOUND_S, REPLICAS, find_nearest
from swarmnet_protocols.directory.dht.rpc import MAX_KEYS
from swarmnet_protocols.directory.records import KEY_SALTS, MAX_RECORD_BYTES, dht_keys
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.net.protocol_ids import DHT_SAMPLE
from swarmnet_protocols.wire import records_pb2 as pb

ATTEMPTS = 3
"""Most replicas of a key that are asked, one after another, until one answers."""


@dataclass
class _Place:
    """A key, the peers nearest to it, and the silent peers among them."""

    until: float
    replicas: Sequence[PeerID]
    silent: set[PeerID] = field(default_factory=set)

    @property
    def left(self) -> list[PeerID]:
        return [peer for peer in self.replicas if peer not in self.silent]


class RecordSampler:
    """Reads samples for one peer."""

    def __init__(self, node: DHTNode, swarm: bytes, clock: Clock) -> None:
        self._node = node
        self._swarm = swarm
        self._clock = clock
        self._rng = random.SystemRandom()
        self._places: dict[DHTID, _Place] = {}

    async def read(
        self, topics: Collection[str], most: int, *, blocks: tuple[int, int] | None = None, copies: int = 1
    ) -> list[bytes]:
        """Return sealed, unverified records of ``topics``: up to ``most`` from each key that is
        read.

        ``copies``: number of keys that are read for each topic.
        """
        keys = [
            DHTID.generate(source=key)
            for topic in topics
            for key in self._rng.sample(dht_keys(self._swarm, topic), min(copies, KEY_SALTS))
        ]
        await self._find(keys)
        found: list[bytes] = []
        for _ in range(ATTEMPTS):
            calls = self._assigned(keys)
            answers = await asyncio.gather(
                *(self._call(peer, part, min(most, MAX_SAMPLE), blocks) for peer, part in calls)
            )
            keys = []
            for (peer, part), answer in zip(calls, answers, strict=True):
                if answer is not None:
                    found += answer
                    continue
                for key in part:
                    self._places[key].silent.add(peer)
                    keys.append(key)
            if not keys:
                break
        for key in keys:  # the next read looks for other replicas
            self._places.pop(key, None)
        return found

    async def _find(self, keys: Sequence[DHTID]) -> None:
        """Find the replicas of the keys without known replicas."""
        now = self._clock()
        self._places = {key: place for key, place in self._places.items() if now < place.until and place.left}
        missing = [key for key in keys if key not in self._places]
        if missing:
            for key, peers in (await find_nearest(self._node, missing)).items():
                others = [peer for peer in peers if peer != self._node.peer_id]
                self._places[key] = _Place(now + FOUND_S, others[:REPLICAS] or [self._node.peer_id])

    def _assigned(self, keys: Sequence[DHTID]) -> list[tuple[PeerID, list[DHTID]]]:
        """Draw a replica for every key at random. Keys share a replica where possible, to save
        calls."""
        calls: list[tuple[PeerID, list[DHTID]]] = []
        left = list(dict.fromkeys(keys))
        self._rng.shuffle(left)
        while left:
            replicas = self._places[left[0]].left
            if not replicas:
                left.pop(0)
                continue
            peer = self._rng.choice(replicas)
            part = [key for key in left if peer in self._places[key].left][:MAX_KEYS]
            calls.append((peer, part))
            left = [key for key in left if key not in part]
        return calls

    async def _call(
        self, peer: PeerID, keys: Sequence[DHTID], most: int, blocks: tuple[int, int] | None
    ) -> list[bytes] | None:
        """Return records under ``keys``; None if ``peer`` did not give a valid answer."""
        start, end = blocks or (0, 0)
        request = pb.SampleRequest(keys=[key.to_bytes() for key in keys], most=most, start=start, end=end)
        protocol = self._node.protocol
        if peer == self._node.peer_id:
            return _checked(protocol.draw(request), len(keys), most)
        try:
            reply = await protocol.p2p.call_protobuf_handler(peer, DHT_SAMPLE.id, request, pb.SampleReply)
        except (SwarmnetError, TimeoutError):
            return None
        return _checked(reply, len(keys), most)


def _checked(reply: pb.SampleReply, keys: int, most: int) -> list[bytes] | None:
    """Return the records of an answer about ``keys`` keys; None if it has more than was asked for.

    Each record costs time to verify.
    """
    records = [record for sample in reply.samples for record in sample.records]
    if len(records) > keys * most or any(len(record) > MAX_RECORD_BYTES for record in records):
        return None
    return records
