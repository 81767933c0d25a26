"""Naming a job. Every command takes the same forms:

1. the name in its job file, such as ``stdlib-diloco``;
2. its id, or the first digits of it, at least ``MIN_PREFIX``;
3. the path of the job file from which this machine made it.

Jobs of this machine come first. So a stranger's job of the same name changes nothing for a job that
is already here.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.training.record import newest_job
from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.joining.network import Network, connect

if TYPE_CHECKING:
    from swarmnet_protocols.directory import Directory

MIN_PREFIX = 4
"""Least digits that name a job. Fewer would match a job by accident; git asks for as many."""
SHOWN_DIGITS = 8
"""Digits of an id in tables, unless several jobs there begin with them."""
MAX_LISTED = 10
"""Most jobs in the error about an ambiguous name."""

_JOB = "The job: its name, its id or the first digits of it, or its job file."
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help=_JOB)]
OptionalJobArgument = Annotated[
    str | None,
    typer.Argument(metavar="[JOB]", help=_JOB, show_default="the job trained last on this machine"),
]
JobArguments = Annotated[
    list[str],
    typer.Argument(metavar="[JOB ...]", help=_JOB, show_default="the job trained last on this machine"),
]


def matching(job: str, names: Mapping[str, str]) -> list[str]:
    """Return the ids of the jobs that ``job`` names. ``names``: id → name.

    A whole id or a name comes before the first digits of an id.
    """
    if job in names:
        return [job]
    named = sorted(id for id, name in names.items() if name == job)
    if named or not re.fullmatch(rf"[0-9a-f]{{{MIN_PREFIX},64}}", job):
        return named
    return sorted(id for id in names if id.startswith(job))


def only(job: str, names: Mapping[str, str]) -> str | None:
    """Return the id of the one job that ``job`` names, or None. Raises ``ConfigError`` that lists
    them if there are several."""
    found = matching(job, names)
    if len(found) < 2:
        return found[0] if found else None
    short = short_ids(names)
    listed = ", ".join(f"{short[id]} ({names[id]})" for id in found[:MAX_LISTED])
    raise ConfigError(f"{job!r} names {len(found)} jobs: {listed}", hint="give the first digits of one id")


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Return for each id its first digits, enough to tell it from the others."""
    ids = sorted(ids)
    return {
        id: next(
            id[:digits]
            for digits in range(SHOWN_DIGITS, len(id) + 1)
            if digits == len(id) or sum(other.startswith(id[:digits]) for other in ids) == 1
        )
        for id in ids
    }


def jobs_here(data_dir: Path) -> dict[str, str]:
    """Return the jobs of this machine: id → name. A job that cannot be read has no name."""
    from swarmnet_node.training.job_store import load_stored_job, stored_jobs

    names = {}
    for id in stored_jobs(data_dir):
        names[id] = ""
        with suppress(SwarmnetError):
            names[id] = load_stored_job(data_dir, id)[0].job.job.name
    return names


def find_here(job: str, data_dir: Path) -> str | None:
    """Return the id of the job of this machine that ``job`` names, or None.

    Raises ``ConfigError`` if it names several, or a job file from which this machine made none.
    """
    if _is_id(job):
        return job
    names = jobs_here(data_dir)
    if not is_path(job):
        return only(job, names)
    from swarmnet_node.training.job_store import made_from
    from swarmnet_protocols.training.jobs import job_bytes

    digest = hashlib.sha256(job_bytes(Path(job))).hexdigest()
    made = {id: name for id, name in names.items() if made_from(data_dir, id) == digest}
    if not made:
        raise ConfigError(
            f"this machine made no job from {job} as it is now",
            hint=f"`swarmnet train create {job}` makes it; or give the name or the id of the job",
        )
    return only(next(iter(made.values())), made)


def job_here(job: str | None, data_dir: Path) -> str:
    """Return the id of a job of this machine; of the newest one for None. Raises ``ConfigError`` if
    there is none."""
    if job is None:
        return newest_job(data_dir)
    found = find_here(job, data_dir)
    if found is None:
        raise ConfigError(
            f"no job of this machine has the name {job!r}, or an id that begins with it",
            hint="`swarmnet train list` shows them; --data-dir names the folder of another worker",
        )
    return found


async def job_in_swarm(job: str, directory: "Directory") -> str:
    """Return the id of the job of the swarm that ``job`` names. A whole id is returned unchecked.
    Raises ``ConfigError`` if there is none, or several."""
    if _is_id(job):
        return job
    from swarmnet_protocols.training.job_records import find_jobs

    found = only(job, {each.id: each.job.job.name for each in await find_jobs(directory)})
    if found is None:
        raise ConfigError(
            f"no job in this swarm has the name {job!r}, or an id that begins with it",
            hint="`swarmnet train list --swarm SWARM` shows the jobs; the whole id finds a job that is not listed",
        )
    return found


def _is_id(job: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", job) is not None


def is_path(job: str) -> bool:
    return job.endswith(".toml") or "/" in job or "\\" in job


async def fetch_named(network: Network, data_dir: Path, job: str, found: str | None) -> str:
    """Return the id of the job that ``job`` names. Fetch the job from the swarm unless the data
    directory has it. ``found``: the id, or None until the swarm is asked."""
    from swarmnet_node.training.job_store import fetch_job, has_job

    if found is not None and has_job(data_dir, found):
        return found
    async with connect(network, client_mode=True) as (_, directory):
        found = found or await job_in_swarm(job, directory)
        await fetch_job(data_dir, directory, found)
    return found
