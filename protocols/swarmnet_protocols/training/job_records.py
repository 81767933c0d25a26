"""DHT records of a job: the sealed job under its id, and the workers that train it."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement
from swarmnet_protocols.directory.catalog import read_catalog
from swarmnet_protocols.directory.host_announcements import listed
from swarmnet_protocols.errors import ConfigError, ProtocolViolation, SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import all_of
from swarmnet_protocols.net.identity import peer_id_of
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.jobs import SealedJob, open_job
from swarmnet_protocols.training.matchmaking.rosters import MAX_ADDRESSES, round_seconds
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.wire import workers_pb2 as pb

PROTOCOL = 1
"""Version of the records in workers.proto. Records of other versions are ignored."""
MAX_PUBLISHED_BYTES = 12 << 10
"""Most bytes of a published sealed job. A larger one does not fit a DHT record."""
JOB_LIFETIME_S = 24 * 3600.0
"""Seconds that a job's record lives.

Every worker of a job publishes the record again. So it expires a day after the last worker has
left.
"""
WORKER_LIFETIME_S = 60.0
"""Seconds that a worker's record lives.

Workers publish it every 20 s, so two announcements in a row may be lost.
"""
HASH_BYTES = 32
MAX_LOOKUPS = 8
"""Concurrent lookups in the directory. With more, one list of jobs loads many peers at once. With
fewer, a long list takes longer."""
LOOKS = 3
"""Lookups before a record counts as absent. With fewer, a peer that has just died hides a record.
With more, a list of no jobs takes longer."""


def job_announcement(sealed: bytes) -> Announcement:
    """Return the announcement of a sealed job under its id, for a day.

    Raises ``ConfigError`` if it is larger than ``MAX_PUBLISHED_BYTES``.
    """
    if len(sealed) > MAX_PUBLISHED_BYTES:
        raise ConfigError(
            f"the job has {len(sealed)} bytes, {MAX_PUBLISHED_BYTES} fit a record",
            hint="shorten its model config",
        )
    record = pb.JobRecord(sealed=sealed).SerializeToString()
    return Announcement(_job_topic(open_job(sealed).id), record, JOB_LIFETIME_S)


async def find_job(directory: Directory, job_id: str) -> tuple[SealedJob, bytes]:
    """Find the job with this id. Returns it with its sealed form.

    Raises ``Unreachable`` if there is no record of it, and ``ConfigError`` if this version refuses
    the job.
    """
    refused: ConfigError | None = None
    for record in await directory.lookup(_job_topic(job_id)):
        try:
            sealed = pb.JobRecord.FromString(record.body).sealed
            job = open_job(sealed)
        except ConfigError as error:
            refused = error
            continue
        except (DecodeError, SwarmnetError):
            continue
        if job.id == job_id:
            return job, sealed
    if refused is not None:
        raise refused
    raise Unreachable(
        f"no peer in this swarm has the job {job_id[:16]}…",
        hint="check the id and the bootstrap address; a job is kept by its workers, and for a day after `train create`",
    )


async def find_jobs(directory: Directory) -> list[SealedJob]:
    """Return the jobs in the catalog, in its order. Leaves out jobs that no peer has, and jobs that
    this version refuses."""
    lookups = asyncio.Semaphore(MAX_LOOKUPS)

    async def find(job_id: str) -> SealedJob | None:
        for _ in range(LOOKS):
            async with lookups:
                with suppress(SwarmnetError):
                    return (await find_job(directory, job_id))[0]
        return None

    ids: Sequence[str] = ()
    for _ in range(LOOKS):
        if ids := (await read_catalog(directory)).jobs:
            break
    return [job for job in await all_of(*map(find, ids)) if job is not None]


def worker_announcement(  # noqa: PLR0913 - the fields of the record
    job_id: str,
    addresses: Sequence[str],
    position: WorkerPosition,
    round_s: float = 0.0,
    *,
    spare: bool = False,
    copy: bool = False,
    stays: bool = False,
    leaving: bool = False,
    is_done: bool = False,
) -> Announcement:
    """Return the announcement of a worker, for ``WORKER_LIFETIME_S``.

    A worker that leaves announces itself without ``addresses``. For ``round_s`` see
    ``RoundMember``. ``spare``: the worker waits for a place in the job. ``copy``, ``stays`` and
    ``leaving``: as in ``StageRecord``. ``is_done``: the worker trained the last round. This
    announcement lives as long as the job's own, so that volunteers do not train the job again.
    """
    record = pb.WorkerRecord(
        job=bytes.fromhex(job_id),
        round=position.round,
        state=position.state,
        addresses=listed(addresses),
        protocol=PROTOCOL,
        round_s=round_s,
        spare=spare,
        copy=copy,
        stays=stays,
        leaving=leaving,
    )
    lifetime_s = JOB_LIFETIME_S if is_done else WORKER_LIFETIME_S
    return Announcement(f"train/{job_id}", record.SerializeToString(), lifetime_s)


async def find_workers(directory: Directory, job_id: str) -> dict[RoundMember, WorkerPosition]:
    """Return the workers that have not left, ordered by peer id, with their positions."""
    found = await find_records(directory, job_id)
    return {each.worker: each.position for each in found if each.is_here}


@dataclass(frozen=True)
class StageRecord:
    """A worker's announcement under the id of a job or of a stage."""

    worker: RoundMember
    position: WorkerPosition
    spare: bool
    copy: bool
    """The worker trains another stage, and keeps this state of a stage that has one worker."""
    stays: bool
    """The worker's owner chose its stage."""
    leaving: bool
    """The worker leaves as soon as another one has its state."""

    @property
    def is_here(self) -> bool:
        """True if the worker trains the stage or waits for a place, and has not left."""
        return bool(self.worker.addresses) and not self.copy

    @property
    def trains(self) -> bool:
        """True if the worker has a place in the stage, and has not left."""
        return self.is_here and not self.spare


async def find_records(directory: Directory, job_id: str) -> list[StageRecord]:
    """Return all valid records, ordered by peer id. Workers that left have no addresses."""
    found = []
    for record in await directory.lookup(f"train/{job_id}"):
        try:
            body = pb.WorkerRecord.FromString(record.body)
            round_s = round_seconds(body.round_s)
        except (DecodeError, ProtocolViolation):
            continue
        if body.job.hex() == job_id and body.protocol == PROTOCOL and len(body.state) == HASH_BYTES:
            addresses = tuple(body.addresses[:MAX_ADDRESSES])
            worker = RoundMember(peer_id_of(record.signer), addresses, round_s=round_s)
            position = WorkerPosition(body.round, body.state)
            found.append(StageRecord(worker, position, body.spare, body.copy, body.stays, body.leaving))
    return sorted(found, key=lambda each: each.worker.peer)


def _job_topic(job_id: str) -> str:
    return f"job/{job_id}"
