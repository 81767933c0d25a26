"""The workers of all stages of a job, as the directory lists them."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.machine.aio import all_of
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.job_records import find_workers
from swarmnet_protocols.training.pipeline.microbatches import BoundaryBytes
from swarmnet_protocols.training.pipeline.stages import stage_key
from swarmnet_protocols.training.rounds.terms import RoundMember

REFRESH_S = 5.0
"""Seconds between two reads of the directory. With less, a large job asks it too often. With more,
a newcomer waits longer for its first microbatch."""
LEAST_S = 0.5
"""Seconds between two reads that an unknown peer causes. With less, strangers cause many reads.
With more, a newcomer is refused for longer."""
AVOID_S = 5.0
"""Seconds that a failed worker gets no microbatch. With less, each microbatch waits for a dead one
again. With more, a worker that was cut off for a moment stays idle."""
BUSY_S = 0.3
"""Seconds that a busy worker gets no microbatch. With less, it refuses many. With more, it is
idle."""


class StageWorkers:
    """The workers of each stage of ``job_id`` except ``me``.

    Excluded workers get no microbatch, and may not ask for anything.
    """

    def __init__(
        self,
        directory: Directory,
        job_id: bytes,
        stages: int,
        me: PeerId,
        is_excluded: Callable[[PeerId], bool] = lambda _: False,
    ) -> None:
        self._directory = directory
        self._keys = [stage_key(job_id, stage).hex() for stage in range(stages)]
        self._me = me
        self._is_excluded = is_excluded
        self._found: list[dict[PeerId, RoundMember]] = [{} for _ in self._keys]
        self._avoided: dict[PeerId, float] = {}
        self._read_s = -math.inf
        self.tell_missing: Callable[[int], None] = lambda stage: None
        """Hears of a stage without a worker, for which microbatches wait."""

    def of(self, stage: int) -> dict[PeerId, RoundMember]:
        return self._found[stage]

    def addresses(self, stage: int, peer: PeerId) -> tuple[str, ...]:
        known = self._found[stage].get(peer)
        return () if known is None else known.addresses

    def candidates(self, stage: int) -> Sequence[PeerId]:
        """Return the workers of a stage that have not just failed."""
        now = asyncio.get_running_loop().time()
        return [
            peer
            for peer in self._found[stage]
            if self._avoided.get(peer, now) <= now and not self._is_excluded(peer)
        ]

    def avoid(self, peer: PeerId, *, busy: bool) -> None:
        """Leave a worker out of ``candidates`` for a while."""
        now = asyncio.get_running_loop().time()
        self._avoided[peer] = max(self._avoided.get(peer, now), now + (BUSY_S if busy else AVOID_S))
        self._avoided = {each: until for each, until in self._avoided.items() if until > now}

    def forgive(self, peer: PeerId) -> None:
        """Undo ``avoid``, because another worker was at fault."""
        self._avoided.pop(peer, None)

    async def check(self, peer: PeerId, stage: int) -> None:
        """Raise ``NotAuthorised`` unless ``peer`` is a worker of a stage, and not excluded."""
        if self._is_excluded(peer):
            raise NotAuthorised(f"{peer} sent false results")
        if peer not in self._found[stage]:
            await self.refresh(LEAST_S)
        if peer not in self._found[stage]:
            raise NotAuthorised(f"{peer} is no worker of stage {stage} of this job")

    async def have_left(self, rounds: int) -> bool:
        """Return whether all other workers of stage 0 have left, most of them after ``rounds``
        rounds."""
        found = await find_workers(self._directory, self._keys[0], also_left=True)
        others = {worker: position for worker, position in found.items() if worker.peer != self._me}
        are_done = 2 * sum(each.round >= rounds for each in others.values()) > len(others)
        return are_done and not any(worker.addresses for worker in others)

    async def refresh(self, at_most_every_s: float = REFRESH_S) -> None:
        """Read the directory, unless it was just read."""
        now = asyncio.get_running_loop().time()
        if now - self._read_s < at_most_every_s:
            return
        self._read_s = now
        stages = await all_of(*(find_workers(self._directory, key) for key in self._keys))
        if any(stages):  # otherwise the directory did not answer
            self._found = [{each.peer: each for each in found if each.peer != self._me} for found in stages]


@dataclass(frozen=True)
class StagedJob:
    """A job with ``stages`` stages, and this worker's way to the others."""

    id: bytes
    stages: int
    transport: Transport
    workers: StageWorkers
    timing: Timing
    every_rounds: int
    """Rounds from one evaluation to the next."""
    traffic: BoundaryBytes = field(default_factory=BoundaryBytes)
