"""Who keeps our records: the peers nearest to their keys, each asked once for all the keys of a record that it is near to.

hivemind's own ``store_many`` asks for every key by itself, and by asking fetches and checks everybody's records under it, each time.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from swarmnet_protocols.directory.records import Record, dht_keys
from swarmnet_protocols.machine.clock import Clock

_log = logging.getLogger(__name__)

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


class Replicator:
    """Stores one peer's records."""

    def __init__(self, node: DHTNode, clock: Clock) -> None:
        self._node = node
        self._clock = clock
        self._found: dict[str, _Found] = {}
        self._hidden: set[str] = set()
        """Topics whose records no other peer keeps."""

    async def store(self, record: Record, sealed: bytes) -> None:
        """Have ``record`` kept in the place of the one before it."""
        now = self._clock()
        self._found = {topic: found for topic, found in self._found.items() if now < found.until}
        found = self._found.pop(record.topic, None)
        if found is None or not self._is_enough(await self._put(found.places, record, sealed), found.places):
            places = await self._find(dht_keys(record.swarm, record.topic))
            kept = await self._put(places, record, sealed)
            self._tell(record.topic, kept)
            if not self._is_enough(kept, places):
                return  # a peer that was silent, full or not found may keep it the next time
            found = _Found(now + FOUND_S, kept)
        self._found[record.topic] = found

    def _tell(self, topic: str, kept: _Places) -> None:
        """Log once that others cannot find a record of this topic, and once that they can again."""
        others = {peer for peers in kept.values() for peer in peers} - {self._node.peer_id}
        is_hidden = not others and bool(self._node.protocol.routing_table.uid_to_peer_id)
        if is_hidden and topic not in self._hidden:
            _log.warning(
                "no other peer of the directory keeps our record of %s: others do not find us there", topic
            )
            self._hidden.add(topic)
        elif not is_hidden and topic in self._hidden:
            _log.warning("our record of %s is kept in the directory again", topic)
            self._hidden.discard(topic)

    async def _find(self, keys: Sequence[bytes]) -> _Places:
        """The peers nearest to each key, ourselves among them."""
        # Whoever is near to a key is as near to the one beside it, under which nothing is kept that would come with the answer.
        beside = {DHTID(DHTID.generate(source=key) ^ 1): DHTID.generate(source=key) for key in keys}
        nearest = await self._node.find_nearest_nodes(list(beside))
        return {beside[key]: list(peers.values()) for key, peers in nearest.items()}

    async def _put(self, places: _Places, record: Record, sealed: bytes) -> _Places:
        """Store under each key with the first ``REPLICAS`` of its peers that keep the record: these."""
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
            for (peer, keys), kept in zip(calls.items(), answers, strict=True):
                if kept is None:
                    silent.add(peer)
                    continue
                for key, is_kept in zip(keys, kept, strict=True):
                    if is_kept:  # else it has no room for us, and the next nearest is asked
                        keepers[key].append(peer)

    def _is_enough(self, kept: _Places, asked: _Places) -> bool:
        """Whether as many keep it as could of those asked, and not only we."""
        others = {peer for peers in kept.values() for peer in peers} - {self._node.peer_id}
        return bool(others) and all(
            len(kept[key]) == min(REPLICAS, len(peers)) for key, peers in asked.items()
        )

    async def _call(
        self, peer: PeerID, keys: Sequence[DHTID], record: Record, sealed: bytes
    ) -> list[bool] | None:
        """Whether ``peer`` keeps the record under each key; None if it did not answer."""
        protocol = self._node.protocol
        value = protocol.serializer.dumps(sealed)
        if peer == self._node.peer_id:
            return [
                protocol.storage.store(key, value, record.expires_at, subkey=record.signer) for key in keys
            ]
        values, signers = [value] * len(keys), [record.signer] * len(keys)
        kept = await protocol.call_store(peer, keys, values, record.expires_at, signers)
        return None if kept is None or len(kept) != len(keys) else list(kept)
