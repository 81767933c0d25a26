"""The resources that peers reserve and the rates that they use, with the usual limits of each."""

from collections.abc import Mapping
from enum import StrEnum

from swarmnet_protocols.net.limits.rate_limit import RateLimit


class Resource(StrEnum):
    """Resources that are reserved and released."""

    MEMORY = "memory_bytes"
    """Messages being read, waiting, or being sent."""
    INBOUND_STREAMS = "inbound_streams"
    ACTIVE_STREAMS = "active_streams"
    """Inbound streams that have received a message."""
    OUTBOUND_STREAMS = "outbound_streams"
    PENDING_HANDSHAKES = "pending_handshakes"
    """Streams whose opener has not shown its certificate."""
    PENDING_ADMISSIONS = "pending_admissions"
    """Streams on which a request for a certificate is expected."""
    ADMISSIONS = "admissions"
    """Requests for a certificate that are being answered."""
    PAIRINGS = "pairings"
    """Newcomers that type a code."""
    ADMITTED_PEERS = "admitted_peers"
    """Peers whose membership handshake succeeded."""
    CALLS = "calls"
    """DHT calls being answered."""
    REPORTS = "reports"
    """Streams that receive the node's status."""
    PROBES = "probes"
    """Requests to dial a peer's port."""
    RELAY_RESERVATIONS = "relay_reservations"
    """Peers that others reach through this one."""
    CIRCUITS = "circuits"
    """Streams that this relay forwards. Each counts for both of its peers."""
    RECORDS = "records"
    """DHT records. Each counts for the peer that stored it here."""
    RECORD_BYTES = "record_bytes"
    SESSIONS = "sessions"
    PENDING_LINKS = "pending_links"
    """Links whose session has not opened yet."""
    LINKS = "links"
    """Links of open sessions."""
    PASSES = "passes"
    CACHE = "cache_bytes"
    """Key-value caches of sessions."""
    GRAPHS = "graph_bytes"
    """Autograd graphs kept between a forward pass and its backward pass."""
    LOG = "log_bytes"
    """Activations that sessions keep, to replay them to a new next hop."""
    ADAPTERS = "adapters"
    ADAPTER_BYTES = "adapter_bytes"
    TRANSFERS = "transfers"
    """Downloads of a training job's state or of weights."""
    EXPERTS = "experts"
    """Streams of hosts that have this peer's experts compute rows."""
    PENDING_ROUNDS = "pending_rounds"
    """Streams of workers for rounds that have not begun here."""
    ROUNDS = "rounds"
    """Streams of workers for rounds that are running here."""
    BODIES = "body_bytes"
    """Bodies of HTTP requests in progress. Only in the manager of an HTTP endpoint."""


class Rate(StrEnum):
    """Resources that are used up and recover with time."""

    FRAMES = "frames"
    """Messages, and other work counted as a number of messages."""
    BYTES_IN = "bytes_in"
    BYTES_OUT = "bytes_out"
    POSITIONS = "positions"
    """Tokens computed, times the number of blocks."""
    REPORTS_SENT = "reports_sent"
    DIALS = "dials"
    """Attempts to connect to peers that other peers named."""


ResourceLimits = Mapping[Resource, int]
RateLimits = Mapping[Rate, RateLimit]
MIB = 1 << 20
SYSTEM_LIMITS: ResourceLimits = {
    Resource.MEMORY: 256 * MIB,
    Resource.INBOUND_STREAMS: 4096,
    Resource.PENDING_HANDSHAKES: 128,
    Resource.PENDING_ADMISSIONS: 32,
    Resource.ADMISSIONS: 32,
    Resource.PAIRINGS: 4,
    Resource.CALLS: 256,
    Resource.REPORTS: 64,
    Resource.PROBES: 8,
    Resource.RELAY_RESERVATIONS: 64,
    Resource.CIRCUITS: 1024,
    Resource.TRANSFERS: 256,
    Resource.EXPERTS: 64,
    Resource.PENDING_ROUNDS: 256,
}
PEER_LIMITS: ResourceLimits = {
    Resource.MEMORY: 64 * MIB + 64 * 1024,
    Resource.INBOUND_STREAMS: 384,
    Resource.PENDING_HANDSHAKES: 4,
    Resource.PENDING_ADMISSIONS: 2,
    Resource.ADMISSIONS: 2,
    Resource.PAIRINGS: 1,
    Resource.CALLS: 32,
    Resource.REPORTS: 2,
    Resource.PROBES: 1,
    Resource.RELAY_RESERVATIONS: 2,
    Resource.CIRCUITS: 128,
    Resource.RECORDS: 1024,
    Resource.RECORD_BYTES: 8 * MIB,
    Resource.TRANSFERS: 8,
    Resource.EXPERTS: 4,
    Resource.PENDING_ROUNDS: 8,
}
KNOWN_PEER_SHARE: Mapping[Resource, float] = {
    Resource.MEMORY: 0.25,
    Resource.INBOUND_STREAMS: 0.25,
    Resource.CALLS: 0.25,
}
"""Share of a system limit that only known peers may reserve."""
KNOWN_BY = (
    Resource.OUTBOUND_STREAMS,
    Resource.ADMITTED_PEERS,
    Resource.SESSIONS,
    Resource.LINKS,
    Resource.PASSES,
    Resource.ROUNDS,
)
"""A peer is known while it holds any of these."""
SHARED = frozenset(
    {
        Resource.MEMORY,
        Resource.CALLS,
        Resource.REPORTS,
        Resource.PROBES,
        Resource.TRANSFERS,
        Resource.PENDING_ROUNDS,
        Resource.BODIES,
    }
)
"""Resources that no subnet may take whole. Streams and sessions are evicted instead
(``subnets.py``)."""
SYSTEM_FRAMES = RateLimit(4000.0, 8000.0)
PEER_FRAMES = RateLimit(1000.0, 4000.0)
"""Messages per second of one peer. A client of a fast host sends a few hundred a second; a host
with many sessions sends that many for each session."""
PEER_REPORTS = RateLimit(2.0, 1.0)
SYSTEM_DIALS = RateLimit(2.0, 128.0)
PEER_DIALS = RateLimit(0.2, 16.0)
"""Dials per second that one peer causes. Connections between hosts last, so a client causes one
dial for each pair of neighbouring hosts in its chains, not one for each chain."""
