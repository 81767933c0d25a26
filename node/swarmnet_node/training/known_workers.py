"""The other workers of a job as one worker knows them.

Says which workers are alive, vote, are excluded, and can provide the shared state.
"""

import asyncio
import math
from collections.abc import Collection, Iterable, Sequence

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import continued
from swarmnet_protocols.training.job_records import find_workers
from swarmnet_protocols.training.rosters import Candidate
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


class KnownWorkers:
    """The workers of ``job_id`` except ``me``.

    Workers come from the directory and from each roster.

    - Voters: the members of the last roster that had more than half of the voters before it. A
      majority of voters decides whether this worker is behind, so newcomers cannot outvote them.
    - Mates: the members of the last roster.
    - Excluded workers are neither known nor voters.
    """

    def __init__(self, directory: Directory, job_id: str, me: PeerId) -> None:
        self.excluded: dict[PeerId, None] = {}
        """Workers that sent false results, the latest last."""
        self._directory = directory
        self._job_id = job_id
        self._me = me
        self._known: dict[PeerId, Candidate] = {}
        self._voters: dict[PeerId, Candidate] = {}
        self.mates: frozenset[PeerId] = frozenset()
        self._distrusted_until: dict[PeerId, float] = {}
        self._refreshed_s = -math.inf

    async def refresh(self, within_s: float = REFRESH_S) -> None:
        """Add the workers in the directory, unless they were read in the last ``within_s``."""
        clock = asyncio.get_running_loop().time
        if clock() - self._refreshed_s < within_s:
            return
        self._refreshed_s = clock()
        for info in await find_workers(self._directory, self._job_id):
            if info.peer != self._me and info.peer not in self.excluded:
                self._known.setdefault(info.peer, info.member)

    def alive(self) -> list[Candidate]:
        """Return the workers that may be alive, without distrusted ones."""
        now = asyncio.get_running_loop().time()
        return [each for peer, each in self._known.items() if self._distrusted_until.get(peer, now) <= now]

    def distrust(self, peer: PeerId, for_s: float = DISTRUST_S) -> None:
        """Leave a worker out of ``alive`` for ``for_s`` seconds."""
        self._distrusted_until[peer] = asyncio.get_running_loop().time() + for_s

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

    def voters(self) -> list[Candidate]:
        """Return the workers to ask whether this one is behind. Before the first roster:
        ``alive()``."""
        return list(self._voters.values()) or self.alive()

    def set_roster(self, members: Sequence[Candidate], *, is_new: bool = False) -> None:
        """Replace the known workers by the members of a new roster.

        The members become the voters if the roster continues the last one. ``is_new``: this worker
        has just started, and has no voters yet.
        """
        allowed = {member.peer: member for member in members if member.peer not in self.excluded}
        self._known = {peer: member for peer, member in allowed.items() if peer != self._me}
        self.mates = frozenset(self._known)
        if self._known and not is_new and continued([*self._voters, self._me], allowed):
            self._voters = dict(self._known)

    def sources(self, peers: Collection[PeerId], *, only: bool) -> list[RoundMember]:
        """Return the workers to download a state of ``peers`` from.

        ``peers`` come first. Then follow all others alive, unless ``only``.
        """
        known = self._voters | self._known
        others = [] if only else [each.peer for each in self.alive() if each.peer not in peers]
        return [
            RoundMember(peer, known[peer].addresses if peer in known else ()) for peer in (*peers, *others)
        ]
