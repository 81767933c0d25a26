"""Choose the experts of each peer, as a pure function of expert use and peers.

``dispatch.py`` defines two costs: messages, and the time that the trunk waits for the busiest peer
of a block. :func:`place_experts` places each block separately, because rows begin and end at the
trunk of the block. The trunk's own experts take no part. Let

- w_i be the share of rows that chose expert i,
- T_ij the share of rows that chose both i and j,
- x_ip the share of the rows of i that peer p computes: the holders of i have equal shares.

The estimated cost of a block is the sum of

- messages: sum_i w_i x_ip - PAIR * sum_{i<j} T_ij x_ip x_jp, over all peers p,
- PENALTY * max(0, time of p / (TARGET * mean time) - 1), over all peers p,
- ALONE * the share of experts that only one peer holds.

Counts of pairs do not tell exactly how many messages a row needs. If n of its experts are on one
peer, it needs one message. The estimate n - PAIR * n (n - 1) / 2 is near 1 up to n = 4.

Placement has two phases. First, experts get copies as in DeepSeek's EPLB: the expert with the most
rows per copy gets one more, and the heaviest experts are placed first. Then copies change places
while that lowers the cost (Kernighan and Lin 1970, for graphs). MoETuner solves the same problem by
an integer program.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmnet_protocols.routing.experts.dispatch import ExpertPeer, ExpertPlacement
from swarmnet_protocols.routing.experts.use import ExpertUse

SPARE = 0.05
"""Share of its memory that a peer keeps free, to load an expert before it drops another."""
TARGET = 1.08
"""Time of a peer in a block, relative to the mean, up to which there is no penalty. Later rows
differ from the counted ones, so a closer balance gains nothing."""
PAIR = 0.7
PENALTY = 4.0
"""Cost of a peer that takes twice ``TARGET`` times the mean, in messages per row of a block."""
ALONE = 0.05
"""Cost if no expert has a second holder, in messages per row of a block."""
RIVALS = 3
"""Number of experts that are considered for a further copy in one step. Also the number of experts
that a full peer considers to drop for it."""
TRIED = 8
"""Number of changes of each kind that are evaluated exactly in each step. They are chosen by their
estimated gain."""
MOST_COPIES = 256
"""Most copies of a block whose exchanges are compared. The copies with the largest possible gain
are chosen. Time and memory grow with the square of this number. Without the bound, 64 peers that
claim all of 128 experts took 45 s and 3.2 GB."""
_LEAST = 1e-4
"""Least gain of a change that is made, in messages per row of a block."""

Floats = NDArray[np.float64]
Holds = NDArray[np.bool_]
Copies = tuple[tuple[int, int], ...]
"""Pairs (expert, peer) of one block, both by number."""


def place_experts(
    use: ExpertUse,
    peers: Sequence[ExpertPeer],
    present: ExpertPlacement,
    *,
    most_loads: int,
) -> ExpertPlacement:
    """Return the experts that each peer should hold. At least one peer holds each expert.

    Placement uses ``1 - SPARE`` of the memory where that is enough. The result is ``present`` with
    few changes:

    1. Experts that no peer holds are given to peers.
    2. Peers that hold too many drop experts or hand them to others.
    3. At most ``most_loads`` further experts are loaded, those with the largest gain first.

    Peers with fixed experts keep their experts of ``present``. Raises ``ValueError`` if all peers
    together lack memory for every expert.
    """
    peers = sorted(peers, key=lambda peer: peer.peer)
    rooms = _rooms(use, peers)
    quotas = _quotas(rooms, use.blocks, use.experts)
    holds = np.zeros((use.blocks, use.experts, len(peers)), bool)
    for number, peer in enumerate(peers):
        if held := present.get(peer.peer):
            of_block, expert = np.array(list(held)).T
            holds[of_block, expert, number] = True
    blocks = [_Block(use, block, peers, quotas[block], holds[block]) for block in range(use.blocks)]
    for each in blocks:
        each.complete()
    _improve(blocks, most_loads)
    return {
        peer.peer: frozenset(
            (block, int(expert))
            for block, each in enumerate(blocks)
            for expert in np.flatnonzero(each.hold[:, number])
        )
        for number, peer in enumerate(peers)
    }


def _rooms(use: ExpertUse, peers: Sequence[ExpertPeer]) -> list[int]:
    every = use.blocks * use.experts
    most = [min(peer.capacity, every) for peer in peers]
    if sum(most) < every:
        raise ValueError(f"the peers have memory for {sum(most)} of {every} experts")
    spared = [room - math.ceil(SPARE * room) for room in most]
    return spared if sum(spared) >= every else most


def _quotas(rooms: Sequence[int], blocks: int, experts: int) -> NDArray[np.int64]:
    """Return how many experts of each block each peer may hold, ``[blocks, peers]``.

    The numbers are as equal over the blocks as possible.
    """
    quotas = np.array([[min(room // blocks, experts) for room in rooms]] * blocks)
    for number, room in enumerate(rooms):
        for _ in range(room - int(quotas[:, number].sum())):
            block = min(
                (block for block in range(blocks) if quotas[block, number] < experts),
                key=lambda block: (quotas[block].sum(), quotas[block, number]),
            )
            quotas[block, number] += 1
    return quotas


@dataclass(frozen=True)
class _Change:
    """Copies that peers drop and load. ``gain`` is how much they lower the cost of a block."""

    gain: float
    drops: Copies
    loads: Copies


def _improve(blocks: Sequence["_Block"], left: int) -> None:
    """Make changes in the order of gain per load, until none gains or ``left`` loads are used
    up."""
    found = {number: block.best_change() for number, block in enumerate(blocks)}
    while left > 0:
        possible = {
            number: change
            for number, change in found.items()
            if change is not None and len(change.loads) <= left
        }
        if not possible:
            return
        best = max(possible, key=lambda number: possible[number].gain / max(1, len(possible[number].loads)))
        blocks[best].apply(possible[best])
        left -= len(possible[best].loads)
        found[best] = blocks[best].best_change()


class _Block:
    """One block with E experts and P peers. ``hold`` ``[E, P]`` tells which peers hold which
    experts.
    """

    def __init__(
        self,
        use: ExpertUse,
        block: int,
        peers: Sequence[ExpertPeer],
        quotas: NDArray[np.int64],
        hold: Holds,
    ) -> None:
        """``quotas`` ``[P]``: how many experts of the block each peer may hold."""
        self.hold = hold
        self._fixed = np.array([peer.is_fixed for peer in peers])
        rows = use.rows[block].astype(np.float64)
        total = float(rows.sum()) or 1.0
        self._rows = rows / total
        self._together = use.together[block].astype(np.float64) / total
        self._quotas = np.where(self._fixed, hold.sum(0), quotas)
        speeds = np.array([peer.rows_per_s for peer in peers])
        self._most = TARGET * speeds / speeds.sum()
        """The share of all rows that each peer may compute without penalty: it takes ``TARGET``
        times the mean time for them."""

    # ---- the cost -------------------------------------------------------------------------------

    def _met(self, meet: Holds) -> float:
        """Return the sum of ``together`` over all pairs of experts that some peer holds
        together."""
        return float((self._together * meet).sum()) / 2

    def _cost(self, hold: Holds, met: float) -> float:
        sent = float(self._rows[hold.any(1)].sum()) - PAIR * met
        alone = float((hold.sum(1) == 1).mean())
        return sent + float(self._excess(self._rows @ _shares(hold)).sum()) + ALONE * alone

    def _excess(self, loads: Floats, peers: NDArray[np.int64] | slice = slice(None)) -> Floats:
        """Return the penalty of each peer for its share of the rows above ``TARGET``, ``[..., P]``.

        ``peers``: the numbers of the peers that the loads belong to.
        """
        excess: Floats = PENALTY * np.maximum(loads / self._most[peers] - 1.0, 0.0)
        return excess

    # ---- changes --------------------------------------------------------------------------------

    def apply(self, change: _Change) -> None:
        for expert, peer in change.drops:
            self.hold[expert, peer] = False
        for expert, peer in change.loads:
            self.hold[expert, peer] = True

    def best_change(self) -> _Change | None:
        """Return the change that lowers the cost most or fills free memory; None if there is
        none."""
        found = [change for change in (self._copy(), self._exchange()) if change is not None]
        return max(found, key=lambda change: change.gain / len(change.loads), default=None)

    def complete(self) -> None:
        """Drop copies above the quotas, and give each expert without a holder to a peer with
        room."""
        for peer in np.flatnonzero(self.hold.sum(0) > self._quotas):
            while self.hold[:, peer].sum() > self._quotas[peer]:
                copies = self.hold.sum(1)
                held = np.flatnonzero(self.hold[:, peer])
                self.hold[min(held, key=lambda expert: (copies[expert] < 2, self._rows[expert])), peer] = (
                    False
                )
        missing = np.flatnonzero(~self.hold.any(1))
        for expert in missing[np.argsort(-self._rows[missing], kind="stable")]:
            if not (free := np.flatnonzero(self.hold.sum(0) < self._quotas)).size:
                free = np.array([self._drop_spare()])
            loads = self._rows @ _shares(self.hold)
            times = (loads + self._rows[expert]) / self._most
            self.hold[expert, min(free, key=lambda peer: times[peer])] = True

    def _drop_spare(self) -> int:
        """Drop the copy whose loss costs least, and return the peer that held it."""
        copies = self.hold.sum(1)
        movable = self.hold & ~self._fixed
        spare = np.flatnonzero((copies > 1) & movable.any(1))
        expert = min(spare, key=lambda expert: self._rows[expert] / (copies[expert] - 1))
        times = self._rows @ _shares(self.hold) / self._most
        peer = max(np.flatnonzero(movable[expert]), key=lambda peer: times[peer])
        self.hold[expert, peer] = False
        return int(peer)

    def _copy(self) -> _Change | None:
        """Return the best change that gives an expert with many rows per copy one copy more.

        It goes into free memory, or replaces a copy of an expert with few rows.
        """
        copies = self.hold.sum(1)
        peers = np.flatnonzero(~self._fixed)
        wanted = np.flatnonzero(~self.hold[:, peers].all(1))
        wanted = wanted[np.argsort(-(self._rows / copies)[wanted], kind="stable")]
        alone = wanted[RIVALS:][copies[wanted[RIVALS:]] == 1]
        wanted = np.concatenate([wanted[:RIVALS], alone[:RIVALS]])
        without = self._rows / np.maximum(copies - 1, 1)
        spare = np.flatnonzero(copies > 1)
        spare = spare[np.argsort(without[spare], kind="stable")]
        is_free = self.hold.sum(0) < self._quotas
        apart = self._together[wanted] * ~_meet(self.hold)[wanted]
        saved = np.where(self.hold[wanted][:, peers], -math.inf, apart @ self.hold[:, peers])
        changes: list[tuple[Copies, Copies]] = []
        for number in _largest(saved):
            place, home = np.unravel_index(number, saved.shape)
            load = ((int(wanted[place]), int(peers[home])),)
            if is_free[peers[home]]:
                changes.append(((), load))
            else:
                here = spare[self.hold[spare, peers[home]]]
                changes += [(((int(each), int(peers[home])),), load) for each in here[:RIVALS]]
        return self._best(changes)

    def _exchange(self) -> _Change | None:
        """Return the best exchange of two copies between peers.

        A move of one copy into free memory counts as an exchange, too.
        """
        shares = _shares(self.hold)
        places = self.hold & ~self._fixed
        free = np.flatnonzero(self.hold.sum(0) < self._quotas)
        experts, homes = np.concatenate([np.argwhere(places), np.stack([-np.ones_like(free), free], 1)]).T
        if not len(experts):
            return None
        loads = self._rows @ shares
        saved = PAIR * self._together @ places  # [E, P]: what a copy saves at a peer
        if len(experts) > MOST_COPIES:
            most = np.argsort(-self._hopes(experts, homes, saved, shares, loads), kind="stable")[:MOST_COPIES]
            experts, homes = experts[most], homes[most]
        is_real = experts >= 0  # -1 stands for free memory, and counts as an expert without rows
        rows = np.where(is_real, self._rows[experts] * shares[experts, homes], 0.0)
        pairs = PAIR * self._together[np.ix_(experts, experts)] * (is_real[:, None] & is_real[None, :])
        near = np.where(is_real[:, None], saved[experts], 0.0)
        stays = near[np.arange(len(homes)), homes]
        gains = near[:, homes] + near[:, homes].T - 2 * pairs - stays[:, None] - stays[None, :]
        moved = rows[None, :] - rows[:, None]  # rows that the home of the first copy gains
        excess = self._excess(loads)[homes]
        gains += excess[:, None] - self._excess(loads[homes][:, None] + moved, homes[:, None])
        gains += excess[None, :] - self._excess(loads[homes][None, :] - moved, homes[None, :])
        held = self.hold[experts][:, homes] & is_real[:, None]  # a peer holds an expert once
        gains[held | held.T | (homes[:, None] == homes[None, :])] = -math.inf
        gains[np.tril_indices(len(homes))] = -math.inf
        changes = []
        for number in _largest(gains):
            one, other = np.unravel_index(number, gains.shape)
            ends = ((experts[one], homes[one], homes[other]), (experts[other], homes[other], homes[one]))
            real = [(int(expert), int(home), int(to)) for expert, home, to in ends if expert >= 0]
            changes.append(
                (
                    tuple((expert, home) for expert, home, _ in real),
                    tuple((expert, to) for expert, _, to in real),
                )
            )
        return self._best(changes)

    def _hopes(
        self,
        experts: NDArray[np.int64],
        homes: NDArray[np.int64],
        saved: Floats,
        shares: Floats,
        loads: Floats,
    ) -> Floats:
        """Return what each copy could gain at the best other home; infinite for free memory.

        Copy i is ``experts[i]`` at ``homes[i]``. Free memory is never left out, because any copy
        may move there.
        """
        rows = self._rows[experts] * shares[experts, homes]
        relief = self._excess(loads[homes], homes) - self._excess(loads[homes] - rows, homes)
        elsewhere = np.where(self.hold, -math.inf, saved).max(1)
        hopes: Floats = elsewhere[experts] - saved[experts, homes] + relief
        return np.where(experts >= 0, hopes, math.inf)

    def _best(self, changes: Sequence[tuple[Copies, Copies]]) -> _Change | None:
        """Return the change with the largest gain per load; None if none lowers the cost.

        ``changes`` are pairs of drops and loads.
        """
        meet = _meet(self.hold)
        met = self._met(meet)
        before = self._cost(self.hold, met)
        found = [
            _Change(before - self._cost_after(drops, loads, meet, met), drops, loads)
            for drops, loads in changes
        ]
        found = [change for change in found if change.gain > _LEAST]
        return max(found, key=lambda change: change.gain / len(change.loads), default=None)

    def _cost_after(self, drops: Copies, loads: Copies, meet: Holds, met: float) -> float:
        """Return the cost after a change.

        ``meet`` and ``met`` are the values before the change. They are updated for the changed
        experts only, which is faster.
        """
        hold = self.hold.copy()
        for expert, peer in drops:
            hold[expert, peer] = False
        for expert, peer in loads:
            hold[expert, peer] = True
        changed = sorted({expert for expert, _ in (*drops, *loads)})
        numbers = hold.astype(np.float32)
        gained = (numbers[changed] @ numbers.T > 0.0).astype(np.float64) - meet[changed]
        gained *= self._together[changed]
        return self._cost(hold, met + float(gained.sum()) - float(gained[:, changed].sum()) / 2)


def _shares(hold: Holds) -> Floats:
    """Return each holder's share of the rows of an expert, ``[E, P]``."""
    shares: Floats = hold / np.maximum(hold.sum(1, keepdims=True), 1)
    return shares


def _meet(hold: Holds) -> Holds:
    """Return which pairs of experts some peer holds together, ``[E, E]``."""
    numbers = hold.astype(np.float32)
    meet: Holds = numbers @ numbers.T > 0.0
    return meet


def _largest(gains: Floats) -> list[int]:
    """Return the indices of the ``TRIED`` largest gains in the flattened array, without those of
    -inf, which stand for impossible changes."""
    flat = gains.ravel()
    count = min(TRIED, len(flat))
    if not count:
        return []
    return [int(place) for place in np.argpartition(-flat, count - 1)[:count] if flat[place] > -math.inf]
