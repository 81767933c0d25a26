"""The conditions under which a worker that is behind replaces its weights with those of other
workers. Pure.

No single worker may move another one to a state of its choice. A worker that learns of a later
position therefore asks its *voters*, the members of the last roster that continued the one before
it, each over a stream that proves the peer id. It moves only to a position that more than half of
the answering voters report. So neither a minority of its former group nor any number of newcomers
can replace its weights.

A *new* worker has no voters: it has not trained, or only just begun. Workers that start together
may find each other late and begin in several groups, so a new worker moves to a group that is
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
    """A worker's next round number, and the id of the state from which this round starts."""

    round: int
    state: bytes


@dataclass(frozen=True)
class CatchUp:
    """Fetch the state of ``position`` from these voters, and continue from there."""

    position: WorkerPosition
    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class Stay:
    """Keep the present state. ``is_settled``: most voters are not ahead of this worker, so the
    worker that reported another position is not asked again soon."""

    is_settled: bool


def catch_up(
    mine: WorkerPosition, votes: Mapping[PeerId, WorkerPosition], *, same_state: bool
) -> CatchUp | Stay:
    """Whether a worker at position ``mine`` moves, given the positions that its voters reported.

    ``same_state``: all workers share one state (all methods but gossip), so positions can be
    compared. Otherwise the worker moves to the median of the voters' rounds, and takes the state of
    one voter at that round.
    """
    if not votes:
        return Stay(is_settled=False)
    if same_state:
        position, count = Counter(votes.values()).most_common(1)[0]
        with_us = sum(each == mine for each in votes.values()) + 1
        is_later = position.round > mine.round and 2 * count > len(votes)
        # A round whose members split into two groups: the larger group wins; of equal groups, the
        # one whose state has the larger id.
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
    """Whether a new worker at position ``mine`` joins a group of other workers, given their
    positions.

    ``mates``: the workers of its own group, itself included; 0 if it has not trained. Workers at
    round 0 have not trained and do not count. A worker that has trained moves to the largest other
    group, if that is larger than its own; among equal groups to the later one, then to the larger
    state id. A worker that has not trained moves to the majority of the workers that have.
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
    """Whether ``roster`` continues the roster ``before``: more than half of the earlier members are
    in it.

    A minority that was cut off, and a roster of many newcomers, do not continue it.
    """
    return not before or 2 * len(set(before) & roster.keys()) > len(before)
