"""The workers of all stages of a job, as the directory lists them and as they answer."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.machine.aio import all_of, loop_time
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training import MAX_MEMBERS
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import StageRecord, find_records
from swarmnet_protocols.training.matchmaking.positions import ask_positions
from swarmnet_protocols.training.pipeline.microbatches import BoundaryBytes
from swarmnet_protocols.training.pipeline.stages import groups
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
    """The workers of each stage of ``job_id``.

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
        self.me = me
        self.groups = groups(job_id.hex(), stages)
        """The ids under which the workers of each stage meet."""
        self.records: list[list[StageRecord]] = [[] for _ in self.groups]
        """All announcements under each stage's id, with this worker's own."""
        self._directory = directory
        self._is_excluded = is_excluded
        self._found: list[dict[PeerId, RoundMember]] = [{} for _ in self.groups]
        self._avoided: dict[PeerId, float] = {}
        self._read_s = -math.inf

    def of(self, stage: int) -> dict[PeerId, RoundMember]:
        """Return the other workers of a stage."""
        return self._found[stage]

    def trained_by(self, stage: int) -> list[RoundMember]:
        """Return all workers of a stage that have a place in it, with this worker."""
        return [each.worker for each in self.records[stage] if each.trains]

    def addresses(self, stage: int, peer: PeerId) -> tuple[str, ...]:
        known = self._found[stage].get(peer)
        return () if known is None else known.addresses

    def batch_s(self, stage: int, peer: PeerId) -> float:
        """Return the seconds for a batch that a worker announces; 0 if they are unknown."""
        known = self._found[stage].get(peer)
        return 0.0 if known is None else known.round_s

    def candidates(self, stage: int) -> Sequence[PeerId]:
        """Return the workers of a stage that have not just failed."""
        now = loop_time()
        return [
            peer
            for peer in self._found[stage]
            if self._avoided.get(peer, now) <= now and not self._is_excluded(peer)
        ]

    def avoid(self, peer: PeerId, *, busy: bool) -> None:
        """Leave a worker out of ``candidates`` for a while."""
        now = loop_time()
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

    def have_left(self, rounds: int) -> bool:
        """Return whether all other workers of stage 0 have left, most of them after ``rounds``
        rounds."""
        others = [each for each in self.records[0] if not each.copy and each.worker.peer != self.me]
        are_done = 2 * sum(each.position.round >= rounds for each in others) > len(others)
        return are_done and not any(each.worker.addresses for each in others)

    async def refresh(self, at_most_every_s: float = REFRESH_S) -> None:
        """Read the directory, unless it was just read."""
        now = loop_time()
        if now - self._read_s < at_most_every_s:
            return
        self._read_s = now
        found = await all_of(*(find_records(self._directory, group) for group in self.groups))
        if any(found):  # otherwise the directory did not answer
            self.records = found
            self._found = [
                {each.worker.peer: each.worker for each in at if each.is_here and each.worker.peer != self.me}
                for at in found
            ]


@dataclass(frozen=True)
class WorkerStanding:
    """One worker's standing in its job: its key, its place, and the workers that it excludes."""

    sign: Callable[[bytes], bytes]
    """Signs with the key of the worker's peer id."""
    excluded: Mapping[PeerId, None]
    """The workers that it has excluded."""
    exclude: Callable[[PeerId], None]
    """Excludes a proven liar."""
    rng: random.Random
    """Draws audits. Nobody else can foresee them."""
    has_place: Callable[[], bool]
    """Returns whether the worker's gradients count. A newcomer only receives."""
    emit: Callable[..., None]
    """Emits an event."""


@dataclass(frozen=True)
class StagedJob:
    """A job with ``stages`` stages, and this worker's way to the others."""

    id: bytes
    stages: int
    transport: Transport
    workers: StageWorkers
    timing: Timing
    standing: WorkerStanding
    every_rounds: int
    """Rounds from one evaluation to the next."""
    traffic: BoundaryBytes = field(default_factory=BoundaryBytes)

    def key(self, stage: int) -> bytes:
        return bytes.fromhex(self.workers.groups[stage])

    async def positions(self, stage: int, workers: Sequence[RoundMember]) -> dict[PeerId, WorkerPosition]:
        """Ask workers of a stage for their positions: records may be 20 s old."""
        asked = workers[:MAX_MEMBERS]  # anybody may announce more
        return await ask_positions(self.transport, self.key(stage), asked, self.timing)
