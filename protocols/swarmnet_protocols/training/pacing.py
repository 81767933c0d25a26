"""Paces workers of unequal speed, so that all of them end a round at the same time. Pure.

Each worker measures its ``Speed``, and tells the others the seconds that its longest round takes.
The fastest worker sets the time of a round and takes all of its inner steps. A slower one takes as
many as it can in that time (FedCompass, Li et al., arXiv 2309.14675). It also ends its steps soon
after that time if its machine became slower meanwhile. Contributions are weighted by tokens, so
fewer steps count for less.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from swarmnet_protocols.net import PeerId

LEAST_SHARE = 1 / 16
"""Least share of a round's inner steps that a worker takes.

With less, a worker that claims a false speed could reduce the others' steps further. With more,
faster workers wait for a machine that is slower by a smaller factor.
"""

SLACK = 1.25
"""Part of the fastest round's time after which a worker begins no further inner step.

With less, jitter costs steps. With more, all wait longer for a machine that its owner began to use.
"""

LEAST_WAIT_S = 1.0
"""Shortest wait that is reported. With less, a worker is named for the jitter of its network."""


class Spent(NamedTuple):
    """Seconds that a worker spent on its last round."""

    compute: float = 0.0
    network: float = 0.0
    disk: float = 0.0


NOTHING = Spent()


@dataclass(frozen=True)
class Wait:
    """A wait of ``seconds`` for ``peer`` alone. ``why``: a field of ``Spent``."""

    peer: PeerId
    why: str
    seconds: float


def waited_for(arrived_s: Mapping[PeerId, float], spent: Mapping[PeerId, Spent]) -> Wait | None:
    """Return the worker that all others waited for, from the arrival of each and what it ``spent``.

    The cause is the work that took the last worker longer than the median of the others, by the
    largest difference. None if the last worker came less than ``LEAST_WAIT_S`` after the others.
    """
    *others, last = sorted(arrived_s, key=lambda peer: (arrived_s[peer], peer))
    if not others or (seconds := arrived_s[last] - arrived_s[others[-1]]) < LEAST_WAIT_S:
        return None
    usual = Spent(*(median(parts) for parts in zip(*(spent[peer] for peer in others), strict=True)))
    excess = {name: getattr(spent[last], name) - getattr(usual, name) for name in Spent._fields}
    return Wait(last, max(excess, key=excess.__getitem__), seconds)


class StepLimit(NamedTuple):
    """An end of inner steps before all planned ones are done: after ``least`` steps, no further one
    begins once ``most_s`` seconds have passed."""

    least: int = 0
    most_s: float = math.inf


NO_LIMIT = StepLimit()


@dataclass(frozen=True)
class Speed:
    """A worker's measured speed.

    - ``step_s``: seconds of an inner step.
    - ``rest_s``: seconds of a round without its inner steps: outer step, evaluation, checkpoint.
    """

    step_s: float
    rest_s: float = 0.0

    def round_s(self, steps: int) -> float:
        """Return the seconds of a round with ``steps`` inner steps, without its exchange."""
        return self.rest_s + steps * self.step_s

    def with_rest(self, rest_s: float) -> "Speed":
        """Return this speed after another round. ``rest_s`` is averaged with the rounds before,
        because not every round has an evaluation."""
        return replace(self, rest_s=(self.rest_s + rest_s) / 2)


def steps_in_time(mine: Speed, rounds_s: Iterable[float], most: int) -> int:
    """Return the inner steps with which this worker ends its round when the fastest one does.

    - ``rounds_s``: seconds that ``most`` inner steps take each worker; 0 for an unknown time.
    - ``most``: the inner steps of a round in the job.

    At least ``LEAST_SHARE`` of ``most``, and at least one.
    """
    fastest_s = min([mine.round_s(most), *(each for each in rounds_s if each > 0)])
    return min(most, max(least_steps(most), round((fastest_s - mine.rest_s) / mine.step_s)))


def least_steps(most: int) -> int:
    """Return the fewest inner steps that a worker takes in a round with ``most``."""
    return max(1, round(most * LEAST_SHARE))


def kept_share(staleness: int) -> float:
    """Return the share of a late contribution that counts. ``staleness``: the rounds it is late.

    (1 + s)^-1/2, as in FedBuff (Nguyen et al., arXiv 2106.06639).
    """
    return 1 / math.sqrt(1 + max(0, staleness))


def overlap_of(steps: int, overlap: int, most: int) -> int:
    """Return how many of ``steps`` inner steps run during the exchange of the round before.

    ``overlap``: how many of ``most`` inner steps the method lets run. The exchange gets the same
    share of the round's time. It ends before the last step, unless the method gives it the whole
    round.
    """
    return steps if overlap >= most else min(-(-overlap * steps // most), steps - 1)


class WorkerPace:
    """The pace of one worker: its own speed, that of the others, and what delayed it."""

    def __init__(self, most: int, most_overlap: int, step_s: float) -> None:
        """Begin with seconds of an inner step that are known, or 0.

        ``most``: the inner steps of a round in the job. ``most_overlap``: how many of these the
        method lets run during an exchange.
        """
        self.spent = NOTHING
        """The seconds that this worker spent since the last roster."""
        self.computed_s = 0.0
        """Seconds of computing so far."""
        self.rounds_s: Sequence[float] = ()
        """Seconds that ``most`` inner steps take each worker; 0 for an unknown time."""
        self._most = most
        self._most_overlap = most_overlap
        self._speed = Speed(step_s) if step_s else None
        self._stepped_s = 0.0

    def spend(self, compute: float = 0.0, network: float = 0.0, disk: float = 0.0) -> None:
        """Add seconds that computing took, or by which network or disk delayed this worker."""
        spent = self.spent
        self.spent = Spent(spent.compute + compute, spent.network + network, spent.disk + disk)
        self.computed_s += compute

    def stepped(self, steps: int, seconds: float) -> None:
        """Note the time of inner steps. They are a part of ``spent.compute``."""
        self._stepped_s += seconds
        if steps:
            self._speed = replace(self._speed or Speed(0.0), step_s=seconds / steps)

    def end_round(self) -> Spent:
        """Return what this worker spent on the round, and begin the next."""
        spent = self.spent
        if self._speed is not None and self._stepped_s:
            self._speed = self._speed.with_rest(spent.compute - self._stepped_s)
        self.spent, self._stepped_s = NOTHING, 0.0
        return spent

    @property
    def round_s(self) -> float:
        """Seconds of a round with all inner steps, or 0 until the speed is known."""
        return 0.0 if self._speed is None else self._speed.round_s(self._most)

    @property
    def steps(self) -> int:
        """Inner steps with which all workers end this round together."""
        return self._most if self._speed is None else steps_in_time(self._speed, self.rounds_s, self._most)

    @property
    def limit(self) -> StepLimit:
        """The limit of this round's inner steps. Without end if no other worker may wait."""
        known = [each for each in self.rounds_s if each > 0]
        most_s = SLACK * min(known) + LEAST_WAIT_S if len(known) > 1 else math.inf
        return StepLimit(least_steps(self._most), most_s)

    @property
    def overlap(self) -> int:
        """Inner steps during the exchange of the previous round."""
        return overlap_of(self.steps, self._most_overlap, self._most)

    def steps_s(self, steps: int) -> float:
        """Return the seconds of inner steps, or 0 until the speed is known."""
        return 0.0 if self._speed is None else steps * self._speed.step_s
