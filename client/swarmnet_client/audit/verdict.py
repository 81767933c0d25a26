"""Verdicts: whether two hosts computed the same outputs, up to precision, and which host is wrong.

Honest hosts differ, because they round differently. Outputs are compared in two or three views:

1. as they are: the next blocks add to them;
2. after a norm, which is what the next block reads: a few huge channels shrink all others there;
3. the last hop's outputs also as logits, which is what the client makes of them.

In each view there are two bounds: one for a position as a whole, and one for its most different
number. The first alone would allow anything in a few channels.

Some positions are ill-conditioned: there any rounding changes the outputs much. Two hosts of one
kind then agree exactly, and an honest host of another kind differs. So a third host, which decides
between two, gets nudged inputs. A host is wrong at a position only if its error is several times
the change that the nudge causes there.

The functions are pure.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

Read = Callable[[torch.Tensor], torch.Tensor]
"""Turns outputs [P, D] of the last block into logits [P, V]: final norm and lm_head."""

SLICE = 16
"""Positions that are read at a time. More would take more memory: each has a logit for every
token."""


@dataclass(frozen=True)
class Bound:
    """The largest differences of a position between two honest hosts.

    ``whole``: root mean square of the relative errors. ``part``: the largest relative error of a
    number. See ``differences``.
    """

    whole: float
    part: float

    def ratio(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return the larger of each position's two differences, in units of the bounds [P]."""
        return torch.maximum(whole / self.whole, part / self.part)


STATES = Bound(whole=0.25, part=4.0)
"""For hidden states, as they are and after a norm. Larger bounds hide lies. Smaller bounds accuse
honest hosts. Even these bounds are exceeded now and then by a host that computes dozens of blocks
in bfloat16 (decision 0104 has the measurements)."""
LOGITS = Bound(whole=0.25, part=1.5)
"""For logits. A host that moves the logit of one token by more than ``part`` is found."""

NUDGE = 2.0**-5
"""Relative change of each input of a third host. Smaller nudges would change outputs less than the
rounding of dozens of bfloat16 blocks does, so ill-conditioned positions would stay hidden. Larger
nudges would excuse lies."""
MARGIN = 4.0
"""Largest error of an honest host at a position, as a multiple of the change that the nudge causes
there. A larger margin would excuse larger lies. A smaller margin would come close to the errors of
bfloat16."""


def nudged(inputs: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [P, D] for a third host: each number is a little larger or smaller, at random.

    The two tensors are nudged in opposite directions. If rounding decides between two experts, one
    of the two crosses over.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, inputs.shape, generator=generator) * 2 - 1
    up, down = (inputs.float() * (1 + sign * NUDGE * signs) for sign in (1, -1))
    return up.to(inputs.dtype), down.to(inputs.dtype)


def differences(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the differences of every position, whole [P] and largest part [P], of two tensors [P,
    D].

    A number's size is its own or, where that is small, the median of the position's sizes.
    Transformers have a few channels that are thousands of times larger than the rest. In a plain
    norm, a lie in all other channels would vanish next to them. In the whole, a channel counts as
    at most 100 % wrong, so that a single channel with a large rounding error does not accuse a
    host.
    """
    one, other = one.double(), other.double()
    off, sizes = (one - other).abs(), torch.maximum(one.abs(), other.abs())
    typical = sizes.median(dim=1, keepdim=True).values.clamp_min(torch.finfo(torch.float32).tiny)
    whole = (off / torch.maximum(sizes, typical)).clamp_max(1.0).square().mean(dim=1).sqrt()
    part = (off / torch.maximum(torch.minimum(one.abs(), other.abs()), typical)).amax(dim=1)
    return whole, part


def after_norm(states: torch.Tensor) -> torch.Tensor:
    """Return hidden states [P, D] after RMSNorm without a gain (arXiv:1910.07467).

    Only hosts know the gain of the next block's norm. It scales the channels of both hosts alike.
    """
    states = states.double()
    return states / states.square().mean(dim=1, keepdim=True).sqrt().clamp_min(
        torch.finfo(torch.float32).tiny
    )


def distances(one: torch.Tensor, other: torch.Tensor, read: Read | None = None) -> torch.Tensor:
    """Return how far apart two outputs [P, D] are at each position, in units of the bounds [P].

    The outputs come from the same inputs. ``read`` is given for outputs of the last hop. The view
    that differs most counts. Numbers that overflow in a view are infinitely far apart.
    """
    found = []
    for start in range(0, len(one), SLICE):
        cut = slice(start, start + SLICE)
        parts = [bound.ratio(*differences(*pair)) for *pair, bound in views(one[cut], other[cut], read)]
        found.append(torch.stack(parts).amax(dim=0))
    return torch.cat(found).nan_to_num(nan=torch.inf, posinf=torch.inf)


def views(
    one: torch.Tensor, other: torch.Tensor, read: Read | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Bound]]:
    """Yield two tensors [P, D] in each view, with the view's bound."""
    yield one, other, STATES
    yield after_norm(one), after_norm(other), STATES
    if read is not None:
        yield _centred(read(one)), _centred(read(other)), LOGITS


def _centred(logits: torch.Tensor) -> torch.Tensor:
    """Return logits without the part that is common to all tokens. Probabilities do not depend on
    it."""
    return logits - logits.mean(dim=1, keepdim=True)


class Verdict(Enum):
    """The result of an audit for the audited host."""

    RIGHT = auto()
    """A second host computed the same."""
    OPEN = auto()
    """A second host computed something else: a third one decides."""
    WRONG = auto()
    """Two other hosts agree with each other and not with the audited one."""
    DOUBTED_WITNESS = auto()
    """The third host agrees with the audited one and not with the second. No proof against the
    second: the two may collude."""
    UNDECIDED = auto()
    """All three differ, or only at ill-conditioned positions."""


def judge(
    reported: torch.Tensor,
    second: torch.Tensor,
    third: Sequence[torch.Tensor] = (),
    *,
    read: Read | None = None,
) -> Verdict:
    """Return the verdict on the outputs [P, D] that a host ``reported``.

    ``second`` is what another host computed from the same inputs, and ``third`` what one more host
    computed from ``nudged`` inputs. ``read`` as in ``distances``.
    """
    apart = distances(reported, second, read)
    if (apart <= 1).all():
        return Verdict.RIGHT
    if not third:
        return Verdict.OPEN

    def is_backed(ally: torch.Tensor) -> bool:
        """Return whether the third host sides with ``ally`` at a position where the two differ."""
        moved = torch.stack([distances(ally, each, read) for each in third]).amax(dim=0)
        return bool((apart > (MARGIN * moved).clamp_min(1)).any())

    is_wrong, is_doubted = is_backed(second), is_backed(reported)
    if is_wrong == is_doubted:
        return Verdict.UNDECIDED
    return Verdict.WRONG if is_wrong else Verdict.DOUBTED_WITNESS
