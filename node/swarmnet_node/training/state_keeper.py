"""The shared state of a worker: on its disk, offered to others, and replaced by theirs.

1. ``resume`` loads the newest checkpoint.
2. After each round, ``publish`` offers the new state, and sometimes ``save`` writes a checkpoint
   during the next inner steps.
3. A worker that is out of sync calls ``catch_up``. It moves to the state that most voters have.
4. The first worker of a stage that was lost calls ``restore``.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.known_workers import KnownWorkers
from swarmnet_node.training.pipeline.turns import Compute
from swarmnet_node.training.replica import Replica
from swarmnet_node.training.shared_state import max_state_bytes
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.models import Progress
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.training.catch_up import CatchUp, Stay, WorkerPosition
from swarmnet_protocols.training.matchmaking.matchmaking import Matchmaking
from swarmnet_protocols.training.matchmaking.positions import OutOfSync
from swarmnet_protocols.training.pacing import WorkerPace, kept_share
from swarmnet_protocols.training.pipeline.stage_decisions import Restore
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.training.state_transfer import PackedState, StateServer

UNDECIDED_S = 1.0
"""Seconds until the voters are asked again, after an answer without a majority."""
RETRY_DOWNLOAD_S = 5.0
"""Seconds until another attempt to download the shared state."""


@dataclass
class StateKeeper:
    """Keeps the shared state of one worker of the job ``job_id``."""

    job_id: str
    replica: Replica
    checkpoints: CheckpointStore
    workers: KnownWorkers
    matchmaking: Matchmaking
    server: StateServer
    pace: WorkerPace
    compute: Compute
    writer: Executor
    """The thread that writes checkpoints."""
    progress: Progress
    emit: Callable[..., None]
    _writing: asyncio.Future[Path] | None = None
    """The checkpoint that is being written."""

    async def resume(self) -> int:
        """Load the newest checkpoint, or keep the job's initial parameters. Return the round."""
        saved = await self.compute(lambda: self.checkpoints.load_newest(self.job_id))
        if saved is not None:
            self.workers.exclude(saved.excluded)
            await self.compute(partial(self.replica.restore, saved))
        else:
            self.workers.started_s = loop_time()
        round = 0 if saved is None else saved.round
        await self.publish(round)
        return round

    async def publish(self, round: int) -> None:
        """Offer the current shared state for download, and announce its hash in matchmaking."""
        packed = await self.compute(lambda: PackedState.of(self.replica.pack_shared()))
        await self.matchmaking.set_position(WorkerPosition(round, self.server.offer(packed)))

    async def withdraw(self) -> None:
        """Stop using the state in place, because the next step changes it."""
        kind = self.replica.method.kind
        if kind != "gradients":  # its checkpoints have copies
            await self.written()
        await self.server.withdraw(None if kind == "scalars" else self.spill)

    async def compare(self, round: int) -> int | None:
        """Move to the state that most workers have. Return the round of the state that was loaded,
        or None."""
        verdict = await self._verdict()
        return await self._move(verdict, round, 0) if isinstance(verdict, CatchUp) else None

    async def catch_up(self, out_of_sync: OutOfSync, round: int, late_tokens: int) -> int | None:
        """Move to the round and state that most workers have, if they are ahead of ``round``.

        Return the round of the state that was loaded, or None.

        ``out_of_sync`` is one worker's claim, so it decides nothing. ``late_tokens``: the tokens of
        a contribution that came too late.
        """
        await self.workers.refresh(at_once=True)
        verdict = await self._verdict(is_behind=True)
        if isinstance(verdict, CatchUp):
            return await self._move(verdict, round, late_tokens)
        claimed = out_of_sync.position.round
        reason = f"{out_of_sync}, but a majority of the last roster does not confirm it"
        self.emit("heal_failed", round=claimed, reason=reason)
        if verdict.is_settled and claimed > round + 1:
            self.workers.distrust(out_of_sync.peer)
        else:
            await asyncio.sleep(UNDECIDED_S)
        return None

    async def restore(self, found: Restore, holders: Sequence[RoundMember]) -> None:
        """Continue a stage that was lost. ``holders``: the workers that have the copy."""
        source = f"this worker's own state of round {self.matchmaking.position.round}"
        if found.copy is not None:
            data, _ = await self.server.fetch(
                self.server.job, found.copy.state, holders, max_bytes=self._max_bytes
            )
            await self.compute(partial(self.replica.load_shared, data))
            source = f"a copy of round {found.copy.round}"
        await self.publish(found.round)
        self.emit("restored", round=found.round, source=source)

    async def save(self, round: int) -> None:
        """Copy the state after ``round`` rounds, and start to write it. Raises
        ``OutOfResources``."""
        await self.written()
        excluded = tuple(self.workers.excluded)
        saved = await self.compute(
            lambda: self.checkpoints.set_apart(
                self.replica.checkpoint(self.job_id, round, excluded),
                whole=self.replica.method.kind == "gradients",
            )
        )
        loop, write = asyncio.get_running_loop(), self.replica.trainer.write
        self._writing = loop.run_in_executor(self.writer, self.checkpoints.save, saved, write)
        if self.replica.method.kind == "scalars":  # the next probes change its weights
            await self.written()

    async def written(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises ``OutOfResources``."""
        writing, self._writing = self._writing, None
        if writing is not None:
            start_s = loop_time()
            await writing
            self.pace.spend(disk=loop_time() - start_s)

    async def _verdict(self, *, is_behind: bool = False) -> CatchUp | Stay:
        matchmaking, same_state = self.matchmaking, self.replica.method.shares_weights
        return await self.workers.compare(
            matchmaking.position, matchmaking.positions, same_state=same_state, is_behind=is_behind
        )

    @property
    def _max_bytes(self) -> int:
        return max_state_bytes(self.replica.trainer.parameter_count)

    async def _move(self, verdict: CatchUp, at: int, late_tokens: int) -> int | None:
        """Download the state of ``verdict``. Return its round, or None if that fails. ``at``: the
        present round."""
        start_s = loop_time()
        here, there = self.matchmaking.position, verdict.position
        if at and there.round > at + 2:
            await self.save(at)
            await self.written()
            await self.compute(self.checkpoints.set_aside)
        # Workers that ask for the position during the download get the new one, and wait.
        await self.matchmaking.set_position(there)
        try:
            data, dropped = await self.server.fetch(
                self.server.job,
                there.state,
                self.workers.sources(verdict.peers, only=not self.replica.method.shares_weights),
                max_bytes=self._max_bytes,
                on_bytes=partial(self.progress, "fetching the state"),
            )
        except SwarmnetError as error:
            # The sources may have replaced the state meanwhile. The next matchmaking tells which
            # state is current.
            await self.matchmaking.set_position(here)
            self.emit("heal_failed", round=there.round, reason=str(error))
            await asyncio.sleep(RETRY_DOWNLOAD_S)
            return None
        keep = kept_share(there.round - here.round) if late_tokens else 0.0
        await self.compute(partial(self.replica.load_shared, data, keep))
        await self.publish(there.round)
        self.emit(
            "healed",
            round=there.round,
            bytes=len(data),
            late_tokens=late_tokens,
            seconds=round(loop_time() - start_s, 3),
            dropped=[{"peer_id": peer, "reason": why} for peer, why in dropped.items()],
        )
        return there.round

    async def spill(self, pieces: Sequence[Buffer]) -> memoryview:
        """Return a copy of a state on the disk."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.writer, self.checkpoints.spill, pieces)
