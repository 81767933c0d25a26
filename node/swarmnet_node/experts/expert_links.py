"""The links of a host to peers with experts.

Decides which peers the host tries, which links it keeps, and which experts it reaches.

Any peer may announce anything, so announcements only decide which peers the host tries. It tries a
few at a time: first new peers in random order, then the peers tried longest ago. So a flood of
false announcements delays an honest peer but never keeps it out. An open link stays open whatever
the directory says: the peer itself tells which experts it has, and when it leaves.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from swarmnet_node.experts.expert_choice import MAX_ROUND_TRIP_S
from swarmnet_node.experts.expert_link import ExpertLink, ExpertModel
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.expert_announcements import (
    BlockExperts,
    ExpertBits,
    ExpertHost,
    ExpertSample,
)
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel, persist
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.limits.subnets import Occupancy, Place
from swarmnet_protocols.timing import Timing

_log = logging.getLogger(__name__)

MAX_LINKS = 64
"""Most open links. Beyond this, the host closes a link that no expert depends on, in the most
crowded subnet."""
MAX_TRIED = 32
"""Most links that are being tried. With fewer, many dead peers would delay an honest one. With
more, strangers could make this host dial more of the addresses that they name."""
REFRESH_S = 5.0
"""Seconds between two reads of the directory. While experts are missing: ``MISSING_REFRESH_S``."""
MISSING_REFRESH_S = 1.0


@dataclass(eq=False)
class ExpertLinks:
    """Links to peers with some ``wanted`` experts. Blocks are numbered as in the whole model."""

    transport: Transport
    directory: Directory
    model: ExpertModel
    wanted: dict[int, ExpertBits]
    """The experts that this host lacks, by block. Code that loads an expert removes it here."""
    timing: Timing
    rng: random.Random
    max_round_trip_s: float = MAX_ROUND_TRIP_S

    def __post_init__(self) -> None:
        self.has_looked = False
        """True if the directory has been read."""
        self.changes = 0
        """Number of link changes since the start."""
        self._loop = asyncio.get_running_loop()
        self._sample = ExpertSample(self.directory, self.model.manifest)
        self._links: dict[PeerId, ExpertLink] = {}
        self._keeping: dict[PeerId, asyncio.Task[NoReturn]] = {}
        self._tried_at: dict[PeerId, float] = {}
        """Loop time of the last try of each known peer or, for a peer that must rest, the end of
        its rest."""
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ExpertLinks"]:
        """Find peers and keep links to them while the context is open."""
        finding = asyncio.create_task(persist("the search for experts", self._find), name="find experts")
        try:
            yield self
        finally:
            await cancel(finding, *self._keeping.values())

    def __getitem__(self, peer: PeerId) -> ExpertLink:
        return self._links[peer]

    def __contains__(self, peer: object) -> bool:
        return peer in self._links

    @property
    def every(self) -> Sequence[ExpertLink]:
        """All links, open or not."""
        return tuple(self._links.values())

    @property
    def far_peers(self) -> int:
        """The number of peers with wanted experts that are farther away than the host allows."""
        return sum(link.is_far for link in self._links.values())

    def with_expert(self, block: int, expert: int) -> list[ExpertLink]:
        """Return the open links to peers that have an expert."""
        return [link for link in self._links.values() if link.is_open and link.has(block, expert)]

    def missing(self) -> BlockExperts:
        """Return the experts that neither this host nor a peer within reach has."""
        hosted = [link.experts for link in self._links.values() if link.is_open]
        found = {
            block: experts - _union(each.get(block) for each in hosted)
            for block, experts in self.wanted.items()
        }
        return {block: experts for block, experts in found.items() if experts}

    async def change(self, seen: int) -> None:
        """Wait until the number of changes differs from ``seen``."""
        while self.changes == seen:
            self._changed.clear()
            await self._changed.wait()

    async def settle(self, within_s: float) -> None:
        """Wait at most ``within_s`` until the directory has been read and every tried peer has
        answered or failed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not (self.has_looked and all(each.is_open or each.is_resting for each in self.every)):
                    await self.change(self.changes)

    def _note_change(self) -> None:
        self.changes += 1
        self._changed.set()

    # ---- peers that are tried -------------------------------------------------------------------

    async def _find(self) -> NoReturn:
        while True:
            try:
                hosts = {host.peer: host for host in await self._sample.refresh() if host.is_online}
                hosts.pop(self.transport.peer_id, None)
                await self._update(hosts)
            except SwarmnetError as error:  # the links stay
                _log.info("cannot look for peers with experts: %s", error)
            every_s = MISSING_REFRESH_S if self.missing() else REFRESH_S
            await asyncio.sleep(every_s * self.rng.uniform(0.8, 1.2))

    async def _update(self, hosts: Mapping[PeerId, ExpertHost]) -> None:
        """Try announced ``hosts``. Drop peers that neither announce themselves nor answer."""
        self.has_looked = True
        for peer in self._links.keys() & hosts.keys():
            self._links[peer].host = hosts[peer]
        for peer in [peer for peer, link in self._links.items() if peer not in hosts and not link.is_open]:
            await self._drop(peer)
        while (surplus := self._surplus()) is not None:
            await self._drop(surplus.host.peer)
        fresh = self._fresh(hosts)
        resting = sorted(
            (link for link in self._links.values() if link.is_resting),
            key=lambda link: (link.has_answered, self._tried_at.get(link.host.peer, 0.0)),
        )
        # Peers that have been tried give way to new ones.
        for link in resting[: max(0, len(fresh) - self._room())]:
            await self._drop(link.host.peer)
        for peer in fresh[: self._room()]:
            self._try(hosts[peer])
        self._note_change()

    def _fresh(self, hosts: Mapping[PeerId, ExpertHost]) -> list[PeerId]:
        """Return the peers worth a new link, in the order to try them."""
        self._tried_at = {peer: at for peer, at in self._tried_at.items() if peer in hosts}
        if sum(link.is_open for link in self._links.values()) >= MAX_LINKS and not self.missing():
            return []
        peers = [peer for peer, host in hosts.items() if peer not in self._links and self._is_wanted(host)]
        return in_turn(peers, self._tried_at, self._loop.time(), self.rng)

    def _room(self) -> int:
        """Return how many more links may be tried now."""
        return max(0, MAX_TRIED - sum(not link.is_open for link in self._links.values()))

    def _try(self, host: ExpertHost) -> None:
        link = ExpertLink(
            host,
            self.model,
            self.transport,
            self.timing,
            max_round_trip_s=self.max_round_trip_s,
            changed=self._note_change,
        )
        self._links[host.peer] = link
        self._tried_at[host.peer] = self._loop.time()
        self._keeping[host.peer] = asyncio.create_task(link.keep_open(), name=f"experts of {host.peer}")

    async def _drop(self, peer: PeerId) -> None:
        if (link := self._links.pop(peer, None)) is not None:
            self._tried_at[peer] = max(self._loop.time(), link.rests_until)
            await cancel(self._keeping.pop(peer))

    def _is_wanted(self, host: ExpertHost) -> bool:
        """Return whether a peer has experts that this host lacks, in the same weight format. Tokens
        must not depend on which peer computes."""
        has_same_weights = host.precision.partition("/")[0] == self.model.precision.partition("/")[0]
        return has_same_weights and any(
            block in self.wanted and bool(self.wanted[block] & experts)
            for block, experts in host.experts.items()
        )

    def _surplus(self) -> ExpertLink | None:
        """Return the open link to close when there are more than ``MAX_LINKS``. None if each is
        needed."""
        links = [link for link in self._links.values() if link.is_open]
        if len(links) <= MAX_LINKS:
            return None
        alone = only_holders(links, self.wanted)
        return Occupancy(Place(link.subnet, link.host.peer, 1, None, link) for link in links).victim(
            lambda link: not link.is_asked and link not in alone
        )


def in_turn(
    peers: Collection[PeerId], tried_at: Mapping[PeerId, float], now: float, rng: random.Random
) -> list[PeerId]:
    """Return the order to try peers: new ones at random, then the peers tried longest ago. Pure.

    Peers whose next try is later than ``now`` are left out.
    """
    shuffled = rng.sample(sorted(peers), len(peers))
    return sorted(
        (peer for peer in shuffled if tried_at.get(peer, 0.0) <= now),
        key=lambda peer: tried_at.get(peer, -1.0),
    )


def only_holders(links: Collection[ExpertLink], wanted: Mapping[int, ExpertBits]) -> set[ExpertLink]:
    """Return the links to peers that alone have one of the ``wanted`` experts."""
    found: set[ExpertLink] = set()
    for block, needed in wanted.items():
        once, twice = ExpertBits(), ExpertBits()
        for link in links:
            held = needed & link.experts.get(block, ExpertBits())
            once, twice = once | held, twice | (once & held)
        if alone := once - twice:
            found.update(link for link in links if alone & link.experts.get(block, ExpertBits()))
    return found


def _union(sets: Iterable[Collection[int] | None]) -> ExpertBits:
    found = ExpertBits()
    for each in sets:
        if each is not None:
            found |= ExpertBits.of(each)
    return found
