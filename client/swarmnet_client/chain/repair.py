"""Repairs a chain: drops hops, fills its gaps with hosts, and links its hops.

1. Code that finds a fault in a hop drops the hop. Its standby, if it has one, replaces it.
2. Blocks that no live hop covers are a gap. Sessions are opened on the hosts of a route over all
   blocks; most are open already. If that fails, the directory is read and another route chosen.
3. Each hop is linked to its next hop. The hop before a new one replays its log there.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from swarmnet_client.chain.failures import (
    QUICK_ATTEMPTS,
    Blame,
    RetryPolicy,
    Unfilled,
    before_attempt,
    explain,
    is_missing_experts,
    is_out_of_resources,
)
from swarmnet_client.chain.hops import (
    ChainReport,
    ChainSpec,
    LiveHop,
    Sender,
    SessionRole,
    displaced,
    gaps,
    runs,
)
from swarmnet_client.chain.links import ChainLinks
from swarmnet_client.chain.sessions import HopSessions
from swarmnet_client.chain.standby import Standby, Standbys
from swarmnet_client.chain.steps_in_flight import StepsInFlight
from swarmnet_client.hosts.exclusions import CONVICTED_S
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import (
    HostsOverloaded,
    NoRoom,
    NoRoute,
    OutOfResources,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.machine.aio import all_of, loop_time
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session.link import NextHop, log_id

_log = logging.getLogger(__name__)

ROOMLESS_ATTEMPTS = 2
"""Number of attempts that find no host with room. After them, a running answer ends.

Each attempt reads the directory, because a host with more room may have joined.
"""


class RepairDeadline:
    """The deadline of one repair: ``recover_s`` after its start or its last progress."""

    def __init__(self, recover_s: float) -> None:
        self._recover_s = recover_s
        self._running: asyncio.Timeout | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raise ``TimeoutError`` at the deadline, unless the context ends before."""
        try:
            async with asyncio.timeout(self._recover_s) as self._running:
                yield
        finally:
            self._running = None

    def extend(self, wait_s: float = 0.0) -> None:
        """Note progress that the running repair, if any, makes after ``wait_s`` more seconds."""
        if self._running is not None and not self._running.expired():
            self._running.reschedule(loop_time() + wait_s + self._recover_s)


@dataclass(eq=False)
class ChainRepair:
    """The hops of one chain, and how they are replaced.

    - ``trouble`` is set when a hop was dropped, so that somebody calls ``run``.
    - ``deadline``: hosts extend it while they receive the chain's adapter.
    """

    hosts: ModelHosts
    spec: ChainSpec
    in_flight: StepsInFlight
    report: ChainReport
    sessions: HopSessions
    links: ChainLinks
    standbys: Standbys
    trouble: asyncio.Event
    deadline: RepairDeadline
    hops: list[LiveHop] = field(default_factory=list)
    positions: int = 0
    """Positions of all sequences, including positions about to be sent."""
    last_error: SwarmnetError | None = None
    """The error for which the last hop was replaced, or could not be. None until there is one."""
    number: int = field(default_factory=count(1).__next__)
    """The chain's number in the logs of this client."""

    def __post_init__(self) -> None:
        self.blame = Blame(self.hosts)
        self._retries = RetryPolicy(self.hosts.timing.recover_s)

    @property
    def continues(self) -> bool:
        """True if the chain has answered before, so that added hops continue an answer."""
        return bool(self.in_flight.acked)

    @property
    def precision(self) -> str | None:
        """The precision that new hops should have: that of the chain, or of its first hops.

        None while the chain has no hops.
        """
        known = self.report.precisions or [live.hop.precision for live in self.hops]
        return known[0] if known else None

    @property
    def whole(self) -> tuple[LiveHop, ...]:
        """The hops, if the chain is whole; else empty."""
        is_whole = not gaps(self.hops, self.spec.blocks) and all(live.alive for live in self.hops)
        return tuple(self.hops) if is_whole else ()

    def answered(self, last: LiveHop) -> None:
        """Note that the chain answered a step, and forget earlier failures."""
        self.hosts.answered(last.peer)
        self._retries.answered()
        self.blame = Blame(self.hosts)

    async def run(self) -> None:
        """Make the chain whole. Raises the error for the user when that is not possible."""
        try:
            async with self.deadline.running():
                if missing := self._gaps():
                    self._log("a chain has gaps", blocks=missing, reason=_short(self.last_error))
                    self.report.failovers += bool(self.report.route)
                    is_idle = self.in_flight.is_empty
                    if self._retries.is_given_up(loop_time(), self.last_error, idle=is_idle):
                        raise self._explain(missing) from self.last_error
                    pause_s = self._retries.pause_s(self.last_error)
                    # Do not pause for lack of room: another host may have room at once.
                    if not is_out_of_resources(self.last_error):
                        await asyncio.sleep(pause_s)
                    # Replays of idle sequences would delay the answers that wait, so forget them
                    # (docs/decisions/0111).
                    self.in_flight.forget_idle()
                    await self._fill(pause_s)
                    self._retries.repaired(loop_time())
                    self._log("a chain has no gaps", sessions=[log_id(live.session) for live in self.hops])
                await self.links.make(self.hops)
        except TimeoutError:
            raise self._explain(self._gaps()) from self.last_error
        self.report.set_route([live.hop for live in self.hops])
        self.hosts.chain_opened(self.hops[0].peer, self.hops[-1].peer)

    def _explain(self, missing: list[tuple[int, int]]) -> SwarmnetError:
        no_route = partial(self.hosts.no_route, missing, continues=self.continues)
        error = explain(self.last_error or no_route())
        is_unhosted = isinstance(self.last_error, Unreachable) or not self.hosts.known
        return no_route() if is_unhosted and type(error) is Unreachable else error

    def _log(self, event: str, **fields: object) -> None:
        _log.debug(event, extra={"chain": self.number} | fields)

    def close(self) -> None:
        """End the sessions of all hops."""
        self._log("a chain is closed", sessions=[log_id(live.session) for live in self.hops])
        for live in self.hops:
            live.stream.close()

    # ---- the hops -------------------------------------------------------------------------------

    def need(self, positions: int) -> None:
        """Replace hops whose hosts lack room for this many positions of all sequences together."""
        is_more, self.positions = positions > self.positions, positions
        if not is_more:
            return
        lacking = self.hosts.without_room(positions)
        for live in self.hops:
            if live.peer in lacking:
                self.drop(live, OutOfResources(f"{live.peer} has no room for {positions} positions"))

    def drop(self, live: LiveHop, error: SwarmnetError) -> None:
        """Replace a hop."""
        if live.alive:
            fields = live.log_fields | {"chain": self.number, "reason": _short(error)}
            _log.info("a host is replaced", extra=fields)
        live.end(error)
        self.last_error = error
        self.trouble.set()

    def fail(self, live: LiveHop, error: SwarmnetError) -> None:
        """Replace a hop and ban its host for a while."""
        if live.alive:
            self.hosts.failed(live.peer)
            self.drop(live, error)

    def separate(self, one: LiveHop, other: LiveHop, error: SwarmnetError) -> None:
        """Replace two neighbours. One of them lies about the data between them; which one is
        unknown.
        """
        self.hosts.separate(one.peer, other.peer)
        self.fail(one, error)
        self.fail(other, error)

    def convict(self, live: LiveHop) -> None:
        """Replace a hop whose outputs are wrong, and every later hop.

        The KV caches of later hops come from those outputs.
        """
        error = Unreachable(f"{live.peer} gave wrong outputs")
        self.hosts.convict(live.peer)
        self.report.wrong.append(live.peer)
        _log.warning(
            "host %s gave wrong outputs for blocks %d:%d, according to two other hosts. "
            "It was replaced, and this client avoids it for %g hours. The answer so far may be wrong: ask again",
            live.peer,
            live.hop.start,
            live.hop.end,
            CONVICTED_S / 3600,
        )
        self.standbys.discard_all()
        for each in self.hops:
            if each.hop.start >= live.hop.start:
                self.drop(each, error)

    def _gaps(self) -> list[tuple[int, int]]:
        """Return the blocks that neither a live hop nor a standby covers.

        Close the sessions of hops that have ended, and install their standbys.
        """
        gone = [live for live in self.hops if not live.alive]
        self.hops = [live for live in self.hops if live.alive]
        for live in gone:
            live.stream.close()
            if (standby := self.standbys.pop(live)) is not None:
                self._install(standby)
        return gaps(self.hops, self.spec.blocks)

    def _install(self, standby: Standby) -> None:
        """Put the hops of a standby into the chain.

        ``ChainLinks.make`` then tells the sender, and the standby's last hop if it does not know
        the next hop.
        """
        self.report.failovers += 1
        self._add(standby.hops)
        self.links.promote(standby.sender, standby.hops[0], standby.epoch, standby.feeding)

    def _add(self, new: Sequence[LiveHop]) -> None:
        """Make new hops part of the chain, and close the hops that give way to them."""
        for live in displaced(self.hops, new):
            live.end(Unreachable(f"{live.peer} gave way to other hops"))
            live.stream.close()
        self.hops = sorted(
            [*(live for live in self.hops if live.alive), *new], key=lambda live: live.hop.start
        )

    # ---- filling gaps ---------------------------------------------------------------------------

    async def _fill(self, pause_s: float) -> None:
        """Open sessions until all hops of a route are open.

        A host that fails is banned for a while, and another route is chosen, even if the open hops
        cover all blocks: two of them may not reach each other. ``pause_s``: seconds before a full
        host is asked again.
        """
        failures: list[Unfilled] = []
        is_open = False
        # Hops end and standbys take over while hosts are asked, so the gaps are counted every time.
        while self._gaps() or not is_open:
            if failures:
                await self._look_again(failures)
            failure = await self._try_to_fill(failures, pause_s)
            is_open = failure is None
            failures.append(failure or Unfilled.NOT_OPENED)

    async def _look_again(self, failures: Sequence[Unfilled]) -> None:
        pause_s, directory_s = before_attempt(failures)
        if failures[-1] is Unfilled.NO_ROUTE and len(failures) == QUICK_ATTEMPTS:
            # Text: whoever keeps the record would keep the frames of the error, too.
            _log.warning("%s: waiting up to %g s for one", str(self.last_error), self.hosts.timing.recover_s)
        reason = _short(self.last_error)
        self._log("a chain is not filled", failure=failures[-1].name, attempts=len(failures), reason=reason)
        if pause_s:
            await asyncio.sleep(pause_s)
        with contextlib.suppress(SwarmnetError, TimeoutError):
            async with asyncio.timeout(directory_s):
                await self.hosts.refresh()

    async def _try_to_fill(self, failures: Sequence[Unfilled], pause_s: float) -> Unfilled | None:
        """Open the hops of the best route. Returns why that failed, or None."""
        try:
            route = self._route()
        except NoRoom as error:
            if not self.continues or len(failures) >= ROOMLESS_ATTEMPTS:
                raise
            self.last_error = error
            return Unfilled.NO_ROUTE
        except HostsOverloaded as error:
            await self._wait_for_hosts(error)
            return Unfilled.NO_ROUTE
        except NoRoute as error:
            # Missing experts explain why no host was found, so that error stays.
            if not is_missing_experts(self.last_error):
                self.last_error = error
            return Unfilled.NO_ROUTE
        # A dial may take a timeout, so a host that failed is dialled only after the directory was
        # read.
        if not failures and self.hosts.is_doubtful(route, [live.hop for live in self.hops]):
            if is_out_of_resources(self.last_error):
                await asyncio.sleep(pause_s)
            return Unfilled.DOUBTFUL
        return None if await self._open(route) else Unfilled.NOT_OPENED

    def _route(self) -> list[Hop]:
        """Return the best route over all blocks, open hops included. Raises ``NoRoute``, ``NoRoom``
        or ``HostsOverloaded``."""
        blocks = 0, self.spec.blocks
        self.hosts.check_room(self.positions, blocks)
        return self.hosts.route(
            blocks,
            precision=self.precision,
            avoid=self.hosts.without_room(self.positions),
            continues=self.continues,
            hops=[live.hop for live in self.hops],
        )

    async def _open(self, route: Sequence[Hop]) -> bool:
        """Open the hops of ``route`` that are not open yet. Each links to its next hop, which is
        either also new or already open. Returns whether all are open."""
        role = SessionRole.SUCCESSOR if self.continues else SessionRole.HOP

        async def open_run(new: Sequence[Hop], after: LiveHop | None) -> None:
            sender = self._sender_to(new[0])

            async def link(target: NextHop) -> None:
                """Link to the hop while it is being opened, which saves two round trips: the link
                waits there for the session."""
                if sender is not None:
                    await self.links.send(sender, new[0], target, None)

            opened = await self.sessions.open(
                new, after, self.links.next_epoch(), self._open_failed, role=role, begun=link
            )
            self._add(opened)
            if sender is None or not opened or opened[0].hop != new[0]:
                return
            # If the sender has reported meanwhile that it lost the link, its epoch has changed, and
            # it gets another link.
            if sender.epoch == opened[0].epoch:
                sender.next = opened[0]

        await all_of(*(open_run(new, after) for new, after in runs(route, self.hops)))
        return {live.hop for live in self.hops}.issuperset(route)

    def _sender_to(self, new: Hop) -> Sender | None:
        """Return the client or the open hop that will send to a new hop.

        None if the sender will be another new hop, or a hop that gives way.
        """
        if new.start == 0:
            return self.links.client
        senders = (live for live in self.hops if live.hop.end == new.start and live.peer != new.peer)
        return next(senders, None)

    def _open_failed(self, hop: Hop, error: SwarmnetError) -> None:
        self.blame.attribute(error, hop, continues=self.continues)
        self.last_error = error

    async def _wait_for_hosts(self, error: HostsOverloaded) -> None:
        """Wait until hosts may have room. Raises ``error`` if that is longer than this chain may
        wait.

        A chain that has answered may wait as long as a repair takes.
        """
        most_s = max(self.spec.wait_s, self.hosts.timing.recover_s if self.continues else 0.0)
        now = loop_time()
        if not self._retries.may_wait(error.retry_after_s, most_s, now):
            raise error
        self.last_error = error
        _log.warning("%s: waiting", error)
        self.deadline.extend(error.retry_after_s)
        await asyncio.sleep(error.retry_after_s)


def _short(error: SwarmnetError | None) -> str:
    return str(error or "")[:200]
