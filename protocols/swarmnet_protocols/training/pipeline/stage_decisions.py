"""The decision of a worker that looks at the stages of its job: go on, or take another state. Pure.

Stages go on in step, so the job stands still while a stage has no worker. A worker that takes the
stage later continues at the round of the others, with the newest state that anybody still has.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median_high

from swarmnet_protocols.training.catch_up import WorkerPosition


class Decision(Enum):
    """A decision that names no round. ``Restore`` names one."""

    KEEP = auto()
    """Go on in this round."""
    FETCH = auto()
    """Most workers of the stage are ahead. Matchmaking leads to their state."""
    WAIT = auto()
    """Nobody has the state of the stage."""
    END = auto()
    """The job has ended."""


@dataclass(frozen=True)
class Restore:
    """Go on at ``round``, where the other stages are."""

    round: int
    copy: WorkerPosition | None
    """The copy to go on with. None: the worker's own state."""


@dataclass(frozen=True)
class StagesView:
    """The stages of a job as a worker at ``round`` sees them."""

    round: int
    has_trained: bool
    """True if a round has been committed in the worker's own state."""
    waited: bool
    """True if the worker has done its part of the round, and waits for other stages."""
    mates: Collection[int]
    """The rounds of the other workers of its stage that answer."""
    job_round: int
    """The round that the other stages are at."""
    copies: Collection[WorkerPosition]
    """Copies of the stage's state at workers of other stages."""
    may_lag: float
    """Rounds by which the worker may be behind the other stages."""
    is_over: bool
    """True if the other workers of stage 0 have left after the last round."""


def decide(view: StagesView) -> Decision | Restore:
    """Return what a worker does next.

    A stage that missed one round may go on from the job's initial weights. A stage that missed more
    needs a state that was trained.
    """
    if 2 * sum(each > view.round for each in view.mates) > len(view.mates):
        return Decision.FETCH
    if view.waited and view.is_over and not view.mates:
        return Decision.END
    now = view.job_round
    if now <= view.round + view.may_lag or (view.mates and not view.waited):
        return Decision.KEEP
    copy = newest_copy(view.copies, view.round if view.has_trained else 0, now)
    if copy is None and not view.has_trained and now > view.round + 1:
        return Decision.WAIT
    return Restore(now, copy)


def job_round(rounds: Sequence[Collection[int]], stage: int) -> int:
    """Return the round that the workers of the other stages are at.

    ``rounds``: the rounds of the workers of each stage. Stage 0 begins and ends a round first, so
    it decides. Without stage 0, the stage that is ahead of the others decides.
    """
    others = rounds[:1] if stage and rounds[0] else [each for at, each in enumerate(rounds) if at != stage]
    return max((median_high(each) for each in others if each), default=0)


def newest_copy(copies: Collection[WorkerPosition], after: int, until: int) -> WorkerPosition | None:
    """Return the copy of the latest round in ``after`` < round <= ``until``.

    Of copies of one round, the state that most peers keep wins. No honest peer has a copy of a
    round that the job has not reached.
    """
    counts = Counter(each for each in copies if after < each.round <= until)
    return max(counts, key=lambda each: (each.round, counts[each], each.state), default=None)
