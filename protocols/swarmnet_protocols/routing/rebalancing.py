"""Moves of hosts between blocks: a pure function of the claims of all hosts, a host's earlier looks, the time, and a random source.

All hosts that see the same claims compute the same state of the swarm (:class:`Outlook`), so no messages beyond the claims are needed:

1. Blocks without a host are filled at once. A plan says which hosts move: first hosts whose blocks all have another host, and if these do not
   suffice, neighbours of the gap shift towards it. Every host computes the same plan and carries out its own part.
2. If there are none, hosts move to raise the throughput. A shortage is a demand above the present throughput, but not above the mean of all
   hosts, that would not be served. A host moves only to blocks where much more of its time is of use at that demand; after it has found so for
   ``CONFIRM_S``; not within ``MOVE_PAUSE_S`` of its last move; and with a probability such that all hosts together move at most as much as is
   missing between two looks, when they see what others have announced. Of many hosts, only those drawn with this probability search for such blocks.
3. A host whose owner allows more blocks grows where one of these moves gains by it: over the blocks beside its own, or on other ones. A host whose owner
   allows fewer blocks than it serves drops some at once: those that other hosts have, and of these the ones that the swarm needs least.
"""

import math
import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.placement import choose_span, draw
from swarmnet_protocols.routing.throughput import Claim, Supply, highest_speed, holders

LOOK_S = 30.0
"""Mean seconds between two looks of a host. Callers add jitter, so that hosts see each other's intents."""
CONFIRM_S = 150.0
"""Seconds for which a host finds the same shortage before it moves: shorter ones are often records that are late."""
MOVE_PAUSE_S = 3600.0
"""Seconds after a move until a host moves again, unless a block has no host."""
GAP_WAIT_S = 60.0
"""Seconds after which hosts outside the plan fill a gap as well: those of the plan may be gone, or may not follow it."""
GAP_PAUSE_S = 60.0
"""Seconds after a move until a host moves to fill a gap."""
DEAD_BAND = 0.05
"""Share by which the throughput may be below the mean of all hosts before hosts move."""
FEW_HOSTS = 100
"""Number of hosts up to which all search for better blocks before it is drawn which of them move: a single search often finds none. In a larger
swarm the draw comes first, because each search takes milliseconds, and a sample of the claims shows shortages by chance."""
STEP = 0.25
"""Share by which the demand that reveals shortages is above the present throughput."""
USEFUL = 0.5
"""Least share of a host's time, or of the shortage, that a move must put to more use. If it does not, ``RAISE`` must hold."""
RAISE = 0.1
"""Least share by which a move must raise the throughput if ``USEFUL`` does not hold. Only moves in small swarms raise it so much."""


@dataclass(frozen=True)
class Looks:
    """The memory of a host between two looks at the swarm. Times are in seconds of the clock that gives ``now``."""

    moved_at: float = -math.inf
    """When it last decided to move."""
    target: tuple[int, int] | None = None
    """The blocks where, by the last look, the host would help."""
    target_since: float = math.inf
    """Time of the first of the consecutive looks with this target."""
    gap_since: float = math.inf
    """Time of the first of the consecutive looks that found blocks without a host."""


@dataclass(frozen=True)
class Move:
    """Blocks [start, end) for a host to serve in place of those that it serves, and the reason in one sentence for its owner.

    ``fills_gap``: the model cannot be served without the move. The host then does not wait for its sessions, and leaves its blocks even if it
    is their last host. Otherwise it loads the new blocks first, and leaves the old ones when ``may_leave`` allows it.
    """

    start: int
    end: int
    reason: str
    fills_gap: bool = False


class Outlook:
    """The state of the swarm computed from the claims of all hosts, which is the same for every host that has the same claims."""

    def __init__(self, claims: Sequence[Claim], *, blocks: int) -> None:
        self.blocks = blocks
        self.claims = claims
        self.most = highest_speed(claim for claim in claims if claim.settled)
        intents = {claim.peer: claim for claim in claims if not claim.settled}
        self.staying = [claim for claim in claims if claim.settled and claim.peer not in intents]
        """Claims of the hosts that neither move nor join."""
        self.placed = [*self.staying, *intents.values()]
        """One claim of each host: the blocks that it will have after all announced moves."""
        self.supply = Supply(blocks, self.placed, self.most)

    def including(self, mine: Claim) -> "Outlook":
        """This outlook if it has the settled claim ``mine``, else one that has it in place of others of its host: claims of a large swarm are a sample."""
        if mine in self._settled:
            return self
        others = [claim for claim in self.claims if claim.peer != mine.peer]
        return Outlook([*others, mine], blocks=self.blocks)

    @cached_property
    def _settled(self) -> frozenset[Claim]:
        return frozenset(claim for claim in self.claims if claim.settled)

    @cached_property
    def gaps(self) -> list[int]:
        """The blocks without a host, present or announced."""
        return [block for block, rate in enumerate(self.supply.rates()) if not rate]

    @cached_property
    def throughput(self) -> float:
        return self.supply.throughput()

    @cached_property
    def mean(self) -> float:
        """The throughput if every host had every block."""
        return self.supply.mean

    @cached_property
    def is_balanced(self) -> bool:
        """Whether no move of any host could raise the throughput clearly."""
        return self.throughput >= (1 - DEAD_BAND) * self.mean

    @cached_property
    def demand(self) -> float:
        """Tokens per second that the swarm should serve next."""
        return min(self.mean, (1 + STEP) * self.throughput)

    @cached_property
    def served(self) -> float:
        """Blocks per second that are served at this demand."""
        return self.supply.served(self.demand)

    @cached_property
    def short(self) -> float:
        """The shortage at this demand, in blocks per second."""
        return self.blocks * self.demand - self.served

    @cached_property
    def holders(self) -> list[int]:
        """The number of staying hosts of each block."""
        return holders(self.staying, self.blocks)

    @cached_property
    def repairs(self) -> dict[PeerId, Claim]:
        """The claims of the hosts that move to fill the gaps; none if no moves leave fewer blocks without a host."""
        return _repairs(self)


def should_move(
    outlook: Outlook, mine: Claim, looks: Looks, *, length: int, now: float, rng: random.Random
) -> tuple[Move | None, Looks]:
    """The move for the host of ``mine``, a settled claim, or None; and the looks to pass at its next look.

    ``length``: blocks that the host can hold, at least 1. ``outlook`` may be of a sample of the claims without that of the host; with fewer than it
    holds now, the sample has all hosts of these. The caller announces the move at once, as a claim that is not settled.
    """
    length = min(length, outlook.blocks)
    if length < mine.end - mine.start:
        return shrink(outlook.including(mine), mine, length), replace(
            looks, target=None, target_since=math.inf
        )
    if outlook.gaps:
        outlook = outlook.including(mine)
    if outlook.gaps:
        looks = replace(looks, target=None, target_since=math.inf, gap_since=min(looks.gap_since, now))
        move = _fill(outlook, mine, looks, length, now, rng) if now >= looks.moved_at + GAP_PAUSE_S else None
        return move, replace(looks, moved_at=now) if move else looks
    looks = replace(looks, gap_since=math.inf)
    if outlook.is_balanced or now < looks.moved_at + MOVE_PAUSE_S:
        return None, replace(looks, target=None, target_since=math.inf)
    # With this probability, all hosts together move at most as much as is missing, or one host, between two looks.
    chance = max(outlook.short, mine.blocks_per_s) / (outlook.blocks * outlook.mean)
    is_large = len(outlook.placed) > FEW_HOSTS
    if is_large and looks.target is None and rng.random() > chance:
        return None, looks
    target, gain = _target(outlook.including(mine), mine, looks.target, length, rng)
    if target is None or target != looks.target:
        return None, replace(looks, target=target, target_since=now if target else math.inf)
    if now < looks.target_since + CONFIRM_S or (not is_large and rng.random() > chance):
        return None, looks
    reason = f"the swarm lacks hosts of these blocks: {gain:.0%} more of this machine's time is of use there"
    return Move(*target, reason), replace(looks, moved_at=now, target=None, target_since=math.inf)


def staying(claims: Sequence[Claim], mine: Claim) -> list[Claim]:
    """The settled claims of other hosts that do not move. Of two hosts that would leave the same block at once, the one with the lower peer id leaves."""
    moving = {claim.peer for claim in claims if not claim.settled and claim.peer < mine.peer}
    return [
        claim for claim in claims if claim.settled and claim.peer != mine.peer and claim.peer not in moving
    ]


def may_leave(claims: Sequence[Claim], mine: Claim, *, blocks: int, kept: tuple[int, int] = (0, 0)) -> bool:
    """Whether every block of ``mine`` outside of ``kept`` [start, end) has another host that serves it and does not move."""
    counts = holders(staying(claims, mine), blocks)
    return all(
        kept[0] <= block < kept[1] or counts[block]
        for block in range(max(mine.start, 0), min(mine.end, blocks))
    )


def _target(
    outlook: Outlook, mine: Claim, last: tuple[int, int] | None, length: int, rng: random.Random
) -> tuple[tuple[int, int] | None, float]:
    """The span of the last look, if the host of ``mine`` would still help there, or the best of a few drawn at random; None if none helps.

    The second value is the share of the host's time that is of more use there.
    """
    speed = min(mine.blocks_per_s, outlook.most)
    without = outlook.supply.copy()
    without.add(mine.start, mine.end, -speed)

    def gain(span: tuple[int, int]) -> tuple[float, float]:
        """The throughput with the host on ``span``, and the additional blocks per second that are served; zeros for too little gain or an unsafe move."""
        if not _is_safe(outlook, mine, *span):
            return 0.0, 0.0
        after = without.copy()
        after.add(*span, speed)
        more = after.served(outlook.demand) - outlook.served
        if more <= 0:
            return 0.0, 0.0
        is_useful = more >= USEFUL * min(speed, outlook.short)
        least = outlook.throughput * (1.0 if is_useful else 1 + RAISE)
        return (after.throughput(), more) if after.can_give(least) else (0.0, 0.0)

    if last is not None and last[1] - last[0] <= length and (known := gain(last)[1]):
        return last, known / speed
    # Where it grows, it leaves no block.
    grown = _spans_around(mine, length, outlook.blocks) if length > mine.end - mine.start else ()
    drawn = dict.fromkeys([*grown, *draw(outlook.blocks, length, rng)])
    gains = {(start, start + length): gain((start, start + length)) for start in drawn}
    best = max(gains, key=gains.__getitem__)
    more = gains[best][1]
    return (best if more else None), more / speed


def _spans_around(mine: Claim, length: int, blocks: int) -> range:
    """The starts of the spans of ``length`` blocks that contain those of ``mine``."""
    return range(max(mine.end - length, 0), min(mine.start, blocks - length) + 1)


def shrink(outlook: Outlook, mine: Claim, length: int) -> Move:
    """The move of the host of ``mine`` to ``length`` of its own blocks, which are fewer than it has.

    It drops those without which the fewest blocks have no host, and among these choices the swarm has the highest throughput. ``outlook`` includes ``mine``.
    """
    speed = min(mine.blocks_per_s, outlook.most)
    without = outlook.supply.copy()
    without.add(mine.start, mine.end, -speed)

    def loss(start: int) -> tuple[int, float, float]:
        """If the host keeps ``length`` blocks from ``start`` on: the blocks without a host, and, negative, the throughput and the slowest block."""
        after = without.copy()
        after.add(start, start + length, speed)
        rates = after.rates()
        return sum(not rate for rate in rates), -after.throughput(), -min(rates)

    start = min(range(mine.start, mine.end - length + 1), key=loss)
    return Move(start, start + length, "this machine's memory limit holds no more blocks")


def _is_safe(outlook: Outlook, mine: Claim, start: int, end: int) -> bool:
    """Whether all blocks of ``mine`` outside of [start, end) have another staying host."""
    return all(
        start <= block < end or outlook.holders[block] > 1
        for block in range(max(mine.start, 0), min(mine.end, outlook.blocks))
    )


def _fill(
    outlook: Outlook, mine: Claim, looks: Looks, length: int, now: float, rng: random.Random
) -> Move | None:
    """The move of the host of ``mine`` to fill a gap: by growing, by the plan, or, if the hosts of the plan do not move, at random."""
    gaps = set(outlook.gaps)
    if length > mine.end - mine.start:
        starts = _spans_around(mine, length, outlook.blocks)
        start = max(starts, key=lambda start: len(gaps.intersection(range(start, start + length))))
        if filled := len(gaps.intersection(range(start, start + length))):
            return Move(
                start,
                start + length,
                f"no host has {filled} of these blocks, next to those of this machine",
                fills_gap=True,
            )
    if (repair := outlook.repairs.get(mine.peer)) is not None:
        filled = len(gaps.intersection(range(repair.start, repair.end)))
        reason = (
            f"no host has {filled} of these blocks"
            if filled
            else "hosts shift towards blocks that no host has"
        )
        return Move(repair.start, repair.end, reason, fills_gap=True)
    if now < looks.gap_since + GAP_WAIT_S or not _is_safe(outlook, mine, 0, 0) or rng.random() > 0.5:
        return None
    others = [claim for claim in outlook.placed if claim.peer != mine.peer]
    choice = choose_span(others, blocks=outlook.blocks, length=length, rng=rng)
    return Move(choice.start, choice.end, choice.reason, fills_gap=True)


def _repairs(outlook: Outlook) -> dict[PeerId, Claim]:
    """A plan that fills gaps with few moves: first hosts that leave no gap, then neighbours of a gap, each shifting towards it."""
    blocks = outlook.blocks
    placed = {
        claim.peer: replace(claim, start=max(claim.start, 0), end=min(claim.end, blocks))
        for claim in outlook.placed
        if claim.start < blocks and claim.end > 0
    }
    movable = {claim.peer for claim in outlook.staying if claim.may_move and claim.seen}
    before = dict(placed)
    while not all(counts := holders(placed.values(), blocks)):
        rates = Supply(blocks, placed.values(), outlook.most).rates()
        spare = [
            claim
            for peer, claim in placed.items()
            if peer in movable
            and claim == before[peer]
            and all(count > 1 for count in counts[claim.start : claim.end])
        ]
        if not spare:
            break
        claim = max(spare, key=lambda claim: (_rate_without(claim, rates, outlook.most), claim.peer))
        del placed[claim.peer]
        choice = choose_span(
            [*placed.values()], blocks=blocks, length=claim.end - claim.start, rng=random.Random(claim.peer)
        )
        placed[claim.peer] = replace(claim, start=choice.start, end=choice.end)
    if not all(counts):
        left_first = _shifted(_shifted(placed, movable, blocks, 1), movable, blocks, -1)
        right_first = _shifted(_shifted(placed, movable, blocks, -1), movable, blocks, 1)
        complete = [plan for plan in (left_first, right_first) if all(holders(plan.values(), blocks))]
        placed = min(complete, key=lambda plan: len(_changed(before, plan)), default=placed)
    return _changed(before, placed)


def _rate_without(claim: Claim, rates: Sequence[float], most: float) -> float:
    """Tokens per second of the slowest block of ``claim`` without its host."""
    own = min(claim.blocks_per_s, most) / (claim.end - claim.start)
    return min(rates[claim.start : claim.end]) - own


def _shifted(
    placed: Mapping[PeerId, Claim], movable: Set[PeerId], blocks: int, direction: int
) -> dict[PeerId, Claim]:
    """The claims after each host behind a gap has moved to the beginning of the gap, from block 0 (``direction`` 1) or from the last block (-1)."""

    def mirrored(claim: Claim) -> Claim:
        return claim if direction > 0 else replace(claim, start=blocks - claim.end, end=blocks - claim.start)

    shifted = dict(placed)
    reached = 0
    for claim in sorted(map(mirrored, placed.values()), key=lambda claim: (claim.start, claim.peer)):
        end = claim.end
        if claim.start > reached and claim.peer in movable:
            end = reached + claim.end - claim.start
            shifted[claim.peer] = mirrored(replace(claim, start=reached, end=end))
        reached = max(reached, end)
    return shifted


def _changed(before: Mapping[PeerId, Claim], after: Mapping[PeerId, Claim]) -> dict[PeerId, Claim]:
    return {peer: claim for peer, claim in after.items() if claim != before[peer]}
