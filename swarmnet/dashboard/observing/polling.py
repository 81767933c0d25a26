"""Polls the peers of a swarm for their reports.

``Polls.select`` chooses the peers (``peer_selection``). Each has a task that keeps a REPORT stream
open and asks for a report every few seconds. Half of the round trip is the delay that the page
shows.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from swarmnet.dashboard.observing.counts import Totals
from swarmnet.dashboard.observing.observations import PeerTracker
from swarmnet.dashboard.observing.peer_selection import PollCandidate, select_peers
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.node_reports import ReportStream, check, request_report
from swarmnet_protocols.errors import PeerUnreachable, ProtocolViolation, StreamEnded, SwarmnetError
from swarmnet_protocols.machine.aio import cancel, persist
from swarmnet_protocols.machine.clock import Clock, wall_clock
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import REPORT
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import report_pb2

MAX_PEERS = 2000
"""At most this many peers are polled."""
MAX_OPENS = 32
"""Streams that are being opened at the same time."""
MIN_POLL_S = 2.0
MAX_POLL_S = 4.0
"""Longest interval between two polls of a peer."""
POLLS_PER_S = 125
"""Polls per second, over all peers. With more peers than this allows, the interval grows up to
``MAX_POLL_S``."""
REOPEN_S = 0.2
"""Delay before a stream that has carried reports is opened again."""
RETRY_S = 2.0
MAX_RETRY_S = 30.0
"""Longest delay between two attempts to reach a peer; it doubles from ``RETRY_S``."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObserverDependencies:
    """Network, clock and random source of an observer."""

    transport: Transport
    directory: Directory
    clock: Clock = wall_clock
    rng: random.Random = field(default_factory=random.SystemRandom)
    timing: Timing = field(default_factory=Timing)
    own_report: Callable[[], report_pb2.NodeReport] | None = None
    """The report of the node in the same process, which cannot be dialled. Raises ``SwarmnetError``
    while the node is paused."""


class Polls:
    """The polled peers.

    ``trackers``: what is known of each peer. ``totals``: counts since the observer started.
    """

    def __init__(
        self, dependencies: ObserverDependencies, check_for_leave: Callable[[], Awaitable[None]]
    ) -> None:
        """``check_for_leave`` reads the directory again, where a peer announces that it leaves."""
        self.trackers: dict[PeerId, PeerTracker] = {}
        self.totals = Totals()
        self._dependencies = dependencies
        self._clock = dependencies.clock
        self._check_for_leave = check_for_leave
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}
        self._failures: Counter[PeerId] = Counter()
        self._salt = dependencies.rng.randbytes(16)
        self._opens = asyncio.Semaphore(MAX_OPENS)
        self._asked = asyncio.Event()
        """Set at each answer and each failure."""

    @property
    def interval_s(self) -> float:
        """Seconds between two polls of a peer."""
        return min(max(MIN_POLL_S, len(self.trackers) / POLLS_PER_S), MAX_POLL_S)

    def select(self, addresses: Mapping[PeerId, tuple[str, ...]]) -> None:
        """Poll the announced and known peers that ``select_peers`` chooses: at most
        ``MAX_PEERS``."""
        candidates = [self._candidate(peer, addresses.get(peer)) for peer in {*addresses, *self.trackers}]
        selected = select_peers(candidates, MAX_PEERS, self._salt)
        self._failures = Counter({each.peer: each.failures for each in candidates if each.failures})
        for peer in [peer for peer in self.trackers if peer not in selected]:
            self._drop(peer)
        for each in candidates:
            if each.peer in selected:
                if each.peer not in self.trackers:
                    self._start(each.peer)
                self.trackers[each.peer].addresses = each.addresses

    def drop_expired(self, workers: Collection[PeerId]) -> None:
        """Stop polling peers that are gone for good, unless they are announced as ``workers``."""
        now_s = self._clock()
        for peer, tracker in list(self.trackers.items()):
            if peer not in workers and tracker.is_expired(now_s):
                self._drop(peer)
        self.totals.keep_only(self.trackers)

    async def all_asked(self) -> None:
        """Wait until every peer that is polled has answered or failed once."""
        own = self._dependencies.transport.peer_id  # which cannot be dialled
        while any(each.observation.is_unasked for each in self.trackers.values() if each.peer != own):
            self._asked.clear()
            await self._asked.wait()

    async def stop(self) -> None:
        await cancel(*self._tasks.values())

    def _candidate(self, peer: PeerId, addresses: tuple[str, ...] | None) -> PollCandidate:
        is_own = peer == self._dependencies.transport.peer_id
        tracker = self.trackers.get(peer) or PeerTracker(peer, self._clock())
        seen = tracker.observation
        return PollCandidate(
            peer,
            tracker.addresses if addresses is None else addresses,
            0.0 if is_own else seen.first_seen_s,
            answers=is_own or seen.answers,
            polled=peer in self.trackers,
            failures=self._failures[peer],
        )

    def _start(self, peer: PeerId) -> None:
        tracker = self.trackers[peer] = PeerTracker(peer, self._clock())
        poll = partial(self._keep_polling, tracker)
        self._tasks[peer] = asyncio.create_task(persist(f"the poll of {peer}", poll), name="poll")

    def _drop(self, peer: PeerId) -> None:
        del self.trackers[peer]
        self._tasks.pop(peer).cancel()

    # ---- the task of one peer -------------------------------------------------------------------

    async def _keep_polling(self, tracker: PeerTracker) -> None:
        if tracker.peer == self._dependencies.transport.peer_id:
            await self._keep_polling_own_node(tracker)
        retry_s = RETRY_S
        while True:
            known = tracker.observation.newest
            try:
                await self._poll_until_failure(tracker)
            except StreamEnded:
                # A stream can end while both peers are well, so one that has carried reports is
                # opened again before the peer counts as failed.
                if tracker.observation.newest is not known:
                    retry_s = RETRY_S
                    await asyncio.sleep(REOPEN_S)
                    continue
                await self._check_for_leave()
            except PeerUnreachable:
                await self._check_for_leave()
            except SwarmnetError as error:
                _log.debug("a peer gives no report", extra={"peer": tracker.peer, "reason": str(error)[:200]})
            tracker.on_failed_poll(self._clock(), self.totals)
            self._asked.set()
            self._failures[tracker.peer] += 1
            await asyncio.sleep(retry_s * self._dependencies.rng.uniform(0.8, 1.2))
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _poll_until_failure(self, tracker: PeerTracker) -> NoReturn:
        dependencies = self._dependencies
        async with self._opens:
            stream = await REPORT.open(
                dependencies.transport, tracker.peer, dependencies.timing, addresses=tracker.addresses
            )
        try:
            while True:
                await self._poll(tracker, stream)
                await self._wait_for_next_poll(stream)
        finally:
            stream.close()

    async def _poll(self, tracker: PeerTracker, stream: ReportStream) -> None:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        report = await request_report(stream)
        tracker.on_delay((loop.time() - asked_s) / 2)
        tracker.on_report(report, self._clock(), self.totals)
        self._asked.set()
        self._failures.pop(tracker.peer, None)

    async def _wait_for_next_poll(self, stream: ReportStream) -> None:
        """Wait one interval. Raises ``StreamEnded`` as soon as the stream ends,
        ``ProtocolViolation`` for a report without a poll."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.interval_s * self._dependencies.rng.uniform(0.9, 1.1)):
                await stream.stream.receive()
                raise ProtocolViolation(f"{stream.peer} sent a report without being asked")

    async def _keep_polling_own_node(self, tracker: PeerTracker) -> NoReturn:
        while True:
            if self._dependencies.own_report is not None:
                try:
                    report = self._dependencies.own_report()
                    check(report)
                    tracker.on_report(report, self._clock(), self.totals)
                except SwarmnetError:  # the node is paused
                    tracker.on_failed_poll(self._clock(), self.totals)
            await asyncio.sleep(self.interval_s)
