"""Verdicts: whether computations of the same outputs differ by more than precision, and which host is wrong. Pure."""

from enum import Enum, auto

import torch

TOLERANCE = 0.25
"""Largest relative error of a position between two honest hosts of any precision: 3.8 times the largest that was measured (decision 0055)."""


def relative_errors(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The relative error of every position [P], of two tensors [P, D] of finite numbers.

    Every channel counts by its own size or, where that is small, by the median size of the position's channels: transformers have
    a few channels that are thousands of times larger than the rest, and in a plain norm a lie in all others would vanish beside them.
    No channel counts more than as wholly wrong.
    """
    one, other = one.double(), other.double()
    sizes = torch.maximum(one.abs(), other.abs())
    typical = sizes.median(dim=1, keepdim=True).values
    scale = torch.maximum(sizes, typical).clamp_min(torch.finfo(torch.float32).tiny)
    return ((one - other).abs() / scale).clamp_max(1.0).square().mean(dim=1).sqrt()


class Verdict(Enum):
    """The finding of an audit about the audited host."""

    RIGHT = auto()
    """A second host computed the same."""
    OPEN = auto()
    """A second host computed something else: a third one decides."""
    WRONG = auto()
    """Two other hosts agree with each other and not with the audited one."""
    DOUBTED_WITNESS = auto()
    """The third host agrees with the audited one and not with the second. No proof against the second: the two may collude."""
    UNDECIDED = auto()
    """All three differ, or the third agrees with both."""


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors [P, D] may be what two honest hosts, of any precision, computed from the same inputs."""
    return bool((relative_errors(one, other) <= TOLERANCE).all())


def judge(reported: torch.Tensor, second: torch.Tensor, third: torch.Tensor | None = None) -> Verdict:
    """The verdict on the outputs that a host ``reported``, given those that other hosts computed from the same inputs."""
    if agree(reported, second):
        return Verdict.RIGHT
    if third is None:
        return Verdict.OPEN
    is_wrong, is_doubted = agree(second, third), agree(reported, third)
    if is_wrong == is_doubted:
        return Verdict.UNDECIDED
    return Verdict.WRONG if is_wrong else Verdict.DOUBTED_WITNESS
