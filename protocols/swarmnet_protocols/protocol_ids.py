"""The protocol ids of this version, as registered in proto/PROTOCOLS.toml."""

from swarmnet_protocols.transport import ProtocolSpec

_ACTIVATIONS_BYTES = 64 << 20

SESSION = ProtocolSpec("/swarmnet/session/1", max_header_bytes=64 << 10, max_payload_bytes=_ACTIVATIONS_BYTES)
LINK = ProtocolSpec("/swarmnet/link/1", max_header_bytes=64 << 10, max_payload_bytes=_ACTIVATIONS_BYTES)

PING = ProtocolSpec("/swarmnet/ping/1", max_header_bytes=64)

ALL: tuple[ProtocolSpec, ...] = (SESSION, LINK, PING)
