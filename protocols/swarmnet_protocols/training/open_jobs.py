"""The jobs of a swarm as a volunteer sees them: what they need, and who trains them.

Reading them does not import torch, so a host without torch stays small. ``jobs.open_job`` checks a
job completely before anything of it runs.
"""

from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from pydantic import ValidationError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.catalog import read_catalog
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import peer_id_of
from swarmnet_protocols.training import MAX_WORKERS
from swarmnet_protocols.training.job_settings import (
    DataSection,
    ExchangeSection,
    JobSection,
    MethodSection,
    StagesSection,
)
from swarmnet_protocols.training.jobs import job_id, verified
from swarmnet_protocols.training.pipeline.stages import groups
from swarmnet_protocols.wire import workers_pb2 as pb


@dataclass(frozen=True)
class JobOutline:
    """The demand of a sealed job for workers."""

    id: str
    name: str
    rounds: int
    least: int
    """Workers without which no round runs."""
    most: int
    needs_user: bool
    """True if the user of each worker must provide files or code."""
    groups: tuple[str, ...]
    """The ids under which workers meet: the job's own, or one for each stage of its model."""


@dataclass(frozen=True)
class OpenJob:
    """A job and the peers that train it. In a job with stages: the peers of the smallest stage."""

    outline: JobOutline
    workers: frozenset[PeerId]
    is_done: bool
    """True if a worker said that it trained the last round, and none trains now."""

    @property
    def is_full(self) -> bool:
        """True if the job takes no more workers."""
        return len(self.workers) >= self.outline.most


def outline_of(sealed: bytes) -> JobOutline:
    """Return the outline of a sealed job.

    Raises ``SwarmnetError`` for a job that this version refuses, and ``ValidationError`` for values
    out of range.
    """
    content, _, signed = verified(sealed)
    fields = content if isinstance(content, dict) else {}
    job, exchange = JobSection.model_validate(fields.get("job")), fields.get("exchange")
    shared = ExchangeSection.model_validate(exchange)
    sources = DataSection.model_validate(fields.get("data")).sources
    has_code = MethodSection.model_validate(fields.get("method")).code is not None
    model = fields.get("model")
    is_given = isinstance(model, dict) and not (model.get("config") or model.get("checkpoint"))
    needs_user = has_code or is_given or any(source.needs_path for source in sources)
    id, stages = job_id(signed), fields.get("stages")
    count = None if stages is None else StagesSection.model_validate(stages).count
    met = tuple(groups(id, count))
    return JobOutline(id, job.name, job.rounds, shared.min_workers, shared.max_workers, needs_user, met)


async def read_open_jobs(directory: Directory, known: MutableMapping[str, JobOutline]) -> list[OpenJob]:
    """Return the jobs in the catalog. ``known`` keeps their outlines for the next call.

    Raises ``SwarmnetError`` if the directory does not answer.
    """
    found = []
    for id in (await read_catalog(directory)).jobs:
        if id not in known:
            for record in await directory.lookup(f"job/{id}"):
                with suppress(DecodeError, SwarmnetError, ValidationError):
                    outline = outline_of(pb.JobRecord.FromString(record.body).sealed)
                    if outline.id == id:
                        known[id] = outline
        if id in known:
            found.append(await _with_workers(directory, known[id]))
    return found


async def _with_workers(directory: Directory, outline: JobOutline) -> OpenJob:
    found: list[frozenset[PeerId]] = []
    ended = False
    for group in outline.groups:
        workers = set()
        for record in (await directory.lookup(f"train/{group}"))[:MAX_WORKERS]:
            with suppress(DecodeError):
                body = pb.WorkerRecord.FromString(record.body)
                if body.job.hex() == group and body.addresses:
                    workers.add(peer_id_of(record.signer))
                ended |= body.job.hex() == group and body.round >= outline.rounds
        found.append(frozenset(workers))
    return OpenJob(outline, min(found, key=len), ended and not any(found))
