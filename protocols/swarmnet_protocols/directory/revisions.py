"""The names under which hosts announce revisions of a model in training.

A revision is the model that a job's workers had after some committed rounds. Hosts serve it as a
model of its own, so a session stays on the revision with which it began.
"""

import asyncio
import logging
import re
from collections.abc import Iterable
from contextlib import suppress

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.catalog import CatalogModel, read_catalog
from swarmnet_protocols.errors import ConfigError, SwarmnetError

_log = logging.getLogger(__name__)

ID_DIGITS = 12
"""Digits of a job's id in the name of its revision. With fewer, two jobs may share a name by
accident. With more, people cannot tell names apart."""
LOOK_S = 10.0
"""Seconds between two looks for a newer revision. With less, the directory is asked too often. With
more, answers come from an old revision for longer."""
_MIN_PREFIX = 4
"""Least digits that name a job, as in ``job_names.MIN_PREFIX``."""
_NAME = re.compile(rf"(?P<job>.{{1,64}})-(?P<id>[0-9a-f]{{{ID_DIGITS}}})-r(?P<rounds>[0-9]{{1,8}})")


def revision_name(job: str, id: str, rounds: int) -> str:
    """Return the name of a job's revision after ``rounds`` committed rounds."""
    return f"{job}-{id[:ID_DIGITS]}-r{rounds}"


def rounds_of(name: str) -> int:
    """Return the committed rounds of the revision with this name. -1 for any other name."""
    found = _NAME.fullmatch(name)
    return -1 if found is None else int(found["rounds"])


def newest_revision(models: Iterable[CatalogModel], job: str) -> CatalogModel | None:
    """Return the newest announced revision of a job, or None.

    ``job``: the job's name, its id, or the first digits of the id. Raises ``ConfigError`` if this
    names several jobs.
    """
    found: dict[str, CatalogModel] = {}
    for model in models:
        name = _NAME.fullmatch(model.name)
        if name is None or not _is_named(job, name["job"], name["id"]):
            continue
        known = found.get(name["id"])
        if known is None or rounds_of(known.name) < int(name["rounds"]):
            found[name["id"]] = model
    if len(found) > 1:
        raise ConfigError(
            f"{job!r} names {len(found)} jobs: {', '.join(sorted(found))}",
            hint="give the first digits of one id",
        )
    return next(iter(found.values()), None)


def _is_named(job: str, name: str, id: str) -> bool:
    if job == name:
        return True
    is_id = re.fullmatch(rf"[0-9a-f]{{{_MIN_PREFIX},64}}", job) is not None
    return is_id and (id.startswith(job) or job.startswith(id))


async def newer_revision(directory: Directory, name: str) -> CatalogModel:
    """Wait until peers announce a newer revision than ``name``, and return it.

    Waits forever if ``name`` is no revision.
    """
    known = _NAME.fullmatch(name)
    while True:
        await asyncio.sleep(LOOK_S)
        if known is None:
            continue
        with suppress(SwarmnetError):
            found = newest_revision((await read_catalog(directory)).models, known["id"])
            if found is not None and rounds_of(found.name) > rounds_of(name):
                return found


async def announced_revision(directory: Directory, job: str) -> CatalogModel | None:
    """Return the newest revision of a job that peers announce, or None.

    Warns the user, because nobody signed it. Raises as ``newest_revision``.
    """
    found = newest_revision((await read_catalog(directory)).models, job)
    if found is not None:
        _log.warning(
            "nobody signed this revision: its hosts say that it is of this job",
            extra={"model": found.name, "manifest": found.manifest.hex()[:16]},
        )
    return found
