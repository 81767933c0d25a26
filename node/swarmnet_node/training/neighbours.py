"""The other workers of a job, as far as one of them knows: who was in its last roster, and who is new in the directory."""

import asyncio
from collections.abc import Collection, Sequence

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import continued
from swarmnet_protocols.training.job_records import find_workers
from swarmnet_protocols.training.rosters import Candidate
from swarmnet_protocols.training.state_transfer import Source

DOUBTED_S = 120.0
"""How long a worker is left out that said it is where no witness is."""
LOOK_S = 5.0
"""Between two looks at the directory for workers that are new."""


class Neighbours:
    """The workers of ``job_id`` but for ``me``."""

    def __init__(self, directory: Directory, job_id: str, me: PeerId) -> None:
        self._directory = directory
        self._job_id = job_id
        self._me = me
        self._known: dict[PeerId, Candidate] = {}
        self._witnesses: dict[PeerId, Candidate] = {}
        self._doubted: dict[PeerId, float] = {}
        self._looked = -LOOK_S

    async def look(self, *, now: bool = False) -> None:
        """Learn from the directory who is new, unless that was just done or it is to be ``now``."""
        clock = asyncio.get_running_loop().time
        if not now and clock() - self._looked < LOOK_S:
            return
        self._looked = clock()
        for info in await find_workers(self._directory, self._job_id):
            if info.peer != self._me:
                self._known.setdefault(info.peer, info.member)

    def known(self) -> list[Candidate]:
        """Those thought to be alive, without those that are doubted."""
        now = asyncio.get_running_loop().time()
        return [each for peer, each in self._known.items() if self._doubted.get(peer, now) <= now]

    def doubt(self, peer: PeerId) -> None:
        """Leave a worker out for a while: it said that it is where no witness is."""
        self._doubted[peer] = asyncio.get_running_loop().time() + DOUBTED_S

    def witnesses(self) -> list[Candidate]:
        """Whose word counts for it that others are further: the members of the last roster that continued the one before, or, before there was one, all."""
        return list(self._witnesses.values()) or self.known()

    def meet(self, members: Sequence[Candidate]) -> None:
        """These are in our roster now, and nobody else is thought to be alive."""
        self._known = {member.peer: member for member in members if member.peer != self._me}
        if self._known and continued(
            [*self._witnesses, self._me], {member.peer: member for member in members}
        ):
            self._witnesses = dict(self._known)

    def sources(self, peers: Collection[PeerId], *, only: bool) -> list[Source]:
        """From whom to fetch a state that ``peers`` have: them, and the others, who may have it too, unless it is ``only`` theirs."""
        known = self._witnesses | self._known
        others = [] if only else [each.peer for each in self.known() if each.peer not in peers]
        return [Source(peer, known[peer].addresses if peer in known else ()) for peer in (*peers, *others)]
