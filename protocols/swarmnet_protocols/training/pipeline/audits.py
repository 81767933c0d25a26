"""Audits of microbatches: which are computed again, when two answers differ, who is a liar. Pure.

1. When a microbatch is home, its origin draws whether a worker's answer is computed again
   (``AuditDraws``). So nobody knows this before the worker answers.
2. Another worker of the stage, with the same state, fetches from the neighbours in the chain what
   the worker got, and computes its answer again (``Tolerance``). If it finds another answer, it
   signs an accusation.
3. The origin then asks all workers of the stage to compute the answer. Each excludes whoever signed
   what it finds to be wrong: the receipt, or the accusation. So an auditor that lies convicts
   itself, and no worker has to believe another one.
4. An origin has no weights of the stage. It excludes whom most workers of the stage exclude
   (``Accusations``).
"""

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from swarmnet_protocols.net import PeerId

AUDITED = 20
"""Most answers of a worker to an origin in a stretch, which has one audit. An audit costs about two
thirds of a microbatch, so 20 cost 3 % of the throughput. With more, a rare lie lives longer."""
AUDITED_ROUNDS = 8
"""Most rounds of a stretch. A worker that lies to the only origin of a job lives for at most twice
as many. Many origins draw independently: with 12 origins, one liar in 3,000 lives for 50 rounds.
With fewer rounds, audits of small batches cost more."""
LARGEST_BOUND = 0.25
"""Largest relative difference of honest answers, as for hosts (record 0055)."""
ROUNDINGS = 256
"""Difference of two computations of one block, as a multiple of the rounding of its type. In
float32, ten blocks of other kernels differed by 33 roundings (record 0055)."""
ROUTED_APART = 0.02
"""Share of positions at which rounding may choose other experts."""
SPREAD = 8.0
"""Largest number of a position as a multiple of its root mean square, for levels of codecs."""
FEW = 2.0
"""Levels, as a root of their squares' sum, in which a position may differ by bad luck."""
CERTAIN = 0.25
"""Part of the tolerance within which an answer is certainly honest. With more, honest workers whose
arithmetic differs may convict each other. With less, a false accusation is proven less often."""


def stretch(workers: int, microbatches: int) -> int:
    """Return how many answers of a worker to an origin are a stretch.

    ``workers``: workers of the stage. ``microbatches``: microbatches of a round, of all origins.
    """
    return max(1, min(AUDITED, AUDITED_ROUNDS * microbatches // max(1, workers)))


class AuditDraws:
    """The audits of one origin: one of each worker's answers in every stretch of them.

    The place in a stretch is drawn, so nobody foresees it. A liar lives for less than two
    stretches. With an independent draw for each answer, some would live much longer.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left: dict[PeerId, tuple[int, int]] = {}
        """Answers that are left in each worker's stretch, and how many are left at its audit."""

    def draw(self, worker: PeerId, answers: int) -> bool:
        """Return whether a worker's answer is computed again. A stretch has ``answers``."""
        left, audited = self._left.get(worker, (0, 0))
        if not left:
            left, audited = answers, self._rng.randint(1, answers)
        self._left[worker] = left - 1, audited
        return left == audited


@dataclass(frozen=True)
class Tolerance:
    """The differences between two honest answers, relative to the norm of a position."""

    most: float
    """The largest difference."""
    apart: float = 0.0
    """Share of positions that may differ by more."""

    @classmethod
    def of(cls, bits: int, blocks: int, level: float, width: int, *, routed: bool) -> "Tolerance":
        """Return the tolerance of a stage whose positions have ``width`` numbers.

        - ``bits``: significant bits of the coarser computation.
        - ``level``: step of the boundary's codec, relative to the largest number; 0 without levels.
        - ``routed``: the stage has experts. Where two are nearly as good, rounding decides.

        Errors of blocks add up like a random walk. Two numbers that differ by d are rounded to
        different levels with the chance d / level: many where d is large, else a few.
        """
        if routed:
            return cls(LARGEST_BOUND, ROUTED_APART)
        computed = ROUNDINGS * 2.0**-bits * max(1, blocks) ** 0.5
        levels = SPREAD * ((computed * level) ** 0.5 + FEW * level / width**0.5)
        return cls(min(LARGEST_BOUND, computed + levels))

    def allows(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two tensors [P, D] may be honest answers to the same question.

        A position counts with its norm or, if that is smaller, with the median norm.
        """
        norms = torch.linalg.vector_norm(one, dim=1)
        scale = torch.maximum(norms, norms.median()).clamp_min(torch.finfo(torch.float32).tiny)
        far = torch.linalg.vector_norm(one - other, dim=1) > self.most * scale
        return float(far.float().mean()) <= self.apart

    def agree(self, mine: torch.Tensor, other: torch.Tensor) -> bool | None:
        """Return whether another answer is honest. None if that is uncertain.

        An answer is certainly honest only if it is much closer (``CERTAIN``). Otherwise a liar
        could choose an answer that one honest worker finds false and another one right. Then the
        second one would exclude the first one for a false accusation.
        """
        if not self.allows(mine, other):
            return False
        return True if Tolerance(CERTAIN * self.most).allows(mine, other) else None


def is_odd(states: Mapping[PeerId, bytes], peer: PeerId) -> bool:
    """Return whether most workers of a stage have one state, and ``peer`` has another.

    ``states``: the states of the workers that have answered in a round.
    """
    state, count = Counter(states.values()).most_common(1)[0]
    return 2 * count > len(states) and states[peer] != state


class Accusations:
    """The workers that others of their stage have found to lie, as they say."""

    def __init__(self) -> None:
        self._accusers: dict[PeerId, set[PeerId]] = {}

    def accuse(self, accuser: PeerId, accused: PeerId, stage: Collection[PeerId]) -> bool:
        """Note an accusation. Return whether most workers of the ``stage`` now accuse the worker.

        What a worker says about itself or a worker of another stage is ignored.
        """
        if accuser == accused or accuser not in stage or accused not in stage:
            return False
        accusers = self._accusers.setdefault(accused, set())
        accusers.add(accuser)
        accusers &= set(stage)
        return 2 * len(accusers) > len(stage)
