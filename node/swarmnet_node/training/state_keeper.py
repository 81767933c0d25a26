"""The shared state of a worker: on its disk, offered to others, and replaced by theirs.

1. ``resume`` loads the newest checkpoint.
2. After each round, ``publish`` offers the new state, and sometimes ``save`` writes a checkpoint
   during the next inner steps.
3. A worker that is out of sync calls ``catch_up``. It moves to the state that most voters have.
4. The first worker of a stage that was lost calls ``restore``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.known_workers import KnownWorkers
from swarmnet_node.training.pipeline.stage_copies import FoundState
from swarmnet_node.training.pipeline.turns import Compute
from swarmnet_node.training.replica import Replica
from swarmnet_node.training.shared_state import max_state_bytes
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.models import Progress
from swarmnet_protocols.net import Buffer, Transport
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.catch_up import CatchUp, Stay, WorkerPosition
from swarmnet_protocols.training.matchmaking import Matchmaking, OutOfSync
from swarmnet_protocols.training.pacing import WorkerPace, kept_share
from swarmnet_protocols.training.state_transfer import PackedState, StateServer, fetch_state

UNDECIDED_S = 1.0
"""Seconds until the voters are asked again, after an answer without a majority."""
RETRY_DOWNLOAD_S = 5.0
"""Seconds until another attempt to download the shared state."""


@dataclass
class StateKeeper:
    """Keeps the shared state of one worker of the job ``job_id``, which meets others at ``key``."""

    job_id: str
    key: bytes
    replica: Replica
    checkpoints: CheckpointStore
    workers: KnownWorkers
    matchmaking: Matchmaking
    server: StateServer
    transport: Transport
    timing: Timing
    pace: WorkerPace
    compute: Compute
    writer: Executor
    """The thread that writes checkpoints."""
    progress: Progress
    emit: Callable[..., None]
    begin: Callable[[int], Awaitable[None]]
    """Makes the worker continue from a round whose state was loaded."""
    _writing: asyncio.Future[Path] | None = None
    """The checkpoint that is being written."""

    async def resume(self) -> int:
        """Load the newest checkpoint, or keep the job's initial parameters. Return the round."""
        saved = await self.compute(lambda: self.checkpoints.load_newest(self.job_id))
        if saved is not None:
            self.workers.exclude(saved.excluded)
            await self.compute(partial(self.replica.restore, saved))
        else:
            self.workers.started_s = asyncio.get_running_loop().time()
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

    async def compare(self, round: int) -> bool:
        """Move to the state that most workers have. Return whether they are at another one."""
        verdict = await self._verdict()
        if isinstance(verdict, CatchUp):
            await self._move(verdict, round, 0)
        return isinstance(verdict, CatchUp)

    async def catch_up(self, out_of_sync: OutOfSync, round: int, late_tokens: int) -> None:
        """Move to the round and state that most workers have, if they are ahead of ``round``.

        ``out_of_sync`` is one worker's claim, so it decides nothing. ``late_tokens``: the tokens of
        a contribution that came too late.
        """
        await self.workers.refresh(at_once=True)
        verdict = await self._verdict()
        if isinstance(verdict, CatchUp):
            await self._move(verdict, round, late_tokens)
            return
        claimed = out_of_sync.position.round
        reason = f"{out_of_sync}, but a majority of the last roster does not confirm it"
        self.emit("heal_failed", round=claimed, reason=reason)
        if verdict.is_settled and claimed > round + 1:
            self.workers.distrust(out_of_sync.peer)
        else:
            await asyncio.sleep(UNDECIDED_S)

    async def restore(self, found: FoundState) -> None:
        """Continue a stage that was lost, with the state that was found for it."""
        if isinstance(found.state, bytearray):
            await self.compute(partial(self.replica.load_shared, found.state))
        elif found.state is not None:
            await self.compute(partial(self.replica.merge, found.state))
            self.replica.revision = max(1, self.replica.revision)
        await self.begin(found.round)
        await self.publish(found.round)
        self.emit("restored", round=found.round, source=found.source)

    async def save(self, round: int) -> None:
        """Copy the state after ``round`` rounds, and start to write it. Raises
        ``OutOfResources``."""
        await self.written()
        excluded = tuple(self.workers.excluded)
        saved = await self.compute(
            lambda: self.checkpoints.set_apart(self.replica.checkpoint(self.job_id, round, excluded))
        )
        loop, write = asyncio.get_running_loop(), self.replica.trainer.write
        self._writing = loop.run_in_executor(self.writer, self.checkpoints.save, saved, write)
        if self.replica.method.kind == "scalars":  # the next probes change its weights
            await self.written()

    async def written(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises ``OutOfResources``."""
        writing, self._writing = self._writing, None
        if writing is not None:
            start_s = asyncio.get_running_loop().time()
            await writing
            self.pace.spend(disk=asyncio.get_running_loop().time() - start_s)

    async def _verdict(self) -> CatchUp | Stay:
        matchmaking, same_state = self.matchmaking, self.replica.method.shares_weights
        return await self.workers.compare(matchmaking.position, matchmaking.positions, same_state=same_state)

    async def _move(self, verdict: CatchUp, at: int, late_tokens: int) -> None:
        """Download the state of ``verdict``, and continue from there. ``at``: the present round."""
        start_s = asyncio.get_running_loop().time()
        here, there = self.matchmaking.position, verdict.position
        if at and there.round > at + 2:
            await self.save(at)
            await self.written()
            await self.compute(self.checkpoints.set_aside)
        # Workers that ask for the position during the download get the new one, and wait.
        await self.matchmaking.set_position(there)
        try:
            data, dropped = await fetch_state(
                self.transport,
                self.key,
                there.state,
                self.workers.sources(verdict.peers, only=not self.replica.method.shares_weights),
                self.timing,
                max_bytes=max_state_bytes(self.replica.trainer.parameter_count),
                on_bytes=partial(self.progress, "fetching the state"),
            )
        except SwarmnetError as error:
            # The sources may have replaced the state meanwhile. The next matchmaking tells which
            # state is current.
            await self.matchmaking.set_position(here)
            self.emit("heal_failed", round=there.round, reason=str(error))
            await asyncio.sleep(RETRY_DOWNLOAD_S)
            return
        keep = kept_share(there.round - here.round) if late_tokens else 0.0
        await self.compute(partial(self.replica.load_shared, data, keep))
        await self.publish(there.round)
        await self.begin(there.round)
        self.emit(
            "healed",
            round=there.round,
            bytes=len(data),
            late_tokens=late_tokens,
            seconds=round(asyncio.get_running_loop().time() - start_s, 3),
            dropped=[{"peer_id": peer, "reason": why} for peer, why in dropped.items()],
        )

    async def spill(self, pieces: Sequence[Buffer]) -> memoryview:
        """Return a copy of a state on the disk."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.writer, self.checkpoints.spill, pieces)
