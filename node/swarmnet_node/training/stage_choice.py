"""A newcomer chooses its stage: the stage that needs workers most.

1. The newcomer announces itself under the id of the job. Workers without a stage meet there.
2. After a moment it reads the workers of all stages, and the other newcomers. Some of these have
   announced a decision. The rest compute the same assignment, and each takes its own part of it.
3. It announces its decision, and again while it loads its stage. Then its stage lists it.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import all_of
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import (
    HASH_BYTES,
    WORKER_LIFETIME_S,
    find_workers,
    worker_announcement,
)
from swarmnet_protocols.training.pipeline.stages import groups, newcomers_stage

GATHER_S = 1.0
"""Seconds in which newcomers that start together find each other. With less, they take the same
stage. With more, each starts later."""
_UNDECIDED, _DECIDED = bytes(HASH_BYTES), b"\1" * HASH_BYTES


async def choose_stage(
    directory: Directory, job_id: str, stages: int, me: PeerId, addresses: Callable[[], Sequence[str]]
) -> int:
    """Return the stage that this newcomer takes in a job of ``stages`` stages."""
    await _announce(directory, job_id, addresses(), WorkerPosition(0, _UNDECIDED))
    await asyncio.sleep(GATHER_S)
    found = await all_of(*(find_workers(directory, group) for group in groups(job_id, stages)))
    rates = [
        [1 / worker.round_s if worker.round_s else 0.0 for worker in stage if worker.peer != me]
        for stage in found
    ]
    present = {worker.peer for stage in found for worker in stage}
    newcomers = []
    for worker, position in (await find_workers(directory, job_id)).items():
        if worker.peer not in present and worker.peer != me:
            if position.state != _DECIDED:
                newcomers.append(worker.peer)
            elif position.round < stages:
                rates[position.round].append(0.0)
    stage = newcomers_stage(rates, newcomers, me)
    await _announce(directory, job_id, addresses(), WorkerPosition(stage, _DECIDED))
    return stage


async def keep_choice(
    directory: Directory, job_id: str, stage: int, addresses: Callable[[], Sequence[str]]
) -> None:
    """Announce the choice of ``stage`` until this is cancelled: a record lasts for a minute, and a
    model may take longer to load."""
    while True:
        await asyncio.sleep(WORKER_LIFETIME_S / 3)
        await _announce(directory, job_id, addresses(), WorkerPosition(stage, _DECIDED))


async def _announce(
    directory: Directory, job_id: str, addresses: Sequence[str], position: WorkerPosition
) -> None:
    with suppress(SwarmnetError):  # no other peer is there yet
        await worker_announcement(job_id, addresses, position).publish(directory)
