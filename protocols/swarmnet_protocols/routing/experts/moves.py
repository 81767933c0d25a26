"""Move experts between peers towards a wanted placement, a few loads per minute.

A peer loads an expert while another peer still holds it (make before break), so each expert always
has a holder. The load goes into free memory, or into the memory of an expert that the peer drops.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.experts.dispatch import Expert, ExpertPeer, ExpertPlacement

MOVES_A_MINUTE = 0.05
"""Largest share of a model's experts that peers load in a minute. With more, loads would slow down
requests, which use the same links."""


@dataclass(frozen=True)
class Moves:
    """The next moves. Peers drop first, then load. No peer drops and loads the same expert."""

    loads: tuple[tuple[PeerId, Expert], ...] = ()
    drops: tuple[tuple[PeerId, Expert], ...] = ()


def most_moves(experts: int, minutes: float = 1.0) -> int:
    """Return how many experts peers may load in ``minutes``, at least one.

    ``experts`` is the number of experts in all blocks of the model.
    """
    return max(1, math.floor(MOVES_A_MINUTE * experts * minutes))


def next_moves(
    present: ExpertPlacement,
    wanted: ExpertPlacement,
    peers: Sequence[ExpertPeer],
    *,
    most: int,
) -> Moves:
    """Return the next moves from ``present`` towards ``wanted``, a placement of ``place_experts``.

    ``present`` is what live peers have loaded. There are no moves once ``present`` equals
    ``wanted``.

    1. A peer drops an expert that it should not have, if another peer holds and keeps it.
    2. A peer with free memory loads an expert that it should have. This goes first to experts
       without a holder, then to at most ``most`` others.
    3. Full peers may have only exchanges with each other left. Then a third peer with free memory
       takes one of these experts for a while, so that its holder can drop it.
    """
    held = {peer.peer: set(present.get(peer.peer, ())) for peer in peers}
    goal = {peer.peer: wanted.get(peer.peer, frozenset()) for peer in peers}
    room = {peer.peer: peer.capacity for peer in peers}
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
    """Yield the copies to drop: unwanted ones, while another copy of the expert stays.

    A wanted copy stays. Without one, the copy on the peer with the most free memory stays.
    """
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
    """Yield one load that breaks a deadlock of full peers; nothing if no memory is free.

    A peer with free memory loads an expert that a full peer must drop before it can load a missing
    one.
    """
    free = max(held, key=lambda peer: (room[peer] - len(held[peer]), peer))
    if len(held[free]) >= room[free]:
        return
    for peer, experts in held.items():
        leaving = sorted(experts - goal[peer] - held[free])
        if goal[peer] - experts and leaving:
            yield free, leaving[0]
            return
