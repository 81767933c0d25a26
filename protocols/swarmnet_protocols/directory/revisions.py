"""The names under which hosts announce revisions of a model in training.

A revision is the model that a job's workers had after some committed rounds. Hosts serve it as a
model of its own, so a session stays on the revision with which it began.
"""

import asyncio
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Protocol, TypeVar

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.catalog import CatalogModel, read_catalog
from swarmnet_protocols.directory.host_announcements import read_hosts
from swarmnet_protocols.errors import ConfigError, SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.routing.chain_search import uncovered

_log = logging.getLogger(__name__)

ID_DIGITS = 12
"""Digits of a job's id in the name of its revision. With fewer, two jobs may share a name by
accident. With more, people cannot tell names apart."""
LOOK_S = 10.0
"""Seconds between two looks for a newer revision. With less, the directory is asked too often. With
more, answers come from an old revision for longer."""
CHANGE_S = 60.0
"""Seconds that a client waits while no revision has hosts for all blocks. With less, it fails while
hosts load the next revision. With more, people wait for a job that nobody serves any more."""
RETRY_S = 1.0
"""Seconds between two looks during ``CHANGE_S``. With less, the directory is asked too often. With
more, an answer begins later."""
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


class HasName(Protocol):
    """A model with a name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=HasName)


def revisions(models: Iterable[N], job: str) -> list[N]:
    """Return the announced revisions of a job, the newest first.

    ``job``: the job's name, its id, or the first digits of the id. Raises ``ConfigError`` if this
    names several jobs.
    """
    found: dict[str, list[N]] = {}
    for model in models:
        name = _NAME.fullmatch(model.name)
        if name is not None and _is_named(job, name["job"], name["id"]):
            found.setdefault(name["id"], []).append(model)
    if len(found) > 1:
        raise ConfigError(
            f"{job!r} names {len(found)} jobs: {', '.join(sorted(found))}",
            hint="give the first digits of one id",
        )
    return sorted(chain(*found.values()), key=lambda each: rounds_of(each.name), reverse=True)


async def hosted_revision(
    directory: Directory, job: str, *, after: int = -1, partly: bool = False
) -> CatalogModel | None:
    """Return the newest revision of a job that has hosts for all blocks, or None.

    The catalog still names revisions whose hosts have gone. ``after``: the rounds of a revision
    that is known. ``partly``: hosts of some blocks are enough. Raises as ``revisions``.
    """
    for model in revisions((await read_catalog(directory)).models, job):
        if rounds_of(model.name) <= after:
            return None
        hosts = await read_hosts(directory, model.manifest)
        if hosts and (partly or not uncovered(hosts, (0, model.blocks))):
            return model
    return None


def _is_named(job: str, name: str, id: str) -> bool:
    if job == name:
        return True
    is_id = re.fullmatch(rf"[0-9a-f]{{{_MIN_PREFIX},64}}", job) is not None
    return is_id and (id.startswith(job) or job.startswith(id))


async def newer_revision(directory: Directory, name: str) -> CatalogModel:
    """Wait until peers host a newer revision than ``name``, and return it.

    Waits forever if ``name`` is no revision.
    """
    known = _NAME.fullmatch(name)
    while True:
        await asyncio.sleep(LOOK_S)
        if known is None:
            continue
        with suppress(SwarmnetError):
            if found := await hosted_revision(directory, known["id"], after=rounds_of(name)):
                return found


async def announced_revision(directory: Directory, job: str) -> CatalogModel | None:
    """Return the newest revision of a job that peers host, or None if they announce none.

    While all hosts change to another revision, wait ``CHANGE_S`` at most. Warns the user, because
    nobody signed it. Raises as ``revisions``, and ``Unreachable`` without a host of a revision.
    """
    deadline = loop_time() + CHANGE_S
    while (found := await hosted_revision(directory, job)) is None:
        if not revisions((await read_catalog(directory)).models, job):
            return None
        if loop_time() >= deadline:
            raise Unreachable(
                f"no machine serves all blocks of the job {job!r} now",
                hint=f"try again, or on any machine with room for its model: swarmnet join SWARM --job {job}",
            )
        await asyncio.sleep(RETRY_S)
    _log.warning(
        "nobody signed this revision: its hosts say that it is of this job",
        extra={"model": found.name, "manifest": found.manifest.hex()[:16]},
    )
    return found
