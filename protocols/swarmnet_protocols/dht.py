"""The directory of real nodes: signed records in hivemind's Kademlia DHT.

hivemind's DHT believes what it is told. Here a node's id follows from its peer id and is checked before the node is
used, only records that their signers signed are stored or read, and storage is bounded.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from swarmnet_protocols.clock import Clock, wall_clock
from swarmnet_protocols.directory import Publisher
from swarmnet_protocols.errors import PeerUnreachable
from swarmnet_protocols.identity import Identity
from swarmnet_protocols.records import Record, dht_keys, newest, open_valid
from swarmnet_protocols.transport.p2pd import P2pdTransport, peer_of

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

_log = logging.getLogger(__name__)

_BOOTSTRAP_S = 5.0
_SHUTDOWN_S = 2.0


class DhtDirectory:
    """Made by :meth:`create`."""

    def __init__(
        self, transport: P2pdTransport, node: "DHTNode", bootstrap: Sequence[str], publisher: Publisher
    ) -> None:
        self._transport = transport
        self._node = node
        self._bootstrap = tuple(bootstrap)
        self._publisher = publisher

    @property
    def swarm(self) -> bytes:
        return self._publisher.swarm

    @classmethod
    @contextlib.asynccontextmanager
    async def create(
        cls,
        transport: P2pdTransport,
        identity: Identity,
        *,
        swarm: bytes,
        bootstrap: Sequence[str] = (),
        client_mode: bool = False,
        clock: Clock = wall_clock,
    ) -> AsyncIterator["DhtDirectory"]:
        """A directory of ``swarm`` (32 bytes) that takes part in the DHT while the context is open.

        ``bootstrap`` are multiaddrs, with ``/p2p/ID``, of peers to ask first and whenever no other peer is left; it is
        no error if they are dead. In client mode no records are kept for others.
        """
        from swarmnet_protocols.dht_node import create_node

        node = await create_node(transport.p2p, swarm, client_mode=client_mode, clock=clock)
        directory = cls(transport, node, bootstrap, Publisher(identity, swarm, clock))
        try:
            await directory._join()
            yield directory
        finally:
            # If p2pd has died, hivemind waits for its answers for ever.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SHUTDOWN_S):
                    await node.shutdown()

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        record, sealed = self._publisher.seal(topic, body, lifetime_s=lifetime_s)
        await self._join()
        keys = dht_keys(record.swarm, topic)
        await self._node.store_many(
            list(keys), [sealed] * len(keys), record.expires_at, subkeys=[record.signer] * len(keys)
        )

    async def lookup(self, topic: str) -> Sequence[Record]:
        await self._join()
        found = await self._node.get_many(
            dht_keys(self._publisher.swarm, topic), sufficient_expiration_time=float("inf")
        )
        sealed = [
            item.value for value in found.values() if value is not None for item in value.value.values()
        ]
        return newest(open_valid(sealed, swarm=self._publisher.swarm, now=self._publisher.clock()))

    async def _join(self) -> None:
        """Meet the bootstrap peers, unless some peer is known."""
        if self._node.protocol.routing_table.uid_to_peer_id:
            return
        met = await asyncio.gather(*map(self._meet, self._bootstrap))
        if any(met):
            await self._node.find_nearest_nodes([self._node.node_id])

    async def _meet(self, address: str) -> bool:
        from hivemind.p2p import PeerID

        peer = peer_of(address)
        if peer == self._transport.peer_id:
            return False
        try:
            async with asyncio.timeout(_BOOTSTRAP_S):
                await self._transport.connect(peer, [address], deadline_s=_BOOTSTRAP_S)
        except (PeerUnreachable, TimeoutError) as error:
            _log.warning("bootstrap peer %s does not answer: %s", address, error)
            return False
        return await self._node.protocol.call_ping(PeerID.from_base58(peer)) is not None
