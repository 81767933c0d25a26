"""Decide which models of a swarm need hosts and which can spare some.

Pure functions of the claims of all hosts:

1. A host may leave its model only if the others serve its blocks well. Each block has
   ``OTHER_HOSTS`` other hosts, and the load of the hosts that stay is at most ``CALM``. So no model
   loses a block to another.
2. A model needs hosts if some of its blocks have none, and hosts that may switch can fill all of
   them. It also needs hosts if its own are overloaded.

Between ``CALM`` and ``OVERLOADED`` a model neither gives nor gets hosts. Otherwise hosts would go
back and forth.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.outlook import Outlook
from swarmnet_protocols.routing.spans import clipped
from swarmnet_protocols.routing.throughput import Claim, holders

OTHER_HOSTS = 2
"""Other hosts that each block must have before its host leaves the model. One of them may fail."""
OVERLOADED = 0.75
"""A model whose hosts have at least this load needs more hosts."""
CALM = 0.5
"""Highest load of the hosts that stay when a host leaves their model."""
RELIEVED = (OVERLOADED + CALM) / 2
"""Target load of an overloaded model after hosts have switched to it."""


@dataclass(frozen=True)
class ServedModel:
    """A model of the swarm and the claims of its hosts.

    Claims that are not settled are intents of hosts that join the model or switch to it.
    """

    manifest: bytes
    name: str
    blocks: int
    block_bytes: float
    """Mean bytes of a block, as stored."""
    claims: Sequence[Claim]
    length: int = 0
    """Blocks that this host could hold; 0 if it cannot or must not host the model."""

    @cached_property
    def outlook(self) -> Outlook:
        return Outlook(self.claims, blocks=self.blocks)

    @cached_property
    def needs_hosts(self) -> bool:
        return bool(self.outlook.gaps) or self.load_soon >= OVERLOADED

    @cached_property
    def load(self) -> float:
        """Median load of the hosts that this host has called; 0 without any. A few false
        announcements do not change a median.
        """
        return median([claim.load for claim in self.outlook.staying if claim.seen] or [0.0])

    @cached_property
    def load_soon(self) -> float:
        """Load once hosts that have just joined, or soon will, share the work: at most ``load``."""
        work = sum(claim.load * self.speed([claim]) for claim in self.outlook.staying)
        return min(self.load, work / self.speed(self.outlook.placed)) if work else 0.0

    def speed(self, claims: Sequence[Claim]) -> float:
        """Return the blocks per second of all hosts of ``claims`` together."""
        return sum(min(claim.blocks_per_s, self.outlook.most) for claim in claims)


@dataclass(frozen=True)
class Need:
    """A model that needs more hosts."""

    model: ServedModel
    missing: int
    """Number of blocks without a host; 0 if the hosts are overloaded."""
    chance: float
    """Probability with which each host that may switch does so, each time that it looks at the
    models. About as many switch as needed."""
    reason: str


def without_yielding(own: ServedModel, mine: Claim, others: Sequence[ServedModel]) -> list[ServedModel]:
    """Return ``others`` without the intents of this host and without intents that will be given up.

    Of two hosts of ``own`` that intend to leave, the one with the higher peer id gives up.
    """
    hosts = {claim.peer for claim in own.claims if claim.settled}

    def counts(claim: Claim) -> bool:
        yields = not claim.settled and claim.peer in hosts and claim.peer > mine.peer
        return claim.peer != mine.peer and not yields

    return [replace(model, claims=[claim for claim in model.claims if counts(claim)]) for model in others]


def may_leave_model(own: ServedModel, mine: Claim) -> bool:
    """Check whether each block of ``mine`` has ``OTHER_HOSTS`` other hosts that do not move.

    Other models are not read, so hosts that intend to switch to one count as hosts that do not
    move.
    """
    return _is_spare(mine, holders(_with(own.outlook.staying, mine), own.blocks))


def need_for(
    own: ServedModel, mine: Claim, candidates: Sequence[ServedModel], others: Sequence[ServedModel]
) -> Need | None:
    """Return the need among ``candidates`` that the host of ``mine`` should meet.

    None if no candidate needs hosts or this host may not leave. The need with the fewest missing
    blocks comes first. ``others`` are all other models: their hosts and intents show who leaves
    ``own``.
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
) -> Need | None:
    """Return the need of ``model`` if the hosts of ``spare`` can meet it.

    ``together`` are the hosts of ``spare`` that may leave at the same time as the host of ``mine``.
    """
    ratio = own.block_bytes / model.block_bytes
    if missing := len(model.outlook.gaps):
        others = [claim for claim in spare if claim.peer in together and claim.peer != mine.peer]
        if model.length + sum((claim.end - claim.start) * ratio for claim in others) < missing:
            return None
        chance = math.ceil(missing / model.length) / len(spare)
        number = missing if missing < model.blocks else "any"
        reason = f"no host had {number} of its {model.blocks} blocks, and {own.name} has enough hosts"
        return Need(model, missing, chance, reason)
    lacking = model.speed(model.outlook.placed) * (model.load_soon / RELIEVED - 1)
    chance = max(lacking / ratio, own.speed([mine])) / own.speed(spare)
    reason = f"its hosts computed {model.load_soon:.0%} of the time, those of {own.name} {own.load:.0%}"
    return Need(model, 0, chance, reason)


def _with(claims: Sequence[Claim], mine: Claim) -> list[Claim]:
    return [*(claim for claim in claims if claim.peer != mine.peer), mine]


def _is_spare(claim: Claim, counts: Sequence[int]) -> bool:
    """Tell whether every block of ``claim`` has ``OTHER_HOSTS`` other hosts.

    ``counts`` is the number of hosts of each block.
    """
    return all(count > OTHER_HOSTS for count in counts[max(claim.start, 0) : claim.end])


def _spare_together(spare: Sequence[Claim], counts: Sequence[int], *, first: PeerId) -> set[PeerId]:
    """Return hosts of ``spare`` that may leave together. ``first`` has priority."""
    left, found = list(counts), set()
    for claim in sorted(spare, key=lambda claim: (claim.peer != first, claim.peer)):
        if _is_spare(claim, left):
            found.add(claim.peer)
            for block in range(*clipped(claim, len(left))):
                left[block] -= 1
    return found
