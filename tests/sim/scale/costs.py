"""Messages and bytes that the directory costs a host and a client, computed from the sizes and
periods of the real code.

Only searches of the DHT for the peers nearest to a key grow with the swarm: with Kademlia, by one
call for each doubling at most.
"""

import math

from swarmnet_protocols.directory.host_announcements import FIRST_SHARDS, REDRAW_S, SHARDS, WANTED
from swarmnet_protocols.directory.records import KEY_SALTS
from swarmnet_protocols.routing.relocation import LOOK_S
from swarmnet_protocols.timing import Timing

TIMING = Timing()
REPLICAS, FOUND_S = 5, 60.0
"""As in ``directory/dht/replication.py``, whose import takes seconds."""
RECORD_BYTES = 606
"""A sealed announcement with three addresses, as ``tests.bench.directory`` has it."""
CALL_BYTES = 150
"""Bytes of a call and its answer without records: frames and contacts."""


def traffic_per_node(nodes: int) -> tuple[float, float]:
    """Messages and bytes a second that a host sends, and so receives, for the directory: it
    announces itself, and looks whether it should move."""
    stores = KEY_SALTS * REPLICAS / TIMING.announce_s
    reads = shards_read(nodes) / LOOK_S
    search = math.log2(max(nodes, 2))
    searches = search * (KEY_SALTS / FOUND_S + shards_read(nodes) / REDRAW_S)
    calls = stores + reads + searches
    size = calls * CALL_BYTES + stores * RECORD_BYTES + client_refresh_bytes(nodes) / LOOK_S
    return calls, size


def shards_read(nodes: int) -> int:
    """Shards that one refresh reads."""
    return min(SHARDS, max(FIRST_SHARDS, math.ceil(WANTED * SHARDS / max(nodes, 1))))


def client_refresh_bytes(nodes: int) -> int:
    """Bytes of announcements that a client reads at each refresh."""
    return min(nodes, WANTED) * RECORD_BYTES
