"""Jobs and their workers in the directory: where a job is found by its id, and who trains it now."""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.host_announcements import listed
from swarmnet_protocols.errors import ConfigError, SwarmnetError, Unreachable
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import peer_id_of
from swarmnet_protocols.training.jobs import SealedJob, open_job
from swarmnet_protocols.training.rosters import MAX_ADDRESSES, Candidate
from swarmnet_protocols.wire import workers_pb2 as pb

PROTOCOL = 1
"""Version of workers.proto that this software speaks."""
MAX_PUBLISHED_BYTES = 12 << 10
"""Of a sealed job: it has to fit a record."""
JOB_LIFETIME_S = 24 * 3600.0
WORKER_LIFETIME_S = 60.0
HASH_BYTES = 32


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says of itself: ``round`` is the next one it takes part in, ``state`` what that starts from."""

    peer: PeerId
    addresses: tuple[str, ...]
    round: int
    state: bytes

    @property
    def member(self) -> Candidate:
        return Candidate(self.peer, self.addresses)


async def publish_job(directory: Directory, sealed: bytes) -> None:
    """Store a sealed job under its id, for a day; every worker of it prolongs that. Raises ``ConfigError`` if it is too large."""
    if len(sealed) > MAX_PUBLISHED_BYTES:
        raise ConfigError(
            f"the job has {len(sealed)} bytes, {MAX_PUBLISHED_BYTES} fit a record",
            hint="shorten its model config",
        )
    record = pb.JobRecord(sealed=sealed).SerializeToString()
    await directory.publish(_job_topic(open_job(sealed).id), record, lifetime_s=JOB_LIFETIME_S)


async def find_job(directory: Directory, job_id: str) -> tuple[SealedJob, bytes]:
    """The job with this id, and its sealed form. Raises ``Unreachable`` if nobody has it, ``ConfigError`` if what is there is refused."""
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
        f"nobody in this swarm knows the job {job_id[:16]}…",
        hint="check the id and the bootstrap address; a job is kept by its workers, and for a day after `train create`",
    )


async def publish_worker(directory: Directory, job_id: str, info: WorkerInfo) -> None:
    record = pb.WorkerRecord(
        job=bytes.fromhex(job_id),
        round=info.round,
        state=info.state,
        addresses=listed(info.addresses),
        protocol=PROTOCOL,
    )
    topic = f"train/{job_id}"
    await directory.publish(topic, record.SerializeToString(), lifetime_s=WORKER_LIFETIME_S)


async def find_workers(directory: Directory, job_id: str) -> list[WorkerInfo]:
    """Everybody who credibly says to train the job, in the order of peer ids."""
    found = []
    for record in await directory.lookup(f"train/{job_id}"):
        try:
            body = pb.WorkerRecord.FromString(record.body)
        except DecodeError:
            continue
        if body.job.hex() == job_id and body.protocol == PROTOCOL and len(body.state) == HASH_BYTES:
            addresses = tuple(body.addresses[:MAX_ADDRESSES])
            peer = peer_id_of(record.signer)
            found.append(WorkerInfo(peer, addresses, body.round, body.state))
    return sorted(found, key=lambda info: info.peer)


def _job_topic(job_id: str) -> str:
    return f"job/{job_id}"
