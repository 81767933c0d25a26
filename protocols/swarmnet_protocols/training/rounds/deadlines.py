"""The deadlines of an averaging round, and the schedule that spreads its transfers.

A round has four phases, in seconds since the member began it (``RoundTiming``):

1. Until ``contribution_s`` contributions arrive at the reducers.
2. Until ``majority_s`` results arrive. The round commits once all live members hold all results. A
   reducer that has sent no result half-way through this phase (``replace_reducer_s``) is replaced.
3. Until ``deadline_s`` a majority of holders is enough to commit. Without one the round is
   discarded.
4. Afterwards a member that knows no decision is behind.
"""

import math
from dataclasses import dataclass, field, replace

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.timing import Timing

SENDING_FRACTION = 0.99
"""Fraction of the available time over which a transfer is spread.

The rest is left for data in flight and for the decision.
"""
CONTRIBUTION_FRACTION = 0.5
"""Paced contributions are sent within this fraction of ``contribution_s``.

The rest is left for retries.
"""
MAX_PARTS = 256
"""Most parts of a paced payload. A burst is at most one part, so fewer parts make larger bursts."""
MIN_PART_BYTES = 4 << 10
MAX_PART_BYTES = 256 << 10
"""Most bytes of a payload in one message. Control messages wait for at most one part."""
MIN_WAIT_S = 1e-3
"""A part that is due within this many seconds is sent at once."""


@dataclass(frozen=True)
class RoundTiming:
    """Deadlines of a round, in seconds since this member began it."""

    contribution_s: float = 20.0
    """Contributions that arrive later are left out.

    A member that takes over a slice waits for contributions as long again.
    """
    majority_s: float = 40.0
    """From then on a majority of holders is enough to commit.

    If no majority holds all results, the round is discarded.
    """
    deadline_s: float = 60.0
    """A member that does not know the decision by then is behind."""
    streams: Timing = field(default_factory=Timing)
    """Timeouts of the streams between members.

    A silent member counts as lost until its stream opens again.
    """

    def __post_init__(self) -> None:
        if not 0 < self.contribution_s < self.majority_s < self.deadline_s < math.inf:
            raise ConfigError("a round needs 0 < contribution_s < majority_s < deadline_s")

    def within_groups(self) -> "RoundTiming":
        """Return the deadlines in a round of several groups.

        Reducers average between the groups from a quarter of the time to half of it.
        """
        return replace(self, contribution_s=self.deadline_s / 4, majority_s=3 * self.deadline_s / 4)

    def between_groups(self, elapsed_s: float) -> "RoundTiming | None":
        """Return the deadlines of an exchange between groups that starts ``elapsed_s`` after the
        round; None if it is too late."""
        contribution, majority, deadline = (self.deadline_s * share / 16 - elapsed_s for share in (6, 7, 8))
        if contribution <= 0:
            return None
        return RoundTiming(contribution, majority, deadline, self.streams)

    @property
    def replace_reducer_s(self) -> float:
        """A reducer that has delivered no result by then is replaced.

        Early enough for another reducer to finish before ``majority_s``.
        """
        return (self.contribution_s + self.majority_s) / 2

    @property
    def attempt_s(self) -> float:
        """Seconds for each coordinator after ``majority_s``, before the next attempt begins.

        A quarter of the time to the deadline.
        """
        return (self.deadline_s - self.majority_s) / 4

    @property
    def give_up_s(self) -> float:
        """Seconds without the majority after which a member ends behind."""
        return 3 * (self.streams.silence_s + self.streams.open_s)


@dataclass(frozen=True)
class Pace:
    """Sends ``size_bytes`` at an even rate from ``start_s`` to ``end_s`` (loop time).

    Sends at once if ``end_s`` is not later.
    """

    start_s: float
    end_s: float
    size_bytes: int

    def due_s(self, sent_bytes: int) -> float:
        """Return the loop time of the next part after ``sent_bytes``.

        The schedule is absolute, so a late sender does not wait.
        """
        share = sent_bytes / max(1, self.size_bytes)
        return self.start_s + max(0.0, self.end_s - self.start_s) * share

    @property
    def part_bytes(self) -> int:
        """Bytes of one part."""
        if self.end_s - self.start_s < MIN_WAIT_S:
            return MAX_PART_BYTES
        return min(MAX_PART_BYTES, max(MIN_PART_BYTES, -(-self.size_bytes // MAX_PARTS)))


class SendSchedule:
    """The paces of all transfers of one round at one member.

    They let an exchange that overlaps inner steps use little bandwidth. Contributions and results
    are sent at one common rate. A result to a member starts when the contribution to that member
    has ended. Both end by their deadlines. A transfer that begins late, because it is repeated or
    replaces a failed reducer's, has less time or is sent at once.
    """

    def __init__(
        self, spread_s: float, contribution_fraction: float, began_s: float, timing: RoundTiming
    ) -> None:
        """Make the schedule of a round that began at ``began_s``.

        - ``spread_s``: seconds over which the round may send; 0 to send at once.
        - ``contribution_fraction``: contributions' share of all bytes.
        """
        contribute_by_s = CONTRIBUTION_FRACTION * timing.contribution_s
        sending_s = min(SENDING_FRACTION * spread_s, contribute_by_s / contribution_fraction)
        self._contribution_s = sending_s * contribution_fraction
        self._result_s = sending_s - self._contribution_s
        self._contribute_by = began_s + contribute_by_s
        self._deliver_by = began_s + timing.replace_reducer_s
        self._contribution_end: dict[int, float] = {}

    def contribution(self, member: int, size_bytes: int, now: float) -> Pace:
        """Return the pace of a contribution to ``member`` that starts ``now``."""
        end_s = min(now + self._contribution_s, self._contribute_by)
        self._contribution_end.setdefault(member, end_s)
        return Pace(now, end_s, size_bytes)

    def result(self, member: int, size_bytes: int, now: float) -> Pace:
        """Return the pace of a result to ``member`` that is available ``now``."""
        start_s = max(now, self._contribution_end.get(member, now))
        return Pace(start_s, min(start_s + self._result_s, self._deliver_by), size_bytes)
