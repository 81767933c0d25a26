"""The directory over the network: signed records in hivemind's Kademlia DHT.

hivemind's DHT trusts its peers. This module does not:

- The id of a DHT node follows from its authenticated peer id.
- A record is stored and read only with the signature of its signer, who must be a member.
- Every call comes from an admitted peer.
- Storage is bounded.
"""

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import TYPE_CHECKING, NoReturn

from swarmnet_protocols.directory.records import Publisher, Record, dht_keys, newest, open_valid
from swarmnet_protocols.directory.signers import Signers
from swarmnet_protocols.errors import NotAuthorised, PeerUnreachable
from swarmnet_protocols.machine.aio import in_background, persist, within
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.p2pd.transport import peer_of
from swarmnet_protocols.net.protocol_ids import DHT_PING
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.reachability.routed_transport import RoutedTransport

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

    from swarmnet_protocols.directory.dht.contacts import Contacts

_log = logging.getLogger(__name__)
_RNG = random.SystemRandom()

_BOOTSTRAP_S = 5.0
_APART_S = 15.0
"""Mean seconds until one of all peers that know each other calls a bootstrap peer that they do not
know. With more, two halves of a swarm stay apart longer. With fewer, dead addresses cost more
dials."""
_SHUTDOWN_S = 2.0
_MAX_OPENED_BYTES = 4 << 20
"""Bytes of records whose signatures are not checked again: a thousand large host records."""
_MAX_UNRESPONSIVE = 256
"""Most bootstrap peers whose silence is logged. The local network may offer many."""


class DhtDirectory:
    """The directory of one peer. :meth:`create` makes one."""

    def __init__(
        self,
        transport: RoutedTransport,
        handshakes: Handshakes,
        node: "DHTNode",
        bootstrap: Callable[[], Sequence[str]],
        publisher: Publisher,
        contacts: "Contacts",
    ) -> None:
        from swarmnet_protocols.directory.dht.replication import Replicator
        from swarmnet_protocols.directory.dht.sampling import RecordSampler

        self._transport = transport
        self._handshakes = handshakes
        self._node = node
        self._bootstrap = bootstrap
        self._publisher = publisher
        self._contacts = contacts
        self._signers = Signers(handshakes.membership)
        self._replicator = Replicator(node, publisher.clock)
        self._sampler = RecordSampler(node, publisher.swarm, publisher.clock)
        self._opened: OrderedDict[bytes, Record] = OrderedDict()
        """Records from samples, by their sealed form. The next sample holds some of them again."""
        self._opened_bytes = 0
        self._unresponsive: set[PeerId] = set()
        """Bootstrap peers that did not answer last time."""

    @property
    def swarm(self) -> bytes:
        return self._publisher.swarm

    @property
    def clock(self) -> Clock:
        return self._publisher.clock

    @classmethod
    @contextlib.asynccontextmanager
    async def create(
        cls,
        transport: RoutedTransport,
        handshakes: Handshakes,
        identity: Identity,
        *,
        bootstrap: Callable[[], Sequence[str]] = tuple,
        client_mode: bool = False,
        is_reachable: bool = True,
    ) -> AsyncIterator["DhtDirectory"]:
        """Take part in the DHT of the swarm of ``handshakes`` while the context is open.

        - ``bootstrap`` returns the current multiaddrs, with ``/p2p/ID``, of peers to ask whenever
          no other peer is known. A peer that does not answer is not an error.
        - ``client_mode``: this peer stores no records for others.
        - ``is_reachable``: while False, it stores no records for others, either.

        Raises ``NotAuthorised`` if this peer is not a member, or if a bootstrap peer refuses it and
        it knows no other peer. Later calls raise ``NotAuthorised`` for the same reasons.
        """

        from swarmnet_protocols.directory.dht.contacts import Contacts
        from swarmnet_protocols.directory.dht.node import (
            SignedRecordValidator,
            create_node,
            find_lost_peers,
        )
        from swarmnet_protocols.directory.dht.rpc import GuardedP2P

        swarm, clock = handshakes.membership.rules.swarm, handshakes.membership.clock
        signers = Signers(handshakes.membership)

        def publisher() -> Publisher:
            return Publisher(identity, swarm, clock, lambda: handshakes.membership.certificate)

        contacts = Contacts(publisher(), transport.addresses, signers.check)
        p2p = GuardedP2P(transport, handshakes, contacts)
        validator = SignedRecordValidator(swarm, clock, signers.check)
        node = await create_node(p2p, validator, client_mode=client_mode, clock=clock)
        directory = cls(transport, handshakes, node, bootstrap, publisher(), contacts)
        if not client_mode:
            directory.set_reachable(is_reachable)
        try:
            async with in_background(
                persist("the search for lost peers", lambda: find_lost_peers(node)),
                persist("the search for another half of the swarm", directory._find_another_half),
            ):
                await directory._join()
                yield directory
        finally:
            # If p2pd has died, hivemind would wait for its answers without end.
            await within(_SHUTDOWN_S, node.shutdown())

    def set_reachable(self, is_reachable: bool) -> None:
        """Set whether other peers can dial this one.

        If not, this peer stores no records for others from now on. Not for client mode.
        """
        from swarmnet_protocols.directory.dht import node as dht_node

        dht_node.set_reachable(self._node, is_reachable=is_reachable)

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        record, sealed = self._publisher.seal(topic, body, lifetime_s=lifetime_s)
        await self._join()
        await self._replicator.store(record, sealed)

    async def lookup(self, topic: str) -> Sequence[Record]:
        await self._join()
        found = await self._node.get_many(
            dht_keys(self._publisher.swarm, topic), sufficient_expiration_time=float("inf")
        )
        sealed = [
            item.value for value in found.values() if value is not None for item in value.value.values()
        ]
        return newest(
            open_valid(
                sealed,
                swarm=self._publisher.swarm,
                now=self._publisher.clock(),
                check=self._signers.check,
            )
        )

    async def sample(
        self,
        topics: Collection[str],
        most: int,
        *,
        blocks: tuple[int, int] | None = None,
        copies: int = 1,
    ) -> Sequence[Record]:
        await self._join()
        now, records = self._publisher.clock(), list[Record]()
        for sealed in await self._sampler.read(topics, most, blocks=blocks, copies=copies):
            if sealed in self._opened:
                self._opened.move_to_end(sealed)
            else:
                for record in open_valid([sealed], swarm=self._publisher.swarm, now=now):
                    self._opened[sealed] = record
                    self._opened_bytes += len(sealed)
            found = self._opened.get(sealed)
            # A signer may have been revoked meanwhile.
            is_current = found is not None and found.topic in topics and found.expires_at > now
            if found is not None and is_current and self._signers.admits(found):
                records.append(found)
        while self._opened_bytes > _MAX_OPENED_BYTES:
            self._opened_bytes -= len(self._opened.popitem(last=False)[0])
        return newest(records)

    @property
    def refused(self) -> int:
        return self._replicator.refused

    def warning(self) -> str:
        if not self._replicator.is_short:
            return ""
        return (
            "peers have no room for the announcements of this node, so few clients may find it: the swarm needs more peers "
            "that can be dialled, such as swarmnet bootstrap"
        )

    @property
    def known_peers(self) -> int:
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    @property
    def knows_peers(self) -> bool:
        """True if any other peer of the DHT is known."""
        return self.known_peers > 0

    def peers(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the known peers of the DHT, with the addresses that they announced."""
        known = [PeerId(each.to_base58()) for each in self._node.protocol.routing_table.peer_id_to_uid]
        return {peer: self._contacts.addresses_of(peer) for peer in known}

    async def join_through(self, addresses: Sequence[str]) -> bool:
        """Join the DHT of the peers at ``addresses``, even if others are known.

        Returns whether any of them answered. Raises ``NotAuthorised`` if one refuses this peer and
        no other answers.
        """
        by_peer = defaultdict[PeerId, list[str]](list)
        for address in addresses:
            by_peer[peer_of(address)].append(address)
        refusals: list[NotAuthorised] = []
        connected = await asyncio.gather(*(self._connect(*each, refusals) for each in by_peer.items()))
        if any(connected):
            await self._node.find_nearest_nodes([self._node.node_id])
        elif refusals:
            raise refusals[0]
        return any(connected)

    async def _join(self) -> None:
        """Join through the bootstrap peers if no peer is known.

        Raises ``NotAuthorised``, as :meth:`create`.
        """
        self._handshakes.membership.check()
        if not self.knows_peers:
            await self.join_through(self._bootstrap())

    async def _find_another_half(self) -> NoReturn:
        """Call a bootstrap peer that is not known, again and again.

        Two bootstrap peers may each begin a swarm again, and members enter the half that they reach
        first. Each half knows peers, so without these calls it would never look for the other. The
        more peers a peer knows, the less often it calls, so the load of bootstrap peers does not
        grow with the swarm.
        """
        while True:
            await asyncio.sleep(_APART_S * max(1, self.known_peers) * _RNG.uniform(0.5, 1.5))
            known = self.peers()
            absent = [each for each in self._bootstrap() if peer_of(each) not in known]
            if absent:
                chosen = peer_of(_RNG.choice(absent))
                with contextlib.suppress(NotAuthorised):  # a bootstrap peer from before a revocation
                    await self.join_through([each for each in absent if peer_of(each) == chosen])

    async def _connect(self, peer: PeerId, addresses: Sequence[str], refusals: list[NotAuthorised]) -> bool:
        from hivemind.p2p import PeerID

        if peer == self._transport.peer_id:
            return False
        try:
            async with asyncio.timeout(_BOOTSTRAP_S):
                await self._transport.connect(peer, addresses, deadline_s=_BOOTSTRAP_S)
                await self._handshakes.ensure(peer, DHT_PING, deadline_s=_BOOTSTRAP_S)
        except NotAuthorised as error:
            _log.warning("the peer at %s: %s", addresses[0], error)
            refusals.append(error)
            return False
        except (PeerUnreachable, Refused, TimeoutError) as error:
            # Logged once, because every look-up tries again. No warning while others answer.
            if peer not in self._unresponsive and len(self._unresponsive) < _MAX_UNRESPONSIVE:
                self._unresponsive.add(peer)
                reason = str(error).partition("\n")[0] or f"no answer within {_BOOTSTRAP_S:g} s"
                level = logging.INFO if self.knows_peers else logging.WARNING
                _log.log(level, "the peer at %s does not answer: %s", addresses[0], reason)
            return False
        self._unresponsive.discard(peer)
        return await self._node.protocol.call_ping(PeerID.from_base58(peer)) is not None
