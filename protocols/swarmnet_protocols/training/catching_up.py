"""Whose word a worker takes for it that others are further than itself. Pure.

A worker that is behind takes the weights of others in the place of its own, so no single worker may send it anywhere. It asks its witnesses where
they are, each over a stream that proves its peer id: the members of the last roster that continued the one before. More than half of those who
answer have to name the same place. So fewer than half of its former colleagues, however many workers are new, cannot replace its weights.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TypeVar

from swarmnet_protocols.net import PeerId

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a worker stands: its next round, and the id of the state which that starts from."""

    round: int
    state: bytes


@dataclass(frozen=True)
class Jump:
    """Go to ``place``: these witnesses are there."""

    place: Place
    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class Stay:
    """Do not go. ``is_settled`` if the witnesses are where we are, so that a worker that says otherwise is not to be asked again soon."""

    is_settled: bool


def catch_up(mine: Place, said: Mapping[PeerId, Place], *, same_state: bool) -> Jump | Stay:
    """What to do about a worker that is elsewhere, when witnesses have ``said`` where they are.

    Where workers have states of their own (not ``same_state``), the median of the witnesses' rounds counts, and the state of one of those there.
    """
    if not said:
        return Stay(is_settled=False)
    if same_state:
        place, count = Counter(said.values()).most_common(1)[0]
        with_us = sum(each == mine for each in said.values()) + 1
        is_later = place.round > mine.round and 2 * count > len(said)
        # Two halves of one round: the larger one is right, of equals the one whose state has the larger id.
        is_other = place.round == mine.round and (count, place.state) > (with_us, mine.state)
        if place != mine and (is_later or is_other):
            return Jump(place, tuple(peer for peer, each in said.items() if each == place))
    else:
        reached = median_low(each.round for each in said.values())
        there = {peer: each for peer, each in said.items() if each.round == reached}
        if reached > mine.round:
            peer = min(there)
            return Jump(there[peer], (peer,))
    near = sum(each.round <= mine.round + 1 for each in said.values())
    return Stay(is_settled=2 * near > len(said))


def continued(before: Collection[PeerId], roster: Mapping[PeerId, T]) -> bool:
    """Whether ``roster`` takes the place of the one before: more than half of that one's members are in it.

    A part of the workers that was cut off from the others, and strangers that came in a crowd, do not.
    """
    return not before or 2 * len(set(before) & roster.keys()) > len(before)
