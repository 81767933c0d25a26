"""The protocol ids of this version, as registered in proto/PROTOCOLS.toml."""

from swarmnet_protocols.net import ProtocolSpec
from swarmnet_protocols.wire.roles import ANY_ROLE, Role

_ACTIVATIONS_BYTES = 64 << 20
_PART_BYTES = 256 << 10
"""A part of a tensor or an adapter. Twelve of them at once arrive within ``Timing.chunk_s`` over a link of 1 Mbit/s."""
_CLIENT = frozenset({Role.CLIENT})
_HOST = frozenset({Role.HOST})
_TRAINER = frozenset({Role.TRAINER})
_DHT_NODES = frozenset({Role.HOST, Role.TRAINER, Role.BOOTSTRAP})

SESSION = ProtocolSpec(
    "/swarmnet/session/3",
    max_header_bytes=64 << 10,
    max_payload_bytes=_ACTIVATIONS_BYTES,
    roles=_CLIENT,
    served_by=_HOST,
)
LINK = ProtocolSpec(
    "/swarmnet/link/3",
    max_header_bytes=64 << 10,
    max_payload_bytes=_ACTIVATIONS_BYTES,
    roles=_CLIENT | _HOST,
    served_by=_HOST,
    has_flow_control=True,
)
PASS = ProtocolSpec(
    "/swarmnet/pass/3",
    max_header_bytes=4096,
    max_payload_bytes=_PART_BYTES,
    roles=_CLIENT | _HOST,
    served_by=_HOST,
    has_flow_control=True,
)
ADAPTER = ProtocolSpec(
    "/swarmnet/adapter/3",
    max_header_bytes=4096,
    max_payload_bytes=_PART_BYTES,
    roles=_CLIENT,
    served_by=_HOST,
    has_flow_control=True,
)
PING = ProtocolSpec("/swarmnet/ping/2", max_header_bytes=128, roles=ANY_ROLE, served_by=_HOST)

WEIGHTS = ProtocolSpec(
    "/swarmnet/weights/1",
    max_header_bytes=1024,
    max_payload_bytes=1 << 20,
    roles=_CLIENT | _HOST | _TRAINER,
    served_by=_HOST,
)
EXPERTS = ProtocolSpec(
    "/swarmnet/experts/1",
    max_header_bytes=64 << 10,
    max_payload_bytes=16 << 20,
    roles=_HOST,
    served_by=_HOST,
)

REPORT = ProtocolSpec(
    "/swarmnet/report/1",
    max_header_bytes=64 << 10,
    roles=frozenset({Role.OBSERVER, Role.CLIENT, Role.HOST, Role.TRAINER}),
    served_by=_HOST | _TRAINER,
)

PROBE = ProtocolSpec("/swarmnet/probe/1", max_header_bytes=1024, roles=ANY_ROLE, served_by=_DHT_NODES)

_NOISE_BYTES = (64 << 10) - 1
"""Longest message of the Noise protocol."""
RELAY = ProtocolSpec(
    "/swarmnet/relay/1",
    max_header_bytes=1024,
    max_payload_bytes=_NOISE_BYTES,
    roles=ANY_ROLE,
    served_by=_DHT_NODES,
)
PUNCH = ProtocolSpec("/swarmnet/punch/1", max_header_bytes=2048, roles=ANY_ROLE, served_by=ANY_ROLE)

MATCHMAKING = ProtocolSpec(
    "/swarmnet/matchmaking/1", max_header_bytes=1 << 20, roles=_TRAINER, served_by=_TRAINER
)
STATE = ProtocolSpec(
    "/swarmnet/state/3",
    max_header_bytes=1024,
    max_payload_bytes=2 << 20,
    roles=_TRAINER,
    served_by=_TRAINER,
)

EXCHANGE = ProtocolSpec(
    "/swarmnet/exchange/5",
    max_header_bytes=64 << 10,
    max_payload_bytes=1 << 20,
    roles=_TRAINER,
    served_by=_TRAINER,
)

_MAX_RPC_BYTES = 4 << 20
DHT_PING = ProtocolSpec(
    "SwarmDirectoryV1.rpc_ping", max_header_bytes=_MAX_RPC_BYTES, roles=ANY_ROLE, served_by=_DHT_NODES
)
DHT_FIND = ProtocolSpec(
    "SwarmDirectoryV1.rpc_find", max_header_bytes=_MAX_RPC_BYTES, roles=ANY_ROLE, served_by=_DHT_NODES
)
DHT_STORE = ProtocolSpec(
    "SwarmDirectoryV1.rpc_store", max_header_bytes=_MAX_RPC_BYTES, roles=_DHT_NODES, served_by=_DHT_NODES
)
DHT_SAMPLE = ProtocolSpec(
    "SwarmDirectoryV1.rpc_sample", max_header_bytes=512 << 10, roles=ANY_ROLE, served_by=_DHT_NODES
)

REVOCATIONS = ProtocolSpec(
    "/swarmnet/revocations/1",
    max_header_bytes=4096,
    max_payload_bytes=1 << 20,
    roles=ANY_ROLE,
    served_by=ANY_ROLE,
)
HANDSHAKE = ProtocolSpec("/swarmnet/handshake/2", max_header_bytes=4096, max_payload_bytes=320 << 10)
ADMISSION = ProtocolSpec("/swarmnet/admission/2", max_header_bytes=128 << 10)

INFERENCE = (SESSION, LINK, PASS, ADAPTER, PING, WEIGHTS)
"""Served by hosts of blocks, besides ``REPORT``."""
TRAINING = (MATCHMAKING, STATE, EXCHANGE)
"""Served by training workers, besides ``REPORT``."""
DIRECTORY = (DHT_PING, DHT_FIND, DHT_STORE, DHT_SAMPLE)
"""Served by DHT nodes: hivemind's calls, and ``DHT_SAMPLE``, which is swarmnet's. Each is one request and one reply."""
ENTRANCE = (HANDSHAKE, ADMISSION)
"""Protocols that a peer may use before it is known to be a member: they need no role."""
REACHABILITY = (PROBE, RELAY, PUNCH)
"""How peers that cannot be dialled are reached."""
ALL: tuple[ProtocolSpec, ...] = (
    *INFERENCE,
    EXPERTS,
    REPORT,
    *REACHABILITY,
    *TRAINING,
    *DIRECTORY,
    REVOCATIONS,
    *ENTRANCE,
)
