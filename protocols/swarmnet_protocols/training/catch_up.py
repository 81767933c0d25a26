"""The conditions under which a worker that is behind takes over the weights of others. Pure.

No single worker may move another one to a state of its choice. So a worker that learns of a later
position asks its *voters*: the members of the last roster that continued the one before it. Each
voter answers over a stream that proves its peer id. The worker moves only to a position that more
than half of the answering voters report. So neither a minority of its former group nor any number
of newcomers can replace its weights.

A *new* worker has no voters: it has not trained, or only just begun. Workers that start together
may find each other late and begin in several groups. So a new worker moves to a group that is
larger than its own (``join``).
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TypeVar

from swarmnet_protocols.net import PeerId

T = TypeVar("T")


@dataclass(frozen=True)
class WorkerPosition:
    """A worker's next round number, and the id of the state at the start of this round."""

    round: int
    state: bytes


@dataclass(frozen=True)
class CatchUp:
    """Fetch the state of ``position`` from these voters, and continue from there."""

    position: WorkerPosition
    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class Stay:
    """Keep the present state.

    ``is_settled``: most voters are not ahead of this worker. So the worker that reported another
    position is not asked again soon.
    """

    is_settled: bool


def catch_up(
    mine: WorkerPosition, votes: Mapping[PeerId, WorkerPosition], *, same_state: bool
) -> CatchUp | Stay:
    """Decide whether a worker at position ``mine`` moves, given the positions of its voters.

    ``same_state``: all workers share one state, so positions can be compared. This holds for all
    methods but gossip. With gossip the worker moves to the median of the voters' rounds, and takes
    the state of one voter at that round.
    """
    if not votes:
        return Stay(is_settled=False)
    if same_state:
        position, count = Counter(votes.values()).most_common(1)[0]
        with_us = sum(each == mine for each in votes.values()) + 1
        is_later = position.round > mine.round and 2 * count > len(votes)
        # The members of a round may have split into two groups. The larger group wins. Of equal
        # groups, the group whose state has the larger id wins.
        is_other = position.round == mine.round and (count, position.state) > (with_us, mine.state)
        if position != mine and (is_later or is_other):
            return CatchUp(position, tuple(peer for peer, each in votes.items() if each == position))
    else:
        reached = median_low(each.round for each in votes.values())
        there = {peer: each for peer, each in votes.items() if each.round == reached}
        if reached > mine.round:
            peer = min(there)
            return CatchUp(there[peer], (peer,))
    near = sum(each.round <= mine.round + 1 for each in votes.values())
    return Stay(is_settled=2 * near > len(votes))


def join(mine: WorkerPosition, mates: int, others: Mapping[PeerId, WorkerPosition]) -> CatchUp | Stay:
    """Decide whether a new worker at position ``mine`` joins a group of other workers.

    ``mates``: number of workers in its own group, including itself; 0 if it has not trained.
    Workers at round 0 have not trained and do not count.

    - A worker that has trained moves to the largest other group, if that is larger than its own.
      Among equal groups it moves to the later one, then to the larger state id.
    - A worker that has not trained moves to the majority of the workers that have.
    """
    trained = {peer: each for peer, each in others.items() if each.round}
    groups = Counter(trained.values())
    if not groups:
        return Stay(is_settled=True)
    position, count = max(groups.items(), key=lambda item: (item[1], item[0].round, item[0].state))
    is_larger = (count, position.round, position.state) > (mates, mine.round, mine.state)
    if position != mine and (is_larger if mates else 2 * count > len(trained)):
        return CatchUp(position, tuple(peer for peer, each in trained.items() if each == position))
    return Stay(is_settled=mates > 0)


def continued(before: Collection[PeerId], roster: Mapping[PeerId, T]) -> bool:
    """Return whether ``roster`` contains more than half of the members of the roster ``before``.

    A minority that was cut off does not continue the roster. Nor does a roster of many newcomers.
    """
    return not before or 2 * len(set(before) & roster.keys()) > len(before)
