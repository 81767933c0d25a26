"""The catalog of a swarm: the models that are hosted and the jobs that are trained, for clients that know no hash or id.

All entries are under one topic, which has room for some thousands. So a peer announces what it hosts only while a sample shows that few others do.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.wire import records_pb2 as pb

TOPIC = "catalog"
MAX_NAME_CHARS = 128
MAX_MODELS = 32
"""Most models that are read: those named by most peers. Any member may name models that do not exist."""
MAX_JOBS = 32
LIFETIME_S = 600.0
ANNOUNCE_S = 200.0
"""Seconds between two announcements. Rare: an entry names what exists, not which peers are online."""
ENOUGH = 32
"""Peers that announce the same model or job, with which others need not. Many: readers leave out what few peers name."""
SAMPLE = 256
"""Entries of a sample of the catalog."""


@dataclass(frozen=True)
class CatalogModel:
    manifest: bytes
    name: str
    blocks: int


@dataclass(frozen=True)
class Catalog:
    models: tuple[CatalogModel, ...] = ()
    jobs: tuple[str, ...] = ()
    """Ids, 64 hexadecimal digits."""


async def keep_model_announced(directory: Directory, model: CatalogModel) -> NoReturn:
    """Announce a model until cancelled."""
    entry = pb.CatalogModel(manifest=model.manifest, name=model.name[-MAX_NAME_CHARS:], blocks=model.blocks)
    await _keep_announced(directory, pb.CatalogRecord(model=entry))


async def keep_job_announced(directory: Directory, job_id: str) -> NoReturn:
    """Announce a job until cancelled."""
    entry = pb.CatalogJob(id=bytes.fromhex(job_id))
    await _keep_announced(directory, pb.CatalogRecord(job=entry))


async def _keep_announced(directory: Directory, record: pb.CatalogRecord) -> NoReturn:
    body = record.SerializeToString()
    while True:
        with contextlib.suppress(SwarmnetError):  # the entry outlives a missed announcement
            sample = await directory.sample([TOPIC], SAMPLE)
            # Entries that end before all peers have looked again do not count.
            least = directory.clock() + ANNOUNCE_S
            lasting = [each.body for each in sample if each.expires_at > least]
            if not is_enough(lasting, body, is_full=len(sample) >= SAMPLE):
                await directory.publish(TOPIC, body, lifetime_s=LIFETIME_S)
        await asyncio.sleep(ANNOUNCE_S)


def is_enough(sample: Sequence[bytes], body: bytes, *, is_full: bool) -> bool:
    """Whether enough entries are equal to ``body``: ``ENOUGH``, or of a full sample half of what each would have if all were equally frequent.

    ``is_full``: the catalog may have more entries than the sample.
    """
    wanted = float(ENOUGH)
    if is_full and sample:
        wanted = min(wanted, len(sample) / len({*sample}) / 2)
    return sample.count(body) >= wanted


async def read_catalog(directory: Directory) -> Catalog:
    """The catalog; a model with several names has the one that most peers use."""
    return merge(record.body for record in await directory.lookup(TOPIC))


def merge(bodies: Iterable[bytes]) -> Catalog:
    """One catalog of the entries of all peers. Invalid entries are left out."""
    named: dict[bytes, Counter[tuple[str, int]]] = {}
    jobs: Counter[str] = Counter()
    for body in bodies:
        try:
            record = pb.CatalogRecord.FromString(body)
        except DecodeError:
            continue
        model = record.model
        if len(model.manifest) == 32 and _is_name(model.name) and 0 < model.blocks <= MAX_BLOCKS:
            named.setdefault(model.manifest, Counter())[model.name, model.blocks] += 1
        if len(record.job.id) == 32:
            jobs[record.job.id.hex()] += 1
    # Most named first, then by hash: the same entries give the same catalog on every machine.
    manifests = sorted(named, key=lambda manifest: (-named[manifest].total(), manifest))[:MAX_MODELS]
    models = [CatalogModel(manifest, *_most_used(named[manifest])) for manifest in manifests]
    return Catalog(tuple(models), tuple(sorted(jobs, key=lambda job: (-jobs[job], job))[:MAX_JOBS]))


def _most_used(names: Counter[tuple[str, int]]) -> tuple[str, int]:
    return min(names, key=lambda each: (-names[each], each))


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()
