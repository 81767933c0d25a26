"""The observer: crawls the directory for hosts, expert peers and workers of a swarm, and polls each
of them for its report.

1. ``_keep_crawling`` reads the catalog, the hosts and expert peers of each model and the workers of
   each job.
2. ``Polls`` selects the peers to poll, and asks each of them for its report every few seconds.
3. ``snapshot`` returns everything known. ``state`` turns snapshots into what the page shows.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from swarmnet.dashboard.observing.observations import JobObservation, Snapshot, SwarmInfo
from swarmnet.dashboard.observing.polling import ObserverDependencies, Polls
from swarmnet_protocols.directory.catalog import Catalog, CatalogModel, read_catalog
from swarmnet_protocols.directory.expert_announcements import ExpertSample
from swarmnet_protocols.directory.host_announcements import HostSample
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import all_of, in_background, loop_time, persist, within
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.host_info import HostInfo

if TYPE_CHECKING:
    from swarmnet_protocols.training.catch_up import WorkerPosition
    from swarmnet_protocols.training.rounds.terms import RoundMember

MAX_LOOKUPS = 8
"""Concurrent lookups in the directory."""
LEAVE_CHECK_S = 3.0
"""Timeout in seconds of the crawl that checks whether an unreachable peer has announced its
leave."""
MIN_CRAWL_S = 1.0
"""Least seconds between two crawls, even if one is requested."""
CATALOG_S = 20.0
"""Seconds between two reads of the catalog and of the workers. Hosts are read at every crawl, and
workers also when a peer may have left."""
_log = logging.getLogger(__name__)
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class _ObservedModel:
    """A model of the catalog, and what was read of its hosts and expert peers."""

    listed: CatalogModel
    hosts: HostSample
    experts: ExpertSample


class Observer:
    """Observes a swarm while it is ``running``; a ``SnapshotSource`` for the feed.

    ``model_names``: the models that the swarm file lists, by manifest hash; all other models are
    ignored. Without it, all models of the catalog are observed.
    """

    def __init__(
        self,
        dependencies: ObserverDependencies,
        swarm: SwarmInfo,
        model_names: Mapping[bytes, str] | None = None,
    ) -> None:
        self._directory = dependencies.directory
        self._rng = dependencies.rng
        self._clock = dependencies.clock
        self._swarm = swarm
        self._model_names = model_names or {}
        self._models: dict[bytes, _ObservedModel] = {}
        self._jobs: dict[str, JobObservation] = {}
        self._workers: dict[str, dict[RoundMember, WorkerPosition]] = {}
        self._polls = Polls(dependencies, self._check_for_leave)
        self._since_s = self._clock()
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._crawl_requested = asyncio.Event()
        self._crawled = asyncio.Condition()
        self._has_crawled = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Observer"]:
        """Crawl and poll while the context is open."""
        try:
            async with in_background(persist("the crawl of the directory", self._keep_crawling)):
                yield self
        finally:
            await self._polls.stop()

    async def settled(self, within_s: float) -> None:
        """Wait until the directory has been read and every peer has answered or failed, for at most
        ``within_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                async with self._crawled:
                    await self._crawled.wait_for(lambda: self._has_crawled)
                await self._polls.all_asked()

    def snapshot(self) -> Snapshot:
        """Return all that this observer knows now."""
        hosted = self._hosted()
        return Snapshot(
            self._clock(),
            self._since_s,
            self._swarm,
            models=tuple(each.listed for manifest, each in self._models.items() if manifest in hosted),
            peers=[tracker.observation for tracker in self._polls.trackers.values()],
            jobs=list(self._jobs.values()),
            totals=dict(self._polls.totals.models),
            work=dict(self._polls.totals.peers),
        )

    def _hosted(self) -> set[bytes]:
        return {tracker.manifest for tracker in self._polls.trackers.values()}

    async def _keep_crawling(self) -> None:
        catalog_read_s = -CATALOG_S
        while True:
            is_requested = self._crawl_requested.is_set()
            self._crawl_requested.clear()
            now_s = loop_time()
            # A failed lookup stops neither later crawls nor the polling of peers that are known.
            try:
                if now_s - catalog_read_s >= CATALOG_S:
                    catalog_read_s = now_s
                    await self._update_catalog(await read_catalog(self._directory))
                    await self._find_workers()
                elif is_requested:  # a worker may have announced that its job is done
                    await self._find_workers()
                await self._find_peers()
            except SwarmnetError as error:
                _log.warning("cannot read the directory: %s", error)
            except Exception:  # noqa: BLE001 - one failed crawl must not end the observer
                _log.exception("cannot read the directory")
            self._polls.drop_expired({peer for job in self._jobs.values() for peer in job.workers})
            async with self._crawled:
                self._has_crawled = True
                self._crawled.notify_all()
            await asyncio.sleep(MIN_CRAWL_S)
            await within(self._polls.interval_s * 2, self._crawl_requested.wait())

    async def _check_for_leave(self) -> None:
        """Request a crawl and wait for it, because a peer announces in the directory that it
        leaves."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_CHECK_S), self._crawled:
                self._crawl_requested.set()
                await self._crawled.wait()

    # ---- one crawl ------------------------------------------------------------------------------

    async def _update_catalog(self, catalog: Catalog) -> None:
        """Take the models and jobs of the catalog. Models and jobs that are missing from it stay
        while a known peer hosts or trains them."""
        hosted = self._hosted()
        self._models = {manifest: each for manifest, each in self._models.items() if manifest in hosted} | {
            model.manifest: self._observed(model)
            for model in catalog.models
            if not self._model_names or model.manifest in self._model_names
        }
        self._jobs = {
            job_id: job for job_id, job in self._jobs.items() if job_id in catalog.jobs or job.workers
        }
        found = await self._look_up_each(
            (job_id for job_id in catalog.jobs if job_id not in self._jobs), self._find_job
        )
        self._jobs |= {job_id: job for job_id, job in found.items() if job is not None}

    def _observed(self, model: CatalogModel) -> _ObservedModel:
        listed = replace(model, name=self._model_names.get(model.manifest, model.name))
        if (known := self._models.get(model.manifest)) is not None:
            return replace(known, listed=listed)
        hosts = HostSample(self._directory, model.manifest, self._rng)
        return _ObservedModel(listed, hosts, ExpertSample(self._directory, model.manifest))

    async def _find_job(self, job_id: str) -> JobObservation | None:
        from swarmnet_protocols.training.job_records import find_job  # imports torch, which takes seconds

        try:
            job, _ = await find_job(self._directory, job_id)
        except Unreachable:  # any peer may list a job that does not exist
            return None
        about = job.job
        return JobObservation(
            job_id,
            about.job.name,
            about.method.name,
            about.job.rounds,
            stages=about.stage_count,
            evaluation_tokens=about.evaluation_tokens,
        )

    async def _find_workers(self) -> None:
        self._workers = {job_id: known for job_id, known in self._workers.items() if job_id in self._jobs}
        if self._jobs:
            self._workers |= await self._look_up_each(self._jobs, self._workers_of)

    async def _workers_of(self, job_id: str) -> "dict[RoundMember, WorkerPosition]":
        from swarmnet_protocols.training.job_records import find_records
        from swarmnet_protocols.training.pipeline.stages import groups

        found: dict[RoundMember, WorkerPosition] = {}
        for group in groups(job_id, self._jobs[job_id].stages):
            records = await find_records(self._directory, group)
            found |= {each.worker: each.position for each in records if not each.copy}
        return found

    async def _find_peers(self) -> None:
        """Read the hosts and expert peers of every model, select the peers to poll, and update
        these peers and the jobs."""
        models, trackers = self._models, self._polls.trackers
        records = await self._look_up_each(models, lambda manifest: models[manifest].hosts.refresh())
        hosts: dict[PeerId, HostInfo] = {}
        for each in (each for found in records.values() for each in found):
            if each.peer not in hosts or hosts[each.peer].sequence < each.sequence:
                hosts[each.peer] = each
        of_experts = await self._look_up_each(models, lambda manifest: models[manifest].experts.refresh())
        experts = {each.peer: (each, manifest) for manifest, found in of_experts.items() for each in found}
        workers = {
            worker.peer: worker.addresses
            for found in self._workers.values()
            for worker in found
            if worker.addresses
        }
        self._polls.select(
            workers
            | {peer: each.addresses for peer, (each, _) in experts.items()}
            | {peer: each.addresses for peer, each in hosts.items()}
        )
        for peer, tracker in trackers.items():
            is_listed = tracker.manifest in models
            if peer in hosts:
                tracker.on_record(hosts[peer], self._clock())
            elif tracker.hosts_blocks and (tracker.manifest in records or not is_listed):
                tracker.on_record_absent()
            if peer in experts:
                tracker.on_experts(*experts[peer], self._clock())
            elif tracker.manifest in of_experts or not is_listed:
                tracker.on_experts_absent()
        for job_id, found in self._workers.items():
            known = {worker: at.round for worker, at in found.items() if worker.peer in trackers}
            job = self._jobs[job_id]
            self._jobs[job_id] = replace(
                job,
                workers=tuple(worker.peer for worker in known if worker.addresses),
                left={worker.peer: round for worker, round in known.items() if not worker.addresses},
                round=max((min(round, job.rounds) for round in known.values()), default=job.round),
            )

    async def _look_up_each(self, keys: Iterable[K], look_up: Callable[[K], Awaitable[T]]) -> dict[K, T]:
        """Return the result of ``look_up`` for each key, ``MAX_LOOKUPS`` at a time. Failed lookups
        are left out."""

        async def one(key: K) -> tuple[K, T] | None:
            async with self._lookups:
                try:
                    return key, await look_up(key)
                except SwarmnetError as error:
                    _log.warning("cannot read the directory: %s", error)
                    return None

        return dict(found for found in await all_of(*map(one, keys)) if found is not None)
