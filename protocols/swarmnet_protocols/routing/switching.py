"""Switches of hosts to another model: a pure function of the claims of the hosts of all models, a host's earlier looks, the time, and a random source.

1. A host may leave its model only if that is served without it as well: each of its blocks has ``OTHER_HOSTS`` other hosts, and the load of
   the hosts that stay is at most ``CALM``. So no model loses a block for another one.
2. It switches to a model of which blocks have no host, if hosts that may switch can fill them all; or to one whose hosts are overloaded.
3. It does so after it has found the same for ``CONFIRM_S``, not within ``MOVE_PAUSE_S`` of its last move or switch, and with a probability such that all
   hosts together switch as much as is needed between two looks. It announces its intent before it leaves, and looks once more
   (``is_confirmed``): of hosts that would switch at the same time, those with the lower peer ids do.

Between ``CALM`` and ``OVERLOADED`` a model neither gives hosts nor gets some, so that hosts do not go to and fro.
"""

import math
import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.placement import choose_span
from swarmnet_protocols.routing.rebalancing import MOVE_PAUSE_S, Outlook
from swarmnet_protocols.routing.throughput import Claim, holders

LOOK_S = 60.0
"""Mean seconds between two looks of a host at other models. Callers add jitter, so that hosts see each other's intents."""
CONFIRM_S = 300.0
"""Seconds for which a host finds the same need before it switches: a host that is restarted is back by then."""
RETRY_S = 6 * 3600.0
"""Seconds after a failed switch until a host tries the same model again."""
OTHER_HOSTS = 2
"""Other hosts that each block of a host must have before it leaves its model, so that one of them may fail."""
OVERLOADED = 0.75
"""Load from which a model needs more hosts."""
CALM = 0.5
"""Highest load of the hosts that stay, so that a host leaves its model."""
RELIEVED = (OVERLOADED + CALM) / 2
"""Load that an overloaded model is to have after hosts have switched to it."""


@dataclass(frozen=True)
class ServedModel:
    """A model of the swarm and the claims of its hosts. Those that are not settled are the intents of hosts that join it or switch to it."""

    manifest: bytes
    name: str
    blocks: int
    block_bytes: float
    """Mean bytes of a block, as stored."""
    claims: Sequence[Claim]
    length: int = 0
    """Blocks that this host could hold; 0: none, or it must not switch to the model."""

    @cached_property
    def outlook(self) -> Outlook:
        return Outlook(self.claims, blocks=self.blocks)

    @cached_property
    def needs_hosts(self) -> bool:
        return bool(self.outlook.gaps) or self.load_soon >= OVERLOADED

    @cached_property
    def load(self) -> float:
        """The median load of its hosts that this host has called, which few false announcements change; 0 without any."""
        return median([claim.load for claim in self.outlook.staying if claim.seen] or [0.0])

    @cached_property
    def load_soon(self) -> float:
        """The load with the hosts that have just come or will come soon, which do not compute yet: never above ``load``."""
        work = sum(claim.load * self.speed([claim]) for claim in self.outlook.staying)
        return min(self.load, work / self.speed(self.outlook.placed)) if work else 0.0

    def speed(self, claims: Sequence[Claim]) -> float:
        """The blocks per second of hosts together."""
        return sum(min(claim.blocks_per_s, self.outlook.most) for claim in claims)


@dataclass(frozen=True)
class SwitchLooks:
    """The memory of a host between two looks at other models. Times are in seconds of the clock that gives ``now``."""

    switched_at: float = -math.inf
    """When it last left a model for another one."""
    target: bytes = b""
    """The model that, by the last look, needs hosts; empty: none."""
    target_since: float = math.inf
    """Time of the first of the consecutive looks with this target."""
    failed_at: Mapping[bytes, float] = field(default_factory=dict)
    """When a switch to a model last failed."""

    def may_try(self, manifest: bytes, now: float) -> bool:
        return now >= self.failed_at.get(manifest, -math.inf) + RETRY_S

    def after_switch(self, now: float) -> "SwitchLooks":
        return replace(self, switched_at=now)

    def after_failure(self, manifest: bytes, now: float) -> "SwitchLooks":
        return replace(self, failed_at={**self.failed_at, manifest: now}, target=b"", target_since=math.inf)


@dataclass(frozen=True)
class Switch:
    """A model for a host to serve in place of its own, and the reason in one sentence for its owner.

    ``start`` and ``end`` are the blocks that it would choose now. It chooses again when it has left.
    """

    manifest: bytes
    name: str
    start: int
    end: int
    reason: str


@dataclass(frozen=True)
class _Need:
    """The need of a model for more hosts.

    ``missing``: the number of its blocks that have no host; 0 if all have one, and these hosts are overloaded. ``chance``: the probability with
    which each host that may switch does so between two looks, so that together as many switch as are needed.
    """

    model: ServedModel
    missing: int
    chance: float
    reason: str


def should_switch(
    own: ServedModel,
    mine: Claim,
    others: Sequence[ServedModel],
    looks: SwitchLooks,
    *,
    now: float,
    rng: random.Random,
) -> tuple[Switch | None, SwitchLooks]:
    """The switch for the host of ``mine``, a settled claim to blocks of ``own``, or None; and the looks to pass at its next look.

    ``others``: the other models that the swarm's file lists. The caller announces the switch at once, as a claim that is not settled, and
    asks ``is_confirmed`` when others have had time to read it.
    """
    need = _need(own, mine, others, others)
    if need is None or now < looks.switched_at + MOVE_PAUSE_S:
        return None, replace(looks, target=b"", target_since=math.inf)
    model = need.model
    if model.manifest != looks.target:
        return None, replace(looks, target=model.manifest, target_since=now)
    if now < looks.target_since + CONFIRM_S or rng.random() > need.chance:
        return None, looks
    choice = choose_span(model.claims, blocks=model.blocks, length=model.length, rng=rng)
    switch = Switch(model.manifest, model.name, choice.start, choice.end, need.reason)
    return switch, replace(looks, target=b"", target_since=math.inf)


def is_confirmed(own: ServedModel, mine: Claim, others: Sequence[ServedModel], switch: Switch) -> bool:
    """Whether the host of ``mine``, which has announced ``switch``, should still make it, when all intents that were announced before can be read.

    Hosts of its own model with higher peer ids that have announced a switch, too, are expected to give it up.
    """
    before = _without_yielding(own, mine, others)
    need = _need(own, mine, [model for model in before if model.manifest == switch.manifest], before)
    return need is not None


def staying(own: ServedModel, mine: Claim, others: Sequence[ServedModel]) -> list[Claim]:
    """The claims of the other hosts of ``own`` that neither move nor switch, of which ``is_confirmed`` needs some."""
    gone = {claim.peer for model in _without_yielding(own, mine, others) for claim in model.claims}
    return [claim for claim in own.outlook.staying if claim.peer not in gone | {mine.peer}]


def _without_yielding(own: ServedModel, mine: Claim, others: Sequence[ServedModel]) -> list[ServedModel]:
    """``others`` without the intents of this host, and of hosts of ``own`` that are expected to give theirs up."""
    hosts = {claim.peer for claim in own.claims if claim.settled}

    def counts(claim: Claim) -> bool:
        yields = not claim.settled and claim.peer in hosts and claim.peer > mine.peer
        return claim.peer != mine.peer and not yields

    return [replace(model, claims=[claim for claim in model.claims if counts(claim)]) for model in others]


def may_leave_model(own: ServedModel, mine: Claim) -> bool:
    """Whether each block of ``mine`` has ``OTHER_HOSTS`` other hosts that do not move: without regard to switches, which takes reading other models."""
    return _is_spare(mine, holders(_with(own.outlook.staying, mine), own.blocks))


def _need(
    own: ServedModel, mine: Claim, candidates: Sequence[ServedModel], others: Sequence[ServedModel]
) -> _Need | None:
    """The need of one of ``candidates`` with which the host of ``mine`` should help; None if there is none, or the host may not leave.

    Of several, the one with the fewest missing blocks. ``others``: all other models, whose hosts and intents show who leaves ``own``.
    """
    candidates = [model for model in candidates if model.length and model.needs_hosts]
    if not candidates or own.outlook.gaps:
        return None
    gone = {claim.peer for model in others for claim in model.claims}
    staying = _with([claim for claim in own.outlook.staying if claim.peer not in gone], mine)
    counts = holders(staying, own.blocks)
    work = own.load * own.speed(own.outlook.staying)
    is_calm = work <= CALM * (own.speed(staying) - own.speed([mine]))
    if not is_calm or not _is_spare(mine, counts):
        return None
    spare = [
        claim
        for claim in staying
        if claim.peer == mine.peer or (claim.may_switch and _is_spare(claim, counts))
    ]
    together = _spare_together(spare, counts, first=mine.peer)
    needs = [
        need for model in candidates if (need := _need_of(model, own, mine, spare, together)) is not None
    ]
    return min(needs, key=lambda need: (need.missing or math.inf, need.model.manifest), default=None)


def _need_of(
    model: ServedModel, own: ServedModel, mine: Claim, spare: Sequence[Claim], together: Set[PeerId]
) -> _Need | None:
    """The need of ``model``, which needs hosts, if those of ``spare`` can meet it. ``together``: those of them that may leave at the same time, with the one of ``mine``."""
    ratio = own.block_bytes / model.block_bytes
    if missing := len(model.outlook.gaps):
        others = [claim for claim in spare if claim.peer in together and claim.peer != mine.peer]
        if model.length + sum((claim.end - claim.start) * ratio for claim in others) < missing:
            return None
        chance = math.ceil(missing / model.length) / len(spare)
        number = missing if missing < model.blocks else "any"
        reason = f"no host had {number} of its {model.blocks} blocks, and {own.name} has enough hosts"
        return _Need(model, missing, chance, reason)
    lacking = model.speed(model.outlook.placed) * (model.load_soon / RELIEVED - 1)
    chance = max(lacking / ratio, own.speed([mine])) / own.speed(spare)
    reason = f"its hosts computed {model.load_soon:.0%} of the time, those of {own.name} {own.load:.0%}"
    return _Need(model, 0, chance, reason)


def _with(claims: Sequence[Claim], mine: Claim) -> list[Claim]:
    return [*(claim for claim in claims if claim.peer != mine.peer), mine]


def _is_spare(claim: Claim, counts: Sequence[int]) -> bool:
    """Whether every block of ``claim`` has ``OTHER_HOSTS`` other hosts, if ``counts`` are the hosts of each block."""
    return all(count > OTHER_HOSTS for count in counts[max(claim.start, 0) : claim.end])


def _spare_together(spare: Sequence[Claim], counts: Sequence[int], *, first: PeerId) -> set[PeerId]:
    """Hosts of ``spare`` that may leave together, among them ``first``."""
    left, found = list(counts), set()
    for claim in sorted(spare, key=lambda claim: (claim.peer != first, claim.peer)):
        if _is_spare(claim, left):
            found.add(claim.peer)
            for block in range(max(claim.start, 0), min(claim.end, len(left))):
                left[block] -= 1
    return found
