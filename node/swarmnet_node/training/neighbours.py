"""The other workers of a job, as far as one of them knows: who was in its last roster, and who is new in the directory."""

import asyncio
from collections.abc import Sequence

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.training.board import find_workers
from swarmnet_protocols.training.rosters import Candidate
from swarmnet_protocols.training.state_transfer import Source
from swarmnet_protocols.transport import PeerId

LOOK_S = 5.0
"""Between two looks at the directory for workers that are new."""


class Neighbours:
    """The workers of ``job_id`` but for ``me``."""

    def __init__(self, directory: Directory, job_id: str, me: PeerId) -> None:
        self._directory = directory
        self._job_id = job_id
        self._me = me
        self._known: dict[PeerId, Candidate] = {}
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
        return list(self._known.values())

    def meet(self, members: Sequence[Candidate]) -> None:
        """These are in our roster now, and nobody else is thought to be alive."""
        self._known = {member.peer: member for member in members if member.peer != self._me}

    def sources(self, first: PeerId, *, only: bool) -> list[Source]:
        """From whom to fetch a state: ``first``, and the others unless it is the ``only`` one to have it."""
        member = self._known.get(first)
        others = [] if only else [each for each in self.known() if each.peer != first]
        return [
            Source(first, member.addresses if member else ()),
            *(Source(each.peer, each.addresses) for each in others),
        ]
