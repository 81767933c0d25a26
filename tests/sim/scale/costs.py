"""What the directory costs a node and a client: messages and bytes, from the sizes and periods of the real code."""

import math

from swarmnet_protocols.timing import Timing

TIMING = Timing()
REPLICAS, FOUND_S = 5, 60.0
"""As in ``directory/dht_replication.py``, whose import takes seconds."""
KEYS = 3
"""DHT keys of a topic."""
RECORD_BYTES = 600
"""A sealed announcement with three addresses."""
HEADER_BYTES = 150
"""Of a call and its answer: their frames and the contacts that they carry."""
SAMPLED = 105
"""Records of one read."""


def traffic_per_node(nodes: int) -> tuple[float, float]:
    """Messages and bytes that a host sends for the directory, a second."""
    replicas = KEYS * REPLICAS
    searched = KEYS * math.log2(max(nodes, 2))  # calls until the nearest peers of each key are known
    calls = replicas / TIMING.announce_s + searched / FOUND_S
    return calls, calls * HEADER_BYTES + replicas * RECORD_BYTES / TIMING.announce_s


def client_refresh_bytes(nodes: int, blocks: int) -> int:
    """Bytes of announcements that a client reads at each refresh."""
    return min(nodes, SAMPLED) * RECORD_BYTES
