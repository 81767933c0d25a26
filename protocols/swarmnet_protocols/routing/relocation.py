"""Decide where a host should be: at other blocks, or at another model.

:func:`should_relocate` is a pure function of one look at the swarm, the host's memory, the time and
a random source. A host stays, shrinks, grows, moves to other blocks, or switches to another model:

1. **Shrink.** If the owner allows fewer blocks than the host serves, the host drops some at once.
   It drops blocks that other hosts have. The blocks that the swarm needs least go first.
2. **Gaps.** Hosts fill blocks without a host at once. All hosts compute the same plan
   (``Outlook.repairs``), and each carries out its own part.
3. **Shortage.** Without gaps, hosts move to raise the throughput. A shortage is the demand that is
   above the present throughput. It counts only up to the throughput that an even spread of all
   hosts would give. A host moves only
   to blocks where the swarm can use much more of its time at that demand. It grows if its owner
   allows more blocks and the swarm gains.
4. **Other models.** A host that its model can spare switches to a model that needs hosts
   (``model_needs.py``).

A host acts on a shortage or a need only after it has seen it for a while. It relocates once per
``PAUSE_S``, except to fill a gap. Hosts draw lots, so that between two looks no more hosts relocate
than are missing. At the next look they see what others have announced.

Before a host leaves its blocks it looks again (:func:`is_confirmed`), since other hosts may have
left meanwhile.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Generic, TypeVar

from swarmnet_protocols.routing.model_needs import (
    OTHER_HOSTS,
    ServedModel,
    may_leave_model,
    need_for,
    without_yielding,
)
from swarmnet_protocols.routing.outlook import Outlook
from swarmnet_protocols.routing.placement import choose_span, draw
from swarmnet_protocols.routing.spans import Span, clipped
from swarmnet_protocols.routing.throughput import Claim, holders

T = TypeVar("T")

LOOK_S = 30.0
"""Mean seconds between two looks of a host. Callers add jitter, so that hosts see each other's
intents."""
CONFIRM_S = 150.0
"""Seconds that a host must see the same shortage before it moves. A shorter one often only shows
that some records are late."""
SWITCH_CONFIRM_S = 300.0
"""Seconds that a host must see the same need of another model before it switches. A host that is
restarted is back by then."""
PAUSE_S = 3600.0
"""Seconds after a move or switch until a host relocates again, unless a block has no host."""
RETRY_S = 6 * 3600.0
"""Seconds after a failed switch until a host tries the same model again."""
GAP_WAIT_S = 60.0
"""Seconds after which hosts outside the plan fill a gap, too. Hosts of the plan may be gone, or may
not follow it."""
GAP_PAUSE_S = 60.0
"""Seconds after a move until a host may move to fill a gap."""
FEW_HOSTS = 100
"""Largest swarm where all hosts search for better blocks before they draw who moves. In such a
swarm, a single search often finds none. In a larger swarm hosts draw first: each search takes
milliseconds, and a sample of the claims shows shortages by chance."""
USEFUL = 0.5
"""A move is worth making if it puts this share of the host's time, or of the shortage, to better
use."""
RAISE = 0.1
"""A move is also worth making if it raises the throughput by this share. Only in small swarms can
one move do that."""


class Kind(Enum):
    """A way to relocate. A host announces the relocation before it acts."""

    SHRINK = auto()
    """Serve some of the present blocks."""
    GROW = auto()
    """Serve the present blocks and others next to them."""
    MOVE = auto()
    """Serve other blocks of the same model."""
    SWITCH = auto()
    """Serve blocks of another model."""


@dataclass(frozen=True)
class Relocation:
    """The blocks [start, end) that a host serves next. ``reason`` is one sentence for its owner."""

    kind: Kind
    start: int
    end: int
    reason: str
    fills_gap: bool = False
    """True if the model cannot be served without this move. The host then waits neither for its
    sessions nor for another host of its blocks."""
    manifest: bytes = b""
    """Manifest of the model that the host switches to. The host chooses its blocks again when it
    has left."""
    model: str = ""
    """The name of that model."""

    @property
    def span(self) -> Span:
        return self.start, self.end

    @property
    def is_switch(self) -> bool:
        return self.kind is Kind.SWITCH

    @property
    def others_needed(self) -> int:
        """Other hosts that each block must have before this host leaves it."""
        return OTHER_HOSTS if self.is_switch else 1


@dataclass(frozen=True)
class Lasting(Generic[T]):
    """A finding that every look since ``since`` has confirmed."""

    what: T
    since: float


@dataclass(frozen=True)
class Remembered:
    """The memory of a host between two looks. Times are in seconds of the clock that gives
    ``now``."""

    relocated_at: float = -math.inf
    """Time when the host last decided to move or left a model."""
    gap_since: float = math.inf
    """Time of the first of the consecutive looks that found blocks without a host."""
    shortage: Lasting[Span] | None = None
    """Blocks where the host would help."""
    need: Lasting[bytes] | None = None
    """The model that needs hosts."""
    failed_at: Mapping[bytes, float] = field(default_factory=dict)
    """Manifest of a model → time when a switch to it last failed."""

    def may_try(self, manifest: bytes, now: float) -> bool:
        return now >= self.failed_at.get(manifest, -math.inf) + RETRY_S

    def after_switch(self, now: float) -> "Remembered":
        return Remembered(relocated_at=now, failed_at=self.failed_at)

    def after_failure(self, manifest: bytes, now: float) -> "Remembered":
        return replace(self, failed_at={**self.failed_at, manifest: now}, need=None)


@dataclass(frozen=True)
class Look:
    """The swarm, as a host sees it at one time."""

    own: ServedModel
    """The host's model. Its claims may be a sample without this host. When the host must shrink,
    they include every host of its blocks."""
    mine: Claim
    """The host's settled claim."""
    length: int
    """Blocks that the host can hold now, at least 1."""
    others: Sequence[ServedModel] = ()
    """Other models that the swarm file lists. Empty unless :func:`may_switch` holds."""

    @property
    def held(self) -> int:
        return self.mine.end - self.mine.start

    def of(self, claims: Sequence[Claim]) -> "Look":
        """Return this look, in which only ``claims`` are the other hosts of the own model."""
        return replace(self, own=replace(self.own, claims=[self.mine, *claims]))


def may_switch(look: Look, memory: Remembered, *, now: float) -> bool:
    """Check whether the host could switch at all. Only then does the caller read the other
    models."""
    return (
        look.mine.may_switch and now >= memory.relocated_at + PAUSE_S and may_leave_model(look.own, look.mine)
    )


def should_relocate(
    look: Look, memory: Remembered, *, now: float, rng: random.Random
) -> tuple[Relocation | None, Remembered]:
    """Return what the host of ``look`` does (None: stay), and its memory for the next look.

    The caller announces the result at once, as a claim that is not settled. It asks
    :func:`is_confirmed` before the host leaves blocks.
    """
    relocation = None
    if look.mine.may_move:
        relocation, memory = _among_blocks(look, memory, now, rng)
    if relocation is None and look.mine.may_switch:
        relocation, memory = _among_models(look, memory, now, rng)
    return relocation, memory


# ---- before a host leaves its blocks -----------------------------------------------------------


def staying(look: Look, relocation: Relocation) -> list[Claim]:
    """Return the settled claims of other hosts of the own model that will stay.

    Of two hosts that would leave the same blocks at once, the one with the lower peer id leaves. A
    host that switches does not count on hosts that move.
    """
    mine, own = look.mine, look.own
    if relocation.is_switch:
        gone = {claim.peer for model in without_yielding(own, mine, look.others) for claim in model.claims}
        return [claim for claim in own.outlook.staying if claim.peer not in gone | {mine.peer}]
    moving = {claim.peer for claim in own.claims if not claim.settled and claim.peer < mine.peer}
    return [
        claim
        for claim in own.claims
        if claim.settled and claim.peer != mine.peer and claim.peer not in moving
    ]


def blocks_to_leave(look: Look, relocation: Relocation, *, kept: Span = (0, 0)) -> list[int]:
    """Return the blocks of this host, except ``kept`` [start, end), that other hosts must have.

    A move that fills a gap needs no host for blocks that no other host claims. The plan shifts
    other hosts there.
    """
    mine, blocks = look.mine, look.own.blocks
    left = [block for block in range(*clipped(mine, blocks)) if not kept[0] <= block < kept[1]]
    if not relocation.fills_gap:
        return left
    claimed = holders(staying(look, relocation), blocks)
    return [block for block in left if claimed[block]]


def is_confirmed(look: Look, relocation: Relocation, left: Collection[int]) -> bool:
    """Check whether the host may still leave the blocks ``left``, now that others had time to read
    its intent.

    Hosts of its model with higher peer ids that also announced to leave are expected to stay.
    """
    if relocation.is_switch:
        before = without_yielding(look.own, look.mine, look.others)
        candidates = [model for model in before if model.manifest == relocation.manifest]
        return need_for(look.own, look.mine, candidates, before) is not None
    counts = holders(staying(look, relocation), look.own.blocks)
    return all(counts[block] for block in left)


# ---- another model -----------------------------------------------------------------------------


def _among_models(
    look: Look, memory: Remembered, now: float, rng: random.Random
) -> tuple[Relocation | None, Remembered]:
    need = need_for(look.own, look.mine, look.others, look.others)
    if need is None or now < memory.relocated_at + PAUSE_S:
        return None, replace(memory, need=None)
    model, last = need.model, memory.need
    if last is None or model.manifest != last.what:
        return None, replace(memory, need=Lasting(model.manifest, now))
    if now < last.since + SWITCH_CONFIRM_S or rng.random() > need.chance:
        return None, memory
    choice = choose_span(model.claims, blocks=model.blocks, length=model.length, rng=rng)
    switch = Relocation(
        Kind.SWITCH, choice.start, choice.end, need.reason, manifest=model.manifest, model=model.name
    )
    return switch, replace(memory, need=None)


# ---- other blocks ------------------------------------------------------------------------------


def _among_blocks(
    look: Look, memory: Remembered, now: float, rng: random.Random
) -> tuple[Relocation | None, Remembered]:
    outlook, mine = look.own.outlook, look.mine
    length = min(look.length, outlook.blocks)
    if length < look.held:
        return shrink(outlook.including(mine), mine, length), replace(memory, shortage=None)
    if outlook.gaps:
        outlook = outlook.including(mine)
    if outlook.gaps:
        memory = replace(memory, shortage=None, gap_since=min(memory.gap_since, now))
        move = (
            _fill(outlook, mine, memory, length, now, rng)
            if now >= memory.relocated_at + GAP_PAUSE_S
            else None
        )
        return move, replace(memory, relocated_at=now) if move else memory
    memory = replace(memory, gap_since=math.inf)
    if outlook.is_balanced or now < memory.relocated_at + PAUSE_S:
        return None, replace(memory, shortage=None)
    # With this probability, the hosts that move between two looks together add about what is
    # missing, or one host moves.
    chance = max(outlook.short, mine.blocks_per_s) / (outlook.blocks * outlook.mean)
    is_large = len(outlook.placed) > FEW_HOSTS
    last = memory.shortage
    if is_large and last is None and rng.random() > chance:
        return None, memory
    target, gain = _target(outlook.including(mine), mine, last.what if last else None, length, rng)
    if target is None:
        return None, replace(memory, shortage=None)
    if last is None or target != last.what:
        return None, replace(memory, shortage=Lasting(target, now))
    if now < last.since + CONFIRM_S or (not is_large and rng.random() > chance):
        return None, memory
    reason = f"the swarm lacks hosts of these blocks: {gain:.0%} more of this machine's time is of use there"
    return _to(mine, *target, reason), replace(memory, relocated_at=now, shortage=None)


def _to(mine: Claim, start: int, end: int, reason: str, *, fills_gap: bool = False) -> Relocation:
    """Return the relocation of the host of ``mine`` to other blocks, or to more around its own."""
    kind = Kind.GROW if start <= mine.start and mine.end <= end else Kind.MOVE
    return Relocation(kind, start, end, reason, fills_gap)


def _target(
    outlook: Outlook, mine: Claim, last: Span | None, length: int, rng: random.Random
) -> tuple[Span | None, float]:
    """Return the span where the host of ``mine`` helps most, and the share of its time that gains
    there.

    The span of the last look wins if the host would still help there. Otherwise a few spans are
    drawn at random. The span is None if none helps.
    """
    speed = min(mine.blocks_per_s, outlook.most)
    without = outlook.supply.copy()
    without.add(mine.start, mine.end, -speed)

    def gain(span: Span) -> tuple[float, float]:
        """Return the throughput with the host on ``span``, and how many more blocks per second are
        served.

        Both are 0 if the gain is too small or the move is unsafe.
        """
        if not outlook.may_leave(mine, span):
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
    # A host that grows leaves no block.
    grown = _spans_around(mine, length, outlook.blocks) if length > mine.end - mine.start else ()
    drawn = dict.fromkeys([*grown, *draw(outlook.blocks, length, rng)])
    gains = {(start, start + length): gain((start, start + length)) for start in drawn}
    best = max(gains, key=gains.__getitem__)
    more = gains[best][1]
    return (best if more else None), more / speed


def _spans_around(mine: Claim, length: int, blocks: int) -> range:
    """Return the starts of the spans of ``length`` blocks that contain the span of ``mine``."""
    return range(max(mine.end - length, 0), min(mine.start, blocks - length) + 1)


def shrink(outlook: Outlook, mine: Claim, length: int) -> Relocation:
    """Return the move of the host of ``mine`` to ``length`` of its own blocks, fewer than it has.

    The choice leaves the fewest blocks without a host, then the highest throughput. ``outlook``
    includes ``mine``.
    """
    speed = min(mine.blocks_per_s, outlook.most)
    without = outlook.supply.copy()
    without.add(mine.start, mine.end, -speed)

    def loss(start: int) -> tuple[int, float, float]:
        """Return the cost of keeping ``length`` blocks from ``start`` on, to be minimised.

        The parts are: blocks without a host, negative throughput, negative rate of the slowest
        block.
        """
        after = without.copy()
        after.add(start, start + length, speed)
        rates = after.rates()
        return sum(not rate for rate in rates), -after.throughput(), -min(rates)

    start = min(range(mine.start, mine.end - length + 1), key=loss)
    return Relocation(Kind.SHRINK, start, start + length, "this machine's memory limit holds no more blocks")


def _fill(
    outlook: Outlook, mine: Claim, memory: Remembered, length: int, now: float, rng: random.Random
) -> Relocation | None:
    """Return the move of the host of ``mine`` that fills a gap; None to stay.

    The host grows if it can, else follows the plan. If the hosts of the plan do not move, it moves
    at random.
    """
    gaps = set(outlook.gaps)
    if length > mine.end - mine.start:
        starts = _spans_around(mine, length, outlook.blocks)
        start = max(starts, key=lambda start: len(gaps.intersection(range(start, start + length))))
        if filled := len(gaps.intersection(range(start, start + length))):
            return _to(
                mine,
                start,
                start + length,
                f"no host has {filled} of these blocks, which are next to this machine's blocks",
                fills_gap=True,
            )
    if (repair := outlook.repairs.get(mine.peer)) is not None:
        filled = len(gaps.intersection(range(repair.start, repair.end)))
        reason = (
            f"no host has {filled} of these blocks"
            if filled
            else "hosts shift towards blocks that no host has"
        )
        return _to(mine, repair.start, repair.end, reason, fills_gap=True)
    if now < memory.gap_since + GAP_WAIT_S or not outlook.may_leave(mine) or rng.random() > 0.5:
        return None
    others = [claim for claim in outlook.placed if claim.peer != mine.peer]
    choice = choose_span(others, blocks=outlook.blocks, length=length, rng=rng)
    if (choice.start, choice.end) == (mine.start, mine.end):
        return None
    return _to(mine, choice.start, choice.end, choice.reason, fills_gap=True)
