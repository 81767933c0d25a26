"""A host as other peers know it: the facts that it announced, checked and bounded.

``directory/host_announcements.py`` makes a ``HostInfo`` from the bytes that arrive. The search for
chains, the choice of blocks, pings and the dashboard all use it. Each fact is only a claim of the
host. ``chain_view.credible`` limits how much announced speeds and loads count. ``sightings.py``
counts a host only once it has answered.
"""

import math
from dataclasses import dataclass, field

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.coordinates import Coordinate

INCOMPATIBLE = "incompatible"
"""State of a host that speaks another version of the protocol. This peer cannot use it."""
EXACT = "exact-1"
"""Name of the arithmetic that gives the same bits on every machine: from the same weights and
inputs, two hosts that announce it compute equal outputs. Whoever changes what it computes gives it
another number."""
TORCH = "torch"
"""Name of torch's arithmetic, whose last bits differ between machines and batches."""


@dataclass(frozen=True)
class HostInfo:
    """A host with the blocks [start, end). Both are 0 for a host that serves only routed
    experts."""

    peer: PeerId
    start: int
    end: int
    step_s: float
    """Seconds for one token through all its blocks; 0 until the host has measured them."""
    addresses: tuple[str, ...] = ()
    state: str = "online"
    """``choosing``, ``joining``, ``online``, ``leaving``, ``paused`` or ``incompatible``."""
    manifest: bytes = field(default=b"", compare=False)
    """SHA-256 of the model's manifest."""
    is_open: bool = True
    """True if other peers can dial it, as far as is known."""
    is_symmetric: bool = False
    """True if the host is behind a router that allows no hole punching."""
    precision: str = ""
    """Precision of its computation, as in ``HostRecord``; empty if unknown."""
    arithmetic: str = ""
    """``EXACT`` or ``TORCH``; empty if unknown."""
    coordinate: Coordinate | None = field(default=None, compare=False)
    """Its network coordinate; None if unknown."""
    room: float = field(default=math.inf, compare=False)
    """Positions of one client that fit into its KV caches, in all its blocks; infinite if
    unknown."""
    version: str = field(default="", compare=False)
    """Version of its software, for people."""
    public_name: str = field(default="", compare=False)
    """The name that its owner chose; empty if none."""
    sessions: int = field(default=0, compare=False)
    """Open sessions."""
    cache_bytes_free: int = field(default=0, compare=False)
    next_span: tuple[int, int] | None = field(default=None, compare=False)
    """Blocks that the host is about to move to; None unless it moves."""
    stays: bool = field(default=False, compare=False)
    """True if its owner has fixed its blocks."""
    may_switch: bool = field(default=False, compare=False)
    """True if it may switch to another model of the swarm."""
    load: float = field(default=0.0, compare=False)
    """Share of the last minutes that it spent computing, in [0, 1]."""
    missing_experts: str = field(default="", compare=False)
    """Routed experts that the host waits for, as ``block:experts``; ends with ``…`` if there are
    more."""
    sequence: int = field(default=0, compare=False)
    """Grows with every announcement of the host."""
    expires_at: float = field(default=math.inf, compare=False)
    """Unix time at which the announcement expires."""
    record: bytes = field(default=b"", compare=False, repr=False)
    """The sealed announcement."""
    is_hop: bool = False
    """True if this is an open hop of the chain that a search repairs. The search keeps such a hop
    with all its blocks, or replaces it."""

    @property
    def online(self) -> bool:
        return self.state == "online"

    @property
    def blocks_per_s(self) -> float:
        """0 if the host has not measured its steps, or has experts only."""
        return (self.end - self.start) / self.step_s if self.step_s > 0 else 0.0
