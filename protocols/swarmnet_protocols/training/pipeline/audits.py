"""Audits of microbatches: which are computed again, when two answers differ, who is a liar. Pure.

1. When a microbatch is home, its origin draws whether a worker's answer is computed again. So
   nobody knows this before the worker answers.
2. Another worker of the stage, with the same state, fetches from the neighbours in the chain what
   the worker got, and computes its answer again (``Tolerance``).
3. If the answer is false, the origin asks all other workers of the stage to compute it, too. A
   worker that has found a liar excludes it. An origin excludes a worker that most workers of its
   stage have found to lie (``Accusations``). So no single origin or auditor can have an honest
   worker excluded.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from swarmnet_protocols.net import PeerId

AUDITED = 0.05
"""Share of each worker's microbatches that is computed again. An audit costs about two thirds of a
microbatch, so this costs 3 % of the throughput. With less, a rare lie lives longer."""
AUDITS_A_ROUND = 0.15
"""Least audits that an origin starts of each worker in a round, on average. With 0.15, a worker
that always lies to one origin lives for 50 rounds with a chance of 3 in 10,000."""
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


def audited_share(workers: int, microbatches: int) -> float:
    """Return the probability of an audit.

    ``workers``: workers of the stage. ``microbatches``: microbatches of an origin's batch.
    """
    return min(1.0, max(AUDITED, AUDITS_A_ROUND * workers / max(1, microbatches)))


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
