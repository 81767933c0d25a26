"""A worker chooses its stage: the stage that needs workers most.

1. The newcomer announces itself under the id of the job. Workers without a stage meet there.
2. After a moment it reads the workers of all stages, and the other newcomers. Some of these have
   announced a decision. The rest compute the same assignment, and each takes its own part of it.
3. It announces its decision, and again while it loads its stage. Then its stage lists it.
4. Later a ``StageMover`` looks at all stages now and then. A worker moves if the function by which
   hosts choose blocks says so: each stage is a block, and each worker holds one.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from swarmnet_node.training.pipeline.stage_workers import StageWorkers
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.model_needs import ServedModel
from swarmnet_protocols.routing.relocation import (
    LOOK_S,
    Look,
    Relocation,
    Remembered,
    blocks_to_leave,
    is_confirmed,
    should_relocate,
)
from swarmnet_protocols.routing.throughput import Claim
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import (
    HASH_BYTES,
    WORKER_LIFETIME_S,
    find_records,
    find_workers,
    worker_announcement,
)
from swarmnet_protocols.training.pipeline.stages import newcomers_stage

GATHER_S = 1.0
"""Seconds in which newcomers that start together find each other. With less, they take the same
stage. With more, each starts later."""
READ_S = 5.0
"""Seconds in which others read that this worker moves. With less, two workers leave a stage at
once. With more, a stage without a worker waits longer."""
_UNDECIDED, _DECIDED = bytes(HASH_BYTES), b"\1" * HASH_BYTES


async def choose_stage(
    directory: Directory, job_id: str, stages: int, me: PeerId, addresses: Callable[[], Sequence[str]]
) -> int:
    """Return the stage that this newcomer takes in a job of ``stages`` stages."""
    await _announce(directory, job_id, addresses(), WorkerPosition(0, _UNDECIDED))
    await asyncio.sleep(GATHER_S)
    workers = StageWorkers(directory, bytes.fromhex(job_id), stages, me)
    await workers.refresh()
    found = [workers.of(stage) for stage in range(stages)]
    rates = [[1 / each.round_s if each.round_s else 0.0 for each in stage.values()] for stage in found]
    present = {peer for stage in found for peer in stage}
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


@dataclass(frozen=True)
class StageMover:
    """Decides when this worker moves to another stage of a job."""

    directory: Directory
    job_id: str
    addresses: Callable[[], Sequence[str]]
    rng: random.Random
    may_take: Callable[[int], Awaitable[bool]]
    """Returns whether this machine has the memory and the data for a stage."""
    moved_s: float = -math.inf
    """Loop time at which this worker last moved."""

    async def decide(
        self, workers: StageWorkers, stage: int, batch_s: Callable[[], float], must_stay: Callable[[], bool]
    ) -> Relocation:
        """Return a move from ``stage``, once there is one.

        ``batch_s``: this worker's seconds for a batch, 0 if unknown. ``must_stay``: returns True
        while this worker keeps a copy that would end with its move.
        """
        memory = Remembered(relocated_at=self.moved_s)
        while True:
            await asyncio.sleep(LOOK_S * self.rng.uniform(0.5, 1.5))
            with suppress(SwarmnetError):  # the directory does not answer
                if must_stay():
                    continue
                look = await self._look(workers, stage, batch_s())
                now = loop_time()
                move, memory = should_relocate(look, memory, now=now, rng=self.rng)
                if move is None or not await self.may_take(move.start):
                    continue
                await _announce(
                    self.directory, self.job_id, self.addresses(), WorkerPosition(move.start, _DECIDED)
                )
                await asyncio.sleep(READ_S)
                look = await self._look(workers, stage, batch_s())
                if is_confirmed(look, move, blocks_to_leave(look, move)):
                    return move
                await _announce(self.directory, self.job_id, (), WorkerPosition(move.start, _DECIDED))

    async def _look(self, workers: StageWorkers, stage: int, batch_s: float) -> Look:
        await workers.refresh(0.0)
        me, stages = workers.me, len(workers.records)
        others = [
            (at, each)
            for at, records in enumerate(workers.records)
            for each in records
            if each.is_here and not each.leaving and each.worker.peer != me
        ]
        known = [each.worker.round_s for _, each in others if each.worker.round_s] or [batch_s or 1.0]
        usual = median(known)
        mine = Claim(me, stage, stage + 1, 1 / (batch_s or usual))
        claims = [mine]
        for at, each in others:
            rate = 1 / (each.worker.round_s or usual)
            claims.append(Claim(each.worker.peer, at, at + 1, rate, may_move=not each.stays))
        here = {(claim.peer, claim.start) for claim in claims}
        for each in await find_records(self.directory, self.job_id):
            peer, to = each.worker.peer, each.position.round
            is_coming = each.position.state == _DECIDED and bool(each.worker.addresses)
            if is_coming and to < stages and peer != me and (peer, to) not in here:
                rate = next((claim.blocks_per_s for claim in claims if claim.peer == peer), 1 / usual)
                claims.append(Claim(peer, to, to + 1, rate, settled=False))
        return Look(ServedModel(b"", "", stages, 0.0, claims), mine, 1)
