"""What this peer knows of a host: the facts that the host announced, checked and bounded.

``directory/host_announcements.py`` makes a ``HostInfo`` where the bytes arrive. The search for
chains, the choice of blocks, pings and the dashboard use the same one. A fact is a claim of the
host, and nothing follows from it alone: ``chain_search.credible`` bounds what speeds and loads are
worth, and ``sightings.py`` counts hosts once they have answered.
"""

import math
from dataclasses import dataclass, field

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.coordinates import Coordinate

INCOMPATIBLE = "incompatible"
"""The state of a host that speaks another version of the protocol, so that this peer cannot use it."""


@dataclass(frozen=True)
class HostInfo:
    """A host with the blocks [start, end). A host of routed experts only has none: both are 0."""

    peer: PeerId
    start: int
    end: int
    step_s: float
    """Seconds for one token through all of its blocks; 0 if it has not measured them."""
    addresses: tuple[str, ...] = ()
    state: str = "online"
    """``choosing``, ``joining``, ``online``, ``leaving``, ``paused`` or ``incompatible``."""
    manifest: bytes = field(default=b"", compare=False)
    """SHA-256 that names the model."""
    is_open: bool = True
    """Whether other peers can dial it, as far as is known."""
    is_symmetric: bool = False
    """Whether it is behind a router through which no hole is punched."""
    precision: str = ""
    """The precision in which it computes, as in ``HostRecord``; empty if unknown."""
    coordinate: Coordinate | None = field(default=None, compare=False)
    """Its network coordinate; None if unknown."""
    room: float = field(default=math.inf, compare=False)
    """Positions of one client for which it has KV caches of all its blocks; infinite if unknown."""
    version: str = field(default="", compare=False)
    """Version of its software, for people."""
    public_name: str = field(default="", compare=False)
    """The name that its owner chose; empty if none."""
    sessions: int = field(default=0, compare=False)
    """Open sessions."""
    cache_bytes_free: int = field(default=0, compare=False)
    next_span: tuple[int, int] | None = field(default=None, compare=False)
    """The blocks to which it is about to move; None unless it moves."""
    stays: bool = field(default=False, compare=False)
    """Whether its owner has fixed its blocks."""
    may_switch: bool = field(default=False, compare=False)
    """Whether it may switch to another model of the swarm."""
    load: float = field(default=0.0, compare=False)
    """Share of the last minutes in which it computed."""
    missing_experts: str = field(default="", compare=False)
    """The routed experts for which it waits, as ``block:experts``, with ``…`` if there are more."""
    sequence: int = field(default=0, compare=False)
    """Grows with every announcement of the host."""
    expires_at: float = field(default=math.inf, compare=False)
    """Unix time at which the announcement expires."""
    record: bytes = field(default=b"", compare=False, repr=False)
    """The sealed announcement."""
    is_hop: bool = False
    """Whether this stands for an open hop in a search. It runs all of its blocks, or it does not
    stay."""

    @property
    def online(self) -> bool:
        return self.state == "online"

    @property
    def block_s(self) -> float:
        return self.step_s / (self.end - self.start)
