"""The observer: crawls the directory for hosts, expert peers and workers of a swarm, and polls each
of them for its report.

1. ``_keep_crawling`` reads the catalog, the hosts and expert peers of each model and the workers of
   each job, and selects the peers to poll (``peer_selection``).
2. ``_keep_polling`` runs once for each peer: it keeps a REPORT stream open and asks for a report
   every few seconds. Half of the round trip is the delay that the page shows.
3. ``snapshot`` returns everything known. ``state`` turns snapshots into what the page shows.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, TypeVar

from swarmnet.dashboard.counts import Totals
from swarmnet.dashboard.observations import (
    JobObservation,
    PeerTracker,
    Snapshot,
    SwarmInfo,
)
from swarmnet.dashboard.peer_selection import PollCandidate, select_peers
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.catalog import Catalog, CatalogModel, read_catalog
from swarmnet_protocols.directory.expert_announcements import ExpertSample
from swarmnet_protocols.directory.host_announcements import HostSample
from swarmnet_protocols.directory.node_reports import ReportStream, check, request_report
from swarmnet_protocols.errors import (
    PeerUnreachable,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.machine.aio import all_of, cancel, persist
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import REPORT
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.job_records import WorkerInfo, find_job, find_workers
from swarmnet_protocols.wire import report_pb2

MAX_PEERS = 2000
"""Most peers that are polled."""
MAX_LOOKUPS = 8
"""Concurrent lookups in the directory."""
MAX_OPENS = 32
"""Streams that are being opened at the same time."""
MIN_POLL_S = 2.0
MAX_POLL_S = 4.0
"""Longest interval between two polls of a peer."""
POLLS_PER_S = 125
"""Polls a second of all peers together. With more peers than this allows, the interval grows up to
``MAX_POLL_S``."""
LEAVE_CHECK_S = 3.0
"""Timeout in seconds of the crawl that checks whether an unreachable peer has announced its
leave."""
MIN_CRAWL_S = 1.0
"""Least seconds between two crawls, even if one is requested."""
CATALOG_S = 20.0
"""Seconds between two reads of the catalog and of the workers. Hosts are read at every crawl."""
REOPEN_S = 0.2
"""Delay before a stream that has carried reports is opened again."""
RETRY_S = 2.0
MAX_RETRY_S = 30.0
"""Longest delay between two attempts to reach a peer; it doubles from ``RETRY_S``."""
_log = logging.getLogger(__name__)
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class ObserverDependencies:
    """Network, clock and random source of an observer."""

    transport: Transport
    directory: Directory
    clock: Clock
    rng: random.Random
    timing: Timing = field(default_factory=Timing)
    own_report: Callable[[], report_pb2.NodeReport] | None = None
    """The report of the node in the same process, which cannot be dialled. Raises ``SwarmnetError``
    while the node is paused."""


class Observer:
    """Observes a swarm while ``run`` is open; a ``SnapshotSource`` for the feed."""

    def __init__(
        self, dependencies: ObserverDependencies, swarm: SwarmInfo, model_names: Mapping[bytes, str]
    ) -> None:
        self._dependencies = dependencies
        self._clock = dependencies.clock
        self._swarm = swarm
        self._model_names = model_names
        self._listed: dict[bytes, CatalogModel] = {}
        self._hosts: dict[bytes, HostSample] = {}
        self._experts: dict[bytes, ExpertSample] = {}
        self._trackers: dict[PeerId, PeerTracker] = {}
        self._polling: dict[PeerId, asyncio.Task[None]] = {}
        self._failures: Counter[PeerId] = Counter()
        self._salt = dependencies.rng.randbytes(16)
        self._jobs: dict[str, JobObservation] = {}
        self._workers: dict[str, list[WorkerInfo]] = {}
        self._totals = Totals()
        self._since_s = self._clock()
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._opens = asyncio.Semaphore(MAX_OPENS)
        self._crawl_requested = asyncio.Event()
        self._crawled = asyncio.Condition()

    @classmethod
    @asynccontextmanager
    async def run(
        cls,
        dependencies: ObserverDependencies,
        swarm: SwarmInfo,
        model_names: Mapping[bytes, str] | None = None,
    ) -> AsyncIterator["Observer"]:
        """An observer that crawls and polls while the context is open.

        ``model_names``: the models that the swarm file lists, by manifest hash; all other models
        are ignored. Without it, all models of the catalog are observed.
        """
        observer = cls(dependencies, swarm, model_names or {})
        crawling = asyncio.create_task(
            persist("the crawl of the directory", observer._keep_crawling), name="observer"
        )
        try:
            yield observer
        finally:
            await cancel(crawling, *observer._polling.values())

    def snapshot(self) -> Snapshot:
        """Everything known now."""
        hosted = self._hosted()
        return Snapshot(
            self._clock(),
            self._since_s,
            self._swarm,
            models=tuple(model for manifest, model in self._listed.items() if manifest in hosted),
            peers=[tracker.observation for tracker in self._trackers.values()],
            jobs=list(self._jobs.values()),
            totals=dict(self._totals.models),
            peer_positions=dict(self._totals.peers),
        )

    def _hosted(self) -> set[bytes]:
        return {tracker.manifest for tracker in self._trackers.values()}

    # ---- crawling the directory -----------------------------------------------------------------

    async def _keep_crawling(self) -> None:
        catalog_read_s = -CATALOG_S
        while True:
            self._crawl_requested.clear()
            now_s = asyncio.get_running_loop().time()
            # A failed lookup stops neither later crawls nor the polling of peers that are known.
            try:
                if now_s - catalog_read_s >= CATALOG_S:
                    catalog_read_s = now_s
                    await self._update_catalog(await read_catalog(self._dependencies.directory))
                    await self._find_workers()
                await self._find_peers()
            except SwarmnetError as error:
                _log.warning("cannot read the directory: %s", error)
            except Exception:  # noqa: BLE001 - one failed crawl must not end the observer
                _log.exception("cannot read the directory")
            self._drop_expired()
            async with self._crawled:
                self._crawled.notify_all()
            await asyncio.sleep(MIN_CRAWL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s * 2):
                    await self._crawl_requested.wait()

    async def _update_catalog(self, catalog: Catalog) -> None:
        """Take the models and jobs of the catalog. Models and jobs that are missing from it stay
        while a known peer hosts or trains them."""
        hosted = self._hosted()
        kept = {manifest: model for manifest, model in self._listed.items() if manifest in hosted}
        names = self._model_names
        self._listed = kept | {
            model.manifest: replace(model, name=names.get(model.manifest, model.name))
            for model in catalog.models
            if not names or model.manifest in names
        }
        self._jobs = {
            job_id: job for job_id, job in self._jobs.items() if job_id in catalog.jobs or job.workers
        }
        found = await self._look_up_each(
            (job_id for job_id in catalog.jobs if job_id not in self._jobs), self._find_job
        )
        self._jobs |= {job_id: job for job_id, job in found.items() if job is not None}

    async def _find_job(self, job_id: str) -> JobObservation | None:
        try:
            job, _ = await find_job(self._dependencies.directory, job_id)
        except Unreachable:  # any peer may list a job that does not exist
            return None
        return JobObservation(job_id, job.job.job.name, job.job.method.name, job.job.job.rounds)

    async def _find_workers(self) -> None:
        self._workers = {job_id: known for job_id, known in self._workers.items() if job_id in self._jobs}
        find = partial(find_workers, self._dependencies.directory)
        self._workers |= await self._look_up_each(self._jobs, find)

    async def _find_peers(self) -> None:
        """Read the hosts and expert peers of every model, select the peers to poll, and update them
        and the jobs."""
        self._hosts = {
            manifest: self._hosts.get(manifest)
            or HostSample(self._dependencies.directory, manifest, self._dependencies.rng)
            for manifest in self._listed
        }
        records = await self._look_up_each(self._listed, lambda manifest: self._hosts[manifest].refresh())
        newest: dict[PeerId, HostInfo] = {}
        for each in (each for found in records.values() for each in found):
            peer = each.peer
            if peer not in newest or newest[peer].sequence < each.sequence:
                newest[peer] = each
        self._experts = {
            manifest: self._experts.get(manifest) or ExpertSample(self._dependencies.directory, manifest)
            for manifest in self._listed
        }
        read_experts = await self._look_up_each(
            self._listed, lambda manifest: self._experts[manifest].refresh()
        )
        experts = {
            each.host.peer: (each, manifest) for manifest, found in read_experts.items() for each in found
        }
        workers = {worker.peer: worker.addresses for found in self._workers.values() for worker in found}
        self._select(
            workers
            | {peer: each.host.addresses for peer, (each, _) in experts.items()}
            | {peer: each.addresses for peer, each in newest.items()}
        )
        for peer, tracker in self._trackers.items():
            is_listed = tracker.manifest in self._listed
            if peer in newest:
                tracker.on_record(newest[peer], self._clock())
            elif tracker.hosts_blocks and (tracker.manifest in records or not is_listed):
                tracker.on_record_absent()
            if peer in experts:
                tracker.on_experts(*experts[peer], self._clock())
            elif tracker.manifest in read_experts or not is_listed:
                tracker.on_experts_absent()
        for job_id, found in self._workers.items():
            polled = [worker for worker in found if worker.peer in self._trackers]
            job = self._jobs[job_id]
            self._jobs[job_id] = replace(
                job,
                workers=tuple(worker.peer for worker in polled),
                round=max((min(worker.round, job.rounds) for worker in polled), default=job.round),
            )

    async def _look_up_each(self, keys: Iterable[K], look_up: Callable[[K], Awaitable[T]]) -> dict[K, T]:
        """The result of ``look_up`` for each key, ``MAX_LOOKUPS`` at a time. Failed lookups are
        left out."""

        async def one(key: K) -> tuple[K, T] | None:
            async with self._lookups:
                try:
                    return key, await look_up(key)
                except SwarmnetError as error:
                    _log.warning("cannot read the directory: %s", error)
                    return None

        return dict(found for found in await all_of(*map(one, keys)) if found is not None)

    def _select(self, addresses: Mapping[PeerId, tuple[str, ...]]) -> None:
        """Start and stop polls so that those ``MAX_PEERS`` of the announced and known peers that
        ``select_peers`` chooses are polled."""
        now_s, own_id = self._clock(), self._dependencies.transport.peer_id
        candidates = []
        for peer in {*addresses, *self._trackers}:
            tracker = self._trackers.get(peer)
            seen = tracker.observation if tracker is not None else None
            first_seen_s = seen.first_seen_s if seen is not None else now_s
            candidates.append(
                PollCandidate(
                    peer,
                    addresses.get(peer, tracker.addresses if tracker is not None else ()),
                    0.0 if peer == own_id else first_seen_s,
                    answers=peer == own_id or (seen is not None and seen.answers),
                    polled=tracker is not None,
                    failures=self._failures[peer],
                )
            )
        selected = select_peers(candidates, MAX_PEERS, self._salt)
        self._failures = Counter({each.peer: each.failures for each in candidates if each.failures})
        for peer in [peer for peer in self._trackers if peer not in selected]:
            self._drop(peer)
        for each in candidates:
            if each.peer in selected:
                if each.peer not in self._trackers:
                    tracker = self._trackers[each.peer] = PeerTracker(each.peer, self._clock())
                    self._polling[each.peer] = asyncio.create_task(
                        persist(f"the poll of {each.peer}", partial(self._keep_polling, tracker)), name="poll"
                    )
                self._trackers[each.peer].addresses = each.addresses

    def _drop(self, peer: PeerId) -> None:
        del self._trackers[peer]
        self._polling.pop(peer).cancel()

    def _drop_expired(self) -> None:
        now_s = self._clock()
        workers = {peer for job in self._jobs.values() for peer in job.workers}
        for peer, tracker in list(self._trackers.items()):
            if peer not in workers and tracker.is_expired(now_s):
                self._drop(peer)
        self._totals.keep_only(self._trackers)

    # ---- polling the peers ----------------------------------------------------------------------

    @property
    def _poll_s(self) -> float:
        """Seconds between two polls of a peer."""
        return min(max(MIN_POLL_S, len(self._trackers) / POLLS_PER_S), MAX_POLL_S)

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
                _log.debug("lost %s: %s", tracker.peer, error)
            tracker.on_failed_poll(self._clock(), self._totals)
            self._failures[tracker.peer] += 1
            await asyncio.sleep(retry_s * self._dependencies.rng.uniform(0.8, 1.2))
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _poll_until_failure(self, tracker: PeerTracker) -> NoReturn:
        async with self._opens:
            stream = await REPORT.open(
                self._dependencies.transport,
                tracker.peer,
                self._dependencies.timing,
                addresses=tracker.addresses,
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
        tracker.on_report(report, self._clock(), self._totals)
        self._failures.pop(tracker.peer, None)

    async def _wait_for_next_poll(self, stream: ReportStream) -> None:
        """Wait one interval. Raises ``StreamEnded`` as soon as the stream ends,
        ``ProtocolViolation`` for a report without a poll."""
        try:
            async with asyncio.timeout(self._poll_s * self._dependencies.rng.uniform(0.9, 1.1)):
                await stream.stream.receive()
        except TimeoutError:
            return
        raise ProtocolViolation(f"{stream.peer} sent a report without being asked")

    async def _check_for_leave(self) -> None:
        """Request a crawl and wait for it, because a peer announces in the directory that it
        leaves."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_CHECK_S), self._crawled:
                self._crawl_requested.set()
                await self._crawled.wait()

    async def _keep_polling_own_node(self, tracker: PeerTracker) -> None:
        while True:
            if self._dependencies.own_report is not None:
                try:
                    report = self._dependencies.own_report()
                    check(report)
                    tracker.on_report(report, self._clock(), self._totals)
                except SwarmnetError:  # the node is paused
                    tracker.on_failed_poll(self._clock(), self._totals)
            await asyncio.sleep(self._poll_s)
