"""Verdicts: whether two hosts computed the same outputs, up to precision, and which host is wrong.

Honest hosts differ, because they round differently. Outputs are compared in two or three views:

1. as they are: the next blocks add to them;
2. after a norm, which is what the next block reads: a few huge channels shrink all others there;
3. the last hop's outputs also as logits, which is what the client makes of them.

In each view there are two bounds: one for a position as a whole, and one for its most different
number. The first alone would allow anything in a few channels.

Hosts of exact arithmetic differ by nothing, so their outputs are compared bit for bit.

Some positions are ill-conditioned: there any rounding changes the outputs much. Two hosts of one
kind then agree exactly, and an honest host of another kind differs. So a third host, which decides
between two, gets nudged inputs. A host is wrong at a position only if its error is several times
the change that the nudge causes there.

The functions are pure.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from swarmnet_protocols.arrays import Array, as_float32
from swarmnet_protocols.session.arrays import rounded, type_of

Read = Callable[[Array], Array]
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

    def ratio(self, whole: Array, part: Array) -> Array:
        """Return the larger of each position's two differences, in units of the bounds [P]."""
        return np.maximum(whole / self.whole, part / self.part)


STATES = Bound(whole=0.25, part=4.0)
"""For hidden states, as they are and after a norm. Larger bounds hide lies. Smaller bounds accuse
honest hosts. Even these bounds are exceeded now and then by a host that computes dozens of blocks
in bfloat16 (decision 0104 has the measurements)."""
LOGITS = Bound(whole=0.25, part=1.5)
"""For logits. A host that moves the logit of one token by more than ``part`` is found."""

_TINY = float(np.finfo(np.float32).tiny)
NUDGE = 2.0**-5
"""Relative change of each input of a third host. Smaller nudges would change outputs less than the
rounding of dozens of bfloat16 blocks does, so ill-conditioned positions would stay hidden. Larger
nudges would excuse lies."""
MARGIN = 4.0
"""Largest error of an honest host at a position, as a multiple of the change that the nudge causes
there. A larger margin would excuse larger lies. A smaller margin would come close to the errors of
bfloat16."""


def nudged(inputs: Array, seed: int) -> tuple[Array, Array]:
    """Return inputs [P, D] for a third host: each number is a little larger or smaller, at random.

    The two are nudged in opposite directions. If rounding decides between two experts, one
    of the two crosses over.
    """
    signs = np.random.default_rng(seed).choice(np.array([-NUDGE, NUDGE], np.float32), inputs.shape)
    exact, type = as_float32(inputs), type_of(inputs)
    return rounded(exact * (1 + signs), type), rounded(exact * (1 - signs), type)


def differences(one: Array, other: Array) -> tuple[Array, Array]:
    """Return the differences of every position, whole [P] and largest part [P], of two tensors [P,
    D].

    A number's size is its own or, where that is small, the median of the position's sizes.
    Transformers have a few channels that are thousands of times larger than the rest. In a plain
    norm, a lie in all other channels would vanish next to them. In the whole, a channel counts as
    at most 100 % wrong, so that a single channel with a large rounding error does not accuse a
    host.
    """
    one, other = _exact(one), _exact(other)
    off, sizes = np.abs(one - other), np.maximum(np.abs(one), np.abs(other))
    middle = (sizes.shape[1] - 1) // 2
    typical = np.maximum(np.partition(sizes, middle, axis=1)[:, middle, None], _TINY)
    whole = np.sqrt(np.square(np.minimum(off / np.maximum(sizes, typical), 1.0)).mean(axis=1))
    part = (off / np.maximum(np.minimum(np.abs(one), np.abs(other)), typical)).max(axis=1)
    return whole, part


def _exact(values: Array) -> Array:
    return as_float32(values).astype(np.float64) if values.dtype != np.float64 else values


def after_norm(states: Array) -> Array:
    """Return hidden states [P, D] after RMSNorm without a gain (arXiv:1910.07467).

    Only hosts know the gain of the next block's norm. It scales the channels of both hosts alike.
    """
    states = _exact(states)
    normed: Array = states / np.maximum(np.sqrt(np.square(states).mean(axis=1, keepdims=True)), _TINY)
    return normed


def distances(one: Array, other: Array, read: Read | None = None) -> Array:
    """Return how far apart two outputs [P, D] are at each position, in units of the bounds [P].

    The outputs come from the same inputs. ``read`` is given for outputs of the last hop. The view
    that differs most counts. Numbers that overflow in a view are infinitely far apart.
    """
    found = []
    for start in range(0, len(one), SLICE):
        cut = slice(start, start + SLICE)
        with np.errstate(all="ignore"):
            parts = [bound.ratio(*differences(*pair)) for *pair, bound in views(one[cut], other[cut], read)]
        found.append(np.max(parts, axis=0))
    apart: Array = np.nan_to_num(np.concatenate(found), nan=np.inf, posinf=np.inf)
    return apart


def views(one: Array, other: Array, read: Read | None) -> Iterator[tuple[Array, Array, Bound]]:
    """Yield two tensors [P, D] in each view, with the view's bound."""
    yield one, other, STATES
    yield after_norm(one), after_norm(other), STATES
    if read is not None:
        yield _centred(read(one)), _centred(read(other)), LOGITS


def _centred(logits: Array) -> Array:
    """Return logits without the part that is common to all tokens. Probabilities do not depend on
    it."""
    centred: Array = logits - logits.mean(axis=1, keepdims=True)
    return centred


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
    reported: Array,
    second: Array,
    third: Sequence[Array] = (),
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

    def is_backed(ally: Array) -> bool:
        """Return whether the third host sides with ``ally`` at a position where the two differ."""
        moved = np.max([distances(ally, each, read) for each in third], axis=0)
        return bool((apart > np.maximum(MARGIN * moved, 1)).any())

    is_wrong, is_doubted = is_backed(second), is_backed(reported)
    if is_wrong == is_doubted:
        return Verdict.UNDECIDED
    return Verdict.WRONG if is_wrong else Verdict.DOUBTED_WITNESS


def judge_exactly(reported: Array, second: Array, third: Sequence[Array] = ()) -> Verdict:
    """Return the verdict on outputs [P, D] of exact arithmetic: they are equal or wrong.

    ``second`` is what another host computed from the same inputs, and the one array of ``third``
    what one more host did.
    """
    if np.array_equal(reported, second):
        return Verdict.RIGHT
    if not third:
        return Verdict.OPEN
    if np.array_equal(third[0], second):
        return Verdict.WRONG
    return Verdict.DOUBTED_WITNESS if np.array_equal(third[0], reported) else Verdict.UNDECIDED
