"""How the sending of an exchange is spread over the time it may take, so that it needs little of a link at any moment. Pure."""

from dataclasses import dataclass

from swarmnet_protocols.training.rounds.events import RoundTiming

SENDING = 0.99
"""Of the time an exchange may take; the rest is for what is on its way, and to agree."""
BY_DEADLINE = 0.5
"""Of the time until contributions are due: whoever paces itself has sent them by then."""
PARTS = 256
"""Of a payload that is paced: a burst is no more than one of them."""
MIN_PART_BYTES = 4 << 10
MAX_PART_BYTES = 256 << 10
"""Of a payload in one message: small, as what is urgent waits for no more than one."""
MIN_WAIT_S = 1e-3
"""What is due so soon may go now."""


@dataclass(frozen=True)
class Pace:
    """``size_bytes`` that leave evenly from ``start_s`` to ``end_s``, or as fast as they can if that is no later."""

    start_s: float
    end_s: float
    size_bytes: int

    def due_s(self, sent_bytes: int) -> float:
        """When the next may go after ``sent_bytes``. It follows the plan, not the last part: who is behind it does not wait."""
        share = sent_bytes / max(1, self.size_bytes)
        return self.start_s + max(0.0, self.end_s - self.start_s) * share

    @property
    def part_bytes(self) -> int:
        """How much to send at a time."""
        if self.end_s - self.start_s < MIN_WAIT_S:
            return MAX_PART_BYTES
        return min(MAX_PART_BYTES, max(MIN_PART_BYTES, -(-self.size_bytes // PARTS)))


class Spread:
    """The paces of one round at a member that began it at ``began_s`` and may take ``spread_s`` to send; 0 for at once.

    ``contributions`` is what part contributions are of all bytes: the same rate lasts through them and the results. A result
    begins when the contribution on the same link has ended, and however late either begins, deadlines hold: what is sent
    again, or for somebody who failed, has less time or none.
    """

    def __init__(self, spread_s: float, contributions: float, began_s: float, timing: RoundTiming) -> None:
        contribute_by_s = BY_DEADLINE * timing.contribution_s
        sending_s = min(SENDING * spread_s, contribute_by_s / contributions)
        self._contribution_s = sending_s * contributions
        self._result_s = sending_s - self._contribution_s
        self._contribute_by = began_s + contribute_by_s
        self._deliver_by = began_s + timing.late_s
        self._contributed: dict[int, float] = {}

    def contribution(self, member: int, size_bytes: int, now: float) -> Pace:
        """For a contribution to ``member``, from ``now``."""
        end_s = min(now + self._contribution_s, self._contribute_by)
        self._contributed.setdefault(member, end_s)
        return Pace(now, end_s, size_bytes)

    def result(self, member: int, size_bytes: int, now: float) -> Pace:
        """For a result to ``member``, that is here ``now``."""
        start_s = max(now, self._contributed.get(member, now))
        return Pace(start_s, min(start_s + self._result_s, self._deliver_by), size_bytes)
