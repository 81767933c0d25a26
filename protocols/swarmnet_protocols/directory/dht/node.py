"""hivemind's ``DHTNode`` with validated records, bounded answers and node ids bound to peer ids.

Importing this module imports hivemind, so other modules import it late.
"""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import msgpack  # type: ignore[import-untyped]
from hivemind.dht.node import Blacklist, DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2

from swarmnet_protocols.directory.dht.replication import REPLICAS
from swarmnet_protocols.directory.dht.rpc import BUCKET_SIZE, BYTES_PER_FRAME, MAX_KEYS, GuardedP2P
from swarmnet_protocols.directory.dht.storage import BoundedStorage, StorageLimits
from swarmnet_protocols.directory.host_announcements import announced_blocks
from swarmnet_protocols.directory.records import MAX_RECORD_BYTES, Check, dht_keys, open_record
from swarmnet_protocols.errors import IntegrityError, NotAuthorised, ProtocolViolation
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.protocol_ids import DHT_SAMPLE
from swarmnet_protocols.wire import records_pb2

_WAIT_S = 1.5
MAX_ANSWER_BYTES = 3 << 20
"""Most bytes of records in one answer. The caller gets further keys from other replicas."""
MAX_SAMPLE = 256
"""Most records under one key in a sample."""
MAX_SAMPLE_BYTES = 256 << 10
"""Most bytes of records in one sample."""
_SERIALIZED = 3
"""Copies of an answer in memory while it is made: records, records packed by key, one message."""
KEY_BYTES = 20
_RNG = random.SystemRandom()
_DEPTH_MODULO = 5
_LOST_PERIOD_S = 3.0
_LOST_AT_ONCE = 2
"""Lost peers that are called in each period. A call to a dead peer costs a few packets."""
_MAX_LOST = 64
_LOST_S = 3600.0
"""Seconds until a lost peer is no longer called. By then its stored addresses have expired."""
_PARALLEL_RPC = 64


def node_id_of(peer: PeerID) -> DHTID:
    """Return the only DHT node id that ``peer`` may use."""
    return DHTID.generate(source=peer.to_bytes())


def _unpack(packed: bytes) -> object:
    """Unpack a byte string of at most ``MAX_RECORD_BYTES``, or a scalar.

    Raises ``ValueError`` for anything larger.
    """
    return msgpack.unpackb(
        packed, max_bin_len=MAX_RECORD_BYTES, max_str_len=0, max_array_len=0, max_map_len=0, max_ext_len=0
    )


def _blocks_of(value: bytes) -> tuple[int, int]:
    sealed = _unpack(value)
    return announced_blocks(sealed) if isinstance(sealed, bytes) else (0, 0)


class SignedRecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Accepts a value only if its signature covers the key, the subkey and the expiry.

    The signer must also be allowed to publish it.
    """

    def __init__(self, swarm: bytes, clock: Clock, check: Check) -> None:
        self._swarm = swarm
        self._clock = clock
        self._check = check

    def validate(self, record: DHTRecord) -> bool:
        try:
            sealed, subkey = _unpack(record.value), _unpack(record.subkey)
        except (ValueError, msgpack.UnpackException):
            return False
        if not isinstance(sealed, bytes):
            return False
        try:
            opened = open_record(sealed, swarm=self._swarm, now=self._clock())
            self._check(opened)
        except (IntegrityError, NotAuthorised):
            return False
        keys = (DHTID.generate(source=key).to_bytes() for key in dht_keys(opened.swarm, opened.topic))
        return subkey == opened.signer and record.expiration_time == opened.expires_at and record.key in keys


class SwarmDirectoryV1(DHTProtocol):  # type: ignore[misc]
    """hivemind's protocol with limits. The class name is part of the protocol ids of its RPCs."""

    _rpc_handlers = None  # not inherited: the parent's handlers have the parent's class name
    _stub_type = None
    p2p: GuardedP2P
    blacklist: Blacklist
    """Peers that searches leave out for a while, because they did not answer.

    The node's own list, set by ``create_node``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lost: Latest[PeerID, float] = Latest(_MAX_LOST)
        """Loop time at which each peer left the routing table because it did not answer.

        Keeps the latest ``_MAX_LOST``.
        """

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        scope = self.p2p.scope_of(context.remote_id)
        with self.storage.stored_by(scope, self.p2p.origin):
            return await super().rpc_store(request, context)  # the parent awaits nothing

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Return the records under each key, up to ``MAX_ANSWER_BYTES``.

        Charges their size to the caller before it copies them.
        """
        keys = list(dict.fromkeys(request.keys))
        if len(keys) != len(request.keys) or len(keys) > MAX_KEYS:
            raise ProtocolViolation(f"a call names up to {MAX_KEYS} keys, each once")
        scope, now = self.p2p.scope_of(context.remote_id), loop_time()
        size, known = 0, set[DHTID]()
        for key in map(DHTID.from_bytes, keys):
            size += self.storage.key_bytes(key)
            if size > MAX_ANSWER_BYTES:
                break
            known.add(key)
        size = min(size, MAX_ANSWER_BYTES)
        scope.charge(Rate.FRAMES, size / BYTES_PER_FRAME, now)
        with scope.reserve(Resource.MEMORY, _SERIALIZED * size), self.storage.showing(known):
            return await super().rpc_find(request, context)  # the parent awaits nothing

    async def rpc_sample(
        self, request: records_pb2.SampleRequest, context: P2PContext
    ) -> records_pb2.SampleReply:
        """Return random records under each key, up to ``MAX_SAMPLE_BYTES``."""
        keys = list(dict.fromkeys(request.keys))
        if len(keys) != len(request.keys) or len(keys) > MAX_KEYS or {len(key) for key in keys} - {KEY_BYTES}:
            raise ProtocolViolation(f"a call names up to {MAX_KEYS} keys of {KEY_BYTES} bytes, each once")
        return self.draw(request)

    def draw(self, request: records_pb2.SampleRequest) -> records_pb2.SampleReply:
        """Make the answer to a valid request."""
        blocks = (request.start, request.end) if request.end else None
        reply, left = records_pb2.SampleReply(), MAX_SAMPLE_BYTES
        for key in request.keys:
            sample = reply.samples.add()
            most = min(request.most, MAX_SAMPLE)
            for value in self.storage.draw(DHTID.from_bytes(key), most, _RNG, blocks):
                if left < len(value):
                    break
                left -= len(value)
                if isinstance(sealed := _unpack(value), bytes):
                    sample.records.append(sealed)
        return reply

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        if responded and node_id != node_id_of(peer_id):
            return
        if responded:
            self.lost.pop(peer_id, None)
            self.blacklist.register_success(peer_id)
        elif self.routing_table.get(peer_id=peer_id) is not None:
            self.lost[peer_id] = loop_time()
        await super().update_routing_table(node_id, peer_id, responded)

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Drop invalid records, so that an invalid one does not hide the valid ones."""
        if not isinstance(dictionary, DictionaryDHTValue):
            return False
        with dictionary.freeze():
            for subkey, (value, expires_at) in list(dictionary.items()):
                packed_subkey = self.serializer.dumps(subkey)
                if not self._validate_record(key_bytes, packed_subkey, value, expires_at):
                    del dictionary[subkey]
        return bool(dictionary)


class _Node(DHTNode):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._searches: set[asyncio.Task[Any]] = set()
        """Running searches, also searches whose callers were cancelled."""

    async def find_nearest_nodes(self, *arguments: Any, **options: Any) -> Any:
        return await self._to_the_end(super().find_nearest_nodes(*arguments, **options))

    async def get_many(self, *arguments: Any, **options: Any) -> Any:
        return await self._to_the_end(super().get_many(*arguments, **options))

    async def _to_the_end(self, search: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of ``search``, which runs to its end even if the caller is cancelled.

        hivemind would leave tasks of a cancelled search pending.
        """
        task = asyncio.create_task(search)
        self._searches.add(task)
        task.add_done_callback(self._end_search)
        return await asyncio.shield(task)

    def _end_search(self, task: "asyncio.Task[Any]") -> None:
        self._searches.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that was cancelled does not retrieve it

    def _filter_blacklisted(self, peer_ids: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        """Also drop neighbours whose node id does not follow from their peer id."""
        bound = {node_id: peer for node_id, peer in peer_ids.items() if node_id == node_id_of(peer)}
        allowed: dict[DHTID, PeerID] = super()._filter_blacklisted(bound)
        return allowed


def set_reachable(node: DHTNode, *, is_reachable: bool) -> None:
    """Set whether peers may take this node into their routing tables.

    A peer takes a node in once it learns the node's id.
    """
    own = dht_pb2.NodeInfo(node_id=node.node_id.to_bytes()) if is_reachable else dht_pb2.NodeInfo()
    node.protocol.node_info = own


async def find_lost_peers(node: DHTNode) -> None:
    """Call peers that stopped answering, some in each period, until cancelled.

    When the network splits, each part forgets the peers of the other parts. Each part still knows
    enough peers, so it does not ask a bootstrap peer. Without these calls the parts would stay
    separate after the network heals.
    """
    loop, lost = asyncio.get_running_loop(), node.protocol.lost
    while True:
        await asyncio.sleep(_LOST_PERIOD_S * _RNG.uniform(0.5, 1.5))
        for peer in [peer for peer, since in lost.items() if since < loop.time() - _LOST_S]:
            del lost[peer]
        chosen = _RNG.sample(list(lost), min(_LOST_AT_ONCE, len(lost)))
        found = await asyncio.gather(*map(node.protocol.call_ping, chosen))
        if any(found):
            await node.find_nearest_nodes([node.node_id])


async def create_node(
    p2p: GuardedP2P, validator: SignedRecordValidator, *, client_mode: bool, clock: Clock
) -> DHTNode:
    """Make a node with an empty routing table."""
    node_id = node_id_of(p2p.peer_id)
    settings: dict[str, Any] = {
        "bucket_size": BUCKET_SIZE,
        "depth_modulo": _DEPTH_MODULO,
        "num_replicas": REPLICAS,
        "parallel_rpc": _PARALLEL_RPC,
        "wait_timeout": _WAIT_S,
        "record_validator": validator,
    }
    # A cache would answer with old records.
    no_cache = {
        "cache_locally": False,
        "cache_nearest": 0,
        "cache_on_store": False,
        "cache_refresh_before_expiry": 0,
    }
    # In client mode the node registers no handlers, so this module can replace its protocol.
    node = await _Node.create(p2p, node_id, client_mode=True, **no_cache, **settings)
    node.protocol = await SwarmDirectoryV1.create(p2p, node_id, client_mode=client_mode, **settings)
    node.protocol.blacklist = node.blacklist
    if not client_mode:
        await p2p.add_protobuf_handler(DHT_SAMPLE.id, node.protocol.rpc_sample, records_pb2.SampleRequest)
    node.protocol.storage = BoundedStorage(StorageLimits(), clock, _blocks_of)
    # hivemind answers from its cache alone if the cache has the latest expiry. Then one cached
    # record would hide all others.
    node.protocol.cache = BoundedStorage(StorageLimits(total_bytes=0, key_bytes=0), clock)
    return node
