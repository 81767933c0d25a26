"""The knowledge of one member of a round: a state of each slice and of each member. Pure."""

import math
from dataclasses import dataclass, field

from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.messages import Assignment, Report


@dataclass
class SliceState:
    """The state of a slice, as member ``me`` knows it."""

    me: int
    first_reducer: int
    assignment: Assignment
    due: float
    """Time until which contributions may arrive, if this member reduces the slice."""
    late_at: float
    """Time until which the reducer must deliver a result. Then it is late."""
    contributed: set[int] = field(default_factory=set)
    """The members whose contributions arrived, and the members that said they make none."""
    sending_until: dict[int, float] = field(default_factory=dict)
    """Member → time until which it can use this member's contribution."""
    held: tuple[bytes, ...] = ()
    """The hashes of the whole and verified results that this member has."""
    is_taken_over: bool = False
    """True if this member has replaced another reducer."""
    is_reduced: bool = False
    """True if this member has begun to reduce the slice."""
    progress_at: float = -math.inf
    """Time when the last part of a result arrived, or was requested."""
    requests: int = 0
    """Number of times that this member has requested a result."""

    @classmethod
    def first(cls, me: int, reducer: int, timing: RoundTiming, now: float) -> "SliceState":
        """Return the state at the beginning of a round."""
        due, late_at = now + timing.contribution_s, now + timing.replace_reducer_s
        return cls(me, reducer, Assignment(reducer), due, late_at)

    @property
    def reduces(self) -> bool:
        """True if this member still has to reduce the slice.

        It is the slice's reducer, and has neither begun to reduce it nor received a result.
        """
        return self.assignment.reducer == self.me and not self.is_reduced and not self.held

    def adopt(self, assignment: Assignment, timing: RoundTiming, now: float, left_s: float) -> bool:
        """Adopt an assignment ``left_s`` before ``majority_s``.

        Returns whether this member takes over the slice: it then needs the contributions to it.
        """
        before, self.assignment = self.assignment.reducer, assignment
        if assignment.reducer == before:
            return False
        self.late_at = now + timing.replace_reducer_s - timing.contribution_s
        if assignment.reducer != self.me or self.held:
            return False
        self.is_taken_over = True
        self.contributed.add(self.me)
        self.due = now + min(timing.contribution_s, left_s / 2)
        return True


@dataclass
class MemberState:
    """The state of another member, as this member knows it."""

    is_linked: bool = False
    """True if this member's own stream to it is open."""
    lost_at: float | None = None
    """Time when that stream was lost; None unless it is lost."""
    has_begun: bool = False
    """True if it has begun this round."""
    is_refuted: bool = False
    """True if it is dishonest."""
    attempt: int | None = None
    """The attempt that it follows; None until it says so."""
    report: Report | None = None
    """Its last report. It takes this member for the coordinator."""

    @property
    def is_gone(self) -> bool:
        """True if nothing more comes from it, unless its stream opens again."""
        return self.lost_at is not None or self.is_refuted
