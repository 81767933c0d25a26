"""A copy of the state of a stage at a worker of another stage, which restores it if it is lost.

While a stage has one worker, a worker of the stage before keeps a copy of its state on disk.
``keep`` fetches a new one from time to time, offers it, and announces it in the directory.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from swarmnet_node.training.pipeline.stage_workers import StagedJob
from swarmnet_node.training.shared_state import max_state_bytes
from swarmnet_node.training.state_keeper import StateKeeper
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import HASH_BYTES, worker_announcement
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.training.state_transfer import PackedState

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


@dataclass
class StageCopies:
    """The copy that one worker keeps of the next stage."""

    job: StagedJob
    trainer: StageTrainer
    directory: Directory
    keeper: StateKeeper
    available_bytes: Callable[[], int]
    """Returns the memory that this worker may still take."""
    _kept: WorkerPosition = NO_COPY
    _due_s: float = 0.0

    @property
    def _next(self) -> int:
        return (self.trainer.stage + 1) % self.job.stages

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
        workers = self.job.workers
        await workers.refresh()
        there = [each for each in workers.records[self._next] if each.trains]
        keeper = min((each.peer for each in workers.trained_by(self.trainer.stage)), default=None)
        if len(there) == 1 and keeper == workers.me:
            if there[0].leaving or loop_time() >= self._due_s:
                await self._copy(there[0].worker)
        elif len(there) > 1 and self.has_copy:
            self.keeper.server.keep(self.job.key(self._next), None)
            ended, self._kept = [*self.announcements(ending=True)], NO_COPY
            for each in ended:
                await each.publish(self.directory)

    def announcements(self, *, ending: bool = False) -> Iterator[Announcement]:
        """Yield the announcement of the copy, or of its end."""
        if self.has_copy:
            addresses = () if ending else self.job.transport.addresses()
            yield worker_announcement(self.job.workers.groups[self._next], addresses, self._kept, copy=True)

    async def _copy(self, worker: RoundMember) -> None:
        most_bytes = max_state_bytes(self.trainer.size_of(self._next))
        if most_bytes > self.available_bytes():
            return
        started_s = loop_time()
        position = (await self.job.positions(self._next, [worker])).get(worker.peer, self._kept)
        if position == self._kept:
            return
        key = self.job.key(self._next)
        data, _ = await self.keeper.server.fetch(key, position.state, [worker], max_bytes=most_bytes)
        size_bytes, kept = len(data), await self.keeper.spill([data])
        del data  # before the copy is read
        self.keeper.server.keep(key, PackedState.of([kept]))
        self._kept = position
        self._due_s = loop_time() + max(COPY_S, (loop_time() - started_s) / LINK_SHARE)
        self.keeper.emit("copy", stage=self._next, round=position.round, bytes=size_bytes)
        for each in self.announcements():
            await each.publish(self.directory)
