"""Which host is wrong when computations of the same outputs differ. Pure."""

from enum import Enum, auto

import torch

from swarmnet_client.audit.measure import TOLERANCE, relative_errors


class Verdict(Enum):
    """The finding of an audit about the audited host."""

    RIGHT = auto()
    """A second host computed the same."""
    OPEN = auto()
    """A second host did not: a third one decides."""
    WRONG = auto()
    """Two other hosts agree with each other and not with the audited one."""
    DOUBTED_WITNESS = auto()
    """The third host agrees with the audited one and not with the second. No proof against the second: the two may collude."""
    UNDECIDED = auto()
    """All three differ, or the third agrees with both."""


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors [P, D] may be what two honest hosts, of any precision, computed from the same inputs."""
    return bool((relative_errors(one, other) <= TOLERANCE).all())


def judge(said: torch.Tensor, second: torch.Tensor, third: torch.Tensor | None = None) -> Verdict:
    """The verdict on the outputs that a host ``said``, given what other hosts computed from the same inputs."""
    if agree(said, second):
        return Verdict.RIGHT
    if third is None:
        return Verdict.OPEN
    is_wrong, is_doubted = agree(second, third), agree(said, third)
    if is_wrong == is_doubted:
        return Verdict.UNDECIDED
    return Verdict.WRONG if is_wrong else Verdict.DOUBTED_WITNESS
