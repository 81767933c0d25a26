"""One worker's place among the workers of its job: position, last roster, and present leader."""

from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnet_protocols.machine.aio import News
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.matchmaking.rosters import NO_ADDRESSES, AddressBook, place_as_leader
from swarmnet_protocols.training.rounds.terms import RoundMember


@dataclass
class GroupState:
    """The state that a worker shares between its two parts, as leader and as follower."""

    max_members: int
    same_state: bool
    """True if all workers start a round from one state. False for gossip methods."""
    is_excluded: Callable[[PeerId], bool]
    """Returns True for a peer that sent false results."""
    position: WorkerPosition = WorkerPosition(0, b"")  # noqa: RUF009 - it is frozen
    """This worker's position, as others learn it."""
    book: AddressBook = NO_ADDRESSES
    """The addresses in the last roster."""
    leader: RoundMember | None = None
    """The leader of this worker's group: the worker that it follows, or itself.

    None while it is in no group.
    """
    redirect_to: RoundMember | None = None
    """The worker to which this worker redirects its own followers; None while it leads.

    It is the leader, or the worker that the leader follows in turn.
    """
    rival: RoundMember | None = None
    """Another leader at this worker's position that comes before ``leader``."""
    changed: News = field(default_factory=News)

    def place(self, peer: PeerId) -> bytes:
        """Return the place of ``peer`` in the order of leaders at this worker's position."""
        return place_as_leader(peer, self.position.round, self.position.state if self.same_state else b"")

    def precedes(self, peer: PeerId, other: PeerId) -> bool:
        """Return whether ``peer`` comes before ``other`` in the order of leaders."""
        return self.place(peer) < self.place(other)

    def is_here(self, position: WorkerPosition) -> bool:
        """Return whether another worker's position is this worker's."""
        return position.round == self.position.round and not self._is_other(position.state)

    def is_elsewhere(self, position: WorkerPosition) -> bool:
        """Return whether the position is at a later round, or at this round with another state."""
        if position.round == self.position.round:
            return position.state != b"" and self._is_other(position.state)
        return position.round > self.position.round

    def is_coming(self, peer: PeerId, position: WorkerPosition) -> bool:
        """Return whether a worker is at this worker's position or will reach it.

        A member of the last roster that has not finished that round will reach it. In gossip there
        is no roster, so any worker that is a round behind will.
        """
        is_one_behind = position.round == self.position.round - 1
        is_known = peer in self.book.addresses or not self.same_state
        return self.is_here(position) or (is_one_behind and is_known)

    def has_no_place(self, peer: PeerId) -> bool:
        """Return whether the last roster was full, and did not have ``peer``."""
        return len(self.book.addresses) >= self.max_members and peer not in self.book.addresses

    async def hear_of(self, leader: RoundMember) -> RoundMember | None:
        """Follow another leader at this worker's position if it comes before the present leader.

        Return the present leader if that comes first. Otherwise return None.
        """
        present = self.leader
        if present is None:
            return None
        if self.precedes(leader.peer, present.peer):
            self.rival = leader
            await self.changed.tell()
        return present if self.precedes(present.peer, leader.peer) else None

    def _is_other(self, state: bytes) -> bool:
        return self.same_state and state != self.position.state
