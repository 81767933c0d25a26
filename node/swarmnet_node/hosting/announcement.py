"""A node's announcement in the directory, which clients read to build chains and joining nodes to choose their blocks.

A node publishes one in each of its states:

1. ``choosing``: the blocks that it intends to take, so that nodes which join at the same time take others.
2. ``joining``: the blocks that it is loading.
3. ``online``: clients may open sessions. Published again every ``Timing.announce_s``, because records expire.
4. ``leaving`` and ``paused``: clients must not choose this host.

``directory/host_announcements.py`` is the reader's side: it decides which announcements are plausible.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from swarmnet_protocols.directory.expert_announcements import BlockExperts, format_experts
from swarmnet_protocols.directory.host_announcements import PROTOCOL, listed
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net import Reach, ReachKind
from swarmnet_protocols.routing.coordinates import Coordinate
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import records_pb2 as pb

if TYPE_CHECKING:
    from swarmnet_node.engine.engine import Engine


MAX_EXPERTS_CHARS = 100
"""Most characters of the missing experts in an announcement; more are cut."""


@dataclass(frozen=True)
class Announcement:
    """The announcement of a node about the blocks ``span`` [start, end) that it hosts, or is about to host."""

    manifest: bytes
    span: tuple[int, int]
    state: "pb.HostState"
    addresses: Sequence[str]
    """Multiaddrs of the node. At most as many as readers accept are announced, loopback ones last."""
    step_s: float
    """Measured seconds for one token through these blocks; 0: not measured yet."""
    sessions: int
    version: str
    public_name: str
    reach: Reach = field(default_factory=Reach)
    next_span: tuple[int, int] | None = None
    """The blocks to which it is about to move, if it moves."""
    stays: bool = False
    """Whether its owner has fixed its blocks."""
    may_switch: bool = False
    """Whether it may switch to another model of the swarm."""
    coordinate: Coordinate | None = None
    """The node's network coordinate; None: not known yet."""
    missing_experts: BlockExperts = field(default_factory=dict)
    """The routed experts for which it waits."""

    def record(self, engine: "Engine | None") -> pb.HostRecord:
        """The record to publish. ``engine``: None before the blocks are loaded."""
        return pb.HostRecord(
            manifest=self.manifest,
            start=self.span[0],
            end=self.span[1],
            state=self.state,
            version=self.version,
            protocol=PROTOCOL,
            step_s=self.step_s,
            token_s=engine.token_s if engine else 0.0,
            cache_bytes_free=max(0, engine.max_cache_bytes - engine.cache_bytes) if engine else 0,
            room=engine.room if engine else 0,
            sessions=self.sessions,
            addresses=listed(sorted(self.addresses, key=_is_loopback)),
            public_name=self.public_name,
            nat=_nat(self.reach),
            precision=engine.stage.precision if engine else "",
            next_start=self.next_span[0] if self.next_span else 0,
            next_end=self.next_span[1] if self.next_span else 0,
            stays=self.stays,
            may_switch=self.may_switch,
            load=engine.load.at(engine.stopwatch()) if engine else 0.0,
            coordinate=self.coordinate.numbers() if self.coordinate else (),
            missing_experts=_shortened(format_experts(self.missing_experts)),
        )


async def keep_announced(
    announce: Callable[[], Awaitable[None]],
    facts: Callable[[], object],
    rng: random.Random,
    timing: Timing,
) -> NoReturn:
    """Announce every ``Timing.announce_s``, and at once when ``facts``, such as the addresses of the node, change; until cancelled."""
    clock = asyncio.get_running_loop().time
    while True:
        announced = facts()
        announce_at = clock() + timing.announce_s * rng.uniform(0.8, 1.0)
        while (left_s := announce_at - clock()) > 0:
            await asyncio.sleep(min(left_s, timing.address_check_s))
            if facts() != announced:
                break
        with contextlib.suppress(SwarmnetError):  # the record outlives a missed announcement
            await announce()


def _shortened(experts: str) -> str:
    return experts if len(experts) <= MAX_EXPERTS_CHARS else experts[:MAX_EXPERTS_CHARS] + "…"


def _nat(reach: Reach) -> "pb.Nat":
    if reach.kind in (ReachKind.OPEN, ReachKind.FORWARDED):
        return pb.NAT_NONE
    return {"cone": pb.NAT_CONE, "symmetric": pb.NAT_SYMMETRIC}.get(reach.nat, pb.NAT_UNKNOWN)


def _is_loopback(address: str) -> bool:
    return "/127." in address or "/::1/" in address
