"""The catalog of a swarm: its hosted models and trained jobs, for clients that know no hash or id.

Models and jobs with workers are under one topic, which has room for some thousands. So a peer
announces what it hosts only while a sample shows that few others announce the same. Jobs that a
machine made are under a second topic, because they live longer.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement, Announcer
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.manifest import MAX_BLOCKS, MAX_FILE_BYTES
from swarmnet_protocols.wire import records_pb2 as pb

_log = logging.getLogger(__name__)

TOPIC = "catalog"
MADE_TOPIC = "catalog/made"
"""Topic of jobs that a machine made. They may have no workers yet.

Replicas keep one record of a peer under a topic, and replace it only by a record that expires
later. Under ``TOPIC``, a job that a machine made would shut out the model that it hosts for a day.
"""
MAX_NAME_CHARS = 128
MAX_MODELS = 32
"""Most models that are read. The models that most peers name come first.

Any member may name models that do not exist.
"""
MAX_JOBS = 32
MAX_MADE = 16
"""Most jobs that one peer lists as made by itself.

With fewer, the jobs of a comparison would not all be found by name. With more, one peer could fill
the catalog.
"""
LIFETIME_S = 600.0
ANNOUNCE_S = 200.0
"""Seconds between two announcements.

Rare, because an entry names what exists, not which peers are online.
"""
ENOUGH = 32
"""Number of peers whose announcements of a model or job are enough.

Readers leave out entries that few peers name, so a smaller number would hide a model. A larger one
would fill the topic.
"""
SAMPLE = 256
"""Number of entries in a sample of the catalog."""


@dataclass(frozen=True)
class CatalogModel:
    """A model, as hosts describe it.

    - ``context``: most positions of a sequence; 0 if unknown.
    - ``size_bytes``: size of all its blocks in the files; 0 if unknown.
    """

    manifest: bytes
    name: str
    blocks: int
    context: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class Catalog:
    models: tuple[CatalogModel, ...] = ()
    jobs: tuple[str, ...] = ()
    """Ids, 64 hexadecimal digits each."""


def model_announcer(directory: Directory, rng: random.Random, model: CatalogModel) -> Announcer:
    """Return an announcer of a model that this peer hosts."""
    entry = pb.CatalogModel(
        manifest=model.manifest,
        name=model.name[-MAX_NAME_CHARS:],
        blocks=model.blocks,
        context=model.context,
        size_bytes=model.size_bytes,
    )
    return _announcer(directory, rng, pb.CatalogRecord(model=entry))


def job_announcer(
    directory: Directory, rng: random.Random, job_id: str, made: Sequence[str] = ()
) -> Announcer:
    """Return an announcer of a job that this peer trains, and of the jobs that it ``made``."""
    entry = pb.CatalogJob(id=bytes.fromhex(job_id))
    return _announcer(directory, rng, pb.CatalogRecord(job=entry, made=_made(made)))


def made_jobs(made: Sequence[str], lifetime_s: float) -> Announcement:
    """Return the announcement of jobs that this peer made, the newest first."""
    return Announcement(MADE_TOPIC, pb.CatalogRecord(made=_made(made)).SerializeToString(), lifetime_s)


def _made(ids: Sequence[str]) -> list[pb.CatalogJob]:
    return [pb.CatalogJob(id=bytes.fromhex(each)) for each in ids[:MAX_MADE]]


def _announcer(directory: Directory, rng: random.Random, record: pb.CatalogRecord) -> Announcer:
    entry = Announcement(TOPIC, record.SerializeToString(), LIFETIME_S)

    async def is_needed() -> bool:
        sample = await directory.sample([TOPIC], SAMPLE)
        # Entries that expire before all peers have checked again do not count.
        least = directory.clock() + ANNOUNCE_S
        lasting = [each.body for each in sample if each.expires_at > least]
        return not is_enough(lasting, entry.body, is_full=len(sample) >= SAMPLE)

    return Announcer(directory, rng, lambda: [entry], ANNOUNCE_S, is_needed=is_needed)


def is_enough(sample: Sequence[bytes], body: bytes, *, is_full: bool) -> bool:
    """Return whether enough entries are equal to ``body``.

    Enough are ``ENOUGH`` entries. In a full sample, half of the entries that each model and job
    would have on average are also enough. ``is_full``: the catalog may have more entries than the
    sample.
    """
    wanted = float(ENOUGH)
    if is_full and sample:
        wanted = min(wanted, len(sample) / len({*sample}) / 2)
    return sample.count(body) >= wanted


async def read_catalog(directory: Directory) -> Catalog:
    """Read the catalog. A model with several names gets the name that most peers use."""
    listed, made = await asyncio.gather(directory.lookup(TOPIC), directory.lookup(MADE_TOPIC))
    return merge(record.body for record in (*listed, *made))


async def announced_model(directory: Directory, name: str) -> bytes | None:
    """Return the manifest hash of the model that peers announce under ``name``, or None.

    Warns the user, because nobody signed the name. Raises ``ConfigError`` if peers announce several
    models, because any of them may be meant.
    """
    found = [model.manifest for model in (await read_catalog(directory)).models if model.name == name]
    if len(found) > 1:
        listed = ", ".join(manifest.hex()[:16] for manifest in found)
        raise ConfigError(
            f"peers of this swarm announce {len(found)} models as {name!r}: {listed}",
            hint="the owner of the swarm lists the right one: swarmnet model publish",
        )
    if not found:
        return None
    _log.warning(
        "nobody signed the name of this model: its hosts chose the name",
        extra={"model": name, "manifest": found[0].hex()[:16]},
    )
    return found[0]


def merge(bodies: Iterable[bytes]) -> Catalog:
    """Merge the entries of all peers into one catalog. Leaves out invalid entries."""
    named: dict[bytes, Counter[tuple[str, int, int, int]]] = {}
    trained: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for body in bodies:
        try:
            record = pb.CatalogRecord.FromString(body)
        except DecodeError:
            continue
        model = record.model
        if len(model.manifest) == 32 and _is_name(model.name) and 0 < model.blocks <= MAX_BLOCKS:
            size = model.size_bytes if model.size_bytes <= MAX_FILE_BYTES else 0
            described = model.name, model.blocks, model.context, size
            named.setdefault(model.manifest, Counter())[described] += 1
        if len(record.job.id) == 32:
            trained[record.job.id.hex()] += 1
        made.update({each.id.hex() for each in record.made[:MAX_MADE] if len(each.id) == 32})
    # Most named first, then by hash: the same entries give the same catalog on every machine.
    manifests = sorted(named, key=lambda manifest: (-named[manifest].total(), manifest))[:MAX_MODELS]
    models = [CatalogModel(manifest, *_most_used(named[manifest])) for manifest in manifests]
    # Jobs with workers come before jobs that somebody only made.
    jobs = sorted(trained | made, key=lambda job: (-trained[job], -made[job], job))[:MAX_JOBS]
    return Catalog(tuple(models), tuple(jobs))


def _most_used(names: Counter[tuple[str, int, int, int]]) -> tuple[str, int, int, int]:
    """Return the description that most hosts give. A host that has not read its model yet knows no
    context, so among equally frequent descriptions the longest context wins."""
    return min(names, key=lambda each: (-names[each], -each[2], each))


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()
