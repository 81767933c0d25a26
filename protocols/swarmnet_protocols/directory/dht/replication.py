"""Replication: stores a peer's records with the peers nearest to their keys, one call to each peer.

hivemind's own ``store_many`` searches for every key. Each search fetches and verifies all records
under that key.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from swarmnet_protocols.directory.records import Record, dht_keys
from swarmnet_protocols.machine.clock import Clock

_log = logging.getLogger(__name__)

REPLICAS = 5
"""Number of replicas of a record under each of its keys."""
FOUND_S = 60.0
"""Seconds until a topic's replicas are searched again.

A nearer peer that joins meanwhile gets the record from its neighbours.
"""

_Replicas = Mapping[DHTID, Sequence[PeerID]]
"""Key → peers, nearest first."""


async def find_nearest(node: DHTNode, keys: Sequence[DHTID]) -> _Replicas:
    """Find the peers nearest to each key, including ``node`` itself."""
    # A search for a key returns the records under it. The id that differs in the last bit has the
    # same neighbours, and no records.
    adjacent = {DHTID(key ^ 1): key for key in keys}
    nearest = await node.find_nearest_nodes(list(adjacent))
    return {adjacent[key]: list(peers.values()) for key, peers in nearest.items()}


class Replicator:
    """Stores one peer's records."""

    def __init__(self, node: DHTNode, clock: Clock) -> None:
        self._node = node
        self._clock = clock
        self._found: dict[str, tuple[float, _Replicas]] = {}
        """Topic → the time until which these replicas need no search, and the replicas."""
        self._hidden: set[str] = set()
        """Topics whose records have no replica on another peer."""
        self._short: set[str] = set()
        """Topics whose records have too few replicas, because peers refused to store them."""
        self.refused = 0
        """Stores that peers refused since the start, because they had reached a limit."""

    async def store(self, record: Record, sealed: bytes) -> None:
        """Store ``record`` on its replicas, in place of its predecessor.

        If a peer refuses, the next nearest peer is asked, and the refusing peer again at the next
        call. Logs when too few peers accept.
        """
        now, refused = self._clock(), self.refused
        self._found = {topic: found for topic, found in self._found.items() if now < found[0]}
        found = self._found.pop(record.topic, None)
        reuses = found is not None and self._is_enough(await self._put(found[1], record, sealed), found[1])
        if found is None or not reuses:
            keys = [DHTID.generate(source=key) for key in dht_keys(record.swarm, record.topic)]
            nearest = await find_nearest(self._node, keys)
            replicas = await self._put(nearest, record, sealed)
            self._log_reachability(record.topic, replicas)
            fewest = min(map(len, replicas.values()))
            self._log_shortage(record.topic, fewest, is_short=fewest < REPLICAS and self.refused > refused)
            if not self._is_enough(replicas, nearest):
                # the next call searches again: by then a peer may be reachable or have space
                return
            found = now + FOUND_S, replicas
        self._found[record.topic] = found

    def _log_reachability(self, topic: str, replicas: _Replicas) -> None:
        """Log once when no other peer stores the record of ``topic``, and once when one does."""
        others = {peer for peers in replicas.values() for peer in peers} - {self._node.peer_id}
        is_hidden = not others and bool(self._node.protocol.routing_table.uid_to_peer_id)
        if is_hidden and topic not in self._hidden:
            _log.warning("no other peer stores the record of %s: others cannot find this peer by it", topic)
            self._hidden.add(topic)
        elif not is_hidden and topic in self._hidden:
            _log.warning("the record of %s is stored on other peers again", topic)
            self._hidden.discard(topic)

    def _log_shortage(self, topic: str, fewest: int, *, is_short: bool) -> None:
        """Log once when refusals leave ``topic`` too few replicas, and once when it has enough."""
        if is_short and topic not in self._short:
            _log.warning(
                "peers have no room for the record of %s: it has %d of %d replicas, and few may find it. It is offered again "
                "with the next announcement; more peers that can be dialled give the directory more room",
                topic,
                fewest,
                REPLICAS,
            )
            self._short.add(topic)
        elif not is_short and topic in self._short:
            _log.warning("peers store the record of %s again", topic)
            self._short.discard(topic)

    @property
    def is_short(self) -> bool:
        """True if some record has too few replicas, because peers refused to store it."""
        return bool(self._short)

    async def _put(self, nearest: _Replicas, record: Record, sealed: bytes) -> _Replicas:
        """Store the record on the first ``REPLICAS`` peers of each key that accept it.

        Returns these peers.
        """
        candidates = {key: deque(peers) for key, peers in nearest.items()}
        replicas: dict[DHTID, list[PeerID]] = {key: [] for key in nearest}
        unresponsive = set[PeerID]()
        while True:
            calls = defaultdict[PeerID, list[DHTID]](list)
            for key, peers in candidates.items():
                missing = REPLICAS - len(replicas[key])
                while peers and missing > 0:
                    peer = peers.popleft()
                    if peer not in unresponsive:
                        calls[peer].append(key)
                        missing -= 1
            if not calls:
                return replicas
            answers = await asyncio.gather(
                *(self._call(peer, keys, record, sealed) for peer, keys in calls.items())
            )
            for (peer, keys), kept in zip(calls.items(), answers, strict=True):
                if kept is None:
                    unresponsive.add(peer)
                    continue
                for key, is_kept in zip(keys, kept, strict=True):
                    if is_kept:
                        replicas[key].append(peer)
                    else:  # the peer has reached a limit, so ask the next nearest
                        self.refused += peer != self._node.peer_id

    def _is_enough(self, kept: _Replicas, asked: _Replicas) -> bool:
        """Return whether every key has enough replicas, and at least one is on another peer.

        Enough is ``REPLICAS``, or all peers that were asked.
        """
        others = {peer for peers in kept.values() for peer in peers} - {self._node.peer_id}
        return bool(others) and all(
            len(kept[key]) == min(REPLICAS, len(peers)) for key, peers in asked.items()
        )

    async def _call(
        self, peer: PeerID, keys: Sequence[DHTID], record: Record, sealed: bytes
    ) -> list[bool] | None:
        """Return whether ``peer`` accepted the record under each key; None if it did not answer."""
        protocol = self._node.protocol
        value = protocol.serializer.dumps(sealed)
        if peer == self._node.peer_id:
            return [
                protocol.storage.store(key, value, record.expires_at, subkey=record.signer) for key in keys
            ]
        values, signers = [value] * len(keys), [record.signer] * len(keys)
        kept = await protocol.call_store(peer, keys, values, record.expires_at, signers)
        return None if kept is None or len(kept) != len(keys) else list(kept)
