"""The observer: finds everybody in a swarm and asks them, again and again, what they do."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

from swarmnet.dashboard.contacts import Contact
from swarmnet.dashboard.sightings import JobSighting, Look, SwarmAbout
from swarmnet.dashboard.tally import Tallies
from swarmnet_protocols.aio import cancel
from swarmnet_protocols.catalog import Catalog, CatalogModel, read_catalog
from swarmnet_protocols.clock import Clock
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import (
    PeerUnreachable,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.hosts import read_numbered
from swarmnet_protocols.protocol_ids import REPORT
from swarmnet_protocols.reports import ask, check
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.board import find_job, find_workers
from swarmnet_protocols.transport import PeerId, Stream, Transport
from swarmnet_protocols.wire import report_pb2

MAX_PEERS = 2000
MAX_OPENING = 32
"""Streams that are opened at the same time."""
MIN_POLL_S = 2.0
MAX_POLL_S = 4.0
POLLS_PER_S = 125
"""Of all peers together: the more there are, the more seldom each is asked."""
REPLY_S = 3.0
"""A peer that has been asked and says nothing for so long is lost: with ``MAX_POLL_S`` and a tick, within 10 s of its fault."""
GOODBYE_S = 3.0
MIN_LOOK_S = 1.0
CATALOG_S = 20.0
REOPEN_S = 0.2
RETRY_S = 2.0
MAX_RETRY_S = 30.0
_log = logging.getLogger(__name__)


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
        self._jobs: dict[str, JobSighting] = {}
        self._tallies = Tallies()
        self._since_s = vantage.clock()
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
                await self._look_for_hosts()
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
        """Take what is listed. What is listed no more stays as long as somebody we know hosts or trains it."""
        hosted = self._hosted()
        kept = {manifest: model for manifest, model in self._listed.items() if manifest in hosted}
        self._listed = kept | {
            model.manifest: model for model in map(self._named, catalog.models) if self._is_meant(model)
        }
        self._jobs = {
            job_id: job for job_id, job in self._jobs.items() if job_id in catalog.jobs or job.workers
        }
        for job_id in catalog.jobs:
            if job_id not in self._jobs:
                with contextlib.suppress(Unreachable):  # anybody may list what does not exist
                    job, _ = await find_job(self._vantage.directory, job_id)
                    about = job.job.job.name, job.job.method.name, job.job.job.rounds
                    self._jobs[job_id] = JobSighting(job_id, *about)

    def _named(self, model: CatalogModel) -> CatalogModel:
        return replace(model, name=self._names.get(model.manifest, model.name))

    def _is_meant(self, model: CatalogModel) -> bool:
        return not self._names or model.manifest in self._names

    async def _look_for_hosts(self) -> None:
        found: dict[PeerId, int] = {}
        for manifest in self._listed:
            for info, body, sequence in await read_numbered(self._vantage.directory, manifest):
                if found.get(info.peer, -1) < sequence and self._meet(info.peer, info.addresses):
                    found[info.peer] = sequence
                    self._contacts[info.peer].announced(info, body, sequence, self._vantage.clock())
        for peer, contact in self._contacts.items():
            if peer not in found:
                contact.withdrawn()

    async def _look_for_workers(self) -> None:
        for job_id, known in list(self._jobs.items()):
            workers = [
                worker
                for worker in await find_workers(self._vantage.directory, job_id)
                if self._meet(worker.peer, worker.addresses)
            ]
            self._jobs[job_id] = replace(
                known,
                workers=tuple(worker.peer for worker in workers),
                round=max((min(worker.round, known.rounds) for worker in workers), default=known.round),
            )

    def _meet(self, peer: PeerId, addresses: Sequence[str]) -> bool:
        """Whether a peer is, from now on, one of those that we ask."""
        if peer not in self._contacts:
            if len(self._contacts) >= MAX_PEERS:
                return False
            self._contacts[peer] = Contact(peer, self._vantage.clock())
            self._asking[peer] = asyncio.create_task(self._keep_asking(self._contacts[peer]), name="ask")
        self._contacts[peer].addresses = tuple(addresses)
        return True

    def _forget(self) -> None:
        now_s = self._vantage.clock()
        trained = {peer for job in self._jobs.values() for peer in job.workers}
        for peer, contact in list(self._contacts.items()):
            if peer not in trained and contact.is_over(now_s):
                del self._contacts[peer]
                self._asking.pop(peer).cancel()
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

    async def _wait_on(self, stream: Stream) -> None:
        """Until it is time to ask again; nothing is to come meanwhile but the stream's end, which raises ``StreamEnded``."""
        try:
            async with asyncio.timeout(self._poll_s * self._vantage.rng.uniform(0.9, 1.1)):
                await stream.receive()
        except TimeoutError:
            return
        raise ProtocolViolation(f"{stream.peer} reports without being asked")

    async def _hear_goodbye(self) -> None:
        """Whoever left on purpose said so in the directory: look there before we say that they were lost."""
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
