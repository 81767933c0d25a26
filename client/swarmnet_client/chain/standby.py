"""Standbys: hosts that prepare to replace a hop while that hop still computes.

A standby is a row of sessions, on one or more hosts, that together have the blocks of a hop. Its
stages:

1. **Opened.** Its sessions are open, and linked one to the next.
2. **Fed.** The sender (the previous hop, or the client) also sends its steps to the standby
   (``Tee``): first its log, then each new step.
3. **Ready.** It has computed all but the latest steps.
4. **Linked.** If the hop is about to leave, the standby links to the next hop, which from then on
   takes its steps from the standby. The last hop's standby answers the client.
5. **Installed.** The standby is the hop now, and the sender keeps only its second link
   (:class:`ChainSupervisor`). No step has waited.

If the hop fails, the standby is installed at once, from stage 2 on. It lacks a few steps, not the
whole log.

Every hop that leaves has a standby. So has every hop of a client that asks for standbys. Other hops
get a spare one once a replay would take long. A spare is on a single host without other work. That
host may end the spare when other work comes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnet_client.chain.hops import ChainSpec, LiveHop, Sender, SessionRole
from swarmnet_client.chain.links import ChainLinks
from swarmnet_client.chain.sessions import HopSessions
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import ConfigError, NoRoute, SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.wire import refusal_pb2

_log = logging.getLogger(__name__)

LATE_STEPS = 2
"""Steps that a standby may lack when it takes over from a leaving hop.

The number is known from heartbeats, so it is as old as the last one.
"""
ATTEMPTS = 3
"""Number of standbys of a leaving hop that may fail. After that, the hop is replaced without a
standby."""
SPARE_POSITIONS = 512
"""The hops of a session get spare standbys once it has this many positions. Fewer positions are
replayed within about a second."""


@dataclass(eq=False)
class Standby:
    """The sessions that will replace ``replaced``, in order, and the second link of ``sender`` to
    them.
    """

    replaced: LiveHop
    sender: Sender
    hops: list[LiveHop]
    epoch: int
    """Epoch of the link that feeds it."""
    feeding: asyncio.Task[None] | None = None
    """The client's own link to it, if the client is the sender."""
    is_linked: bool = False
    """True if the next hop takes its steps."""

    @property
    def is_linking(self) -> bool:
        """True if the last hop of this standby was told where to send its outputs."""
        return not self.hops[-1].stands_by

    def repeats(self, after: LiveHop | None) -> bool:
        """Return whether the last hop of this standby could not link to the hop ``after`` it
        because both are on the same host."""
        return after is not None and after.peer == self.hops[-1].peer

    def is_ready(self, acked: int) -> bool:
        """Return whether this standby has nearly all steps up to ``acked``, the last step whose
        outputs the client has."""
        return self.hops[-1].applied + LATE_STEPS >= acked


@dataclass(eq=False)
class _Place:
    """A hop that needs a standby. ``is_spare``: only on a host without other work."""

    live: LiveHop
    sender: Sender
    after: LiveHop | None
    """The next hop; None if this hop is the last one."""
    is_spare: bool = False
    preparing: asyncio.Task[None] | None = None
    standby: Standby | None = None
    failures: int = 0
    refusing: set[PeerId] = field(default_factory=set)
    """Hosts that refused a spare standby. They are asked again only after all others."""

    def require(self) -> None:
        """Accept any host from now on, even one with other work. Restart the search at once."""
        self.is_spare, self.failures = False, 0
        self.refusing.clear()
        if self.preparing is not None:
            self.preparing.cancel()
            self.preparing = None


@dataclass(eq=False)
class Standbys:
    """The standbys of one chain.

    - ``changed`` is set when one is opened or ends.
    - ``tasks`` runs a task for each standby in preparation.
    """

    hosts: ModelHosts
    spec: ChainSpec
    sessions: HopSessions
    links: ChainLinks
    changed: asyncio.Event
    tasks: asyncio.TaskGroup
    _places: dict[LiveHop, _Place] = field(default_factory=dict)
    _positions: int = 0

    def of(self, live: LiveHop) -> Standby | None:
        """Return the standby of a hop, once it is fed."""
        place = self._places.get(live)
        return place.standby if place else None

    @property
    def hops(self) -> list[LiveHop]:
        """The sessions of all standbys."""
        return [live for each in self._standbys() for live in each.hops]

    def with_hop(self, live: LiveHop) -> Standby | None:
        """Return the standby that a session belongs to."""
        return next((each for each in self._standbys() if live in each.hops), None)

    def fed_by(self, sender: LiveHop, epoch: int) -> Standby | None:
        """Return the standby that is fed by this link of a hop."""
        return next(
            (each for each in self._standbys() if each.sender is sender and each.epoch == epoch), None
        )

    def has_given_up(self, live: LiveHop) -> bool:
        """Return whether standbys of a hop failed so often that it should be replaced without
        one."""
        place = self._places.get(live)
        return place is not None and place.failures >= ATTEMPTS

    def update(self, hops: Sequence[LiveHop], precision: str | None, positions: int) -> None:
        """Prepare a standby for each hop of a whole chain that needs one.

        End the standbys of hops that are gone, and standbys that no sender feeds. ``positions``:
        the number of positions that a replay of the session would send.
        """
        self._positions = positions
        senders: list[Sender] = [self.links.client, *hops[:-1]]
        followers: list[LiveHop | None] = [*hops[1:], None]
        for place in list(self._places.values()):
            if place.live not in hops or senders[hops.index(place.live)] is not place.sender:
                self._end(place)
                continue
            place.after = followers[hops.index(place.live)]
            standby = place.standby
            if standby is not None and (
                (standby.is_linking and standby.hops[-1].next is not place.after)
                or standby.repeats(place.after)
            ):
                self.discard(standby)
        for live, sender, after in zip(hops, senders, followers, strict=True):
            must_have_one = live.leaving or bool(self.spec.standby)
            is_worth_one = self.spec.standby is None and positions >= SPARE_POSITIONS
            waits = live.leaving and sender.leaving and sender in self._places
            if (must_have_one or is_worth_one) and not waits:
                place = self._places.setdefault(live, _Place(live, sender, after, is_spare=not must_have_one))
                if must_have_one and place.is_spare:
                    place.require()
                is_given_up = live.leaving and self.has_given_up(live)
                if place.standby is None and place.preparing is None and not is_given_up:
                    place.preparing = self.tasks.create_task(self._prepare(place, precision))

    def pop(self, live: LiveHop) -> Standby | None:
        """Return the standby of a hop, to install in its place. None unless it is alive and fed."""
        place = self._places.pop(live, None)
        if place is None:
            return None
        standby, place.standby = place.standby, None
        self._end(place)
        if standby is None:
            return None
        is_fed = standby.sender.next is live and standby.sender.alive
        if is_fed and all(each.alive for each in standby.hops):
            return standby
        self._close(standby)
        return None

    def discard(self, standby: Standby) -> None:
        """End a standby that failed. Its hop goes on, and another standby is prepared."""
        place = self._places.get(standby.replaced)
        if place is None or place.standby is not standby:
            return
        _log.debug("a standby is given up", extra=standby.hops[0].log_fields | {"replaces": place.live.peer})
        place.standby = None
        place.failures += 1
        self._close(standby)
        if standby.is_linking and standby.replaced.next is not None:
            # The next hop may take steps from the standby by now, so the replaced hop has to link
            # to the next hop again.
            standby.replaced.next = None
        self.changed.set()

    def discard_all(self) -> None:
        """End all standbys, because the steps that they were fed are wrong."""
        for place in list(self._places.values()):
            self._end(place)

    def _standbys(self) -> list[Standby]:
        return [place.standby for place in self._places.values() if place.standby is not None]

    def _end(self, place: _Place) -> None:
        self._places.pop(place.live, None)
        if place.preparing is not None:
            place.preparing.cancel()
        if place.standby is not None:
            self._close(place.standby)

    def _close(self, standby: Standby) -> None:
        for live in standby.hops:
            live.alive = False
            live.stream.close()
        if standby.feeding is not None:
            standby.feeding.cancel()

    # ---- preparing one --------------------------------------------------------------------------

    async def _prepare(self, place: _Place, precision: str | None) -> None:
        """Open a standby and have it fed; try again as long as no host can be found."""
        try:
            while place.standby is None and not (place.live.leaving and place.failures >= ATTEMPTS):
                if place.failures:
                    timing = self.hosts.timing
                    backoff_s = timing.heartbeat_s * 2.0 ** min(place.failures, 10)
                    await asyncio.sleep(min(backoff_s, timing.stall_s))
                if place.live.leaving:  # its host may have announced other blocks since
                    with contextlib.suppress(SwarmnetError):
                        await self.hosts.refresh()
                try:
                    route = self._route(place, precision)
                except NoRoute:
                    route = []
                if not route or (place.is_spare and len(route) > 1):
                    place.refusing.clear()
                    await asyncio.sleep(self.hosts.timing.refresh_s)
                    continue
                await self._open(place, route)
        finally:
            if place.preparing is asyncio.current_task():
                place.preparing = None
            self.changed.set()

    def _route(self, place: _Place, precision: str | None) -> list[Hop]:
        hop, announced = place.live.hop, self.hosts.span_of(place.live.peer)
        # A host that moved to other blocks may still serve some of the old ones to new sessions.
        has_moved = place.live.leaving and announced not in (None, place.live.announced)
        return self.hosts.route(
            (hop.start, hop.end),
            ends=(
                place.sender.peer,
                place.after.peer if place.after else None,
            ),
            precision=precision,
            avoid=frozenset({*place.refusing, *self.hosts.banned} | ({hop.peer} if not has_moved else set()))
            | self.hosts.without_room(self._positions),
        )

    async def _open(self, place: _Place, route: Sequence[Hop]) -> None:
        opened: list[LiveHop] = []
        try:
            with contextlib.suppress(ConfigError):  # an adapter that the chain's own hops refuse, too
                role = SessionRole.SPARE if place.is_spare else SessionRole.STANDBY
                opened = await self.sessions.open(
                    route, None, self.links.next_epoch(), self._failed, role=role
                )
            if len(opened) < len(route):
                place.failures += 1
                if place.is_spare:
                    place.refusing.add(route[0].peer)
                return
            epoch = self.links.next_epoch()
            place.standby = standby = Standby(place.live, place.sender, opened, epoch)
            standby.feeding = await self.links.feed(place.sender, opened[0], epoch)
        finally:
            if place.standby is None:
                for live in opened:
                    live.alive = False
                    live.stream.close()

    def _failed(self, hop: Hop, error: SwarmnetError) -> None:
        """Ban a host that did not open a session or ended it, unless it just lacks room for a
        standby."""
        if not isinstance(error, Refused) or error.reason != refusal_pb2.REASON_IDLE:
            self.hosts.failed(hop.peer)

    def session_ended(self, standby: Standby, live: LiveHop, error: SwarmnetError) -> None:
        """Handle the end of the session on one of a standby's hosts."""
        if live.alive:
            self._failed(live.hop, error)
            self.discard(standby)
