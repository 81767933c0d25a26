"""The observer: finds all nodes and workers of a swarm and asks each for its report, again and again."""

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

from swarmnet.dashboard.observing.contacts import Contact
from swarmnet.dashboard.observing.seats import Candidate, seated
from swarmnet.dashboard.observing.sightings import JobSighting, Look, SwarmAbout
from swarmnet.dashboard.observing.tally import Tallies
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.catalog import Catalog, CatalogModel, read_catalog
from swarmnet_protocols.directory.host_announcements import read_numbered
from swarmnet_protocols.directory.node_reports import ask, check
from swarmnet_protocols.errors import (
    PeerUnreachable,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.machine.aio import all_of, cancel
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.net import PeerId, Stream, Transport
from swarmnet_protocols.net.protocol_ids import REPORT
from swarmnet_protocols.routing.chain_search import HostInfo
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.job_records import WorkerInfo, find_job, find_workers
from swarmnet_protocols.wire import records_pb2, report_pb2

MAX_PEERS = 2000
MAX_LOOKUPS = 8
"""Topics of the directory that are read at the same time."""
MAX_OPENING = 32
"""Streams that are opened at the same time."""
MIN_POLL_S = 2.0
MAX_POLL_S = 4.0
POLLS_PER_S = 125
"""Most requests a second to all peers together: the more peers there are, the longer each waits between two."""
REPLY_S = 3.0
"""A peer that has been asked and says nothing for so long is lost: with ``MAX_POLL_S`` and a tick, within 10 s of its fault."""
GOODBYE_S = 3.0
MIN_LOOK_S = 1.0
CATALOG_S = 20.0
REOPEN_S = 0.2
RETRY_S = 2.0
MAX_RETRY_S = 30.0
_log = logging.getLogger(__name__)
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class Vantage:
    """The ports of an observer: where it watches from."""

    transport: Transport
    directory: Directory
    clock: Clock
    rng: random.Random
    timing: Timing = field(default_factory=Timing)
    own: Callable[[], report_pb2.NodeReport] | None = None
    """What the node says in whose process we are, for it cannot be asked over the network. Raises ``SwarmnetError``."""


class Observer:
    """A ``Source`` of looks at a swarm. Made by ``watch``."""

    def __init__(self, vantage: Vantage, about: SwarmAbout, names: Mapping[bytes, str]) -> None:
        self._vantage = vantage
        self._about = about
        self._names = names
        self._listed: dict[bytes, CatalogModel] = {}
        self._contacts: dict[PeerId, Contact] = {}
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._failures: Counter[PeerId] = Counter()
        self._salt = vantage.rng.randbytes(16)
        self._jobs: dict[str, JobSighting] = {}
        self._workers: dict[str, list[WorkerInfo]] = {}
        self._tallies = Tallies()
        self._since_s = vantage.clock()
        self._reading = asyncio.Semaphore(MAX_LOOKUPS)
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self._wanted = asyncio.Event()
        self._looked = asyncio.Condition()

    @classmethod
    @asynccontextmanager
    async def watch(
        cls, vantage: Vantage, about: SwarmAbout, names: Mapping[bytes, str] | None = None
    ) -> AsyncIterator["Observer"]:
        """An observer that watches while the context is open.

        ``names`` has the models that the swarm is for, by their hashes; without it, it is for any.
        """
        observer = cls(vantage, about, names or {})
        looking = asyncio.create_task(observer._keep_looking(), name="observer")
        try:
            yield observer
        finally:
            await cancel(looking, *observer._asking.values())

    def look(self) -> Look:
        """What is known now."""
        return Look(
            self._vantage.clock(),
            self._since_s,
            self._about,
            models=self._models(),
            peers=[contact.sighting() for contact in self._contacts.values()],
            jobs=list(self._jobs.values()),
            totals=dict(self._tallies.models),
            peer_positions=dict(self._tallies.peers),
        )

    # ---- the directory ----------------------------------------------------------------------------------

    def _models(self) -> tuple[CatalogModel, ...]:
        hosted = self._hosted()
        return tuple(model for manifest, model in self._listed.items() if manifest in hosted)

    def _hosted(self) -> set[bytes]:
        return {contact.manifest for contact in self._contacts.values()}

    async def _keep_looking(self) -> None:
        catalog_due_s = -CATALOG_S
        while True:
            self._wanted.clear()
            now_s = asyncio.get_running_loop().time()
            # A directory that does not answer now may answer later; whom we know, we go on asking.
            try:
                if now_s - catalog_due_s >= CATALOG_S:
                    catalog_due_s = now_s
                    await self._read(await read_catalog(self._vantage.directory))
                    await self._look_for_workers()
                await self._look_for_peers()
            except SwarmnetError as error:
                _log.warning("the directory could not be read: %s", error)
            except Exception:  # noqa: BLE001 - the supervisor: who cannot be found now may be found later
                _log.exception("the directory could not be read")
            self._forget()
            async with self._looked:
                self._looked.notify_all()
            await asyncio.sleep(MIN_LOOK_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s * 2):
                    await self._wanted.wait()

    async def _read(self, catalog: Catalog) -> None:
        """Take what is listed. What is no longer listed stays while a known peer hosts or trains it."""
        hosted = self._hosted()
        kept = {manifest: model for manifest, model in self._listed.items() if manifest in hosted}
        self._listed = kept | {
            model.manifest: model for model in map(self._named, catalog.models) if self._is_meant(model)
        }
        self._jobs = {
            job_id: job for job_id, job in self._jobs.items() if job_id in catalog.jobs or job.workers
        }
        found = await self._each(
            (job_id for job_id in catalog.jobs if job_id not in self._jobs), self._find_job
        )
        self._jobs |= {job_id: job for job_id, job in found.items() if job is not None}

    async def _find_job(self, job_id: str) -> JobSighting | None:
        try:
            job, _ = await find_job(self._vantage.directory, job_id)
        except Unreachable:  # any peer may list a job that does not exist
            return None
        return JobSighting(job_id, job.job.job.name, job.job.method.name, job.job.job.rounds)

    def _named(self, model: CatalogModel) -> CatalogModel:
        return replace(model, name=self._names.get(model.manifest, model.name))

    def _is_meant(self, model: CatalogModel) -> bool:
        return not self._names or model.manifest in self._names

    async def _look_for_workers(self) -> None:
        self._workers = {job_id: known for job_id, known in self._workers.items() if job_id in self._jobs}
        self._workers |= await self._each(self._jobs, partial(find_workers, self._vantage.directory))

    async def _look_for_peers(self) -> None:
        """Find who hosts what, choose whom to watch, and take note of what those announce."""
        records = await self._each(self._listed, partial(read_numbered, self._vantage.directory))
        newest: dict[PeerId, tuple[HostInfo, records_pb2.HostRecord, int]] = {}
        for info, body, sequence in (each for found in records.values() for each in found):
            if info.peer not in newest or newest[info.peer][2] < sequence:
                newest[info.peer] = info, body, sequence
        workers = {worker.peer: worker.addresses for found in self._workers.values() for worker in found}
        self._choose(workers | {peer: info.addresses for peer, (info, _, _) in newest.items()})
        for peer, contact in self._contacts.items():
            if peer in newest:
                contact.announced(*newest[peer], self._vantage.clock())
            elif contact.manifest in records or contact.manifest not in self._listed:
                contact.withdrawn()
        for job_id, found in self._workers.items():
            seen = [worker for worker in found if worker.peer in self._contacts]
            known = self._jobs[job_id]
            self._jobs[job_id] = replace(
                known,
                workers=tuple(worker.peer for worker in seen),
                round=max((min(worker.round, known.rounds) for worker in seen), default=known.round),
            )

    async def _each(self, keys: Iterable[K], read: Callable[[K], Awaitable[T]]) -> dict[K, T]:
        """What is read for each key, a few at once; without those that cannot be read now."""

        async def one(key: K) -> tuple[K, T] | None:
            async with self._reading:
                try:
                    return key, await read(key)
                except SwarmnetError as error:
                    _log.warning("the directory could not be read: %s", error)
                    return None

        return dict(found for found in await all_of(*map(one, keys)) if found is not None)

    def _choose(self, addresses: Mapping[PeerId, tuple[str, ...]]) -> None:
        """Watch those that announce themselves with these addresses, and whom we know, as far as there are places."""
        now_s, ourselves = self._vantage.clock(), self._vantage.transport.peer_id
        candidates = []
        for peer in {*addresses, *self._contacts}:
            contact = self._contacts.get(peer)
            candidates.append(
                Candidate(
                    peer,
                    addresses[peer] if contact is None else addresses.get(peer, contact.addresses),
                    0.0 if peer == ourselves else now_s if contact is None else contact.first_seen_s,
                    answers=peer == ourselves or (contact is not None and contact.answers),
                    asked=contact is not None,
                    failures=self._failures[peer],
                )
            )
        chosen = seated(candidates, MAX_PEERS, self._salt)
        self._failures = Counter({each.peer: each.failures for each in candidates if each.failures})
        for peer in [peer for peer in self._contacts if peer not in chosen]:
            self._drop(peer)
        for each in candidates:
            if each.peer in chosen:
                self._meet(each.peer).addresses = each.addresses

    def _meet(self, peer: PeerId) -> Contact:
        """One of those that we ask, from now on if not before."""
        if peer not in self._contacts:
            self._contacts[peer] = Contact(peer, self._vantage.clock())
            self._asking[peer] = asyncio.create_task(self._keep_asking(self._contacts[peer]), name="ask")
        return self._contacts[peer]

    def _drop(self, peer: PeerId) -> None:
        del self._contacts[peer]
        self._asking.pop(peer).cancel()

    def _forget(self) -> None:
        now_s = self._vantage.clock()
        trained = {peer for job in self._jobs.values() for peer in job.workers}
        for peer, contact in list(self._contacts.items()):
            if peer not in trained and contact.is_over(now_s):
                self._drop(peer)
        self._tallies.keep_only(self._contacts)

    # ---- the peers --------------------------------------------------------------------------------------

    @property
    def _poll_s(self) -> float:
        return min(max(MIN_POLL_S, len(self._contacts) / POLLS_PER_S), MAX_POLL_S)

    async def _keep_asking(self, contact: Contact) -> None:
        if contact.peer == self._vantage.transport.peer_id:
            await self._keep_asking_ourselves(contact)
        retry_s = RETRY_S
        while True:
            known = contact.newest
            try:
                await self._ask_until_it_ends(contact)
            except StreamEnded:
                # Both may be well: a stream on which there were answers is opened once more before its end means anything.
                if contact.newest is not known:
                    retry_s = RETRY_S
                    await asyncio.sleep(REOPEN_S)
                    continue
                await self._hear_goodbye()
            except PeerUnreachable:
                await self._hear_goodbye()
            except SwarmnetError as error:
                _log.debug("%s is lost: %s", contact.peer, error)
            contact.failed(self._vantage.clock(), self._tallies)
            self._failures[contact.peer] += 1
            await asyncio.sleep(retry_s * self._vantage.rng.uniform(0.8, 1.2))
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _ask_until_it_ends(self, contact: Contact) -> NoReturn:
        timing = self._vantage.timing
        async with self._opening:
            stream = await self._vantage.transport.open(
                contact.peer, REPORT, addresses=contact.addresses, deadline_s=timing.open_s
            )
        try:
            while True:
                await self._ask_once(contact, stream)
                await self._wait_on(stream)
        finally:
            stream.close()

    async def _ask_once(self, contact: Contact, stream: Stream) -> None:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        report = await ask(stream, reply_s=REPLY_S)
        contact.delayed((loop.time() - asked_s) / 2)
        contact.reported(report, self._vantage.clock(), self._tallies)
        self._failures.pop(contact.peer, None)

    async def _wait_on(self, stream: Stream) -> None:
        """Until it is time to ask again; nothing is to come meanwhile but the stream's end, which raises ``StreamEnded``."""
        try:
            async with asyncio.timeout(self._poll_s * self._vantage.rng.uniform(0.9, 1.1)):
                await stream.receive()
        except TimeoutError:
            return
        raise ProtocolViolation(f"{stream.peer} reports without being asked")

    async def _hear_goodbye(self) -> None:
        """A peer that leaves on purpose says so in the directory: look there before calling it lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S), self._looked:
                self._wanted.set()
                await self._looked.wait()

    async def _keep_asking_ourselves(self, contact: Contact) -> None:
        while True:
            if self._vantage.own is not None:
                try:
                    report = self._vantage.own()
                    check(report)
                    contact.reported(report, self._vantage.clock(), self._tallies)
                except SwarmnetError:  # it is paused
                    contact.failed(self._vantage.clock(), self._tallies)
            await asyncio.sleep(self._poll_s)
