"""The other workers of a job as one worker knows them.

Says which workers are alive, vote, are excluded, and can provide the shared state. Asks them
whether this worker has to move to their state.
"""

import hashlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training import MAX_MEMBERS
from swarmnet_protocols.training.catch_up import CatchUp, Stay, WorkerPosition, catch_up, continued, join
from swarmnet_protocols.training.job_records import find_records
from swarmnet_protocols.training.rounds.terms import RoundMember

DISTRUST_S = 120.0
"""Seconds to ignore a worker after it claimed a round that no voter confirmed. With less, its false
claims would cost time more often. With more, a worker that was only ahead of the voters would be
locked out for long."""
MAX_EXCLUDED = 256
"""Most excluded workers to remember: four groups of 64. Beyond this, the worker excluded first may
take part again. It is excluded again at its next false result."""
REFRESH_S = 5.0
"""Seconds between two reads of the directory."""
NEW_S = 60.0
"""Seconds during which a worker without a checkpoint is new (``catch_up.join``). If workers need
longer to find each other, they stay in several groups. With a larger value, a
majority of strangers can replace the weights of a worker that has trained for that time."""
LOOK_AGAIN = 4
"""A worker pauses between two reads of the directory for its time in the job divided by this, at
most ``REFRESH_S``. Workers that start together look for each other often; later each read would
take time from the inner steps."""
NEW_DISTRUST_S = 5.0
"""Seconds that a new worker ignores a worker that alone claimed a later round. The time is short,
because that worker may be in a smaller group, which will join this worker's group."""

Ask = Callable[[Sequence[RoundMember]], Awaitable[dict[PeerId, WorkerPosition]]]
"""Asks workers for their positions."""


class KnownWorkers:
    """The workers of ``job_id`` except ``me``.

    Workers come from the directory and from each roster.

    - Voters: the members of the newest roster that had more than half of the previous voters. A
      majority of voters decides whether this worker is behind, so newcomers cannot outvote them.
    - Mates: the members of the last roster.
    - Excluded workers are neither known nor voters.

    A new worker (``is_new``) has no voters yet.
    """

    def __init__(
        self, directory: Directory, job_id: str, me: PeerId, has_trained: Callable[[], bool]
    ) -> None:
        """``has_trained`` returns whether a round has been committed in this worker's state."""
        self.excluded: dict[PeerId, None] = {}
        """Workers that sent false results, the latest last."""
        self._directory = directory
        self._job_id = job_id
        self._me = me
        self.started_s = -math.inf
        """Loop time at which this worker started without a checkpoint."""
        self._has_trained = has_trained
        self._known: dict[PeerId, RoundMember] = {}
        self._voters: dict[PeerId, RoundMember] = {}
        self._mates: frozenset[PeerId] = frozenset()
        self._distrusted_until: dict[PeerId, float] = {}
        self._refreshed_s = -math.inf

    @property
    def is_new(self) -> bool:
        """True if this worker has not trained, or has only just begun."""
        return not self._has_trained() or loop_time() - self.started_s < NEW_S

    def pause_s(self) -> float:
        """Return the seconds between two reads of the directory."""
        return min(REFRESH_S, (loop_time() - self.started_s) / LOOK_AGAIN)

    async def refresh(self, *, at_once: bool = False) -> None:
        """Add the workers in the directory, unless they were just read."""
        if not at_once and loop_time() - self._refreshed_s < self.pause_s():
            return
        self._refreshed_s = loop_time()
        records = await find_records(self._directory, self._job_id)
        found = {each.worker.peer: each.worker for each in records if each.trains}
        if found:  # otherwise the directory did not answer
            mates = {peer: each for peer, each in self._known.items() if peer in self._mates}
            self._known = {
                peer: each
                for peer, each in (found | mates).items()
                if peer != self._me and peer not in self.excluded
            }

    def alive(self) -> list[RoundMember]:
        """Return the workers that may be alive, without distrusted ones."""
        now = loop_time()
        return [each for peer, each in self._known.items() if self._distrusted_until.get(peer, now) <= now]

    def distrust(self, peer: PeerId) -> None:
        """Leave a worker out of ``alive`` for a while."""
        self._distrusted_until[peer] = loop_time() + (NEW_DISTRUST_S if self.is_new else DISTRUST_S)

    def exclude(self, peers: Iterable[PeerId]) -> None:
        """Ignore ``peers`` for the rest of the job.

        Beyond ``MAX_EXCLUDED``, the workers excluded first are readmitted.
        """
        for peer in peers:
            self.excluded.pop(peer, None)
            self.excluded[peer] = None
            self._known.pop(peer, None)
            self._voters.pop(peer, None)
        for peer in [*self.excluded][:-MAX_EXCLUDED]:
            del self.excluded[peer]

    def voters(self) -> list[RoundMember]:
        """Return the workers to ask whether this one is behind. Before the first roster:
        ``alive()``."""
        return list(self._voters.values()) or self.alive()

    async def compare(
        self, mine: WorkerPosition, ask: Ask, *, same_state: bool, is_behind: bool = False
    ) -> CatchUp | Stay:
        """Decide whether this worker moves from its position, by asking other workers.

        For ``same_state`` see ``catch_up``. ``is_behind``: another worker says that this one is
        behind. A new worker then asks its own group, too.
        """
        if self.is_new and same_state:
            others = [each for each in self.alive() if each.peer not in self._mates or not mine.round]
            verdict = join(mine, len(self._mates) + 1 if mine.round else 0, await ask(self._sample(others)))
            if isinstance(verdict, CatchUp) or not is_behind:
                return verdict
        positions = await ask(self._sample(self.voters()))
        if not positions:  # all voters have left
            positions = await ask(self._sample(self.alive()))
        return catch_up(mine, positions, same_state=same_state)

    def _sample(self, workers: Sequence[RoundMember]) -> list[RoundMember]:
        """Return at most ``MAX_MEMBERS`` of ``workers``, in an order that only this worker has. So
        each worker asks others."""
        ordered = sorted(
            workers, key=lambda each: hashlib.sha256(f"{self._me} {each.peer}".encode()).digest()
        )
        return ordered[:MAX_MEMBERS]

    def set_roster(self, members: Sequence[RoundMember]) -> None:
        """Replace the known workers by the members of a new roster.

        The members become the voters if the roster continues the last one.
        """
        allowed = {member.peer: member for member in members if member.peer not in self.excluded}
        self._known = {peer: member for peer, member in allowed.items() if peer != self._me}
        self._mates = frozenset(self._known)
        if self._known and not self.is_new and continued([*self._voters, self._me], allowed):
            self._voters = dict(self._known)

    def sources(self, peers: Collection[PeerId], *, only: bool) -> list[RoundMember]:
        """Return the workers to download a state of ``peers`` from.

        ``peers`` come first. Unless ``only``, all other live workers follow.
        """
        known = self._voters | self._known
        others = [] if only else [each.peer for each in self.alive() if each.peer not in peers]
        return [
            RoundMember(peer, known[peer].addresses if peer in known else ()) for peer in (*peers, *others)
        ]
