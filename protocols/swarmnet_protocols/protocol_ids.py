"""The protocol ids of this version, as registered in proto/PROTOCOLS.toml."""

from swarmnet_protocols.transport import ProtocolSpec

_ACTIVATIONS_BYTES = 64 << 20

SESSION = ProtocolSpec("/swarmnet/session/1", max_header_bytes=64 << 10, max_payload_bytes=_ACTIVATIONS_BYTES)
LINK = ProtocolSpec("/swarmnet/link/1", max_header_bytes=64 << 10, max_payload_bytes=_ACTIVATIONS_BYTES)
PASS = ProtocolSpec("/swarmnet/pass/1", max_header_bytes=4096, max_payload_bytes=1 << 20)
ADAPTER = ProtocolSpec("/swarmnet/adapter/1", max_header_bytes=4096, max_payload_bytes=1 << 20)
PING = ProtocolSpec("/swarmnet/ping/1", max_header_bytes=64)

GATHER = ProtocolSpec("/swarmnet/gather/1", max_header_bytes=1 << 20)
STATE = ProtocolSpec("/swarmnet/state/1", max_header_bytes=1024, max_payload_bytes=2 << 20)
HANDOVER = ProtocolSpec("/swarmnet/handover/1", max_header_bytes=1024)

EXCHANGE = ProtocolSpec("/swarmnet/exchange/1", max_header_bytes=64 << 10, max_payload_bytes=1 << 20)

INFERENCE = (SESSION, LINK, PASS, ADAPTER, PING)
"""What a node serves."""
TRAINING = (GATHER, STATE, HANDOVER, EXCHANGE)
"""What a training worker serves."""
ALL: tuple[ProtocolSpec, ...] = INFERENCE + TRAINING
