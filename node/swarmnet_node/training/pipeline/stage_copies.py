"""Copies of the state of a stage at workers of another stage, and what restores a lost stage.

1. While a stage has one worker, a worker of the stage before keeps a copy of its state on disk.
   ``keep`` fetches a new one from time to time, offers it, and announces it in the directory.
2. A worker that is alone in its stage, and behind the other stages, calls ``lost_state``. The
   newest copy restores the stage. Without one, the mean of the neighbours' weights does, if they
   have the same shape (CheckFree, arXiv 2506.15461).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch

from swarmnet_node.training.pipeline.stage_workers import StagedJob
from swarmnet_node.training.shared_state import SharedState, max_state_bytes
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import all_of
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.training import MAX_MEMBERS
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import (
    HASH_BYTES,
    StageRecord,
    find_records,
    worker_announcement,
)
from swarmnet_protocols.training.matchmaking import ask_positions
from swarmnet_protocols.training.pipeline.lost_stages import job_round, newest_copy
from swarmnet_protocols.training.pipeline.stages import groups
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.training.state_transfer import PackedState, StateServer, fetch_state

LOOK_S = 10.0
"""Seconds between two looks at the next stage. With less, the directory is read for nothing. With
more, a stage has no copy for longer after it has lost all workers but one."""
COPY_S = 60.0
"""Least seconds between two copies. With less, links are busy with copies. With more, a stage loses
more rounds with its last worker."""
LINK_SHARE = 0.1
"""Largest share of the time that copies are under way. With more, they slow the pipeline. With
less, copies of a large stage are older."""
NO_COPY = WorkerPosition(0, bytes(HASH_BYTES))


@dataclass(frozen=True)
class FoundState:
    """The state with which a lost stage goes on at ``round``."""

    round: int
    state: bytearray | torch.Tensor | None
    """A packed state, or weights ``[n]`` without moments. None: the worker's own state."""
    source: str


class StageCopies:
    """The copy that one worker keeps of the next stage, and its view of lost stages."""

    def __init__(  # noqa: PLR0913 - the job, this worker's part in it, and its limits
        self,
        job: StagedJob,
        trainer: StageTrainer,
        directory: Directory,
        server: StateServer,
        spill: Callable[[Sequence[Buffer]], Awaitable[memoryview]],
        emit: Callable[..., None],
        *,
        available_bytes: Callable[[], int],
    ) -> None:
        """``spill``: writes a copy to the disk.
        ``available_bytes``: the memory that this worker may still take."""
        self._job = job
        self._trainer = trainer
        self._stage = trainer.stage
        self._next = (trainer.stage + 1) % job.stages
        self._directory = directory
        self._server = server
        self._spill = spill
        self._emit = emit
        self._available_bytes = available_bytes
        self._groups = groups(job.id.hex(), job.stages)
        self._kept = NO_COPY
        self._due_s = 0.0

    @property
    def has_copy(self) -> bool:
        return self._kept != NO_COPY

    async def keep(self) -> NoReturn:
        """Keep a copy of the next stage while it has one worker and this worker is to keep it."""
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(SwarmnetError):  # the next look tries again
                await self._look_at_next()

    async def _look_at_next(self) -> None:
        mates, there = await all_of(*map(self._records, (self._stage, self._next)))
        workers = [each for each in there if _trains(each)]
        keeper = min((each.worker.peer for each in mates if _trains(each)), default=None)
        if len(workers) == 1 and keeper == self._job.transport.peer_id:
            if workers[0].leaving or asyncio.get_running_loop().time() >= self._due_s:
                await self._copy(workers[0].worker)
        elif len(workers) > 1 and self.has_copy:
            self._server.keep(self._key(self._next), None)
            ended, self._kept = [*self.announcements(ending=True)], NO_COPY
            for each in ended:
                await each.publish(self._directory)

    def announcements(self, *, ending: bool = False) -> Iterator[Announcement]:
        """Yield the announcement of the copy, or of its end."""
        if self.has_copy:
            addresses = () if ending else self._job.transport.addresses()
            yield worker_announcement(self._groups[self._next], addresses, self._kept, copy=True)

    async def _copy(self, worker: RoundMember) -> None:
        if max_state_bytes(self._trainer.size_of(self._next)) > self._available_bytes():
            return
        clock = asyncio.get_running_loop().time
        started_s = clock()
        position = (await self._positions(self._next, [worker])).get(worker.peer, self._kept)
        if position == self._kept:
            return
        data = await self._fetch(self._next, position, [worker])
        self._server.keep(self._key(self._next), PackedState.of([await self._spill([data])]))
        self._kept = position
        self._due_s = clock() + max(COPY_S, (clock() - started_s) / LINK_SHARE)
        self._emit("copy", stage=self._next, round=position.round, bytes=len(data))
        for each in self.announcements():
            await each.publish(self._directory)

    async def is_safe(self, here: WorkerPosition) -> bool:
        """Return whether another worker has the state ``here`` of this worker's stage."""
        me = self._job.transport.peer_id
        records = [each for each in await self._records(self._stage) if each.worker.peer != me]
        if any(each.copy and each.position == here and each.worker.addresses for each in records):
            return True
        there = await self._positions(self._stage, [each.worker for each in records if _trains(each)])
        return here in there.values()

    async def job_round(self) -> int:
        """Return the round that the other stages are at."""
        found = await all_of(*map(self._records, range(self._job.stages)))
        return job_round([[each.position.round for each in at if _trains(each)] for at in found], self._stage)

    async def lost_state(self, here: WorkerPosition, *, has_trained: bool) -> FoundState | None:
        """Return the state with which this worker goes on alone in its stage.

        None if the other stages are not ahead of it.

        ``has_trained``: whether this worker's own state has committed rounds. Raises
        ``SwarmnetError`` if the newest state cannot be had.
        """
        found = await all_of(*map(self._records, range(self._job.stages)))
        # Records may be 20 s old, so workers are asked.
        there = await all_of(
            *(
                self._positions(stage, [each.worker for each in at if _trains(each)])
                for stage, at in enumerate(found)
            )
        )
        now = job_round([[each.round for each in at.values()] for at in there], self._stage)
        if now <= here.round:
            return None
        copies = [each for each in found[self._stage] if each.copy and each.worker.addresses]
        newest = newest_copy([each.position for each in copies], here.round if has_trained else 0, now)
        if newest is not None:
            holders = [each.worker for each in copies if each.position == newest]
            data = await self._fetch(self._stage, newest, holders)
            return FoundState(now, data, f"a copy of round {newest.round}")
        if has_trained or now == 1:  # after one round, initial weights are one round old
            return FoundState(now, None, f"this worker's own state of round {here.round}")
        return FoundState(now, await self._neighbours(found), "the mean of the neighbouring stages")

    async def _neighbours(self, found: Sequence[Sequence[StageRecord]]) -> torch.Tensor:
        """Return the mean of the weights of the neighbours with the same shape, ``[n]``."""
        weights = []
        for stage in {(self._stage - 1) % self._job.stages, self._next} - {self._stage}:
            if self._trainer.size_of(stage) == self._trainer.size_of(self._stage):
                workers = [each.worker for each in found[stage] if _trains(each)]
                there = await self._positions(stage, workers)
                newest = newest_copy(
                    there.values(), 0, max((each.round for each in there.values()), default=0)
                )
                holders = [each for each in workers if there.get(each.peer) == newest]
                if newest is not None:
                    state = SharedState.unpack(await self._fetch(stage, newest, holders))
                    weights.append(state.agreed)
        if not weights:
            raise Unreachable(
                f"nobody has the state of stage {self._stage}, and no neighbour has its shape",
                hint="start a machine that trained this stage, with its data directory",
            )
        return torch.stack(weights).mean(dim=0)

    async def _records(self, stage: int) -> list[StageRecord]:
        return await find_records(self._directory, self._groups[stage])

    async def _positions(self, stage: int, workers: Sequence[RoundMember]) -> dict[PeerId, WorkerPosition]:
        asked = workers[:MAX_MEMBERS]  # anybody may announce more
        return await ask_positions(self._job.transport, self._key(stage), asked, self._job.timing)

    async def _fetch(self, stage: int, position: WorkerPosition, holders: Sequence[RoundMember]) -> bytearray:
        data, _ = await fetch_state(
            self._job.transport,
            self._key(stage),
            position.state,
            holders,
            self._job.timing,
            max_bytes=max_state_bytes(self._trainer.size_of(stage)),
        )
        return data

    def _key(self, stage: int) -> bytes:
        return bytes.fromhex(self._groups[stage])


def _trains(record: StageRecord) -> bool:
    """Return whether a record is of a worker of the stage."""
    return bool(record.worker.addresses) and not record.copy and not record.spare
