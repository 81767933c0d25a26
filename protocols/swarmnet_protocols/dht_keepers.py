"""Who keeps our records: the peers nearest to their keys, each asked once for all the keys of a record that it is near to.

hivemind's own ``store_many`` asks for every key by itself, and by asking fetches and checks everybody's records under it, each time.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from swarmnet_protocols.clock import Clock
from swarmnet_protocols.records import Record, dht_keys

REPLICAS = 5
"""Peers that keep a record under each of its keys."""
FOUND_S = 60.0
"""How long the peers that were found for a topic are gone back to. Who is nearer and comes later is given what it should keep by its neighbours."""

_Places = Mapping[DHTID, Sequence[PeerID]]
"""Peers for each key, those to ask first in front."""


@dataclass(frozen=True)
class _Found:
    until: float
    places: _Places


class Keepers:
    """Stores one peer's records."""

    def __init__(self, node: DHTNode, clock: Clock) -> None:
        self._node = node
        self._clock = clock
        self._found: dict[str, _Found] = {}

    async def store(self, record: Record, sealed: bytes) -> None:
        """Have ``record`` kept in the place of the one before it."""
        now = self._clock()
        self._found = {topic: found for topic, found in self._found.items() if now < found.until}
        found = self._found.pop(record.topic, None)
        if found is None or not self._is_enough(await self._put(found.places, record, sealed), found.places):
            places = await self._find(dht_keys(record.swarm, record.topic))
            kept = await self._put(places, record, sealed)
            if not self._is_enough(kept, places):
                return  # whoever was silent, or not found, may be there the next time
            found = _Found(now + FOUND_S, kept)
        self._found[record.topic] = found

    async def _find(self, keys: Sequence[bytes]) -> _Places:
        """The peers nearest to each key, ourselves among them."""
        # Whoever is near to a key is as near to the one beside it, under which nothing is kept that would come with the answer.
        beside = {DHTID(DHTID.generate(source=key) ^ 1): DHTID.generate(source=key) for key in keys}
        nearest = await self._node.find_nearest_nodes(list(beside))
        return {beside[key]: list(peers.values()) for key, peers in nearest.items()}

    async def _put(self, places: _Places, record: Record, sealed: bytes) -> _Places:
        """Store under each key with the first ``REPLICAS`` of its peers that answer: these."""
        waiting = {key: deque(peers) for key, peers in places.items()}
        keepers: dict[DHTID, list[PeerID]] = {key: [] for key in places}
        silent = set[PeerID]()
        while True:
            calls = defaultdict[PeerID, list[DHTID]](list)
            for key, peers in waiting.items():
                missing = REPLICAS - len(keepers[key])
                while peers and missing > 0:
                    peer = peers.popleft()
                    if peer not in silent:
                        calls[peer].append(key)
                        missing -= 1
            if not calls:
                return keepers
            answers = await asyncio.gather(
                *(self._call(peer, keys, record, sealed) for peer, keys in calls.items())
            )
            for (peer, keys), answered in zip(calls.items(), answers, strict=True):
                if not answered:
                    silent.add(peer)
                    continue
                for key in keys:
                    keepers[key].append(peer)

    def _is_enough(self, kept: _Places, asked: _Places) -> bool:
        """Whether as many keep it as could of those asked, and not only we."""
        others = {peer for peers in kept.values() for peer in peers} - {self._node.peer_id}
        return bool(others) and all(
            len(kept[key]) == min(REPLICAS, len(peers)) for key, peers in asked.items()
        )

    async def _call(self, peer: PeerID, keys: Sequence[DHTID], record: Record, sealed: bytes) -> bool:
        """Whether ``peer`` answered."""
        protocol = self._node.protocol
        value = protocol.serializer.dumps(sealed)
        if peer == self._node.peer_id:
            for key in keys:
                protocol.storage.store(key, value, record.expires_at, subkey=record.signer)
            return True
        values, signers = [value] * len(keys), [record.signer] * len(keys)
        return await protocol.call_store(peer, keys, values, record.expires_at, signers) is not None
