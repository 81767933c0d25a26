"""The round and the state with which a stage goes on after it lost its last worker. Pure.

Stages go on in step, so the job stands still while a stage has no worker. A worker that takes the
stage later continues at the round of the others, with the newest state that anybody still has.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from statistics import median_high

from swarmnet_protocols.training.catch_up import WorkerPosition


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
