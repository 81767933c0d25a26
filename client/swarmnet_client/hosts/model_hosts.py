"""The hosts of one model as a client knows them, and how it chooses a route among them.

A client knows of each host:

1. Its blocks, addresses and claimed speed: from its announcement in the directory, read every
   ``refresh_s`` (:meth:`ModelHosts.refresh`).
2. Its delay and load: from pings (:class:`PingMonitor`).
3. Its measured speed: from the decode steps of chains that it was part of (:class:`Speeds`).
4. Whether it is excluded: from failures, audits, and links that broke (:class:`Exclusions`).
5. Whether it is one of the client's entry guards (:class:`EntryGuards`), and whether its user
   trusts it (:class:`Trust`).

:meth:`ModelHosts.route` collects these in a :class:`View`. There
``routing.chain_search.find_chain`` finds the chain with the least estimated time per token. Chains
report the failures, answers and step times of their hosts.

All chains of a client share one ``ModelHosts``. So it also holds the transport with its count of
bytes, and the budget of audits.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from swarmnet_client.audit.plan import Ledger
from swarmnet_client.hosts.entry_guards import EntryGuards
from swarmnet_client.hosts.exclusions import Exclusions, shortest_wait_s
from swarmnet_client.hosts.pings import PingMonitor
from swarmnet_client.hosts.traffic import CountingTransport, Traffic
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.host_announcements import HostSample, read_hosts
from swarmnet_protocols.errors import HostsOverloaded, NoRoom, NoRoute, SwarmnetError
from swarmnet_protocols.fetching.peers import SwarmPeers
from swarmnet_protocols.joining.network import Network, Trust, connect
from swarmnet_protocols.machine.aio import in_background, loop_time, persist
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.reachability.dial_back import advise_on_clock
from swarmnet_protocols.routing.chain_search import failed_links, find_chain, uncovered
from swarmnet_protocols.routing.chain_view import Hop, View, credible, explain_choice
from swarmnet_protocols.routing.host_info import INCOMPATIBLE, HostInfo
from swarmnet_protocols.routing.measured_speed import Speeds
from swarmnet_protocols.routing.spans import overlap
from swarmnet_protocols.timing import Timing

_log = logging.getLogger(__name__)

EXPLORE = 0.05
"""Share of routes that treat an unmeasured host as fast as the fastest, so that it gets
measured."""

MISSING_S = 1.0
"""Seconds between two looks into the directory while a block has no host. With more, a client would
refuse work for longer after a host has returned; with fewer, it would ask peers more often."""


class ModelHosts:
    """The hosts of one model, and the routes over them."""

    def __init__(  # noqa: PLR0913 - a swarm, a model, and which hosts to prefer
        self,
        transport: Transport,
        directory: Directory,
        manifest: bytes,
        rng: random.Random,
        timing: Timing,
        trust: Trust = Trust(),  # noqa: B008 - it is frozen
        *,
        blocks: int = 0,
        check_clock: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """Session ids are drawn from ``rng``, which outside of simulations is a ``SystemRandom``.

        ``blocks``: number of blocks of the model. While one of them has no known host, the
        directory is read every ``MISSING_S``.

        ``check_clock`` is called when no host is known. It asks peers whether this machine's clock
        is right, and returns advice or "".
        """
        self._trust = trust
        path = None
        if trust.guards_folder is not None:
            name = f"{directory.swarm.hex()[:32]}-{manifest.hex()[:32]}.json"
            path = trust.guards_folder / name
        self._guards = EntryGuards(path, rng, wall_clock)
        self._speeds = Speeds()
        self.traffic = Traffic()
        self.transport: Transport = CountingTransport(transport, self.traffic)
        self.timing = timing
        self.manifest = manifest
        self.directory = directory
        self._announced = HostSample(directory, manifest, rng)
        self._sought: tuple[int, int] | None = None
        """Blocks [start, end) to look for at the next refresh, because some of them have no known
        host."""
        self._rng = rng
        self._hosts: dict[PeerId, HostInfo] = {}
        self._rooms: dict[tuple[int, int], float] = {}
        """Cached results of ``room`` for these hosts, because every step asks."""
        self._exclusions = Exclusions()
        self._pings = PingMonitor(self.transport, timing, rng, self.failed)
        self.ledger = Ledger(rng)
        """Audit budget of all chains."""
        self._blocks = blocks
        self._check_clock = check_clock
        self._clock_advice = ""
        self._refreshing = asyncio.Lock()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator["ModelHosts"]:
        """Read hosts from the directory and ping them while the context is open."""
        try:
            async with in_background(persist("the watch over hosts", self._watch)):
                yield self
        finally:
            await self._pings.close()

    @classmethod
    @asynccontextmanager
    async def connect(cls, local: LocalModel, network: Network) -> AsyncIterator["ModelHosts"]:
        """Connect to the swarm of ``network`` as a client, and watch the hosts of ``local``.

        ``local`` then also takes missing weights from them. Raises ``ConfigError`` if the swarm is
        for other models, and what ``connect`` raises.
        """
        network.rules.check_model(local.name, local.manifest.hash)
        async with (
            connect(network, client_mode=True) as connection,
            cls.over(connection, local, network) as hosts,
        ):
            yield hosts

    @classmethod
    @asynccontextmanager
    async def over(
        cls, connection: tuple[Transport, Directory], local: LocalModel, network: Network
    ) -> AsyncIterator["ModelHosts"]:
        """Watch the hosts of ``local`` over an open connection, as ``connect``."""
        transport, directory = connection
        manifest = local.manifest.hash
        async with (
            cls(
                transport,
                directory,
                manifest,
                random.SystemRandom(),
                Timing(),
                network.trust,
                blocks=local.manifest.blocks,
                check_clock=lambda: advise_on_clock(transport, (*network.peer.bootstrap, *network.known)),
            ).watching() as hosts,
        ):
            peers = SwarmPeers(network.rules.pieces_hashes, Timing(), network.rules.models)
            peers.attach(transport, partial(read_hosts, directory))
            local.parts.peers = peers
            try:
                yield hosts
            finally:
                peers.detach()

    @property
    def swarm_id(self) -> bytes:
        """Id of the swarm, 32 bytes."""
        return self.directory.swarm

    def new_session(self) -> bytes:
        """Return a random session id. The id is secret, because a host that knows it may link to
        the session."""
        return self._rng.randbytes(16)

    # ---- hosts that are known -------------------------------------------------------------------

    @property
    def known(self) -> Sequence[HostInfo]:
        """The known hosts that this client may use."""
        return tuple(self._hosts.values())

    def span_of(self, peer: PeerId) -> tuple[int, int] | None:
        """Return the blocks [start, end) that a host announces; None if it is not known."""
        info = self._hosts.get(peer)
        return (info.start, info.end) if info else None

    def record_of(self, peer: PeerId) -> bytes:
        """Return the newest signed announcement of a host; empty if none is known."""
        info = self._hosts.get(peer)
        return info.record if info else b""

    @property
    def banned(self) -> Mapping[PeerId, float]:
        """Hosts that are banned now, the oldest failure first, each with its time."""
        return self._exclusions.bans.at(loop_time())

    async def refresh(self) -> None:
        """Read the directory now. Callers at the same time share one look-up.

        If the directory is out of reach, the known hosts stay in use.
        """
        if self._refreshing.locked():
            async with self._refreshing:
                return
        async with self._refreshing:
            sought, self._sought = self._sought, None
            found = await self._announced.refresh()
            if sought is not None:
                found = await self._announced.refresh(blocks=sought)
            if found:
                self._rooms.clear()
                now, allowed = loop_time(), self._trust.hosts
                self._hosts = {
                    each.peer: each
                    for each in found
                    if each.online
                    and (not allowed or each.peer in allowed)
                    and not self._exclusions.is_convicted(each.peer, now)
                }
            if self._check_clock is not None and not self._hosts:
                self._clock_advice = await self._check_clock()
            view = self._view()
            self._pings.follow(self._hosts, lambda host: view.delay_to(host.peer) + host.step_s)

    # ---- routes ---------------------------------------------------------------------------------

    def route(
        self,
        span: tuple[int, int],
        *,
        ends: tuple[PeerId | None, PeerId | None] = (None, None),
        precision: str | None = None,
        avoid: frozenset[PeerId] = frozenset(),
        continues: bool = False,
        hops: Sequence[Hop] = (),
    ) -> list[Hop]:
        """Return the hosts of a chain over the blocks of ``span``, if possible of ``precision``.

        - ``ends``: the peer that sends to the first hop, and the peer that the last hop sends to;
          None for the client.
        - ``avoid``: hosts not to use.
        - ``continues``: the hosts are to continue an answer, and may have refused new work.
        - ``hops``: open hops, which stay where they can.

        Raises ``NoRoute``, or ``HostsOverloaded`` if the only missing hosts refused work because of
        their load.
        """
        view = self._view(explore=self._rng.random() < EXPLORE)
        excluded = avoid | self._exclusions.overloaded(loop_time(), continues=continues).keys()
        hosts = tuple(host for host in view.hosts if host.peer not in excluded)
        view = replace(view, hosts=hosts, hops=hops)
        try:
            found = find_chain(view, span, self._rng, source=ends[0], sink=ends[1], precision=precision)
        except NoRoute as error:
            # The directory may have hosts of these blocks that the sample lacks.
            self._sought = error.missing[0][0], error.missing[-1][1]
            raise self.no_route(error.missing, avoid=avoid, continues=continues) from error
        if _log.isEnabledFor(logging.DEBUG):
            fields = explain_choice(view, found, loop_time()) | {"left_out": sorted(excluded)}
            _log.debug("a route is chosen", extra=fields)
        return found

    def is_doubtful(self, route: Sequence[Hop], opened: Collection[Hop]) -> bool:
        """Return whether ``route`` uses a recently failed host, or neighbours that recently did not
        reach each other.

        Hops in ``opened`` do not count.
        """
        separated = self._exclusions.separated(loop_time())
        return bool(
            self.banned.keys() & {hop.peer for hop in route if hop not in opened}
            or failed_links([hop.peer for hop in route], separated)
        )

    def no_route(
        self,
        missing: Sequence[tuple[int, int]],
        *,
        avoid: frozenset[PeerId] = frozenset(),
        continues: bool = False,
    ) -> NoRoute:
        """Return the error for blocks without a usable host. Arguments are as for ``route``.

        ``HostsOverloaded`` if overloaded hosts have all of these blocks, else ``NoRoute``.
        """
        hosts = [host for host in self.known if host.peer not in avoid]
        waits_s = self._exclusions.overloaded(loop_time(), continues=continues)
        wait_s = shortest_wait_s(missing, hosts, waits_s)
        if wait_s is not None:
            return HostsOverloaded(missing, wait_s)
        hint = "" if self._hosts else self._clock_advice
        if not uncovered([each for each in self._announced.known if each.state == INCOMPATIBLE], missing[0]):
            hint = "hosts of these blocks run another version of swarmnet: install the version that they run"
        trusted = self._trust.hosts
        waiting = (
            each.missing_experts
            for each in self._announced.known
            if each.missing_experts
            and (not trusted or each.peer in trusted)
            and any(overlap(each, span) for span in missing)
        )
        return NoRoute(missing, hint=hint, among_trusted=bool(trusted), missing_experts=next(waiting, ""))

    def room(self, span: tuple[int, int]) -> float:
        """Return how many positions of this client fit into a chain over ``span``, by what hosts
        announce.

        Infinite while some block has no known host.
        """
        if span not in self._rooms:
            self._rooms[span] = min(
                max((host.room for host in self.known if host.start <= block < host.end), default=math.inf)
                for block in range(*span)
            )
        return self._rooms[span]

    def check_room(self, positions: int, span: tuple[int, int]) -> None:
        """Raise ``NoRoom`` if all hosts of some block of ``span`` announce room for fewer
        ``positions``."""
        if positions > (room := self.room(span)):
            raise NoRoom(positions, int(room))

    def without_room(self, positions: int) -> frozenset[PeerId]:
        """Return the hosts that announce less room than ``positions``."""
        return frozenset(host.peer for host in self.known if host.room < positions)

    def can_replace(self, hop: Hop) -> bool:
        """Return whether other hosts have all blocks of ``hop``."""
        others = [host for host in self._hosts.values() if host.peer not in {hop.peer, *self.banned}]
        return not uncovered(others, (hop.start, hop.end))

    # ---- what chains report ---------------------------------------------------------------------

    def measured(self, chain: Sequence[Hop], step_s: float) -> None:
        """Note that a decode step took ``step_s`` through ``chain``, from the client and back."""
        now = loop_time()
        self._speeds.measured(credible(self._view()), chain, step_s, now)

    def chain_opened(self, first: PeerId, last: PeerId) -> None:
        """Note that a chain with these first and last hops was opened."""
        if not self._trust.first_and_last:
            self._guards.used(first, last, self._hosts)

    def failed(self, peer: PeerId) -> None:
        """Ban a host for a while, because it failed."""
        self._exclusions.bans.failed(peer, loop_time())

    def answered(self, peer: PeerId) -> None:
        """Lift the ban of a host that answered."""
        self._exclusions.bans.served(peer)

    def overloaded(self, peer: PeerId, wait_s: float, *, continues: bool = False) -> None:
        """Do not use a host for ``wait_s`` for the kind of work that it refused.

        The work was a new answer or, with ``continues``, the rest of an answer.
        """
        self._exclusions.refused(peer, wait_s, loop_time(), continues=continues)

    def separate(self, one: PeerId, other: PeerId) -> bool:
        """Keep two hosts apart for a while: both are alive, but ``one`` reports that it cannot
        reach ``other``.

        Returns whether a third host has reported the same of ``other``.
        """
        return self._exclusions.separate(one, other, loop_time())

    def convict(self, peer: PeerId) -> None:
        """Exclude a host that gave wrong outputs, even if no other host has its blocks."""
        self._exclusions.convict(peer, loop_time())
        self._hosts.pop(peer, None)
        self._rooms.clear()

    # ---- inside ---------------------------------------------------------------------------------

    def _view(self, *, explore: bool = False) -> View:
        now = loop_time()
        return View(
            tuple(self._hosts.values()),
            self._pings.delay_s,
            self._pings.queue_s,
            self.banned,
            self._exclusions.separated(now),
            block_s=self._speeds.at(self._hosts, now),
            guards=self._trust.first_and_last or self._guards.peers(),
            relayed=frozenset(peer for peer, host in self._hosts.items() if not host.is_open),
            symmetric=frozenset(peer for peer, host in self._hosts.items() if host.is_symmetric),
            reporters=self._exclusions.reporters(now),
            coordinates={
                peer: host.coordinate for peer, host in self._hosts.items() if host.coordinate is not None
            }
            | self._pings.coordinates,
            own=self._pings.own.coordinate,
            cache_free=self._pings.cache_free,
            busy=self._pings.busy,
            explore=explore,
        )

    async def _watch(self) -> None:
        while True:
            # The directory may answer later; the known hosts stay in use.
            with contextlib.suppress(SwarmnetError):
                await self.refresh()
            is_whole = not uncovered(list(self._hosts.values()), (0, self._blocks))
            await asyncio.sleep(self.timing.refresh_s if is_whole else MISSING_S)
