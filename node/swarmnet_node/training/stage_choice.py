"""A newcomer chooses its stage: the stage that needs workers most.

1. The newcomer announces itself under the id of the job. Workers without a stage meet there.
2. After a moment it reads the workers of all stages, and the other newcomers. Some of these have
   announced a decision. The rest compute the same assignment, and each takes its own part of it.
3. It announces its decision. The record lasts for a minute. By then, the worker usually is listed
   in its stage.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import all_of
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import HASH_BYTES, find_workers, worker_announcement
from swarmnet_protocols.training.pipeline.stages import groups, newcomers_stage

GATHER_S = 1.0
"""Seconds in which newcomers that start together find each other. With less, they take the same
stage. With more, each starts later."""
_UNDECIDED, _DECIDED = bytes(HASH_BYTES), b"\1" * HASH_BYTES


async def choose_stage(
    directory: Directory, job_id: str, stages: int, me: PeerId, addresses: Callable[[], Sequence[str]]
) -> int:
    """Return the stage that this newcomer takes in a job of ``stages`` stages."""

    async def announce(stage: int, state: bytes) -> None:
        record = worker_announcement(job_id, addresses(), WorkerPosition(stage, state))
        with suppress(SwarmnetError):  # no other peer is there yet
            await record.publish(directory)

    await announce(0, _UNDECIDED)
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
    await announce(stage, _DECIDED)
    return stage
