"""Moves of experts between peers: a few loads per minute towards a wanted placement, while each expert always has a holder.

A peer loads an expert while another one still holds it (make before break), into free memory or that of an expert that it drops.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.expert_dispatch import Expert, ExpertPeer, Placement

MOVES_A_MINUTE = 0.05
"""Largest share of a model's experts that peers load in a minute, because requests use the same links."""


@dataclass(frozen=True)
class Moves:
    """The next moves: peers drop first, then load. No expert is dropped and loaded by the same peer."""

    loads: tuple[tuple[PeerId, Expert], ...] = ()
    drops: tuple[tuple[PeerId, Expert], ...] = ()


def most_moves(experts: int, minutes: float = 1.0) -> int:
    """The number of experts that peers may load in ``minutes``, at least one. ``experts``: those of all blocks of the model."""
    return max(1, math.floor(MOVES_A_MINUTE * experts * minutes))


def next_moves(
    present: Placement, wanted: Placement, peers: Sequence[ExpertPeer], *, expert_bytes: int, most: int
) -> Moves:
    """The next moves from ``present``, the experts that live peers have loaded, towards ``wanted``, a placement of ``place``.

    A peer drops an expert that is not wanted there if another peer holds and keeps it, and loads one if it has memory. At most ``most`` experts
    that some peer holds are loaded; those without a holder are all loaded. If full peers can only exchange experts with each other, one expert is
    loaded on a third peer with free memory until its place is free. There are no moves once ``present`` is ``wanted``.
    """
    held = {peer.peer: set(present.get(peer.peer, ())) for peer in peers}
    goal = {peer.peer: wanted.get(peer.peer, frozenset()) for peer in peers}
    room = {peer.peer: peer.memory_bytes // expert_bytes for peer in peers}
    drops = tuple(_drops(held, goal, room))
    for peer, expert in drops:
        held[peer].remove(expert)
    copies = Counter(expert for experts in held.values() for expert in experts)
    missing = [(peer, expert) for peer in held for expert in sorted(goal[peer] - held[peer])]
    missing.sort(key=lambda load: copies[load[1]] > 0)
    loads: list[tuple[PeerId, Expert]] = []
    moved = 0
    for peer, expert in missing:
        is_gap = not copies[expert]
        if len(held[peer]) < room[peer] and (is_gap or moved < most):
            held[peer].add(expert)
            copies[expert] += 1
            loads.append((peer, expert))
            moved += not is_gap
    if missing and not loads and not drops and most:
        loads += _parked(held, goal, room)
    return Moves(tuple(loads), drops)


def _drops(
    held: dict[PeerId, set[Expert]], goal: dict[PeerId, frozenset[Expert]], room: dict[PeerId, int]
) -> Iterator[tuple[PeerId, Expert]]:
    """The unwanted copies of experts of which another copy stays: a wanted one, or else that on the peer with the most free memory."""
    holders: dict[Expert, list[PeerId]] = {}
    for peer, experts in held.items():
        for expert in experts:
            holders.setdefault(expert, []).append(peer)
    for expert, those in sorted(holders.items()):
        stays = [peer for peer in those if expert in goal[peer]]
        if not stays:
            stays = [max(those, key=lambda peer: (room[peer] - len(held[peer]), peer))]
        yield from ((peer, expert) for peer in those if peer not in stays)


def _parked(
    held: dict[PeerId, set[Expert]], goal: dict[PeerId, frozenset[Expert]], room: dict[PeerId, int]
) -> Iterator[tuple[PeerId, Expert]]:
    """A load, on a peer with free memory, of an expert that a full peer must drop for one that it lacks; none if no memory is free."""
    free = max(held, key=lambda peer: (room[peer] - len(held[peer]), peer))
    if len(held[free]) >= room[free]:
        return
    for peer, experts in held.items():
        leaving = sorted(experts - goal[peer] - held[free])
        if goal[peer] - experts and leaving:
            yield free, leaving[0]
            return
